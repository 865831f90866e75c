"""Attention for another device where documents or a sliding window limit what its queries reach.

As ``context_exchange.py`` does where they reach everything: the helper knows what is reached as the owner does, and
makes the same blocks (``reach.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_het.attention.context_exchange import Part
from megatron_het.attention.kernels import Gradients, Kernel
from megatron_het.attention.limited import kernel_backward, kernel_forward
from megatron_het.attention.merge import merge_
from megatron_het.attention.reach import Form, Reach, Span


@dataclass(frozen=True, slots=True)
class Reached:
    """Whose attention it is.

    Attributes:
        reach: What limits it.
        rows: Tokens of the sequence that the queries are, in the order of their rows.
        keys: The same of the keys and values.
    """

    reach: Reach
    rows: tuple[Span, ...]
    keys: tuple[Span, ...]

    def calls(self, batch: int) -> Iterator[tuple[slice, slice, Form, slice]]:
        """(rows, sequences, form, rows of the keys) of every call of the kernel."""
        at: dict[Span, int] = {}
        for span in self.keys:
            at[span] = sum(end - first for first, end in at)
        row = 0
        for first, end in self.rows:
            for sequences, blocks in self.reach.blocks((first, end), self.keys, batch):
                for block in blocks:
                    span = next(s for s in self.keys if s[0] <= block.keys[0] < s[1])
                    lo, hi = (at[span] + token - span[0] for token in block.keys)
                    rows = slice(row + block.rows[0] - first, row + block.rows[1] - first)
                    yield rows, sequences, block.form, slice(lo, hi)
            row += end - first


def attend_reached(
    query: torch.Tensor, parts: Sequence[Part], reached: Reached, kernel: Kernel, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the query's type and log-sum-exp; of queries that reach nothing zero, and minus infinity."""
    keys, values = _joined(parts)
    out = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
    lse = out.new_full((query.shape[1], query.shape[2], query.shape[0]), -torch.inf)
    for rows, batch, form, held in reached.calls(query.shape[1]):
        part = kernel_forward(kernel, query[rows, batch], keys[held, batch], values[held, batch], form, scale)
        lse[batch, :, rows] = merge_(out[rows, batch], lse[batch, :, rows], *part)
    return out.to(query.dtype), lse


def attend_reached_backward(
    mine: Sequence[torch.Tensor], parts: Sequence[Part], reached: Reached, kernel: Kernel, scale: float
) -> Gradients:
    """Gradients of the query, keys and values, in the query's type.

    Args:
        mine: Gradient of the owner's output, its query, its whole output and its whole log-sum-exp.
        parts: (keys, values) that the queries attend to here.
        reached: Whose attention it is.
        kernel: Does the work.
        scale: Factor of the scores.
    """
    grad, query, out, lse = mine
    keys, values = _joined(parts)
    wide = torch.promote_types(query.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (query, keys, values))
    for rows, batch, form, held in reached.calls(query.shape[1]):
        given = grad[rows, batch], query[rows, batch], out[rows, batch], lse[batch, :, rows].contiguous()
        found = kernel_backward(kernel, *given, keys[held, batch], values[held, batch], form, scale)
        for total, place, part in zip((dq, dk, dv), (rows, held, held), found, strict=True):
            total[place, batch] += part
    return dq.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype)


def _joined(parts: Sequence[Part]) -> Part:
    keys, values = (torch.cat(own) if len(own) > 1 else own[0] for own in zip(*parts, strict=True))
    return keys, values
