"""The tracker sees the same of fake tensors as of real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_het.device.memory import uncounted
from megatron_het.dry_run.tracker import PARAMETERS, Peak, Tracker

KIB = 1024


def layers() -> Iterator[torch.nn.Module]:
    """A small network."""
    yield from (torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def train(tracker: Tracker) -> Peak:
    """A forward and a backward as two operations, in the last of two iterations."""
    network = torch.nn.Sequential(*layers())
    source = torch.ones(16, 64)
    for _ in range(2):
        tracker.start_iteration()
        tracker.operation("forward", "F0")
        loss = network(source).square().mean()
        tracker.operation("backward", "B0")
        loss.backward()
        tracker.phase("optimizer")
        network.zero_grad()
        del loss
    tracker.mark({PARAMETERS: network.parameters()})
    return tracker.ledger.peak(1)


def tracked(work: Callable[[Tracker], Any], *, is_fake: bool) -> tuple[Any, Tracker]:
    """What some work returns, and its tracker."""
    tracker = Tracker(is_fake=is_fake)
    if is_fake:
        with FakeTensorMode(allow_non_fake_inputs=True), tracker.running():
            return work(tracker), tracker
    with tracker.running():
        return work(tracker), tracker


def test_fake_and_real_tensors_give_the_same_figures() -> None:
    (real, seen), (fake, guessed) = (tracked(train, is_fake=is_fake) for is_fake in (False, True))
    assert real == fake
    assert dict(seen.flops) == dict(guessed.flops)
    assert real.by_category[PARAMETERS] == 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert real.by_category["activations"] >= 4 * 16 * 256 * 2  # inputs of the second product and of GELU


def test_flops_of_products_are_counted_where_they_run() -> None:
    _, tracker = tracked(train, is_fake=True)
    product = 2 * 16 * 64 * 256
    assert dict(tracker.flops) == {"forward": 2 * product, "backward": 3 * product}  # the input needs no gradient


@pytest.mark.parametrize("is_fake", [False, True])
def test_a_resized_storage_is_seen_without_an_operator(is_fake: bool) -> None:
    def work(tracker: Tracker) -> list[int]:
        tensor, found = torch.zeros(KIB), []
        tracker.start_iteration()
        for size in (0, 4 * KIB):
            tensor.untyped_storage().resize_(size)
            found.append(tracker.live_bytes)
        return found

    assert tracked(work, is_fake=is_fake)[0] == [0, 4 * KIB]


@pytest.mark.parametrize("is_fake", [False, True])
def test_what_stands_for_host_memory_is_not_counted(is_fake: bool) -> None:
    def work(tracker: Tracker) -> tuple[int, int]:
        with uncounted():
            host = torch.empty(KIB)
        host.copy_(torch.zeros(KIB))
        return tracker.live_bytes, host.nbytes

    assert tracked(work, is_fake=is_fake)[0] == (0, 4 * KIB)


def test_values_that_nobody_knows_are_no_overflow() -> None:
    def work(tracker: Tracker) -> list[Any]:
        return [torch.ones(3).sum().item(), (torch.ones(3) > 2).any().item(), torch.ones(3).long().sum().item()]

    assert tracked(work, is_fake=True)[0] == [0.0, False, 0]
    assert tracked(work, is_fake=False)[0] == [3.0, False, 3]


@pytest.mark.parametrize("is_fake", [False, True])
def test_a_storage_that_tensors_were_set_to_dies_with_them(is_fake: bool) -> None:
    def work(tracker: Tracker) -> int:
        storage = torch.zeros(KIB).untyped_storage()
        tensor = torch.empty(0).set_(storage, 0, (KIB,), (1,))
        assert tracker.live_bytes == tensor.nbytes
        del storage, tensor
        return tracker.live_bytes

    assert tracked(work, is_fake=is_fake)[0] == 0
