"""Every replica of the first and the last stage reads the samples of its own microbatches.

Megatron's loader, with the data-parallel size 1 that a plan shows it, yields the samples in their
global order: microbatch 0, 1, 2, ..., or, where microbatches differ in size, sample by sample.  A
replica keeps the samples that the plan routes to it.  Resuming needs only
``consumed_train_samples``, which is the same on all ranks.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_het.distributed import PlanGroups, as_only_reader, at_chunk, between_the_ends, loss_source
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import Placement
from megatron_het.plan.placement import DocumentPlacing
from megatron_het.schedule.cutting import Bounds, SlicePart, Starts

# The losses of an iteration are summed over a stage and sent to the ranks that log them.

Reports = list[dict[str, torch.Tensor]]  # the script's loss entries: (sum, tokens) by name, or a mean per microbatch
MESSAGE_BYTES = 4096
"""Size of the message that sends the losses to the ranks that log them: tens of names with two numbers each."""


def of_whole_stage(reports: Reports, placement: Placement, groups: PlanGroups) -> Reports:
    """One entry for the whole stage when its replicas have unequal work or TP, or share sequences.

    Megatron sums entries over the data-parallel group, which here is one class of replicas only.
    """
    where = placement.locate(groups.rank)
    replicas = placement.plan.stages[where.stage].replicas
    if len(replicas) == 1 and replicas[0].cp == 1:
        return reports
    totals = _totals(reports)
    for value in totals.values():
        if where.tp_rank > 0:
            value.zero_()
        dist.all_reduce(value, group=groups["stage"])
    return [_entry(totals, reports[0])]


@contextlib.contextmanager
def judged_at_the_end(args: Any) -> Iterator[None]:
    """Defer the checks of Megatron's rerun machine on losses to the end of the iteration.

    Each check makes the host wait for the device.  With a check per slice the host could never run ahead of the
    device.  Megatron's ``args`` say which checks are on.
    """
    if not (args.check_for_nan_in_loss_and_grad or args.check_for_spiky_loss):
        yield
        return
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine, calls = get_rerun_state_machine(), list[tuple[torch.Tensor, dict[str, Any]]]()
    judge = machine.validate_result

    def keep(result: Any, *positional: Any, **keywords: Any) -> None:
        if positional or not isinstance(result, torch.Tensor):  # a script's own
            judge(result, *positional, **keywords)
        else:
            calls.append((result.detach().clone(), keywords))  # Megatron divides it in place

    machine.validate_result = keep
    try:
        yield
    finally:
        del machine.validate_result
    if calls:
        losses = torch.cat([result.view(-1) for result, _ in calls]).cpu()
        for (result, keywords), loss in zip(calls, losses.split([r.numel() for r, _ in calls]), strict=True):
            judge(loss.view_as(result), **keywords)


def _totals(reports: Reports) -> dict[str, torch.Tensor]:
    """Totals by name that can be summed over ranks: (sum, tokens), or (sum, number) of the script's means.

    A microbatch has one report per slice and context-parallel rank, so means are divided by the number of reports.
    """
    found = {}
    for name in reports[0]:
        values = torch.stack([entry[name].view(-1) for entry in reports])
        total = values.sum(dim=0)
        found[name] = torch.cat([total, total.new_tensor([len(values)])]) if total.numel() == 1 else total
    return found


def _entry(totals: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entry that Megatron logs, with sums or means as the script reports them."""
    return {name: total[:1] / total[1] if like[name].numel() == 1 else total for name, total in totals.items()}


