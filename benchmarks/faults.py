"""Random faults in real training: ``python -m benchmarks.faults --seed S [S ...] --trials N --json OUT``.

Every trial is a job of ``het-run`` on this machine: a controller, agents, and workers that train over gloo.  Its pool
and plans are random (any schedule, mixed stages and options, a list of smaller plans for fewer nodes), and so are the
operation, the iteration and the process at which the fault happens.  Kinds: see ``KINDS``.  Processes are
forked from one that has imported Megatron; nothing else is replaced.  Small disks need the right to mount.

Keys: ``survived``: trials whose job ended well, after all iterations, or, where no plan was left, with one clear
error; ``hung``: jobs that were not over within ``--limit-s``; ``left_processes`` after jobs that were over;
``samples_skipped_or_repeated``: in the iterations that count, on the first and the last stage;
``max_loss_difference``: largest relative one to stock Megatron in one undisturbed process, over all iterations of all
generations, at most 1e-5; ``ended_without_reason``: jobs that failed with no reason, or with several; ``failed``:
trials that did not survive, with the reason.
"""

import argparse
import gc
import itertools
import json
import math
import os
import random
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fault_points import Fault
from benchmarks.fault_processes import adopt_orphans
from benchmarks.fault_trials import (
    BAR,
    SCHEDULES,
    STEPS,
    Outcome,
    Pool,
    Trial,
    can_mount,
    draw,
    loss_difference,
    problems,
    run,
    wrong_samples,
)
from benchmarks.machine import command_line, machine, save, scratch
from megatron_het.lowering.programs import build
from megatron_het.plan import save_plan
from testing import rank_server
from testing.cases import Weights, common_flags
from testing.forked import Forked
from testing.lab import Lab
from testing.runner import Job, Runner

# The kinds of trials: the fault, its place, and the expected end of the job; all drawn at random.


def _fault(rng: random.Random, pool: Pool, act: str, point: str = "operation", **more: Any) -> Fault:
    node = rng.randrange(len(pool.nodes))
    found = {
        "name": f"{act}-{rng.randrange(10**6)}",
        "act": act,
        "node": pool.names[node],
        "slot": rng.randrange(pool.nodes[node]),
        "point": point,
        "iteration": rng.randrange(2, STEPS - 4),
        "share": rng.random(),
    }
    return found | more


def _one(act: str, *points: str, **more: Any) -> Callable[[random.Random, Pool], Trial]:
    """Returns a function that makes trials with one fault, at one of some points; ``more`` are fields of a trial."""

    def make(rng: random.Random, pool: Pool) -> Trial:
        point = rng.choice(points) if len(points) > 1 else (*points, "operation")[0]
        return Trial("", pool, (_fault(rng, pool, act, point),), **more)

    return make


def _kill(rng: random.Random, pool: Pool) -> Trial:
    return Trial("", pool, (_fault(rng, pool, "kill"),), ("--copy-every", str(rng.choice((1, 1, 2)))))


def _node(rng: random.Random, pool: Pool) -> Trial:
    largest = max(range(len(pool.nodes)), key=lambda n: pool.nodes[n])
    more: dict[str, Any] = {"node": pool.names[largest], "slot": rng.randrange(pool.nodes[largest])}
    return Trial("", pool, (_fault(rng, pool, "node", **more),), node_returns=rng.random() < 0.5)


def _agent(rng: random.Random, pool: Pool) -> Trial:
    return Trial("", pool, (_fault(rng, pool, "agent"),), node_returns=rng.random() < 0.5)


def _save(rng: random.Random, pool: Pool) -> Trial:
    return Trial("", pool, (_fault(rng, pool, "kill", "save", iteration=4 * rng.choice((1, 2))),), (), 4)


def _reconfiguration(rng: random.Random, pool: Pool) -> Trial:
    first = _fault(rng, pool, "kill")
    point = rng.choice(("left", "opening", "agreeing", "moving"))
    others = [name for name in pool.names if name != first["node"]]
    second = _fault(rng, pool, "kill", point, node=rng.choice(others), slot=0)
    return Trial("", pool, (first, second | {"after": 0 if point == "left" else 1}))


def _truncated(rng: random.Random, pool: Pool) -> Trial:
    fault = _fault(rng, pool, "truncate", iteration=rng.randrange(8, STEPS - 3))
    return Trial("", pool, (fault,), ("--copy-every", "0"), 3)


