"""The command ``dry-run``: the real training of a plan's ranks on fake tensors, one process per kind of rank.

The ranks run in a subprocess, ``python -m megatron_het.dry_run``, which needs torch and Megatron; this module does not.
"""

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_het.plan import Plan, PlanError, save_plan
from megatron_het.schedule.ir import COMPUTE, Program

from ..costs.build import build_plan, check_same_model, read_plan
from ..costs.candidate import GroupMemory
from ..costs.estimate import Estimator
from ..errors import PlannerError
from ..inputs.files import check_target, write_json
from ..inputs.model import Model, model_of
from ..report.tables import GIB, say, table
from ..search.outcome import Found, SearchResult, check_planned_precision

START_S = 300.0  # bound on importing Megatron, which takes seconds on an idle machine
MOST_PROCESSES = 8  # that import Megatron, half a gigabyte each
RANK_FILE = "rank-{rank}.json"
_LAST_LINES = 12
RankKind = tuple[int, ...]  # ranks that hold, compute and send alike, ascending; the first one is run


def rank_kinds(plan: Plan) -> list[RankKind]:
    """Ranks by stage, TP and context-parallel size, share of the stage's state and order of their passes.

    The TP ranks of a replica are one kind, although only the first one reads data, and so are the context-parallel
    ones with parts of one size: they differ by bytes, not by megabytes.
    """
    from megatron_het.lowering.programs import build

    program = build(plan)[False]
    found: dict[Any, list[int]] = {}
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            alike = sum(r.cut == replica.cut for r in stage.replicas)
            # The order of messages and gathers beside the passes may differ, which changes megabytes only.
            shape = tuple((op.kind, op.slice, op.chunk) for op in program.for_device(s, q) if op.kind in COMPUTE)
            for part, share in enumerate(replica.shares):
                tokens = share / sum(replica.shares)
                device = replica.devices[part] if replica.cp_devices else ""
                key = s, replica.cut, replica.cp, tokens, device, alike, replica.state_share, shape
                found.setdefault(key, []).extend(replica.tp_group(part))
    return [tuple(sorted(ranks)) for ranks in found.values()]


def shortened(plan: Plan) -> Plan:
    """The plan with its first microbatches only, as few as leave every rank with as much in flight as all of them.

    A dry run takes its time for each microbatch, and the first ones show its peak.  The whole plan where microbatches
    differ in size, because the largest may be any of them.
    """
    from megatron_het.features.registry import check_plan_alone
    from megatron_het.lowering.programs import build
    from megatron_het.plan.validate import check_plan

    count = len(plan.stages)
    if plan.training.micro_batch_sizes or 2 * count >= plan.num_microbatches:
        return plan
    wanted = _in_flight(build(plan)[False])
    while (count := 2 * count) < plan.num_microbatches:
        short = plan.first_microbatches(count)
        pairs = [(r, other) for s, t in zip(plan.stages, short.stages) for r, other in zip(s.replicas, t.replicas)]
        if any(len(other.microbatches) < min(2, len(r.microbatches)) for r, other in pairs):
            continue  # from the second iteration on gradients are allocated
        try:
            check_plan(short)
            check_plan_alone(short)
            if _in_flight(build(short)[False]) == wanted:
                return short
        except PlanError:  # too few microbatches for some replica or for the schedule
            continue
    return plan


