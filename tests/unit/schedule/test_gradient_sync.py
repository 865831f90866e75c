"""From where on gradients may be reduced early."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.features import feature, options_of
from megatron_het.features.window.passes import add_parameters, post_together
from megatron_het.lowering.programs import build
from megatron_het.plan import Plan, PlanError
from megatron_het.plan.from_flags import plan_from_flags
from megatron_het.plan.schema import ScheduleSpec
from megatron_het.schedule.generators import generate
from megatron_het.schedule.gradient_sync import counting_places, last_makers, sync_points
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.ir import Kind, Program, Shape
from megatron_het.schedule.joint import stuck_events
from megatron_het.schedule.transfers import add_transfers
from megatron_het.schedule.validate import validate
from testing.cases import Case, build_plan, with_schedule
from tests.unit.plan.megatron_flags import TWO_BY_TWO, flags

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
    moved = Program(
        **{n: getattr(program, n) for n in program.__dataclass_fields__}
        | {"ops": (program.ops[0], (*ops[:place], *ops[place + 1 :], ops[place]), *program.ops[2:])}
    )
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
    assert places is not None
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


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"per_layer": True, "prefetch": 0}], ids=str)
def test_collectives_of_replicas_are_points_of_one_order(options: dict[str, Any]) -> None:
    """Wherever the host of a replica waits for its device, the others come to what is under way without it."""
    moved = 0
    for route in ((0, 0, 1, 0, 0, 1), (0, 1, 0, 1, 0, 1), (1, 1, 0, 0, 1, 0)):
        for layers in (((1, 2), (1, 1)), ((1, 1, 1), (1, 2, 1))):
            shape = Shape(layers, (route, (0,) * 6), (2, 1))
            program = add_parameters(add_transfers(generate("ministage", shape)), **options)
            ordered = post_together(program)
            graph = Graph(ordered)
            assert list(stuck_events(graph, graph.teams())) == []
            assert validate(ordered) == []
            assert [sorted(map(str, ops)) for ops in ordered.ops] == [sorted(map(str, ops)) for ops in program.ops]
            moved += ordered != program
    assert moved, "some of them were not in one order"
