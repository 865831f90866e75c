"""Chrome trace of a measured iteration, in the format of the schedule simulator's traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_het.report.timeline import Record
from megatron_het.safe_io import write_text


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
