"""What a session opens when it begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.elastic import boundary as boundaries
from megatron_het.elastic import copies as copying
from megatron_het.elastic.boundary import ElasticBoundary
from megatron_het.elastic.copies import Copies
from megatron_het.elastic.generation import Generation
from tests.unit.elastic.test_pool import plan
from tests.unit.store.memory import MemoryStore


class Connections:
    """Stands for connections between some processes."""

    def __init__(self, _store: Any, rank: int, size: int, _timeout_s: float) -> None:
        self.rank, self.size, self.is_open = rank, size, True

    def close(self) -> None:
        self.is_open = False


@pytest.mark.parametrize(
    ("holders", "every", "is_shared"), [((1, 2), 1, True), ((1, 2, 7), 1, False), ((1, 2), 0, False)]
)
def test_copies_go_over_the_connections_of_the_change(
    holders: tuple[int, ...], every: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
):
    """Where a node has left, its process is a member of the change, and no rank."""
    monkeypatch.setattr(boundaries, "Links", Connections)
    generation = Generation(1, plan([[1], [1, 1]]), (5, 2, 1), holders, ("n5", "n2", "n1"), loads=True)
    assert generation.movers == (5, 2, 1, *(number for number in holders if number == 7))
    store, copies = MemoryStore(), Copies(every)
    boundary = ElasticBoundary(generation, 2, store, 5.0, copies, lambda _: False, None, {})
    change: Any = Connections(None, 1, len(generation.movers), 5.0)
    boundary._open_copies(1, change)
    assert change.is_open == is_shared
    assert (copies._links is change) == is_shared
    found: Any = copies._links
    assert (found is None) == (every == 0)
    assert found is None or (found.rank, found.size, found.is_open) == (1, 3, True)


def test_a_checkpoint_that_could_not_be_written_goes_elsewhere() -> None:
    generation = Generation(1, plan([[1]]), (1,), (), ("n1",), True, (3,), (6,), "/other")
    assert Generation.from_json(generation.to_json()) == generation
    boundary = ElasticBoundary(generation, 1, MemoryStore(), 5.0, Copies(0), lambda _: False, None, {})
    args = SimpleNamespace(save="/saved", save_interval=3, train_iters=9, padded_vocab_size=None)
    boundary.prepare(args)
    found = []
    for iteration in (3, 6, 9):
        boundary._choose_folder(args, iteration)
        found.append((args.save, args.save_interval))
    assert found == [("/saved", None), ("/other", 3), ("/saved", 3)]


def test_what_a_lost_rank_leaves_on_the_device_is_neither_kept_nor_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator that is aborted ends its kernels with wrong values, and without an error."""
    has_aborted, forgotten = [False], list[int]()

    def packed(_pieces: Any) -> tuple[None, list[Any]]:
        has_aborted[0] = True  # while the state is on its way to host memory
        return None, []

    copies = Copies(1)
    boundary = ElasticBoundary(
        Generation(1, plan([[1]]), (1,), (), ("n1",), True), 1, MemoryStore(), 5.0, copies, lambda _: False, None, {}
    )
    copies._links, boundary.has_aborted = Connections(None, 0, 1, 5.0), lambda: has_aborted[0]  # type: ignore[assignment]
    boundary.trainee = SimpleNamespace(models=(), optimizer=None, args=SimpleNamespace(save=None))  # type: ignore[assignment]
    monkeypatch.setattr(copying, "blocks_of", lambda *_: ())
    monkeypatch.setattr(copying, "collect", lambda *_, **__: SimpleNamespace(pieces=()))
    monkeypatch.setattr(copying, "_packed", packed)
    monkeypatch.setattr(Copies, "_agree", lambda *_: None)
    monkeypatch.setattr(boundaries, "communicators", list)
    report = SimpleNamespace(forget_after=forgotten.append)
    session = SimpleNamespace(feature=lambda _: None, materialise_parameters=lambda: None, report=report)
    with pytest.raises(RuntimeError, match="is lost"):
        boundary.reached(session, 4)
    assert copies.snapshots == []
    with pytest.raises(RuntimeError, match="is lost"):
        boundary.reached(session, 5)
    boundary.failed(session)
    assert boundary.iteration == 4 and forgotten == [4]
