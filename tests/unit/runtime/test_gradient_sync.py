"""From where on gradients may be reduced early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_het.plan import Placement, Plan, PlanError
from megatron_het.plan.from_flags import plan_from_flags
from megatron_het.plan.schema import ScheduleSpec
from megatron_het.runtime.gradient_sync import check_overlap, last_makers, sync_points
from megatron_het.runtime.programs import build_programs
from megatron_het.schedule.ir import Kind, Program

FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
).split()


def made(**parameters: object) -> tuple[Plan, Program]:
    plan, _ = plan_from_flags(FLAGS, 4, ScheduleSpec("slimpipe", {"slices": 4, **parameters}))
    return plan, build_programs(Placement(plan))[False]


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
    early = SimpleNamespace(overlap_grad_reduce=True)
    check_overlap(plan, program, early)
    ops = list(program.ops[1])
    place = last_makers(ops)[Kind.BACKWARD, 1]
    moved = Program(**{n: getattr(program, n) for n in program.__dataclass_fields__} | {
        "ops": (program.ops[0], (*ops[:place], *ops[place + 1 :], ops[place]), *program.ops[2:]),
    })  # fmt: skip
    with pytest.raises(PlanError, match="--overlap-grad-reduce.*replicas of stage 0.*different orders"):
        check_overlap(plan, moved, early)
    check_overlap(plan, moved, SimpleNamespace(overlap_grad_reduce=False))
