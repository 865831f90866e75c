"""Passes keep the compute order and put their operations where they say."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_helpers import full

from megatron_het.features.activation_offload.spec import add_activation_offload
from megatron_het.features.context_exchange.passes import add_exchange, plan_exchange
from megatron_het.features.vocab_parallel.spec import add_embedding, add_vocabulary
from megatron_het.features.window.passes import add_parameters, add_sharded_passes
from megatron_het.schedule import COMPUTE, Costs, Kind, Memory, Op, Program, Shape, add_transfers, generate
from megatron_het.schedule.generators.listing import ORDERS, parts_of
from megatron_het.schedule.kinds import PARTS
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.validate import check, validate

SLIM = generate("slimpipe", Shape.uniform(4, 2, slices=8))
MINI = generate("ministage", Shape(((2, 1), (3,), (1, 1, 2)), ((0, 0, 0), (0, 1, 0), (1, 0, 1)), (1, 2, 2)))


def test_no_transfer_within_a_device() -> None:
    one = full("ministage", Shape.uniform(1, 3, chunks=3))
    assert all(op.kind in COMPUTE for op in one.ops[0])
    v = full("zb-v", Shape.uniform(3, 4, chunks=2, placement="v"))
    assert all(op.peer != 2 for op in v.ops[2])
    assert not [op for op in v.ops[2] if op.kind == Kind.SEND_FORWARD and op.chunk == 0]


def test_transfers_are_added_once() -> None:
    with pytest.raises(ValueError, match="already has transfers"):
        add_transfers(add_transfers(SLIM))
    with pytest.raises(ValueError, match="order = 'now'"):
        add_transfers(SLIM, order="now")


def test_earliest_keys_need_no_mask() -> None:
    """Units given away end before the slice's own."""
    for slot in plan_exchange(SLIM, units=2, helping=True).slots:
        for move in slot.moves:
            assert 0 <= move.start < move.stop <= move.slice * 2


def test_kept_keys_and_values_save_traffic() -> None:
    plain, kept = (plan_exchange(SLIM, units=2, keep=keep) for keep in (False, True))
    volume = [sum((p.volume() | {}).values()) + sum(p.volume(backward=True).values()) for p in (plain, kept)]
    assert volume[1] < 0.75 * volume[0]
    seen: set[tuple[int, ...]] = set()
    for slot in kept.slots:
        for move in slot.moves:
            for start, stop in move.sent:
                for unit in range(start, stop):
                    key = (move.owner, move.helper, move.microbatch, move.chunk, unit)
                    assert key not in seen
                    seen.add(key)


def test_exchange_is_printed_as_data() -> None:
    plan = plan_exchange(SLIM, units=2)
    assert next(line for line in plan.lines() if " F8 " in line).split("|")[1].strip() == "1 8 7 6"
    first = plan.to_json()[0]
    assert (first["slot"], first["backward"], first["loads"]) == (0, False, [1, 0, 0, 0])


def test_vocabulary_goes_to_slot_ends() -> None:
    """Forward behind the slot of the last device's forward, backward before the slot of its backward."""
    program = add_vocabulary(SLIM)
    last = program.ops[3]
    for piece in range(8):
        assert last.index(Op(Kind.VOCAB_FORWARD, 0, piece)) == last.index(Op(Kind.FORWARD, 0, piece)) + 1
        assert last.index(Op(Kind.VOCAB_BACKWARD, 0, piece)) < last.index(Op(Kind.BACKWARD, 0, piece))
    first = program.ops[0]
    assert first.index(Op(Kind.VOCAB_FORWARD, 0, 0)) == first.index(Op(Kind.FORWARD, 0, 3)) + 1


def test_window_of_the_ministage_schedule() -> None:
    """One gather per chunk and direction; the next chunk's gather before the current chunk's first use."""
    program = add_parameters(generate("ministage", Shape.uniform(2, 3, chunks=3)), keep_at_turn=False)
    kinds = [op for op in program.ops[0] if op.kind in (Kind.PARAM_GATHER, Kind.PARAM_RELEASE)]
    text = " ".join(f"{op.kind.name[6]}{op.chunk}" for op in kinds)
    assert text == "G0 G1 R0 G2 R1 R2 G2 G1 R2 G0 R1 R0"
    kept = add_parameters(generate("ministage", Shape.uniform(2, 3, chunks=3)))
    assert sum(op.kind == Kind.PARAM_GATHER for op in kept.ops[0]) == 5


