"""Calls of attention kernels: which queries attend to which keys, and how what the calls give is added up.

Everything that attends to keys in parts does it here: slices, ranks that share a slice, and helpers of other devices.
Outputs are merged by online softmax.  A result for all rows that comes first is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_het.attention.kernels import Gradients, Kernel
from megatron_het.attention.kv_cache import Run
from megatron_het.attention.reach import Form

# Online-softmax merge of two partial attention results.


def in_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a type; itself, without a call, if it has it: a slice asks many times, and seldom needs it."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def merge_(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, *, both_empty: bool = False
) -> torch.Tensor:
    """Merge attention over other keys into ``out``, in place.

    ``out * exp(lse - n) + other * exp(other_lse - n)`` with ``n = logaddexp(lse, other_lse)`` is a
    linear interpolation with weight ``sigmoid(other_lse - lse)``.

    Args:
        out: ``[s, b, heads, d]``, fp32 or fp64; changed.
        lse: ``[b, heads, s]``.
        other: ``[s, b, heads, d]``, any type.
        other_lse: ``[b, heads, s]``.
        both_empty: Whether a query may have no keys in either, and minus infinity in both.

    Returns:
        The merged log-sum-exp; ``lse`` is left alone.
    """
    weight = torch.sigmoid(other_lse - lse)
    if both_empty:
        weight = weight.masked_fill(other_lse == -torch.inf, 0.0)
    out.lerp_(in_type(other, out.dtype), in_type(weight.permute(2, 0, 1).unsqueeze(-1), out.dtype))
    return torch.logaddexp(lse, other_lse)


EVERY = slice(None)


@dataclass(slots=True)  # not frozen: one is made for every call
class Call:
    """One call of a kernel.

    Attributes:
        form: Which keys a query sees.
        keys: ``[n, b, groups, d]``, of the call's sequences.
        values: The same of the values.
        rows: Which queries; ``EVERY`` for all of them.
        sequences: Of which sequences of the microbatch.
        run: Cached chunks, which the first of the keys are of.
        own: Which of the slice's own keys the others are; None where all are cached.
        window: How many keys before its own a query sees at most; None for all.
        opens: Whether it is the first call of its rows.
    """

    form: Form
    keys: torch.Tensor
    values: torch.Tensor
    rows: slice = EVERY
    sequences: slice = EVERY
    run: Run | None = None
    own: slice | None = None
    window: int | None = None
    opens: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all queries are in it."""
        return self.rows is EVERY and self.sequences is EVERY


@dataclass(slots=True)
class Attended:
    """Queries ``[s, b, heads, d]`` and their attention so far.

    Attributes:
        query: The queries.
        has_blanks: Whether there may be queries that see nothing: zero, and minus infinity.
    """

    query: torch.Tensor
    has_blanks: bool = False
    _out: torch.Tensor | None = None
    _lse: torch.Tensor | None = None

    @property
    def out(self) -> torch.Tensor:
        """Output ``[s, b, heads, d]``, in the query's type or a wider one."""
        return self._room()[0] if self._out is None else self._out

    @property
    def lse(self) -> torch.Tensor:
        """Log-sum-exp ``[b, heads, s]``."""
        return self._room()[1] if self._lse is None else self._lse

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add attention of all queries to other keys."""
        if self._out is None or self._lse is None:
            self._out, self._lse = out, lse
            return
        self._out = in_type(self._out, _wide(self.query))
        self._lse = merge_(self._out, self._lse, out, lse, both_empty=self.has_blanks)

    def attend(self, calls: Iterable[Call], kernel: Kernel, scale: float) -> None:
        """Make calls, and add what they give."""
        for call in calls:
            if call.is_whole:
                self.merge(*_forward(kernel, call, self.query, scale))
                continue
            rows, batch = call.rows, call.sequences
            part, part_lse = _forward(kernel, call, self.query[rows, batch], scale)
            out, lse = self._room()
            if call.opens:
                out[rows, batch], lse[batch, :, rows] = part, part_lse
            else:
                lse[batch, :, rows] = merge_(out[rows, batch], lse[batch, :, rows], part, part_lse)

    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, in a wide type, and log-sum-exp, to which results of some queries can be added."""
        query = self.query
        if self._out is None or self._lse is None:
            self._out = query.new_zeros(query.shape, dtype=_wide(query))
            self._lse = self._out.new_full((query.shape[1], query.shape[2], query.shape[0]), -torch.inf)
        self._out = in_type(self._out, _wide(query))
        return self._out, self._lse


