"""Command line: ``python -m megatron_het.schedule show | check | simulate | compare``."""

import argparse
import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from megatron_het.features import FEATURES
from megatron_het.features.base import ViewFlag
from megatron_het.lowering.programs import assemble
from megatron_het.safe_io import (
    MAX_PASSES,
    LineParser,
    add_options,
    amount,
    check_replaces,
    check_target,
    count,
    ends_with_its_reader,
    one_line,
    read_text,
    shown,
    write_json,
)
from megatron_het.schedule.cost import Costs, Link
from megatron_het.schedule.generators import GENERATORS
from megatron_het.schedule.graph import Graph, ScheduleError
from megatron_het.schedule.ir import Program, Shape, dumps, loads, placement_of
from megatron_het.schedule.simulate import Result, simulate
from megatron_het.schedule.validate import TRANSPORTS, Problem, deadlocks, validate
from megatron_het.schedule.view import visualize

# Results as tables and as JSON.

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


def comparison_table(rows: Sequence[visualize.Row]) -> Table:
    """All schedules that can run side by side."""
    columns = ("schedule", "bubble", "activations", "communication", "makespan")
    out: list[tuple[str, ...]] = []
    for row in rows:
        if not row.reason:
            numbers = (row.activation_fraction, row.communication_volume, row.makespan)
            out.append((row.schedule, f"{row.bubble_fraction:.4f}", *(f"{n:.4g}" for n in numbers)))
    return Table("schedules", columns, tuple(out))


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
    names = [f"{result.program.devices[e.device]}:{e.op!s}" for e in path]
    if len(names) > 12:
        names = [*names[:6], f"... {len(names) - 12} more ...", *names[-6:]]
    return " ".join(names)


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


_COUNT = count(1, MAX_PASSES)


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0; 1 when ``check`` found the program broken; 2 for input that cannot be used.
    """
    try:
        options = _parser().parse_args(arguments)
        return int(options.run(options))
    except BrokenPipeError:  # is an OSError
        raise
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


class _Parser(LineParser):
    """Bad options become the one error line that other bad input becomes."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(one_line(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m megatron_het.schedule", description="Look at, check, simulate and compare pipeline schedules."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("show", _show, "print a program, its exchange plan, or a picture"),
        ("check", _check, "say whether a program can run, on which transports, and why not"),
        ("simulate", _simulate, "time, bubble by cause and memory of a program"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        _add_program(command)
        _add_costs(command)
        _add_json(command)
    show, check, sim = (commands.choices[name] for name in ("show", "check", "simulate"))
    show.add_argument("--program-text", action="store_true", help="the program as text instead of a timeline")
    for feature in FEATURES:
        for flag in feature.show_flags:
            _add_view_flag(show, flag)
    show.add_argument(
        "--width", type=count(1, 10_000), default=68, help="characters of the timeline (default %(default)s)"
    )
    for command in (show, sim):
        command.add_argument("--picture", type=Path, help="write timeline and memory to this .svg, .png or .pdf")
        command.add_argument("--trace", type=Path, help="write a Chrome trace for Perfetto to this file")
    check.add_argument(
        "--transport", action="append", choices=TRANSPORTS, help="check for deadlock on it (repeatable; default: all)"
    )
    both = commands.add_parser("compare", help="all schedules side by side", description="all schedules side by side")
    both.set_defaults(run=_compare)
    size = {"type": _COUNT}
    # fmt: off
    add_options(both, {
        "--pp": (None, "", "pipeline stages", size, {"required": True}),
        "--microbatches": (None, "", None, size, {"required": True}),
        "--slices": (None, "", "slices per sequence, where a schedule has them", size, {"required": True}),
        "--chunks": (1, "", "chunks per stage, where a schedule has them", size),
        "--attention-share": (
            0.0, "", "causal attention's share of the layers' forward time", {"type": amount(0.0, 1.0)}),
        "--output-share": (
            0.0, "", "the output layer's share of the model's forward time", {"type": amount(0.0, 0.99)}),
        "--layers-per-chunk": (1, "", "layers per chunk, for the volume of the attention exchange", size),
    })
    # fmt: on
    _add_json(both)
    return parser


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="OUT", nargs="?", const="-", help="write JSON to OUT (- or nothing: stdout)")
    command.add_argument("--force", action="store_true", help="replace files that the command reads or did not write")


