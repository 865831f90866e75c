"""Forward and backward passes over slices of sequences, and over a context-parallel rank's part of them."""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_het.attention import core
from megatron_het.attention.kernel_choice import kernels_of_backend
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.places import take_blocks
from megatron_het.attention.recurrent import StateCache, carry_states, state_caches
from megatron_het.features.registry import cutting_of, runs_of_a_layer
from megatron_het.features.slices.spec import keys_per_token
from megatron_het.features.thrifty_layers.runtime import lighten_linear_layers
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.plan.placement import Blocks, Placed, part_tokens, token_blocks
from megatron_het.runtime.data import Batches
from megatron_het.runtime.feature import Around, Call, ForwardPass, Iteration, OpenContext, RuntimeFeature
from megatron_het.schedule.cutting import Bounds, Cutting, SlicePart, Starts, documents_in
from megatron_het.schedule.kinds import INPUT_GRADIENTS, Kind

# Runs a FORWARD operation over one slice of a sequence.
#
# All code that depends on slices is here and in ``megatron_het.attention``.  Training scripts need no change: they
# read a batch and call the model, and for a slice the batch, the sequence length and the positions are those of the
# slice.

_CUT = ("tokens", "labels", "loss_mask", "position_ids")  # [b, s]
_UNSEEN = ("attention_mask", "cu_seqlens", "max_seqlen")


