"""CUDA code on a machine without CUDA: iterations of every schedule and feature on fake tensors of a CUDA device.

``python -m benchmarks.cuda_iterations --json OUT``.  Every rank of small plans trains two iterations in a dry run with
``--cuda`` (:mod:`megatron_het.dry_run`), in processes forked from one that has imported Megatron.  Keys: ``runs``;
``failed``, with mixed devices and accesses that no wait between streams orders; ``waits_in_operations``,
how often the host waits for the device inside operations of the program, except for the waits of two other keys:
``waits_for_experts``, in Megatron's dispatcher, which reads how many tokens every expert gets;
``staged_waits``, at most ``staged_transfers``, because gloo sends what is in host memory already;
``waits_by_iteration``, the most outside of operations; ``missing_waits_noticed`` of ``missing_waits``: lines that order
streams, left out one at a time.  ``--part`` and ``--only`` run some of it; ``--add`` goes on with the results of
such runs.  With ``--keep-waits`` no line is left out.
"""

import argparse
import fnmatch
import functools
import json
import os
import random
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.dry_run import dry_run_cases
from benchmarks.machine import add_part_argument, command_line, save, scratch, write_report
from benchmarks.models import case_for
from benchmarks.parity import all_cases
from megatron_het.plan import save_plan
from testing.cases import Case, build_plan, common_flags, machine_flags, with_schedule
from testing.combination_cases import case_of, pair_row
from testing.forked import Forked
from testing.slimpipe_cases import PLAIN, sliced_case

LIMIT_S = 600.0
STAGED = ("1f1b, mixed TP in a stage", "slimpipe")  # cases that run once more with ``--het-transport staged``
_MORE = {
    "unequal-microbatches": ("sizes-4-2-mixed-4",),
    "data-parallel": ("00-sizes-1-1-1-1-2-zero-0", "12-sizes-1-1-1-2-1-zero-2", "16-sizes-1-1-1-3-zero-3"),
}
DISPATCHER = "megatron/core/transformer/moe/"
LEFT_OUT = (
    "megatron_het/runtime/channels.py",
    "megatron_het/features/window",
    "megatron_het/features/activation_offload",
)
"""Files with the lines whose waits are left out."""


@dataclass(frozen=True)
class Iteration:
    """Parameters of a rank's dry run."""

    case: Case  # with the plan
    rank: int  # of the plan
    transport: str = "auto"  # ``--het-transport``
    ignored_wait: str = ""  # a line whose waits are left out

    @property
    def name(self) -> str:
        """The run's readable name."""
        staged = f", {self.transport}" if self.transport != "auto" else ""
        without = f", without {self.ignored_wait}" if self.ignored_wait else ""
        return f"{self.case.name}, rank {self.rank}{staged}{without}"

    def flags(self) -> list[str]:
        """Megatron's flags without the plan: those of the case, without what the CPU wants."""
        flags, words = list(common_flags(*self.case.reference)), list(machine_flags())
        at = next(i for i in range(len(flags)) if flags[i : i + len(words)] == words)
        del flags[at : at + len(words)]
        more = list(self.case.plan_flags())
        more[more.index("--het-transport") + 1] = self.transport
        # Megatron's own checks of losses and its reruns read values in every microbatch.
        checks = ("--no-check-for-nan-in-loss-and-grad", "--rerun-mode", "disabled")
        return [*flags, *more, "--distributed-timeout-minutes", "10", *checks]


def _model_cases() -> list[Case]:
    """Cases whose dry runs are not compared with real ones, because routers and masks depend on values."""
    mixed = build_plan([[1], [2, 1]], [2, 3], random.Random(1), sequence_parallel=True, even_routing=False)
    later = replace(mixed, model=replace(mixed.model, mtp_num_layers=2))
    sliced = {"schedule": "slimpipe", "tp": "by stage"}
    found = {
        "multi-token prediction": Case("", later, family="later-tokens"),
        "multi-token prediction, slices": with_schedule(
            Case("", later, family="later-tokens"), "slimpipe", 1, {"slices": 4}
        ),
        "softmax offsets and sliding windows": Case("", mixed, family="gpt-oss"),
        "slimpipe, softmax offsets and sliding windows": replace(
            sliced_case({**PLAIN, "slices": 8}, "", random.Random(5)), family="gpt-oss"
        ),
        "slimpipe exchange, latent attention, experts": case_for(
            "deepseek_v2", pair_row({**sliced, "context_exchange": True}.items()), "", 0
        ),
        "context parallel sizes within a stage": case_of(pair_row([("cp", "different")]), "", 0),
        "slimpipe, context parallel with unequal parts": case_of(
            pair_row({**sliced, "cp": "unequal parts"}.items()), "", 0
        ),
    }
    return [replace(case, name=name) for name, case in found.items()]


