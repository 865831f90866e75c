"""A slice, the keys that are there for it, and the calls of a kernel that its queries need."""

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megatron_het.attention.calls import Call, Form, Reach
from megatron_het.attention.kernels import Kernel
from megatron_het.attention.kv_cache import KVCache
from megatron_het.families import family_of_model
from megatron_het.plan.placement import Blocks

# Rotary positions of a slice, applied by the node of its attention.
#
# Megatron makes cosines and sines anew for the queries and the keys of every layer, and autograd follows ten small
# operations for each of them.  A slice pays that once per layer, however short it is.  Here the cosines and sines of
# the whole sequence are made once; a slice takes views of them, and a rotation is undone in the backward by three
# operations.


# The tokens of some blocks of a sequence.


def take_blocks(tensor: Tensor, blocks: Blocks, dim: int) -> Tensor:
    """The tokens of some blocks; a view if there is only one."""
    parts = [tensor.narrow(dim, first, end - first) for first, end in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def take_rows(tensor: Tensor, rows: Sequence[slice], dim: int) -> Tensor:
    """Some rows of a tensor; a view if they are next to each other."""
    parts = [tensor.narrow(dim, part.start, part.stop - part.start) for part in rows]
    return torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0] if parts else tensor.narrow(dim, 0, 0)


def row_count(rows: Sequence[slice]) -> int:
    """How many rows there are."""
    return sum(part.stop - part.start for part in rows)


def held_before(blocks: Blocks, token: int) -> int:
    """How many tokens at the start of some blocks come before a token."""
    found = 0
    for first, end in blocks:
        found += min(max(token - first, 0), end - first)
        if token < end:
            break
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosines and sines of some tokens."""

    cos: Tensor  # ``[s, 1, 1, r]`` in the type of queries and keys, of which the first ``r`` channels are rotated
    sin: Tensor
    interleaved: bool = False  # whether neighbouring channels are a pair; otherwise a pair is half of ``r`` apart

    def turn(self, tensor: Tensor) -> Tensor:
        """Rotate ``[s, b, heads, d]`` by its positions; a new tensor."""
        sines = self._halves(self.sin)
        return self._turned(tensor, (sines[0], -1.0), (sines[1], 1.0))

    def turn_back(self, gradient: Tensor) -> Tensor:
        """The gradient of what was rotated, of that of the result; a new tensor."""
        sines = self._halves(self.sin)
        return self._turned(gradient, (sines[1], 1.0), (sines[0], -1.0))

    def _turned(self, tensor: Tensor, first: tuple[Tensor, float], second: tuple[Tensor, float]) -> Tensor:
        """``tensor * cos``, to each half of which the other one is added, times a sine and a factor."""
        width = self.cos.shape[-1]
        if width == tensor.shape[-1]:
            out = turned = tensor * self.cos
        else:
            out = tensor.clone(memory_format=torch.contiguous_format)
            tensor, turned = tensor[..., :width], out[..., :width]
            turned.mul_(self.cos)
        halves = zip(self._halves(turned), reversed(self._halves(tensor)), (first, second), strict=True)
        for half, other, (sine, factor) in halves:
            half.addcmul_(other, sine, value=factor)
        return out

    def _halves(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second channel of every pair."""
        if self.interleaved:
            return tensor[..., ::2], tensor[..., 1::2]
        first, second = tensor.chunk(2, dim=-1)
        return first, second


