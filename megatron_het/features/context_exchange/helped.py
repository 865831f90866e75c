"""Attention for another device where documents or a sliding window limit what its queries reach.

As ``context_exchange.py`` does where they reach everything: the helper knows what is reached as the owner does, and
makes the same blocks (``reach.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_het.attention.calls import Attended, Call, Sum, differentiate
from megatron_het.attention.kernels import Gradients, Kernel
from megatron_het.attention.reach import Reach, Span
from megatron_het.features.context_exchange.helper import Part


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

    def calls(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Call]:
        """The calls of the kernel that the owner would make."""
        at: dict[Span, int] = {}
        for span in self.keys:
            at[span] = sum(end - first for first, end in at)
        row = 0
        for first, end in self.rows:
            for sequences, blocks in self.reach.blocks((first, end), self.keys, query.shape[1]):
                for block in blocks:
                    span = next(s for s in self.keys if s[0] <= block.keys[0] < s[1])
                    held = slice(*(at[span] + token - span[0] for token in block.keys))
                    rows = slice(row + block.rows[0] - first, row + block.rows[1] - first)
                    k, v = keys[held, sequences], values[held, sequences]
                    yield Call(block.form, k, v, rows, sequences, own=held)
            row += end - first


def attend_reached(
    query: torch.Tensor, parts: Sequence[Part], reached: Reached, kernel: Kernel, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the query's type and log-sum-exp; of queries that reach nothing zero, and minus infinity."""
    rows = Attended(query, has_blanks=True)
    rows.attend(reached.calls(query, *_joined(parts)), kernel, scale)
    return rows.out.to(query.dtype), rows.lse


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
    query, (keys, values) = mine[1], _joined(parts)
    sums = Sum(query), Sum(keys), Sum(values)
    differentiate(reached.calls(query, keys, values), mine, sums, kernel, scale)
    dq, dk, dv = (part.total.to(query.dtype) for part in sums)
    return dq, dk, dv


def _joined(parts: Sequence[Part]) -> Part:
    keys, values = (torch.cat(own) if len(own) > 1 else own[0] for own in zip(*parts, strict=True))
    return keys, values
