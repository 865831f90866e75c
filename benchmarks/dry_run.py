"""Do dry runs hold, compute and send what real runs do, and what planner predicts?

``python -m benchmarks.dry_run --json OUT``.  Small plans of every schedule and feature run for real over gloo, counted
by the tracker of dry runs, and every rank of them as a dry run.  ``bytes_difference`` is the largest difference of any
figure: bytes of every category at the peak, bytes to every peer and of every collective; ``flops_difference`` likewise.

Big plans of dense models (:mod:`benchmarks.dry_run_big`) run dry with fused kernels: one rank of the first, the middle
and the last kind (``--kinds``: of every kind).  ``planner_memory_error`` is the largest relative difference between
what the planner says of a rank, without what it reserves for allocator and libraries, and the peak of the rank's dry
run.  ``seconds_per_rank_kind`` is the processor time of the longest dry run, without the import of Megatron;
``wall_seconds_per_rank_kind`` is its time by the clock, which is longer where other work has the processor.

Ranks of an existing ``OUT`` that are not run again stay as they are, so that parts add up.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.dry_run_big import BigPlan, big_plans
from benchmarks.dry_run_cases import dry_run_cases, flags_of
from benchmarks.machine import command_line, save, write_report
from benchmarks.runner import Job, JobError, Runner
from megatron_het.plan import save_plan
from tools.planner.cli.dry_run import rank_flags, rank_kinds
from tools.planner.inputs.model import load_model

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


def small_plans(chosen: Sequence[Case], folder: Path, which: str) -> Iterator[dict[str, Any]]:
    """All small plans, real and dry, one after the other."""
    with Runner() as runner:
        for number, case in enumerate(chosen):
            last = case.plan.world_size - 1
            ranks = {"first": [0], "last": [last]}.get(which, list(range(last + 1)))
            yield compare(runner, case, folder / str(number), ranks)


def big_plan(runner: Runner, big: BigPlan, folder: Path, which: str) -> Iterator[dict[str, Any]]:
    """Dry runs of a big plan's ranks beside what the planner predicts."""
    plan, memory = big.write(folder), {m.stage: m for m in big.planned()[1]}
    flags = rank_flags(plan, load_model(folder / "model.yaml"), str(folder / "plan.json"), [])
    kinds = rank_kinds(plan)
    chosen = {"first": kinds[:1], "last": kinds[-1:], "some": [kinds[0], kinds[len(kinds) // 2], kinds[-1]]}
    for kind in dict.fromkeys(chosen.get(which, kinds)):
        rank = kind.ranks[0]
        out = folder / f"rank-{rank}.json"
        words = ("--rank", str(rank), "--out", str(out), "--", *flags)
        entry: dict[str, Any] = {"name": big.name, "world_size": plan.world_size, "rank": rank}
        try:
            runner.run(Job(f"{big.name}, rank {rank}", 1, words, folder / f"log-{rank}", _ENTRY, timeout_s=_CASE_S))
        except JobError as error:
            yield entry | {"error": str(error)}
            continue
        found = json.loads(out.read_text("utf-8"))
        said = memory[found["stage"]]
        predicted, peak = said.total_bytes - said.reserved_bytes, found["memory"]["total_bytes"]
        entry |= {"stage": found["stage"], "dry_run_bytes": peak, "planner_bytes": predicted}
        entry |= {"error_of_planner": predicted / peak - 1}
        entry |= {"seconds": found["seconds"], "cpu_seconds": found["cpu_seconds"]}
        yield entry | {"by_category": found["memory"]["by_category"], "peak_at": found["memory"]["label"]}


def big_parts(chosen: Sequence[BigPlan], folder: Path, which: str) -> Iterator[dict[str, Any]]:
    """The ranks of all big plans, one after the other."""
    with Runner() as runner:
        for number, big in enumerate(chosen):
            yield from big_plan(runner, big, folder / f"big-{number}", which)


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


def report_of(small: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all plans together."""
    ran = [entry for entry in ranks if "error" not in entry]
    return {
        "bytes_difference": largest(small, flops=False),
        "flops_difference": largest(small, flops=True),
        "planner_memory_error": max((abs(entry["error_of_planner"]) for entry in ran), default=None),
        "seconds_per_rank_kind": max((entry["cpu_seconds"] for entry in ran), default=None),
        "wall_seconds_per_rank_kind": max((entry["seconds"] for entry in ran), default=None),
        "plans": len(small),
        "big_plans": len({entry["name"] for entry in ran}),
        "failed": [entry["name"] for entry in [*small, *ranks] if "error" in entry],
        "cases": list(small),
        "big": list(ranks),
    }


def kept(path: Path, part: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The entries of an existing file, by plan and rank."""
    entries = json.loads(path.read_text("utf-8"))[part] if path.exists() else []
    return {_key(entry): entry for entry in entries}


def _key(entry: dict[str, Any]) -> tuple[str, int]:
    return entry["name"], entry.get("rank", -1)


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.dry_run", __doc__)
    parser.add_argument("--only", metavar="NAME", default="*", help="plans by name; * stands for anything")
    parser.add_argument("--part", choices=("small", "big", "all"), default="all", help="which plans (default: all)")
    ranks = parser.add_mutually_exclusive_group()
    for which, text in (("first", "the first rank"), ("last", "the last rank"), ("kinds", "every kind of rank")):
        ranks.add_argument(f"--{which}", dest="which", action="store_const", const=which, help=f"{text} of every plan")
    parser.set_defaults(which="some")
    parser.add_argument("--keep", type=Path, help="keep logs and figures in this folder")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="dry-run-"))
    chosen = [case for case in dry_run_cases() if fnmatch.fnmatchcase(case.name, options.only)]
    big = [plan for plan in big_plans() if fnmatch.fnmatchcase(plan.name, options.only)]
    chosen, big = chosen if options.part != "big" else [], big if options.part != "small" else []
    if not chosen and not big:
        parser.error(f"--only {options.only}: no such plan")
    entries = {part: kept(options.json, part) for part in ("cases", "big")}
    steps = [("cases", small_plans(chosen, folder, options.which))] if chosen else []
    steps += [("big", big_parts(big, folder, options.which))] if big else []
    try:
        for part, made in steps:
            for entry in made:
                print(json.dumps(entry), flush=True)
                entries[part][_key(entry)] = entry
                report = report_of(*(list(found.values()) for found in entries.values()))
                save(options.json, report)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    write_report(options.json, report, unprinted=("cases", "big"))
    differs = report["bytes_difference"] > BYTES_BAR or report["flops_difference"] > 0
    off = (report["planner_memory_error"] or 0) > MEMORY_BAR or (report["seconds_per_rank_kind"] or 0) > SECONDS_BAR
    return int(bool(report["failed"]) or differs or off)


if __name__ == "__main__":
    raise SystemExit(main())
