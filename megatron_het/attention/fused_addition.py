"""Addition to two tensors by one Triton kernel; imported only if Triton is installed."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _add_pair(
    first: Any, second: Any, more_first: Any, more_second: Any, size: Any, second_size: Any, block: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    if tl.program_id(1) == 0:
        here = at < size
        total = tl.load(first + at, mask=here).to(tl.float32) + tl.load(more_first + at, mask=here).to(tl.float32)
        tl.store(first + at, total.to(first.dtype.element_ty), mask=here)
    else:
        here = at < second_size
        total = tl.load(second + at, mask=here).to(tl.float32) + tl.load(more_second + at, mask=here).to(tl.float32)
        tl.store(second + at, total.to(second.dtype.element_ty), mask=here)


def add_pair(first: Tensor, second: Tensor, more_first: Tensor, more_second: Tensor) -> None:
    """Add to two tensors in place, computing in fp32; all are contiguous and of at most fp32 precision."""
    blocks = triton.cdiv(max(first.numel(), second.numel()), _BLOCK)
    _add_pair[blocks, 2](first, second, more_first, more_second, first.numel(), second.numel(), block=_BLOCK)
