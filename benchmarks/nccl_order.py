"""Trains in NCCL's order on the CPU: NCCL must be chosen, nothing may deadlock, and results must be equal.

``python -m benchmarks.nccl_order --json OUT``: plans of all schedules run as in ``benchmarks.parity``, but over
groups that enforce NCCL's rules (``testing/nccl_order``).  Keys: ``plans``; ``nccl_share``, the share of
plans for which ``--het-transport auto`` chose NCCL; ``deadlocks``, plans in which operations waited for each other;
``failed``; ``max_relative_loss_difference`` to one stock process; ``wrong_orders_caught`` of
``wrong_orders``: programs of :mod:`benchmarks.nccl_mistakes` that are wrong over NCCL.  ``--schedules`` runs some
schedules.  OUT is written after every plan; ``--add OUT`` runs the plans that OUT lacks, and merges the results.
With ``--at-once 1`` only the ranks of one plan run at a time, each with one thread.
"""

import argparse
import itertools
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.combinations import added
from benchmarks.machine import add_begin_argument, command_line, save, scratch, write_report
from benchmarks.nccl_mistakes import MISTAKES, mistake_job
from benchmarks.parity import all_cases, labs
from megatron_het.plan import ScheduleSpec
from testing.cases import STEPS, Case
from testing.compare import compare
from testing.lab import Lab
from testing.runner import Finished, Job, JobError, Runner

BAR = 1e-5
SCHEDULES = ("1f1b", "gpipe", "ministage", "slimpipe", "zero-bubble", "unequal-microbatches", "data-parallel", "depths")
WRONG_ORDERS = "wrong-orders"  # a further name for ``--schedules``: programs with a mistake
_DEEPEST = 3
DEADLOCK = "wait for each other"


def in_nccl_order(job: Job, **options: Any) -> Job:
    """Returns the job with groups that enforce NCCL's rules, and with the transport that a GPU machine would choose."""
    setup = ("benchmarks.nccl_mistakes:simulate", {"options": options, "then": job.setup})
    argv = list(job.argv)
    while "--het-transport" in argv:  # sent only once
        at = argv.index("--het-transport")
        del argv[at : at + 2]
    return replace(job, argv=(*argv, "--distributed-backend", "nccl", "--het-transport", "auto"), setup=setup)


def cases_of(schedule: str, seed: int, quick: bool) -> list[Case]:
    """Returns the plans of a schedule in fp32; ``depths`` are those of 1F1B with more microbatches in flight."""
    if schedule != "depths":
        return [c for c in all_cases(seed, schedule, quick)[0] if c.plan.training.precision == "fp32"]
    rng, found = random.Random(seed), []
    for case in cases_of("1f1b", seed, quick):
        boundaries = len(case.plan.stages) - 1
        if boundaries:
            depths = [rng.randint(1, _DEEPEST) for _ in range(boundaries)]
            spec = ScheduleSpec("1f1b", {"depths": depths})
            chosen = {**case.chosen, "depths": depths}
            found.append(replace(case, plan=replace(case.plan, schedule=spec), chosen=chosen))
    return found


def transports(folder: Path) -> set[str]:
    """Returns the transports that the ranks of a finished run report."""
    found = (json.loads(path.read_text("utf-8")) for path in folder.glob("rank-*.json"))
    return {report["transport"].split(" ")[0] for report in found}


def caught_by_some_rank(done: Finished) -> bool:
    """Whether the backend reported the job's mistake on at least one rank."""
    return not done.timed_out and 0 in done.returncodes


