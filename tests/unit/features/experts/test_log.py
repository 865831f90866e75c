"""The log of balancing losses has one length on all ranks, whose sum would never end otherwise."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het import device as platform

platform.activate()

from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # noqa: E402

from megatron_het.features.experts import runtime  # noqa: E402
from megatron_het.features.experts.runtime import Passes  # noqa: E402
from megatron_het.lowering.ranks import RankOp  # noqa: E402
from megatron_het.plan import Cut  # noqa: E402
from megatron_het.runtime.data import Batches  # noqa: E402
from megatron_het.schedule.kinds import Kind  # noqa: E402


def test_a_rank_without_experts_sums_a_log_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    monkeypatch.setattr(runtime.dist, "all_reduce", lambda values: summed.append(values.numel()))
    feature = runtime.Experts(Cut(1), Passes(2), 5, whole=False, batches_of=(1,))
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


def test_a_pass_of_several_of_megatrons_microbatches_counts_as_many_times() -> None:
    """Megatron divides by the microbatches that it counts, which are sequences where the plan's differ in size."""
    feature = runtime.Experts(Cut(1), Passes(1), 2, whole=False, batches_of=(3, 1))
    tracker, call = get_moe_metrics_tracker(), SimpleNamespace(batches=Batches())
    try:
        for microbatch, loss in enumerate((0.5, 2.0)):
            backward: Any = SimpleNamespace(op=RankOp(Kind.BACKWARD, microbatch, 0, 0, ""))
            with feature.around_backward(backward, call, None):  # type: ignore[arg-type]
                tracker.record("z_loss", torch.tensor(loss), 2, 2)
        assert tracker.metrics["z_loss"].values.tolist() == [0.0, 3 * 0.5 + 2.0]
    finally:
        feature.close()
