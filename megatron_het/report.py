"""Measurements of a run: times of each operation on this rank; times, losses and memory as a report.

The report is printed beside the plan's prediction, and written as JSON.
"""

import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_het.device import Platform
from megatron_het.lowering.programs import Choice
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import Placement, RankPrediction
from megatron_het.plan.run_config import HetConfig
from megatron_het.safe_io import write_text
from megatron_het.schedule.kinds import Direction, where
from megatron_het.schedule.memory import trace_event, trace_name

# On the CPU the clock is read around every operation.  On CUDA the host runs ahead of the device,
# so compute operations are bracketed by events, and only while ``device_events`` is on.


# Times at which the two ends of every transfer were posted, and at which waits for data ended.
#
# On the CPU, and where tensors are staged through the host, marks are times of the host's clock.  Over NCCL they are
# events on the stream that computes.


Mark = Any  # seconds of ``time.perf_counter``, or a CUDA event


@dataclass(slots=True)
class Departure:
    """A send, from when it was posted."""

    peer: int
    posted: Mark


@dataclass(slots=True)
class Arrival:
    """A receive: the times when it was posted, when the wait for it began, and when the wait ended.

    The last two are None until then.  The end of a transfer that completed before the wait is not known: both marks
    are nearly equal.
    """

    peer: int
    posted: Mark
    waited: Mark = None
    ended: Mark = None


@dataclass
class TransferLog:
    """The transfers of the current iteration, in the order in which they were posted."""

    now: Callable[[], Mark] = time.perf_counter  # makes a mark
    departures: list[Departure] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def sent(self, peer: int) -> None:
        """Log a posted send."""
        self.departures.append(Departure(peer, self.now()))

    def receiving(self, peer: int) -> Arrival:
        """Log a posted receive."""
        arrival = Arrival(peer, self.now())
        self.arrivals.append(arrival)
        return arrival

    def take(self) -> tuple[list[Departure], list[Arrival]]:
        """Returns the logged transfers and empties the log."""
        taken = self.departures, self.arrivals
        self.departures, self.arrivals = [], []
        return taken


_FORWARD = where(lambda kind: kind.works and kind.direction is Direction.FORWARD)
_BACKWARD = where(lambda kind: kind.works and kind.direction is Direction.BACKWARD)
TIMED = where(lambda kind: kind.works)  # kinds of operations that compute, whose times mean something on every device

_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(slots=True)
class Record:
    """One executed operation; times in seconds since the start of the iteration.

    ``wait_s`` is the part spent waiting for a transfer, which comes before the work proper.
    """

    op: RankOp
    start_s: float
    stop_s: float
    wait_s: float = 0.0


@dataclass(slots=True)
class _Timed:
    """A record whose times come from the device: events around it, and around what it waited for."""

    record: Record
    around: _Pair
    waits: list[_Pair]

    def resolve(self, origin: torch.cuda.Event) -> None:
        """Put the device's times into the record; all events have happened."""
        begin, end = self.around
        self.record.start_s = origin.elapsed_time(begin) / 1e3
        self.record.stop_s = origin.elapsed_time(end) / 1e3
        self.record.wait_s = sum(first.elapsed_time(last) / 1e3 for first, last in self.waits)


@dataclass
class Past:
    """Records of an iteration that has ended."""

    records: list[Record]  # its operations
    origin_s: float  # the host's clock at its start
    # departures, arrivals: its transfers, if they were logged
    departures: list[Departure] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    timed: list[_Timed] = field(default_factory=list)
    origin: torch.cuda.Event | None = None

    def resolve(self) -> bool:
        """Read the device's times without waiting; returns whether all of them are available."""
        if self.origin is None:
            return True
        marks: list[Mark] = [end for one in self.timed for end in one.around]
        marks += [departure.posted for departure in self.departures]
        marks += [mark for arrival in self.arrivals for mark in (arrival.posted, arrival.ended)]
        if not all(mark.query() for mark in marks if mark is not None and not isinstance(mark, float)):
            return False
        for one in self.timed:
            one.resolve(self.origin)
        self.timed.clear()
        for departure in self.departures:
            departure.posted = self._seconds(departure.posted)
        for arrival in self.arrivals:
            arrival.posted, arrival.waited, arrival.ended = map(
                self._seconds, (arrival.posted, arrival.waited, arrival.ended)
            )
        self.origin = None
        return True

    def _seconds(self, mark: Mark) -> Mark:
        if mark is None or isinstance(mark, float):
            return mark
        assert self.origin is not None
        return self.origin_s + self.origin.elapsed_time(mark) / 1e3


