"""The report of the demo: predicted against measured, on the screen, as JSON, and in README.md."""

import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.llama.devices import CpuDevice
from megatron_het.plan import Placement, Plan, plan_hash
from tools.planner.report.tables import table

#: Iterations at the start of a run that are not counted: caches and pages are cold, and the second
#: one is slowed by metering memory.
WARM_UP = 2

#: A machine of which others take this share, or on which equal iterations differ by that share, is busy.
_BUSY_SHARE, _BUSY_SPREAD = 0.1, 0.15

REPOSITORY = Path(__file__).resolve().parents[2]
README, PICTURE = REPOSITORY / "README.md", REPOSITORY / "docs" / "images" / "demo-timeline.png"
_BLOCK = re.compile(r"(<!-- demo: [^>]*-->\n).*?(\n<!-- end of demo -->)", re.DOTALL)

_WIDTH = 76  # of a command's line
_MEMORY = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


class Screen:
    """Output of the demos while they run."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def title(self, text: str) -> None:
        """Print the title of a step."""
        self._console.print(f"\n[bold cyan]{text}[/]")

    def line(self, text: str) -> None:
        """Print one line, without markup."""
        self._console.print(text, markup=False, soft_wrap=True)

    def command(self, words: Sequence[str]) -> None:
        """Print the whole Python command, to be copied, with relative paths."""
        lines = ["$ python"]
        for word in words:
            text = shlex.quote(word.replace(f"{Path.cwd()}/", ""))
            if len(lines[-1]) + len(text) > _WIDTH:
                lines.append("   ")
            lines[-1] += f" {text}"
        self.line(" \\\n".join(lines))

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column is left-aligned, the others right-aligned."""
        made = table(title, *head)
        for row in rows:
            made.add_row(*row)
        self._console.print(made)

    @contextlib.contextmanager
    def training(self, name: str, iterations: int) -> Iterator[Callable[[int, int, float], None]]:
        """Show the progress of a training; yields the function to call with (iteration, of, loss)."""
        if not self._console.is_terminal:
            yield lambda i, n, loss: self._some(name, i, n, loss)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(name, total=iterations, loss="starting")
            yield lambda i, n, loss: progress.update(task, completed=i, total=n, loss=f"loss {loss:.3f}")

    def _some(self, name: str, iteration: int, total: int, loss: float) -> None:
        """Print the first iteration of a training, and about ten of all."""
        if iteration % max(1, total // 10) == 0 or iteration in (1, total):
            self.line(f"{name}: iteration {iteration}/{total}, loss {loss:.3f}")


@dataclass(slots=True)
class Trial:
    """A plan, the planner's predictions for it, and the reports of all its runs."""

    plan: Plan  # the plan
    file: Path  # where it is stored
    predicted_s: float  # simulated time of an iteration
    predicted_bubble: float  # idle time over compute in the simulation
    runs: list[list[dict[str, Any]]] = field(default_factory=list)  # the rank reports of each run

    def iteration_times_s(self, run: int) -> list[float]:
        """Returns the times of the counted iterations of one run."""
        return counted(self.runs[run][0], "elapsed_s")

    @property
    def iteration_s(self) -> float:
        """Returns the median over the counted iterations of all runs."""
        return statistics.median(t for run in range(len(self.runs)) for t in self.iteration_times_s(run))

    @property
    def bubble_fraction(self) -> float:
        """Returns (schedule - mean busy time) / mean busy time, the median over all runs."""
        found = []
        for reports in self.runs:
            busy = statistics.fmean(statistics.median(counted(r, "compute_s")) for r in reports)
            schedule = max(statistics.median(counted(r, "schedule_s")) for r in reports)
            found.append((schedule - busy) / busy)
        return statistics.median(found)


def counted(report: dict[str, Any], key: str) -> list[float]:
    """Returns a figure of one rank's iterations after the warm-up, without metered ones.

    Raises:
        ValueError: The run was too short.
    """
    values = [
        i[key]
        for i in report["iterations"][WARM_UP:]
        if i.get(key) is not None and i.get("elapsed_s") is not None and not i.get("metered")
    ]
    if not values:
        raise ValueError(
            f"rank {report['rank']} ran {len(report['iterations'])} iterations; "
            f"at least {WARM_UP + 2} are needed to time one"
        )
    return values


def build(trial: Trial, even: Trial, training: list[dict[str, Any]], devices: Sequence[str]) -> dict[str, Any]:
    """Returns the contents of ``report.json``.

    Args:
        trial: The chosen plan with its short runs and, last, the long training.
        even: The even split with its short runs.
        training: The rank reports of the long training.
        devices: Name of every rank's device.
    """
    losses = losses_of(training)
    validation: list[Any] = next((r["validation"] for r in reversed(training) if r.get("validation")), [])
    measured_s, even_s = trial.iteration_s, even.iteration_s
    return {
        "plan_hash": plan_hash(trial.plan),
        "num_layers": trial.plan.model.num_layers,
        "tokens_per_iteration": trial.plan.training.global_batch_size * trial.plan.model.seq_length,
        "losses": losses,
        "validation_loss": statistics.fmean(v for _, v in validation) if validation else None,
        "predicted_iteration_s": trial.predicted_s,
        "measured_iteration_s": measured_s,
        "prediction_error": trial.predicted_s / measured_s - 1,
        "even_split_iteration_s": even_s,
        "even_split_predicted_iteration_s": even.predicted_s,
        "speedup_over_even_split": _paired_speedup(trial, even),
        "predicted_bubble_fraction": trial.predicted_bubble,
        "measured_bubble_fraction": trial.bubble_fraction,
        "plan": describe(trial.plan),
        "even_split": describe(even.plan),
        "runs": {
            "plan_iteration_s": [trial.iteration_times_s(i) for i in range(len(trial.runs))],
            "even_split_iteration_s": [even.iteration_times_s(i) for i in range(len(even.runs))],
            "plan_losses": [losses_of(run) for run in trial.runs],
            "even_split_losses": [losses_of(run) for run in even.runs],
        },
        "per_rank": _per_rank(trial, training, devices),
    }


def busy_reason(others: float, cores: int) -> str:
    """Returns why this machine's figures are unreliable; empty if it is idle.

    Args:
        others: Cores that other programs use.
        cores: Cores that the demo may use.
    """
    if others <= _BUSY_SHARE * cores:
        return ""
    return f"other programs use {others:.1f} of {cores} cores: times of this run are not to be trusted"


def circumstances(
    runs: dict[str, list[list[float]]], others: float, cores: int, devices: Sequence[CpuDevice]
) -> dict[str, Any]:
    """Returns date and machine of the figures, and the reasons why they are unreliable, if any.

    Args:
        runs: Times of the iterations of both plans, by run.
        others: Cores that other programs used at the start.
        cores: Cores that the demo may use.
        devices: The demo's processes.
    """
    spreads = [_spread(times) for name in ("plan_iteration_s", "even_split_iteration_s") for times in runs[name]]
    doubts = [text for text in (busy_reason(others, cores),) if text]
    if max(spreads) > _BUSY_SPREAD:
        doubts.append(
            f"equal iterations of one run differ by {max(spreads):.0%}: the machine was busy, or changed its speed"
        )
    names = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    found = [line.split(":", 1)[1].strip() for line in names.splitlines() if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "processor": found[0] if found else platform.machine(),
        "cores": len({d.core for d in devices}),
        "doubts": doubts,
    }


def _spread(times: Sequence[float]) -> float:
    """Returns the distance between the quartiles, as a share of the median."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return (high - low) / middle


def losses_of(reports: list[dict[str, Any]]) -> list[Any]:
    """Returns ``[iteration, loss]`` of a run, from the rank that computes the loss."""
    return next((r["losses"] for r in reversed(reports) if r.get("losses")), [])


def _paired_speedup(trial: Trial, even: Trial) -> float:
    """Returns the median of even / planned over alternating short runs, which drift of the machine hits equally."""
    pairs = min(len(trial.runs), len(even.runs))
    return statistics.median(
        statistics.median(even.iteration_times_s(i)) / statistics.median(trial.iteration_times_s(i))
        for i in range(pairs)
    )


def _per_rank(trial: Trial, training: list[dict[str, Any]], devices: Sequence[str]) -> list[dict[str, Any]]:
    placement, predicted = Placement(trial.plan), trial.plan.predicted
    assert predicted is not None
    rows = []
    for report in training:
        rank = report["rank"]
        where, expected = placement.locate(rank), predicted.per_rank[rank]
        replica = placement.replica(where.stage, where.replica)
        memory = dict(report["memory"])
        memory["activation_bytes"] = memory.pop("activation_peak_bytes", 0)
        rows.append(
            {
                "rank": rank,
                "device": devices[rank],
                "stage": where.stage,
                "replica": where.replica,
                "layers": sum(trial.plan.stages[where.stage].layers),
                "microbatches": len(replica.microbatches),
                "predicted_compute_s": expected.compute_s,
                "measured_compute_s": statistics.median(counted(report, "compute_s")),
                "predicted_memory": {k: getattr(expected, k) for k in _MEMORY},
                "measured_memory": {k: memory.get(k, 0) for k in _MEMORY},
                "predicted_memory_bytes": expected.total_bytes,
                "measured_memory_bytes": sum(memory.get(k, 0) for k in _MEMORY),
            }
        )
    return rows


def describe(plan: Plan) -> str:
    """Returns a plan in one line: ``5 layers on fast | 4 layers on slow (6) + slow (6)``."""
    stages = []
    for stage in plan.stages:
        names = " + ".join(
            f"{r.device} ({len(r.microbatches)})" if len(stage.replicas) > 1 else r.device for r in stage.replicas
        )
        stages.append(f"{sum(stage.layers)} layers on {names}")
    return " | ".join(stages)


def save(report: dict[str, Any], path: Path) -> None:
    """Write the report; an existing file is replaced only by a complete one."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def show_profile(profile: dict[str, Any], screen: Screen) -> None:
    """Show the table of measured layers."""
    rows = [
        [
            f"{device['kind']} {t['layer']}",
            f"{t['forward_s'] * 1e3:.2f}",
            f"{t['backward_s'] * 1e3:.2f}",
            f"{t['update_s'] * 1e3:.2f}",
            f"{t['activation_bytes'] / 2**20:.1f}",
        ]
        for device in profile["devices"]
        for t in device["timings"]
    ]
    head = ["device and layer", "forward, ms", "backward, ms", "update, ms", "kept, MiB"]
    screen.table("One microbatch", head, rows)


def show(report: dict[str, Any], screen: Screen) -> None:
    """Show the tables at the end of the demo."""
    rows = [
        [
            f"{r['rank']}: {r['device']}",
            f"{r['stage']}",
            f"{r['layers']}",
            f"{r['microbatches']}",
            f"{r['predicted_compute_s']:.3f}",
            f"{r['measured_compute_s']:.3f}",
            f"{r['predicted_memory_bytes'] / 2**20:.0f}",
            f"{r['measured_memory_bytes'] / 2**20:.0f}",
        ]
        for r in report["per_rank"]
    ]
    screen.table(
        "Ranks",
        [
            "rank",
            "stage",
            "layers",
            "micro-\nbatches",
            "busy s,\npred.",
            "busy s,\nmeas.",
            "MiB,\npred.",
            "MiB,\nmeas.",
        ],
        rows,
    )
    losses = [loss for _, loss in report["losses"]]
    figures = [
        ("iteration, planned, s", report["predicted_iteration_s"], report["measured_iteration_s"]),
        ("iteration, even split, s", report["even_split_predicted_iteration_s"], report["even_split_iteration_s"]),
        ("bubble / busy time", report["predicted_bubble_fraction"], report["measured_bubble_fraction"]),
        (
            "speedup over the even split",
            report["even_split_predicted_iteration_s"] / report["predicted_iteration_s"],
            report["speedup_over_even_split"],
        ),
    ]
    screen.table("The job", ["", "predicted", "measured"], [[name, f"{a:.3f}", f"{b:.3f}"] for name, a, b in figures])
    screen.line(f"Planned:    {report['plan']}")
    screen.line(f"Even split: {report['even_split']}")
    if losses:
        end = f"Training loss {losses[0]:.3f} -> {losses[-1]:.3f} over {len(losses)} iterations"
        if report["validation_loss"] is not None:
            end += f", validation loss {report['validation_loss']:.3f}"
        screen.line(end + " (nats per byte)")
    for doubt in report["doubts"]:
        screen.line(f"Note: {doubt}. Run the demo again on an idle machine.")


class BusyError(RuntimeError):
    """The figures of a run must not be published."""


def published(result: dict[str, Any]) -> str:
    """Returns the text of README.md about a run.

    Args:
        result: The contents of ``report.json``.
    """
    stages = len({r["stage"] for r in result["per_rank"]})
    shape = "in one stage" if stages == 1 else f"in {stages} stages"
    picture = "![One iteration, as the planner predicted it and as it ran](docs/images/demo-timeline.png)"
    return (
        f"{picture}\n\n"
        f"`make demo` draws this picture on {result['cores']} processor cores; the slow ones run half of the time.\n"
        f"{len(result['per_rank'])} processes train {result['num_layers']} layers {shape}. The planner predicted "
        f"{result['predicted_iteration_s']:.2f} s per iteration, and the run\n"
        f"took {result['measured_iteration_s']:.2f} s. The even split of the same job took "
        f"{result['even_split_iteration_s']:.2f} s. By runs in turn the plan is\n"
        f"{result['speedup_over_even_split']:.2f} times as fast. Measured on {result['date']}, {result['processor']}."
    )


def publish(result: dict[str, Any], out: Path, screen: Screen) -> None:
    """Write a run's figures and its picture into README.md and its images.

    Raises:
        BusyError: The machine was busy, or there is no picture.
    """
    if result["doubts"]:
        raise BusyError(f"README.md stays as it is: {'; '.join(result['doubts'])}")
    if not (out / "timeline.png").is_file():
        raise BusyError("README.md stays as it is: the run left no timeline.png (is matplotlib installed?)")
    text, found = _BLOCK.subn(lambda m: m[1] + published(result) + m[2], README.read_text(encoding="utf-8"))
    if found != 1:
        raise BusyError("README.md stays as it is: it has no place for the demo's figures")
    README.write_text(text, encoding="utf-8")
    shutil.copyfile(out / "timeline.png", PICTURE)
    screen.line(f"renewed: {README.name}, {PICTURE.relative_to(REPOSITORY)}")
