"""The rank that compares: reads the samples of all ranks, and writes what it finds to log, report and TensorBoard."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_het.lowering.programs import costs_of
from megatron_het.plan import Placement, Plan
from megatron_het.safe_io import write_text
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.ir import Kind, Op, Program
from megatron_het.schedule.kinds import STREAM_IDS, Stream
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.transfers import post_receives_early
from megatron_het.watch.drift import Finding
from megatron_het.watch.monitor import PLACES, Board, Hello, Monitor, Sample, Settings

# One trace (Chrome, Perfetto) in which the predicted and the measured iteration lie one above the other.


MOST_OPERATIONS = 50_000
"""Operations of a program that is simulated for a trace, on a rank that trains."""
_WAITING = 6


def overlay(
    program: Program, costs: Costs, measured: Mapping[int, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """The trace.

    Args:
        program: What the devices run; those without operations are left out.
        costs: What the plan was made from.
        measured: By device: ``origin_s`` (clock at the start of its iteration), ``clock`` and ``events`` as of
            ``samples.events_of``.
        names: Of all devices.
    """
    events: list[dict[str, Any]] = []
    shown = [d for d, ops in enumerate(program.ops) if ops and d in measured]
    for device in shown:
        for side, title in enumerate(("predicted", "measured")):
            pid = 2 * device + side
            events.append(_named("process_name", pid, 0, {"name": f"{names[device]}, {title}"}))
            events.append(_named("process_sort_index", pid, 0, {"sort_index": pid}))
    events += _predicted(program, costs, set(shown))
    starts: dict[str, float] = {}
    for device in shown:
        one = measured[device]
        starts[one["clock"]] = min(starts.get(one["clock"], one["origin_s"]), one["origin_s"])
    for device in shown:
        one = measured[device]
        events += _measured(2 * device + 1, one["origin_s"] - starts[one["clock"]], one["events"])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _predicted(program: Program, costs: Costs, shown: set[int]) -> Iterator[dict[str, Any]]:
    if sum(map(len, program.ops)) > MOST_OPERATIONS:
        return
    result = simulate(post_receives_early(program) if costs.host_blocks else program, costs)
    for one in result.events():
        if one.device in shown and one.end_s > one.start_s:
            yield _event(str(one.op), 2 * one.device, STREAM_IDS[one.stream], one.start_s, one.end_s)


def _measured(pid: int, shift_s: float, rows: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    yield _named("thread_name", pid, _WAITING, {"name": "waiting"})
    for name, microbatch, part, chunk, _, start, stop, waited in rows:
        kind = Kind.rows[name]
        begin = shift_s + start + waited
        label = str(Op(kind, microbatch, part, chunk))
        if waited > 0:
            yield _event(f"wait for {label}", pid, _WAITING, shift_s + start, begin)
        if kind.stream is Stream.COMPUTE:
            yield _event(label, pid, STREAM_IDS[kind.stream], begin, shift_s + stop)


def _event(name: str, pid: int, tid: int, start_s: float, stop_s: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start_s * 1e6, "dur": (stop_s - start_s) * 1e6}


def _named(name: str, pid: int, tid: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


REPORT, TRACE = "watch.json", "watch-trace.json"
WRITTEN_EVERY = 50
"""Iterations between two reports when nothing changes."""
MOST_COST = 0.004
"""Share of the iteration that reading may take; of a run with more ranks fewer iterations are read."""
MOST_STRIDE = 4
MOST_SCALARS = 32
"""Devices, and links, that have a curve of their own in TensorBoard."""


class Reader:
    """Follows a run.

    Args:
        plan: With costs.
        program: Of this rank's part of the plan, for the trace.
        board: Where samples are.
        settings: Of the watch.
        folder: For ``watch.json`` and ``watch-trace.json``; None to write neither.
        args: Megatron's arguments.
    """

    def __init__(
        self, plan: Plan, program: Program, board: Board, settings: Settings, folder: Path | None, args: Any
    ) -> None:
        self._plan, self._program, self._board, self._settings = plan, program, board, settings
        self._folder, self._args = folder, args
        self._ranks = list(range(plan.world_size))
        self._monitor: Monitor | None = None
        self._next: int | None = None
        self._written = 0
        self._stride = 1
        self._wants_trace = True
        self._has_news = False

    def news(self) -> dict[str, Any] | None:
        """All that was measured, once after something has begun to drift; None at other times."""
        if not self._has_news or self._monitor is None or not self._monitor.watch.active:
            return None
        self._has_news = False
        return self._monitor.summary()

    def read(self, newest: int) -> None:
        """Read what is there up to an iteration; never waits."""
        if self._monitor is None:
            self._greet()
        if self._monitor is None or newest < 1:
            return
        if self._next is None or newest - self._next >= PLACES - 1:
            self._next = newest  # what came before is overwritten, or was never told
        began = time.thread_time()
        for _ in range(2):
            if self._next > newest:
                return
            texts = self._board.read("sample", self._ranks, self._next % PLACES)
            if texts is None:
                return
            samples = [Sample.decode(text) for text in texts]
            if any(sample.iteration < self._next for sample in samples):
                return
            if all(sample.iteration == self._next for sample in samples):
                self._take(dict(zip(self._ranks, samples, strict=True)))
                self._spent(time.thread_time() - began, samples[0].elapsed_s)
            self._next += self._stride
            began = time.thread_time()

    def _spent(self, cpu_s: float, iteration_s: float) -> None:
        """Leave out iterations where reading one takes too much of it."""
        allowed_s = MOST_COST * iteration_s
        self._stride = min(MOST_STRIDE, max(1, math.ceil(cpu_s / allowed_s))) if allowed_s > 0 else MOST_STRIDE

    def _greet(self) -> None:
        texts = self._board.read("hello", self._ranks)
        if texts is not None:
            self._monitor = Monitor(
                self._plan, [Hello.decode(t) for t in texts], self._settings, self._program.shape.slices
            )

    def _take(self, samples: dict[int, Sample]) -> None:
        assert self._monitor is not None
        iteration = samples[0].iteration
        changes = self._monitor.add(samples)
        for finding in changes:
            self._say(finding)
        self._to_tensorboard(iteration)
        begun = any(finding.ended is None for finding in changes)
        self._wants_trace, self._has_news = self._wants_trace or begun, self._has_news or begun
        if changes or iteration - self._written >= WRITTEN_EVERY:
            self._write(iteration)
        if self._wants_trace and self._folder is not None:
            self._wants_trace = not self._write_trace(iteration)

    # -- what is found ---------------------------------------------------------------------------

    def _say(self, finding: Finding) -> None:
        assert self._monitor is not None
        if finding.ended is not None:
            text = f"iteration {finding.ended}: over: {finding.text()}"
        else:
            planned = self._plan.predicted.iteration_s if self._plan.predicted is not None else 0.0
            text = (
                f"iteration {finding.found}: {finding.text()}; "
                f"an iteration takes {self._monitor.watch.iteration_s:.3f} s, planned {planned:.3f} s"
            )
            if self._folder is not None:
                text += f"; 'het-plan replan {self._folder}' looks for a better plan"
        print(f"het: watch: {text}", flush=True)  # noqa: T201 - beside Megatron's lines

    def _to_tensorboard(self, iteration: int) -> None:
        from megatron.training.global_vars import get_tensorboard_writer

        writer = get_tensorboard_writer()
        assert self._monitor is not None
        last = self._monitor.last
        if writer is None or not last or iteration % max(1, getattr(self._args, "tensorboard_log_interval", 1)):
            return
        writer.add_scalar("het/iteration-s", last["iteration_s"], iteration)
        writer.add_scalar("het/predicted-iteration-s", last["predicted_iteration_s"], iteration)
        writer.add_scalar("het/findings", len(self._monitor.watch.active), iteration)
        for title, factors in (("device", last["devices"]), ("link", last["links"])):
            if factors:
                writer.add_scalar(f"het/slowest-{title}", max(factors.values()), iteration)
            for key in sorted(factors)[:MOST_SCALARS]:
                name = key if isinstance(key, int) else "-".join(map(str, key))
                writer.add_scalar(f"het/{title}-{name}", factors[key], iteration)

    # -- files -----------------------------------------------------------------------------------

    def _write(self, iteration: int) -> None:
        self._written = iteration
        if self._folder is not None and self._monitor is not None:
            write_text(self._folder / REPORT, json.dumps(self._monitor.summary(), indent=1))

    def _write_trace(self, iteration: int) -> bool:
        """The trace of the latest iteration that all ranks of this part have told; False if there is none yet."""
        placement = Placement(self._plan)
        shape = self._program.shape
        firsts = {
            shape.device(s, q): replica.ranks[0]
            for s, stage in enumerate(self._plan.stages)
            for q, replica in enumerate(stage.replicas)
            if self._program.ops[shape.device(s, q)]
        }
        texts = self._board.read("timeline", list(firsts.values()))
        if texts is None:
            return False
        told = [json.loads(text) for text in texts]
        if len({one["iteration"] for one in told}) != 1:
            return False
        if self._monitor is not None and self._monitor.watch.active:
            newest = max(finding.since for finding in self._monitor.watch.active.values())
            if told[0]["iteration"] < newest:  # wait for one with the drift in it
                return False
        names = []
        for device in shape.devices:
            replica = placement.replica(device.stage, device.replica)
            names.append(f"stage {device.stage} replica {device.replica} {replica.device}".strip())
        costs = costs_of(self._plan)
        assert costs is not None and self._folder is not None
        trace = overlay(self._program, costs, dict(zip(firsts, told, strict=True)), names)
        write_text(self._folder / TRACE, json.dumps(trace))
        return True

    def close(self) -> None:
        """The run is over."""
        if self._monitor is not None and self._monitor.last:
            self._write(0)