def test_layers_are_gathered_forwards_and_reduced_backwards() -> None:
    program = add_parameters(generate("ministage", Shape(((3,),), ((0,),), (1,))), per_layer=True)
    assert [op.start for op in program.ops[0] if op.kind == Kind.PARAM_GATHER] == [0, 1, 2]
    assert [op.start for op in program.ops[0] if op.kind == Kind.GRAD_REDUCE] == [2, 1, 0]


@pytest.mark.parametrize(
    ("step", "order"), [("end", "G2 G1 G0 O0 O1 O2"), ("ministage", "G2 O2 G1 O1 G0 O0"), ("none", "G2 G1 G0")]
)
def test_optimizer_steps(step: str, order: str) -> None:
    """At the end after all reductions (G), or one ministage after the chunk's own, or not at all."""
    ops = add_parameters(generate("ministage", Shape.uniform(2, 3, chunks=3)), step=step).ops[0]
    found = [f"{op.kind.name[0]}{op.chunk}" for op in ops if op.kind in (Kind.GRAD_REDUCE, Kind.OPTIMIZER_STEP)]
    assert " ".join(found) == order
    if step == "ministage":
        between = ops[ops.index(Op(Kind.GRAD_REDUCE, chunk=2)) : ops.index(Op(Kind.OPTIMIZER_STEP, chunk=2))]
        assert sum(op.kind == Kind.BACKWARD for op in between) == 3


def test_activation_offload_places() -> None:
    """Offload behind the forward, fetch one backward ahead, short-lived activations stay."""
    ops = add_activation_offload(generate("gpipe", Shape.uniform(1, 4))).ops[0]
    text = " ".join(map(str, ops))
    assert text == (
        "F0.0.0 F1.0.0 AO1.0.0 F2.0.0 AO2.0.0 F3.0.0 AO3.0.0 AF1.0.0 B0.0.0 AF2.0.0 B1.0.0 AF3.0.0 B2.0.0 B3.0.0"
    )
    last = add_activation_offload(generate("1f1b", Shape.uniform(4, 8))).ops[3]
    assert all(op.kind in COMPUTE for op in last)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("order", ["slimpipe", "1f1b"])
def test_split_embeddings(order: str, forward_only: bool) -> None:
    """Every part comes before the first FORWARD of its slice, and its gradient after the last BACKWARD."""
    shape = Shape.uniform(3, 4, slices=3 if order == "slimpipe" else 1)
    program = add_embedding(add_vocabulary(generate(order, shape, forward_only=forward_only)))
    check(add_transfers(program))
    first = program.ops[0]
    for m in range(4):
        for piece in range(shape.slices):
            assert first.index(Op(Kind.EMBED_FORWARD, m, piece)) < first.index(Op(Kind.FORWARD, m, piece))
            if not forward_only:
                after = first.index(Op(Kind.EMBED_BACKWARD, m, piece))
                between = first[first.index(Op(Kind.BACKWARD, m, piece)) + 1 : after]
                assert all(op.kind in PARTS for op in between)  # behind what meets at that moment
    with pytest.raises(ValueError, match="split once"):
        add_embedding(program)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("options", [{}, {"helping": True, "keep": True}], ids=str)
def test_split_vocabulary_of_exchanging_pipelines(options: dict[str, bool], forward_only: bool) -> None:
    """Every device runs the vocabulary of the microbatches of its pipeline, at the boundaries of its slots."""
    route = (0, 1, 1, 0, 0)
    shape = Shape(((1, 1),) * 3, (route,) * 3, (2,) * 3, 6)
    program = add_exchange(generate("slimpipe", shape, forward_only=forward_only), **options)
    program = add_transfers(add_embedding(add_vocabulary(program)))
    check(program)
    for d, ops in enumerate(program.ops):
        found = [op.microbatch for op in ops if op.kind == Kind.VOCAB_FORWARD]
        assert sorted(found) == sorted(m for m in shape.microbatches_of(d) for _ in range(shape.slices))
    last = shape.device(2, 1)
    ops = [op for op in program.ops[last] if op.kind in (Kind.FORWARD, Kind.VOCAB_FORWARD)]
    place = ops.index(Op(Kind.FORWARD, 1, 0, 1))
    assert ops[place + 1] == Op(Kind.VOCAB_FORWARD, 1, 0)


