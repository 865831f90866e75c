"""The plans of automatic batches, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_het import device as platforms
from megatron_het.arguments.flags import split_arguments
from megatron_het.auto_batch.allocation import Allocation, allocated, base_plan, extra_words, with_zero
from megatron_het.auto_batch.coordinate import VARIABLE, memory_limit
from megatron_het.features.plan_checks import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan import PlanError
from megatron_het.plan.validate import check_plan

WORDS = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"]
UNTIED = [*WORDS, "--untie-embeddings-and-output-weights", "--global-batch-size", "7", "--lr", "1"]


@pytest.mark.parametrize("zero", range(4))
def test_every_zero_stage_has_a_plan_that_runs(zero: int) -> None:
    base, words = base_plan(UNTIED, 2)
    assert words[-1] == "--calculate-per-token-loss" and "--global-batch-size" not in words and "7" not in words
    plan = allocated(base, zero, Allocation(((3, 2), (2,)), (1.0, 1.0), 1.0), ["a", "b"])
    check_plan(plan)
    check_plan_alone(plan)
    build(plan)
    training, (first, second) = plan.training, plan.stages[0].replicas
    assert [training.sequences(m) for m in first.microbatches] == [3, 2]
    assert [training.sequences(m) for m in second.microbatches] == [2]
    assert (training.global_batch_size, training.distributed_optimizer) == (7, zero > 0)
    assert len(plan.stages[0].layers) == (4 if zero > 1 else 1)
    assert plan.schedule.parameters.get("zero", 0) == (zero if zero > 1 else 0)


def test_tied_embeddings_may_be_in_two_chunks() -> None:
    base, _ = base_plan([*WORDS, "--global-batch-size=4"], 2)
    plan = with_zero(base, 3, [[1], [1]], ["", ""])
    check_plan_alone(plan)
    assert plan.model.tied_embeddings and len(plan.stages[0].layers) == 4


def test_a_checkpoint_of_shards_is_reshardable() -> None:
    base, words = base_plan([*UNTIED, "--save", "x"], 2)
    plans = [with_zero(base, zero, [[1], [1]], ["", ""]) for zero in (0, 1)]
    assert [extra_words(plan, words) for plan in plans] == [[], ["--dist-ckpt-optim-fully-reshardable"]]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--micro-batch-size", "2"], "measures it"),
        (["--tensor-model-parallel-size", "2"], "data parallelism alone"),
        (["--pipeline-model-parallel-size", "2"], "data parallelism alone"),
    ],
)
def test_refuses_what_it_measures_or_cannot(more: list[str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        base_plan([*UNTIED, *more], 2)


@pytest.mark.parametrize("words", [WORDS, [*WORDS, "--global-batch-size", "x"], [*WORDS, "--global-batch-size", "1"]])
def test_needs_a_batch_of_a_sequence_for_every_rank(words: list[str]) -> None:
    with pytest.raises(PlanError, match="--global-batch-size"):
        base_plan(words, 2)


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    config, rest = split_arguments(["--het-auto-batch", "runs/x", "--het-zero", "2", "--lr", "1"])
    assert (str(config.auto_batch), config.least_zero, rest) == ("runs/x", 2, ["--lr", "1"])
    with pytest.raises(SystemExit):
        split_arguments(["--het-auto-batch", "runs/x", "--het-plan", "plan.json"])
    assert "--het-plan does not go with --het-auto-batch" in capsys.readouterr().err


def test_an_artificial_limit_may_differ_from_rank_to_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    for value, expected in (("500", 500), ("500;700", 700)):
        monkeypatch.setenv(VARIABLE, value)
        assert memory_limit().limit_bytes == expected
    for value in ("much", "1;x", "1;0"):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(ValueError, match=VARIABLE):
            memory_limit()


def test_ranks_that_share_a_device_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ``LOCAL_RANK`` is the device, and limits are given by the launcher's local rank."""
    monkeypatch.setattr(platforms, "activate", lambda: SimpleNamespace(is_cuda=True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="G", total_memory=10000))
    own = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert memory_limit().limit_bytes == 9200
    environment = own | {"LOCAL_RANK": "2", platforms.SAME_DEVICES: "1"}
    assert platforms.share_devices(environment, 2)
    for name in ("LOCAL_RANK", platforms.SHARING_RANK):
        monkeypatch.setenv(name, environment[name])
    assert memory_limit().limit_bytes == 4600
    monkeypatch.setenv(VARIABLE, "500;600;700")
    assert memory_limit().limit_bytes == 700
