"""How far predictions were off on published runs of each kind, with whole families left out: what reports print.

``python -m benchmarks.planner_accuracy`` measures these figures (``benchmarks/results/planner_accuracy.json``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..inputs.model import Model


class Uncertainty(NamedTuple):
    """Relative error that four of five predictions of a kind stay within.

    Attributes:
        error: The error.
        runs: How many measured runs it was found on, each predicted with constants that its family has no part in.
        of: What those runs were.
    """

    error: float
    runs: int
    of: str

    def __str__(self) -> str:
        return f"+-{100 * self.error:.0f} %, from {self.runs} {self.of}"


PROFILED = Uncertainty(0.05, 14, "runs with a profile")
"""From a profile of the same model and GPUs."""
DENSE = Uncertainty(0.07, 88, "runs of dense models")
"""Catalog, dense models."""
EXPERTS = Uncertainty(0.27, 26, "runs with experts")
"""Catalog, mixture of experts."""
OTHER_GPU = Uncertainty(0.25, 11, "sets of layer times")
"""Catalog, GPUs or precisions of which no runs are published, and layers without Transformer Engine."""
COMPARED_GPUS = frozenset({"A100-40", "A100-80", "H100-SXM", "H200", "B200", "GB200", "GB300"})
"""GPUs with published runs, and their variants with another memory."""


def catalog_uncertainty(model: Model, gpus: Collection[str], fitted: bool = True) -> Uncertainty:
    """Relative error of times that was seen for plans of this kind.

    Args:
        gpus: Kinds in use.
        fitted: Whether the runtime's kernels are those of published runs.
    """
    found = DENSE if model.experts is None else EXPERTS
    if not fitted or model.precision not in ("bf16", "fp16") or not COMPARED_GPUS.issuperset(gpus):
        found = max(found, OTHER_GPU)
    return found