class Rotations:
    """The rotations of slices, out of the table of angles that a model gives to its layers.

    Args:
        factor: What cosines and sines are multiplied with (YaRN).
    """

    def __init__(self, config: Any, factor: float = 1.0) -> None:
        self._config = config
        self._factor = factor
        self._table: Tensor | None = None
        self._whole: Rotation | None = None

    @classmethod
    def of(cls, model: Any) -> "Rotations | None":
        """Positions of a chunk whose core attention is slice attention; None where its layers rotate themselves."""
        config, layers = model.config, family_of_model(model).attention_layers(model)
        if config.apply_rope_fusion or config.multi_latent_attention or not layers:
            return None
        return cls(config, float(layers[0].layer.self_attention._yarn_concentration_factor))

    def part(self, table: Tensor, blocks: Blocks) -> Rotation | None:
        """The rotation of the tokens of a slice.

        Args:
            table: Angles ``[length, 1, 1, r]`` of the sequence; Megatron keeps and repeats one tensor.

        Returns:
            None where sequences have angles of their own, which their layers then see to.
        """
        if table.dim() != 4 or table.shape[1:3] != (1, 1):
            return None
        if self._whole is None or table is not self._table:
            cos, sin = ((of(table) * self._factor).to(self._config.params_dtype) for of in (torch.cos, torch.sin))
            self._table, self._whole = table, Rotation(cos, sin, self._config.rotary_interleaved)
        whole = self._whole
        cos, sin = take_blocks(whole.cos, blocks, dim=0), take_blocks(whole.sin, blocks, dim=0)
        return Rotation(cos, sin, whole.interleaved)


# What a layer's attention exchanges with other devices (SlimPipe, section 4.2), as slice attention sees it.


# Several tensors as one message of bytes: what goes to one rank at one time.


def pack(*tensors: Tensor) -> Tensor:
    """Tensors as one message; those of larger elements first, so that all are aligned."""
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])