def _vanish(rng: random.Random, pool: Pool) -> Trial:
    point = rng.choice(("operation", "operation", "copy", "moving"))
    fault = _fault(rng, pool, "vanish", point)
    if point != "moving":
        return Trial("", pool, (fault,), node_returns=rng.random() < 0.5)
    first = _fault(rng, pool, "kill", node=rng.choice([name for name in pool.names if name != fault["node"]]), slot=0)
    return Trial("", pool, (first, fault | {"after": 1}), node_returns=rng.random() < 0.5)


def _disk(rng: random.Random, pool: Pool) -> Trial:
    """The disk of the job's folder, not that of the checkpoints."""
    act = rng.choice(("full folder", "read-only folder"))
    faults = (_fault(rng, pool, act, iteration=3), _fault(rng, pool, "kill", iteration=rng.randrange(6, STEPS - 4)))
    return Trial("", pool, faults, folder_bytes=1 << 24)


def _clock(rng: random.Random, pool: Pool) -> Trial:
    jump_s = rng.choice((-3600.0, 3600.0))
    first = _fault(rng, pool, "clock", iteration=rng.randrange(2, 6), jump_s=jump_s)
    more = (_fault(rng, pool, "kill", iteration=rng.randrange(7, STEPS - 4)),) if rng.random() < 0.5 else ()
    return Trial("", pool, (first, *more), unchanged=not more)


def _stale(rng: random.Random, pool: Pool) -> Trial:
    """The controller dies after a change, and its state file is the one from before the change."""
    first = _fault(rng, pool, "kill", iteration=rng.randrange(2, 5))
    others = [name for name in pool.names if name != first["node"]]
    second = _fault(rng, pool, "controller", node=rng.choice(others), slot=0, after=1, iteration=rng.randrange(8, 11))
    return Trial("", pool, (first, second), state="stale")


def _lossy(rng: random.Random, pool: Pool) -> Trial:
    fault = _fault(rng, pool, "lossy", iteration=rng.randrange(2, 6), loss=rng.choice((0.01, 0.03)))
    return Trial("", pool, (fault,), unchanged=True)


def _inside(rng: random.Random, pool: Pool) -> Trial:
    """The worker that first reaches an operation of a kind dies in it."""
    kinds = sorted({op.kind.name for ops in build(pool.plans[0])[False].ops for op in ops})
    return Trial("", pool, (_fault(rng, pool, "kill", f"in {rng.choice(kinds)}", anybody=True),))


def _again(rng: random.Random, pool: Pool) -> Trial:
    """A node dies, another one during the change, and both return before the change ends."""
    first = _fault(rng, pool, "agent", iteration=rng.randrange(2, 6))
    others = [name for name in pool.names if name != first["node"]]
    second = _fault(rng, pool, "agent", rng.choice(("opening", "agreeing")), node=rng.choice(others), slot=0, after=1)
    return Trial("", pool, (first, second), node_returns=True)


def _hopeless(rng: random.Random, pool: Pool) -> Trial:
    pool = replace(pool, plans=pool.plans[:1])
    return Trial("", pool, (_fault(rng, pool, "kill"),), ("--restarts", "0", "--return-s", "2"), hopeless=True)


_MAKERS: dict[str, Callable[[random.Random, Pool], Trial]] = {
    "kill": _kill,
    "stop for ever": _one("stop"),
    "stop for a moment": _one("moment", unchanged=True),
    "node": _node,
    "controller": _one("controller", unchanged=True),
    "controller hangs": _one("controller hangs", unchanged=True),
    "controller moves": _one("controller", unchanged=True, controller_moves=True),
    "agent": _agent,
    "in an update": _one("kill", "update"),
    "in a save": _save,
    "in a reconfiguration": _reconfiguration,
    "truncated checkpoint": _truncated,
    "full disk": _one("kill", saves_every=4, disk_bytes=1),
    "stalled connection": _one("stall", "operation", "copy"),
    "vanished node": _vanish,
    "stalled link": _one("link", "operation", "operation", "copy"),
    "disk of the folder": _disk,
    "clock jumps": _clock,
    "second controller": _one("second controller", unchanged=True),
    "stale state": _stale,
    "broken state": _one("controller", unchanged=True, state="broken"),
    "junk on the port": _one("junk", unchanged=True),
    "lost packets": _lossy,
    "short of memory": _one("memory"),
    "in an operation": _inside,
    "change in a change": _again,
    "no plan": _hopeless,
}


def make(kind: str, rng: random.Random, pool: Pool) -> Trial:
    """Draw a trial of a kind: its faults, their processes and times, and the expected end."""
    return replace(_MAKERS[kind](rng, pool), kind=kind)


