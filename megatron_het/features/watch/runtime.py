"""The watch on a rank.

At the start of an iteration every rank writes a sample of the one before to the store, without waiting and without a
collective.  The last rank, which logs the training, reads the samples of all ranks and compares them with the plan.
After an error the watch prints one line and is off; the training continues.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_het.features.watch.samples import PLACES, Board, Hello, events_of, sample_of
from megatron_het.lowering.programs import costs_of
from megatron_het.plan import plan_hash
from megatron_het.report import TIMED, Past, TransferLog, event
from megatron_het.runtime.feature import Call, Iteration, OpenContext, RuntimeFeature
from megatron_het.schedule import Graph, Program
from megatron_het.schedule.cost import durations
from megatron_het.store import StoreError
from megatron_het.store.job import job_store

if TYPE_CHECKING:  # only the comparing rank imports it
    from megatron_het.features.watch.monitor import Reader

_MEETING_S = 30.0
TIMELINE_EVERY = 10  # interval in iterations of complete timelines, for the trace


class RankWatch(RuntimeFeature):
    """Writes this rank's samples, and on the last rank reads those of all ranks.

    Args:
        board: Access to the watch's keys in the store.
        hello: This rank's greeting.
        reader: Reader of all samples on the last rank; None on the others.
    """

    def __init__(self, context: OpenContext, board: Board, hello: Hello, reader: "Reader | None") -> None:
        self._timeline, self._channels = context.timeline, context.channels
        self._rank, self._board, self._hello, self._reader = context.rank, board, hello, reader
        self._trace_iteration = context.config.trace_iteration
        self._begun_s: float | None = None
        self._iteration = 0
        self._told = 0
        self._cpu_s = self._wall_s = 0.0
        self._is_on = True
        timeline = self._timeline
        timeline.keeps_last = timeline.device_events = True
        on_device = timeline.on_cuda and context.transport == "nccl"
        timeline.transfers = self._channels.log = TransferLog(event if on_device else time.perf_counter)
        self._safely(lambda: board.greet(self._rank, hello.encode()))

    def begin(self, call: Call, state: Iteration) -> None:
        """Write the sample of the iteration before; see :class:`RuntimeFeature`."""
        began, now = time.thread_time(), time.perf_counter()
        past, self._timeline.last = self._timeline.last, None
        if self._is_on:
            self._safely(lambda: self._tell(past, now))
        self._begun_s = None if call.forward_only else now
        self._iteration = int(getattr(call.args, "curr_iteration", 0)) + 1
        self._cpu_s += time.thread_time() - began
        self._wall_s += time.perf_counter() - now

    def _tell(self, past: Past | None, now_s: float) -> None:
        """Write the sample of the last iteration, if it was a training iteration and all its device times are known."""
        if past is not None and self._begun_s is not None and past.resolve():
            sample = sample_of(past, self._iteration, now_s - self._begun_s, TIMED)
            self._board.post("sample", self._rank, sample.encode(), self._iteration % PLACES)
            self._told += 1
            if self._iteration % TIMELINE_EVERY == 0 or self._told == self._trace_iteration:
                body = {"iteration": self._iteration, "origin_s": past.origin_s, "clock": self._hello.clock}
                body["events"] = events_of(past.records)
                self._board.post("timeline", self._rank, json.dumps(body, separators=(",", ":")))
        if self._reader is not None:
            self._reader.read(self._iteration - 1)

    def news(self) -> dict[str, Any] | None:
        """Returns the measurements on the last rank, once after a drift has begun; None otherwise."""
        return self._reader.news() if self._reader is not None and self._is_on else None

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        return {
            "watch": {
                "iterations": self._told,
                "cpu_us": round(1e6 * self._cpu_s),
                "wall_us": round(1e6 * self._wall_s),
            }
        }

    def close(self) -> None:
        if self._reader is not None and self._is_on:
            self._safely(self._reader.close)
        self._timeline.keeps_last, self._timeline.transfers, self._channels.log = False, None, None

    def _safely(self, step: Callable[[], None]) -> None:
        """Run a step of the watch; an error in it switches the watch off and does not end the training."""
        try:
            step()
        except Exception as error:  # any error
            self._is_on = False
            print(f"het: rank {self._rank}: the watch is off: {error or type(error).__name__}", flush=True)  # noqa: T201 - the run's log


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The watch on this rank; a feature that does nothing if the plan's costs do not fit or the store is missing."""
    where = context.placement.locate(context.rank)
    program = context.programs[False]
    device = program.shape.device(where.stage, where.replica)
    try:
        predicted_s = predicted_of(context, program, device)
    except ValueError as error:
        if context.rank == context.placement.world_size - 1:
            print(f"het: the watch is off: the plan's costs are of another schedule: {error}", flush=True)  # noqa: T201
        return RuntimeFeature()
    host = socket.gethostname()
    on_device = context.timeline.on_cuda and context.transport == "nccl"
    clock = f"{host} {context.rank}" if on_device else f"{host} {_boot()}"
    try:
        board = Board(job_store(context.rank, _MEETING_S), f"het/watch/{plan_hash(context.plan)}")
    except StoreError as error:
        print(f"het: rank {context.rank}: the watch is off: {error}", flush=True)  # noqa: T201 - the run's log
        return RuntimeFeature()
    hello = Hello(context.rank, device, host, clock, predicted_s)
    reader = None
    if context.rank == context.placement.world_size - 1:
        from megatron_het.features.watch.monitor import Reader, Settings

        settings = Settings(context.options.smoothing, context.options.threshold)
        save, config = getattr(context.args, "save", None), context.config
        folder = config.report_dir or config.trace_dir or (Path(save) if save else None)
        reader = Reader(context.plan, program, board, settings, folder, context.args)
    return RankWatch(context, board, hello, reader)


def predicted_of(context: OpenContext, program: Program, device: int) -> dict[str, float]:
    """Predicted seconds of an iteration of a device, by kind of operation.

    Raises:
        ValueError: The plan's costs do not fit the program.
    """
    costs = costs_of(context.plan)
    assert costs is not None
    costs.check(program.shape)
    graph = Graph(program)
    found: dict[str, float] = {}
    for node, seconds in enumerate(durations(graph, costs)):
        kind = graph.ops[node].kind
        if graph.device[node] == device and kind in TIMED:
            found[kind.name] = found.get(kind.name, 0.0) + seconds
    return found


def _boot() -> str:
    """Returns the kernel's boot id, which differs between machines with equal host names; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
