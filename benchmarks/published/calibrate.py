"""Fits the few software constants of the catalog's cost model to published runs, also with whole families left out."""

import csv
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import combinations
from math import exp, log
from typing import Any

import yaml

from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import estimator_of
from tools.planner.costs.layer import MEGATRON, MEGATRON_HET, Kernels, Runtime
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts

# Published training runs without profiles (``data/*_runs.csv``), and what the catalog predicts for them.
#
# Sources: training benchmarks of mosaicml/llm-foundry (``mpt_fsdp_runs.csv``), performance summaries of
# NVIDIA-NeMo/Megatron-Bridge (``megatron_bridge_runs.csv``), step times of NVIDIA/dgxc-benchmarking
# (``dgxc_h100_runs.csv``), all Apache-2.0, figures only; and runs of this project on one GPU (``own_h200_runs.csv``).

Row = Mapping[str, str]

TABLES = {
    "mpt": "mpt_fsdp_runs.csv",
    "bridge": "megatron_bridge_runs.csv",
    "dgxc": "dgxc_h100_runs.csv",
    "own": "own_h200_runs.csv",
}
OWN_GPUS = {"dgxc": "H100-SXM", "own": "H200"}
_DATA: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("data/runs.yaml").read_text("utf-8"))
# Names, nodes and shapes that the tables do not have; the file explains each.
ALIASES: dict[str, str] = _DATA["aliases"]
MPT_GPUS: dict[str, tuple[str, float]] = {name: tuple(row) for name, row in _DATA["mpt_gpus"].items()}
BRIDGE_NODES: dict[str, tuple[str, int, float]] = {name: tuple(row) for name, row in _DATA["bridge_nodes"].items()}
SHAPES: dict[str, dict[str, Any]] = _DATA["shapes"]

LLM_FOUNDRY = Runtime(
    name="LLM Foundry (PyTorch FSDP)",
    kernels=Kernels(
        gemm=0.98,
        newest_attention=False,
        attention=0.68,
        backward_attention=1.5,
        elementwise=1.81,
        gradient_bytes=2.0,  # a pass has gradients of its own, which are reduced after it
    ),
    gather_overlap=0.0,
    iteration_s=0.034,
)
"""Gathers and reductions of a pass show in full: FSDP starts them after the pass before it (no forward prefetch)."""

CAPTURED = ("GB200", "GB300")
"""GPUs on which the vendor's runs capture CUDA graphs, so that no run waits for the host to read tokens per expert."""

EXPERTS_2026: dict[str, Any] = {
    "dropless_launches": 0.0,
    "expert_launches": 40.0,
    "dispatch": 8.0,
    "expert_quantize_bytes": 4.0,
}
"""Constants of experts for releases from 2026 on, which do not wait for the host and fuse sorting and casts of tokens.

Chosen, not fitted: the tables end in 2025.
"""


SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")
_COLUMNS = ("layers", "hidden", "ffn", "heads", "groups", "vocab")


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A row of a table of published runs."""

    source: str  # ``mpt``, ``bridge``, ``dgxc`` or ``own``
    row: Row  # its columns
    measured_s: float  # measured time of an iteration

    @property
    def model(self) -> str:
        """Name of the model, in one spelling for all tables."""
        return ALIASES.get(self.row["model"], self.row["model"])

    @property
    def gpu(self) -> str:
        """Kind of GPU, in one spelling for all tables."""
        return {"mpt": lambda: self.row["gpu"], "bridge": lambda: BRIDGE_NODES[self.row["system"]][0]}.get(
            self.source, lambda: OWN_GPUS[self.source]
        )()

    @property
    def scale(self) -> str:
        """The class of the number of GPUs."""
        gpus = int(self.row["gpus"])
        return "to 16 GPUs" if gpus <= 16 else "to 128 GPUs" if gpus <= 128 else "more GPUs"

    @property
    def kind(self) -> str:
        """``dense`` or ``moe``."""
        return "moe" if SHAPES.get(self.row["model"], {}).get("experts") else "dense"


def read_runs(source: str, path: str | os.PathLike[str] | None = None) -> list[PublishedRun]:
    """Returns the rows of a table.

    Args:
        source: A key of ``TABLES``.
        path: Another file with the same columns.
    """
    if path is None:
        text = resources.files(__package__).joinpath(f"data/{TABLES[source]}").read_text("utf-8")
    else:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    out = []
    for row in csv.DictReader(text.splitlines()):
        if source != "bridge":
            seconds = float(row["iteration_s"])
        else:
            tokens = int(row["global_batch_size"]) * int(row["seq_length"])
            seconds = tokens / (float(row["tokens_per_s_per_gpu"]) * int(row["gpus"]))
        out.append(PublishedRun(source, row, seconds))
    return out


def runtime_of(source: str) -> Runtime:
    """Returns the training system of a table's runs."""
    return {"mpt": LLM_FOUNDRY, "own": MEGATRON_HET}.get(source, MEGATRON)


