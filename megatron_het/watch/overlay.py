"""One trace (Chrome, Perfetto) in which the predicted and the measured iteration lie one above the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_het.schedule.columns import Stream
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.ir import Kind, Op, Program
from megatron_het.schedule.passes import post_receives_early
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.view.trace import STREAM_IDS

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
        kind = Kind[name]
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