def cuda_cases() -> list[Case]:
    """Small plans of every schedule and feature.

    Documents of a sequence are left out: where they begin depends on values, which fake tensors do not have.
    """
    found = [*dry_run_cases(), *_model_cases()]
    for schedule, names in _MORE.items():
        found += [case for case in all_cases(0, schedule, True)[0] if case.name in names]
    return found


def every_rank(cases: Iterable[Case], only: Sequence[int] = ()) -> list[Iteration]:
    """Iterations of all (or the given) ranks of the cases; some cases again with transfers through host memory."""
    found = []
    for case in cases:
        ranks = [rank for rank in range(case.plan.world_size) if rank in only or not only]
        found += [Iteration(case, rank) for rank in ranks]
        if case.name in STAGED:
            found += [Iteration(case, rank, "staged") for rank in ranks[:2]]
    return found


def run_all(chosen: Iterable[Iteration], folder: Path) -> Iterator[dict[str, Any]]:
    """Run dry runs, one after the other; returns the figures of each, or its error."""
    from megatron_het.dry_run.run import import_megatron

    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    import_megatron(gpu=True, cuda=True)
    for number, iteration in enumerate(chosen):
        out = folder / f"{number}.json"
        Forked(functools.partial(_run, iteration, out), out.with_suffix(".log")).finish(LIMIT_S)
        if out.exists():
            yield {"name": iteration.name, **json.loads(out.read_text("utf-8"))}
        else:
            yield {"name": iteration.name, "error": f"no figures after {LIMIT_S:g} s"}


def _run(iteration: Iteration, out: Path) -> None:
    """Run an iteration in its process, and write its figures or its error."""
    plan = iteration.case.plan
    os.environ.update(RANK=str(iteration.rank), LOCAL_RANK="0", WORLD_SIZE=str(plan.world_size))
    try:
        from megatron_het.dry_run.run import Setting, run

        plan_file = out.with_suffix(".plan.json")
        save_plan(plan, plan_file)
        setting = Setting(iteration.rank, cuda=True, ignored_wait=iteration.ignored_wait)
        figures = run(setting, [*iteration.flags(), "--het-plan", str(plan_file)])
    except BaseException as error:
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {error}"}
    out.write_text(json.dumps(figures), encoding="utf-8")


def in_operations(entry: dict[str, Any], of_experts: bool = False) -> int:
    """Counts the host's waits inside operations of the program: in Megatron's token dispatcher, and elsewhere."""
    waits = [wait for wait in entry["host_waits"] if wait["during"]]
    return sum(wait["calls"] for wait in waits if wait["where"].startswith(DISPATCHER) == of_experts)


def transfers(entry: dict[str, Any]) -> int:
    """Counts the tensors that a rank sent in an iteration."""
    return sum(found["calls"] for found in entry["traffic"] if found["what"] == "sent")


def left_out(done: Iterable[tuple[Iteration, dict[str, Any]]]) -> list[Iteration]:
    """For each line that orders streams: the first run that reached it, with this line left out."""
    found: dict[str, Iteration] = {}
    for iteration, entry in done:
        for line in entry.get("stream_waits", ()):
            if line.startswith(LEFT_OUT) and iteration.transport == "auto":
                found.setdefault(line, iteration)
    return [Iteration(i.case, i.rank, i.transport, line) for line, i in sorted(found.items())]


def is_noticed(entry: dict[str, Any]) -> bool:
    """Whether a run reported accesses out of order."""
    return "is not ordered after" in entry.get("error", "")