def measure(
    cases: Iterable[Case], runner: Runner, folder: Path, *, at_once: int, steps: int, begin_s: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Train every case; one that fails is recorded."""
    end_s = time.monotonic() + begin_s
    for kind, members in labs(cases).items():
        own = Path(tempfile.mkdtemp(dir=folder))
        lab = kind(runner, own, steps=steps, shared=folder / kind.__name__)
        for batch in itertools.batched(members, at_once):
            if time.monotonic() > end_s:
                break
            for case in batch:
                lab.reference(case)
            jobs = {case.name: case for case in batch}
            for done in runner.run_all((in_nccl_order(lab.job(case)) for case in batch), at_once=at_once):
                yield _entry(done, jobs[done.job.name], lab)
        shutil.rmtree(own)


def _entry(done: Finished, case: Case, lab: Lab) -> dict[str, Any]:
    """Returns the record of a case that has run."""
    entry: dict[str, Any] = {"name": case.name, "world_size": case.plan.world_size, "chosen": case.chosen}
    entry["steps"] = lab.steps
    try:
        done.check()
        entry["transports"] = sorted(transports(done.job.log_dir))
        figures = compare(done.job.log_dir, case.plan, lab.reference(case), gradients=False)
        entry["relative_loss_difference"] = figures.loss
    except (JobError, OSError, KeyError) as error:
        entry["error"] = str(error)
        entry["deadlock"] = any(DEADLOCK in done.log(r) for r in range(case.plan.world_size))
    said = f"{entry.get('transports')} {entry.get('relative_loss_difference')}"
    print(f"{case.name:20} {said} {done.elapsed_s:.1f} s, {done.cpu_s:.1f} s of CPU", flush=True)
    return entry


def summary(entries: list[dict[str, Any]], caught: dict[str, bool], seed: int) -> dict[str, Any]:
    """The report."""
    ran = [entry for entry in entries if "error" not in entry]
    return {
        "benchmark": "nccl_order",
        "plans": len(entries),
        "nccl_share": sum(entry["transports"] == ["nccl"] for entry in ran) / max(len(entries), 1),
        "deadlocks": sum(entry.get("deadlock", False) for entry in entries),
        "failed": [entry["name"] for entry in entries if "error" in entry],
        "max_relative_loss_difference": max((entry["relative_loss_difference"] for entry in ran), default=None),
        "wrong_orders": len(caught),
        "wrong_orders_caught": sum(caught.values()),
        "seed": seed,
        "cases": entries,
        "mistakes": caught,
    }


def _options() -> argparse.Namespace:
    parser = command_line("benchmarks.nccl_order", __doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the plans (default: 0)")
    everything = (*SCHEDULES, WRONG_ORDERS)
    parser.add_argument("--schedules", default=",".join(everything), help="comma-separated (default: all); may be ''")
    parser.add_argument("--full", action="store_true", help="all plans of benchmarks.parity, not a part")
    parser.add_argument("--at-once", type=int, default=2, help="jobs at the same time (default: 2)")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="JSON", help="results of earlier runs with this seed"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of every training (default: {STEPS})")
    parser.add_argument("--keep", type=Path, help="folder for data and references, which later runs use again")
    add_begin_argument(parser)
    options = parser.parse_args()
    options.schedules = [name for name in options.schedules.split(",") if name]
    if unknown := sorted(set(options.schedules) - set(everything)):
        parser.error(f"--schedules {unknown[0]}: known are {', '.join(everything)}")
    return options


def main() -> int:
    """Command line."""
    options = _options()
    cases = {
        schedule: [replace(c, name=f"{schedule}-{c.name}") for c in cases_of(schedule, options.seed, not options.full)]
        for schedule in SCHEDULES
    }
    entries = added(options.add, options.seed, [case for members in cases.values() for case in members])
    caught: dict[str, bool] = {}
    for file in options.add:
        caught |= json.loads(file.read_text(encoding="utf-8"))["mistakes"]
    with scratch("nccl-order-", options.keep) as folder, Runner() as runner:
        if WRONG_ORDERS in options.schedules and not all(caught.get(name) for name in MISTAKES):
            for name in MISTAKES:
                done = runner.run(mistake_job(name, folder / WRONG_ORDERS / name), check=False)
                caught[name] = caught_by_some_rank(done)
            save(options.json, summary(list(entries.values()), caught, options.seed))
        wanted = [case for schedule in options.schedules for case in cases.get(schedule, ())]
        left = [case for case in wanted if "error" in entries.get(case.name, {"error": ""})]
        for entry in measure(
            left, runner, folder, at_once=options.at_once, steps=options.steps, begin_s=options.begin_s
        ):
            entries[entry["name"]] = entry
            save(options.json, summary(list(entries.values()), caught, options.seed))
    report = summary(list(entries.values()), caught, options.seed)
    write_report(options.json, report)
    worst = report["max_relative_loss_difference"]
    is_off = bool(entries) and (worst is None or worst > BAR)
    return int(bool(report["failed"]) or is_off or not all(caught.values()))


if __name__ == "__main__":
    raise SystemExit(main())
