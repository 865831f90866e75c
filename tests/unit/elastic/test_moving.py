"""State moves between members of any cuts; the members are threads that talk over gloo."""

import functools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_het.device import activate
from megatron_het.elastic import job, state
from megatron_het.elastic.copies import Copies, Cost, keepers_of
from megatron_het.elastic.job import Generation, refusal, signature_of
from megatron_het.elastic.links import Links
from megatron_het.elastic.pieces import Piece, StateError, common
from megatron_het.elastic.state import Holdings, Snapshot, move
from testing.threads import at_once
from tests.unit.elastic.notes import plan

WHOLE = {"w": torch.arange(6 * 8, dtype=torch.float32).view(6, 8), "b": torch.arange(100.0, 110.0)}
Held = list[tuple[Piece, torch.Tensor]]
TIMEOUT_S = 600.0


def together(size: int, work: Callable[[Links], Any]) -> list[Any]:
    """Run ``work`` on so many members at the same time; their results."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    found: list[Any] = [None] * size

    def member(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
        links = Links(dist.PrefixStore("x", client), rank, size, 20.0)
        try:
            found[rank] = work(links)
        except Exception as error:
            found[rank] = error
        links.close()

    at_once(*(functools.partial(member, rank) for rank in range(size)))
    return found


def piece(
    key: str, offset: tuple[int, ...], block: tuple[int, ...], start: int, stop: int
) -> tuple[Piece, torch.Tensor]:
    whole = WHOLE[key]
    cut = whole[tuple(slice(o, o + n) for o, n in zip(offset, block, strict=True))].reshape(-1)[start:stop]
    return Piece(key, "main", "float32", tuple(whole.shape), offset, block, start, stop), cut.clone()


# Tensor-parallel cuts of both dimensions, and of one of them the optimizer's shards.
BY_ROWS = [[piece("w", (0, 0), (3, 8), 0, 11), piece("b", (0,), (10,), 0, 10)],
           [piece("w", (0, 0), (3, 8), 11, 24), piece("b", (0,), (10,), 0, 10)],
           [piece("w", (3, 0), (3, 8), 0, 24)]]  # fmt: skip
BY_COLUMNS = [[piece("w", (0, 4), (6, 4), 0, 24)],
              [piece("w", (0, 0), (6, 4), 0, 13), piece("b", (0,), (10,), 0, 4)],
              [piece("w", (0, 0), (6, 4), 13, 24), piece("b", (0,), (10,), 4, 10)]]  # fmt: skip


def moved(links: Links, old: list[Held], new: list[Held]) -> Held:
    held = old[links.rank]
    needed = [(p, torch.full_like(tensor, -1.0)) for p, tensor in new[links.rank]]
    move(links, held, needed, Holdings([[p for p, _ in m] for m in old]), [[p for p, _ in m] for m in new])
    return needed


@pytest.mark.parametrize(
    ("old", "new"), [(BY_ROWS, BY_COLUMNS), (BY_COLUMNS, BY_ROWS), (BY_ROWS, [[], [], BY_ROWS[0]])]
)
def test_between_any_two_cuts(old: list[Held], new: list[Held]):
    for member, found in enumerate(together(3, lambda links: moved(links, old, new))):
        assert len(found) == len(new[member]), found
        for (_, tensor), (_, expected) in zip(found, new[member], strict=True):
            assert torch.equal(tensor, expected)


def test_what_nobody_holds_is_named():
    (error,) = together(1, lambda links: moved(links, [BY_ROWS[0]], [BY_COLUMNS[1]]))
    assert isinstance(error, StateError) and "w (main)" in str(error)


def test_receivers_begin_with_different_holders():
    everybody = [[piece("b", (0,), (10,), 0, 10)[0]]] * 4
    holdings = Holdings([*everybody, [], []])
    senders = [holdings.moves(receiver, everybody[0])[0][0].sender for receiver in range(6)]
    assert senders[:4] == [0, 1, 2, 3], "each takes its own"
    assert senders[4] != senders[5]


def test_keepers_are_on_other_nodes_and_differ():
    nodes = ["a", "a", "b", "b", "c"]
    keepers = keepers_of(nodes)
    assert all(nodes[keeper] != node for keeper, node in zip(keepers, nodes, strict=True) if keeper is not None)
    assert keepers[0] != keepers[1] and keepers[2] != keepers[3]
    assert keepers_of(["a", "a", "a"]) == [1, 2, 0] and keepers_of(["a"]) == [None]


def snapshot(rank: int, pieces: Held) -> Snapshot:
    return Snapshot(4, rank, "t", {"flops": 1.0}, {"w": {"step": 4.0}}, {}, pieces)


def test_of_many_changes_the_newest_states_are_kept():
    copies = Copies(0)  # without copies in between
    for iteration in range(9):
        copies.add(Mock(iteration=iteration))
    assert [one.iteration for one in copies.snapshots] == [6, 7, 8]


def test_learning_rates_and_loss_scales_go_on(monkeypatch: pytest.MonkeyPatch):
    """A checkpoint's learning rates may go on in place of the flags', and experts may get a scaler of their own."""
    activate()  # Megatron binds on import what the platform replaces
    monkeypatch.setattr("megatron.core.num_microbatches_calculator.update_num_microbatches", Mock())

    def trainee(rate: float, *scales: float) -> Any:
        groups = [{"wd_mult": 1.0, "default_config": own, "max_lr": (1 if own else 5) * rate} for own in (True, False)]
        parts = [Mock(**{"grad_scaler.state_dict.return_value": {"scale": scale}}) for scale in scales]
        args = Mock(iteration=0, num_floating_point_operations_so_far=0)
        optimizer = Mock(chained_optimizers=parts, param_groups=groups)
        return Mock(optimizer=optimizer, args=args, scheduler=Mock(state_dict=dict))

    before, after = trainee(1e-3, 8.0), trainee(2e-3, 2.0, 2.0)
    state._set_common(after, state._own_part([{"common": state._common(before, 0), "numbers": {}}], None)[0])
    assert [group["max_lr"] for group in after.optimizer.param_groups] == [1e-3, 5e-3]
    for part in after.optimizer.chained_optimizers:
        assert part.grad_scaler.load_state_dict.call_args[0][0]["scale"].item() == 8.0


def test_a_copy_of_what_no_other_node_holds(monkeypatch: pytest.MonkeyPatch):
    """Rank 2's rows go to another node; the bias, which is on two nodes, stays where it is."""
    from megatron_het.elastic import copies
    from megatron_het.elastic.pieces import LocalState

    generation = Generation(0, None, (0, 1, 2), nodes=("a", "b", "b"))  # type: ignore[arg-type]
    states = [LocalState(list(held)) for held in BY_ROWS]
    monkeypatch.setattr(copies, "blocks_of", lambda *_: {})
    monkeypatch.setattr(copies, "collect", lambda models, *_, **_options: states[models])
    monkeypatch.setattr(copies, "described", lambda trainee, iteration, state, pieces: snapshot(trainee.models, pieces))

    class Session:
        def materialise_parameters(self) -> None:
            pass

    class Trainee:
        optimizer = args = None

        def __init__(self, rank: int) -> None:
            self.models = rank

    def keep(links: Links) -> Copies:
        own = Copies(every=2)
        own.open(generation, links.rank, links)
        for iteration in (3, 4):
            own.keep(Session(), Trainee(links.rank), iteration)  # type: ignore[arg-type]
        own.wait()
        return own

    found = together(3, keep)
    received = [[s for s in member.snapshots if s.rank != rank] for rank, member in enumerate(found)]
    assert [sorted(s.rank for s in member) for member in received] == [[1, 2], [0], []]
    (copy,) = (s for s in received[0] if s.rank == 2)
    assert [p for p, _ in copy.pieces] == [BY_ROWS[2][0][0]]
    assert torch.equal(copy.pieces[0][1], BY_ROWS[2][0][1])
    (other,) = (s for s in received[0] if s.rank == 1)
    assert {p.key for p, _ in other.pieces} == {"w"}


