"""Report of a run: times, losses, memory.  Printed beside the plan's prediction, written as JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_het.device import Platform
from megatron_het.lowering.programs import Choice
from megatron_het.plan import Placement, RankPrediction
from megatron_het.plan.run_config import HetConfig
from megatron_het.report.timeline import Record, Timeline
from megatron_het.safe_io import write_text

# Chrome trace of a measured iteration, in the format of the schedule simulator's traces.


def trace_events(records: Iterable[Record], rank: int, title: str) -> list[dict[str, Any]]:
    """Complete events with integer ids: process = rank, thread 0 = operations, 1 = waiting."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": title}},
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": "operations"}},
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": 1, "args": {"name": "waiting"}},
    ]
    for record in records:
        begin = record.start_s + record.wait_s
        op = record.op
        names = {"kind": op.kind.name, "microbatch": op.microbatch, "slice": op.slice, "chunk": op.chunk}
        events.append({**_event(op.label, rank, 0, begin, record.stop_s), "args": names})
        if record.wait_s > 0:
            events.append(_event(f"wait for {record.op.label}", rank, 1, record.start_s, begin))
    return events


def _event(name: str, pid: int, tid: int, start_s: float, stop_s: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start_s * 1e6, "dur": (stop_s - start_s) * 1e6}


def write_trace(path: Path, records: Iterable[Record], head: Mapping[str, Any]) -> None:
    """Write a rank's trace to a file."""
    rank = int(head["rank"])
    title = f"rank {rank}: stage {head['stage']} replica {head['replica']} tp {head['tp_rank']}"
    write_text(path, json.dumps({"traceEvents": trace_events(records, rank, title)}))


_METERED_ITERATION = 1  # peak memory is metered in the second iteration of a run
MOST_KEPT = 10_000
"""Iterations, losses and validation losses that a report has: the newest ones."""
_WRITTEN_EVERY_S, _MOST_WRITING = 30.0, 0.01  # and never more than this share of the time


class Measurement:
    """One call of the forward-backward function."""

    def __init__(self, forward_only: bool) -> None:
        self.forward_only = forward_only
        self.start_s = time.perf_counter()
        self.schedule_stop_s = self.start_s
        self.losses: list[dict[str, torch.Tensor]] = []

    def schedule_ended(self) -> None:
        """The program is done; gradient reduction follows."""
        self.schedule_stop_s = time.perf_counter()

    def add_losses(self, reports: list[dict[str, torch.Tensor]]) -> None:
        """Keep the last stage's loss entries."""
        self.losses = reports

    def loss(self) -> float | None:
        """Mean loss per token, from entries (sum, tokens); None where there is none."""
        entries = [next(iter(r.values())).view(-1) for r in self.losses if r]
        if not entries or entries[0].numel() != 2:
            return None
        total = torch.stack([e.double() for e in entries]).sum(dim=0)
        return (total[0] / total[1]).item()


