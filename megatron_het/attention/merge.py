"""Online-softmax merge of two partial attention results."""

from __future__ import annotations

import torch


def in_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a type; itself, without a call, if it has it: a slice asks many times, and seldom needs it."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def merge_(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """Merge attention over other keys into ``out``, in place.

    ``out * exp(lse - n) + other * exp(other_lse - n)`` with ``n = logaddexp(lse, other_lse)`` is a
    linear interpolation with weight ``sigmoid(other_lse - lse)``.

    Args:
        out: ``[s, b, heads, d]``, fp32 or fp64; changed.
        lse: ``[b, heads, s]``.
        other: ``[s, b, heads, d]``, any type.
        other_lse: ``[b, heads, s]``.

    Returns:
        The merged log-sum-exp; ``lse`` is left alone.
    """
    weight = torch.sigmoid(other_lse - lse).permute(2, 0, 1).unsqueeze(-1)
    out.lerp_(in_type(other, out.dtype), in_type(weight, out.dtype))
    return torch.logaddexp(lse, other_lse)