def mpt_s(row: Row, runtime: Runtime = LLM_FOUNDRY) -> float:
    """Predicts a run of LLM Foundry: one stage, ZeRO-3 over all GPUs, equal microbatches."""
    gpu, network = MPT_GPUS[row["gpu"]]
    gpus, hidden = int(row["gpus"]), int(row["hidden_size"])
    model = Model(
        name=row["model"],
        num_layers=int(row["num_layers"]),
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=int(row["num_attention_heads"]),
        vocab_size=50368,
        seq_length=int(row["seq_length"]),
        learned_positions=int(row["seq_length"]),
        global_batch_size=int(row["global_batch_size"]),
        gated=False,
        biases=True,
        tied_embeddings=True,
        distributed_optimizer=True,
    )
    per_node = min(8, gpus)
    node = NodeGroup(gpu=gpu, count=gpus // per_node, gpus_per_node=per_node, network_bytes_per_s=network)
    stage, batch = Stage(model.num_layers, (Group(0, 1, gpus),)), int(row["micro_batch_size"])
    candidate = Candidate((stage,), batch, row["recompute"], zero_stage=3, even=True)
    return _estimate(Cluster(nodes=(node,)), model, candidate, runtime)


def bridge_s(row: Row, runtime: Runtime = MEGATRON) -> float:
    """Predicts a run of Megatron-Bridge."""
    gpu, domain, network = BRIDGE_NODES[row["system"]]
    kernels = runtime.kernels
    if float(row["release"]) >= 26:
        kernels = replace(kernels, **EXPERTS_2026)
    if gpu in CAPTURED:
        kernels = replace(kernels, dropless_launches=0.0)
    return _stages_s(row, bridge_model(row), (gpu, domain, network), replace(runtime, kernels=kernels))


def dgxc_s(row: Row, runtime: Runtime = MEGATRON) -> float:
    """Predicts a run on DGX H100."""
    return _stages_s(row, dgxc_model(row), BRIDGE_NODES["DGX-H100"], runtime)


def own_s(row: Row, runtime: Runtime = MEGATRON_HET) -> float:
    """Predicts a run of this project on an H200, with the attention kernel of the run."""
    kernels = replace(runtime.kernels, newest_attention=row["attention"] == "cudnn")
    return _stages_s(row, dgxc_model(row), (OWN_GPUS["own"], 8, 50e9), replace(runtime, kernels=kernels))


def _stages_s(row: Row, model: Model, nodes: tuple[str, int, float], runtime: Runtime) -> float:
    """Predicts stages of equal layers, interleaved if there are virtual stages, or in slices."""
    gpu, domain, network = nodes
    gpus, tp, pp, cp, ep = (int(row.get(k, 1)) for k in ("gpus", "tp", "pp", "cp", "ep"))
    per_node = min(domain, gpus)
    node = NodeGroup(
        gpu=gpu, count=-(-gpus // per_node), gpus_per_node=per_node, network_bytes_per_s=network * per_node
    )
    replicas = gpus // (tp * pp * cp)
    layers = [model.num_layers // pp + (s < model.num_layers % pp) for s in range(pp)]
    chunks = int(row["vp"]) if pp > 1 else 1
    candidate = Candidate(
        tuple(Stage(n, (Group(0, tp, replicas),)) for n in reversed(layers)),
        int(row["micro_batch_size"]),
        schedule=row.get("schedule") or ("interleaved" if chunks > 1 else "1f1b"),
        chunks=chunks,
        slices=int(row.get("slices", 1)),
        zero_stage=3 if int(row.get("fsdp", 0)) else 1,
        even=True,
        cp=cp,
        ep=ep,
        across_replicas=True,
    )
    return _estimate(Cluster(nodes=(node,)), model, candidate, runtime, fitting=True)


def bridge_model(row: Row) -> Model:
    """Returns the model of a row, with its precision and routing."""
    fields = dict(SHAPES[row["model"]])
    sizes = dict(zip(SIZES, fields.pop("shape"), strict=True))
    sizes["num_layers"] += "w/ MTP" in row["note"]
    experts = fields.pop("experts", None)
    if experts is not None:
        experts = Experts(**experts, dropless="tokendrop" not in row["note"])
    return _model(row, **sizes, fp4=row["precision"].startswith(("FP4", "NVFP4")), experts=experts, **fields)


def dgxc_model(row: Row) -> Model:
    """Returns the model of a row that contains all its dimensions."""
    sizes: dict[str, Any] = {size: int(row[name]) for size, name in zip(SIZES, _COLUMNS, strict=True)}
    return _model(row, **sizes, gated=row["gated"] == "1")


def _model(row: Row, **fields: Any) -> Model:
    """Returns the model of a row with some fields of its own."""
    return Model(
        name=row["model"],
        seq_length=int(row["seq_length"]),
        global_batch_size=int(row["global_batch_size"]),
        fp8=row["precision"].startswith(("FP8", "MXFP8")),
        sequence_parallel=int(row["tp"]) > 1,
        distributed_optimizer=True,
        **fields,
    )


def _estimate(cluster: Cluster, model: Model, candidate: Candidate, runtime: Runtime, fitting: bool = False) -> float:
    """Returns the iteration time by the planner's closed form.

    Args:
        fitting: If activations do not fit, use the fastest recomputation that fits: parts of all layers (Megatron's
            ``--recompute-modules``), or as many whole layers as necessary (``--recompute-method block``).
    """
    estimator = estimator_of(cluster, model, None, runtime)
    estimator.writes_plans = False  # a foreign run, which is only priced
    found = estimator.estimate(candidate)
    if found is None:
        raise ValueError(f"{model.name}: the batch of {model.global_batch_size} does not divide over {candidate}")
    if not fitting or estimator.fits(found):
        return found.iteration_s
    chosen = [" ".join(names) for n in (1, 2, 3) for names in combinations(("moe_act", "mla_up_proj", "mlp"), n)]
    less, *parts = [estimator.estimate(candidate.with_(recompute=name)) for name in ("full", *chosen)]
    assert less is not None
    share = 0.0
    for a, b in zip(found.memory, less.memory):
        over = a.total_bytes - estimator.memory_margin * a.capacity_bytes
        saved = a.total_bytes - b.total_bytes
        share = max(share, min(1.0, over / saved) if saved > 0 else 1.0)
    of_layers = found.iteration_s + share * (less.iteration_s - found.iteration_s)
    return min([of_layers, *(part.iteration_s for part in parts if part is not None and estimator.fits(part))])


KERNELS = "kernels."
MPT_CONSTANTS = ("kernels.gemm", "kernels.attention", "kernels.elementwise", "iteration_s")
DENSE_CONSTANTS = ("kernels.gemm", "kernels.elementwise", "tp_overlap")
MOE_CONSTANTS = ("kernels.dispatch", "kernels.dropless_launches")

PRIOR_SPREAD = 0.5
"""Width of the prior: moving a constant by e^0.5 costs as much as an error of ``PRIOR_WEIGHT`` in 20 runs."""
PRIOR_WEIGHT = 0.03


def constants_of(runtime: Runtime, names: Sequence[str]) -> dict[str, float]:
    """Returns the constants' values by name."""
    return {
        n: getattr(runtime.kernels, n.removeprefix(KERNELS)) if n.startswith(KERNELS) else getattr(runtime, n)
        for n in names
    }


def with_constants(runtime: Runtime, values: dict[str, float]) -> Runtime:
    """Returns a runtime with these constants."""
    kernels: dict[str, Any] = {n.removeprefix(KERNELS): v for n, v in values.items() if n.startswith(KERNELS)}
    own: dict[str, Any] = {n: v for n, v in values.items() if not n.startswith(KERNELS)}
    return replace(runtime, kernels=replace(runtime.kernels, **kernels), **own)


def relative_errors(runs: Sequence[PublishedRun], runtime: Runtime) -> list[float]:
    """Returns predicted over measured time, minus one."""
    predict = {"mpt": mpt_s, "bridge": bridge_s, "dgxc": dgxc_s, "own": own_s}  # by the planner's closed form
    return [predict[run.source](run.row, runtime) / run.measured_s - 1 for run in runs]


def fit(runs: Sequence[PublishedRun], runtime: Runtime, names: Sequence[str], scale: float) -> Runtime:
    """Returns the constants that fit best (robust least squares of log ratios, weak priors at the given values).

    Runs of one model, GPU and precision count together as the square root of their number: most of them differ in the
    number of replicas only.

    Args:
        scale: Errors well beyond it count linearly, not squared.
    """
    from scipy.optimize import least_squares

    start = [log(v) for v in constants_of(runtime, names).values()]
    alike = Counter(_setting(run) for run in runs)
    weights = [alike[_setting(run)] ** -0.25 for run in runs]
    weight = PRIOR_WEIGHT * (len(runs) / 20) ** 0.5 / PRIOR_SPREAD

    def residuals(point: Sequence[float]) -> list[float]:
        tried = with_constants(runtime, {n: exp(p) for n, p in zip(names, point)})
        off = [w * log(1 + e) for w, e in zip(weights, relative_errors(runs, tried))]
        return off + [weight * (p - p0) for p, p0 in zip(point, start)]

    found = least_squares(residuals, start, loss="soft_l1", f_scale=scale, diff_step=1e-3, max_nfev=12)
    return with_constants(runtime, {n: exp(p) for n, p in zip(names, found.x)})


def _setting(run: PublishedRun) -> tuple[str, ...]:
    return run.source, run.model, run.gpu, run.row.get("precision", "")


def fit_all(runs: Sequence[PublishedRun]) -> Runtime:
    """Fit all constants of one training system: for Megatron those of dense layers first, then those of experts.

    The runs of one GPU of this project (``own``) are fitted with no constant.
    """
    if runs[0].source == "mpt":
        return fit(runs, LLM_FOUNDRY, MPT_CONSTANTS, 0.03)
    runtime = MEGATRON
    dense, moe = ([r for r in runs if r.kind == k and r.source != "own"] for k in ("dense", "moe"))
    if dense:
        runtime = fit(dense, runtime, DENSE_CONSTANTS, 0.05)
    return fit(moe, runtime, MOE_CONSTANTS, 0.15) if moe else runtime


FAMILIES = ("model", "gpu", "scale")


def left_out(runs: Sequence[PublishedRun], by: str) -> list[tuple[PublishedRun, float]]:
    """Returns every run with its relative error under constants fitted without the runs of its family.

    Args:
        by: One of ``FAMILIES``.
    """
    out = []
    for name in sorted({getattr(r, by) for r in runs}):
        rest = [r for r in runs if getattr(r, by) != name]
        family = [r for r in runs if getattr(r, by) == name]
        found = fit_all(rest)
        out += [(r, e) for r in family for e in relative_errors([r], found)]
    return out
