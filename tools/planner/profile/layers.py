"""Measure real megatron-core layers: time, parameters and memory of one operating point.

The layers are the ones training uses: a ``GPTModel`` of one transformer layer is built from the
local or the Transformer Engine spec, its parts are wrapped in Megatron's own
DistributedDataParallel (so that the accumulation into the gradient buffer is part of the
backward pass), and the update is Megatron's own optimizer.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_het.device import activate
from megatron_het.device.memory import memory_meter

from ..inputs.profile_schema import LayerTiming
from .parts import Part, on_gpu
from .settings import ENDS, Point, ProfileSettings, largest


class Stopwatch:
    """Seconds between marks: CUDA events on a GPU, the monotonic clock elsewhere."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []

    def mark(self, label: str) -> None:
        """End of a span called ``label`` (the first mark only starts the watch)."""
        if on_gpu():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((label, event))
        else:
            self._marks.append((label, time.perf_counter()))

    def mean_s(self, label: str) -> float:
        """Mean length of the spans that end with ``label``."""
        if on_gpu():
            torch.cuda.synchronize()
        spans = []
        for (_, start), (name, end) in zip(self._marks, self._marks[1:], strict=False):
            if name == label:
                spans.append(start.elapsed_time(end) / 1e3 if on_gpu() else end - start)
        return statistics.fmean(spans)


def measure(settings: ProfileSettings, point: Point, barrier: Callable[[], None]) -> LayerTiming:
    """Measure one point on this rank; every rank calls it at the same time.

    Args:
        settings: Windows and model.
        point: What to measure.
        barrier: Waits for all ranks; called before each window.
    """
    part = Part(settings, point)
    saved_bytes, workspace_bytes, output_bytes = _memory(part)
    _warm_up(part)
    double = _double(settings, point)
    group = parallel_state.get_tensor_model_parallel_group() if point.tp > 1 else None
    forward, backward, update = [], [], []
    fixed: list[tuple[float, float]] = []
    alone: list[float] = []
    for _ in range(settings.windows):
        barrier()
        once = _pass_s(part, settings.window_s, group)
        forward.append(once[0])
        backward.append(once[1])
        if double is not None:  # right after the other, so that a change of speed hits both
            twice = _pass_s(double, settings.window_s, group)
            fixed.append((2 * once[0] - twice[0], 2 * once[1] - twice[1]))
        barrier()
        watch = Stopwatch()
        watch.mark("start")
        _repeat(settings.window_s / 2, functools.partial(_step, part, watch), group)
        update.append(watch.mean_s("update"))
        if point.tp == 1 and point.layer not in ENDS and not on_gpu():
            alone.append(_alone_s(part, settings.window_s / 2, barrier))
    forward_s, backward_s = statistics.median(forward), statistics.median(backward)
    return LayerTiming(
        layer=point.layer,
        micro_batch_size=point.micro_batch_size,
        tp=point.tp,
        slice_tokens=point.slice_tokens,
        recompute=point.recompute,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=statistics.median(update),
        parameters=part.parameters,
        activation_bytes=saved_bytes,
        workspace_bytes=workspace_bytes,
        output_bytes=output_bytes,
        fixed_forward_s=_fixed_s([f for f, _ in fixed], forward_s),
        fixed_backward_s=_fixed_s([b for _, b in fixed], backward_s),
        alone_s=statistics.median(alone) if alone else 0.0,
        ep=point.ep,
        windowed=point.windowed,
    )


def _alone_s(part: Part, window_s: float, barrier: Callable[[], None]) -> float:
    """Mean seconds of a forward and a backward while the other ranks wait; they take turns.

    Processes on cores of one machine share memory, caches, and perhaps a core: each is faster while others wait.
    """
    found = 0.0
    for rank in range(torch.distributed.get_world_size()):
        barrier()
        if rank == torch.distributed.get_rank():
            found = sum(_pass_s(part, window_s, None))
    barrier()
    return found


def _warm_up(part: Part) -> None:
    for _ in range(2):
        part.backward(part.forward())
        part.update()


