"""The one assembly: what it makes of random plans can be run, simulated and lowered, or is refused before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megatron_het.features import FEATURES, features_of
from megatron_het.features.plan_checks import check_plan_alone, runnable_schedules
from megatron_het.lowering.programs import assemble, build, posted_for, program_of, schedule_shape
from megatron_het.lowering.ranks import boundary_map, lower
from megatron_het.plan import ModelShape, Placement, Plan, PlanError, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.plan.validate import check_plan
from megatron_het.schedule import simulate
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.generators.listing import parts_of
from megatron_het.schedule.ir import RECEIVES, SENDS, Kind, Program
from megatron_het.schedule.validate import validate

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
        assert validate(program) == []
        assert {op.kind.executor for ops in program.ops for op in ops} <= {"compute", "transfer"} | on
        for posted in (program, posted_for("gloo", program)):
            assert simulate(posted, Costs.uniform(program.shape)).makespan_s > 0
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
    simulate(program, Costs.uniform(program.shape))


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
