"""The parts of a split vocabulary: devices meet there, and nothing that NCCL would hold up crosses a meeting."""

import random
from collections import deque
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from schedule_helpers import with_device

from megatron_het.features import feature, options_of
from megatron_het.features.context_exchange.kinds import ExchangeRules, joint_slots
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.features.vocab_parallel.spec import add_embedding, add_vocabulary
from megatron_het.features.window.passes import add_parameters, post_together
from megatron_het.lowering.programs import build
from megatron_het.plan import Plan, PlanError
from megatron_het.plan.run_config import plan_from_flags
from megatron_het.plan.schema import ScheduleSpec
from megatron_het.schedule import Kind, Op, Program, Shape, add_transfers, generate, transfers
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.graph import Graph, ScheduleError, meetings
from megatron_het.schedule.ir import RECEIVES, SENDS, dumps, loads
from megatron_het.schedule.joint import counting_places, event_places, last_makers, stuck_events, sync_points
from megatron_het.schedule.kinds import PARTS
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.validate import validate
from testing.cases import Case, build_plan, with_schedule
from tests.unit.plan.megatron_flags import TWO_BY_TWO, flags

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


@pytest.mark.parametrize("case", [*EXCHANGING, *PLAIN], ids=str)
def test_transfers_with_a_split_vocabulary(case: Any) -> None:
    program = add_transfers(_exchanging(case) if case in EXCHANGING else _plain(*case))
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
    program = _plain("1f1b", 4, 1, 8)
    found = meetings(Graph(program, open_sends=True))
    assert len(found) == 4 * 8 and all(len(nodes) == 4 for nodes in found)
    assert meetings(Graph(generate("1f1b", Shape.uniform(4, 8)), open_sends=True)) == []
    kinds = {Kind.VOCAB_FORWARD, Kind.VOCAB_BACKWARD, Kind.EMBED_FORWARD, Kind.EMBED_BACKWARD}
    assert kinds == {kind for kind in Kind if kind in PARTS}


# Joint passes: what the context exchange makes wait for each other can run, and what cannot is found.


def exchanging(stages: int, slices: int, chunks: int, microbatches: int, **options: object) -> Program:
    shape = Shape.uniform(stages, microbatches, slices=slices, chunks=chunks)
    return add_transfers(add_exchange(generate("slimpipe", shape), **options))


def test_idle_devices_work_in_their_last_help() -> None:
    """Devices without a pass take part once per slot; with a pass, in the pass."""
    program = exchanging(4, 8, 1, 1, helping=True)
    idle = 0
    for slot in joint_slots(program):
        for owner, helper in slot.helped:
            assert slot.event(owner) == slot.passes[owner]
            assert (helper in slot.passes) != (helper in slot.idle)
            idle += helper in slot.idle
    assert idle > 10
    assert not any(slot.idle for slot in joint_slots(exchanging(4, 8, 1, 1)))


def test_a_result_that_its_helper_waits_for_is_found() -> None:
    """A device receives another one's activations of a slot before its own pass in that slot."""
    program = exchanging(4, 8, 1, 2)
    slot = next(s for s in joint_slots(program) if s.helped and s.passes[0].kind == Kind.FORWARD)
    owner, helper = min(slot.helped)
    extra = Op(Kind.KV_SEND, *slot.passes[owner][1:4], helper, 0, 90, 91)
    peer, receive = extra.partner(owner)
    ops, others = list(program.ops[owner]), list(program.ops[peer])
    ops.insert(ops.index(slot.passes[owner]) + 1, extra)
    others.insert(others.index(slot.passes[helper]), receive)
    broken = with_device(with_device(program, owner, ops), peer, others)
    stuck = list(stuck_events(Graph(broken)))
    assert stuck
    assert Graph(broken).ops[stuck[0]] in (slot.passes[owner], slot.passes[helper], extra, receive)


