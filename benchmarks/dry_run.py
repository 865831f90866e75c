"""Do dry runs hold, compute and send what real runs do, and what planner predicts?

``python -m benchmarks.dry_run --json OUT``.  Small plans of every schedule and feature run for real over gloo, counted
by the tracker of dry runs, and every rank of them as a dry run.  ``bytes_difference`` is the largest difference of any
figure: bytes of every category at the peak, bytes to every peer and of every collective; ``flops_difference`` likewise.

Big plans of dense models (:mod:`benchmarks.dry_run_big`) run dry with fused kernels, one rank of the first and the last
stage (``--kinds``: every kind).  ``planner_memory_error`` is the largest relative difference between what the
planner says of a rank, without what it reserves for allocator and libraries, and the peak of the rank's dry run;
``seconds_per_rank_kind`` is the longest dry run, without the import of Megatron.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.dry_run_big import BigPlan, big_plans
from benchmarks.dry_run_cases import dry_run_cases, flags_of
from benchmarks.machine import machine
from benchmarks.runner import Job, JobError, Runner
from megatron_het.plan import save_plan
from tools.planner.dry_run import rank_flags, rank_kinds
from tools.planner.model import load_model

BYTES_BAR, MEMORY_BAR, SECONDS_BAR = 0, 0.03, 120.0

_ENTRY = "megatron_het.dry_run.__main__:main"
_CASE_S = 600.0


def jobs_of(case: Case, folder: Path, ranks: Sequence[int]) -> list[Job]:
    """The real run of a case, and a dry run of each of some ranks."""
    folder.mkdir(parents=True)
    save_plan(case.plan, folder / "plan.json")
    flags = (*flags_of(case), "--het-plan", str(folder / "plan.json"))
    real = ("--measured", "--kernels", "cpu", "--out", str(folder / "real-{rank}.json"), "--", *flags)
    jobs = [Job(case.name, case.plan.world_size, real, folder, _ENTRY, timeout_s=_CASE_S)]
    for rank in ranks:
        dry = ("--kernels", "cpu", "--rank", str(rank), "--out", str(folder / f"dry-{rank}.json"), "--", *flags)
        jobs.append(Job(f"{case.name}, dry rank {rank}", 1, dry, folder / f"dry-{rank}", _ENTRY, timeout_s=_CASE_S))
    return jobs


def difference(real: dict[str, Any], dry: dict[str, Any]) -> dict[str, float]:
    """What differs between the figures of a real and a dry run of one rank, by figure; empty where nothing does."""
    found: dict[str, float] = {}
    for part in ("by_category", "category_peaks"):
        for name in real["memory"][part]:
            found[f"{part} {name}"] = real["memory"][part][name] - dry["memory"][part][name]
    for name in ("total_bytes", "start_bytes"):
        found[name] = real["memory"][name] - dry["memory"][name]
    sent = [{(e["what"], tuple(e["ranks"])): e for e in run["traffic"]} for run in (real, dry)]
    for key in sent[0].keys() | sent[1].keys():
        for what in ("payload_bytes", "calls"):
            found[f"{what} {key}"] = sent[0].get(key, {}).get(what, 0) - sent[1].get(key, {}).get(what, 0)
    for kind in real["flops"].keys() | dry["flops"].keys():
        found[f"flops {kind}"] = real["flops"].get(kind, 0) - dry["flops"].get(kind, 0)
    return {name: value for name, value in found.items() if value}


def compare(runner: Runner, case: Case, folder: Path, ranks: Sequence[int]) -> dict[str, Any]:
    """Run a case for real and dry; returns its figures."""
    entry: dict[str, Any] = {"name": case.name, "world_size": case.plan.world_size, "ranks": list(ranks)}
    try:
        for job in jobs_of(case, folder, ranks):
            runner.run(job)
    except JobError as error:
        return entry | {"error": str(error)}
    differences = {}
    for rank in ranks:
        real, dry = (json.loads((folder / f"{kind}-{rank}.json").read_text("utf-8")) for kind in ("real", "dry"))
        differences[rank] = difference(real, dry)
    return entry | {"differences": differences}


def small_plans(chosen: Sequence[Case], folder: Path, first_rank_only: bool) -> list[dict[str, Any]]:
    """All small plans, real and dry."""
    entries = []
    with Runner() as runner:
        for number, case in enumerate(chosen):
            ranks = [0] if first_rank_only else range(case.plan.world_size)
            entry = compare(runner, case, folder / str(number), list(ranks))
            print(json.dumps(entry if "error" not in entry else entry["name"]), flush=True)
            if "error" in entry:
                print(entry["error"], flush=True)
            entries.append(entry)
    return entries


def big_plan(runner: Runner, big: BigPlan, folder: Path, every_kind: bool) -> list[dict[str, Any]]:
    """Dry runs of a big plan's ranks beside what the planner predicts."""
    plan, memory = big.write(folder), {m.stage: m for m in big.planned()[1]}
    flags = rank_flags(plan, load_model(folder / "model.yaml"), str(folder / "plan.json"), [])
    kinds = rank_kinds(plan)
    entries = []
    for kind in kinds if every_kind else [kinds[0], kinds[-1]]:
        rank = kind.ranks[0]
        out = folder / f"rank-{rank}.json"
        words = ("--rank", str(rank), "--out", str(out), "--", *flags)
        entry: dict[str, Any] = {"name": big.name, "world_size": plan.world_size, "rank": rank}
        try:
            runner.run(Job(f"{big.name}, rank {rank}", 1, words, folder / f"log-{rank}", _ENTRY, timeout_s=_CASE_S))
        except JobError as error:
            entries.append(entry | {"error": str(error)})
            continue
        found = json.loads(out.read_text("utf-8"))
        said = memory[found["stage"]]
        predicted, peak = said.total_bytes - said.reserved_bytes, found["memory"]["total_bytes"]
        entry |= {"stage": found["stage"], "dry_run_bytes": peak, "planner_bytes": predicted}
        entry |= {"error_of_planner": predicted / peak - 1, "seconds": found["seconds"]}
        entries.append(entry | {"by_category": found["memory"]["by_category"], "peak_at": found["memory"]["label"]})
    return entries


