"""The parts of a split vocabulary: devices meet there, and nothing that NCCL would hold up crosses a meeting."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.features.vocab_parallel.spec import add_embedding, add_vocabulary
from megatron_het.schedule import Kind, Program, Shape, add_transfers, generate, transfers
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.graph import Graph, ScheduleError, meetings
from megatron_het.schedule.ir import RECEIVES, SENDS, dumps, loads
from megatron_het.schedule.kinds import PARTS
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.validate import validate

Options = dict[str, object]
EXCHANGING: tuple[tuple[int, int, int, int, Options], ...] = (
    (2, 2, 1, 1, {"units": 1, "helping": True}),
    (2, 4, 2, 3, {"units": 2}),
    (2, 8, 1, 2, {"units": 2}),
    (4, 4, 1, 1, {"units": 4, "helping": True}),
    (4, 8, 2, 2, {"units": 2, "keep": True}),
)
PLAIN = (("seq1f1b", 3, 3, 3), ("seq1f1b", 4, 8, 4), ("slimpipe", 3, 6, 2), ("1f1b", 4, 1, 8), ("gpipe", 2, 1, 4))


def _exchanging(case: tuple[int, int, int, int, Options]) -> Program:
    stages, slices, chunks, microbatches, options = case
    shape = Shape.uniform(stages, microbatches, slices=slices, chunks=chunks)
    return add_embedding(add_vocabulary(add_exchange(generate("slimpipe", shape), **options)))  # type: ignore[arg-type]


def _plain(schedule: str, stages: int, slices: int, microbatches: int) -> Program:
    shape = Shape.uniform(stages, microbatches, slices=slices)
    return add_embedding(add_vocabulary(generate(schedule, shape)))


def _held_up(program: Program) -> list[str]:
    """Where each device stops when it has one queue, NCCL runs one message of a pair at a time, and parts meet.

    A transfer is launched without waiting, unless an earlier one of its link has not ended: then all that is behind it
    in the queue waits.  Of the operations only meetings hold a device up here.
    """
    directed = bool(program.attention_units)
    rows = [deque(ops) for ops in program.ops]
    under_way: list[dict[tuple[int, ...], object]] = [{} for _ in rows]
    graph = Graph(program)
    team_of = {
        (graph.ops[n], graph.device[n]): [graph.device[m] for m in nodes] for nodes in meetings(graph) for n in nodes
    }
    moved = True
    while moved:
        moved = False
        for d, row in enumerate(rows):
            while row:
                op = row[0]
                if op.kind in SENDS or op.kind in RECEIVES:
                    ends = (d, op.peer) if op.kind in SENDS else (op.peer, d)
                    link = ends if directed else (min(ends), max(ends))
                    if link in under_way[d]:
                        break
                    under_way[d][link] = op
                    if link in under_way[op.peer]:
                        del under_way[d][link], under_way[op.peer][link]
                elif op.kind in PARTS:
                    team = team_of[op, d]
                    key = (op.kind, op.microbatch, op.slice)
                    heads = [rows[e][0] if rows[e] else None for e in team]
                    if any(o is None or (o.kind, o.microbatch, o.slice) != key for o in heads):
                        break
                    for e in team:
                        if e != d:
                            rows[e].popleft()
                row.popleft()
                moved = True
    return [f"device {d}: {row[0]}" for d, row in enumerate(rows) if row]


@pytest.mark.parametrize("case", EXCHANGING, ids=str)
def test_exchange_with_a_split_vocabulary(case: tuple[int, int, int, int, Options]) -> None:
    program = add_transfers(_exchanging(case))
    assert _held_up(program) == []
    assert validate(program) == []


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_transfers_with_a_split_vocabulary(case: tuple[str, int, int, int]) -> None:
    program = add_transfers(_plain(*case))
    assert _held_up(program) == []
    assert validate(program) == []


@pytest.mark.parametrize("program", [_exchanging(EXCHANGING[0]), _plain(*PLAIN[0])], ids=lambda p: p.name)
def test_transfers_across_a_meeting_are_found(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placed as if parts were work of one device, keys, values and activations wait behind them."""
    monkeypatch.setattr(transfers, "waits_to_leave", lambda graph: graph.waits)
    broken = add_transfers(program)
    assert _held_up(broken)
    problems = validate(broken)
    assert problems and {p.rule for p in problems} == {"deadlock"}


def test_who_meets() -> None:
    """All devices of a microbatch, once per slice and kind."""
    program = _plain("1f1b", 4, 1, 8)
    found = meetings(Graph(program, open_sends=True))
    assert len(found) == 4 * 8 and all(len(nodes) == 4 for nodes in found)
    assert meetings(Graph(generate("1f1b", Shape.uniform(4, 8)), open_sends=True)) == []
    kinds = {Kind.VOCAB_FORWARD, Kind.VOCAB_BACKWARD, Kind.EMBED_FORWARD, Kind.EMBED_BACKWARD}
    assert kinds == {kind for kind in Kind if kind in PARTS}


def _sharing_experts(schedule: str, route: tuple[tuple[int, ...], ...], **more: Any) -> Program:
    """Two stages, the first of two replicas that share experts."""
    replicas = tuple(max(row) + 1 for row in route)
    shape = Shape(layers=((1,), (1,)), route=route, replicas=replicas, companions=((0, 1),), **more)
    return generate(schedule, shape)


ALTERNATING = (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_replicas_that_share_experts_run_their_passes_together(schedule: str) -> None:
    program = add_transfers(_sharing_experts(schedule, (ALTERNATING, (0,) * 6)))
    assert validate(program) == [] and loads(dumps(program)) == program
    graph = Graph(program)
    assert len(meetings(graph)) == 6
    done = simulate(program, Costs.uniform(program.shape), graph)
    for first, second in meetings(graph):
        assert graph.ops[first].kind is graph.ops[second].kind
        assert (done.start_s[first], done.end_s[first]) == (done.start_s[second], done.end_s[second])


def test_replicas_that_share_experts_and_wait_for_each_other_are_found() -> None:
    """The second replica's first pass needs a pass behind one that the first replica runs in the same turn."""
    program = _sharing_experts("1f1b", (ALTERNATING, (0,) * 6))
    swapped = list(program.ops)
    last = program.shape.device(1, 0)
    swapped[last] = tuple(sorted(program.ops[last], key=lambda op: (op.microbatch % 2, op.microbatch)))
    alone = replace(program, ops=tuple(swapped), shape=replace(program.shape, companions=()))
    assert validate(add_transfers(alone)) == []
    with pytest.raises(ScheduleError, match="wait for each other"):
        add_transfers(replace(program, ops=tuple(swapped)))


def test_replicas_that_share_experts_have_equal_passes() -> None:
    program = _sharing_experts("1f1b", ((0, 0, 0, 0, 1, 1), (0,) * 6))
    with pytest.raises(ScheduleError, match="devices 0.0 and 0.1 share experts"):
        meetings(Graph(program, open_sends=True))
