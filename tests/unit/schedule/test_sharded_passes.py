"""ZeRO-2 and 3 without a pipeline: collectives of every pass, of all replicas, in one order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_het.features.window.passes import add_sharded_passes
from megatron_het.schedule import Costs, Kind, Op, Program, Shape, generate, simulate
from megatron_het.schedule.cost import Memory
from megatron_het.schedule.validate import validate

UNEVEN = Shape(((1, 2),), ((0, 0, 1, 0),), (2,))  # three passes and one, two chunks


def collectives(program: Program, device: int) -> list[Op]:
    return [op for op in program.ops[device] if op.kind in (Kind.PARAM_GATHER, Kind.GRAD_REDUCE)]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("options", [{}, {"per_layer": True, "offload": True}, {"keep_at_turn": False, "prefetch": 2}])
@pytest.mark.parametrize("forward_only", [False, True])
def test_runs_on_unequal_replicas(zero: int, options: dict[str, bool | int], forward_only: bool) -> None:
    program = generate("data-parallel", UNEVEN, forward_only=forward_only)
    after = add_sharded_passes(program, zero=zero, **options)  # type: ignore[arg-type]
    assert validate(after) == []
    assert collectives(after, 0) == collectives(after, 1)
    assert [after.compute(d) for d in range(2)] == [program.compute(d) for d in range(2)]
    assert simulate(after, Costs.uniform(after.shape)).makespan_s > 0


def test_gradients_are_reduced_after_every_pass_of_the_replica_with_most() -> None:
    after = add_sharded_passes(generate("data-parallel", UNEVEN), zero=2)
    for device in range(2):
        reduced = [op.chunk for op in after.ops[device] if op.kind is Kind.GRAD_REDUCE]
        assert reduced == [1, 0] * 3
        assert sum(op.kind is Kind.PARAM_GATHER for op in after.ops[device]) == 2  # once per iteration


def test_zero_3_opens_a_chunk_for_its_forward_and_again_for_its_backward() -> None:
    after = add_sharded_passes(generate("data-parallel", UNEVEN), zero=3)
    # Forward and backward of the last chunk share a gather, and the first chunk's backward and next forward do.
    assert [op.chunk for op in after.ops[0] if op.kind is Kind.PARAM_GATHER] == [0, 1, 0, 1, 0, 1, 0]
    open_chunks: set[int] = set()
    most = 0
    for op in after.ops[1]:
        open_chunks |= {op.chunk} if op.kind is Kind.PARAM_GATHER else set()
        open_chunks -= {op.chunk} if op.kind is Kind.PARAM_RELEASE else set()
        most = max(most, len(open_chunks))
    assert most == 2 and not open_chunks


def test_a_backward_after_the_only_reduction_is_still_noticed() -> None:
    program = add_sharded_passes(generate("data-parallel", Shape(((1,),), ((0, 0),), (1,))), zero=2)
    ops = list(program.ops[0])
    first = next(i for i, op in enumerate(ops) if op.kind is Kind.GRAD_REDUCE)
    last = max(i for i, op in enumerate(ops) if op.kind is Kind.GRAD_REDUCE)
    del ops[last]
    problems = validate(replace(program, ops=(tuple(ops),)))
    assert first < last and any("already reduced" in problem.message for problem in problems)


def test_zero_3_holds_less_than_zero_2_and_zero_2_less_than_whole_gradients() -> None:
    shape = Shape(((1, 1, 1, 1),), ((0, 1, 0, 1),), (2,))
    row = ((10.0,) * 4,) * 2
    memory = Memory(parameter_bytes=row, gradient_bytes=row, gradient_shard_bytes=((5.0,) * 4,) * 2)
    costs = replace(Costs.uniform(shape), memory=memory)

    def peak(zero: int) -> float:
        found = simulate(add_sharded_passes(generate("data-parallel", shape), zero=zero), costs)
        return max(use.peak_bytes for use in found.memory)

    # All parameters, shards of gradients, one or two chunks' whole gradients.
    assert peak(3) < peak(2) <= 40 + 20 + 20


def test_refuses_what_is_no_order_of_passes() -> None:
    shape = Shape(((1,),), ((0, 0),), (1,))
    with pytest.raises(ValueError, match="not in the order"):
        add_sharded_passes(generate("gpipe", shape), zero=2)
    with pytest.raises(ValueError, match="zero = 1"):
        add_sharded_passes(generate("data-parallel", shape), zero=1)
    with pytest.raises(ValueError, match="stages = 2"):
        generate("data-parallel", Shape.uniform(2, 2))
