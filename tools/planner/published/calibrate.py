"""Fits the few software constants of the catalog's cost model to published runs, also with whole families left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

from ..costs.runtime import MEGATRON, Runtime
from .published import LLM_FOUNDRY, PublishedRun, predict_s

KERNELS = "kernels."
MPT_CONSTANTS = ("kernels.gemm", "kernels.attention", "kernels.elementwise", "iteration_s")
DENSE_CONSTANTS = ("kernels.gemm", "kernels.elementwise", "tp_overlap")
MOE_CONSTANTS = ("kernels.dispatch", "kernels.dropless_launches")

PRIOR_SPREAD = 0.5
"""A constant may move by a factor of e^0.5 before that costs as much as an error of ``PRIOR_WEIGHT`` in 20 runs."""
PRIOR_WEIGHT = 0.03


def constants_of(runtime: Runtime, names: Sequence[str]) -> dict[str, float]:
    """Values by name."""
    return {
        n: getattr(runtime.kernels, n.removeprefix(KERNELS)) if n.startswith(KERNELS) else getattr(runtime, n)
        for n in names
    }


def with_constants(runtime: Runtime, values: dict[str, float]) -> Runtime:
    """A runtime with these constants."""
    kernels: dict[str, Any] = {n.removeprefix(KERNELS): v for n, v in values.items() if n.startswith(KERNELS)}
    own: dict[str, Any] = {n: v for n, v in values.items() if not n.startswith(KERNELS)}
    return replace(runtime, kernels=replace(runtime.kernels, **kernels), **own)


def relative_errors(runs: Sequence[PublishedRun], runtime: Runtime) -> list[float]:
    """Predicted over measured time, less one."""
    return [predict_s(run, runtime) / run.measured_s - 1 for run in runs]


def fit(runs: Sequence[PublishedRun], runtime: Runtime, names: Sequence[str], scale: float) -> Runtime:
    """Constants that fit the runs best (robust least squares of log ratios, weak priors at the given values).

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
    """All constants of one training system: for Megatron those of dense layers first, then those of experts.

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
    """Every run with its relative error under constants fitted without the runs of its family.

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
