"""Layers that save less from forward to backward (SlimPipe, section 5).

Norms and activation functions need no more than their input (and a number or two per token) in the backward.
PyTorch's LayerNorm and GELU, and Megatron's fusion of GELU with a bias, already save no more.
"""

from typing import Any

from megatron_het.features.base import Feature, NoOptions, Option, Refusal
from megatron_het.plan import Plan

_UNFUSED = ("activation_func_clamp_value", "glu_linear_offset", "use_te_activation_func")
"""Arguments that Megatron's fusion of SwiGLU ignores silently, or refuses with a traceback."""


class ThriftyLayers(Feature):
    """RMSNorm and SwiGLU that save only their input."""

    name = "thrifty_layers"
    title = "thrifty layers"
    switch = Option(
        "thrifty_layers",
        flag="--het-thrifty-layers",
        help="RMSNorm and SwiGLU keep only their input from forward to backward, as LayerNorm and GELU do without it",
        problem="must be true or false",
    )

    def check_arguments(self, plan: Plan, options: NoOptions, args: Any) -> None:
        """Refuse options of SwiGLU without support in the fused one, if only this feature switches that on."""
        reason = "SwiGLU that keeps only its input is Megatron's fused one, without it"
        for name in _UNFUSED if args.swiglu and not args.bias_swiglu_fusion else ():
            Refusal(name, reason).check(args, self.title)

    def apply(self, plan: Plan, options: NoOptions, args: Any) -> None:
        """Switch on Megatron's fused SwiGLU, which saves only its input."""
        if args.swiglu:
            args.bias_swiglu_fusion = True
