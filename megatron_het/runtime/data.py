"""Every replica of the first and the last stage reads the samples of its own microbatches.

Megatron's loader, with the data-parallel size 1 that a plan shows it, yields the samples in their
global order: microbatch 0, 1, 2, ..., or, where microbatches differ in size, sample by sample.  A
replica keeps those that the plan routes to it.  Resuming needs nothing but
``consumed_train_samples``, which all ranks count alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_het.distributed import as_only_reader, at_chunk, between_the_ends


class RoutedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Cuts the batches of every iteration into microbatches, and keeps those whose id is one of ``microbatches``.

    It counts on where it is iterated over again: an epoch of a cyclic loader may end inside an
    iteration.  It must be created at the start of an iteration, as the resuming of a run does.

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
    """The same loader over the routed microbatches only."""
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


class SkippingIterator:
    """A replica's microbatches for the schedule, and whole iterations for Megatron (``--iterations-to-skip``).

    To skip an iteration Megatron draws as many microbatches as the batch has from every rank, outside of the
    schedule, and throws them away.  This rank has only its own: it gives these first and then the last one
    again, so that its next one is the first of the next iteration.

    Args:
        own: This replica's microbatches; None on a rank that reads nothing.
        count: Of them, per iteration.
        num_draws: How often Megatron draws to skip an iteration.
        is_scheduled: Whether the schedule draws, asked at every draw.
    """

    def __init__(self, own: Iterator[Any] | None, count: int, num_draws: int, is_scheduled: Callable[[], bool]) -> None:
        self._own = own
        self._count = count
        self._num_draws = num_draws
        self._is_scheduled = is_scheduled
        self._drawn = 0
        self._last: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._own is None:
            return {}
        if self._is_scheduled():
            return next(self._own)
        if self._drawn < self._count:
            self._last = next(self._own)
        self._drawn = (self._drawn + 1) % self._num_draws
        return dict(self._last)  # Megatron changes what it gets


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
        batches_of: How many of the batches that Megatron's loader yields each microbatch of an iteration is.
        loader_type: What ``--dataloader-type`` was: ``single`` or ``cyclic``.
        is_scheduled: Whether the schedule draws, asked at every draw.
        lacking: Chunks that other ranks have more than this one.  Megatron builds iterators chunk by chunk, with all
            ranks; this rank takes part for those that it lacks.
    """
    is_distributed = getattr(provider, "is_distributed", False)

    def provide(num_samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
        from megatron.training import get_args

        args = get_args()
        if not vp_stage:
            for _ in range(lacking):
                _build_nothing(provider if is_distributed else None, num_samples)
        if lacking and not is_distributed and not _reads_for_its_replica():
            return None, None, None
        keywords = {} if vp_stage is None else {"vp_stage": vp_stage}
        with at_chunk(vp_stage):
            datasets = provider(num_samples, **keywords)
        consumed = (args.consumed_train_samples, 0 if args.skip_train else args.consumed_valid_samples, 0)
        train, *others = (
            _iterator(args, dataset, start, microbatches, batches_of, loader_type)
            for dataset, start in zip(datasets, consumed, strict=True)
        )
        if args.iterations_to_skip:
            train = SkippingIterator(train, len(microbatches), sum(batches_of), is_scheduled)
        return (train, *others)

    # Megatron reads this mark to call the provider on every rank.
    provide.is_distributed = is_distributed or lacking > 0  # type: ignore[attr-defined]
    return provide


def _build_nothing(provider: Callable[..., Any] | None, num_samples: Sequence[int | None]) -> None:
    """Take part in building the iterators of a chunk that this rank does not have.

    Args:
        provider: Of datasets, where all ranks call it; None where only those call it that read.
        num_samples: What Megatron tells it.
    """
    from megatron.training import training

    def provide(num_samples: Sequence[int | None]) -> tuple[Any, ...]:
        if provider is not None:
            with between_the_ends():
                provider(num_samples, vp_stage=0)
        return None, None, None

    provide.is_distributed = True  # type: ignore[attr-defined]
    training.build_train_valid_test_data_iterators(provide)


def _reads_for_its_replica() -> bool:
    from megatron.core import mpu

    return bool(mpu.get_tensor_model_parallel_rank() == 0)


def _iterator(
    args: Any, dataset: Any, consumed: int, microbatches: Sequence[int], batches_of: Sequence[int], loader_type: str
) -> Iterator[Any] | None:
    from megatron.training.datasets.data_samplers import build_pretraining_data_loader

    if isinstance(dataset, list):
        raise NotImplementedError("several validation sets do not work with --het-plan")
    shown, args.dataloader_type = args.dataloader_type, loader_type
    try:
        with as_only_reader():
            loader = build_pretraining_data_loader(dataset, consumed)
    finally:
        args.dataloader_type = shown
    if loader is None:
        return None
    routed = routed_loader(loader, microbatches, batches_of)
    if loader_type == "cyclic":
        return itertools.chain.from_iterable(itertools.repeat(routed))
    return iter(routed)
