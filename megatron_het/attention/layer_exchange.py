"""What a layer's attention exchanges with other devices (SlimPipe, section 4.2), as slice attention sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from megatron_het.attention.kernels import Kernel

# Several tensors as one message of bytes: what goes to one rank at one time.


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


Given = tuple[int, int]
"""Tokens ``[first, end)`` whose keys and values others attend to, as the cache counts them."""
NOTHING: Given = 0, 0
TokenGradient = tuple[int, int, torch.Tensor, torch.Tensor]
"""First token, end of tokens, gradients of their keys and values."""


class LayerExchange(Protocol):
    """Holds what one layer exchanges with other devices in the pass that runs; nothing in most passes.

    Per direction: ``begin`` hands queries out, ``help`` attends for others, ``end`` waits for the
    results, in this order and with the layer's own attention in between.
    """

    @property
    def is_active(self) -> bool:
        """Whether the pass that runs gives attention away or attends for others; else none of these is called."""

    def begin_forward(self, query: torch.Tensor) -> Given:
        """Hand the query out; returns the tokens that are given away."""

    def help_forward(self, kernel: Kernel, scale: float) -> None:
        """Attend for other devices."""

    def end_forward(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Output and log-sum-exp of the parts given away."""

    def begin_backward(self, grad: torch.Tensor, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Given:
        """Hand the gradient of the output out; returns the tokens given away."""

    def help_backward(self, kernel: Kernel, scale: float) -> None:
        """Differentiate attention for other devices."""

    def end_backward(self) -> Iterable[tuple[torch.Tensor, list[TokenGradient]]]:
        """Parts given away: gradient of the query, and what is complete of those of keys and values."""


class NoExchange:
    """A layer that keeps all attention to itself."""

    is_active = False

    def begin_forward(self, query: torch.Tensor) -> Given:
        """See :class:`LayerExchange`."""
        return NOTHING

    def help_forward(self, kernel: Kernel, scale: float) -> None:
        """See :class:`LayerExchange`."""

    def end_forward(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """See :class:`LayerExchange`."""
        return ()

    def begin_backward(self, grad: torch.Tensor, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Given:
        """See :class:`LayerExchange`."""
        return NOTHING

    def help_backward(self, kernel: Kernel, scale: float) -> None:
        """See :class:`LayerExchange`."""

    def end_backward(self) -> Iterable[tuple[torch.Tensor, list[TokenGradient]]]:
        """See :class:`LayerExchange`."""
        return ()


NO_EXCHANGE = NoExchange()