def _in_flight(program: Program) -> dict[Any, int]:
    """Returns, by device, chunk and pair of pass kinds, the largest lead of one kind over the other."""
    most: dict[Any, int] = {}
    for device, ops in enumerate(program.ops):
        passes = [(op.chunk, op.kind) for op in ops if op.kind in COMPUTE]
        totals, done = Counter(passes), Counter[Any]()
        # Only kinds of equal number: the lead of others, such as a final update, grows with the program's length.
        pairs = {a: [b for b in totals if b[0] == a[0] and totals[b] == totals[a]] for a in totals}
        for one in passes:
            done[one] += 1
            for other in pairs[one]:
                key = device, one, other
                most[key] = max(most.get(key, 0), done[one] - done[other])
    return most


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    from megatron_het.safe_io import add_options, amount, count

    parser.usage = "%(prog)s PLAN --model FILE [options] [-- MEGATRON FLAGS]"
    add_options(parser, {"plan": (None, "PLAN", "plan.json; Megatron's flags come last, after --")})
    add_options(parser.add_mutually_exclusive_group(), {
        "--rank": (None, "R", "run this rank; may be repeated", {"type": count(0, 1 << 20), "action": "append"}),
        "--kinds": (False, "", "one rank of each kind (default)"),
        "--all": (False, "", "run every rank"),
    })
    add_options(parser, {
        "--limit-s": (120.0, "S", "seconds that a rank may take (default 120)", {"type": amount(1.0, 1e6)}),
        "--out": (None, "FILE", "write all figures to this file (JSON)"),
        "--kernels": (
            "gpu", "", "gpu (default): layers as fused kernels run them; local: on GPUs without Transformer Engine, "
            "where attention keeps its matrices; cpu: exactly what a run on CPUs over gloo does",
            {"choices": ("gpu", "local", "cpu")}),
        "--cuda": (False, "", "also watch the order of CUDA streams, and show where the host waits for the device"),
    })
# fmt: on


def dry_run(options: argparse.Namespace) -> int:
    """Run ``dry-run``; returns 1 if a rank has no figures."""
    if options.out:
        check_target(options.out, "--out")
    if options.cuda and options.kernels == "cpu":
        problem = "a run on CPUs has no CUDA device"
        raise PlannerError("command line", "--cuda", "--kernels cpu", problem, "Use one of them")
    model = model_of(options)
    plan = read_plan(options.plan)
    check_same_model(plan, model, str(options.plan), str(options.model))
    flags = rank_flags(plan, model, options.plan, options.flags)
    check_planned_precision(plan, model, str(options.plan))
    kinds = _chosen(plan, options)
    found = run_ranks([k[0] for k in kinds], flags, options.limit_s, options.kernels, cuda=options.cuda)
    rows = [_row(plan, kind, found.get(kind[0])) for kind in kinds]
    body = {"plan": options.plan, "world_size": plan.world_size, "kernels": options.kernels, "ranks": rows}
    body["model_notes"] = model.notes
    if options.out:
        write_json(options.out, body)
    say(body, options, *tables(rows), *model.notes)
    return int(any("error" in row for row in rows))


def _chosen(plan: Plan, options: argparse.Namespace) -> list[RankKind]:
    """Returns the kinds of ranks to run; the first rank of each is run."""
    if options.rank:
        for rank in options.rank:
            if rank >= plan.world_size:
                raise PlannerError("command line", "--rank", rank, f"the plan has ranks 0 to {plan.world_size - 1}")
        return [(rank,) for rank in dict.fromkeys(options.rank)]
    if options.all:
        return [(rank,) for rank in range(plan.world_size)]
    return rank_kinds(plan)


def rank_flags(plan: Plan, model: Any, plan_file: str, more: Sequence[str]) -> list[str]:
    """Returns Megatron's flags of a rank: of the model, of the plan, and the user's own, which override the others.

    Raises:
        PlannerError: A model that a dry run cannot train.
    """
    # Imported here, because emit imports Slurm, pods and the doctor, and most plans are made without dry runs.
    from ..emit.flags import model_arguments, plan_arguments

    model.check_dry_run("Use the planner's estimates")
    if plan.training.recompute == "moe_act":
        problem = "without a GPU nothing stands in for experts of Transformer Engine"
        raise PlannerError("plan", "training.recompute", "moe_act", problem, "Use the planner's estimates")
    words = model_arguments(plan, model) + plan_arguments(plan)
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size)]
    return [*words, "--het-plan", os.path.abspath(plan_file), *more]


