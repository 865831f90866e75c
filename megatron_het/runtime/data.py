"""Every replica of the first and the last stage reads the samples of its own microbatches.

Megatron's loader, with the data-parallel size 1 that a plan shows it, yields microbatch 0, 1, 2, ...
of the global order.  A replica keeps those that the plan routes to it.  Resuming needs nothing but
``consumed_train_samples``, which all ranks count alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_het.topology import as_only_reader


class RoutedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Keeps the k-th batch of every ``num_microbatches`` when k is one of ``microbatches``.

    It counts on where it is iterated over again: an epoch of a cyclic loader may end inside an
    iteration.  It must be created at the start of an iteration, as the resuming of a run does.

    Args:
        batches: Sampler of microbatches in global order; one epoch per pass.
        microbatches: Ids to keep.
        num_microbatches: Microbatches per iteration.
    """

    def __init__(
        self, batches: Iterable[list[int]], microbatches: Sequence[int], num_microbatches: int
    ) -> None:
        self._batches = batches
        self._microbatches = frozenset(microbatches)
        self._num_microbatches = num_microbatches
        self._next = 0  # microbatch id of the next batch

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            microbatch, self._next = self._next, (self._next + 1) % self._num_microbatches
            if microbatch in self._microbatches:
                yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def routed_loader(
    loader: torch.utils.data.DataLoader, microbatches: Sequence[int], num_microbatches: int
) -> torch.utils.data.DataLoader:
    """The same loader over the routed microbatches only.

    It draws the seeds of its workers from a generator of its own: the default one drives dropout on
    a CPU, and a resumed run must not be one draw ahead.
    """
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_sampler=RoutedBatchSampler(loader.batch_sampler, microbatches, num_microbatches),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        worker_init_fn=loader.worker_init_fn,
        collate_fn=loader.collate_fn,
        generator=torch.Generator().manual_seed(torch.initial_seed()),
    )


def routed_provider(
    provider: Callable[..., Any], microbatches: Sequence[int], num_microbatches: int, loader_type: str
) -> Callable[..., Any]:
    """Wrap a datasets provider so that it returns iterators of this replica's microbatches.

    Used with Megatron's ``external`` loader type, which passes through what the provider returns.

    Args:
        provider: The script's ``train_valid_test_datasets_provider``.
        microbatches: Ids of this replica's microbatches.
        num_microbatches: Microbatches per iteration.
        loader_type: What ``--dataloader-type`` was: ``single`` or ``cyclic``.
    """

    def provide(num_samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
        from megatron.training import get_args

        args = get_args()
        keywords = {} if vp_stage is None else {"vp_stage": vp_stage}
        datasets = provider(num_samples, **keywords)
        consumed = (args.consumed_train_samples, 0 if args.skip_train else args.consumed_valid_samples, 0)
        return tuple(
            _iterator(args, dataset, start, microbatches, num_microbatches, loader_type)
            for dataset, start in zip(datasets, consumed, strict=True)
        )

    # Megatron reads this mark to call the provider on every rank.
    provide.is_distributed = getattr(provider, "is_distributed", False)  # type: ignore[attr-defined]
    return provide


def _iterator(
    args: Any,
    dataset: Any,
    consumed: int,
    microbatches: Sequence[int],
    num_microbatches: int,
    loader_type: str,
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
    routed = routed_loader(loader, microbatches, num_microbatches)
    if loader_type == "cyclic":
        return itertools.chain.from_iterable(itertools.repeat(routed))
    return iter(routed)
