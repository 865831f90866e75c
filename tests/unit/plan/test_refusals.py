"""Refusals of Megatron's flags under any plan."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het import hooks
from megatron_het.config import check_arguments
from megatron_het.plan import Plan, PlanError, ScheduleSpec, save_plan
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


@pytest.mark.parametrize(("tp", "given", "value"), [(1, None, None), (2, None, "1"), (2, "8", "8")])
def test_a_plan_with_tp_sets_what_megatron_insists_on_before_cuda_starts(
    tp: int, given: str | None, value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from megatron_het import platform, upstream

    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setattr(platform, "activate", lambda: seen.append(os.environ.get(name)))
    monkeypatch.setattr(upstream, "install", lambda *_, **__: None)
    monkeypatch.setattr(hooks, "_install_plan", lambda *_: None)
    monkeypatch.setenv(name, given or "0")  # so that it is put back afterwards
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", str(2 * tp))
    words = [*FLAGS, "--tensor-model-parallel-size", str(tp)]
    save_plan(plan_from_flags(words, 2 * tp, ScheduleSpec("1f1b"))[0], tmp_path / "plan.json")
    hooks.install(["program", "--het-plan", str(tmp_path / "plan.json")])
    assert seen == [value]
