"""Refusals of Megatron's flags under any plan."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.config import check_arguments
from megatron_het.plan import Plan, PlanError, ScheduleSpec
from megatron_het.plan.from_flags import plan_from_flags

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 8 --pipeline-model-parallel-size 2"
).split()


class Arguments(SimpleNamespace):
    """Megatron's arguments; what is not set is None, as if not given."""

    def __getattr__(self, name: str) -> None:
        return None


def made() -> Plan:
    return plan_from_flags(FLAGS, 2, ScheduleSpec("1f1b"))[0]


def arguments(**changed: Any) -> Arguments:
    given = {
        "cuda_graph_impl": "none", "dataloader_type": "single", "calculate_per_token_loss": True, "num_layers": 4,
        "hidden_size": 64, "num_attention_heads": 8, "seq_length": 64, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2, "context_parallel_size": 1, "position_embedding_type": "rope",
    }  # fmt: skip
    return Arguments(**{**given, **changed})


def test_accepted() -> None:
    check_arguments(made(), arguments(recompute_modules=["core_attn", "mlp"], decoder_seq_length=64), 2)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel.*the plan's own context parallelism"),
        ({"hierarchical_context_parallel_sizes": [1, 2]}, "--hierarchical-context-parallel-sizes.*the plan's own"),
        ({"step_batch_size_schedule": "0:8"}, "--step-batch-size-schedule.*fixed number of microbatches"),
        ({"decoder_seq_length": 32}, "--decoder-seq-length = 32.*length of --seq-length = 64"),
        ({"num_experts": 2}, "mixture of experts"),
    ],
)
def test_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_arguments(made(), arguments(**changed), 2)


@pytest.mark.parametrize("installed", [False, True])
def test_recomputed_norms_need_transformer_engine(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: installed or None if n == "transformer_engine" else found(n)
    )
    given = arguments(recompute_modules=["layernorm", "mlp"])
    if installed:
        check_arguments(made(), given, 2)
        return
    with pytest.raises(PlanError, match="--recompute-modules = 'layernorm'.*Transformer Engine"):
        check_arguments(made(), given, 2)
