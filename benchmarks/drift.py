"""Does the watch detect drift, and does the better plan gain as much as predicted?

    python -m benchmarks.drift --json OUT [--pairs N]

Real runs over gloo under plans of the planner.  Devices are paced (``benchmarks.drift_stand_ins``): every layer takes a
set time whatever else this machine does, and the planner's profile contains that time.  In the middle of a run

- ``device``: one process becomes twice as slow;
- ``link``: messages between two processes, in both directions, are delayed;
- ``stopped``: one process that is not paced is stopped again and again (found and named; too noisy for gains).

The watch has to name the cause.  ``het-plan replan`` then makes a better plan from the run's folder, which runs on the
same drifted devices: the report has its predicted and its measured gain.

``watch_overhead`` is measured inside the processes, because runs on a busy machine differ by more than the watch costs.
Every rank takes the wall time of all work of the watch at the start of an iteration: summing up, posting, reading
and writing.  The mean of the slowest rank (the one that reads), in the worst run, is divided by the median
iteration of the runs without the watch.  The report also has the watch's CPU time and the ratios of alternating runs
with the watch and without it, which include the time that the watch adds to single transfers.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import alternate, command_line, machine
from megatron_het.plan import Plan, load_plan, save_plan
from testing.cases import plain_flags, platform_words
from testing.planner_cases import model_of, processors
from testing.runner import Finished, Job, Runner, words
from tools.planner.__main__ import main as het_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import estimator_of
from tools.planner.costs.layer import CPU_GLOO
from tools.planner.costs.simulation import simulate_candidate
from tools.planner.inputs import profile_schema
from tools.planner.inputs.cluster import load_cluster
from tools.planner.inputs.files import write_json
from tools.planner.replay.measured import load_watched
from tools.planner.replay.replan import correct, predicted_s
from tools.planner.report.analysis import complete
from tools.planner.search.outcome import CLUSTER, PROFILE, Found, keep_inputs

_SHAPE: dict[str, Any] = {"layers": 8, "hidden": 32, "ffn": 64, "heads": 2, "groups": 2, "words": 256, "tokens": 32}
_TRAINING: dict[str, Any] = {"batch": 12, "micro_batch_sizes": (1,), "precision": "fp32", "recompute": ("none",)}
MODEL = model_of(name="paced", attention="unfused", **_SHAPE, **_TRAINING)
FORWARD_S, BACKWARD_S = 0.012, 0.024  # pace of one layer
DRIFT_AT, ITERATIONS, AFTER = 16, 36, 12
"""Iteration of the drift, iterations of a run with it, iterations of a run of the better plan."""
FACTOR, DELAY_S = 2.0, 0.15
_FOUND = re.compile(r"het: watch: iteration (\d+): (?!over)(.*)")


def _profile() -> profile_schema.Profile:
    """Returns a profile of the paced devices; the pace of a layer includes embedding and head."""
    m = MODEL

    def timing(layer: Any, share: float) -> profile_schema.LayerTiming:
        size = m.seq_length * m.hidden_size * 4
        return profile_schema.LayerTiming(
            layer, 1, 1, m.seq_length, share * FORWARD_S, share * BACKWARD_S, 1e-6, 20_000, 100_000, size
        )

    timings = [timing("embedding", 1e-4), timing("layer", 1.0), timing("head", 1e-4)]
    links = [
        profile_schema.LinkProfile("network", "core", "core", "p2p", 2, 3e-4, 1e9),
        profile_schema.LinkProfile("network", "core", "core", "all_reduce", 2, 1e-3, 1e9),
    ]
    return profile_schema.Profile(m.profiled, [profile_schema.DeviceProfile("core", 4 << 30, 1, timings)], links)


@dataclass
class Scenario:
    """A run in which something drifts."""

    name: str  # of the result
    layers: tuple[int, ...]  # of every stage of the run's plan, one device each
    named: tuple[str, ...]  # the cause that the watch has to name
    slowed: tuple[int, ...] = ()  # ranks that become slow
    links: tuple[tuple[int, int], ...] = ()  # pairs of ranks between which messages are delayed, both ways

    def stand_in(self, iteration: int) -> dict[str, Any]:
        """Returns the arguments of ``drift_stand_ins.paced``."""
        delays = {f"{x}-{y}": DELAY_S for a, b in self.links for x, y in ((a, b), (b, a))}
        return {
            "forward_s": FORWARD_S,
            "backward_s": BACKWARD_S,
            "slowed": list(self.slowed),
            "iteration": iteration,
            "factor": FACTOR,
            "links": delays,
        }


SCENARIOS = (
    Scenario("device", (4, 4), ("rank 1",), slowed=(1,)),
    Scenario("link", (3, 3, 2), ("rank 0 -> rank 1", "rank 1 -> rank 0"), links=((0, 1),)),
)


def planned(layers: Sequence[int]) -> Plan:
    """The planner's prediction of a pipeline of paced devices."""
    cluster = processors(len(layers))
    estimator = estimator_of(cluster, MODEL, _profile(), CPU_GLOO)
    candidate = Candidate(tuple(Stage(n, (Group(0, 1, 1),)) for n in layers), 1)
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    plain = complete(estimator, Found(candidate, estimate))
    seconds = simulate_candidate(estimator, candidate, estimate, plain).iteration_s
    return complete(estimator, Found(candidate, estimate, seconds), "benchmarks.drift")


