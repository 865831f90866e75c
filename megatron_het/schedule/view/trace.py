"""Timelines as Chrome traces, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The simulator's predictions and a run's measurements use the same format, so they can be laid over each
other: give the two different ``process`` names and merge their ``traceEvents``.
"""

from collections.abc import Iterable
from pathlib import Path

from megatron_het import safe_io as untrusted
from megatron_het.schedule.ir import SENDS, Op
from megatron_het.schedule.result import Event
from megatron_het.schedule.simulate import Result

STREAM_IDS = {"compute": 0, "send": 1, "receive": 2, "collective": 3, "host_to_device": 4, "device_to_host": 5}
_SORT = "process_sort_index"


def trace_events(
    events: Iterable[Event], device_names: list[str], *, process: str = "device", first_pid: int = 0
) -> list[dict[str, object]]:
    """Trace events with integer process (device) and thread (stream) ids; times in microseconds.

    Args:
        events: what happened; empty ones (start = end) are left out unless they are computations.
        device_names: one per device.
        process: prefix of the process names, e.g. ``"predicted"`` or ``"measured"``.
        first_pid: process id of device 0.
    """
    out: list[dict[str, object]] = []
    used: set[tuple[int, str]] = set()
    for event in events:
        if event.end_s <= event.start_s and event.stream != "compute":
            continue
        used.add((event.device, event.stream))
        out.append(
            {
                "name": str(event.op),
                "cat": event.op.kind.name.lower(),
                "ph": "X",
                "ts": event.start_s * 1e6,
                "dur": (event.end_s - event.start_s) * 1e6,
                "pid": first_pid + event.device,
                "tid": STREAM_IDS[event.stream],
                "args": _arguments(event.op),
            }
        )
    for device, name in enumerate(device_names):
        pid = first_pid + device
        out.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": f"{process} {name}"}})
        out.append({"name": _SORT, "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        for stream, tid in STREAM_IDS.items():
            if (device, stream) in used:
                out.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": stream}})
    return out


def _arguments(op: Op) -> dict[str, object]:
    arguments: dict[str, object] = {"kind": op.kind.name}
    arguments |= {name: value for name, value in op._asdict().items() if name != "kind" and value >= 0}
    return arguments


def chrome_trace(result: Result, *, process: str = "device") -> dict[str, object]:
    """The trace of a simulation: all streams, arrows for transfers, memory counters."""
    names = [str(device) for device in result.program.devices]
    events = trace_events(result.events(), names, process=process)
    graph = result.graph
    for i, op in enumerate(graph.ops):
        j = graph.other_end[i]
        if op.kind in SENDS and j >= 0 and result.end_s[i] > result.start_s[i]:
            for phase, node, stream in (("s", i, "send"), ("f", j, "receive")):
                event = {
                    "name": "transfer",
                    "cat": "transfer",
                    "ph": phase,
                    "id": i,
                    "pid": graph.device[node],
                    "tid": STREAM_IDS[stream],
                    "ts": result.start_s[node] * 1e6,
                }
                events.append(event | ({"bp": "e"} if phase == "f" else {}))
    for device, use in enumerate(result.memory):
        if use.peak_bytes:
            events += [
                {"name": "memory", "ph": "C", "pid": device, "tid": 0, "ts": time * 1e6, "args": {"bytes": held}}
                for time, held in use.curve()
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_json(path: str | Path, data: object) -> None:
    """Writes a complete file or nothing; see ``untrusted.write_json``."""
    untrusted.write_json(path, data, indent=1)
