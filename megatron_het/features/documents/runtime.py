"""Packed documents as a feature of a rank: their starts are read ahead and sent to every rank."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.features import feature
from megatron_het.features.documents.spec import CONVERSATIONS, PACKING
from megatron_het.lowering.ranks import RankProgram
from megatron_het.runtime.data import Batches, Reports
from megatron_het.runtime.feature import Call, ForwardPass, Iteration, OpenContext, RuntimeFeature, open_half
from megatron_het.schedule.cutting import Starts
from megatron_het.schedule.kinds import Kind

# Where the documents of an iteration begin.
#
# Megatron's datasets restart positions at every document (``--reset-position-ids``, or documents of the dataset),
# so a document begins where a position is 0.


def starts_of(positions: torch.Tensor) -> tuple[Starts, ...]:
    """Document starts of each sequence, from positions ``[b, s]`` that are 0 there; the first start is token 0."""
    return tuple(tuple(sorted({0, *row.nonzero().flatten().tolist()})) for row in positions == 0)


class DocumentStarts:
    """Where the documents of the microbatches of one iteration begin.

    Args:
        keeps_positions: Whether the training script gets positions that restart at every document.
        ends_states: Whether recurrent layers reset their state at every document.
    """

    def __init__(self, keeps_positions: bool, ends_states: bool = True) -> None:
        self._keeps_positions = keeps_positions
        self.ends_states = ends_states
        self._starts: dict[int, tuple[Starts, ...]] = {}
        self._begins: torch.Tensor | None = None
        self._sequences: Callable[[int], int] = lambda _: 0

    def note(self, microbatch: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Store the document starts of a batch.

        Args:
            microbatch: Index of the microbatch.
            batch: The dataset's batch, on the host; ``position_ids`` is ``[b, s]``.

        Returns:
            The batch with the positions that the training script has requested.

        Raises:
            ValueError: There are no positions, or not for whole sequences.
        """
        positions = batch.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            raise ValueError(
                "packed documents: a batch has no position_ids [b, s], by which documents are known; "
                f"it has {', '.join(sorted(batch))}"
            )
        self._starts[microbatch] = starts_of(positions)
        if self._keeps_positions:
            return batch
        return {**batch, "position_ids": torch.arange(positions.shape[1]).expand_as(positions).contiguous()}

    def of(self, microbatch: int) -> tuple[Starts, ...]:
        """Where the documents of each sequence of a microbatch begin."""
        if microbatch not in self._starts:
            assert self._begins is not None, "no batch was noted and none exchanged"
            self._starts[microbatch] = starts_of(1 - self._begins[microbatch, : self._sequences(microbatch)])
        return self._starts[microbatch]

    def exchange(
        self, microbatches: int, sequences: Callable[[int], int], seq_length: int, device: torch.device
    ) -> None:
        """Send the starts to all ranks, and drop those of the iteration before.  Collective.

        Args:
            microbatches: Number of microbatches in the iteration; each has been noted on some rank.
            device: Device of the collectives of all ranks.
        """
        most = max(map(sequences, range(microbatches)))
        begins = torch.zeros((microbatches, most, seq_length), dtype=torch.uint8)
        for microbatch, starts in self._starts.items():
            for i, own in enumerate(starts):
                begins[microbatch, i, list(own)] = 1
        begins = begins.to(device)
        dist.all_reduce(begins, op=dist.ReduceOp.MAX)
        # Each is decoded at its first use, because a rank needs only its own microbatches.
        self._begins, self._sequences = begins.cpu(), sequences
        self._starts.clear()

    def clear(self) -> None:
        """Drop the starts of all microbatches when a new iteration begins."""
        self._starts.clear()
        self._begins = None


