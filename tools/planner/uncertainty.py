"""How far predictions were off on published runs of each kind, with whole families left out: what reports print.

``python -m benchmarks.planner`` measures these figures (``benchmarks/results/planner_accuracy.json``).
"""

from __future__ import annotations

from collections.abc import Collection

from .model import Model

PROFILE_ERROR = 0.05
"""From a profile of the same model and GPUs."""
WHOLE_ERROR = 0.03
"""Catalog, dense models, each layer whole on one GPU."""
DIVIDED_ERROR = 0.08
"""Catalog, dense models, stages, TP or context parallelism."""
EXPERTS_ERROR = 0.23
"""Catalog, mixture of experts."""
OTHER_GPU_ERROR = 0.20
"""Catalog, GPUs of which no runs are published: as layer times of six such kinds."""
COMPARED_GPUS = frozenset({"A100-40", "A100-80", "H100-SXM", "H200", "B200", "GB200", "GB300"})
"""GPUs with published runs, and their variants with another memory."""


def catalog_uncertainty(model: Model, gpus: Collection[str], divided: bool) -> float:
    """Relative error of times that was seen for plans of this kind.

    Args:
        gpus: Kinds in use.
        divided: Whether layers are divided over stages, TP, context or expert parallelism.
    """
    error = DIVIDED_ERROR if divided else WHOLE_ERROR
    if model.experts is not None:
        error = EXPERTS_ERROR
    if model.precision not in ("bf16", "fp16") or not COMPARED_GPUS.issuperset(gpus):
        error = max(error, OTHER_GPU_ERROR)
    return error
