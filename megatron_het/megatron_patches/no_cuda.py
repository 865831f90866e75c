"""Starting ``megatron.training`` on a machine without CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_het.megatron_patches.registry import Patch

_TARGET = "megatron.training.training.initialize_megatron"


def _without_cuda() -> bool:
    import torch

    return not torch.cuda.is_available()


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    return initialize_megatron


PATCHES = (
    Patch(
        name="no_cuda",
        group="stock",
        target=_TARGET,
        reason=(
            "pretrain() calls it without allow_no_cuda and so asserts torch.cuda.is_available(), "
            "which has to stay False without CUDA: torch's own code decides by it"
        ),
        sources={_TARGET: "c813ba71782bfc73b34c63eff93775eacb37bef8b41c1a78b3315577f0389ef3"},
        build=_build,
        applies=_without_cuda,
    ),
)
