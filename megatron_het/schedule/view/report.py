"""Results as tables and as JSON."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from megatron_het.schedule.ir import Program
from megatron_het.schedule.simulate import Result
from megatron_het.schedule.validate import Problem
from megatron_het.schedule.view.compare import Row

_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Table:
    """A title, column names, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def print_table(table: Table) -> None:
    """Prints a table with rich.

    Raises:
        ImportError: rich is not installed; the message says how to get it and what works without.
    """
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError as error:
        raise ImportError("tables need rich: pip install rich (--json works without it)") from error
    rich = RichTable(title=table.title, title_justify="left")
    for i, column in enumerate(table.columns):
        rich.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in table.rows:
        rich.add_row(*row)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH).print(rich)


def comparison_table(rows: Sequence[Row]) -> Table:
    """All schedules that can run side by side."""
    columns = ("schedule", "bubble", "activations", "communication", "makespan")
    out: list[tuple[str, ...]] = []
    for row in rows:
        if not row.reason:
            numbers = (row.activation_fraction, row.communication_volume, row.makespan)
            out.append((row.schedule, f"{row.bubble_fraction:.4f}", *(f"{n:.4g}" for n in numbers)))
    return Table("schedules", columns, tuple(out))


def verdict_table(program: Program, problems: Sequence[Problem], deadlocked: dict[str, bool]) -> Table:
    """Is the program valid, and where would it deadlock?"""
    rows = [("program", f"{program.name}: {'valid' if not problems else 'broken'}")]
    rows += [(f"transport {name}", "deadlock" if dead else "ok") for name, dead in deadlocked.items()]
    return Table("verdict", ("what", "verdict"), tuple(rows))


def problems_json(program: Program, problems: Sequence[Problem], deadlocked: dict[str, bool]) -> dict[str, object]:
    """The verdict as plain data."""
    return {
        "program": program.name,
        "valid": not problems,
        "deadlock": deadlocked,
        "problems": [
            {
                "rule": p.rule,
                "device": p.device,
                "position": p.position,
                "operation": str(p.op) if p.op else None,
                "message": p.message,
            }
            for p in problems
        ],
    }


def result_tables(result: Result) -> Iterator[Table]:
    """Summary, bubble by cause, memory, critical path."""
    program = result.program
    summary = (
        ("makespan (s)", f"{result.makespan_s:.6g}"),
        ("ideal (s)", f"{result.ideal_s:.6g}"),
        ("bubble fraction", f"{result.bubble_fraction:.4f}"),
        ("critical path", _path(result)),
    )
    yield Table(program.name, ("what", "value"), summary)
    rows = []
    for device, bubble, busy in zip(program.devices, result.bubble, result.compute_s):
        causes = (bubble.warmup_s, bubble.imbalance_s, bubble.communication_s, bubble.gather_s, bubble.tail_s)
        rows.append((str(device), f"{busy:.6g}", *(f"{seconds:.4g}" for seconds in causes)))
    columns = ("device", "compute", "warm-up", "imbalance", "communication", "gather", "tail")
    yield Table("time per device (s)", columns, tuple(rows))
    used = [name for name in result.memory[0].at_peak_bytes if any(u.at_peak_bytes[name] for u in result.memory)]
    rows = [
        (str(device), f"{use.peak_bytes:.6g}", f"{use.peak_at_s:.4g}", *(f"{use.at_peak_bytes[n]:.4g}" for n in used))
        for device, use in zip(program.devices, result.memory)
    ]
    yield Table("memory per device at its peak", ("device", "peak", "at (s)", *used), tuple(rows))


def _path(result: Result) -> str:
    path = result.critical_path()
    names = [f"{program_device(result, e.device)}:{e.op!s}" for e in path]
    if len(names) > 12:
        names = [*names[:6], f"... {len(names) - 12} more ...", *names[-6:]]
    return " ".join(names)


def program_device(result: Result, device: int) -> str:
    """Name of a device."""
    return str(result.program.devices[device])


def result_json(result: Result) -> dict[str, object]:
    """A simulation as plain data."""
    program = result.program
    return {
        "schedule": program.name,
        "makespan_s": result.makespan_s,
        "ideal_s": result.ideal_s,
        "bubble_fraction": result.bubble_fraction,
        "devices": [
            {
                "stage": device.stage,
                "replica": device.replica,
                "compute_s": busy,
                "bubble": asdict(bubble),
                "peak_bytes": use.peak_bytes,
                "peak_at_s": use.peak_at_s,
                "at_peak_bytes": use.at_peak_bytes,
            }
            for device, busy, bubble, use in zip(program.devices, result.compute_s, result.bubble, result.memory)
        ],
        "critical_path": [
            {"device": e.device, "operation": str(e.op), "start_s": e.start_s, "end_s": e.end_s}
            for e in result.critical_path()
        ],
    }
