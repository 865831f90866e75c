"""A slice, the keys available to it, and the kernel calls that its queries need."""

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

# Rotary positions of a slice, applied inside the autograd function of its attention.
#
# Megatron computes cosines and sines anew for the queries and the keys of every layer, and autograd records ten small
# operations for each of them.  Every slice would pay this cost in every layer, however short it is.  Here cosines and
# sines of the whole sequence are computed once; a slice takes views of them, and the backward of a rotation takes
# three operations.


# The tokens of some blocks of a sequence.


def take_blocks(tensor: Tensor, blocks: Blocks, dim: int) -> Tensor:
    """The tokens of ``blocks`` along a dimension; a view if there is only one block."""
    parts = [tensor.narrow(dim, first, end - first) for first, end in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def take_rows(tensor: Tensor, rows: Sequence[slice], dim: int) -> Tensor:
    """The given rows of a tensor along a dimension; a view if there is at most one range."""
    parts = [tensor.narrow(dim, part.start, part.stop - part.start) for part in rows]
    return torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0] if parts else tensor.narrow(dim, 0, 0)


def row_count(rows: Sequence[slice]) -> int:
    """Total number of rows."""
    return sum(part.stop - part.start for part in rows)


def held_before(blocks: Blocks, token: int) -> int:
    """Number of tokens in ``blocks`` that come before a token of the sequence."""
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
        """The gradient of the input of :meth:`turn`, from that of its result; a new tensor."""
        sines = self._halves(self.sin)
        return self._turned(gradient, (sines[1], 1.0), (sines[0], -1.0))

    def _turned(self, tensor: Tensor, first: tuple[Tensor, float], second: tuple[Tensor, float]) -> Tensor:
        """``tensor * cos``, plus in each half the other half times its (sine, factor): ``first`` and ``second``."""
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
    """Makes the rotations of slices from the table of angles that a model passes to its layers.

    Args:
        factor: Factor of cosines and sines (YaRN).
    """

    def __init__(self, config: Any, factor: float = 1.0) -> None:
        self._config = config
        self._factor = factor
        self._table: Tensor | None = None
        self._whole: Rotation | None = None

    @classmethod
    def of(cls, model: Any) -> "Rotations | None":
        """Rotations for a chunk whose core attention is slice attention; None if its layers have to rotate."""
        config, layers = model.config, family_of_model(model).attention_layers(model)
        if config.apply_rope_fusion or config.multi_latent_attention or not layers:
            return None
        return cls(config, float(layers[0].layer.self_attention._yarn_concentration_factor))

    def part(self, table: Tensor, blocks: Blocks) -> Rotation | None:
        """The rotation of the tokens of a slice.

        Args:
            table: Angles ``[length, 1, 1, r]`` of the sequence; Megatron keeps and repeats one tensor.

        Returns:
            None if every sequence has angles of its own: then the layers rotate.
        """
        if table.dim() != 4 or table.shape[1:3] != (1, 1):
            return None
        if self._whole is None or table is not self._table:
            cos, sin = ((of(table) * self._factor).to(self._config.params_dtype) for of in (torch.cos, torch.sin))
            self._table, self._whole = table, Rotation(cos, sin, self._config.rotary_interleaved)
        whole = self._whole
        cos, sin = take_blocks(whole.cos, blocks, dim=0), take_blocks(whole.sin, blocks, dim=0)
        return Rotation(cos, sin, whole.interleaved)


# Interface of slice attention to the context exchange of a layer with other devices (SlimPipe, section 4.2).


# Several tensors as one message of bytes: everything that is sent to one rank at one time.


def pack(*tensors: Tensor) -> Tensor:
    """Tensors as one message; the caller passes those with larger elements first, so that all are aligned."""
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])


