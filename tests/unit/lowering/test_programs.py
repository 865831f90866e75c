"""The one assembly: what it makes of random plans can be run, simulated and lowered, or is refused before."""

import dataclasses
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megatron_het.features import FEATURES, features_of
from megatron_het.features.context_exchange.exchange import exchange_edges
from megatron_het.features.registry import check_plan_alone, runnable_schedules
from megatron_het.features.zero_bubble.spec import ZeroBubble
from megatron_het.lowering.programs import (
    assemble,
    build,
    costs_of,
    planned_costs,
    posted_for,
    program_of,
    schedule_shape,
)
from megatron_het.lowering.ranks import (
    BoundaryMap,
    boundary_map,
    edges,
    expert_name,
    expert_segments,
    held_experts,
    lower,
)
from megatron_het.plan import (
    Cut,
    ModelShape,
    Placement,
    Plan,
    PlanError,
    Prediction,
    Replica,
    ScheduleSpec,
    Stage,
    TrainingShape,
    check_plan,
)
from megatron_het.plan.schema import PER_CHUNK, PER_DEVICE
from megatron_het.schedule import RECEIVES, SENDS, Costs, Kind, Link, Memory, Program, Shape, cost, dumps, loads
from megatron_het.schedule.generators.listing import parts_of
from megatron_het.schedule.memory import CATEGORIES
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.validate import validate
from tests.unit.plan.test_plan import document, read

LAYERS, LENGTH, MICROBATCHES = 12, 48, 6