class SlicedSequences(Batches, RuntimeFeature):
    """A forward runs one slice of a microbatch, or this rank's part of one.

    Args:
        args: Megatron's arguments; ``args.seq_length`` is the slice's while a slice runs, because
            scripts allocate what they receive from other TP ranks by it.
        cutting: Where sequences are cut into slices.
        programs: This rank's programs; they determine how many key-value chunks are held at once.
        part: Index of the part of every slice that this rank holds.
        shares: Relative sizes of the parts of the context-parallel ranks.
        grain: Number of which the tokens of every part are a multiple.
        batch: Sequences of the largest microbatch; None where all have the same size.
    """

    cuts = True

    def __init__(
        self,
        args: Any,
        cutting: Cutting,
        programs: Mapping[bool, RankProgram],
        device: torch.device,
        part: int = 0,
        shares: Sequence[int] = (1,),
        grain: int = 1,
        batch: int | None = None,
    ) -> None:
        super().__init__()
        self._args = args
        self._cutting = cutting
        self._device = device
        self._largest = batch
        self._divided = functools.lru_cache(maxsize=1024)(functools.partial(token_blocks, shares, grain=grain))
        self._part = part
        self._passes = {
            mode: [passes_of(program, chunk) for chunk in range(len(program.backwards))]
            for mode, program in programs.items()
        }
        self._bounds: dict[int, Bounds] = {}
        self._placed: dict[int, Placed] = {}
        self._current = core.CurrentSlice()
        self._models: list[torch.nn.Module] = []
        self._batches: dict[tuple[int, int], Mapping[str, Any]] = {}

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Put slice attention into the model chunks of this rank, all at once or one after the other.

        Args:
            models: GPTModels, not wrapped, in the order of the chunks.
        """
        first = len(self._models)
        self._models += models
        kernels = kernels_of_backend(self._args.attention_backend.name, self._device.type)
        for chunk, model in enumerate(models, first):
            slots = max(most_held(passes[chunk]) for passes in self._passes.values())
            core.replace_core_attention(model, slots, self._device, kernels, self._largest, runs_of_a_layer(self._args))
            carry_states(model)
        lighten_linear_layers(models)
        self._current.attach(models)

    def begin(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`; with packed documents, their feature calls ``documents_known``."""
        if self.documents is None:
            self.documents_known()

    def around_forward(self, forward: ForwardPass, call: Call) -> Around:
        return self.forward(forward.op, call.forward_only)

    def finish(self, call: Call, state: Iteration) -> None:
        self.check_empty()

    def kept(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """The slabs of all key-value caches, the states between slices, and the gradients that both collect."""
        return {"cache": [tensor for cache in _caches(self._models) for tensor in cache.tensors()]}

    def documents_known(self) -> None:
        self._bounds.clear()
        self._placed.clear()
        if self._cutting.is_even and self.documents is None:
            return
        for chunk, model in enumerate(self._models):
            self._reserve(model, [passes[chunk] for passes in self._passes.values()])

    def _reserve(self, model: torch.nn.Module, modes: "Sequence[Sequence[Pass]]") -> None:
        """Size the caches of a chunk for the most rows that its passes hold at once."""
        rows: dict[int | None, int] = {}
        microbatches = {microbatch for passes in modes for microbatch, _, _ in passes}
        for module in core.slice_attentions([model]):
            most = module.window_tokens
            if most not in rows:
                held = {
                    m: module.held_tokens(self.bounds(m), self.starts(m), functools.partial(self._own_blocks, m))
                    for m in microbatches
                }
                rows[most] = max(most_held(passes, held) for passes in modes)
            for cache in module.caches:
                cache.reserve(rows[most])

    def starts(self, microbatch: int) -> tuple[Starts, ...] | None:
        return None if self.documents is None else self.documents.of(microbatch)

    def slice_parts(self, microbatch: int, units: int) -> tuple[SlicePart, ...]:
        return self._cutting.parts(self.starts(microbatch), units)

    def bounds(self, microbatch: int) -> Bounds:
        found = self._bounds.get(microbatch)
        if found is None:
            found = self._bounds[microbatch] = self._cutting.bounds(self.starts(microbatch))
        return found

    def rows(self, rows: int, op: RankOp) -> int:
        if self._cutting.is_even:
            return rows
        bounds = self.bounds(op.microbatch)
        return rows * (bounds[op.slice + 1] - bounds[op.slice]) // self._cutting.nominal

    def part(self, op: RankOp) -> tuple[int, int]:
        parts = self._parts(op)
        return parts[self._part] * len(parts), self.bounds(op.microbatch)[-1]

    def _parts(self, op: RankOp) -> tuple[int, ...]:
        """Tokens of a slice that each rank of the context-parallel group holds."""
        first, end = self.bounds(op.microbatch)[op.slice : op.slice + 2]
        return tuple(map(part_tokens, self._divided(end - first)))

    def _placed_of(self, microbatch: int) -> Placed | None:
        """Returns which rank holds which documents of a microbatch; None where ranks hold fixed positions.

        The sequences of a microbatch share one cutting, so several with different documents have fixed positions.
        """
        if self.placing is None:
            return None
        documents = set(self.starts(microbatch) or ())
        if len(documents) != 1:
            return None
        if microbatch not in self._placed:
            (starts,) = documents
            by_slice = []
            for first, end in itertools.pairwise(self.bounds(microbatch)):
                pieces = [(lo - first, hi - first) for lo, hi in documents_in((first, end), starts)]
                by_slice.append(self.placing.blocks(pieces, keys_per_token(self._args)))
            self._placed[microbatch] = Placed(by_slice)
        return self._placed[microbatch]

    def _own_blocks(self, microbatch: int, index: int) -> Blocks:
        """Returns the blocks of tokens that this rank holds of slice ``index``."""
        placed, (first, end) = self._placed_of(microbatch), self.bounds(microbatch)[index : index + 2]
        return (self._divided(end - first) if placed is None else placed.by_slice[index])[self._part]

    def _blocks(self, op: RankOp) -> Blocks:
        """Blocks of tokens that this rank holds of an operation's slice."""
        first = self.bounds(op.microbatch)[op.slice]
        return tuple((first + a, first + b) for a, b in self._own_blocks(op.microbatch, op.slice))

    @contextlib.contextmanager
    def forward(self, op: RankOp, forward_only: bool) -> Iterator[None]:
        """A context for the forward of one operation."""
        starts, first, end = self.starts(op.microbatch), *self.bounds(op.microbatch)[op.slice : op.slice + 2]
        shown, tokens = self._args.seq_length, self._parts(op)
        restarts = self.documents is not None and self.documents.ends_states
        self._current.params = core.SliceParams.make(
            op.microbatch,
            op.slice,
            self._blocks(op),
            self._cutting.length,
            span=(first, end),
            starts=starts,
            state_starts=starts if restarts else None,
            parts=tokens,
            placed=self._placed_of(op.microbatch),
        )
        self._args.seq_length = tokens[self._part]
        try:
            yield
        finally:
            self._args.seq_length = shown
            self._current.params = None
        if forward_only and self.is_last(op):
            for cache in _caches([self._models[op.chunk]]):
                cache.drop(op.microbatch)

    def check_empty(self) -> None:
        """Raise CacheError if a cache still holds keys and values, or states, at the end of an iteration."""
        for cache in _caches(self._models):
            cache.check_empty()

    def forget(self) -> None:
        self._batches.clear()

    def peek(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        return cut_batch(self._batch(op, data_iterator), self._blocks(op))

    def whole(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        return self._batch(op, data_iterator)

    def taken(self, op: RankOp, tensor: torch.Tensor) -> torch.Tensor:
        return take_blocks(tensor, self._blocks(op), dim=-1)

    def is_last(self, op: RankOp) -> bool:
        return op.slice == self._cutting.slices - 1

    def _batch(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        key = op.microbatch, op.chunk
        if key not in self._batches:
            batch = next(data_iterator)
            if self.documents is not None:
                batch = self.documents.note(op.microbatch, batch)
            # Cut on the device: a part of a pinned batch is not pinned, so that the host would wait for its copy.
            self._batches[key] = {
                name: value.to(self._device, non_blocking=True) if name in _CUT and value is not None else value
                for name, value in batch.items()
            }
        return self._batches[key]

    def iterator(self, op: RankOp, data_iterator: Any) -> Iterator[Mapping[str, Any]]:
        """The batch of an operation: read when its first slice asks for it, kept until the last."""
        batch = self._batch(op, data_iterator)
        if self.is_last(op):
            del self._batches[op.microbatch, op.chunk]
        yield cut_batch(batch, self._blocks(op))


def _caches(models: Sequence[torch.nn.Module]) -> Iterator[KVCache | StateCache]:
    """Yields the caches in which the layers of model chunks keep data from slice to slice."""
    yield from core.slice_caches(models)
    yield from state_caches(models)


def cut_batch(batch: Mapping[str, Any], blocks: Blocks) -> dict[str, Any]:
    """Some blocks of tokens of a batch, without masks: slice attention is causal and is given the documents."""
    found = {k: v for k, v in batch.items() if k not in _UNSEEN}
    for name in _CUT:
        if found.get(name) is not None:
            found[name] = take_blocks(found[name], blocks, dim=1).contiguous()
    return found


Pass = tuple[int, int, bool]  # microbatch, slice, and whether the pass is a forward


def passes_of(program: RankProgram, chunk: int) -> list[Pass]:
    """The passes of a chunk in order, which allocate and free key-value chunks."""
    kinds = {Kind.FORWARD, *INPUT_GRADIENTS}
    found = [op for op in program.ops if op.chunk == chunk and op.kind in kinds]
    return [(op.microbatch, op.slice, op.kind is Kind.FORWARD) for op in found]


def most_held(passes: Sequence[Pass], tokens: Mapping[int, Sequence[int]] | None = None) -> int:
    """The most tokens whose keys and values are held at the same time.

    Args:
        tokens: How many each slice of a microbatch holds; None to count slices.
    """
    trains = any(not is_forward for _, _, is_forward in passes)
    last = max((index for _, index, _ in passes), default=0)
    live = most = 0
    for microbatch, index, is_forward in passes:
        held = (1,) * (last + 1) if tokens is None else tokens[microbatch]
        live += held[index] if is_forward else -held[index]
        most = max(most, live)
        if not trains and index == last:  # in evaluation a microbatch is freed after its last slice
            live -= sum(held)
    return most


def open_feature(context: OpenContext) -> RuntimeFeature:
    """Open the feature on this rank: forwards run slices from here on; one slice may be the whole sequence."""
    where, plan = context.placement.locate(context.rank), context.plan
    side = context.boundaries.side(context.rank)
    sequences = SlicedSequences(
        context.args,
        cutting_of(plan, context.args),
        context.lowered,
        context.platform.device,
        part=where.cp_rank,
        shares=side.shares,
        grain=side.grain,
        batch=plan.training.micro_batch_size,
    )
    context.batches = sequences
    return sequences