def passed_on(reports: Reports, placement: Placement, groups: PlanGroups, device: torch.device) -> Reports:
    """Loss entries on the ranks where Megatron logs them, if the model ends on another stage (V placement).

    Args:
        reports: Of the whole stage; empty where this rank has no loss.

    Raises:
        RuntimeError: The script reports more losses than the message holds.
    """
    group, source = groups.get("loss"), loss_source(placement)
    if group is None:
        return reports
    told, text = groups.rank == source, ""
    if told:
        entry = _entry(_totals(reports), reports[0])
        text = json.dumps({name: value.tolist() for name, value in entry.items()})
        if len(text) > MESSAGE_BYTES:
            raise RuntimeError(f"{len(reports[0])} losses do not fit into a message of {MESSAGE_BYTES} bytes")
    letters = torch.tensor(list(text.ljust(MESSAGE_BYTES).encode()), dtype=torch.uint8, device=device)
    dist.broadcast(letters, src=source, group=group)
    if told:
        return reports
    return [{name: torch.tensor(value, device=device) for name, value in json.loads(bytes(letters.tolist())).items()}]


# The batches that FORWARD operations of an iteration read, and the information that is needed before they run.


class Documents(Protocol):
    """Where the documents of microbatches begin (``features/documents/runtime.py``)."""

    ends_states: bool  # whether recurrent layers reset their state at every document

    def note(self, microbatch: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note where the documents of a batch begin; returns the batch as the script is to see it."""

    def of(self, microbatch: int) -> tuple[Starts, ...]:
        """Where the documents of each sequence of a microbatch begin."""


class Batches:
    """Default reader: a FORWARD reads a microbatch from its first token to its last."""

    # whether a FORWARD may run a part of its sequences; :meth:`whole`, :meth:`taken` and :meth:`is_last` are for such
    # readers
    cuts = False
    documents: Documents | None = None  # where documents begin, where attention ends at them
    # which documents each context-parallel rank holds; None where ranks hold fixed positions of a slice
    placing: DocumentPlacing | None = None

    def __init__(self) -> None:
        self._ahead: dict[tuple[int, int], Mapping[str, Any]] = {}

    def iterator(self, op: RankOp, data_iterator: Any) -> Any:
        """The data iterator to give to the training script for a FORWARD."""
        ahead = self._ahead.pop((op.microbatch, op.chunk), None)
        return data_iterator if ahead is None else iter([ahead])

    def peek(self, op: RankOp, data_iterator: Iterator[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the batch that an operation's FORWARD will read, before it runs (first TP rank)."""
        found = self._ahead[op.microbatch, op.chunk] = next(data_iterator)
        return found

    def rows(self, rows: int, op: RankOp) -> int:
        """Rows of the activations of an operation's pass, from ``rows`` of a pass of nominal length."""
        return rows

    def part(self, op: RankOp) -> tuple[int, int]:
        """Tokens of an operation's pass and of its whole sequence, or numbers in the same proportion.

        They are counted as if all ranks that share the pass had as many tokens as this one.
        """
        return 1, 1

    def starts(self, microbatch: int) -> tuple[Starts, ...] | None:
        """Where the documents of each sequence of a microbatch begin; None if it does not matter."""
        return None

    def bounds(self, microbatch: int) -> Bounds:
        """Where the slices of a microbatch begin, and where the last one ends; empty without slices."""
        return ()

    def slice_parts(self, microbatch: int, units: int) -> tuple[SlicePart, ...]:
        """Returns each slice's part of a microbatch, with ``units`` exchange units per slice; empty without slices."""
        return ()

    def documents_known(self) -> None:
        """Called at the start of an iteration, when the starts of its documents are known."""

    def whole(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        """The batch of an operation with all tokens of its sequences, before it runs (first TP rank)."""
        raise NotImplementedError

    def taken(self, op: RankOp, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of an operation's pass from whole sequences, which are the last dimension."""
        raise NotImplementedError

    def is_last(self, op: RankOp) -> bool:
        """Whether an operation's pass is the last one of its chunk over its sequences."""
        raise NotImplementedError

    def forget(self) -> None:
        """Called when all operations of the iteration are done: drop what was read."""


class RoutedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Cuts the batches of every iteration into microbatches, and keeps those whose id is one of ``microbatches``.

    The count of microbatches continues over epochs: an epoch of a cyclic loader may end inside an
    iteration.  The sampler must be created at the start of an iteration, as resuming a run does.

    Args:
        batches: Sampler of batches in global order; one epoch per pass.
        microbatches: Ids to keep.
        batches_of: How many batches each microbatch of an iteration is.
    """

    def __init__(self, batches: Iterable[list[int]], microbatches: Sequence[int], batches_of: Sequence[int]) -> None:
        self._batches = batches
        self._microbatches = frozenset(microbatches)
        self._batches_of = batches_of
        self._next = 0  # id of the microbatch that is being filled
        self._missing = batches_of[0]  # batches that it still needs
        self._samples: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            self._samples += batch
            self._missing -= 1
            if self._missing:
                continue
            microbatch, samples = self._next, self._samples
            self._next, self._samples = (self._next + 1) % len(self._batches_of), []
            self._missing = self._batches_of[self._next]
            if microbatch in self._microbatches:
                yield samples

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def routed_loader(
    loader: torch.utils.data.DataLoader, microbatches: Sequence[int], batches_of: Sequence[int]
) -> torch.utils.data.DataLoader:
    """Returns the loader over the routed microbatches only."""
    batches: Any = loader.batch_sampler  # Megatron's samplers yield lists of sample numbers
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_sampler=RoutedBatchSampler(batches, microbatches, batches_of),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        worker_init_fn=loader.worker_init_fn,
        collate_fn=loader.collate_fn,
        generator=loader.generator,
    )


@dataclass(eq=False)
class SkippingIterator:
    """A replica's microbatches for the schedule, and whole iterations for Megatron (``--iterations-to-skip``).

    To skip an iteration Megatron draws all microbatches of the global batch on every rank, outside of the
    schedule, and discards them.  This rank has only its own: it returns these first and then repeats the last one,
    so that the next microbatch it reads is the first of the next iteration.
    """

    own: Iterator[Any] | None  # this replica's microbatches; None on a rank that reads nothing
    count: int  # this replica's microbatches per iteration
    num_draws: int  # how often Megatron draws to skip an iteration
    rows: int  # sequences of a drawn microbatch that Megatron's other TP ranks allocate; a microbatch may have more
    is_scheduled: Callable[[], bool]  # whether the schedule draws, asked at every draw

    def __post_init__(self) -> None:
        self._drawn = 0
        self._last: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.own is None:
            return {}
        if self.is_scheduled():
            return next(self.own)
        if self._drawn < self.count:
            self._last = next(self.own)
        self._drawn = (self._drawn + 1) % self.num_draws
        return {name: None if value is None else value[: self.rows] for name, value in self._last.items()}


def routed_provider(
    provider: Callable[..., Any],
    microbatches: Sequence[int],
    batches_of: Sequence[int],
    loader_type: str,
    is_scheduled: Callable[[], bool],
    lacking: int = 0,
) -> Callable[..., Any]:
    """Wrap a datasets provider so that it returns iterators of this replica's microbatches.

    Used with Megatron's ``external`` loader type, which passes through what the provider returns.

    Args:
        provider: The script's ``train_valid_test_datasets_provider``.
        microbatches: Ids of this replica's microbatches.
        batches_of: Number of batches of Megatron's loader that make each microbatch of an iteration.
        loader_type: What ``--dataloader-type`` was: ``single`` or ``cyclic``.
        is_scheduled: Whether the schedule draws, asked at every draw.
        lacking: Number of chunks that other ranks have beyond this rank's.  Megatron builds iterators chunk by chunk
            on all ranks; this rank takes part for these chunks, too.
    """
    is_distributed = getattr(provider, "is_distributed", False)

    def provide(num_samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
        from megatron.core import mpu
        from megatron.training import get_args

        args = get_args()
        if not vp_stage:
            for _ in range(lacking):
                _build_nothing(provider if is_distributed else None, num_samples)
        if lacking and not is_distributed and mpu.get_tensor_model_parallel_rank() != 0:
            return None, None, None
        keywords = {} if vp_stage is None else {"vp_stage": vp_stage}
        with at_chunk(vp_stage):
            datasets = provider(num_samples, **keywords)
        for dataset in datasets:
            draw_by_sample(dataset)
        read = args.consumed_train_samples
        if args.phase_transition_iterations:  # each phase has a dataset of its own
            begun = max(k for k in (0, *args.phase_transition_iterations) if k <= args.iteration)
            read = (args.iteration - begun) * args.global_batch_size
        consumed = (read, 0 if args.skip_train else args.consumed_valid_samples, 0)
        train, *others = (
            _iterator(args, dataset, start, microbatches, batches_of, loader_type)
            for dataset, start in zip(datasets, consumed, strict=True)
        )
        if args.iterations_to_skip:
            train = SkippingIterator(train, len(microbatches), sum(batches_of), args.micro_batch_size, is_scheduled)
        return (train, *others)

    # Megatron reads this mark to call the provider on every rank.
    provide.is_distributed = is_distributed or lacking > 0  # type: ignore[attr-defined]
    return provide


def draw_by_sample(dataset: Any) -> None:
    """Seed the random numbers of fill-in-the-middle (``--fim-data``) by sample.

    Megatron's random state advances with every sample that a process reads.  Ranks that read tokens and ranks that
    read labels read different samples, and would rearrange the same sample in different ways.

    Args:
        dataset: Result of a provider; other datasets than fill-in-the-middle ones are left unchanged.
    """
    from megatron.training.datasets.fim_dataset import GPTFIMDataset

    for part in getattr(dataset, "datasets", (dataset,)):
        if isinstance(part, GPTFIMDataset):
            query = functools.partial(_query_drawn, part, part._query_document_sample_shuffle_indices)
            part._query_document_sample_shuffle_indices = query


def _query_drawn(dataset: Any, query: Callable[[int], Any], index: int) -> Any:
    dataset.np_rng = np.random.RandomState([dataset.config.random_seed, index])
    return query(index)


def _build_nothing(provider: Callable[..., Any] | None, num_samples: Sequence[int | None]) -> None:
    """Take part in building the iterators of a chunk that this rank does not have.

    Args:
        provider: The datasets provider, where all ranks call it; None where only reading ranks do.
        num_samples: Megatron's argument for the provider.
    """
    from megatron.training import training

    def provide(num_samples: Sequence[int | None]) -> tuple[Any, ...]:
        if provider is not None:
            with between_the_ends():
                provider(num_samples, vp_stage=0)
        return None, None, None

    provide.is_distributed = True  # type: ignore[attr-defined]
    training.build_train_valid_test_data_iterators(provide)


def _iterator(
    args: Any, dataset: Any, consumed: int, microbatches: Sequence[int], batches_of: Sequence[int], loader_type: str
) -> Iterator[Any] | None:
    from megatron.training.datasets.data_samplers import build_pretraining_data_loader

    own: dict[str, Any] = {"dataloader_type": loader_type, "eval_micro_batch_size": args.micro_batch_size}
    if loader_type == "cyclic":
        # Megatron's shuffled order depends on the batch size.  Samples that are read one by one have the same order
        # under all plans, so that a training that changes its plan reads no sample of an epoch twice.
        unit = args.micro_batch_size
        own |= {"micro_batch_size": 1, "eval_micro_batch_size": 1}
        batches_of = [unit * number for number in batches_of]
    shown = {name: getattr(args, name) for name in own}
    vars(args).update(own)
    try:
        with as_only_reader():
            loader = build_pretraining_data_loader(dataset, consumed)
    finally:
        vars(args).update(shown)
    if loader is None:
        return None
    routed = routed_loader(loader, microbatches, batches_of)
    if loader_type == "cyclic":
        return itertools.chain.from_iterable(itertools.repeat(routed))
    return iter(routed)
