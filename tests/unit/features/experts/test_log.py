"""The log of balancing losses has one length on all ranks, whose sum would never end otherwise."""

import pytest
import torch

from megatron_het import device as platform

platform.activate()

from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # noqa: E402

from megatron_het.features.experts import runtime  # noqa: E402
from megatron_het.features.experts.runtime import Passes  # noqa: E402
from megatron_het.plan import Cut  # noqa: E402


def test_a_rank_without_experts_sums_a_log_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    monkeypatch.setattr(runtime.dist, "all_reduce", lambda values: summed.append(values.numel()))
    feature = runtime.Experts(Cut(1), Passes(2), 5, whole=False)
    tracker = get_moe_metrics_tracker()
    try:
        tracker.ensure_initialized("of none", 2, "cpu")  # a hybrid model's number of layers of experts
        tracker.record("of one", torch.tensor(1.0), 4, 5)
        tracker.record("mean over the tokens of a slice", torch.tensor(1.0), 4, 5, avg_group=object())
        feature._sync(["of none", "of one", "unknown", "mean over the tokens of a slice"])
        assert summed == [5, 5, 5]
        assert tracker.metrics["mean over the tokens of a slice"].values.tolist() == [0.0, 0.0, 0.0, 0.5, 0.0]
        assert tracker.metrics["of none"].values.tolist() == [0.0] * 5
        assert tracker.metrics["of one"].values.tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    finally:
        feature.close()