# Pieces as intervals, against the elements that indexing the whole tensor gives.


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> Piece:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    block = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    size = int(np.prod(block))
    start = draw(st.integers(0, size - 1))
    return Piece("w", "main", "float32", shape, offset, block, start, draw(st.integers(start + 1, size)))


def elements(piece: Piece) -> list[int]:
    """The whole tensor's elements that the piece holds, in its order."""
    whole = np.arange(int(np.prod(piece.shape))).reshape(piece.shape)
    cut = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.block, strict=True))
    return whole[cut].reshape(-1)[piece.start : piece.stop].tolist()


def listed(runs: np.ndarray, column: int) -> list[int]:
    return [int(row[column]) + i for row in runs for i in range(int(row[2]))]


@given(st.data())
def test_runs_are_the_elements_of_the_piece(data: st.DataObject):
    piece = data.draw(pieces(data.draw(shapes())))
    runs = piece.runs()
    assert listed(runs, 0) == elements(piece)
    assert listed(runs, 1) == list(range(piece.size))


@given(st.data())
def test_what_two_pieces_share(data: st.DataObject):
    shape = data.draw(shapes())
    mine, theirs = data.draw(pieces(shape)), data.draw(pieces(shape))
    put, taken, left = common(mine.runs(), theirs.runs())
    shared = set(elements(mine)) & set(elements(theirs))
    assert set(listed(put, 0)) == shared and listed(put, 0) == listed(taken, 0)
    assert [elements(mine)[i] for i in listed(put, 1)] == listed(put, 0)
    assert [elements(theirs)[i] for i in listed(taken, 1)] == listed(put, 0)
    assert set(listed(left, 0)) == set(elements(mine)) - shared