@dataclass
class Timeline:
    """Records of the current iteration.

    Args:
        on_cuda: Whether work runs asynchronously on a CUDA device.
        device_events: Bracket compute with CUDA events (used for traces, reports and the watch).
        synchronises: Whether :meth:`finish` waits for the device, for the times of the iteration that just ended.
        keeps_last: Whether :attr:`last` is kept.
        transfers: Log of the pipeline's transfers; None for none.
    """

    on_cuda: bool = False
    device_events: bool = False
    synchronises: bool = True
    keeps_last: bool = False
    transfers: TransferLog | None = None
    records: list[Record] = field(default_factory=list)
    last: Past | None = None  # the iteration before the current one
    _origin: float = 0.0
    _waited: float = 0.0
    _waits: list[_Pair] = field(default_factory=list)
    _timed: list[_Timed] = field(default_factory=list)
    _origin_event: torch.cuda.Event | None = None

    def start(self) -> None:
        """Drop the last iteration, or store it as :attr:`last`, and set time zero."""
        if self.keeps_last:
            departures, arrivals = self.transfers.take() if self.transfers is not None else ([], [])
            self.last = Past(self.records, self._origin, departures, arrivals, self._timed, self._origin_event)
        self.records, self._timed = [], []
        self._origin = time.perf_counter()
        if self.on_cuda and self.device_events:
            self._origin_event = event()

    @contextlib.contextmanager
    def measure(self, op: RankOp) -> Iterator[None]:
        """Record one operation."""
        self._waited = 0.0
        timed = self.on_cuda and self.device_events and op.kind in TIMED
        if timed:
            self._waits = []
            begin = event()
        start = time.perf_counter() - self._origin
        yield
        record = Record(op, start, time.perf_counter() - self._origin, self._waited)
        self.records.append(record)
        if timed:
            self._timed.append(_Timed(record, (begin, event()), self._waits))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context whose time counts as waiting, not as work."""
        timed = self.on_cuda and self.device_events
        begin = event() if timed else None
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start
        if begin is not None:
            self._waits.append((begin, event()))

    def finish(self) -> None:
        """Replace host times of compute operations by device times (CUDA only)."""
        if not self._timed or self._origin_event is None or not self.synchronises:
            return
        torch.cuda.synchronize()
        for one in self._timed:
            one.resolve(self._origin_event)
        self._timed.clear()

    def work_s(self, backward: bool) -> float:
        """Seconds of compute in this iteration, without waiting."""
        kinds = _BACKWARD if backward else _FORWARD
        return sum(r.stop_s - r.start_s - r.wait_s for r in self.records if r.op.kind in kinds)


def event() -> torch.cuda.Event:
    """Returns an event that is recorded on the current stream."""
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


# Chrome trace of a measured iteration, in the format of the schedule simulator's traces.


def trace_events(records: Iterable[Record], rank: int, title: str) -> list[dict[str, Any]]:
    """Complete events with integer ids: process = rank, thread 0 = operations, 1 = waiting."""
    events: list[dict[str, Any]] = [
        trace_name("process_name", rank, 0, name=title),
        trace_name("thread_name", rank, 0, name="operations"),
        trace_name("thread_name", rank, 1, name="waiting"),
    ]
    for record in records:
        begin = record.start_s + record.wait_s
        op = record.op
        names = {"kind": op.kind.name, "microbatch": op.microbatch, "slice": op.slice, "chunk": op.chunk}
        events.append({**trace_event(op.label, rank, 0, begin, record.stop_s), "args": names})
        if record.wait_s > 0:
            events.append(trace_event(f"wait for {record.op.label}", rank, 1, record.start_s, begin))
    return events


_METERED_ITERATION = 1  # peak memory is metered in the second iteration of a run
MOST_KEPT = 10_000  # largest number of iterations, losses and validation losses in a report: the newest ones
_WRITTEN_EVERY_S, _MOST_WRITING = 30.0, 0.01  # and never more than this share of the time


class Measurement:
    """One call of the forward-backward function."""

    def __init__(self, forward_only: bool) -> None:
        self.forward_only = forward_only
        self.start_s = time.perf_counter()
        self.schedule_stop_s = self.start_s
        self.losses: list[dict[str, torch.Tensor]] = []

    def loss(self) -> float | None:
        """Mean loss per token, from entries (sum, tokens); None where there is none."""
        entries = [next(iter(r.values())).view(-1) for r in self.losses if r]
        if not entries or entries[0].numel() != 2:
            return None
        total = torch.stack([e.double() for e in entries]).sum(dim=0)
        return (total[0] / total[1]).item()


class RunReport:
    """Collects the measurements of one rank, without communication.

    Losses are read from the device only when a report is requested,
    because reading synchronises.  A report is also written during the run, so that a run that is killed has one.
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
            "device": placement.replica(where.stage, where.replica).device_of(rank) or platform.device_name,
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
        if self._last_start_s is not None:
            self._iterations[-1]["elapsed_s"] = measured.start_s - self._last_start_s
        self._last_start_s = measured.start_s
        timeline.finish()
        iteration = _current_iteration()
        if self._iterations and self._iterations[-1]["iteration"] == iteration:
            self._iterations.pop()  # Megatron runs an iteration with NaN or the like again
            self.forget_after(iteration - 1)
        else:
            self._count += 1
        self._iterations.append(
            {
                "iteration": iteration,
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
            head = self._head
            title = f"rank {self._rank}: stage {head['stage']} replica {head['replica']} tp {head['tp_rank']}"
            events = trace_events(timeline.records, self._rank, title)
            write_text(trace, json.dumps({"traceEvents": events}))
        self._write_at_times()

    def forget_after(self, iteration: int) -> None:
        """Drop the losses of later iterations, in Megatron's numbering, which were not completed."""
        self._losses = deque((entry for entry in self._losses if entry[0] <= iteration), maxlen=MOST_KEPT)

    def _write_at_times(self) -> None:
        """Write the report so far from time to time; errors are ignored, because a full disk may have space later."""
        start_s = time.monotonic()
        if start_s >= self._next_write_s:
            with contextlib.suppress(OSError):
                self.write(ended=False)
            stop_s = time.monotonic()
            self._next_write_s = stop_s + max(_WRITTEN_EVERY_S, (stop_s - start_s) / _MOST_WRITING)

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
        # ``buffers`` of a DDP-wrapped model is a list; without training models are not wrapped.
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
        """Returns the plan's prediction for this rank."""
        predicted = self._plan.predicted
        if predicted is None:
            return None
        return next((r for r in predicted.per_rank if r.rank == self._rank), None)

    def opening(self) -> str:
        """One line about the run and its prediction."""
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
        """Write ``rank-<rank>.json`` of a run that has ended or goes on; None if no report was requested."""
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
        text = json.dumps(body, indent=1)  # a loss may be NaN, which the report keeps
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