def _add_program(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("program")
    group.add_argument("program", help=f"a file with a program, or one of: {', '.join(sorted(GENERATORS))}")
    group.add_argument("--pp", type=_COUNT, default=4, help="pipeline stages (default %(default)s)")
    group.add_argument("--microbatches", type=_COUNT, default=8, help="default %(default)s")
    group.add_argument("--slices", type=_COUNT, default=1, help="slices per sequence (default %(default)s)")
    group.add_argument("--chunks", type=_COUNT, help="chunks per stage (default 1; 2 for the V schedules)")
    group.add_argument("--layers", help="layers per chunk, unequal stages as in '3 2 | 2 2 | 1' (sets --pp, --chunks)")
    group.add_argument("--replicas", help="replicas per stage, as in '1 2 1'")
    group.add_argument("--route", help="replica of each microbatch, per stage, as in '0 0 0 | 0 1 0' (default: round)")
    group.add_argument("--forward-only", action="store_true", help="the evaluation program")
    group.add_argument("--transfers", choices=("global", "late", "none"), default="global", help="order of receives")
    for feature in FEATURES:
        for flag in feature.view_flags:
            _add_view_flag(group, flag)


def _add_view_flag(group: argparse._ActionsContainer, flag: ViewFlag) -> None:
    if flag.default is False:
        group.add_argument(flag.flag, action="store_true", help=flag.help)
    elif flag.choices:
        group.add_argument(flag.flag, choices=flag.choices, default=flag.default, help=flag.help)
    else:
        group.add_argument(flag.flag, type=count(0, flag.most), default=flag.default, help=flag.help)


def _add_costs(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("costs (units: forward of one microbatch through one chunk = 1 s)")
    seconds = {"type": amount(0.0, 1e6)}
    # fmt: off
    add_options(group, {
        "--attention-share": (0.0, "", "share of causal attention in the forward", {"type": amount(0.0, 1.0)}),
        "--output-share": (0.0, "", "share of the output layer in the model's forward", {"type": amount(0.0, 0.99)}),
        "--speeds": (None, "", "relative speed per device, as in '1 1 0.5'"),
        "--latency": (0.0, "", "latency of every message, in s", seconds),
        "--transfer": (0.0, "", "transfer time of one microbatch's activations, in s", seconds),
        "--gather": (0.0, "", "all-gather (and reduction) of one chunk, in s", seconds),
    })
    # fmt: on


def _numbers(text: str, name: str) -> tuple[tuple[int, ...], ...]:
    try:
        rows = tuple(tuple(int(n) for n in row.split()) for row in text.split("|"))
    except ValueError:
        rows = ((-1,),)
    if any(not 0 <= n <= MAX_PASSES for row in rows for n in row):
        raise ValueError(f"--{name} {shown(text)}: integers from 0 to {MAX_PASSES} expected, rows separated by |")
    return rows


def _check_size(options: argparse.Namespace) -> None:
    """Before anything is laid out: a mistyped number is an error, not a machine without memory."""
    passes = 2 * options.pp * options.microbatches * options.slices * (options.chunks or 1)
    if passes > MAX_PASSES:
        raise ValueError(
            f"--pp, --microbatches, --slices and --chunks make {passes} passes per iteration, more than {MAX_PASSES}"
        )


def _shape(options: argparse.Namespace) -> Shape:
    _check_size(options)
    placement = placement_of(options.program)
    chunks = options.chunks or (2 if placement == "v" else 1)
    layers = _numbers(options.layers, "layers") if options.layers else ((1,) * chunks,) * options.pp
    stages = len(layers)
    replicas = _numbers(options.replicas, "replicas")[0] if options.replicas else (1,) * stages
    if options.route:
        route = _numbers(options.route, "route")
    else:
        if min(replicas, default=1) < 1:
            raise ValueError(f"--replicas {options.replicas!r}: every stage needs at least one")
        route = tuple(tuple(m % count for m in range(options.microbatches)) for count in replicas)
    return Shape(layers, route, replicas, options.slices, placement)


def _program(options: argparse.Namespace) -> Program:
    """The program of the arguments: read from a file as it is, or generated with all passes asked for."""
    if options.program not in GENERATORS:
        path = Path(options.program)
        if not os.path.lexists(path):
            known = ", ".join(sorted(GENERATORS))
            raise ValueError(f"{shown(options.program)} is neither a file nor a schedule ({known})")
        text = read_text(path)
        try:
            return loads(text)
        except ValueError as error:
            raise ValueError(one_line(f"{path}: {error}")) from None
    viewed = [(feature, feature.viewed(vars(options))) for feature in FEATURES]
    return assemble(
        _shape(options),
        options.program,
        [(feature, chosen) for feature, chosen in viewed if chosen is not None],
        forward_only=options.forward_only,
        transfers=options.transfers,
    )


def _costs(options: argparse.Namespace, program: Program) -> Costs:
    """Equal layers; a chunk of average size takes 1 s forward."""
    shape = program.shape
    try:
        speeds = [float(s) for s in options.speeds.split()] if options.speeds else [1.0] * len(shape.devices)
    except ValueError:
        speeds = []
    if len(speeds) != len(shape.devices) or not all(1e-6 <= s <= 1e6 for s in speeds):
        raise ValueError(
            f"--speeds {shown(options.speeds)}: one number from 1e-6 to 1e6 for each of {len(shape.devices)} devices"
        )
    costs = visualize.model_costs(
        program, float(len(shape.path)), options.attention_share, options.output_share, speeds
    )
    size = 1e-9  # of a message: next to nothing beside the activations, which are 1 in the whole model
    link = Link(options.latency, size / options.transfer if options.transfer else math.inf)
    gather = tuple((options.gather,) * len(shape.layers[d.stage]) for d in shape.devices)
    return replace(costs, link=lambda source, target: link, message_bytes=size, gather_s=gather, reduce_s=gather)


def _result(options: argparse.Namespace, program: Program) -> Result:
    return simulate(program, _costs(options, program))


def _write(options: argparse.Namespace, data: object) -> bool:
    """Writes JSON where it was asked for; True when that was stdout."""
    if options.json is None:
        return False
    if options.json == "-":
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
        return True
    write_json(options.json, data, indent=1)
    return False


_OUTPUTS: dict[str, tuple[tuple[str, ...], tuple[bytes, ...]]] = {
    "json": ((), (b'"program": ', b'"makespan', b'"slot"')),
    "picture": (visualize.PICTURES, (b"<svg", b"\x89PNG", b"%PDF")),
    "trace": ((), (b'"traceEvents"',)),
}
"""Allowed endings of an option's file, and marks near the beginning of an earlier file of this kind."""


def _check_outputs(options: argparse.Namespace) -> None:
    """Check before any work that the output files can be written, and replace only files of the same kind."""
    inputs = [options.program] if getattr(options, "program", "") not in ("", *GENERATORS) else []
    for name, (endings, marks) in _OUTPUTS.items():
        if (file := getattr(options, name, None)) and file != "-":
            check_target(file, endings)
            if not options.force:
                check_replaces(file, inputs, marks)


def _pictures(options: argparse.Namespace, result: Result) -> None:
    if options.picture:
        visualize.draw(result, options.picture)
    if options.trace:
        write_json(options.trace, visualize.chrome_trace(result), indent=1)


def _show(options: argparse.Namespace) -> int:
    _check_outputs(options)
    program = _program(options)
    for feature in FEATURES:
        if (found := feature.shown(program, vars(options))) is not None:
            body, lines = found
            if not _write(options, body):
                sys.stdout.write("\n".join(lines) + "\n")
            return 0
    if options.program_text:
        sys.stdout.write(dumps(program))
        return 0
    result = _result(options, program)
    if not _write(options, result_json(result)):
        sys.stdout.write(visualize.text_picture(result, width=max(options.width, 10)) + "\n")
    _pictures(options, result)
    return 0


def _check(options: argparse.Namespace) -> int:
    _check_outputs(options)
    program = _program(options)
    transports = options.transport or list(TRANSPORTS)
    problems = validate(program, transports=transports)
    deadlocked: dict[str, bool] = {}
    if all(problem.rule == "deadlock" for problem in problems):
        found = deadlocks(Graph(program))
        deadlocked = {name: bool(found[name]) for name in TRANSPORTS}
    if not _write(options, problems_json(program, problems, deadlocked)):
        rows = [("program", f"{program.name}: {'valid' if not problems else 'broken'}")]
        rows += [(f"transport {name}", "deadlock" if dead else "ok") for name, dead in deadlocked.items()]
        print_table(Table("verdict", ("what", "verdict"), tuple(rows)))
        for problem in problems:
            sys.stdout.write(f"{problem}\n")
    return 1 if problems else 0


def _simulate(options: argparse.Namespace) -> int:
    _check_outputs(options)
    program = _program(options)
    problems = validate(program, transports=("edge",))
    if problems:
        raise ScheduleError(f"program {program.name} cannot run:\n  " + "\n  ".join(map(str, problems[:5])))
    result = _result(options, program)
    if not _write(options, result_json(result)):
        for table in result_tables(result):
            print_table(table)
    _pictures(options, result)
    return 0


def _compare(options: argparse.Namespace) -> int:
    _check_outputs(options)
    _check_size(options)
    rows = visualize.compare(
        visualize.Setting(
            stages=options.pp,
            microbatches=options.microbatches,
            slices=options.slices,
            chunks=options.chunks,
            attention_share=options.attention_share,
            output_share=options.output_share,
            layers_per_chunk=options.layers_per_chunk,
        )
    )
    data = [{name: value for name, value in asdict(row).items() if name != "reason"} for row in rows if not row.reason]
    if not _write(options, data):
        print_table(comparison_table(rows))
        for row in rows:
            if row.reason:
                sys.stdout.write(textwrap.fill(f"{row.schedule} cannot run: {row.reason}", 80) + "\n")
    return 0
