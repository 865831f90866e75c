"""Replicas that fall into separate pipelines, and the orders of those that do not."""

import gc
import time

import pytest

from megatron_het.schedule import Kind, Program, Shape, add_transfers, generate
from megatron_het.schedule.generators.listing import ORDERS, parts_of
from megatron_het.schedule.validate import check


def renumbered(program: Program, device: int, microbatches: list[int]) -> list[tuple[int, int, int, int]]:
    """A device's compute order in its pipeline's own numbers."""
    return [(op.kind, microbatches.index(op.microbatch), op.slice, op.chunk) for op in program.compute(device)]


@pytest.mark.parametrize(("name", "chunks", "slices"), [("1f1b", 1, 1), ("interleaved", 2, 1), ("slimpipe", 1, 6)])
def test_equal_pipelines_get_the_order_of_one(name: str, chunks: int, slices: int) -> None:
    """Six stages of four replicas with speeds that differ by stage: each row is Megatron's plain pipeline."""
    stages, width, each = 6, 4, 12
    shape = Shape(
        layers=((1,) * chunks,) * stages,
        route=(tuple(m % width for m in range(width * each)),) * stages,
        replicas=(width,) * stages,
        slices=slices,
    )
    speeds = [1.0 - 0.1 * s for s in range(stages) for _ in range(width)]
    program = generate(name, shape, speeds=speeds)
    alone = generate(name, Shape.uniform(stages, each, chunks=chunks, slices=slices))
    for d, (stage, replica) in enumerate(shape.devices):
        own = list(range(replica, width * each, width))
        assert renumbered(program, d, own) == renumbered(alone, stage, list(range(each)))


def test_parts_of_a_shape() -> None:
    """Two pipelines of different width, and a replica without microbatches."""
    shape = Shape(layers=((1,), (1,)), route=((0, 1, 1, 0), (2, 1, 0, 2)), replicas=(2, 4))
    first, second = parts_of(shape)
    assert (first.devices, first.microbatches) == ((0, 4), (0, 3))
    assert (second.devices, second.microbatches) == ((1, 2, 3), (1, 2))
    assert second.shape == Shape(((1,), (1,)), ((0, 0), (1, 0)), (1, 2))
    program = generate("1f1b", shape)
    assert program.ops[5] == ()
    assert {op.microbatch for op in program.ops[3]} == {1}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_runs_and_holds_its_limit(order: str) -> None:
    """Stages of two and three replicas; the whole program passes the validator."""
    shape = Shape(
        layers=((2,), (3,), (1,)),
        route=(tuple(m % 2 for m in range(12)), tuple(m % 3 for m in range(12)), (0,) * 12),
        replicas=(2, 3, 1),
    )
    program = generate("1f1b", shape, order=order)
    check(add_transfers(program))
    assert all(len(ops) == 2 * len(shape.microbatches_of(d)) for d, ops in enumerate(program.ops))


def test_many_replicas_of_one_microbatch_each_take_linear_time() -> None:
    """Half a minute where every part looks at every microbatch."""
    many = 20_000
    shape = Shape(layers=((1,),), route=(tuple(range(many)),), replicas=(many,))
    gc.disable()  # a collection looks at everything that other tests of this process have left
    try:
        start_s = time.process_time()
        program = generate("1f1b", shape)
        assert time.process_time() - start_s < 4.0
    finally:
        gc.enable()
    assert [len(ops) for ops in program.ops] == [2] * many


def test_orders_differ() -> None:
    """1F1B on every replica alternates where the greedy order runs what is there."""
    shape = Shape(layers=((4,), (1,)), route=((0,) * 9, tuple(m % 3 for m in range(9))), replicas=(1, 3))
    by_order = {order: generate("1f1b", shape, order=order, slack=0.0).ops[0] for order in ORDERS}
    kinds = [op.kind for op in by_order["alternating"]]
    first = kinds.index(Kind.BACKWARD)
    steady = kinds[first - 1 : len(kinds) - (first - 1)]
    assert steady == [Kind.FORWARD, Kind.BACKWARD] * (len(steady) // 2)
    assert by_order["greedy"] != by_order["backward-first"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "slimpipe"])
@pytest.mark.parametrize("order", ["fastest", 3, None])
def test_an_unknown_order_is_refused(name: str, order: object) -> None:
    with pytest.raises(ValueError, match=f"schedule {name}: order = {order!r}: must be one of greedy, alternating"):
        generate(name, Shape.uniform(2, 4, slices=2 if name == "slimpipe" else 1), order=order)
