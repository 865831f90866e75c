"""The compiled helpers of upstream's datasets: no ``make`` where they import already."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from megatron_het.megatron_patches.registry import Patch

_TARGET = "megatron.core.datasets.utils.compile_helpers"


def _helpers_are_compiled() -> bool:
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return False
    return True


def _build(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        """Nothing to do: the extension module is installed."""

    return compile_helpers


PATCHES = (
    Patch(
        name="dataset_helpers",
        group="stock",
        target=_TARGET,
        reason=(
            "the wheel of megatron-core ships helpers_cpp compiled and without its Makefile; "
            "upstream runs make regardless and exits when that fails"
        ),
        sources={_TARGET: "7d377207e3e51a8fde194d6a8787ae945497efcfb763f629c6f5daa908ed3885"},
        build=_build,
        applies=_helpers_are_compiled,
    ),
)
