"""Our compute orders against those of ``torch.distributed.pipelining``, where both name the same schedule.

GPipe, 1F1B, interleaved 1F1B and, with a microbatch per stage at least, ZB-H1 are the same, pass by pass.
Ministages are, but for the loss: see :func:`test_ministages_are_breadth_first_but_where_the_loss_is`.
ZB-V is not: see :func:`test_zb_v_is_the_same_up_to_one_microbatch_of_chunk_0`.  PyTorch's interleaved
zero bubble with several chunks per stage and its DualPipeV have no counterpart here; our V-Half and SlimPipe have none
there.
"""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from schedule_helpers import run as simulated
from torch.distributed.pipelining import schedules as torchs

from megatron_het.schedule import Kind, Op, Program, Shape, add_transfers, generate
from megatron_het.schedule.generators.listing import alternate
from megatron_het.schedule.validate import validate

Order = list[tuple[str, int, int]]  # (kind, microbatch, chunk) of one device's passes
_NAMES = {torchs.FORWARD: "F", torchs.FULL_BACKWARD: "B", torchs.BACKWARD_INPUT: "I", torchs.BACKWARD_WEIGHT: "W"}
_KINDS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}


def stage_of(index: int, devices: int, chunks: int, rank: int | None = None) -> Any:
    """What a schedule class asks of a stage, without a model."""
    return SimpleNamespace(
        group_size=devices,
        group_rank=index % devices if rank is None else rank,
        num_stages=devices * chunks,
        stage_index=index,
        is_first=index == 0,
        is_last=index == devices * chunks - 1,
        has_backward=True,
        submod=None,
        device="cpu",
        stage_index_to_group_rank={i: i % devices for i in range(devices * chunks)},
    )