def folder_of(plan: Plan, folder: Path) -> Path:
    """Create the folder of a run, with the files that ``replan`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(plan, folder / "plan.json")
    keep_inputs(folder, processors(len(plan.stages)), MODEL, _profile())
    return folder


def job(plan_file: Path, folder: Path, iterations: int, stand_in: Mapping[str, Any], *more: str) -> Job:
    """The training of a plan on paced devices."""
    own = ("--het-plan", str(plan_file), "--het-report", str(folder / "ranks"))
    return Job(
        folder.name,
        load_plan(plan_file).world_size,
        (*training_flags(iterations), *own, *more),
        folder / "logs",
        setup=("benchmarks.drift_stand_ins:paced", dict(stand_in)),
        timeout_s=900.0,
    )


def training_flags(iterations: int) -> tuple[str, ...]:
    """Returns the flags of the paced model, without a plan."""
    flags = plain_flags(MODEL, MODEL.vocab_size - 1, MODEL.global_batch_size, iterations)
    return words("--lr 1e-3 --lr-decay-style constant", flags, platform_words(is_cuda=False))


def times_of(folder: Path, first: int) -> list[float]:
    """Returns the times of a run's iterations from a given one on, in seconds."""
    reports = [json.loads(p.read_text()) for p in sorted((folder / "ranks").glob("rank-*.json"))]
    rows = reports[-1]["iterations"]
    return [row["elapsed_s"] for row in rows if row["iteration"] >= first and row["elapsed_s"]]


def said(done: Finished) -> list[tuple[int, str]]:
    """Returns the findings of the watch: iteration and sentence, with RUN for the run's folder."""
    lines = _FOUND.findall(done.log().replace(str(done.job.log_dir), "RUN"))
    return [(int(iteration), text) for iteration, text in lines]


def drifted(runner: Runner, scenario: Scenario, scratch: Path) -> dict[str, Any]:
    """Measure one scenario: the run with the drift, and the run of the better plan."""
    folder = folder_of(planned(scenario.layers), scratch / scenario.name)
    done = runner.run(job(folder / "plan.json", folder, ITERATIONS, scenario.stand_in(DRIFT_AT)))
    found = [(i, text) for i, text in said(done) if i >= DRIFT_AT]
    names = [next((n for n in scenario.named if n in text), "") for _, text in found]
    before_s = median(times_of(folder, DRIFT_AT + 4))
    out = {
        "found_after_iterations": min((i for i, _ in found), default=10**6) - DRIFT_AT + 1,
        "named": bool(found) and all(names),
        "said": [f"iteration {i}: {text}" for i, text in said(done)],
        "before_drift_s": median(t for t in times_of(folder, 4)[: DRIFT_AT - 5]),
        "before_drift_predicted_s": load_plan(folder / "plan.json").predicted.iteration_s,  # type: ignore[union-attr]
        "before_measured_s": before_s,
    }
    code = het_plan(["replan", str(folder), "--schedules", "1f1b", "--out", str(folder / "plan-2.json")])
    if code:
        return out | {"replan_exit_code": code}
    return out | _gain(runner, scenario, folder, before_s)


def _gain(runner: Runner, scenario: Scenario, folder: Path, before_s: float) -> dict[str, Any]:
    """Run the better plan on the drifted devices; returns its predicted and measured gain."""
    better = load_plan(folder / "plan-2.json")
    assert better.predicted is not None
    replicas = [r for stage in better.stages for r in stage.replicas]
    place = {int(r.device.rsplit(" ", 1)[1]): r.ranks[0] for r in replicas if " " in r.device}
    moved = replace(
        scenario,
        slowed=tuple(place[rank] for rank in scenario.slowed if rank in place),
        links=tuple((place[a], place[b]) for a, b in scenario.links if a in place and b in place),
    )
    again = folder / "better"
    runner.run(job(folder / "plan-2.json", again, AFTER, moved.stand_in(1)))
    after_s = median(times_of(again, 4))
    predicted_before_s = _before(folder)
    predicted, measured = 1 - better.predicted.iteration_s / predicted_before_s, 1 - after_s / before_s
    return {
        "better_plan": [
            {"layers": list(s.layers), "replicas": [(r.device, len(r.microbatches)) for r in s.replicas]}
            for s in better.stages
        ],
        "before_predicted_s": predicted_before_s,
        "after_predicted_s": better.predicted.iteration_s,
        "after_measured_s": after_s,
        "replan_gain_predicted": predicted,
        "replan_gain_measured": measured,
        "replan_gain_error": abs(predicted / measured - 1) if measured else None,
    }