def test_transfers_placed_without_lockstep_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placed as if helpers did not hold their owners up, some transfers cross their slots."""
    program = add_exchange(generate("slimpipe", Shape.uniform(4, 1, slices=4)), helping=True)
    assert validate(add_transfers(program)) == []
    monkeypatch.setattr(ExchangeRules, "lockstep", lambda rules, graph, duration: None)
    problems = validate(add_transfers(program))
    assert problems and {p.rule for p in problems} == {"deadlock"}
    assert "attend for each other" in problems[0].message


def test_passes_that_are_not_aligned_are_a_problem() -> None:
    """Not an exception: the validator reports what it finds."""
    program = exchanging(4, 8, 1, 2)
    ops = list(program.ops[3])
    last = max(i for i, op in enumerate(ops) if op.kind == Kind.FORWARD)
    first = min(i for i, op in enumerate(ops) if op.kind == Kind.BACKWARD)
    assert first < last
    ops.insert(first, ops.pop(last))
    assert validate(with_device(program, 3, ops))


# From where on gradients may be reduced early.

FLAGS = flags(TWO_BY_TWO)


def made(**parameters: object) -> tuple[Plan, Program]:
    plan, _ = plan_from_flags(FLAGS, 4, ScheduleSpec("slimpipe", {"slices": 4, **parameters}))
    return plan, build(plan)[False]


def check_overlap(plan: Plan, program: Program, early: bool) -> None:
    args = SimpleNamespace(overlap_grad_reduce=early)
    feature("vocabulary").check_program(lambda: program, options_of(plan, "vocabulary"), args)


def test_last_backward_of_each_chunk() -> None:
    for ops in made()[1].ops:
        points = sync_points(ops, 2)
        assert sorted(chunk for chunks in points.values() for chunk in chunks) == [0, 1]
        for index, (chunk,) in points.items():
            assert (ops[index].kind, ops[index].chunk) == (Kind.BACKWARD, chunk)
            assert not any(op.kind == Kind.BACKWARD and op.chunk == chunk for op in ops[index + 1 :])


def test_all_gradients_of_a_split_vocabulary_come_after_the_point() -> None:
    for ops in made(vocabulary=True)[1].ops:
        points = {chunk: index for index, chunks in sync_points(ops, 2).items() for chunk in chunks}
        last = last_makers(ops)
        assert points[1] <= min(last[Kind.VOCAB_BACKWARD, 0], last[Kind.BACKWARD, 1])
        assert points[0] <= min(last[Kind.EMBED_BACKWARD, 0], last[Kind.BACKWARD, 0], last[Kind.VOCAB_BACKWARD, 0])


def test_replicas_must_complete_their_gradients_in_one_order() -> None:
    plan, program = made(vocabulary=True)
    check_overlap(plan, program, early=True)
    ops = list(program.ops[1])
    place = last_makers(ops)[Kind.BACKWARD, 1]
    moved = with_device(program, 1, [*ops[:place], *ops[place + 1 :], ops[place]])
    with pytest.raises(PlanError, match="--overlap-grad-reduce.*replicas of stage 0.*different orders"):
        check_overlap(plan, moved, early=True)
    check_overlap(plan, moved, early=False)


def test_weight_gradients_in_idle_time_may_end_in_other_orders() -> None:
    """Two replicas of the first stage with two and four microbatches, whose idle times differ."""
    plan = build_plan([[1, 1], [1, 1]], [1, 1], random.Random(1), even_routing=False)
    plan = with_schedule(Case("", plan), "zb-v", 2, {}).plan
    args = SimpleNamespace(
        overlap_grad_reduce=True, num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=128
    )
    args.untie_embeddings_and_output_weights = True
    feature("zero_bubble").check_program(lambda: build(plan)[False], options_of(plan, "zero_bubble"), args)
    args.untie_embeddings_and_output_weights = False  # the embeddings are a bucket of their own
    with pytest.raises(PlanError, match="--overlap-grad-reduce.*replicas of stage 0.*different orders"):
        feature("zero_bubble").check_program(lambda: build(plan)[False], options_of(plan, "zero_bubble"), args)
    args.untie_embeddings_and_output_weights, args.hidden_size = True, 8192  # more than a bucket
    with pytest.raises(PlanError, match="different orders"):
        feature("zero_bubble").check_program(lambda: build(plan)[False], options_of(plan, "zero_bubble"), args)
    args.overlap_grad_reduce = False
    feature("zero_bubble").check_program(lambda: build(plan)[False], options_of(plan, "zero_bubble"), args)


def test_tokens_are_added_up_at_one_point_of_one_order() -> None:
    """Every rank comes to it after its last forward, before its first update, and needs nothing of a later one then."""
    shape = Shape(((1, 1), (1, 1)), ((0, 0, 1, 0, 0, 1), (0,) * 6), (2, 1))
    program = post_together(add_parameters(add_transfers(generate("ministage", shape)), offload=True, step="ministage"))
    places = counting_places(program)
    done = [set(ops[:place]) for ops, place in zip(program.ops, places, strict=True)]
    for device, ops in enumerate(program.ops):
        assert all(op in done[device] for op in ops if op.kind is Kind.FORWARD)
        assert not any(op.kind is Kind.OPTIMIZER_STEP for op in done[device])
    graph = Graph(program)
    for node, other in enumerate(graph.other_end):
        if other >= 0:  # both ends of a transfer are on the same side
            ends = [graph.where(end) for end in (node, other)]
            assert len({position < places[device] for device, position in ends}) == 1


def test_without_early_updates_nothing_is_counted() -> None:
    assert counting_places(add_transfers(generate("1f1b", Shape.uniform(2, 2)))) is None


def _first_without_a_place(graph: Graph) -> list[int]:
    """The first operation of each device that has no place in an order of all events."""
    places = event_places(graph, graph.teams())
    rows = [[node for node in range(*bounds) if places[node] < 0] for bounds in pairwise(graph.first)]
    return [row[0] for row in rows if row]


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"per_layer": True, "prefetch": 0}], ids=str)
def test_collectives_of_replicas_are_points_of_one_order(options: dict[str, Any]) -> None:
    """Wherever the host of a replica waits for its device, the others come to what is under way without it."""
    moved = 0
    for route in ((0, 0, 1, 0, 0, 1), (0, 1, 0, 1, 0, 1), (1, 1, 0, 0, 1, 0)):
        for layers in (((1, 2), (1, 1)), ((1, 1, 1), (1, 2, 1))):
            shape = Shape(layers, (route, (0,) * 6), (2, 1))
            program = add_parameters(add_transfers(generate("ministage", shape)), **options)
            graph = Graph(program)
            assert list(stuck_events(graph, graph.teams())) == _first_without_a_place(graph)
            ordered = post_together(program)
            graph = Graph(ordered)
            assert list(stuck_events(graph, graph.teams())) == [] == _first_without_a_place(graph)
            assert validate(ordered) == []
            assert [sorted(map(str, ops)) for ops in ordered.ops] == [sorted(map(str, ops)) for ops in program.ops]
            moved += ordered != program
    assert moved, "some of them were not in one order"


def _sharing_experts(schedule: str, route: tuple[tuple[int, ...], ...], **more: Any) -> Program:
    """Two stages, the first of two replicas that share experts."""
    replicas = tuple(max(row) + 1 for row in route)
    chunks = 1 + (schedule in ("interleaved", "ministage"))
    shape = Shape(layers=((1,) * chunks,) * 2, route=route, replicas=replicas, companions=((0, 1),), **more)
    return generate(schedule, shape)


ALTERNATING = (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "ministage", "zb-h1"])
def test_replicas_that_share_experts_run_their_passes_together(schedule: str) -> None:
    program = add_transfers(_sharing_experts(schedule, (ALTERNATING, (0,) * 6)))
    assert validate(program) == [] and loads(dumps(program)) == program
    graph = Graph(program)
    assert len(meetings(graph)) == 6 * len(program.shape.layers[0])
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