def plan_of(schedule: str, parameters: dict[str, Any], stages: int = 2, chunks: int = 1, **more: Any) -> Plan:
    """Equal stages of single replicas; ``counts`` are the chunks of each, ``cps`` sizes of which the replicas take
    turns, ``shares`` their parts.
    """
    widths, sizes = more.get("widths", (1,) * stages), more.get("sizes", (1,) * stages)
    cps, shares, rank, made = more.get("cps", (1,)), more.get("shares", ()), 0, []
    for s in range(stages):
        replicas = []
        for q in range(widths[s]):
            cp = cps[(s + q) % len(cps)]
            count = sizes[s] * cp
            ids = tuple(range(q, MICROBATCHES, widths[s]))
            ranks = tuple(range(rank, rank + count))
            replicas.append(Replica(ranks, ids, speed=1 / (1 + q), cp=cp, cp_shares=shares[:cp]))
            rank += count
        own = more["counts"][s] if "counts" in more else chunks
        made.append(Stage((LAYERS // stages // own,) * own, tuple(replicas)))
    training = TrainingShape(
        1, MICROBATCHES, sequence_parallel=more.get("sequence_parallel", False), distributed_optimizer=True
    )
    model = ModelShape(LAYERS, 64, 4, 4, LENGTH, tied_embeddings=more.get("tied", False))
    return Plan(model, training, tuple(made), ScheduleSpec(schedule, parameters))


def _values(kind: type, choices: tuple[str, ...], counts: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Of a parameter; lists have a number per stage, replica or chunk (``counts``)."""
    if choices:
        return st.sampled_from(choices)
    if kind is list:
        return st.sampled_from(counts).flatmap(lambda n: st.lists(st.integers(1, 9), min_size=n, max_size=n))
    if kind is bool:
        return st.booleans()
    return st.integers(1, 4) if kind is int else st.sampled_from((0.25, 0.5, 1.0))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any schedule with any features; about half of what they say is refused."""
    name = draw(st.sampled_from(runnable_schedules()))
    parameters: dict[str, Any] = {}
    stages = draw(st.integers(1, 3))
    chunks = draw(st.sampled_from((1, 2, 2))) if name not in ("1f1b", "gpipe", "zb-h1") else 1
    widths = tuple(draw(st.integers(1, 2)) for _ in range(stages))
    own = tuple(draw(st.sampled_from((chunks, chunks, 3 - chunks))) if chunks > 1 else 1 for _ in range(stages))
    counts = stages, sum(widths), sum(width * count for width, count in zip(widths, own, strict=True))
    for feature in FEATURES:
        if not feature.goes_with(name) or not draw(st.booleans()):
            continue
        for option in feature.parameters:
            if option is feature.switch:
                parameters[option.parameter] = True
            elif option.parameter != "slices" and draw(st.booleans()):
                parameters[option.parameter] = draw(_values(option.kind, option.choices, counts))
    if name in ("seq1f1b", "slimpipe", "terapipe"):
        parameters["slices"] = stages * draw(st.integers(1, 2))
    alike = draw(st.integers(1, 2))
    return plan_of(
        name,
        parameters,
        stages,
        chunks,
        widths=widths,
        counts=own,
        sizes=tuple(draw(st.sampled_from((alike, alike, alike, 1, 2))) for _ in range(stages)),
        cps=draw(st.sampled_from(((1,), (1,), (2,), (1, 2), (2, 3)))),
        shares=draw(st.sampled_from(((), (1, 2, 4)))),
        sequence_parallel=draw(st.booleans()),
        tied=draw(st.booleans()),
    )


def pieces_meet(plan: Plan, program: Program) -> None:
    """On every pair of ranks, what one sends the other receives, in one order."""
    sent: Counter[tuple[Any, ...]] = Counter()
    received: Counter[tuple[Any, ...]] = Counter()
    placement = Placement(plan)
    boundaries = boundary_map(placement)
    for rank in range(plan.world_size):
        where = placement.locate(rank)
        d = program.shape.device(where.stage, where.replica)
        lowered = lower(program, boundaries, d, rank)
        assert {op.kind for op in lowered.ops} <= {op.kind for op in program.ops[d]}
        for op in lowered.ops:
            if op.kind in SENDS:
                sent[rank, op.peer, op.kind.other_end, op.microbatch, op.slice] += op.hi - op.lo
            elif op.kind in RECEIVES:
                received[op.peer, rank, op.kind, op.microbatch, op.slice] += op.hi - op.lo
    assert sent == received


def memory_of(shape: Shape) -> Memory:
    chunks = [len(shape.layers[d.stage]) for d in shape.devices]
    each = lambda size: tuple((size,) * n for n in chunks)  # noqa: E731
    return Memory(
        parameter_bytes=each(16.0),
        gradient_bytes=each(32.0),
        activation_bytes=each(64.0),
        kv_bytes=each(8.0),
        parameter_shard_bytes=each(4.0),
        gradient_shard_bytes=each(4.0),
        boundary_bytes=each(2.0),
        workspace_bytes=each(1.0),
        logits_bytes=(128.0,) * len(chunks),
    )


def check_complete(program: Program) -> None:
    """No reader finds fault with a program."""
    assert validate(program) == []
    assert loads(dumps(program)) == program
    costs = Costs.uniform(program.shape, memory=memory_of(program.shape), message_bytes=1.0)
    for host_blocks in (False, True):
        result = simulate(program, replace(costs, host_blocks=host_blocks))
        assert len(list(result.events())) == sum(map(len, program.ops))
        assert result.makespan_s >= max(result.compute_s) - 1e-9
        assert all(bubble.total_s >= -1e-9 for bubble in result.bubble)
        for use in result.memory:
            for category in CATEGORIES:
                curve = use.curve(category)
                assert min(held for _, held in curve) >= -1e-6, (category, curve)
            for category in ("activations", "kv", "logits", "workspace"):
                assert use.curve(category)[-1][1] == pytest.approx(0.0, abs=1e-6), category


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_program_runs_or_is_refused_before(plan: Plan) -> None:
    try:
        check_plan(plan)
        check_plan_alone(plan)
        programs = build(plan)
    except PlanError as error:
        event(f"refused: {error.where}")
        return
    event("built")
    on = {feature.name for feature, _ in features_of(plan)}
    for forward_only, program in programs.items():
        assert program.forward_only == forward_only
        check_complete(program)
        assert {op.kind.executor for ops in program.ops for op in ops} <= {"compute", "transfer"} | on
        assert simulate(posted_for("gloo", program), Costs.uniform(program.shape)).makespan_s > 0
        pieces_meet(plan, program)


ON = [
    ("1f1b", {"vocabulary": True}, 1),
    ("1f1b", {"vocabulary": True, "offload_activations": 0.5}, 1),
    ("gpipe", {"vocabulary": True}, 1),
    ("interleaved", {"vocabulary": True, "offload_activations": 0.5}, 2),
    ("slimpipe", {"slices": 4, "vocabulary": True, "context_exchange": True, "offload_activations": 1.0}, 1),
    ("slimpipe", {"slices": 8, "context_exchange": True, "exchange_idle": True, "offload_activations": 0.5}, 2),
    ("seq1f1b", {"slices": 4, "vocabulary": True, "offload_activations": 0.5}, 1),
    ("terapipe", {"slices": 4, "vocabulary": True}, 1),
    ("ministage", {"window": True, "offload": True, "offload_activations": 1.0, "update": "undo"}, 3),
    ("data-parallel", {"offload_activations": 0.5}, 2),
    ("data-parallel", {"window": True, "zero": 2, "offload_activations": 0.5}, 2),
    ("data-parallel", {"window": True, "zero": 3, "offload": True}, 3),
]


@pytest.mark.parametrize(("schedule", "parameters", "chunks"), ON)
def test_all_features_of_a_plan_are_in_its_program(schedule: str, parameters: dict[str, Any], chunks: int) -> None:
    widths = (1, 1) if schedule == "terapipe" or "context_exchange" in parameters else (2, 1)
    stages = 1 if schedule == "data-parallel" else 2
    plan = plan_of(schedule, parameters, stages, chunks=chunks, widths=widths[:stages])
    check_plan_alone(plan)
    program = build(plan)[False]
    assert program == program_of(plan)
    kinds = {op.kind for ops in program.ops for op in ops}
    assert (Kind.VOCAB_FORWARD in kinds) == (Kind.EMBED_BACKWARD in kinds) == ("vocabulary" in parameters)
    assert (Kind.ATTEND_HELP in kinds) == ("context_exchange" in parameters)
    assert (Kind.PARAM_GATHER in kinds) == ("window" in parameters)
    assert (Kind.OPTIMIZER_STEP in kinds) == ("update" in parameters)
    assert (Kind.ACT_OFFLOAD in kinds) == ("offload_activations" in parameters)
    for whole in build(plan).values():
        check_complete(whole)


def test_a_parameter_that_nobody_reads_is_an_error() -> None:
    """Also where the plan has not been checked, as in the planner."""
    for parameters in ({"slak": 1}, {"window": True}, {"slices": 2}):
        with pytest.raises(PlanError, match="unexpected keyword argument"):
            program_of(plan_of("1f1b", parameters))


def test_the_shape_says_what_the_plan_says() -> None:
    plan = plan_of("slimpipe", {"slices": 4}, chunks=2, widths=(2, 1))
    shape = schedule_shape(plan)
    assert (shape.layers, shape.replicas, shape.slices) == (((3, 3), (3, 3)), (2, 1), 4)
    assert shape.route == ((0, 1, 0, 1, 0, 1), (0,) * 6)
    assert assemble(shape, "slimpipe", transfers="none").shape == shape


@st.composite
def parted_plans(draw: st.DrawFn) -> Plan:
    """Plans whose replicas fall into parts: all stages deal the microbatches alike, to replicas of any size."""
    plan = draw(plans())
    width, order = draw(st.integers(2, 3)), draw(st.permutations(range(3)))
    dealt = [tuple(range(q, MICROBATCHES, width)) for q in range(width)]
    rank, stages = 0, []
    for stage in plan.stages:
        replicas = []
        for q in range(width):
            tp = draw(st.sampled_from((1, 2)))
            speed = 1 / (1 + draw(st.integers(0, 1)))
            replicas.append(Replica(tuple(range(rank, rank + tp)), dealt[order[q] % width], speed=speed))
            rank += tp
        stages.append(Stage(stage.layers, tuple(replicas)))
    return replace(plan, stages=tuple(stages))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(plans(), parted_plans()))
def test_one_ranks_programs_are_those_of_the_whole(plan: Plan) -> None:
    try:
        check_plan(plan)
        check_plan_alone(plan)
        whole = build(plan)
    except PlanError:
        return
    placement = Placement(plan)
    shape = whole[False].shape
    parts = parts_of(shape)
    boundaries = boundary_map(placement)
    for rank in range(plan.world_size):
        where = placement.locate(rank)
        device = shape.device(where.stage, where.replica)
        part = next((part.devices for part in parts if device in part.devices), ())
        for mode, program in build(plan, rank).items():
            alone = any(not ops and there for ops, there in zip(program.ops, whole[mode].ops, strict=True))
            event("a part alone" if alone else "the whole")
            assert replace(program, ops=whole[mode].ops) == whole[mode]
            assert all(program.ops[d] == whole[mode].ops[d] for d in part)
            lowered, expected = (lower(posted_for("gloo", p), boundaries, device, rank) for p in (program, whole[mode]))
            assert lowered == expected


def test_parts_that_the_schedule_does_not_run_alone_are_built_with_the_whole() -> None:
    """3 microbatches make no whole groups of 2, so that interleaved 1F1B orders both pipelines together."""
    plan = plan_of("interleaved", {}, stages=2, chunks=2, widths=(2, 2))
    uneven = [((0, 2, 4, 5), (1, 3)), ((0, 2, 4), (1, 3, 5))]
    for ids, runs in zip(uneven, (True, False), strict=True):
        dealt = [tuple(replace(r, microbatches=m) for r, m in zip(s.replicas, ids, strict=True)) for s in plan.stages]
        made = replace(plan, stages=tuple(replace(s, replicas=r) for s, r in zip(plan.stages, dealt, strict=True)))
        for rank in range(plan.world_size):
            program = build(made, rank)[False]
            assert (sum(map(bool, program.ops)) == 2) == runs
            assert all(ops in ((), other) for ops, other in zip(program.ops, build(made)[False].ops, strict=True))


# From device programs to rank programs.


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_send_has_its_receive_in_the_same_order_on_each_edge(sequence_parallel: bool, forward_only: bool) -> None:
    placement = Placement(read(document()))
    program = build(placement.plan)[forward_only]
    boundaries = BoundaryMap(placement, 32, sequence_parallel)
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in range(placement.world_size):
        where = placement.locate(rank)
        device = program.shape.device(where.stage, where.replica)
        lowered = lower(program, boundaries, device, rank)
        for op in lowered.ops:
            if op.kind in SENDS:
                sent.setdefault((rank, op.peer), []).append((op.microbatch, op.hi - op.lo))
            elif op.kind in RECEIVES:
                received.setdefault((op.peer, rank), []).append((op.microbatch, op.hi - op.lo))
    assert sent == received
    assert set(sent) <= set(edges([program], boundaries))


@pytest.mark.parametrize("sizes", [(1, 2), (4, 2), (2, 4), (4, 1), (2, 2)])
def test_attention_is_handed_over_by_heads(sizes: tuple[int, int]) -> None:
    """Every key-value group of an owner goes to one rank of the helper, which expects as many."""
    body, world = document(), sum(sizes)
    ranks = (list(range(sizes[0])), list(range(sizes[0], world)))
    body["model"] |= {"num_attention_heads": 8, "num_query_groups": 4}
    body["stages"] = [{"layers": [2], "replicas": [{"ranks": r, "microbatches": [0, 1, 2, 3]}]} for r in ranks]
    body["schedule"] = {"name": "slimpipe", "parameters": {"slices": 4, "context_exchange": True}}
    placement = Placement(read(body))
    program, boundaries = build(placement.plan)[False], BoundaryMap(placement, 8, sequence_parallel=False)
    given: list[tuple[int, int, tuple[int, ...], int]] = []
    helped: list[tuple[int, int, tuple[int, ...], int]] = []
    groups: dict[tuple[Any, ...], set[int]] = {}
    for rank in range(world):
        where = placement.locate(rank)
        for op in lower(program, boundaries, where.stage, rank).ops:
            what = (*op.key, op.start, op.stop)
            if op.kind is Kind.ATTEND_GIVE:
                given.append((rank, op.peer, what, op.hi - op.lo))
                first = where.tp_rank * 4 // sizes[where.stage]
                groups.setdefault((where.stage, what), set()).update(range(first + op.lo, first + op.hi))
            elif op.kind is Kind.ATTEND_HELP:
                helped.append((op.peer, rank, what, op.hi - op.lo))
    assert given and sorted(given) == sorted(helped)
    assert all(found == {0, 1, 2, 3} for found in groups.values())
    assert {(owner, helper) for owner, helper, _, _ in given} <= set(exchange_edges([program], boundaries))


def test_a_rank_without_a_piece_of_a_replicated_result_keeps_nothing_to_send() -> None:
    placement = Placement(read(document()))
    program = build(placement.plan)[False]
    boundaries = BoundaryMap(placement, 32, sequence_parallel=False)
    first, second = (lower(program, boundaries, 0, t) for t in range(2))
    # Microbatch 2 goes from TP 2 to TP 1: only the first sender has a piece of it.
    assert 2 in {key[0] for _, key in first.sends}
    assert 2 not in {key[0] for _, key in second.sends}


def test_operations_without_a_handler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = document()
    body["stages"][1]["replicas"] = [{"ranks": [2, 3], "microbatches": [0, 1, 2, 3]}]
    body["schedule"] = {"name": "zb-h1", "parameters": {}}
    assert build(read(body))
    monkeypatch.setattr(ZeroBubble, "options_of", lambda self, plan: None)
    with pytest.raises(ValueError, match="it uses BACKWARD_WEIGHT, .*not executed"):
        build(read(body))


# Which experts a rank holds, and what their parameters are called.


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "cut", [Cut(1), Cut(2), Cut(2, 2), Cut(4, 2), Cut(4, 4), Cut(6, 3), Cut(1, 4), Cut(2, 2, 2)], ids=str
)
def test_ranks_hold_every_row_of_every_expert_once(cut: Cut, stride: int) -> None:
    experts, rows = 12, 24
    held = [
        (expert, row)
        for rank in range(cut.expert_ranks)
        for expert in range(experts)
        for part in expert_segments(rows, cut, rank, stride, expert, experts)
        for row in range(part.full, part.full + part.length)
    ]
    assert sorted(held) == [(expert, row) for expert in range(experts) for row in range(rows)]


def test_ranks_of_a_part_have_the_same_experts() -> None:
    cut = Replica(tuple(range(10, 18)), (0,), cp=2, ep=2).cut
    assert cut == Cut(4, 2)
    assert [list(held_experts(6, cut, t)) for t in range(4)] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (
            "layers.3.mlp.experts.local_experts.1.linear_fc2.weight",
            "layers.3.mlp.experts.local_experts.7.linear_fc2.weight",
        ),
        ("layers.3.mlp.experts.linear_fc1.weight1", "layers.3.mlp.experts.linear_fc1.weight7"),
        ("layers.3.mlp.experts.linear_fc2.bias1", "layers.3.mlp.experts.linear_fc2.bias7"),
        ("layers.3.mlp.shared_experts.linear_fc1.weight", None),
        ("layers.3.mlp.router.weight", None),
        ("layers.3.mlp.linear_fc1.weight", None),
    ],
)
def test_names(name: str, other: str | None) -> None:
    found = expert_name(name)
    assert (found and (found.expert, found.of(7))) == (other and (1, other))