def _double(settings: ProfileSettings, point: Point) -> Part | None:
    """Two such layers in turn; None for embedding and head, and where they do not fit the device."""
    if point.layer in ENDS:
        return None
    try:
        part = Part(settings, point, layers=2)
        _warm_up(part)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    return part


def _pass_s(part: Part, window_s: float, group: Any) -> tuple[float, float]:
    """Mean seconds of a forward and of a backward."""
    watch = Stopwatch()
    watch.mark("start")
    _repeat(window_s, functools.partial(_pass, part, watch), group)
    return watch.mean_s("forward"), watch.mean_s("backward")


def _fixed_s(differences: list[float], whole_s: float) -> float:
    """Returns what two passes of one layer take more than a pass of two layers; at most half of a pass."""
    return min(max(0.0, statistics.median(differences)), whole_s / 2) if differences else 0.0


def _pass(part: Part, watch: Stopwatch) -> None:
    watch.mark("gap")
    output = part.forward()
    watch.mark("forward")
    part.backward(output)
    watch.mark("backward")


def _step(part: Part, watch: Stopwatch) -> None:
    watch.mark("gap")
    part.update()
    watch.mark("update")


def _repeat(window_s: float, work: Callable[[], None], group: Any) -> None:
    """Repeat ``work`` for about ``window_s``; ranks of one TP group repeat equally often."""
    start = time.perf_counter()
    if group is None and not on_gpu():
        while time.perf_counter() - start < window_s:
            work()
        return
    work()
    if on_gpu():
        torch.cuda.synchronize()
    once = torch.tensor([time.perf_counter() - start], device="cuda" if on_gpu() else "cpu")
    if group is not None:
        torch.distributed.all_reduce(once, torch.distributed.ReduceOp.MAX, group=group)
    for _ in range(max(1, min(1000, round(window_s / max(once.item(), 1e-6)) - 1))):
        work()


def _memory(part: Part) -> tuple[int, int, int]:
    """(bytes kept from forward to backward, largest temporary beyond, output bytes) of one pass."""
    known = {p.untyped_storage().data_ptr() for p in part.module.parameters()}
    # Constant inputs exist once, not once per microbatch.
    known |= {part.data[n].untyped_storage().data_ptr() for n in ("mask", "positions", "tokens") if n in part.data}
    hidden = part.data["hidden"].untyped_storage().data_ptr()
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    part.backward(part.forward())
    with memory_meter(activate()) as meter, meter.region("pass") as visit:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = part.forward()
        output_bytes = part.divided * output.numel() * output.element_size() if output.dim() else 0
        part.backward(output)
        del output
    saved = sum(kept.values())
    # The layer's input was there before; it counts as kept, and not as growth.
    workspace = visit.growth_bytes - (saved - kept.get(hidden, 0))
    return saved, max(0, workspace), output_bytes


def largest_micro_batch(settings: ProfileSettings, tp: int, recompute: str, memory_bytes: int) -> int:
    """The largest micro batch that trains ``largest_batch_layers`` layers on this device.

    On a GPU every size is run and an out-of-memory error counts as "does not fit".  On a CPU the
    kernel would end the process instead, so a size counts as fitting when the bytes measured for
    one sequence, which grow linearly, stay below the device's memory.
    """
    layers = settings.largest_batch_layers
    tokens = settings.model.seq_length

    def parts(batch: int) -> list[Part]:
        kind = Point("layer", batch, tp, tokens, recompute)  # type: ignore[arg-type]
        return [Part(settings, kind) for _ in range(layers)]

    if not on_gpu():
        one = parts(1)[0]
        saved, workspace, _ = _memory(one)
        # Weights, gradients and two Adam moments, four bytes each.
        fixed = layers * one.parameters * 16
        return largest(lambda batch: fixed + batch * (layers * saved + workspace) <= memory_bytes)

    def fits(batch: int) -> bool:
        try:
            held = parts(batch)
            outputs = [p.forward() for p in held]
            for part, output in zip(reversed(held), reversed(outputs), strict=True):
                part.backward(output)
                part.update()
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            held, outputs = [], []
            torch.cuda.empty_cache()
        return True

    return largest(fits)
