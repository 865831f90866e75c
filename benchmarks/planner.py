"""Benchmarks of the planner: accuracy, quality, speed, the published clusters, and runs on this machine.

    python -m benchmarks.planner --json OUT [--cases 30]
        [--only accuracy,catalog,families,quality,speed,pools,zorse,gloo,nodes,hybrid] [--pools 40]
        [--first 0] [--models dense,experts,vocabulary] [--objectives throughput,cost] [--add]

Keys of the JSON: ``time_error``, ``memory_error`` (mean absolute relative errors on published runs),
``worst_gap_to_brute_force``, ``search_cpu_s`` and ``bound_gap`` (by case), ``promised_over_emitted`` (the largest
ratio of the written plan's simulated time to the predicted one), numbers of random clusters on which a plan is worse by
more than 1 % than another (see ``benchmarks.planner_gap``), and details under the section names.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import planner_gap
from benchmarks.machine import command_line, machine
from benchmarks.planner_accuracy import SECTIONS
from benchmarks.planner_hybrid import hybrid
from testing import planner_cases as cases
from testing.planner_cases import compare_case, promised
from tools.planner.inputs.files import write_json
from tools.planner.report.tables import describe
from tools.planner.search.methods import search
from tools.planner.search.outcome import Goal


def accuracy() -> dict[str, Any]:
    """Compare predictions with published measurements: one set of constants, and with each run left out of the fit."""
    from benchmarks.published.accuracy import MEMORY_GRID, TIME_GRID, calibrate, compare

    found = compare()
    times, memory = calibrate(TIME_GRID, False), calibrate(MEMORY_GRID, True)
    memory_errors = [c.memory_error for c in found if c.memory_error is not None]
    return {
        "time_error": mean(abs(c.time_error) for c in found),
        "memory_error": mean(abs(e) for e in memory_errors),
        "worst_memory_underestimate": max(0.0, -min(memory_errors)),
        "leave_one_out_time_error": times.leave_one_out_error,
        "leave_one_out_memory_error": memory.leave_one_out_error,
        "constants": times.constants | memory.constants,
        "runs": [
            {
                "run": c.run.name,
                "measured_s": c.run.iteration_s,
                "predicted_s": c.iteration_s,
                "time_error": c.time_error,
                "measured_bytes": c.run.memory_bytes,
                "predicted_bytes": c.memory_bytes,
                "memory_error": c.memory_error,
            }
            for c in found
        ],
    }


def quality(count: int) -> dict[str, Any]:
    """Measure the gap to exhaustive enumeration on random small clusters."""
    rows = []
    for seed in range(count):
        rows.append(compare_case(seed))
        print(
            f"  case {seed + 1}/{count}: {rows[-1]['gpus']}, gap {100 * rows[-1]['gap']:.2f} %",
            file=sys.stderr,
            flush=True,
        )
    return {"worst_gap_to_brute_force": max(r["gap"] for r in rows), "cases": rows}


def _search_row(name: str, estimator: Any) -> dict[str, Any]:
    started = time.process_time()
    outcome = search("auto", estimator, Goal())
    row = {
        "case": name,
        "gpus": estimator.cluster.total_gpus,
        "cpu_s": time.process_time() - started,
        "evaluations": outcome.evaluations,
        "simulations": outcome.simulations,
        "bar_s": cases.SEARCH_BARS_S.get(name),
    }
    if outcome.best:
        row |= {
            "bound_gap": outcome.gap(Goal()),
            "promised_over_emitted": promised(estimator, outcome),
            "iteration_s": outcome.best.iteration_s,
            "closed_form_s": outcome.best.estimate.iteration_s,
            "plan": describe(estimator, outcome.best.candidate),
        }
    return row


def speed() -> dict[str, Any]:
    """Measure the CPU seconds of the search for the required cases."""
    first = cases.measured("OPT-350", cases.Cluster(nodes=(cases.reference_nodes("A100-40", 1),)), 64)
    search("auto", first, Goal())  # imports are not counted as search time
    rows = [_search_row(name, estimator) for name, estimator in cases.search_cases().items()]
    ratios = [r["promised_over_emitted"] for r in rows if r.get("promised_over_emitted") is not None]
    return {
        "search_cpu_s": {r["case"]: r["cpu_s"] for r in rows},
        "bound_gap": {r["case"]: r.get("bound_gap") for r in rows},
        "promised_over_emitted": max(ratios, default=None),
        "cases": rows,
    }


def zorse() -> dict[str, Any]:
    """Plan the Zorse paper's clusters: this planner, and even splits with ZeRO-2, beside the paper's Table 5."""
    rows = []
    for (name, model_name), (paper, paper_hfu, paper_even) in cases.ZORSE_TABLE_5.items():
        cluster, sequence = cases.zorse_cluster(name)
        model = cases.llama(model_name, sequence)
        estimator = cases.with_catalog(cluster, model)
        outcome = search("auto", estimator, Goal())
        flops = cases.hardware_flops(model) / 1e12
        peak = sum(n.quota * cluster.gpu(n.gpu).peak("fp16") for n in cluster.nodes) / 1e12
        best = outcome.best.iteration_s if outcome.best else None
        even = cases.even_split_with_zero_2(cluster, model)
        rows.append(
            {
                "cluster": name,
                "model": model_name,
                "tflops": flops / best if best else None,
                "hfu": flops / best / peak if best else None,
                "paper_tflops": paper,
                "paper_hfu": paper_hfu,
                "even_split_tflops": even[0] if even else None,
                "paper_even_split_tflops": paper_even,
                "even_split_plan": even[1] if even else None,
                "plan": describe(estimator, outcome.best.candidate) if outcome.best else None,
                "cpu_s": outcome.cpu_s,
            }
        )
    return {"cases": rows}


def gloo(saved: Path | None) -> dict[str, Any]:
    """Compare predictions with real runs over gloo on this machine."""
    from benchmarks.planner_gloo import CASES, measure

    case = CASES["dense"]
    found = measure(case, 3) if saved is None else measure(case, 0, saved)
    return {f"gloo_{k}" if k.endswith("_error") else k: v for k, v in found.items() if k != "rounds"}


def pools(
    options: argparse.Namespace, known: list[dict[str, Any]], figures: Collection[str] = planner_gap.COUNTS
) -> dict[str, Any]:
    """Compare the plans of random clusters with those of smaller clusters and of weaker searches."""
    rows = [row for row in known if "objective" in row]
    for _ in planner_gap.compared(options, rows, figures):
        pass
    return planner_gap.summed_up(rows)


def _joined(key: str, before: Any, now: Any) -> Any:
    """Merge a figure of two sections: gaps by case, and the larger ratio."""
    if before is None:
        return now
    if key == "bound_gap":
        return before | now
    return max(before, now) if key == "promised_over_emitted" and now is not None else now


def main() -> None:
    """Run the sections asked for and write the JSON."""
    parser = command_line("benchmarks.planner", __doc__)
    parser.add_argument("--only", default="accuracy,catalog,families,quality,speed,pools,zorse,gloo")
    parser.add_argument("--cases", type=int, default=30, help="random clusters for the comparison with brute force")
    planner_gap.add_arguments(parser, 40)
    parser.add_argument(
        "--gloo", type=Path, metavar="FILE", help="compare with these rounds of benchmarks.planner_gloo again"
    )
    parser.add_argument("--add", action="store_true", help="keep what the file holds of other sections and clusters")
    options = parser.parse_args()
    out: dict[str, Any] = {}
    if options.add and options.json.exists():
        out = json.loads(options.json.read_text())

    def known(name: str) -> list[dict[str, Any]]:
        return out.get(name, {}).get("cases", [])

    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "accuracy": accuracy,
        "quality": lambda: quality(options.cases),
        "speed": speed,
        "pools": lambda: pools(options, known("pools")),
        "nodes": lambda: pools(options, known("nodes"), ["worse_with_a_node"]),
        "zorse": zorse,
        "gloo": lambda: gloo(options.gloo),
        "hybrid": hybrid,
        **SECTIONS,
    }
    for name in options.only.split(","):
        if name not in sections:
            parser.error(f"--only: unknown section {name!r}; known: {', '.join(sections)}")
        print(name, file=sys.stderr, flush=True)
        out[name] = sections[name]()
        out["machine"] = machine()
        for key in (
            "time_error",
            "memory_error",
            "worst_gap_to_brute_force",
            "search_cpu_s",
            "bound_gap",
            "promised_over_emitted",
            *planner_gap.COUNTS,
            "plain_share",
            "gloo_time_error",
            "gloo_memory_error",
            "family_left_out_time_error",
            "family_left_out_memory_error",
            "catalog_error",
        ):
            if key in out[name]:
                out[key] = _joined(key, out.get(key), out[name][key])
        write_json(options.json, out)
    print(json.dumps({k: v for k, v in out.items() if k not in sections}, indent=2))


if __name__ == "__main__":
    main()
