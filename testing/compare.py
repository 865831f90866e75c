"""Compares a run under a plan with its reference: losses, and every gradient of the first step."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_het.features import options_of
from megatron_het.plan import Placement, Plan, Replica
from testing.runner import Device

_VOCABULARY = ("output_layer.weight", "embedding.word_embeddings.weight")
_EXPERTS = ".experts."
Arrays = dict[str, np.ndarray]
BAR = 1e-5  # bound on what differs on a CPU in fp32
# In bf16: rounding differences of sums over TP ranks and stages; tensors that are mixed up differ by
# about 1.  On a GPU: kernels of other shapes round otherwise, and a run is of other kernels than its reference.
BOUNDS: dict[Device, dict[str, dict[str, float]]] = {
    "cpu": {
        "fp32": {"loss": BAR, "validation": BAR, "gradient": BAR, "norm": BAR},
        "bf16": {"loss": 1e-3, "validation": 1e-3, "gradient": 0.05, "norm": 0.05},
        "fp16": {"loss": 1e-3, "validation": 1e-3, "gradient": 0.05, "norm": 0.05},
    },
    "cuda": {
        "fp32": {"loss": 1e-4, "validation": 1e-4, "gradient": 5e-3, "norm": 1e-3},
        "bf16": {"loss": 5e-3, "validation": 5e-3, "gradient": 0.12, "norm": 0.05},
        "fp16": {"loss": 2e-3, "validation": 2e-3, "gradient": 0.05, "norm": 0.02},
        # The same tensors are quantised alike, so what differs is what differs in bf16.  A slice or the part of a TP
        # rank has a scale of its own: two trainings are then as far apart as either of them from bf16.
        "fp8": {"loss": 5e-3, "validation": 5e-3, "gradient": 0.12, "norm": 0.05},
        "fp8 of cut tensors": {"loss": 2e-2, "validation": 2e-2, "gradient": 0.3, "norm": 0.1},
        "fp8 against bf16": {"loss": 2e-2, "validation": 2e-2, "gradient": 0.3, "norm": 0.1},
    },
}
"""Bounds on differences from one process, by device, precision and what is compared."""


class ComparisonError(AssertionError):
    """The two runs cannot be compared: something is missing or has another shape."""


@dataclass(frozen=True)
class Differences:
    """Largest relative differences of a case."""

    loss: float  # over the training steps
    validation: float  # over the evaluations
    gradient: float  # L2 norm of the difference over the L2 norm, largest over all parameters of all replicas
    worst: str  # the parameter, stage and replica with that gradient
    norm: float  # of the gradient norms of the first step, over all ranks
    later_norm: float  # of those of the later steps, to which rounding adds up


def failures(entries: Sequence[Mapping[str, Any]], device: Device = "cpu") -> list[str]:
    """Names of the entries of :func:`benchmarks.parity.measure` that are not within the bounds of a device."""
    found = []
    for entry in entries:
        for name, bound in BOUNDS[device][entry["chosen"]["precision"]].items():
            value = entry.get(f"relative_{name}_difference")
            # A gradient that is used up when the iteration ends is not compared: NaN, which is within no bound.
            if name != "loss" and value is not None and math.isnan(value):
                continue
            if value is None or not value <= bound:
                found.append(entry["name"])
                break
    return found


def reference_losses(folder: Path) -> dict[str, list[float]]:
    """Returns the losses that the probe of a one-process run wrote."""
    return json.loads((folder / "losses-0.json").read_text(encoding="utf-8"))


def norm_differences(folder: Path, plan: Plan, reference: Path, steps: int | None = None) -> tuple[float, float]:
    """Relative differences of the first step's gradient norm and of later ones, NaN without clipping.

    Raises:
        ComparisonError: Ranks have different norms, or one of the two runs skipped a step that the other made.
    """
    expected = json.loads((reference / "norms-0.json").read_text(encoding="utf-8"))[:steps]
    found = [json.loads((folder / f"norms-{r}.json").read_text(encoding="utf-8")) for r in range(plan.world_size)]
    if any(norms != found[0] for norms in found):
        raise ComparisonError(f"{folder}: ranks know different gradient norms")
    if [n is None for n in found[0]] != [n is None for n in expected]:
        raise ComparisonError(f"{folder}: other steps are skipped: {found[0]}, expected {expected}")
    # Without clipping Megatron says 0 and does not compute it.
    pairs = [(a, b) for a, b in zip(found[0], expected, strict=True) if a is not None and (a or b)]
    if not pairs:
        return float("nan"), float("nan")
    (first, wanted), *later = pairs
    rest = relative([a for a, _ in later], [b for _, b in later], "gradient norms") if later else 0.0
    return relative([first], [wanted], "gradient norm"), rest


def reported_losses(folder: Path) -> dict[int, float]:
    """Returns the losses by iteration from ``--het-report``; all ranks that know one must report the same."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("rank-*.json")]
    known = [(iteration, loss) for report in reports for iteration, loss in report["losses"]]
    found = dict(known)
    assert all(found[iteration] == loss for iteration, loss in known), f"{folder}: ranks report other losses"
    return found


