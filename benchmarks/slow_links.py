"""Compares depths of 1F1B over a slow link: ``python -m benchmarks.slow_links --json OUT``.

Two stages train over a delayed, rate-limited link on loopback (``drift_stand_ins.SlowLink``).  First a run without
delay measures the passes.  A transfer then takes ``--share`` of a stage's time for one microbatch, half of it latency.
Depths are chosen by simulation (``schedule/generators/one_f_one_b.py``) and by the published rule.  Runs of plain 1F1B
and of both depths alternate.  A run's figure is the median of the iteration times that Megatron logs, without the
first ones.

Keys: ``speedup`` (plain over chosen, median over rounds; at least 1.25 where the transfer takes half a stage's time),
``speedup_of_rule``, ``predicted_speedup``, ``prediction_error`` (largest relative error of the predicted iteration
times, at most 0.1).
"""

import functools
import statistics
from pathlib import Path
from typing import Any

import megatron_het.features  # noqa: F401  (the kinds of all features)
from benchmarks.drift_stand_ins import SlowLink, divert
from benchmarks.machine import alternate, command_line, scratch, write_report
from benchmarks.overhead import equal_stages, iteration_s
from benchmarks.zero_bubble_speed import durations, flags
from megatron_het.plan import ModelShape, Plan, save_plan
from megatron_het.schedule import Costs, Kind, Link, Shape, add_transfers, generate
from megatron_het.schedule.generators.one_f_one_b import choose_depths, published_depths
from megatron_het.schedule.simulate import simulate
from testing.runner import Job, Runner


def slow_down(*, rank: int, latency_s: float, bytes_per_s: float) -> None:
    """Delay all point-to-point messages of this process from now on.

    Args:
        rank: This process; all ranks are slowed.
        latency_s: Seconds from the end of sending to the arrival.
        bytes_per_s: Rate at which messages to one rank leave.
    """
    divert(functools.cache(lambda dst: SlowLink(latency_s, bytes_per_s)))


_LAYERS, _HIDDEN, _HEADS, _SEQ = 4, 512, 4, 256
_SKIPPED, _TRACED = 3, 4
_MESSAGE_BYTES = 4.0 * _SEQ * _HIDDEN
_MODEL = ModelShape(_LAYERS, _HIDDEN, _HEADS, _HEADS, _SEQ, 3 * _HIDDEN)
Depths = tuple[int, ...]


def run(runner: Runner, plan: Plan, folder: Path, iterations: int, link: dict[str, float] | None) -> float:
    """Train, with traces in the folder; returns the median seconds of an iteration."""
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    argv = (
        *flags(plan.num_microbatches, iterations),
        *("--het-transport", "gloo", "--het-plan", str(folder / "plan.json")),
        *("--het-trace", str(folder), "--het-trace-iteration", str(_TRACED)),
    )
    setup = None if link is None else ("benchmarks.slow_links:slow_down", dict(link))
    done = runner.run(Job(folder.name, 2, argv, folder, setup=setup, timeout_s=600.0))
    return iteration_s(done.log(1), _SKIPPED)


def simulated(microbatches: int, found: list[dict[Kind, float]], link: dict[str, float], depths: Depths) -> float:
    """Returns the simulated seconds of the passes and transfers of one iteration."""
    shape = Shape.uniform(2, microbatches, layers_per_chunk=_LAYERS // 2)
    costs = Costs(
        forward_s=tuple((times[Kind.FORWARD],) for times in found),
        backward_s=tuple((times[Kind.BACKWARD],) for times in found),
        message_bytes=_MESSAGE_BYTES,
        link=lambda source, target: Link(link["latency_s"], link["bytes_per_s"]),
    )
    return simulate(add_transfers(generate("1f1b", shape, depths=depths)), costs).makespan_s


def measure(share: float, microbatches: int, rounds: int, iterations: int, folder: Path) -> dict[str, Any]:
    """Carry out all runs; returns the figures."""
    with Runner() as runner:
        free_s = run(runner, equal_stages(_MODEL, microbatches), folder / "free", iterations, None)
        found = durations(folder / "free", (Kind.FORWARD, Kind.BACKWARD))
        stage_s = [sum(times.values()) for times in found]
        transfer_s = share * statistics.mean(stage_s)
        link = {"latency_s": transfer_s / 2, "bytes_per_s": _MESSAGE_BYTES / (transfer_s / 2)}
        free = {"latency_s": 0.0, "bytes_per_s": 1e15}
        rest_s = free_s - simulated(microbatches, found, free, ())  # loading, reduction, update
        sides: dict[str, Depths] = {
            "plain": (),
            "chosen": choose_depths(stage_s, [transfer_s], lambda d: simulated(microbatches, found, link, d)),
            "rule": published_depths(stage_s, [transfer_s], [True]),
        }

        def train(side: str, index: int) -> float:
            deeper = {"depths": list(sides[side])} if sides[side] else {}
            plan = equal_stages(_MODEL, microbatches, **deeper)
            return run(runner, plan, folder / f"{index}-{side}", iterations, link)

        times = alternate(sides, rounds, train)
    predicted = {side: simulated(microbatches, found, link, depths) + rest_s for side, depths in sides.items()}
    ratios = {side: [a / b for a, b in zip(times["plain"], times[side], strict=True)] for side in ("chosen", "rule")}
    return {
        "speedup": statistics.median(ratios["chosen"]),
        "speedup_of_rule": statistics.median(ratios["rule"]),
        "predicted_speedup": predicted["plain"] / predicted["chosen"],
        "prediction_error": max(abs(predicted[s] / statistics.median(times[s]) - 1) for s in sides),
        "depths": {side: list(depths) for side, depths in sides.items()},
        "transfer_s": transfer_s,
        "stage_s": stage_s,
        "microbatches": microbatches,
        "share": share,
        "predicted_s": predicted,
        "runs_s": times,
        "ratios": ratios,
    }


def main() -> int:
    """Command line; exit code 1 if a bound is missed."""
    parser = command_line("benchmarks.slow_links", __doc__)
    parser.add_argument("--share", type=float, default=0.5, help="a transfer's time as a share of a stage's")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs")
    parser.add_argument("--iterations", type=int, default=8, help="of each run; the first 3 do not count")
    options = parser.parse_args()
    with scratch("slow-links-") as folder:
        report = measure(options.share, options.microbatches, options.rounds, options.iterations, folder)
    report["passed"] = report["prediction_error"] <= 0.1 and (options.share < 0.5 or report["speedup"] >= 1.25)
    write_report(options.json, report)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
