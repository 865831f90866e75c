"""A long elastic job whose pool changes at random: ``python -m benchmarks.long_run --changes N --json OUT``.

A tiny job does ``--iterations`` with so many random changes, deaths and leaves of nodes that come back.  ``grew`` has
the relative growth from the second to the last quarter (at most 0.02): of memory, descriptors and threads of the
controller, an agent and a worker that run from the start, and of the bytes in the job's folder.  Logs are cut
shorter than by default, so that they are full within the run.  Measurements are written after every change, so that
an interrupted run leaves them.  ``loss_difference`` is the largest relative one to an undisturbed run of one rank
beside it, over the ``losses_compared`` iterations that both have done.
"""

import contextlib
import functools
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.elastic import SHORT, ElasticJob, ForkedJob, plan_of, small_data
from benchmarks.faults import prepare
from benchmarks.machine import command_line, save, scratch, write_report
from megatron_het.elastic import agent
from megatron_het.plan import Plan, Replica, Stage

_BATCH, _EACH, _COPY_EVERY, _LOG_BYTES, _PART = 3, 100, "4", 2**16, 500
"""Sequences of an iteration; iterations for each change, and between copies; of a worker's log; waited for at once."""
_WHERE = ("iteration", "seconds", "away")  # keys of a sample that are no figures


def used(processes: Mapping[str, int], folder: Path) -> dict[str, float]:
    """Memory, descriptors and threads of some processes, and bytes in a folder."""
    found: dict[str, float] = {"disk_bytes": sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())}
    for name, number in processes.items():
        where = Path(f"/proc/{number}")
        found[f"{name} memory_bytes"] = 4096.0 * int((where / "statm").read_text(encoding="ascii").split()[1])
        found[f"{name} descriptors"] = len(list((where / "fd").iterdir()))
        found[f"{name} threads"] = len(list((where / "task").iterdir()))
    return found


def tiny(replicas: int) -> Plan:
    """Returns a plan of a model that is as small as two stages allow."""
    plan = plan_of(replicas, (1, 1), _BATCH)
    return replace(plan, model=replace(plan.model, hidden_size=64, ffn_hidden_size=96, seq_length=SHORT))


def alone(_replicas: int) -> Plan:
    """Returns the job that trains the model of :func:`tiny` on one rank, with the whole batch at once."""
    tiny_plan = tiny(1)
    training = replace(tiny_plan.training, micro_batch_size=_BATCH)
    return replace(tiny_plan, training=training, stages=(Stage((2,), (Replica((0,), (0,)),)),))


