"""Routing of samples to replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from megatron_het.runtime.data import RoutedBatchSampler, SkippingIterator, routed_loader


def batches(count: int) -> list[list[int]]:
    return [[2 * k, 2 * k + 1] for k in range(count)]


def test_replicas_together_read_every_microbatch_once_and_in_order() -> None:
    routes = ([0, 1, 3], [2])
    per_replica = [list(RoutedBatchSampler(batches(8), ids, [1] * 4)) for ids in routes]
    assert per_replica[1] == [[4, 5], [12, 13]]
    merged = sorted(b for part in per_replica for b in part)
    assert merged == batches(8)


def test_routed_loader_keeps_the_loaders_settings() -> None:
    data = torch.arange(16)
    stock = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data), batch_sampler=batches(8), pin_memory=False
    )
    routed = routed_loader(stock, [1], [1, 1])
    assert [b[0].tolist() for b in routed] == batches(8)[1::2]
    assert routed.collate_fn is stock.collate_fn


class Epochs:
    """A sampler whose epochs are not whole iterations: ten batches of one sample each, no sample twice."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([sample] for sample in range(self.start, self.start + 10))
        self.start += 10


def test_an_epoch_may_end_inside_an_iteration() -> None:
    """One replica of the first stage reads the tokens of all microbatches, two of the last one their labels."""
    data = torch.utils.data.TensorDataset(torch.arange(100))

    def cyclic(microbatches: list[int]) -> Iterator[int]:
        routed = routed_loader(torch.utils.data.DataLoader(data, batch_sampler=Epochs()), microbatches, [1] * 4)
        return (int(batch[0]) for batch in itertools.chain.from_iterable(itertools.repeat(routed)))

    first, *last = cyclic([0, 1, 2, 3]), cyclic([0, 1]), cyclic([2, 3])
    for iteration in range(12):
        tokens = [next(first) for _ in range(4)]
        labels = [next(replica) for replica in last for _ in range(2)]
        assert tokens == labels == list(range(4 * iteration, 4 * iteration + 4))


def test_a_skipped_iteration_takes_a_replicas_own_microbatches() -> None:
    """Outside of the schedule an iteration of four microbatches is drawn, of which two are this replica's."""
    scheduled = True
    own = SkippingIterator(iter({"sample": k} for k in range(12)), 2, 4, lambda: scheduled)
    assert [next(own)["sample"] for _ in range(2)] == [0, 1]
    scheduled = False
    for first in (2, 4):
        drawn = [next(own) for _ in range(4)]
        assert [batch["sample"] for batch in drawn] == [first, first + 1, first + 1, first + 1]
        drawn[-1]["sample"] = None  # what a reader does to its batch stays there
    scheduled = True
    assert [next(own)["sample"] for _ in range(2)] == [6, 7]
    nothing = SkippingIterator(None, 2, 4, lambda: False)
    assert [next(nothing) for _ in range(4)] == [{}] * 4


def test_microbatches_of_different_size_are_cut_from_the_same_samples() -> None:
    """Also where an epoch of a cyclic loader ends inside a microbatch."""
    samples, sizes = [[k] for k in range(12)], [3, 1, 2]
    first, second = (list(RoutedBatchSampler(samples, ids, sizes)) for ids in ([0, 2], [1]))
    assert first == [[0, 1, 2], [4, 5], [6, 7, 8], [10, 11]] and second == [[3], [9]]
    sampler = RoutedBatchSampler([[k] for k in range(4)], [0], [3])
    assert [*sampler, *sampler] == [[0, 1, 2], [3, 0, 1]]
