"""Plans for long contexts and for experts, with and without the search's last step (the choices).

    python -m benchmarks.planner_long --json OUT [--cases 128k,512k,1M,mixtral-h100-a100,mixtral-a100-l40s]

Per case: seconds and MFU of the plan of the search alone (``before``) and with all choices (``after``), the plan in
words, and ``promised_over_emitted``, the predicted time over the simulated time of the written plan.
"""

import time
from typing import Any

from benchmarks.machine import command_line, machine
from testing.planner_cases import LLAMA_8B, LLAMA_70B, cluster_of, estimator_of, model_of, read_back
from tools.planner.costs.build import build_plan
from tools.planner.costs.estimate import Estimator
from tools.planner.inputs.cluster import Cluster
from tools.planner.inputs.files import write_json
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts
from tools.planner.report.tables import describe, summary
from tools.planner.search.auto import search_auto
from tools.planner.search.methods import choose
from tools.planner.search.outcome import Found, Goal, Progress

_SHARED: dict[str, Any] = {"distributed_optimizer": True}
MIXTRAL = model_of(
    **LLAMA_8B, layers=32, tokens=4096, batch=256, experts=Experts(count=8, top_k=2, ffn_hidden_size=14336), **_SHARED
)


def _long(tokens: int, batch: int) -> tuple[Cluster, Model]:
    cluster = cluster_of(("H100-SXM", 8, 8, 400e9), ("H200", 4, 8, 400e9))
    shape: dict[str, Any] = {**LLAMA_70B, **_SHARED, "sequence_parallel": True}
    return cluster, model_of(**shape, layers=80, words=128256, tokens=tokens, batch=batch)


CASES: dict[str, tuple[Cluster, Model]] = {
    "128k": _long(131072, 32),
    "512k": _long(524288, 8),
    "1M": _long(1048576, 4),
    "mixtral-h100-a100": (cluster_of(("H100-SXM", 2, 8, 50e9), ("A100-80", 4, 8, 25e9)), MIXTRAL),
    "mixtral-a100-l40s": (cluster_of(("A100-40", 4, 8, 25e9), ("L40S", 8, 4, 12.5e9)), MIXTRAL),
}


def case(name: str) -> dict[str, Any]:
    """Plan one case."""
    estimator, goal, progress = estimator_of(*CASES[name]), Goal(), Progress()
    started = time.process_time()
    outcome = search_auto(estimator, goal, progress)
    row: dict[str, Any] = {"search_cpu_s": time.process_time() - started}
    row["before"] = None if outcome.best is None else _plan(estimator, outcome.best)
    started = time.process_time()
    choose(estimator, goal, progress, outcome)
    row["choices_cpu_s"] = time.process_time() - started
    best = outcome.best
    if best is None:
        return {**row, "after": None}
    _, emitted_s = read_back(estimator, build_plan(estimator, best.candidate, best.estimate))
    return {**row, "after": _plan(estimator, best), "promised_over_emitted": best.iteration_s / emitted_s}


def _plan(estimator: Estimator, found: Found) -> dict[str, Any]:
    c = found.candidate
    body = summary(estimator, c, found.estimate, found.simulated_s)
    host = max(m.host_bytes for m in found.estimate.memory)
    return {
        "plan": describe(estimator, c),
        "iteration_s": found.iteration_s,
        "model_flops_utilisation": body["model_flops_utilisation"],
        "fullest": found.estimate.fullest,
        "host_bytes_per_gpu": host,
        "recompute": c.recompute,
    }


def main() -> None:
    """Command line."""
    parser = command_line("benchmarks.planner_long", __doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="which cases (default: all)")
    options = parser.parse_args()
    unknown = [name for name in options.cases.split(",") if name not in CASES]
    if unknown:
        parser.error(f"--cases: unknown {', '.join(unknown)}; there are {', '.join(CASES)}")
    found = {name: case(name) for name in options.cases.split(",")}
    write_json(options.json, {"machine": machine(), "cases": found})
    for name, row in found.items():
        print(name, row["before"], row["after"])


if __name__ == "__main__":
    main()