KINDS = tuple(_MAKERS)
MOUNTS = ("full disk", "disk of the folder")  # kinds that need the right to mount a small disk
_DRAWS, _CHECK_S = 20, 120.0


class FaultLab:
    """The initial weights, and the losses of undisturbed runs of stock Megatron."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        self._runner, self._lab, self._folder = runner, Lab(runner, folder), folder
        self._references: dict[tuple[Weights, float], dict[int, float]] = {}

    def start_flags(self, pool: Pool) -> tuple[str, ...]:
        """Returns the flags of every rank of a pool."""
        return self._lab.start_flags(pool.weights)

    def checkpoint_bytes(self, pool: Pool) -> int:
        """Returns the size of a checkpoint of the pool's model."""
        return sum(file.stat().st_size for file in self._lab.checkpoint(pool.weights).rglob("*") if file.is_file())

    def reference(self, pool: Pool) -> dict[int, float]:
        """Returns the losses by iteration, in one process."""
        key = pool.weights, pool.clip
        if key not in self._references:
            folder = self._folder / f"reference-{len(self._references)}"
            flags = (*common_flags(*key, steps=STEPS), *self._lab.start_flags(pool.weights))
            self._runner.run(Job(folder.name, 1, flags, folder, setup=("testing.probe:observe", {"out": str(folder)})))
            losses = json.loads((folder / "losses-0.json").read_text(encoding="utf-8"))["losses"]
            self._references[key] = dict(enumerate(losses, 1))
        return self._references[key]


def drawn(seed: int, number: int, kind: str, folder: Path) -> Trial:
    """Draw a trial whose plans pass all checks at the start."""
    for attempt in range(_DRAWS):
        rng = random.Random(f"{seed} {number} {attempt}")
        pool = draw(rng, SCHEDULES[(number + seed) % len(SCHEDULES)])
        where = folder / f"check-{number}-{attempt}"
        where.mkdir(parents=True)
        files = [where / f"plan-{n}.json" for n in range(len(pool.plans))]
        for plan, file in zip(pool.plans, files, strict=True):
            save_plan(plan, file)
        check = Forked(
            lambda pool=pool, files=files: len(problems(pool, list(map(str, files)))),  # type: ignore[misc]
            where / "log.txt",
            os.environ,
        )
        if check.wait(_CHECK_S) == 0:
            return make(kind, rng, pool)
    raise RuntimeError(f"no drawn plans of trial {number} pass the checks of the start")


def verdict(trial: Trial, outcome: Outcome, difference: float, samples: int) -> str:
    """Returns why a trial did not survive; empty if it did."""
    if not outcome.ended:
        return "hung"
    if trial.hopeless:
        clear = sum("no plan for what is left" in line for line in outcome.error if line.startswith("controller"))
        return "" if outcome.code == 1 and clear == 1 else f"exit code {outcome.code}, {clear} clear errors"
    # A training whose last state did not fit on the disk is done, and does not end well.
    unsaved = bool(trial.disk_bytes and outcome.error) and all("its last state" in line for line in outcome.error)
    if outcome.code != 0 and not (unsaved and outcome.code == 1):
        return f"exit code {outcome.code}: {'; '.join(outcome.error)[:600]}"
    if len(outcome.happened) < len(trial.faults):
        return "a fault did not happen"
    if trial.unchanged and outcome.history != ["start"]:
        return f"there was a change: {', '.join(outcome.history)}"
    if difference > BAR:
        return f"losses differ by {difference:.2g}"
    return f"{samples} samples were skipped or repeated" if samples else ""


def reasons(outcome: Outcome) -> set[str]:
    """Returns the reasons for the job's end in the logs of its controller and its nodes."""
    said = (line.rpartition("the job ended: ")[2] for line in outcome.error if "Traceback" not in line)
    return {text.removeprefix("controller: ").removeprefix("het-run: ") for text in said}