def listed(name: str, devices: int, chunks: int, microbatches: int, placement: str = "loop") -> list[Order]:
    """The order of every device in the table that a class with several stages per device makes.

    The table of any rank has all devices; this is rank 0's.  A V brings the last stage back to rank 0.
    """
    held = [chunk * devices for chunk in range(chunks)] if placement == "loop" else [0, 2 * devices - 1]
    stages = [stage_of(index, devices, chunks, rank=0) for index in held]
    made = getattr(torchs, name)(stages, microbatches, loss_fn=lambda *_: None)
    found = []
    for rank in range(devices):
        actions = [a for a in made.pipeline_order[rank] if a is not None and a.computation_type in _NAMES]
        found.append([(_NAMES[a.computation_type], a.microbatch_index, a.stage_index // devices) for a in actions])
    return found


def run(name: str, devices: int, microbatches: int) -> list[Order]:
    """The order in which a class with one stage per device calls the passes of its stage.

    It makes a table too, which nothing runs; that of 1F1B lacks the last device's first microbatch.
    """
    found = []
    for rank in range(devices):
        order: Order = []
        stage = stage_of(rank, devices, 1)
        stage.forward_one_chunk = lambda m, *_, order=order, **__: order.append(("F", m, 0))
        stage.backward_one_chunk = lambda m, order=order, **__: order.append(("B", m, 0))
        stage.perform_reduce_grad = stage.release_fwd_send_outputs = lambda _: None
        for transfer in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
            setattr(stage, f"get_{transfer}_ops", lambda _: [])
        made = getattr(torchs, name)(stage, microbatches, loss_fn=lambda *_: None)
        for hook in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            setattr(made, hook, lambda *_: None)
        made._check_inputs = lambda *_: ([()] * microbatches, [{}] * microbatches)
        made._step_microbatches()
        found.append(order)
    return found


def ours(name: str, devices: int, chunks: int, microbatches: int, placement: str = "loop") -> list[Order]:
    program = generate(name, Shape.uniform(devices, microbatches, chunks=chunks, placement=placement))
    return [[(_KINDS[op.kind], op.microbatch, op.chunk) for op in program.compute(d)] for d in range(devices)]


@pytest.mark.parametrize(("name", "cls"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (2, 2), (2, 5), (4, 4), (4, 11), (8, 16)])
def test_one_chunk_per_stage(name: str, cls: str, devices: int, microbatches: int) -> None:
    assert ours(name, devices, 1, microbatches) == run(cls, devices, microbatches)


@pytest.mark.parametrize(
    ("devices", "chunks", "microbatches"), [(2, 2, 4), (2, 3, 6), (3, 2, 3), (4, 2, 8), (4, 3, 16), (8, 2, 16)]
)
def test_interleaved(devices: int, chunks: int, microbatches: int) -> None:
    expected = listed("ScheduleInterleaved1F1B", devices, chunks, microbatches)
    assert ours("interleaved", devices, chunks, microbatches) == expected


@pytest.mark.parametrize(("devices", "chunks", "microbatches"), [(1, 3, 2), (2, 2, 3), (3, 3, 4), (4, 1, 8), (4, 3, 2)])
def test_ministages_are_breadth_first_but_where_the_loss_is(devices: int, chunks: int, microbatches: int) -> None:
    """There forwards and backwards alternate, so that the logits of one microbatch are held; backwards ascend."""
    theirs = listed("ScheduleLoopedBFS", devices, chunks, microbatches)
    for device, (mine, order) in enumerate(zip(ours("ministage", devices, chunks, microbatches), theirs, strict=True)):
        forward = [op for op in order if op[0] == "F"]
        backward = sorted((op for op in order if op[0] == "B"), key=lambda op: (-op[2], op[1]))
        alone = len(forward) - (microbatches if device == devices - 1 else 0)
        pairs = chain.from_iterable(zip(forward[alone:], backward))
        assert mine == [*forward[:alone], *pairs, *backward[len(forward) - alone :]]


def of_chunk(order: Order, chunk: int) -> list[tuple[str, int]]:
    return [(kind, m) for kind, m, c in order if c == chunk and kind != "W"]


def one_by_one(microbatches: int, ahead: int) -> list[tuple[str, int]]:
    """``ahead`` forwards, then a forward and an input gradient in turns: the order of one stage of 1F1B."""
    forward = [Op(Kind.FORWARD, m) for m in range(microbatches)]
    backward = [Op(Kind.BACKWARD_INPUT, m) for m in range(microbatches)]
    return [(_KINDS[op.kind], op.microbatch) for op in alternate(forward, backward, ahead)]


def most_held(order: Order) -> int:
    """Chunks of microbatches whose weight gradients are still to come, at most."""
    held = [0]
    for kind, _, _ in order:
        held.append(held[-1] + (kind == "F") - (kind == "W"))
    return max(held)


def makespan(shape: Shape, orders: list[Order]) -> float:
    """Simulated time of valid orders, in passes that take equally long."""
    kinds = {letter: kind for kind, letter in _KINDS.items()}
    ops = tuple(tuple(Op(kinds[k], m, 0, c) for k, m, c in order) for order in orders)
    program = add_transfers(Program("zero-bubble", shape, ops))
    assert validate(program) == []
    return simulated(program).makespan_s


@pytest.mark.parametrize(
    ("devices", "microbatches"), [(1, 1), (1, 4), (2, 1), (2, 6), (3, 3), (4, 4), (4, 5), (4, 12), (8, 16)]
)
def test_zb_h1_is_interleaved_zero_bubble_with_one_chunk(devices: int, microbatches: int) -> None:
    """All three kinds of passes stand in the same places."""
    expected = listed("ScheduleInterleavedZeroBubble", devices, 1, microbatches)
    assert ours("zb-h1", devices, 1, microbatches) == expected


@pytest.mark.parametrize(("devices", "microbatches"), [(3, 2), (4, 2), (4, 3), (6, 3), (8, 7)])
def test_zb_h1_of_few_microbatches_differs_in_weight_gradients_alone(devices: int, microbatches: int) -> None:
    """An expected difference: with fewer microbatches than stages a stage waits between its input gradients.

    PyTorch delays the weight gradients of a stage by its number, always.  Ours run as soon as the stage waits.
    Neither time nor memory is another.
    """
    mine = ours("zb-h1", devices, 1, microbatches)
    theirs = listed("ScheduleInterleavedZeroBubble", devices, 1, microbatches)
    assert mine != theirs
    for ours_here, theirs_here in zip(mine, theirs, strict=True):
        assert sorted(ours_here) == sorted(theirs_here)
        assert of_chunk(ours_here, 0) == of_chunk(theirs_here, 0)
        assert most_held(ours_here) == most_held(theirs_here) == microbatches
    shape = Shape.uniform(devices, microbatches)
    assert makespan(shape, mine) == pytest.approx(makespan(shape, theirs))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_zb_v_is_the_same_up_to_one_microbatch_of_chunk_0(devices: int, more: int) -> None:
    """An expected difference.  Both are optimal where the pipeline is full; they chose another optimum.

    Ours repeats a building block.  The one that is chosen among those of least memory turns soonest: the last stage
    runs the input gradient of chunk 0 right after that of chunk 1.  So chunk 0 needs one microbatch less ahead of its
    first gradient than in PyTorch's table, in which a weight gradient and a forward come between.  That table also runs
    the forwards of chunk 0 as early as memory allows, and weight gradients right after their input gradients until the
    pipeline drains; ours fill idle time.  Chunk 1 goes the same way, each chunk goes in turns, and neither time nor
    memory is another.
    """
    microbatches = 2 * devices - 1 + more
    mine = ours("zb-v", devices, 2, microbatches, "v")
    theirs = listed("ScheduleZBVZeroBubble", devices, 2, microbatches, "v")
    for rank, (ours_here, theirs_here) in enumerate(zip(mine, theirs, strict=True)):
        assert sorted(ours_here) == sorted(theirs_here)
        assert of_chunk(ours_here, 1) == of_chunk(theirs_here, 1) == one_by_one(microbatches, rank)
        assert of_chunk(theirs_here, 0) == one_by_one(microbatches, 2 * devices - 1 - rank)
        assert of_chunk(ours_here, 0) == one_by_one(microbatches, 2 * devices - 2 - rank)
        assert most_held(ours_here) == most_held(theirs_here) == 2 * devices
    expected = 6 * microbatches + devices - 1
    shape = Shape.uniform(devices, microbatches, chunks=2, placement="v")
    assert makespan(shape, mine) == pytest.approx(expected)
    assert makespan(shape, theirs) == pytest.approx(expected)


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 2), (3, 4), (4, 4), (4, 6), (8, 8)])
def test_zb_v_of_few_microbatches_is_no_slower(devices: int, microbatches: int) -> None:
    """PyTorch cuts its table out of that of ``2 * stages - 1`` microbatches; ours is made for the number there is."""
    mine = ours("zb-v", devices, 2, microbatches, "v")
    theirs = listed("ScheduleZBVZeroBubble", devices, 2, microbatches, "v")
    shape = Shape.uniform(devices, microbatches, chunks=2, placement="v")
    assert makespan(shape, mine) <= makespan(shape, theirs)
    assert max(map(most_held, mine)) <= 2 * devices
    for ours_here, theirs_here in zip(mine, theirs, strict=True):
        assert of_chunk(ours_here, 1) == of_chunk(theirs_here, 1)