def _before(folder: Path) -> float:
    """Returns the run's own plan, priced from the measured times."""
    plan = load_plan(folder / "plan.json")
    seen = load_watched(folder / "ranks" / "watch.json", plan)
    corrected = correct(plan, load_cluster(folder / CLUSTER), profile_schema.load_profile(folder / PROFILE), seen)
    return predicted_s(estimator_of(corrected.cluster, MODEL, corrected.profile, CPU_GLOO), corrected.plan)


def stopped(runner: Runner, scratch: Path) -> dict[str, Any]:
    """Measure a process that computes for real and is stopped three quarters of the time."""
    folder = folder_of(planned((4, 4)), scratch / "stopped")
    setup = {"slowed": 1, "iteration": DRIFT_AT, "stopped_s": 0.03, "running_s": 0.01}
    one = job(folder / "plan.json", folder, ITERATIONS, {}, "--het-watch-threshold", "0.8")
    done = runner.run(replace(one, setup=("benchmarks.drift_stand_ins:stop_again_and_again", setup)))
    found = [(i, text) for i, text in said(done) if i >= DRIFT_AT]
    return {
        "found_after_iterations": min((i for i, _ in found), default=10**6) - DRIFT_AT + 1,
        "named": bool(found) and all("rank 1 " in text and "computes slowly" in text for _, text in found),
        "said": [f"iteration {i}: {text}" for i, text in said(done)],
    }


def overhead(runner: Runner, scratch: Path, pairs: int) -> dict[str, Any]:
    """Measure the overhead of the watch: its own time in the process, and alternating runs with and without it."""
    folder = folder_of(planned((4, 4)), scratch / "overhead")
    stand_in = Scenario("overhead", (4, 4), ()).stand_in(10**9)
    own: dict[str, list[float]] = {"cpu_us": [], "wall_us": []}

    def run(side: str, pair: int) -> float:
        where = scratch / "overhead" / f"{side}-{pair}"
        runner.run(job(folder / "plan.json", where, 2 * AFTER, stand_in, "--het-watch", side))
        if side == "on":
            reports = [json.loads(p.read_text())["watch"] for p in sorted((where / "ranks").glob("rank-*.json"))]
            for name, found in own.items():
                found.append(max(r[name] / r["iterations"] for r in reports) / 1e6)
        return median(times_of(where, 4))

    seconds = alternate(("on", "off"), pairs, run)
    iteration_s = median(seconds["off"])
    ratios = [on / off - 1 for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "watch_overhead": max(own["wall_us"]) / iteration_s,
        "watch_s_per_iteration": own["wall_us"],
        "watch_cpu_s_per_iteration": own["cpu_us"],
        "overhead_by_alternating_runs": median(ratios),
        "ratios": ratios,
        "iteration_s": seconds,
    }


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of all scenarios: the latest finding, whether all causes were named, the worst error."""
    drifts = [result[name] for name in ("device", "link", "stopped") if name in result]
    gains = [d for d in drifts if d.get("replan_gain_error") is not None]
    worst: Mapping[str, Any] = max(gains, key=lambda d: d["replan_gain_error"], default={})
    return {
        "found_after_iterations": max((d["found_after_iterations"] for d in drifts), default=None),
        "named": all(d["named"] for d in drifts),
        "replan_gain_predicted": worst.get("replan_gain_predicted"),
        "replan_gain_measured": worst.get("replan_gain_measured"),
        "watch_overhead": result.get("overhead", {}).get("watch_overhead"),
    }


def main() -> None:
    """Measure and write JSON."""
    parser = command_line("benchmarks.drift", __doc__)
    parser.add_argument("--pairs", type=int, default=3, help="alternating pairs of runs for the overhead (default 3)")
    parser.add_argument("--only", metavar="NAME", help="device, link, stopped or overhead")
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(options.json.read_text()) if options.only and options.json.exists() else {}
    with tempfile.TemporaryDirectory() as folder, Runner() as runner:
        scratch = Path(folder).resolve()
        steps: dict[str, Any] = {s.name: lambda s=s: drifted(runner, s, scratch) for s in SCENARIOS}
        steps |= {
            "stopped": lambda: stopped(runner, scratch),
            "overhead": lambda: overhead(runner, scratch, options.pairs),
        }
        for name, step in steps.items():
            if options.only in (None, name):
                result[name] = step()
                write_json(options.json, result | summary(result) | {"machine": machine()})
    print(json.dumps(summary(result), indent=1))


if __name__ == "__main__":
    main()