def carry_out(lab: FaultLab, trial: Trial, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a trial; returns its entry in the record, without seed and number."""
    if trial.disk_bytes:  # room for one checkpoint, and not for a second one
        trial = replace(trial, disk_bytes=int(1.6 * lab.checkpoint_bytes(trial.pool)))
    reference, flags = lab.reference(trial.pool), lab.start_flags(trial.pool)
    start_s, before_s = time.monotonic(), _processor_s()
    outcome = run(trial, folder, flags, limit_s)
    hopeful = outcome.ended and not trial.hopeless
    difference = loss_difference(outcome, reference) if hopeful else 0.0
    samples = wrong_samples(outcome) if hopeful else 0
    return {
        "kind": trial.kind,
        "plans": trial.pool.rows,
        "ranks": [plan.world_size for plan in trial.pool.plans],
        "nodes": trial.pool.nodes,
        "faults": trial.faults,
        "happened": outcome.happened,
        "history": outcome.history,
        "seconds": round(time.monotonic() - start_s, 1),
        "processor_s": round(_processor_s() - before_s, 1),
        "ended_without_reason": outcome.ended and outcome.code != 0 and len(reasons(outcome)) != 1,
        "failed": verdict(trial, outcome, difference, samples),
        "hung": not outcome.ended,
        "left_processes": outcome.left,
        "samples_skipped_or_repeated": samples,
        "loss_difference": difference,
        "iterations_done_again": sum(len(found) - 1 for found in outcome.losses.values()),
    }


def _processor_s() -> float:
    """Returns the CPU seconds of all ended processes; those of a job are adopted when it ends."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The document of all trials."""
    return {
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "seeds": sorted({entry["seed"] for entry in entries}),
        "trials": len(entries),
        "survived": sum(not entry["failed"] for entry in entries),
        "hung": sum(entry["hung"] for entry in entries),
        "ended_without_reason": sum(entry.get("ended_without_reason", False) for entry in entries),
        "left_processes": sum(entry["left_processes"] for entry in entries),
        "samples_skipped_or_repeated": sum(entry["samples_skipped_or_repeated"] for entry in entries),
        "max_loss_difference": max((entry["loss_difference"] for entry in entries), default=0.0),
        "kinds": dict(Counter(entry["kind"] for entry in entries)),
        "schedules": dict(Counter(row["schedule"] for entry in entries for row in entry["plans"])),
        "failed": [f"{e['seed']}.{e['number']}: {e['kind']}: {e['failed']}" for e in entries if e["failed"]],
        "entries": entries,
    }


def _options() -> argparse.Namespace:
    parser = command_line("benchmarks.faults", __doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--trials", type=int, default=100, help="of every seed (default 100)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, to repeat some of a seed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[], help="only these kinds")
    parser.add_argument("--limit-s", type=float, default=240.0, help="bound on a job (default 240)")
    parser.add_argument("--add", type=Path, metavar="FILE", help="a result to go on with: trials that FILE has are not "
                        "done again, and all of them are in OUT")  # fmt: skip
    parser.add_argument("--for-s", type=float, default=math.inf, help="begin no trial after so long (default: no "
                        "bound); go on with --add")  # fmt: skip
    parser.add_argument("--keep", type=Path, help="folder for everything that the jobs write")
    options = parser.parse_args()
    if options.add is not None and not options.add.is_file():
        parser.error(f"--add {options.add}: there is no such file; leave it out to begin a new result")
    return options


def prepare(folder: Path) -> None:
    """Import everything in the process from which all others are forked."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank_server.import_everything()
    rank_server.remember_docstrings()
    rank_server.share_queue_server()
    adopt_orphans()
    gc.collect()
    gc.freeze()


def main() -> int:
    """Command line; exit code 1 if a trial did not survive."""
    options, began_s = _options(), time.monotonic()
    entries: list[dict[str, Any]] = []
    if options.add is not None:
        entries = json.loads(options.add.read_text(encoding="utf-8"))["entries"]
    done = {(entry["seed"], entry["number"]) for entry in entries}
    with scratch("faults-", options.keep) as given:
        folder = given.resolve()
        prepare(folder)
        kinds = options.kinds or [kind for kind in KINDS if kind not in MOUNTS or can_mount(folder)]
        numbers = range(options.first, options.first + options.trials)
        with Runner() as runner:
            lab = FaultLab(runner, folder / "lab")
            save(options.json, summary(entries))
            for number, seed in itertools.product(numbers, options.seed):
                if (seed, number) in done or time.monotonic() - began_s > options.for_s:
                    continue
                trial = drawn(seed, number, kinds[number % len(kinds)], folder / f"seed-{seed}")
                where = folder / f"seed-{seed}" / f"trial-{number}"
                last = {"seed": seed, "number": number} | carry_out(lab, trial, where, options.limit_s)
                entries.append(last)
                said = last["failed"] or "survived"
                print(f"{seed}.{number} {last['kind']}: {said} ({last['seconds']} s)", flush=True)
                save(options.json, summary(entries))
                if options.keep is None:
                    shutil.rmtree(where)
    print(json.dumps({key: value for key, value in summary(entries).items() if key != "entries"}, indent=1))
    return int(any(entry["failed"] for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