def big_parts(chosen: Sequence[BigPlan], folder: Path, every_kind: bool) -> list[dict[str, Any]]:
    """All big plans."""
    entries = []
    with Runner() as runner:
        for number, big in enumerate(chosen):
            for entry in big_plan(runner, big, folder / f"big-{number}", every_kind):
                print(json.dumps(entry), flush=True)
                entries.append(entry)
    return entries


def largest(entries: Sequence[dict[str, Any]], flops: bool) -> float:
    """The largest difference of bytes (and calls), or of FLOPs."""
    values = [
        abs(value)
        for entry in entries
        for found in entry.get("differences", {}).values()
        for name, value in found.items()
        if name.startswith("flops") == flops
    ]
    return max(values, default=0)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dry_run", description=__doc__)
    parser.add_argument("--json", required=True, type=Path, help="where to write the figures")
    parser.add_argument("--only", metavar="NAME", default="*", help="plans by name; * stands for anything")
    parser.add_argument("--first-rank", action="store_true", help="dry runs of rank 0 only")
    parser.add_argument("--part", choices=("small", "big", "all"), default="all", help="which plans (default: all)")
    parser.add_argument("--kinds", action="store_true", help="every kind of rank of big plans")
    parser.add_argument("--keep", type=Path, help="keep logs and figures in this folder")
    options = parser.parse_args()
    start_s, folder = time.monotonic(), options.keep or Path(tempfile.mkdtemp(prefix="dry-run-"))
    chosen = [case for case in dry_run_cases() if fnmatch.fnmatchcase(case.name, options.only)]
    big = [plan for plan in big_plans() if fnmatch.fnmatchcase(plan.name, options.only)]
    chosen, big = chosen if options.part != "big" else [], big if options.part != "small" else []
    if not chosen and not big:
        parser.error(f"--only {options.only}: no such plan")
    try:
        entries = small_plans(chosen, folder, options.first_rank) if chosen else []
        ranks = big_parts(big, folder, options.kinds) if big else []
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    failed = [entry["name"] for entry in entries + ranks if "error" in entry]
    ran = [entry for entry in ranks if "error" not in entry]
    report: dict[str, Any] = {
        "bytes_difference": largest(entries, flops=False),
        "flops_difference": largest(entries, flops=True),
        "planner_memory_error": max((abs(entry["error_of_planner"]) for entry in ran), default=None),
        "seconds_per_rank_kind": max((entry["seconds"] for entry in ran), default=None),
        "plans": len(entries),
        "big_plans": len(big),
        "failed": failed,
        "elapsed_s": time.monotonic() - start_s,
        "machine": machine(),
        "cases": entries,
        "big": ranks,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in report.items() if key not in ("cases", "big")}, indent=1))
    differs = report["bytes_difference"] > BYTES_BAR or report["flops_difference"] > 0
    off = (report["planner_memory_error"] or 0) > MEMORY_BAR or (report["seconds_per_rank_kind"] or 0) > SECONDS_BAR
    return int(bool(failed) or differs or off)


if __name__ == "__main__":
    raise SystemExit(main())