def test_a_piece_is_json_and_back():
    piece = Piece("w", "exp_avg", "float32", (4, 6), (0, 2), (4, 3), 1, 7)
    assert Piece.from_json(piece.to_json()) == piece
    assert piece.name == ("w", "exp_avg") and piece.size == 6


# A copy that fails holds nobody; all ranks copy at the same pace.


def test_nobody_waits_for_a_rank_whose_copy_failed():
    store, links = dist.HashStore(), {}

    def connect(rank: int) -> None:
        links[rank] = Links(store, rank, 4, TIMEOUT_S)

    assert not any(at_once(*(lambda r=rank: connect(r) for rank in range(4))))
    generation: Any = SimpleNamespace(nodes=("a", "b", "c", "d"))
    copies = {rank: Copies(1) for rank in (0, 1, 3)}
    for rank, mine in copies.items():
        mine.open(generation, rank, links[rank])
    links.pop(2).close()  # rank 1 gives to it, rank 3 takes from it; rank 0 takes from rank 3
    snapshot: Any = Snapshot(1, 0, "", {}, {}, {})
    block: Any = None
    alive = at_once(*(lambda m=m, r=r: m._exchange(links[r], snapshot, block, 0, Cost(0.0)) for r, m in copies.items()))
    assert not any(alive)


def test_ranks_agree_on_the_pace_of_the_slowest(capsys: pytest.CaptureFixture[str]):
    store = dist.HashStore()
    copies = [Copies(None), Copies(None)]
    generation: Any = SimpleNamespace(nodes=("a", "b"))

    def agree(rank: int) -> None:
        mine = copies[rank]
        mine.open(generation, rank, Links(store, rank, 2, TIMEOUT_S))
        for _ in range(4):
            mine.pace.left(0.0)
            mine.pace.arrived(1.0)
            mine.pace.copied(Cost(0.01 if rank else 0.2))
            mine._agree([], False)

    assert not any(at_once(*(lambda r=rank: agree(r) for rank in range(2))))
    assert [mine.pace.every for mine in copies] == [7, 7]
    said = capsys.readouterr().out
    assert said.count("copies of the state in memory: after every 7 iterations (here a copy takes") == 1


# Nodes of one job have the same releases and flags.

FLAGS = ("--num-layers", "8", "--mock-data", "--data-path", "a")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-layers", "9", *FLAGS[2:]), "the values of '--num-layers' differ: '9' here and '8' on the first node"),
        ((*FLAGS[:4], "b"), "the values of '--data-path' differ: 'b' here and 'a' on the first node"),
        (FLAGS[:4], "the values of '--data-path' differ: none here and 'a' on the first node"),
        ((*FLAGS, "--bf16"), "differ: '--bf16' here and none on the first node"),
    ],
)
def test_the_first_flag_that_differs_is_named(flags: tuple[str, ...], said: str):
    text = refusal(signature_of(flags), signature_of(FLAGS))
    assert said in text and "start all nodes of a job with the same command" in text
    assert refusal(signature_of(FLAGS), signature_of(list(FLAGS))) == ""


@pytest.mark.parametrize("name", ["megatron_het", "megatron-core"])
def test_another_release_is_named(name: str):
    other = json.dumps({**json.loads(signature_of(FLAGS)), name: "9.9"})
    assert f"{name} is '9.9' here and " in refusal(other, signature_of(FLAGS))


@pytest.mark.parametrize("other", ["", "x", "[]", "{}", "3", '{"megatron_het": 1}'])
def test_what_another_release_would_say(other: str):
    said = refusal(other, signature_of(FLAGS))
    assert "another release" in said or "megatron_het is" in said


def test_a_plan_is_checked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job, "_problems", lambda *_: ["--num-layers: 7, the plan has 5"])
    assert job.problems_under(plan([[1]]), [], tmp_path)() == ["--num-layers: 7, the plan has 5"]

    def fails(*_: object) -> list[str]:
        raise OSError("nobody can say")

    monkeypatch.setattr(job, "_problems", fails)
    assert job.problems_under(plan([[1]]), [], tmp_path)() == []
    monkeypatch.setattr(job, "CHECK_S", 0.05)
    monkeypatch.setattr(job, "_problems", lambda *_: time.sleep(60.0))
    assert job.problems_under(plan([[1]]), [], tmp_path)() == [], "it is ended then"
