"""Layers are captured in the order of the program of every schedule; what is sent leaves their memory."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_het.features.layer_graphs.runtime import LayerGraphs, Passes
from megatron_het.features.layer_graphs.spec import BY_TE
from megatron_het.lowering.programs import build
from megatron_het.lowering.ranks import boundary_map, lower
from megatron_het.plan import Placement
from megatron_het.runtime.feature import BackwardPass, Call, ForwardPass, Iteration
from megatron_het.schedule.kinds import Kind
from testing.combination_cases import ALONE, PARAMETERS, case_of, pair_row

SCHEDULES = [name for name in PARAMETERS["schedule"] if name != ALONE]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_is_captured_once_in_the_order_of_the_program(schedule: str) -> None:
    plan = case_of(pair_row([("schedule", schedule)]), schedule, 0).plan
    program, placement = build(plan)[False], Placement(plan)
    boundaries = boundary_map(placement)
    for rank in range(plan.world_size):
        where = placement.locate(rank)
        lowered = lower(program, boundaries, program.shape.device(where.stage, where.replica), rank)
        passes = Passes.of(lowered)
        count = len(passes.forwards)
        assert sorted(map(abs, passes.order)) == sorted([*range(1, count + 1)] * 2)
        assert all(passes.order.index(n) < passes.order.index(-n) for n in range(1, count + 1))
        backward = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        ran = [op for op in lowered.ops if op.kind in (Kind.FORWARD, *backward)]
        for number, op in zip(passes.order, ran, strict=True):
            assert passes.forwards[abs(number) - 1].key == op.key and (number > 0) == (op.kind == Kind.FORWARD)
        for chunk in {op.chunk for op in passes.forwards}:
            mine = [passes.numbers[op.key] for op in passes.forwards if op.chunk == chunk]
            assert mine == list(range(len(mine)))


def test_what_leaves_a_chunk_is_copied_out_of_the_memory_of_the_graphs() -> None:
    """A transfer may still read it when the next graph writes there."""
    plan = case_of(pair_row([("schedule", "1f1b")]), "copies", 0).plan
    program, placement = build(plan)[False], Placement(plan)
    passes = Passes.of(lower(program, boundary_map(placement), program.shape.device(0, 0), 0))
    graphs, call = LayerGraphs(BY_TE, passes, None), cast(Call, SimpleNamespace(forward_only=False))
    for captured in (False, True):
        graphs.is_captured = captured
        inside = torch.zeros(2)
        forward = ForwardPass(passes.forwards[0], None, print, None, ends_in_loss=False, output=inside)
        with graphs.around_forward(forward, call):
            pass
        backward = BackwardPass(passes.forwards[0], result=inside)
        with graphs.around_backward(backward, call, cast(Iteration, None)):
            pass
        inside.fill_(1.0)
        for left in (forward.output, backward.result):
            assert left is not None and bool(left.sum() == 0) == captured