def plan_losses(folder: Path, plan: Plan) -> dict[str, list[float]]:
    """Losses from ``--het-report``; all ranks of the stage with the loss must report the same."""
    found: dict[str, list[float]] = {}
    for replica in plan.stages[plan.path[-1][0]].replicas:
        for rank in replica.ranks:
            report = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
            mine = {k: [loss for _, loss in report[k]] for k in ("losses", "validation")}
            if found and mine != found:
                raise ComparisonError(f"{folder}: rank {rank} reports other losses than a peer")
            found = mine
    return found


def relative(values: Sequence[float], expected: Sequence[float], what: str) -> float:
    """The largest relative difference of two sequences of equal length."""
    if len(values) != len(expected) or not expected:
        raise ComparisonError(f"{what}: {len(values)} values, expected {len(expected)}")
    worst = max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))
    if not np.isfinite(worst):
        raise ComparisonError(f"{what}: not finite: {list(values)}")
    return worst


def whole_gradients(folder: Path, plan: Plan, stage: int, replica: Replica) -> Iterator[Arrays]:
    """Yields the full gradients of everything that a replica has, part by part."""
    cut, held = replica.cut, set(replica.ranks)
    for c in range(replica.cp):
        found = gathered(folder, replica.tp_group(c))
        yield found if cut.divides_alike else {n: array for n, array in found.items() if _EXPERTS not in n}
    for group in [] if cut.divides_alike else Placement(plan).expert_groups(stage, cut):
        if held & set(group):
            yield {n: array for n, array in gathered(folder, group).items() if _EXPERTS in n}


def gathered(folder: Path, ranks: Sequence[int]) -> Arrays:
    """The full gradients of some ranks, put together from their shards: a TP group, or an expert group."""
    shards = [dict(np.load(folder / f"gradients-{rank}.npz")) for rank in ranks]
    dims: dict[str, tuple[int, list[int]]] = {}
    for rank in ranks:
        dims.update(json.loads((folder / f"gradients-{rank}.json").read_text(encoding="utf-8")))
    full: Arrays = {}
    for name, (dim, sizes) in dims.items():
        # An expert is on some of the ranks, everything else on all of them.
        parts = [shard[name] for shard in shards if name in shard or _EXPERTS not in name]
        if dim < 0:
            if any(not np.array_equal(part, parts[0]) for part in parts):
                raise ComparisonError(f"{name}: TP ranks {list(ranks)} hold different gradients")
            full[name] = parts[0]
        else:  # a gated weight is [gate, up] in full and [gate_t, up_t] on TP rank t: two blocks
            ends = np.cumsum(sizes)[:-1] * parts[0].shape[dim] // sum(sizes)
            blocks = [np.split(part, ends, axis=dim) for part in parts]
            full[name] = np.concatenate([b[i] for i in range(len(sizes)) for b in blocks], axis=dim)
    return full


def compare_gradients(folder: Path, plan: Plan, reference: Arrays) -> tuple[float, str]:
    """The largest relative L2 difference over all parameters of all replicas, and where it is."""
    worst, where, seen = -1.0, "", set()
    splits = options_of(plan, "vocabulary") is not None
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            parts = whole_gradients(folder, plan, s, replica)
            for name, gradient in (item for part in parts for item in part.items()):
                expected = reference[name]
                if splits and name in _VOCABULARY:  # everything else is never split over stages
                    expected = np.split(expected, len(plan.stages))[s]
                if gradient.shape != expected.shape:
                    raise ComparisonError(f"{name}: {gradient.shape}, expected {expected.shape}")
                norm = float(np.linalg.norm(expected.astype(np.float64)))
                difference = np.linalg.norm(gradient.astype(np.float64) - expected)
                if not norm > 0 or not np.isfinite(difference):
                    raise ComparisonError(f"{name}: norm {norm}, difference {difference}")
                seen.add(name)
                if difference / norm > worst:
                    worst, where = float(difference / norm), f"{name} (stage {s}, replica {q})"
    missing = sorted(set(reference) - seen)
    if missing:
        raise ComparisonError(f"no stage has the parameters {missing}")
    return worst, where


def compare(
    folder: Path, plan: Plan, reference: Path, *, gradients: bool = True, steps: int | None = None
) -> Differences:
    """Compare the folder of a case with the folder of its reference.

    Args:
        folder: Of the case.
        plan: Of the case.
        reference: Folder of the reference.
        gradients: Whether the case has kept its gradients; without, their difference is NaN.
        steps: Number of steps of the case, if the reference made more.
    """
    expected, found = reference_losses(reference), plan_losses(folder, plan)
    if steps is not None:
        every = len(expected["losses"]) // 2  # the interval of evaluations; the last one comes after training
        expected = {"losses": expected["losses"][:steps], "validation": expected["validation"][: steps // every]}
    gradient, worst = float("nan"), "not kept"
    if gradients:
        gradient, worst = compare_gradients(folder, plan, gathered(reference, [0]))
    norm, later_norm = norm_differences(folder, plan, reference, steps)
    return Differences(
        relative(found["losses"], expected["losses"], "losses"),
        relative(found["validation"], expected["validation"], "validation"),
        gradient,
        worst,
        norm,
        later_norm,
    )