# The costs that a plan file carries: the simulator says the same of them, and wrong ones are refused.


def _plan() -> Plan:
    ids = tuple(range(6))
    return Plan(
        ModelShape(5, 64, 8, 4, 32),
        TrainingShape(1, 6),
        (
            Stage((2, 1), (Replica((0,), ids[::2], "a"), Replica((1,), ids[1::2], "b"))),
            Stage((1, 1), (Replica((2,), ids, "a"),)),
        ),
        ScheduleSpec("interleaved"),
    )


def _costs() -> Costs:
    return Costs(
        forward_s=((0.2, 0.1), (0.4, 0.2), (0.1, 0.3)),
        backward_s=((0.4, 0.2), (0.8, 0.4), (0.2, 0.6)),
        step_s=((0.01, 0.02), (0.01, 0.02), (0.03, 0.04)),
        tail_s=(0.05, 0.05, 0.07),
        message_bytes=1000.0,
        link=lambda a, b: Link(0.001 * (1 + a), 1e5 * (1 + b)),
        operation_s=0.002,
        host_blocks=True,
    )


def _carrying() -> Plan:
    plan = _plan()
    return dataclasses.replace(plan, predicted=Prediction(1.0, 0.1, costs=planned_costs(_costs(), program_of(plan))))


def test_all_tables_of_the_simulator_are_carried() -> None:
    assert set(PER_CHUNK) == set(cost._PER_CHUNK) - set(cost._MEMORY_PER_CHUNK)
    assert set(PER_DEVICE) == set(cost._PER_DEVICE)


