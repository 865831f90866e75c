"""The command ``replan``, and the files of a run that it reads later."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_het.plan import PlanError, load_plan, save_plan
from megatron_het.safe_io import amount

from ..errors import from_plan_error
from ..inputs.cluster import load_cluster
from ..inputs.files import check_target, write_text
from ..inputs.kept import cluster_text
from ..inputs.model import load_model
from ..inputs.profile_schema import load_profile, save_profile
from ..report.tables import say, table
from ..search.limit import cpu_limit, left_s
from ..search.methods import search
from ..search.outcome import Outcome, Progress
from ..search.setup import check_memory_margin, goal_from
from .measured import find_files, load_watched
from .replan import Replanned, replan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    for name, text in (
        ("plan", "the plan that the run has"),
        ("cluster", "cluster file that it was made from"),
        ("model", "model file"),
        ("profile", "profile, where there was one"),
        ("watch", "watch.json, what the run measured"),
    ):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"{text} (default: found in RUN)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="plan to write (default: plan-2.json in RUN)")
    parser.add_argument(
        "--restart-s",
        type=amount(0.0, 1e7),
        default=60.0,
        metavar="S",
        help="seconds that a change costs: save, stop, start, load (default %(default)g)",
    )
    parser.add_argument(
        "--memory-margin",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="share of GPU memory that a plan may use (default 0.95)",
    )


def run(options: argparse.Namespace) -> int:
    """Search, write the better plan, say what it gains; exit code 1 where there is none."""
    names = ("plan", "cluster", "model", "profile", "watch")
    files = find_files(options.folder, {name: getattr(options, name) for name in names})
    out = options.out or options.folder / "plan-2.json"
    check_target(out, "--out")
    check_memory_margin(options)
    try:
        plan = load_plan(files.plan)
    except PlanError as error:
        raise from_plan_error(str(files.plan), error) from None
    watched = load_watched(files.watched, plan)
    goal = goal_from(options)

    def find(estimator: Any, wanted: Any) -> Outcome:
        progress = Progress(limit_s=left_s(options))
        with cpu_limit(progress, options.limit_s):
            return search(options.search, estimator, wanted, progress)

    found = replan(
        plan,
        load_cluster(files.cluster),
        load_model(files.model),
        watched,
        profile=load_profile(files.profile) if files.profile is not None else None,
        goal=goal,
        memory_margin=options.memory_margin,
        restart_s=options.restart_s,
        find=find,
    )
    written = write(found, out) if found.plan is not None else []
    say(body(found, [str(path) for path in written]), options, *_tables(found, written, watched.findings))
    return 0 if found.plan is not None else 1


def write(found: Replanned, out: Path) -> list[Path]:
    """The better plan, and cluster and profile as corrected, beside it."""
    assert found.plan is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    save_plan(found.plan, out)
    cluster = out.with_suffix(".cluster.yaml")
    write_text(cluster, cluster_text(found.corrected.cluster))
    written = [out, cluster]
    if found.corrected.profile is not None:
        profile = out.with_suffix(".profile.json")
        save_profile(found.corrected.profile, profile)
        written.append(profile)
    return written


def body(found: Replanned, files: list[str]) -> dict[str, Any]:
    """The result as JSON values."""
    return {
        "measured_iteration_s": found.measured_s,
        "predicted_before_s": found.before_s,
        "predicted_after_s": found.after_s,
        "gain": found.gain,
        "expected_iteration_s": found.expected_s,
        "restart_s": found.restart_s,
        "pays_after_iterations": found.pays_after,
        "notes": list(found.corrected.notes),
        "kinds": _kinds(found),
        "files": files,
        "search_cpu_s": found.outcome.cpu_s,
    }


def _kinds(found: Replanned) -> dict[str, list[int]]:
    """The ranks of the run's plan by kind of device, of which slow ones have their own now."""
    out: dict[str, list[int]] = {}
    for stage in found.corrected.plan.stages:
        for replica in stage.replicas:
            out.setdefault(replica.device, []).extend(replica.ranks)
    return out


def _tables(found: Replanned, written: list[Path], findings: Any) -> list[Any]:
    seen = table("What the run found", "what", "where", "factor", "since iteration")
    for finding in findings:
        where = f"{finding.name} {finding.operation}".strip()
        over = f", over at {finding.ended}" if finding.ended is not None else ""
        seen.add_row(finding.what, where, f"{finding.factor:.2f}", f"{finding.since or 'the start'}{over}")
    times = table("Iteration, s", "", "seconds")
    times.add_row("measured now", f"{found.measured_s:.4g}")
    times.add_row("this plan, from the measured figures", f"{found.before_s:.4g}")
    times.add_row("the best plan found, from the same figures", f"{found.after_s:.4g}")
    lines = [seen, *found.corrected.notes, times]
    if found.plan is None:
        return [*lines, "no better plan was found: the run has the best one for what was measured"]
    stages = " | ".join(
        f"{sum(stage.layers)} layers on "
        + " + ".join(f"{r.device} ({len(r.microbatches)} microbatches)" for r in stage.replicas)
        for stage in found.plan.stages
    )
    return [
        *lines,
        f"better: {stages}",
        f"an iteration becomes {100 * found.gain:.1f} % shorter, about {found.expected_s:.4g} s; with "
        f"{found.restart_s:g} s for the change it pays after {found.pays_after} iterations",
        "wrote " + ", ".join(map(str, written)),
    ]