def summary(done: list[dict[str, Any]], missing: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the keys of the report."""
    ran = [entry for entry in done if "error" not in entry]
    staged = [entry for entry in ran if entry["name"].endswith(", staged")]
    direct = [entry for entry in ran if not entry["name"].endswith(", staged")]
    return {
        "runs": len(done),
        "failed": [entry["name"] for entry in done if "error" in entry],
        "waits_in_operations": sum(map(in_operations, direct)),
        "waits_for_experts": sum(in_operations(entry, of_experts=True) for entry in ran),
        "staged_waits": sum(map(in_operations, staged)),
        "staged_transfers": sum(map(transfers, staged)),
        "waits_by_iteration": max(
            (sum(w["calls"] for w in e["host_waits"] if not w["during"]) for e in ran), default=0
        ),
        "missing_waits": len({line_of(entry) for entry in missing}),
        "missing_waits_noticed": len(
            {line_of(entry) for entry in missing} - {line_of(entry) for entry in missing if not is_noticed(entry)}
        ),
        "missing_waits_unnoticed": [entry["name"] for entry in missing if not is_noticed(entry)],
    }


def line_of(entry: dict[str, Any]) -> str:
    """The line whose waits a run left out."""
    return str(entry["name"]).partition(", without ")[2]


def is_bad(report: dict[str, Any]) -> bool:
    """Whether a report contains a failure."""
    bad = report["failed"] or report["waits_in_operations"] or report["missing_waits_unnoticed"]
    return bool(bad) or report["staged_waits"] > report["staged_transfers"]


def added(files: Iterable[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs of earlier reports, and runs without a wait, by name."""
    runs: dict[str, Any] = {}
    missing: dict[str, Any] = {}
    for file in files:
        report = json.loads(file.read_text(encoding="utf-8"))
        runs |= {entry["name"]: entry for entry in report["cases"]}
        missing |= {entry["name"]: entry for entry in report["without_a_wait"]}
    return runs, missing


def _options() -> argparse.Namespace:
    parser = command_line("benchmarks.cuda_iterations", __doc__)
    parser.add_argument("--only", metavar="NAME", nargs="+", default=["*"], help="plans by name; * stands for anything")
    parser.add_argument("--ranks", metavar="RANK", nargs="+", type=int, default=[], help="of every plan (default all)")
    parser.add_argument("--keep", type=Path, help="keep logs in this folder")
    add_part_argument(parser)
    parser.add_argument("--keep-waits", action="store_true", help="leave out no line that orders streams")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="JSON", help="results to go on with")
    options = parser.parse_args()
    index, parts = options.part
    cases = [case for case in cuda_cases() if any(fnmatch.fnmatchcase(case.name, name) for name in options.only)]
    options.chosen = every_rank(cases[index - 1 :: parts], options.ranks)
    if not options.chosen:
        parser.error(
            f"--only {' '.join(options.only)} --ranks {' '.join(map(str, options.ranks))} --part {index}/{parts}: "
            "no such plan or rank"
        )
    return options


def report_of(runs: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    """The whole report, of runs and of runs without a wait by name."""
    report: dict[str, Any] = {"benchmark": "cuda_iterations"}
    report |= summary(list(runs.values()), list(without.values()))
    return report | {"cases": list(runs.values()), "without_a_wait": list(without.values())}


def left_to_do(runs: dict[str, Any], without: dict[str, Any]) -> list[Iteration]:
    """Returns the lines that runs have reached and that were not left out yet."""
    known = {iteration.name: iteration for iteration in every_rank(cuda_cases())}
    reached = left_out((known[name], entry) for name, entry in runs.items() if name in known)
    tried = set(map(line_of, without.values()))
    return [iteration for iteration in reached if iteration.ignored_wait not in tried]


def main() -> int:
    """Command line.  The report is written after every run, so that an interrupted benchmark can be continued."""
    options = _options()
    runs, without = added(options.add)

    def carry_out(chosen: Sequence[Iteration], where: Path, found: dict[str, Any]) -> None:
        for entry in run_all(chosen, where):
            kept = ("name", "error", "host_waits", "traffic", "stream_waits")  # figures can be counted again from these
            found[entry["name"]] = {key: entry[key] for key in kept if key in entry}
            said = entry.get("error", f"{in_operations(entry) if 'host_waits' in entry else ''}")
            print(entry["name"], said, flush=True)
            save(options.json, report_of(runs, without))

    with scratch("cuda-iterations-", options.keep) as folder:
        (folder / "without").mkdir(parents=True, exist_ok=True)
        carry_out([iteration for iteration in options.chosen if iteration.name not in runs], folder, runs)
        if not options.keep_waits:
            carry_out(left_to_do(runs, without), folder / "without", without)
    report = report_of(runs, without)
    write_report(options.json, report, unprinted=("cases", "without_a_wait"))
    return int(is_bad(report))


if __name__ == "__main__":
    raise SystemExit(main())
