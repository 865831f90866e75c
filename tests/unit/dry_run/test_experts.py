"""Layers of experts in a dry run: equal shares, and no capacities."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_het.dry_run.kernels import check_experts, equal_shares
from megatron_het.dry_run.run import _check_documents
from megatron_het.dry_run.tracker import Tracker


def arguments(**more: object) -> SimpleNamespace:
    plain: dict[str, object] = {"num_experts": 8, "moe_router_topk": 2, "moe_expert_capacity_factor": None}
    plain["moe_token_dispatcher_type"] = "alltoall"
    return SimpleNamespace(**plain | {"moe_pad_expert_input_to_capacity": False} | more)


@pytest.mark.parametrize(("tokens", "parts", "shares"), [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (1, 2, [1, 0])])
def test_no_token_is_lost(tokens: int, parts: int, shares: list[int]) -> None:
    assert equal_shares(tokens, parts) == shares


def test_experts_per_token() -> None:
    assert check_experts(arguments()) == 2
    assert check_experts(arguments(num_experts=None)) == 0


@pytest.mark.parametrize(
    ("flag", "value"), [("moe_expert_capacity_factor", 1.25), ("moe_token_dispatcher_type", "allgather")]
)
def test_what_depends_on_values_is_refused(flag: str, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        check_experts(arguments(**{flag: value}))
    assert stop.value.code == 2
    assert f"--{flag.replace('_', '-')} {value}" in capsys.readouterr().err


def test_a_row_per_token_and_chosen_expert() -> None:
    tracker = Tracker(is_fake=True)
    tracker.top_k = 3
    with FakeTensorMode(), tracker.running():
        scores = torch.ones(8, 10, requires_grad=True)  # [experts, tokens]
        found = scores.masked_select(torch.ones(8, 10, dtype=torch.bool))
        before = tracker.live_bytes
        assert found.shape == (30,)
        found.sum().backward()
        assert scores.grad is not None and scores.grad.shape == scores.shape
        del found
    assert before >= 4 * 80 + 80 + 4 * 30  # scores, mask, and what was selected are counted


def test_documents_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Where they begin is known from values."""
    _check_documents(SimpleNamespace(reset_position_ids=True))
    with pytest.raises(SystemExit) as stop:
        _check_documents(SimpleNamespace(reset_attention_mask=True))
    assert stop.value.code == 2
    assert "--reset-attention-mask: where documents begin" in capsys.readouterr().err
