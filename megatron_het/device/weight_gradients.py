"""Weight gradients added to fp32 sums by the product itself, where Apex is not installed.

Megatron takes these two functions from Apex's extension ``fused_weight_gradient_mlp_cuda``.  Without fusion a product
writes a gradient in bf16, which another kernel reads and adds to the sum: more memory, and for every slice or
microbatch three passes over all gradients instead of one.
"""

import functools
import importlib.machinery
import importlib.util
import sys
import types

import torch
from torch import Tensor

NAME = "fused_weight_gradient_mlp_cuda"


def provide() -> None:
    """Let Megatron find the extension, if it is not installed; before ``megatron.core`` is imported."""
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        return
    module = types.ModuleType(NAME, __doc__)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    sys.modules[NAME] = module


def accumulate(source: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight to a sum, in place.

    Args:
        source: Input ``[tokens, in]`` of the layer.
        grad: Gradient ``[tokens, out]`` of its output.
        total: ``[out, in]``, in the type of both or in fp32.
    """
    if total.dtype is source.dtype:
        total.addmm_(grad.t(), source)
    elif _can_widen(total.device, source.dtype):
        torch.ops.aten.addmm.dtype_out(total, grad.t(), source, total.dtype, out=total)
    else:
        total.add_(grad.t().mm(source))


@functools.lru_cache(maxsize=8)
def _can_widen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of a narrow type are added to fp32 in one kernel on a device, by a trial."""
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.full((16, 16), 2.0**-14, device=device)  # lost where the sum has been rounded to the narrow type
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except (RuntimeError, AttributeError):  # not on this device, or not in this torch
        return False
    return bool((total == 16 + 2.0**-14).all())
