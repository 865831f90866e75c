"""Our compute orders against those of ``torch.distributed.pipelining``, where both name the same schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from megatron_het.schedule.generators import generate
from megatron_het.schedule.ir import Kind, Shape

Order = list[tuple[str, int, int]]
"""(kind, microbatch, chunk) of one device's passes."""
_NAMES = {torchs.FORWARD: "F", torchs.FULL_BACKWARD: "B", torchs.BACKWARD_INPUT: "I", torchs.BACKWARD_WEIGHT: "W"}
_KINDS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}


def stage_of(index: int, devices: int, chunks: int) -> Any:
    """What a schedule class asks of a stage, without a model."""
    return SimpleNamespace(
        group_size=devices,
        group_rank=index % devices,
        num_stages=devices * chunks,
        stage_index=index,
        is_first=index == 0,
        is_last=index == devices * chunks - 1,
        has_backward=True,
        submod=None,
        device="cpu",
        stage_index_to_group_rank={i: i % devices for i in range(devices * chunks)},
    )


def listed(name: str, devices: int, chunks: int, microbatches: int) -> list[Order]:
    """The order of every device in the table that a class with several stages per device makes."""
    stages = [stage_of(chunk * devices, devices, chunks) for chunk in range(chunks)]
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
        stage.perform_reduce_grad = lambda _: None
        for transfer in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
            setattr(stage, f"get_{transfer}_ops", lambda _: [])
        made = getattr(torchs, name)(stage, microbatches, loss_fn=lambda *_: None)
        for hook in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            setattr(made, hook, lambda *_: None)
        made._check_inputs = lambda *_: ([()] * microbatches, [{}] * microbatches)
        made._step_microbatches()
        found.append(order)
    return found


def ours(name: str, devices: int, chunks: int, microbatches: int) -> list[Order]:
    """Our order of every device."""
    program = generate(name, Shape.uniform(devices, microbatches, chunks=chunks))
    return [[(_KINDS[op.kind], op.microbatch, op.chunk) for op in program.compute(d)] for d in range(devices)]


@pytest.mark.parametrize(("name", "cls"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (2, 2), (2, 5), (4, 4), (4, 11), (8, 16)])
def test_one_chunk_per_stage(name: str, cls: str, devices: int, microbatches: int) -> None:
    assert ours(name, devices, 1, microbatches) == run(cls, devices, microbatches)


@pytest.mark.parametrize(
    ("devices", "chunks", "microbatches"), [(2, 2, 4), (2, 3, 6), (4, 2, 8), (4, 3, 16), (8, 2, 16)]
)
def test_interleaved(devices: int, chunks: int, microbatches: int) -> None:
    expected = listed("ScheduleInterleaved1F1B", devices, chunks, microbatches)
    assert ours("interleaved", devices, chunks, microbatches) == expected


@pytest.mark.parametrize(("devices", "chunks", "microbatches"), [(2, 2, 3), (3, 3, 4), (4, 2, 8)])
def test_ministages_without_parameters_are_looped_breadth_first(devices: int, chunks: int, microbatches: int) -> None:
    assert ours("ministage", devices, chunks, microbatches) == listed(
        "ScheduleLoopedBFS", devices, chunks, microbatches
    )
