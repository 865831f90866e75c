"""Several tensors as one message of bytes: what goes to one rank at one time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def pack(*tensors: torch.Tensor) -> torch.Tensor:
    """Tensors as one message; those of larger elements first, so that all are aligned."""
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])


def unpack(message: torch.Tensor, parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    """Views of the tensors in a message."""
    found, at = [], 0
    for shape, dtype in parts:
        size = math.prod(shape) * dtype.itemsize
        found.append(message[at : at + size].view(dtype).view(shape))
        at += size
    return found