def grown(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns each figure's relative growth from the second to the last quarter of the samples with all nodes.

    With a node away there are fewer connections and threads.
    """
    samples = [sample for sample in samples if not sample["away"]]
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]

    def median(part: Sequence[Mapping[str, float]], key: str) -> float:
        return statistics.median(sample[key] for sample in part)

    return {key: median(late, key) / median(early, key) - 1.0 for key in samples[0] if key not in _WHERE}


class Losses:
    """The losses seen so far in the reports below a folder; a report keeps only its newest losses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times: dict[Path, int] = {}
        self._losses: dict[Path, dict[int, float]] = {}

    def read(self) -> dict[int, list[float]]:
        """Read reports written since the last call; returns all losses so far by iteration."""
        for file in self._folder.rglob("rank-*.json"):
            with contextlib.suppress(OSError, json.JSONDecodeError):  # it is being written
                if self._times.get(file) != (written := file.stat().st_mtime_ns):
                    new = {int(number): loss for number, loss in json.loads(file.read_text(encoding="utf-8"))["losses"]}
                    old, self._times[file] = self._losses.get(file, {}), written
                    self._losses[file] = {i: loss for i, loss in old.items() if i < min(new, default=0)} | new
        found: dict[int, list[float]] = {}
        for losses in self._losses.values():
            for number, loss in losses.items():
                found.setdefault(number, []).append(loss)
        return found


def compared(losses: Losses, undisturbed: Losses) -> dict[str, Any]:
    """Compare losses with the undisturbed run, over the iterations that both have done."""
    found, expected = losses.read(), undisturbed.read()
    both = found.keys() & expected.keys()
    differences = (abs(v - expected[i][0]) / abs(expected[i][0]) for i in both for v in found[i])
    return {
        "iterations_seen": len(found),
        "losses_compared": len(both),
        "last_compared": max(both, default=0),
        "loss_difference": max(differences, default=0.0),
    }


def long_run(
    folder: Path, iterations: int, changes: int, seed: int, limit_s: float, note: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """See the module's text.

    Args:
        folder: An empty folder.
        iterations: Of the training.
        changes: So many, at equal distances.
        seed: Of what they are.
        limit_s: After so long the job is ended as far as it is.
        note: Is given what was measured so far, after every change.
    """
    rng, made, samples, began_s = random.Random(seed), Counter[str](), list[dict[str, float]](), time.monotonic()
    data, at, away = small_data(folder / "data"), 0, ""
    losses, undisturbed = (Losses(folder / name / "report") for name in ("long", "undisturbed"))
    with contextlib.ExitStack() as jobs:
        plain = jobs.enter_context(ForkedJob(folder / "undisturbed", iterations, "0", alone, nodes={"a": 1}, data=data))
        plain.until(functools.partial(plain.has_logged, 4), "the first iterations of the undisturbed job")
        job = jobs.enter_context(ForkedJob(folder / "long", iterations, _COPY_EVERY, tiny, data=data))
        acts: dict[str, Callable[[str], object]] = {"death": job.kill_worker, "leave": job.notify, "join": job.start}
        job.until(functools.partial(job.has_logged, 4), "the first iterations")
        steady = {"controller": job.process("controller"), "agent": job.process("a"), "worker": job.worker("a")}

        def document(at: int) -> dict[str, Any]:
            where = {"iteration": at, "seconds": time.monotonic() - began_s, "away": float(bool(away))}
            samples.append(where | used(steady, job.folder / "job"))
            head = {"iterations": at, "seed": seed, "changes": dict(made), "grew": grown(samples)}
            return head | compared(losses, undisturbed) | {"samples": samples}

        for number in range(1, changes + 1):
            at = number * iterations // (changes + 1)
            job.until(functools.partial(job.has_reached, at), f"iteration {at}")
            found = document(at)
            note(found)
            if time.monotonic() - began_s > limit_s:
                break
            act, node = ("join", away) if away else (rng.choice(("death", "leave")), rng.choice("bc"))
            acts[act](node)
            job.until(functools.partial(job.has_opened, number), f"change {number}, {act} of {node} (--iterations)")
            away = "" if act == "join" else node
            made[act] += 1
        else:
            at = iterations
            job.until(functools.partial(job.has_reached, at - 1), "the last iterations")
            found = document(at)
            note(found)
            job.end()
            wait_for(plain, at)
        generations = job.history()[-1]["generation"] + 1
        return found | {"generations": generations} | compared(losses, undisturbed)


def wait_for(job: ElasticJob, iterations: int) -> None:
    """Wait until a job has done its iterations and ended, in parts with a bound for each."""
    for part in range(_PART, iterations, _PART):
        job.until(lambda part=part: job.has_reached(part) or job.exit_code() == 0, f"iteration {part}")  # type: ignore[misc]
    job.end()


def main() -> None:
    """Command line."""
    parser = command_line("benchmarks.long_run", __doc__)
    parser.add_argument("--changes", type=int, default=200, metavar="N", help="of the pool (default 200)")
    parser.add_argument("--iterations", type=int, help=f"of the job (default {_EACH} for each change)")
    parser.add_argument("--seed", type=int, default=0, help="of the changes (default 0)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="end the job after so long (default: never)")
    parser.add_argument("--keep", type=Path, help="folder for everything that the runs write")
    options = parser.parse_args()
    iterations = options.iterations or _EACH * (options.changes + 1)
    with scratch("long-run-", options.keep) as folder:
        prepare(folder)
        agent.MAX_LOG_BYTES = _LOG_BYTES  # agents are forked from this process
        note = functools.partial(save, options.json)
        document = long_run(folder, iterations, options.changes, options.seed, options.limit_s, note)
    write_report(options.json, document, unprinted=("samples",))


if __name__ == "__main__":
    main()