class RunReport:
    """Collects the measurements of one rank.

    Nothing here communicates.  Losses are read from the device only when a report is asked for,
    because reading synchronises.  A report is written while the run goes on, so that a run that is killed leaves one.
    """

    def __init__(
        self, config: HetConfig, placement: Placement, rank: int, plan_hash: str, transport: Choice, platform: Platform
    ) -> None:
        where = placement.locate(rank)
        self._config = config
        self._plan = placement.plan
        self._platform = platform
        self._rank = rank
        self._count = 0
        self._iterations: deque[dict[str, Any]] = deque(maxlen=MOST_KEPT)
        self._losses: deque[list[float]] = deque(maxlen=MOST_KEPT)
        self._validation: deque[list[float]] = deque(maxlen=MOST_KEPT)
        self._next_write_s = time.monotonic() + _WRITTEN_EVERY_S
        self._memory: dict[str, int] = {}
        self._figures: dict[str, Mapping[str, int]] = {}
        self._last_start_s: float | None = None
        self._head = {
            "rank": rank,
            "stage": where.stage,
            "replica": where.replica,
            "tp_rank": where.tp_rank,
            "device": placement.replica(where.stage, where.replica).device or platform.device_name,
            "plan_hash": plan_hash,
            "world_size": placement.world_size,
            "transport": transport.transport,
            "transport_reason": transport.reason,
        }

    @contextlib.contextmanager
    def measure(self, forward_only: bool, timeline: Timeline) -> Iterator[Measurement]:
        """Measure one call; iterations of training are numbered as Megatron numbers them."""
        measured = Measurement(forward_only)
        metered = not forward_only and self._count == _METERED_ITERATION
        with self._meter() if metered and self._config.report_dir else contextlib.nullcontext():
            yield measured
        stop_s = time.perf_counter()
        if forward_only:
            self._keep_loss(self._validation, measured)
            return
        self._close_previous(measured.start_s)
        timeline.finish()
        self._count += 1
        self._iterations.append(
            {
                "iteration": _current_iteration(),
                "schedule_s": measured.schedule_stop_s - measured.start_s,
                "finalize_s": stop_s - measured.schedule_stop_s,
                "forward_s": timeline.work_s(backward=False),
                "backward_s": timeline.work_s(backward=True),
                "compute_s": timeline.work_s(backward=False) + timeline.work_s(backward=True),
                "metered": metered and self._config.report_dir is not None,
                "elapsed_s": None,
            }
        )
        self._keep_loss(self._losses, measured)
        trace = self._config.trace_file(self._rank)
        if trace is not None and self._count == self._config.trace_iteration:
            write_trace(trace, timeline.records, self._head)
        self._write_at_times()

    def forget_after(self, iteration: int) -> None:
        """Drop the losses of later iterations, which were not ended.

        Args:
            iteration: As Megatron numbers them.
        """
        self._losses = deque((entry for entry in self._losses if entry[0] <= iteration), maxlen=MOST_KEPT)

    def _write_at_times(self) -> None:
        """Write what there is so far; a disk that is full now may have space later."""
        start_s = time.monotonic()
        if start_s >= self._next_write_s:
            with contextlib.suppress(OSError):
                self.write(ended=False)
            stop_s = time.monotonic()
            self._next_write_s = stop_s + max(_WRITTEN_EVERY_S, (stop_s - start_s) / _MOST_WRITING)

    def _close_previous(self, start_s: float) -> None:
        if self._last_start_s is not None:
            self._iterations[-1]["elapsed_s"] = start_s - self._last_start_s
        self._last_start_s = start_s

    def _keep_loss(self, kept: deque[list[float]], measured: Measurement) -> None:
        if self._config.report_dir is not None:
            loss = measured.loss()
            if loss is not None:
                kept.append([_current_iteration(), loss])

    @contextlib.contextmanager
    def _meter(self) -> Iterator[None]:
        from megatron_het.device.memory import memory_meter

        with memory_meter(self._platform) as meter, meter.region("iteration") as region:
            yield
        self._memory["activation_peak_bytes"] = region.growth_bytes

    def add_state_memory(self, models: list[torch.nn.Module], optimizer: Any) -> None:
        """Bytes of parameters, gradients and optimizer state that live between iterations."""
        # Of a wrapped model ``buffers`` is the list of them; without training models are not wrapped.
        found = [getattr(m, "buffers", None) for m in models]
        owned: list[Any] = [b for buffers in found if isinstance(buffers, list) for b in buffers]
        buffers = [b for b in owned if hasattr(b, "grad_data")]
        parameters = [p for m in models for p in m.parameters()]
        self._memory["parameter_bytes"] = _storage_bytes(p.data for p in parameters)
        self._memory["gradient_bytes"] = _storage_bytes(b.grad_data for b in buffers)
        if optimizer is not None:
            self._memory["optimizer_bytes"] = _storage_bytes(
                optimizer_tensors(optimizer), known=[p.data for p in parameters]
            )

    def add_figures(self, figures: Mapping[str, Mapping[str, int]]) -> None:
        """Takes what features counted in the latest iteration, by title, e.g. bytes and collectives of the window."""
        self._figures.update(figures)

    def prediction(self) -> RankPrediction | None:
        """Returns what the plan predicts for this rank."""
        predicted = self._plan.predicted
        if predicted is None:
            return None
        return next((r for r in predicted.per_rank if r.rank == self._rank), None)

    def opening(self) -> str:
        """One line about what runs and what is expected."""
        predicted = self._plan.predicted
        text = (
            f"het: plan {self._head['plan_hash']}: {len(self._plan.stages)} stages, "
            f"{self._plan.world_size} ranks, {self._plan.num_microbatches} microbatches, "
            f"schedule {self._plan.schedule.name}, transport {self._head['transport']} "
            f"({self._head['transport_reason']})"
        )
        if predicted is not None:
            text += f"; predicted {predicted.iteration_s:.3f} s per iteration, bubble {predicted.bubble_fraction:.3f}"
        return text

    def closing(self) -> str:
        """This rank's measured figures beside the predicted ones."""
        first = max(0, 2 + len(self._iterations) - self._count)
        steady = [i for i in itertools.islice(self._iterations, first, None) if i["elapsed_s"] is not None]
        text = f"het: rank {self._rank} (stage {self._head['stage']}, replica {self._head['replica']}"
        text += f", {self._head['device']}): "
        if not steady:
            return text + f"{self._count} iterations, too few to time"
        elapsed = sorted(i["elapsed_s"] for i in steady)[len(steady) // 2]
        busy = sorted(i["compute_s"] for i in steady)[len(steady) // 2]
        text += f"median iteration {elapsed:.3f} s, of which {busy:.3f} s compute"
        predicted = self.prediction()
        if predicted is not None and self._plan.predicted is not None:
            text += f" (predicted {self._plan.predicted.iteration_s:.3f} s, {predicted.compute_s:.3f} s)"
        if self._memory:
            used = sum(self._memory.values()) / 2**20
            text += f"; {used:.1f} MiB parameters, gradients, optimizer, activations"
            if predicted is not None:
                text += f" (predicted {predicted.total_bytes / 2**20:.1f} MiB)"
        return text

    def write(self, *, ended: bool = True) -> Path | None:
        """Write ``rank-<rank>.json``; None when no report was asked for.

        Args:
            ended: Whether the run is over; False for a report of a run that goes on.
        """
        path = self._config.report_file(self._rank)
        if path is None:
            return None
        body = {
            **self._head,
            "ended": ended,
            "iterations_left_out": self._count - len(self._iterations),
            "iterations": list(self._iterations),
            "losses": list(self._losses),
            "validation": list(self._validation),
            "memory": self._memory,
            **self._figures,
        }
        text = json.dumps(body, indent=1)  # a loss may be NaN: the report says so
        write_text(path, text, durable=False)  # the next session of an elastic job waits for this one's report
        return path


def _current_iteration() -> int:
    from megatron.training import get_args

    return int(getattr(get_args(), "curr_iteration", 0)) + 1


def _storage_bytes(tensors: Any, known: Any = ()) -> int:
    """Bytes of the distinct storages behind tensors, without those behind ``known``."""
    seen = {t.untyped_storage()._cdata for t in known}
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters and states of Megatron's (possibly chained) optimizer."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        for group in inner.param_groups:
            yield from (p.data for p in group["params"])
        for state in inner.state.values():
            yield from (v for v in state.values() if isinstance(v, torch.Tensor))