def run_ranks(
    ranks: Sequence[int],
    flags: Sequence[str],
    limit_s: float,
    kernels: str,
    bound_s: float | None = None,
    cuda: bool = False,
    folder: Path | None = None,
) -> dict[int, dict[str, Any]]:
    """Run ranks dry on all cores; returns a mapping of rank to figures, or to ``{"error": text}``.

    Args:
        limit_s: Seconds for each rank.
        kernels: ``gpu``, ``local`` or ``cpu``.
        bound_s: Seconds for all ranks, including the start.
        cuda: Fake tensors are on a CUDA device, and waits of the host for it are counted.
        folder: Gets a file per finished rank (``RANK_FILE``); by default a temporary one.
    """
    if folder is None:
        with TemporaryDirectory(prefix="het-dry-run-") as own:
            return run_ranks(ranks, flags, limit_s, kernels, bound_s=bound_s, cuda=cuda, folder=Path(own))
    count = max(1, min(len(ranks), len(os.sched_getaffinity(0)), MOST_PROCESSES))
    parts = [list(ranks[i::count]) for i in range(count)]
    words = ["--kernels", kernels, "--limit-s", f"{limit_s:g}", *["--cuda"] * cuda, "--out", str(folder / RANK_FILE)]
    run = functools.partial(_run_in_turn, words=[*words, "--", *flags], limit_s=limit_s, bound_s=bound_s, folder=folder)
    with ThreadPoolExecutor(count) as pool:
        found = {rank: figures for part in pool.map(run, parts) for rank, figures in part.items()}
    return {rank: found[rank] for rank in ranks}


def _run_in_turn(
    ranks: Sequence[int], words: Sequence[str], limit_s: float, bound_s: float | None, folder: Path
) -> dict[int, dict[str, Any]]:
    """Dry runs of some ranks, each forked from one process that has imported Megatron; see :func:`run_ranks`."""
    chosen = [word for rank in ranks for word in ("--rank", str(rank))]
    command = [sys.executable, "-m", "megatron_het.dry_run", *chosen, *words]
    longest_s = START_S + (limit_s + 1) * len(ranks)
    bound_s = longest_s if bound_s is None else min(bound_s, longest_s)
    ended = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=bound_s, check=False)
        except subprocess.TimeoutExpired:
            ended = f"not done after {bound_s:.0f} s"
        log.seek(0)
        lines = log.read().splitlines()
    found = {}
    for rank in ranks:
        path = folder / RANK_FILE.format(rank=rank)
        done = path.exists()
        found[rank] = json.loads(path.read_text(encoding="utf-8")) if done else {"error": _reason(lines, ended)}
    return found


def _reason(lines: Sequence[str], ended: str) -> str:
    """Returns the log's line with the error, else a note that the process was killed, else the log's end."""
    for line in reversed(lines):
        if line.startswith(("megatron_het", "error:")) or "Error: " in line:
            return line.strip()
    return ended or "\n".join(lines[-_LAST_LINES:]) or "it ended without a word"


