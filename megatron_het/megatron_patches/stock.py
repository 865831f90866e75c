"""Patches of single functions of stock Megatron: norms, compiled helpers, machines without CUDA."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from megatron_het.megatron_patches.registry import Patch
from megatron_het.megatron_patches.releases import installed_release

_CORE, _TRAINING = "megatron.core", "megatron.training.training"
_NORM = f"{_CORE}.transformer.torch_norm.WrappedTorchNorm.__new__"
_HELPERS = f"{_CORE}.datasets.utils.compile_helpers"
_START = f"{_TRAINING}.initialize_megatron"
_INFERENCE = f"{_CORE}.tensor_parallel.inference_layers.is_inference_column_parallel_linear"

# torch's LayerNorm and RMSNorm under sequence parallelism, and with weights that are centred at zero.
#
# Upstream refuses both in the local layer specs.  Under sequence parallelism a norm weight's gradient is a partial
# sum per tensor-parallel rank: marking the weight ``sequence_parallel`` is all that ``finalize_model_grads`` needs to
# sum it, as upstream's own fused norms do.  Of a weight that is centred at zero (``--apply-layernorm-1p``) those norms
# add one before they scale.


def _norms(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not (config.sequence_parallel or config.layernorm_zero_centered_gamma):
            return original(cls, config, *args, **kwargs)
        # A plain copy: dataclasses.replace() would run the checks of the whole config again.
        without = copy.copy(config)
        without.sequence_parallel = without.layernorm_zero_centered_gamma = False
        norm = original(cls, without, *args, **kwargs)
        if config.layernorm_zero_centered_gamma:
            kind: Any = type(norm)
            norm = _centred(kind)(norm.normalized_shape, eps=norm.eps)
        if config.sequence_parallel:
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
        return norm

    return new_norm


@functools.cache
def _centred(kind: type) -> type:
    """One of torch's norms whose weight is what its scale has above one."""
    import torch
    from torch.nn import functional

    class ZeroCentred(kind):
        """Scales by ``weight + 1``; the weight starts at zero."""

        def reset_parameters(self) -> None:
            super().reset_parameters()
            torch.nn.init.zeros_(self.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Normalise ``[..., normalized_shape]``."""
            if isinstance(self, torch.nn.LayerNorm):
                return functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)
            return functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)

    ZeroCentred.__name__ = ZeroCentred.__qualname__ = f"ZeroCentred{kind.__name__}"
    return ZeroCentred


def _helpers_are_compiled() -> bool:
    try:
        importlib.import_module(f"{_CORE}.datasets.helpers_cpp")
    except ImportError:
        return False
    return True


def _no_make(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        """Nothing to do: the extension module is installed."""

    return compile_helpers


def _has_no_cuda() -> bool:
    import torch

    return not torch.cuda.is_available()


def _without_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    return initialize_megatron


def _no_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is None


def _none_of_inference(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(original)
    def is_inference_column_parallel_linear(module: Any) -> bool:
        """No module is: such layers are of Transformer Engine."""
        return False

    return is_inference_column_parallel_linear


OF_RELEASES: Mapping[str, tuple[Patch, ...]] = {
    "0.20": (
        Patch(
            name="inference_layers",
            group="stock",
            target="megatron.core.transformer.multi_token_prediction.is_inference_column_parallel_linear",
            reason=(
                "every layer for multi-token prediction asks whether its parts are of a class that is a stand-in, and "
                "no class, without Transformer Engine"
            ),
            sources={_INFERENCE: "3467e044ab79edf8f7e498769e5748a0f73bc9ab59e3ed4016a6941d5eb2939a"},
            build=_none_of_inference,
            applies=_no_transformer_engine,
            version="0.20.0",
        ),
    )
}
"""Patches of what is not in every release."""

PATCHES = (
    *OF_RELEASES.get(installed_release().name, ()),
    Patch(
        name="torch_norm",
        group="stock",
        target=_NORM,
        reason=(
            "the local layer specs refuse sequence parallelism and zero-centred weights with torch norms; four "
            "modules have bound the class by name, so its constructor is the one place that serves all"
        ),
        sources={
            _NORM: "cc9c1081725484cdd806a4a1b1bff6dc1e0ce87fe05e818807400dd24f19b24b",
            "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads": (
                "b8b3681b2ba049de9c477aa153bc0a30909824243ebf411c9148d22860023b23"
            ),
        },
        build=_norms,
    ),
    Patch(
        name="dataset_helpers",
        group="stock",
        target=_HELPERS,
        reason=(
            "the wheel of megatron-core ships helpers_cpp compiled and without its Makefile; "
            "upstream runs make regardless and exits when that fails"
        ),
        sources={_HELPERS: "7d377207e3e51a8fde194d6a8787ae945497efcfb763f629c6f5daa908ed3885"},
        build=_no_make,
        applies=_helpers_are_compiled,
    ),
    Patch(
        name="no_cuda",
        group="stock",
        target=_START,
        reason=(
            "pretrain() calls it without allow_no_cuda and so asserts torch.cuda.is_available(), "
            "which has to stay False without CUDA: torch's own code decides by it"
        ),
        sources={_START: "c813ba71782bfc73b34c63eff93775eacb37bef8b41c1a78b3315577f0389ef3"},
        build=_without_cuda,
        applies=_has_no_cuda,
    ),
)