def unpack(message: Tensor, parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Views of the tensors in a message."""
    found, at = [], 0
    for shape, dtype in parts:
        size = math.prod(shape) * dtype.itemsize
        found.append(message[at : at + size].view(dtype).view(shape))
        at += size
    return found


Given = tuple[int, int]  # tokens ``[first, end)`` whose keys and values others attend to, as the cache counts them
NOTHING: Given = 0, 0
TokenGradient = tuple[int, int, Tensor, Tensor]  # first token, end of tokens, gradients of their keys and values


class LayerExchange:
    """Holds what one layer exchanges with other devices in the pass that runs: here nothing, it keeps all attention.

    Per direction: ``begin`` hands queries out, :meth:`help` works for others, ``end`` waits for the
    results, in this order and with the layer's own attention in between.
    """

    @property
    def is_active(self) -> bool:
        """Whether the pass that runs gives attention away or attends for others; else none of these is called."""
        return False

    def begin_forward(self, query: Tensor) -> Given:
        """Hand the query out; returns the tokens that are given away."""
        return NOTHING

    def help(self, kernel: Kernel, scale: float) -> None:
        """Attend, or differentiate attention, for other devices."""

    def end_forward(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Output and log-sum-exp of the parts given away."""
        return ()

    def begin_backward(self, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor) -> Given:
        """Hand the gradient of the output out; returns the tokens given away."""
        return NOTHING

    def end_backward(self) -> Iterable[tuple[Tensor, list[TokenGradient]]]:
        """Parts given away: gradient of the query, and what is complete of those of keys and values."""
        return ()


NO_EXCHANGE = LayerExchange()
UNLIMITED = Reach()
Own = tuple[Tensor, Tensor]  # a slice's own keys and values


class Keys(enum.Enum):
    """Which keys calls are made for."""

    OWN = enum.auto()
    EARLIER = enum.auto()  # those of earlier slices
    ALL = enum.auto()  # both, in as few calls as the kernel can


Rows = tuple[tuple[slice, ...], ...]  # some rows of each of the other ranks, in the order of their rows


@dataclass(frozen=True, slots=True)
class Travels:
    """Queries that see keys of other ranks; the others stay where they are."""

    sent: Rows  # of this rank's rows, those that go to each of the others
    received: tuple[int, ...]  # how many come from each of the others
    is_any: bool = True  # whether there are any between any two of the ranks


class Sharing(Protocol):
    """The ranks that share slices with this one (``features/context_parallel/runtime.py``).

    ``[S, ...]`` are rows of the other ranks, in one order; calls are collectives, waited for by what they return.
    """

    size: int  # how many ranks there are
    rank: int  # which of them this one is

    def __hash__(self) -> int: ...

    @property
    def others(self) -> Sequence[int]:
        """The other ranks, in the order of their rows."""

    def by_rank(self, own: int) -> Sequence[Blocks]:
        """Tokens of a slice that each rank has, of which this one has so many."""

    def swap(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
        """Send each rank its tensor, and get one of each, of these shapes and one type."""

    def seen(self, own: int) -> Sequence[tuple[slice, slice]]:
        """Rows of the others' queries, and which of this rank's ``own`` keys of their slice these see."""

    def gather(self, *tensors: Tensor, travels: Travels | None = None) -> Callable[[], tuple[Tensor, ...]]:
        """Start to collect the others' rows ``[S, ...]`` of tensors ``[s, ...]``, all of them or those that travel."""

    def give_back(self, *tensors: Tensor, travels: Travels | None = None) -> Callable[[], Sequence[tuple[Tensor, ...]]]:
        """Start to send each of the others its rows; what it returns gives this rank's rows, by sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceContext:
    """Holds what the attention of a slice needs besides its tensors."""

    cache: KVCache  # holds the slices before this one; gets this one
    kernel: Kernel
    microbatch: int  # key in the cache
    index: int
    scale: float
    exchange: LayerExchange = NO_EXCHANGE  # what this layer exchanges with other devices
    parallel: Sharing | None = None  # the ranks that share the slice, None for this one alone
    reach: Reach = UNLIMITED  # documents and window that limit what queries see
    rotation: Rotation | None = None  # what queries and keys are rotated by first; None if they are


@dataclass(frozen=True, slots=True)
class WholePlace:
    """A slice whose queries see everything before them."""

    context: SliceContext
    tokens: int
    given_tokens: int = 0  # those at the start of the sequence that other devices attend to
    unread: ClassVar[int] = 0  # how many own tokens at the start no later slice reads
    travels: ClassVar[Travels | None] = None  # the queries that see keys of other ranks; None where all do, or no one

    def travelling(self) -> "WholePlace":
        """The place where the others' rows are those that travel."""
        return self

    def without(self, given: Given) -> "WholePlace":
        """The place without keys that other devices attend to."""
        return self if given == NOTHING else replace(self, given_tokens=given[1])

    def calls(self, keys: Keys, own: Own, batch: int, others: bool = False) -> Iterator[Call]:
        """The calls for some of the keys.

        Args:
            own: The slice's own keys and values.
            others: Whether the rows are those of the other ranks.
        """
        context = self.context
        cache, place = context.cache, (context.microbatch, context.index)
        line = cache.line(*place) if keys is Keys.ALL and self._is_joined() else None
        if line is not None:
            whole, before = line
            yield Call(Form.CAUSAL, whole.keys, whole.values, run=before, own=slice(0, self.tokens))
            return
        if keys is not Keys.EARLIER and others:
            assert context.parallel is not None
            for rows, held in context.parallel.seen(self.tokens):
                yield Call(Form.FULL, own[0][held], own[1][held], rows, own=held)
        elif keys is not Keys.EARLIER:
            yield Call(Form.CAUSAL, *own, own=slice(0, self.tokens))
        if keys is not Keys.OWN:
            for run in cache.prefix(*place, self.given_tokens):
                yield Call(Form.FULL, run.keys, run.values, run=run)

    def _is_joined(self) -> bool:
        """Whether the kernel can attend to all keys at once, and they are there as they are."""
        context = self.context
        before = context.cache.begin_of(context.microbatch, context.index)
        return (
            before > 0 and not context.cache.expands and context.kernel.takes_prefix(self.tokens, before + self.tokens)
        )
