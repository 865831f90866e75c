"""The tracker sees the same of fake tensors as of real ones."""

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_het.device.memory import uncounted
from megatron_het.dry_run.tracker import (
    ACTIVATIONS,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    Ledger,
    Moment,
    Peak,
    Tracker,
    let_go,
)

KIB = 1024


def train(tracker: Tracker) -> Peak:
    """A forward and a backward as two operations, in the last of two iterations."""
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
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


# The account of memory: categories by life, and peaks by iteration.


def hold(ledger: Ledger, size_bytes: int) -> int:
    """A storage that appears now."""
    life = ledger.open()
    ledger.change(life, size_bytes)
    return life


def free(ledger: Ledger, life: int, size_bytes: int) -> None:
    """It dies now."""
    ledger.change(life, -size_bytes)
    ledger.close(life)


def test_categories_are_told_by_mark_or_by_life() -> None:
    ledger = Ledger()
    weights, table = hold(ledger, 100), hold(ledger, 7)
    ledger.begin(Moment(0, "F0", True))
    kept, scratch = hold(ledger, 10), hold(ledger, 1000)
    free(ledger, scratch, 1000)
    ledger.begin(Moment(0, "B0", True))
    free(ledger, kept, 10)
    ledger.begin(Moment(0, "optimizer", False))
    step = hold(ledger, 50)
    free(ledger, step, 50)
    ledger.mark(weights, PARAMETERS)
    names = [ledger.category(life) for life in (weights, table, kept, scratch, step)]
    assert names == [PARAMETERS, OTHER, ACTIVATIONS, TEMPORARIES, TEMPORARIES]


def test_the_peak_of_an_iteration_starts_with_what_lives_before_it() -> None:
    ledger = Ledger()
    weights = hold(ledger, 100)
    ledger.mark(weights, PARAMETERS)
    big = hold(ledger, 900)
    free(ledger, big, 900)
    for iteration, size in ((0, 300), (1, 200)):
        ledger.begin(Moment(iteration, f"F{iteration}", True))
        kept = hold(ledger, size)
        ledger.begin(Moment(iteration, f"B{iteration}", True))
        scratch = hold(ledger, 5)
        free(ledger, scratch, 5)
        free(ledger, kept, size)
    assert [ledger.peak(i).total_bytes for i in (-1, 0, 1)] == [1000, 405, 305]
    last = ledger.peak(1)
    assert last.label == "B1"
    assert {k: v for k, v in last.by_category.items() if v} == {PARAMETERS: 100, ACTIVATIONS: 200, TEMPORARIES: 5}
    assert last.category_peaks[TEMPORARIES] == 5


def test_a_storage_that_comes_back_has_a_life_of_its_own() -> None:
    ledger = Ledger()
    ledger.begin(Moment(0, "F0", True))
    first = hold(ledger, 8)
    free(ledger, first, 8)
    again = hold(ledger, 8)
    ledger.begin(Moment(0, "B0", True))
    free(ledger, again, 8)
    assert [ledger.category(life) for life in (first, again)] == [TEMPORARIES, ACTIVATIONS]


# Tensors of collectives that are done die where the rank drops them.

ROUNDS = 500
LIMIT = timedelta(seconds=60)


def test_no_tensor_of_work_that_is_done_stays_alive() -> None:
    store = dist.HashStore()
    errors: list[BaseException] = []

    def peer() -> None:
        try:
            group = dist.ProcessGroupGloo(store, 1, 2, LIMIT)
            for _ in range(ROUNDS):
                group.allreduce([torch.zeros(30)]).wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    group = dist.ProcessGroupGloo(store, 0, 2, LIMIT)
    late = 0
    for _ in range(ROUNDS):
        tensor = torch.zeros(30)
        alive = weakref.finalize(tensor.untyped_storage(), int)
        group.allreduce([tensor]).wait()
        del tensor
        let_go()  # without it some 50 are alive
        late += alive.alive
    thread.join(60)
    assert not errors and not thread.is_alive()
    assert late == 0