# ZeRO-2 and 3 without a pipeline: collectives of every pass, of all replicas, in one order.

UNEVEN = Shape(((1, 2),), ((0, 0, 1, 0),), (2,))  # three passes and one, two chunks


def collectives(program: Program, device: int) -> list[Op]:
    return [op for op in program.ops[device] if op.kind in (Kind.PARAM_GATHER, Kind.GRAD_REDUCE)]


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


PASSES = Shape(((1,),), ((0, 0),), (1,))
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: plan_exchange(generate("1f1b", Shape.uniform(4, 8))), "not aligned"),
    (
        lambda: plan_exchange(generate("slimpipe", Shape(((1,), (1,)), ((0, 0), (0, 1)), (1, 2), 4))),
        "not separate pipelines",
    ),
    (lambda: plan_exchange(SLIM, units=0), "units = 0"),
    (lambda: add_exchange(add_vocabulary(SLIM)), "comes first"),
    (lambda: add_vocabulary(add_vocabulary(SLIM)), "split once"),
    (lambda: add_parameters(MINI, prefetch=-1), "prefetch = "),
    (lambda: add_parameters(MINI, step="never"), "prefetch = "),  # type: ignore[arg-type]
    (lambda: add_parameters(add_parameters(MINI)), "parameter operations already"),
    (lambda: add_parameters(generate("ministage", Shape(((1,),), ((0, 0),), (2,)))), "every replica have microbatches"),
    (lambda: add_activation_offload(add_activation_offload(MINI)), "already"),
    (lambda: add_activation_offload(generate("1f1b", Shape.uniform(2, 2), forward_only=True)), "forward only"),
    (lambda: add_sharded_passes(generate("gpipe", PASSES), zero=2), "not in the order"),
    (lambda: add_sharded_passes(generate("data-parallel", PASSES), zero=1), "zero = 1"),
    (lambda: generate("data-parallel", Shape.uniform(2, 2)), "stages = 2"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_what_passes_refuse(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


# Replicas that fall into separate pipelines, and the orders of those that do not.


def renumbered(program: Program, device: int, microbatches: list[int]) -> list[tuple[int, int, int, int]]:
    """A device's compute order in its pipeline's own numbers."""
    return [(op.kind, microbatches.index(op.microbatch), op.slice, op.chunk) for op in program.compute(device)]


@pytest.mark.parametrize(("name", "chunks", "slices"), [("1f1b", 1, 1), ("interleaved", 2, 1), ("slimpipe", 1, 6)])
def test_equal_pipelines_get_the_order_of_one(name: str, chunks: int, slices: int) -> None:
    """Six stages of four replicas with speeds that differ by stage: each row is Megatron's plain pipeline."""
    stages, width, each = 6, 4, 12
    layers, route = ((1,) * chunks,) * stages, (tuple(m % width for m in range(width * each)),) * stages
    shape = Shape(layers, route, (width,) * stages, slices=slices)
    speeds = [1.0 - 0.1 * s for s in range(stages) for _ in range(width)]
    program = generate(name, shape, speeds=speeds)
    alone = generate(name, Shape.uniform(stages, each, chunks=chunks, slices=slices))
    for d, (stage, replica) in enumerate(shape.devices):
        own = list(range(replica, width * each, width))
        assert renumbered(program, d, own) == renumbered(alone, stage, list(range(each)))


def test_parts_of_a_shape() -> None:
    shape = Shape(layers=((1,), (1,)), route=((0, 1, 1, 0), (2, 1, 0, 2)), replicas=(2, 4))
    first, second = parts_of(shape)
    assert (first.devices, first.microbatches) == ((0, 4), (0, 3))
    assert (second.devices, second.microbatches) == ((1, 2, 3), (1, 2))
    assert second.shape == Shape(((1,), (1,)), ((0, 0), (1, 0)), (1, 2))
    program = generate("1f1b", shape)
    assert program.ops[5] == ()
    assert {op.microbatch for op in program.ops[3]} == {1}


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
