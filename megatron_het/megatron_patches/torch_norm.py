"""torch's LayerNorm and RMSNorm under sequence parallelism, and with weights that are centred at zero.

Upstream refuses both in the local layer specs.  Under sequence parallelism a norm weight's gradient is a partial
sum per tensor-parallel rank: marking the weight ``sequence_parallel`` is all that ``finalize_model_grads`` needs to
sum it, as upstream's own fused norms do.  Of a weight that is centred at zero (``--apply-layernorm-1p``) those norms
add one before they scale.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from megatron_het.megatron_patches.registry import Patch

_TARGET = "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__"


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
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


PATCHES = (
    Patch(
        name="torch_norm",
        group="stock",
        target=_TARGET,
        reason=(
            "the local layer specs refuse sequence parallelism and zero-centred weights with torch norms; four "
            "modules have bound the class by name, so its constructor is the one place that serves all"
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