@dataclass(eq=False)
class DocumentsFeature(RuntimeFeature):
    """Attention within documents."""

    args: Any  # Megatron's arguments; until ``close`` the dataset restarts positions at every document
    sequences: Batches  # reads batches and has the attention of every chunk
    whole: RuntimeFeature | None  # runs whole sequences over that attention; None if slices do already
    first_chunk: int | None  # chunk of this rank that reads the tokens; None if there is none
    programs: Mapping[bool, RankProgram]  # this rank's programs
    sharing: dist.ProcessGroup | None = None  # ranks that share sequences with this one; None if there are no others

    roles = ("cp",)

    def __post_init__(self) -> None:
        self._asked_positions = self.args.reset_position_ids
        packs = any(getattr(self.args, name, False) for name in PACKING)
        # A mask separates documents in attention only: in Megatron, too, recurrent layers ignore it.
        self._starts = DocumentStarts(self.args.reset_position_ids or packs, ends_states=packs)
        # The dataset of conversations always restarts positions, and does not have the flag.
        self.args.reset_position_ids = not getattr(self.args, CONVERSATIONS, False)
        self.sequences.documents = self._starts
        self._whole = self.whole or RuntimeFeature()

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        self._whole.attach(models)

    def begin(self, call: Call, state: Iteration) -> None:
        """Read the iteration's batches ahead, if this rank reads any, and get the starts of the others."""
        self._starts.clear()
        for op in self.programs[call.forward_only].ops:  # each microbatch once, in the order in which it is read
            if op.kind is Kind.FORWARD and op.chunk == self.first_chunk and op.slice == 0:
                self.sequences.whole(op, call.data_iterators[op.chunk])
        self._starts.exchange(call.num_microbatches, call.sequences, self.args.seq_length, call.device)
        self.sequences.documents_known()

    @contextlib.contextmanager
    def around_forward(self, forward: ForwardPass, call: Call) -> Iterator[None]:
        """Run the pass so that the training script need not handle packed sequences."""
        asked = {name: getattr(self.args, name, False) for name in PACKING}
        vars(self.args).update(dict.fromkeys(asked, False))
        try:
            with self._whole.around_forward(forward, call):
                yield
        finally:
            vars(self.args).update(asked)

    def finish(self, call: Call, state: Iteration) -> None:
        self._whole.finish(call, state)

    def weigh_losses(self, call: Call, state: Iteration) -> None:
        """Make the loss of an evaluation of conversations a mean over microbatches, as in Megatron."""
        if call.forward_only and not call.collect_non_loss_data and getattr(self.args, CONVERSATIONS, False):
            state.reports = of_microbatches(state.reports, state.reported, self.sharing)

    def kept(self) -> Mapping[str, Iterable[torch.Tensor]]:
        return self._whole.kept()

    def close(self) -> None:
        self.args.reset_position_ids = self._asked_positions


def of_microbatches(reports: Reports, microbatches: Sequence[int], sharing: dist.ProcessGroup | None = None) -> Reports:
    """The losses of microbatches with equal weights, from the losses of their passes.

    A pass may be over a slice, or a rank's part of one.  Within a microbatch passes are weighted by their tokens, so a
    pass without counted tokens has no weight.

    Args:
        reports: (sum, tokens) by name, or a mean, of every pass.
        microbatches: The microbatch of every pass.
        sharing: Ranks that have other parts of the same passes; the first one reports for all.
    """
    found: dict[int, list[dict[str, torch.Tensor]]] = {}
    for entry, microbatch in zip(reports, microbatches, strict=True):
        found.setdefault(microbatch, []).append(entry)
    return [
        {name: _mean([entry[name] for entry in passes], sharing) for name in passes[0]} for passes in found.values()
    ]


def _mean(passes: Sequence[torch.Tensor], sharing: dist.ProcessGroup | None) -> torch.Tensor:
    """The mean loss of a microbatch, with weight 1."""
    total, count = torch.stack([values.view(-1) for values in passes]).sum(dim=0), len(passes)
    if sharing is not None:
        dist.all_reduce(total, group=sharing)
        count *= sharing.size()
    pair = total.numel() == 2
    mean = torch.stack([total[0] / total[1].clamp(min=1), torch.ones_like(total[1])]) if pair else total / count
    return mean if sharing is None or sharing.rank() == 0 else torch.zeros_like(mean)


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The feature on this rank."""
    whole = None if context.batches.cuts else open_half(feature("slices"), context)
    where = context.placement.locate(context.rank)
    stage, chunk = context.plan.path[0]
    reads = where.stage == stage and where.tp_rank == 0
    sharing = context.groups.get("cp")
    return DocumentsFeature(context.args, context.batches, whole, chunk if reads else None, context.lowered, sharing)
