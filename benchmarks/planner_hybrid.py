"""Gain of cuts inside of layers over whole layers: three mixed clusters, simulated, and two cores of this machine.

The section ``hybrid`` of ``benchmarks.planner``.  Every model is planned twice: as a GPTModel, whose stages have whole
layers, and as the equal hybrid model, whose stages begin at attention or at the MLP or experts after it.
"""

import sys
from typing import Any

from benchmarks.planner_gloo import CASES, measure
from megatron_het.plan.schema import ATTENTION, EXPERTS, MLP
from testing.planner_cases import LLAMA_8B, LLAMA_70B, cluster_of, model_of, with_catalog, zorse_cluster
from tools.planner.costs.candidate import Candidate, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.simulation import block_s
from tools.planner.inputs.cluster import Cluster
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts
from tools.planner.report.tables import describe
from tools.planner.search.methods import search
from tools.planner.search.outcome import Goal, Progress

ROUNDS = 3
SEARCH_S = 30.0  # CPU seconds of a search
_COMMON: dict[str, Any] = {"batch": 64, "distributed_optimizer": True}
LLAMA_70 = model_of(name="Llama 70B", **LLAMA_70B, layers=80, words=128256, tokens=8192, **_COMMON)
_EXPERTS = Experts(count=8, top_k=2, ffn_hidden_size=14336)
MIXTRAL = model_of(name="Mixtral 8x7B", **LLAMA_8B, layers=32, tokens=4096, experts=_EXPERTS, **_COMMON)
LLAMA_13B = model_of(name="Llama 13B", layers=40, hidden=5120, ffn=13824, heads=40, **_COMMON)


def clusters() -> dict[str, tuple[Cluster, Model]]:
    """Returns mixed clusters and their models."""
    return {
        "16 H100, 16 A100-80: Llama 70B": (cluster_of(("H100-SXM", 2, 8, 50e9), ("A100-80", 2, 8, 50e9)), LLAMA_70),
        "8 H100, 16 A100-40: Mixtral 8x7B": (cluster_of(("H100-SXM", 1, 8, 50e9), ("A100-40", 2, 8, 50e9)), MIXTRAL),
        "Zorse's cluster B: Llama 13B": (zorse_cluster("B")[0], LLAMA_13B),
    }


def hybrid_twin(model: Model) -> Model:
    """Returns the hybrid model that is equal to a GPTModel of equal layers."""
    layer = ATTENTION + (MLP if model.experts is None else EXPERTS)
    values = {name: getattr(model, name) for name in Model.model_fields}
    values |= {"name": f"{model.name}, hybrid", "pattern": layer * model.num_layers, "num_layers": 2 * model.num_layers}
    return Model(**values)


def _simulated_s(estimator: Estimator, candidate: Candidate) -> float:
    estimator = estimator.running(candidate.gpus())
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    return block_s(estimator, candidate, estimate)


def simulated(name: str, cluster: Cluster, model: Model) -> dict[str, Any]:
    """Returns the best plans with whole layers and with parts of layers."""
    whole = search("auto", with_catalog(cluster, model), Goal(), Progress(SEARCH_S), robust=False)
    estimator = with_catalog(cluster, hybrid_twin(model))
    parts = search("auto", estimator, Goal(), Progress(SEARCH_S), robust=False)
    assert whole.best is not None and parts.best is not None
    # Plans with whole layers are plans of the hybrid twin, too.
    alike = tuple(Stage(2 * stage.layers, stage.groups) for stage in whole.best.candidate.stages)
    twins = [whole.best.candidate.with_(stages=alike), parts.best.candidate]
    inside_s, best = min((_simulated_s(estimator, twin), i) for i, twin in enumerate(twins))
    found: dict[str, Any] = {
        "case": name,
        "whole_layers_s": whole.best.iteration_s,
        "inside_layers_s": inside_s,
        "gain": whole.best.iteration_s / inside_s - 1,
        "whole_plan": describe(estimator, twins[0]),
        "plan": describe(estimator, twins[best]),
        "cpu_s": whole.cpu_s + parts.cpu_s,
    }
    print(
        f"  {name}: {whole.best.iteration_s:.4f} s, {inside_s:.4f} s, gain {100 * found['gain']:.1f} %",
        file=sys.stderr,
        flush=True,
    )
    return found


def two_cores() -> dict[str, Any]:
    """Measure on two cores: predicted and measured gain of the best plan over the best one with whole layers."""
    case = CASES["hybrid"]
    found = measure(case, ROUNDS)
    rows = [
        row | {"whole": all(stage.layers % 2 == 0 for stage in plan.stages)}
        for plan, row in zip(case.plans, found["runs"], strict=True)
    ]
    gains: dict[str, Any] = {}
    for name in ("predicted_s", "measured_s"):
        whole, inside = (min(row[name] for row in rows if row["whole"] is is_whole) for is_whole in (True, False))
        gains[f"gain_{name.removesuffix('_s')}"] = whole / inside - 1
    return gains | {"time_error": found["time_error"], "runs": rows}


def hybrid() -> dict[str, Any]:
    """Measure the simulated clusters and the two cores."""
    rows = [simulated(name, cluster, model) for name, (cluster, model) in clusters().items()]
    return {"cases": rows, "two_cores": two_cores()}
