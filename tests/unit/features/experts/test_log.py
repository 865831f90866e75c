"""Ranks log balancing losses alike, where the sum would never end otherwise, and optimizers scale losses alike."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het import device as platform

platform.activate()

from megatron.core.optimizer.grad_scaler import DynamicGradScaler  # noqa: E402
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


def test_an_overflow_of_experts_alone_is_one_of_all_weights() -> None:
    """Losses are scaled by the first optimizer's scale, and gradients divided by that of their own."""
    parts = [SimpleNamespace(grad_scaler=DynamicGradScaler(16.0, 1.0, 2.0, 0.5, 2, 1)) for _ in range(2)]
    scales = []
    for overflows in ((False, True), (True, False), (False, False), (False, False)):
        runtime.share_loss_scale(parts)
        for part, overflow in zip(parts, overflows, strict=True):
            scales.append(part.grad_scaler.scale.item())
            part.grad_scaler.update(overflow)
    assert scales == [16.0, 16.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0] and parts[1].grad_scaler.scale.item() == 8.0