def _row(plan: Plan, kind: RankKind, found: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a rank's figures and the plan's prediction as a row of values."""
    rank = kind[0]
    row: dict[str, Any] = {"rank": rank, "stands_for": len(kind), "ranks": list(kind)} | (found or {})
    row["device"] = next(r.device_of(rank) for s in plan.stages for r in s.replicas if rank in r.ranks)
    if plan.predicted is not None:
        mine = next((r for r in plan.predicted.per_rank if r.rank == rank), None)
        row["predicted_bytes"] = mine.total_bytes if mine is not None else None
    return row


def tables(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns what people read."""
    columns = ("rank", "param.", "grad.", "optim.", "activ.", "cache", "temp.", "total", "plan without temp.")
    memory = table("Memory at the peak (GiB)", *columns)
    work = table(
        "Work of one iteration", *("rank", "ranks", "stage", "TFLOP", "sent GiB", "collective GiB", "peak at", "s")
    )
    errors = []
    for row in rows:
        if "error" in row:
            errors.append(f"rank {row['rank']}: {row['error']}")
            continue
        at = row["memory"]["by_category"]
        parts = [at[name] for name in ("parameters", "gradients", "optimizer", "activations", "cache")]
        parts += [at["temporaries"] + at["other"], row["memory"]["total_bytes"]]
        predicted = row.get("predicted_bytes")
        memory.add_row(
            str(row["rank"]),
            *(f"{part / GIB:.2f}" for part in parts),
            "" if predicted is None else f"{predicted / GIB:.2f}",
        )
        work.add_row(
            *(str(row[name]) for name in ("rank", "stands_for", "stage")),
            f"{sum(row['flops'].values()) / 1e12:.1f}",
            *(f"{_moved(row, what) / GIB:.2f}" for what in ("sent", None)),
            row["memory"]["label"],
            f"{row['seconds']:.0f}",
        )
    return [memory, work, *_host_waits(rows), *errors]


def _host_waits(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns the table of host waits per iteration, most frequent first; empty if they were not counted."""
    counted = [row for row in rows if "host_waits" in row and "stream_waits" in row]
    if not counted:
        return []
    waits = table("Waits of the host for the device in one iteration", "rank", "during", "times", "what", "where")
    for row in counted:
        for wait in sorted(row["host_waits"], key=lambda w: (not w["during"], -w["calls"])):
            during = wait["during"] or "between operations"
            waits.add_row(str(row["rank"]), during, str(wait["calls"]), wait["what"], wait["where"])
    inside = sum(wait["calls"] for row in counted for wait in row["host_waits"] if wait["during"])
    return [waits, f"waits inside operations: {inside}" + (", each of which is a gap on the device" if inside else "")]


def _moved(row: dict[str, Any], what: str | None) -> int:
    """Returns the bytes of one kind of traffic; with None those of all collectives."""
    entries = row["traffic"]
    chosen = [e for e in entries if (e["what"] == what if what else e["what"] not in ("sent", "received"))]
    return sum(e["payload_bytes"] for e in chosen)


# Verification by ``plan`` (unless ``--no-verify``): finalists train dry, one rank of each kind, before one is written.
#
# A finalist whose ranks need more than their GPUs have is rejected, and the next one is tried.  If none is left, the
# plan is searched again with a smaller share of the GPUs' memory, by as much as the closest finalist was off.


FINALISTS = 3  # run per search; later finalists differ from these only slightly
SEARCHES = 3  # with the first one
RANK_S = 120.0  # bound on one rank
ASKED_S, UNASKED_S = 900.0, 120.0  # bounds on all dry runs, with ``--verify`` and by default
MOST_GPUS = 512
"""Largest cluster whose plans are verified by default: programs of larger plans take minutes."""
LEAST_STEP = 0.01  # the share of memory becomes smaller by this at least
Search = Callable[[Estimator], SearchResult]  # searches with the memory margin of an estimator


@dataclass(frozen=True, slots=True)
class RankCheck:
    """A rank's dry run beside its GPU."""

    rank: int  # the one that ran
    stands_for: int  # number of ranks of its kind
    stage: int
    gpu: str  # its kind of GPU
    needed_bytes: float  # the peak of the dry run, and what allocator and libraries take; 0 where the dry run failed
    predicted_bytes: float  # the same by the planner's formulas
    capacity_bytes: float
    error: str = ""  # why there are no figures


@dataclass(slots=True)
class Verified:
    """Results of the dry runs of a plan."""

    found: Found  # the finalist that was taken
    plan: Plan
    ranks: list[RankCheck]  # one of each kind
    left: list[str] = field(default_factory=list)  # reasons why earlier finalists were rejected, in order
    searches: int = 1  # how often a plan was searched
    memory_margin: float = 0.95  # share of a GPU's memory in the last search
    seconds: float = 0.0  # that dry runs took
    limit_s: float = 0.0  # that they might take

    @property
    def is_complete(self) -> bool:
        """Whether every kind of rank has figures."""
        return not any(check.error for check in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Returns all fields except the plan."""
        names = ("left", "searches", "memory_margin", "seconds", "limit_s")
        body = {name: getattr(self, name) for name in names} | {"complete": self.is_complete}
        return body | {"ranks": [asdict(check) for check in self.ranks]}


def verifier_of(options: argparse.Namespace, estimator: Estimator) -> "Verifier | None":
    """Returns the verifier of finalists; None with ``--no-verify``, or if no dry run is possible without ``--verify``.

    Raises:
        PlannerError: ``--verify``, and a model that a dry run cannot train.
    """
    asked = options.verify
    if asked is False and options.verify_limit_s is not None:
        problem = "does nothing with --no-verify"
        raise PlannerError("command line", "--verify-limit-s", options.verify_limit_s, problem, "Leave one of them out")
    if asked is False or (asked is None and (_is_off() or why_not_verified(estimator))):
        return None
    limit_s = options.verify_limit_s
    return Verifier(estimator.model, limit_s if limit_s is not None else ASKED_S if asked else UNASKED_S)


def why_not_verified(estimator: Estimator) -> str:
    """Returns why plans are not verified by default; empty if they are."""
    cluster, model = estimator.cluster, estimator.model
    if not all(importlib.util.find_spec(name) for name in ("torch", "megatron")):
        return "torch and Megatron are not installed here"
    if any(cluster.gpu(node.gpu).is_processor for node in cluster.nodes):
        return "they are of GPUs"
    if cluster.total_gpus > MOST_GPUS:
        return f"with more than {MOST_GPUS} GPUs they take long"
    if "moe_act" in model.recompute:
        return "they know no recomputed activation functions of experts"
    return "they know no fp8" if model.fp8 else "they cannot train this model" if model.not_run else ""


def unverified_lines(options: argparse.Namespace, estimator: Estimator, by_hand: bool) -> list[str]:
    """Returns the note on missing dry runs if ``--no-verify`` was not given; ``by_hand``: Ctrl-C ended the search."""
    why = "the search was interrupted" if by_hand else why_not_verified(estimator)
    reason = "" if options.verify is False or _is_off() else why
    return [f"memory is by formula, not checked by dry runs of ranks: {reason}"] if reason else []


def _is_off() -> bool:
    return os.environ.get("HET_PLAN_VERIFY", "1") == "0"


class Verifier:
    """Dry runs of finalists, within a bound of time.

    Raises:
        PlannerError: A model that a dry run cannot train.
    """

    def __init__(self, model: Model, limit_s: float) -> None:
        model.check_dry_run("Give --no-verify")
        self._model, self._limit_s = model, limit_s
        self._start_s = time.monotonic()
        self._spent_s = 0.0
        self._left: list[str] = []
        self._now: tuple[Path, int] | None = None

    @property
    def progress(self) -> str:
        """Number of finished ranks of the current plan, as text."""
        if self._now is None:
            return "a plan for dry runs"
        folder, count = self._now
        done = len(list(folder.glob(RANK_FILE.format(rank="*"))))
        return f"dry runs of ranks: {done} of {count} kinds done, {self._limit_s - self._spent_s:.0f} s at most"

    def verified(self, estimator: Estimator, outcome: SearchResult, search: Search) -> Verified:
        """The first finalist of which no dry run needs more than a GPU has.

        Raises:
            PlannerError: Every finalist needs more than its GPUs have.
        """
        for searches in range(1, SEARCHES + 1):
            closest = 0.0
            for found in [f for f in outcome.found if f.runnable][:FINALISTS]:
                running = estimator.running(found.candidate.gpus())
                plan = build_plan(running, found.candidate, found.estimate)
                gpus = [node.gpu for node in estimator.cluster.nodes]
                kernels = "gpu" if running.runtime.fused else "local"
                checks = self._checked(plan, found.estimate.memory, gpus, kernels)
                worst = max(checks, key=lambda c: c.needed_bytes / c.capacity_bytes)
                if worst.needed_bytes <= worst.capacity_bytes:
                    return Verified(
                        found=found,
                        plan=plan,
                        ranks=checks,
                        left=self._left,
                        searches=searches,
                        memory_margin=estimator.memory_margin,
                        seconds=round(self._spent_s, 1),
                        limit_s=self._limit_s,
                    )
                self._left.append(_why(found, worst))
                closest = max(closest, worst.predicted_bytes / worst.needed_bytes)
            if not closest or searches == SEARCHES:
                break
            # The formulas' error will be about the same for the next plan: leave that much memory free.
            margin = min(closest, estimator.memory_margin - LEAST_STEP)
            estimator = estimator.on(estimator.cluster)
            estimator.memory_margin = margin
            outcome = search(estimator)
        problem = f"no finalist fits its GPUs: {self._left[-1] if self._left else 'no further plan was found'}"
        hint = "Plan with a smaller --memory-margin; --no-verify writes the plan all the same"
        raise PlannerError("command line", "--verify", None, problem, hint)

    def _checked(self, plan: Plan, memory: Sequence[GroupMemory], gpus: Sequence[str], kernels: str) -> list[RankCheck]:
        """Returns one rank of each kind with its GPU, run in the remaining time; ``gpus`` are the pools' kinds."""
        # The fullest first, because the others matter least if time runs out.
        kinds = sorted(rank_kinds(plan), key=lambda kind: -_share(_formula(plan, kind, memory, gpus)[1]))
        left_s = self._limit_s - self._spent_s
        start_s, short = time.monotonic(), shortened(plan) if left_s > 0 else plan
        with TemporaryDirectory(prefix="het-verify-") as made:
            folder = Path(made)
            self._now = folder, len(kinds)
            save_plan(short, folder / "plan.json")
            flags = rank_flags(short, self._model, str(folder / "plan.json"), [])
            ranks = [kind[0] for kind in kinds]
            results = run_ranks(ranks, flags, RANK_S, kernels, bound_s=left_s, folder=folder) if left_s > 0 else {}
            self._now = None
        self._spent_s += time.monotonic() - start_s
        kinds.sort()
        late = {"error": f"not run: --verify-limit-s {self._limit_s:g} was spent"}
        return [_check(plan, kind, results.get(kind[0], late), memory, gpus) for kind in kinds]


def _formula(plan: Plan, kind: RankKind, memory: Sequence[GroupMemory], gpus: Sequence[str]) -> tuple[str, GroupMemory]:
    """Returns the GPU of a kind of rank, and its memory by the planner's formulas."""
    rank = kind[0]
    s, replica = next((s, r) for s, stage in enumerate(plan.stages) for r in stage.replicas if rank in r.ranks)
    mine = [m for m in memory if m.stage == s and m.group.tp == replica.tp] or [m for m in memory if m.stage == s]
    mine = [m for m in mine if gpus[m.group.pool] == replica.device_of(rank)] or mine
    own = next((r for r in plan.predicted.per_rank if r.rank == rank), None) if plan.predicted else None
    if own is not None and replica.cp_shares:  # every size of part has an entry
        mine = [m for m in mine if int(m.activation_bytes) == own.activation_bytes] or mine
    return replica.device_of(rank), max(mine, key=_share)


def _share(memory: GroupMemory) -> float:
    return memory.total_bytes / memory.capacity_bytes


def _check(
    plan: Plan, kind: RankKind, result: dict[str, Any], memory: Sequence[GroupMemory], gpus: Sequence[str]
) -> RankCheck:
    gpu, said = _formula(plan, kind, memory, gpus)
    peak = result["memory"]["total_bytes"] + said.reserved_bytes if "error" not in result else 0.0
    return RankCheck(
        rank=kind[0],
        stands_for=len(kind),
        stage=said.stage,
        gpu=gpu,
        needed_bytes=peak,
        predicted_bytes=said.total_bytes,
        capacity_bytes=said.capacity_bytes,
        error=str(result.get("error", "")),
    )


def _why(found: Found, worst: RankCheck) -> str:
    return (
        f"{found.candidate.schedule}, {len(found.candidate.stages)} stages: rank {worst.rank} of stage {worst.stage} "
        f"needs {worst.needed_bytes / GIB:.2f} GiB of {worst.capacity_bytes / GIB:.2f} GiB on {worst.gpu}, "
        f"{worst.predicted_bytes / GIB:.2f} GiB were predicted"
    )


def lines(verified: Verified) -> list[Any]:
    """Returns what people read."""
    shown = table("Dry runs: memory of a rank, GiB", "rank", "ranks", "stage", "GPU", "needs", "predicted", "has")
    for check in verified.ranks:
        needs = f"{check.needed_bytes / GIB:.2f}" if not check.error else "unknown"
        figures = (f"{check.predicted_bytes / GIB:.2f}", f"{check.capacity_bytes / GIB:.2f}")
        shown.add_row(str(check.rank), str(check.stands_for), str(check.stage), check.gpu, needs, *figures)
    out: list[Any] = [shown]
    out += [f"left: {why}" for why in verified.left]
    if verified.searches > 1:
        out.append(f"searched {verified.searches} times; the last with --memory-margin {verified.memory_margin:.3f}")
    for error in dict.fromkeys(check.error for check in verified.ranks if check.error):
        ranks = [str(check.rank) for check in verified.ranks if check.error == error]
        out.append(f"not verified: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {error}")
    late = "; --verify-limit-s gives them more" * any("not done after" in check.error for check in verified.ranks)
    out.append(f"dry runs took {verified.seconds:.0f} s of {verified.limit_s:g} s{late}")
    return out
