"""torch's LayerNorm and RMSNorm under sequence parallelism.

Upstream refuses the combination in the local layer specs, because a norm weight's gradient is then
a partial sum per tensor-parallel rank.  Marking the weight ``sequence_parallel`` is all that
``finalize_model_grads`` needs to sum it, as upstream's own fused norms do.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from megatron_het.upstream.registry import Patch

_TARGET = "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__"


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        # A plain copy: dataclasses.replace() would run the checks of the whole config again.
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = original(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new_norm


PATCHES = (
    Patch(
        name="torch_norm",
        group="stock",
        target=_TARGET,
        reason=(
            "the local layer specs refuse sequence parallelism with torch norms; four modules "
            "have bound the class by name, so its constructor is the one place that serves all"
        ),
        sources={
            _TARGET: "cc9c1081725484cdd806a4a1b1bff6dc1e0ce87fe05e818807400dd24f19b24b",
            "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads": (
                "b8b3681b2ba049de9c477aa153bc0a30909824243ebf411c9148d22860023b23"
            ),
        },
        build=_build,
    ),
)