def test_a_plan_that_was_written_and_read_is_simulated_as_before() -> None:
    plan = Plan.from_json(json.loads(json.dumps(_carrying().to_json())))
    check_plan(plan)
    found = costs_of(plan)
    program = program_of(plan)
    before, after = simulate(program, _costs()), simulate(program, found)
    assert after.makespan_s == pytest.approx(before.makespan_s, rel=1e-5)
    assert after.end_s == pytest.approx(before.end_s, rel=1e-5)


def test_devices_and_links_that_are_alike_share_a_row() -> None:
    alike = dataclasses.replace(_costs(), step_s=(), tail_s=(), link=lambda a, b: Link(0.1, 1e5))
    alike = dataclasses.replace(alike, forward_s=((0.2, 0.1),) * 3, backward_s=((0.4, 0.2),) * 3)
    found = planned_costs(alike, program_of(_plan()))
    assert [row.devices for row in found.devices] == [(0, 1, 2)]
    assert len(found.links) == 1


def test_a_plan_without_costs_says_nothing() -> None:
    assert costs_of(_plan()) is None
    assert "costs" not in dataclasses.replace(_plan(), predicted=Prediction(1.0, 0.1)).to_json()["predicted"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda c: c["devices"][0].update(forward_s=[0.1]), "forward_s"),
        (lambda c: c["devices"][0].update(forward_s=[0.1, -1.0]), "forward_s"),
        (lambda c: c["devices"][0].update(step_s=[0.1]), "step_s"),
        (lambda c: c["devices"][0].update(devices=[7]), "devices[0].devices"),
        (lambda c: c["devices"].pop(), "costs.devices"),
        (lambda c: c["links"][0].update(bytes_per_s=0.0), "bytes_per_s"),
        (lambda c: c["links"][0].update(pairs=[[0, 9]]), "pairs"),
        (lambda c: c["links"][0].update(pairs=[[0]]), "pairs"),
        (lambda c: c.update(message_bytes=-1.0), "message_bytes"),
        (lambda c: c.update(speed=1.0), "speed"),
    ],
)
def test_costs_that_do_not_fit_are_refused(change: Any, where: str) -> None:
    document = json.loads(json.dumps(_carrying().to_json()))
    change(document["predicted"]["costs"])
    with pytest.raises(PlanError) as refused:
        check_plan(Plan.from_json(document))
    assert where in refused.value.where