class Sum:
    """Gradients of one tensor, added up; in a wide type as soon as there are two.

    Args:
        like: The tensor.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._total: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        """The sum; may be changed."""
        like = self._like
        return torch.zeros_like(like, dtype=_wide(like)) if self._total is None else self._total

    def add(self, part: torch.Tensor, rows: slice = EVERY, sequences: slice = EVERY) -> None:
        """Add a gradient of some rows of some sequences."""
        is_whole = part.shape == self._like.shape
        if self._total is None and is_whole:
            self._total = part
            return
        self._total = in_type(self.total, _wide(self._like))
        (self._total if is_whole else self._total[rows, sequences]).add_(part)


Sums = tuple[Sum, Sum, Sum]
"""Of queries, keys and values."""


def differentiate(
    calls: Iterable[Call],
    mine: Sequence[torch.Tensor],
    sums: Sums,
    kernel: Kernel,
    scale: float,
    cached: Callable[[Run, torch.Tensor, torch.Tensor, slice | None], None] | None = None,
) -> None:
    """Add up the gradients of calls.

    Args:
        calls: Those of the forward.
        mine: Gradient of the output, query, whole output and whole log-sum-exp.
        sums: What gradients of the query, of own keys and of own values are added to.
        kernel: Does the work.
        scale: Factor of the scores.
        cached: Is given the gradients of cached keys and values, and the sequences that they are of.
    """
    grad, query, out, lse = mine
    for call in calls:
        rows, batch, given = call.rows, call.sequences, (grad, query, out, lse)
        if not call.is_whole:
            given = grad[rows, batch], query[rows, batch], out[rows, batch], lse[batch, :, rows].contiguous()
        dq, dk, dv = _backward(kernel, call, *given, scale)
        sums[0].add(dq, rows, batch)
        earlier, own = (dk, dv), (dk, dv)
        if call.run is not None and call.own is not None:
            sizes = [call.run.keys.shape[0], dk.shape[0] - call.run.keys.shape[0]]
            earlier, own = zip(dk.split(sizes), dv.split(sizes), strict=True)
        if call.own is not None:
            for total, part in zip(sums[1:], own, strict=True):
                total.add(part, call.own, batch)
        if call.run is not None:
            assert cached is not None
            cached(call.run, *earlier, None if batch is EVERY else batch)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _forward(kernel: Kernel, call: Call, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a call."""
    if call.form is not Form.REVERSED:
        return kernel.forward(q, call.keys, call.values, call.form is Form.CAUSAL, scale, call.window)
    out, lse = kernel.forward(q.flip(0), call.keys.flip(0), call.values.flip(0), True, scale)
    return out.flip(0), lse.flip(-1)


def _backward(
    kernel: Kernel, call: Call, grad: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scale: float
) -> Gradients:
    """Gradients of a call, from the output and log-sum-exp of the whole attention."""
    k, v = call.keys, call.values
    if call.form is not Form.REVERSED:
        return kernel.backward(grad, q, k, v, out, lse, call.form is Form.CAUSAL, scale, call.window)
    grad, q, out, k, v = (t.flip(0) for t in (grad, q, out, k, v))
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse.flip(-1), True, scale)
    return dq.flip(0), dk.flip(0), dv.flip(0)