def unpack(message: Tensor, parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Views of the tensors in a message."""
    found, at = [], 0
    for shape, dtype in parts:
        size = math.prod(shape) * dtype.itemsize
        found.append(message[at : at + size].view(dtype).view(shape))
        at += size
    return found


Given = tuple[int, int]  # tokens ``[first, end)``, as the cache numbers them, that other devices attend to
NOTHING: Given = 0, 0
TokenGradient = tuple[int, int, Tensor, Tensor]  # first token, end of tokens, gradients of their keys and values


class LayerExchange:
    """Exchange of one layer with other devices in the running pass; this base class exchanges nothing.

    Per direction: ``begin`` sends queries out, :meth:`help` works for other devices, ``end`` waits for the
    results, in this order and with the layer's own attention in between.
    """

    @property
    def is_active(self) -> bool:
        """Whether the running pass gives attention away or attends for others; else no other method is called."""
        return False

    def begin_forward(self, query: Tensor) -> Given:
        """Send the query out; returns the tokens to which other devices attend."""
        return NOTHING

    def help(self, kernel: Kernel, scale: float) -> None:
        """Attend, or differentiate attention, for other devices."""

    def end_forward(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Output and log-sum-exp of the parts given away."""
        return ()

    def begin_backward(self, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor) -> Given:
        """Send out the gradient of the output and its inputs; returns the tokens to which other devices attend."""
        return NOTHING

    def end_backward(self) -> Iterable[tuple[Tensor, list[TokenGradient]]]:
        """For each part given away: gradient of the query, and completed gradients of keys and values."""
        return ()


NO_EXCHANGE = LayerExchange()
UNLIMITED = Reach()
Own = tuple[Tensor, Tensor]  # a slice's own keys and values


class Keys(enum.Enum):
    """Keys to which calls attend."""

    OWN = enum.auto()
    EARLIER = enum.auto()  # those of earlier slices
    ALL = enum.auto()  # both, in as few calls as the kernel allows


Rows = tuple[tuple[slice, ...], ...]  # some rows of each of the other ranks, in the order of their rows


@dataclass(frozen=True, slots=True)
class Travels:
    """Queries that see keys of other ranks and are sent there; all other queries are not sent."""

    sent: Rows  # this rank's rows that are sent to each of the others
    received: tuple[int, ...]  # number of rows from each of the others
    is_any: bool = True  # whether any two ranks exchange rows


class Sharing(Protocol):
    """The ranks that share slices with this one (``features/context_parallel/runtime.py``).

    ``[S, ...]`` are rows of the other ranks, in the order of ``others``.  Functions that collectives return wait.
    """

    size: int  # number of ranks
    rank: int  # this one's number among them

    def __hash__(self) -> int: ...

    @property
    def others(self) -> Sequence[int]:
        """The other ranks, in the order of their rows."""

    def by_rank(self, own: int) -> Sequence[Blocks]:
        """Blocks of a slice's tokens on each rank, if this one has ``own`` tokens."""

    def swap(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
        """Send every rank its tensor, and return the tensors from all, which have ``shapes`` and one type."""

    def seen(self, own: int) -> Sequence[tuple[slice, slice]]:
        """Ranges of the others' query rows, each with the range of this rank's ``own`` keys that they see."""

    def gather(self, *tensors: Tensor, travels: Travels | None = None) -> Callable[[], tuple[Tensor, ...]]:
        """Start to gather the others' rows ``[S, ...]`` of tensors ``[s, ...]``: all, or those of ``travels``."""

    def give_back(self, *tensors: Tensor, travels: Travels | None = None) -> Callable[[], Sequence[tuple[Tensor, ...]]]:
        """Start to send each of the others its rows; the returned function gives this rank's rows, by sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceContext:
    """Inputs of a slice's attention besides its tensors."""

    cache: KVCache  # holds the slices before this one; this one is appended
    kernel: Kernel
    microbatch: int  # key in the cache
    index: int
    scale: float
    exchange: LayerExchange = NO_EXCHANGE  # what this layer exchanges with other devices
    parallel: Sharing | None = None  # the ranks that share the slice; None if this one has all of it
    reach: Reach = UNLIMITED  # limits of attention: documents and window
    rotation: Rotation | None = None  # rotation that queries and keys need first; None if they need none


@dataclass(frozen=True, slots=True)
class WholePlace:
    """A slice whose queries see all tokens before them."""

    context: SliceContext
    tokens: int
    given_tokens: int = 0  # number of tokens at the start of the sequence to which other devices attend
    unread: ClassVar[int] = 0  # number of own tokens at the start that no later slice reads
    travels: ClassVar[Travels | None] = None  # queries to send to other ranks; None: all if ranks share the slice

    def travelling(self) -> "WholePlace":
        """The place whose rows of other ranks are only the received ones of ``travels``."""
        return self

    def without(self, given: Given) -> "WholePlace":
        """The place without the keys to which other devices attend."""
        return self if given == NOTHING else replace(self, given_tokens=given[1])

    def calls(self, keys: Keys, own: Own, batch: int, others: bool = False) -> Iterator[Call]:
        """Yields the kernel calls for a set of keys.

        Args:
            own: The slice's own keys and values.
            others: Whether the rows are the other ranks' instead of this rank's.
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
        """Whether the kernel can attend to earlier and own keys in one call, and the cache holds expanded keys."""
        context = self.context
        before = context.cache.begin_of(context.microbatch, context.index)
        return (
            before > 0 and not context.cache.expands and context.kernel.takes_prefix(self.tokens, before + self.tokens)
        )
