"""The tiny model under a plan's topology, its flags, and what its losses are taken for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_het.doctor.check import Names, Status
from megatron_het.doctor.numerics import (
    LOSSES,
    TOLERANCE,
    Numerics,
    _failure,
    difference,
    fixed_model_losses,
    flags_of,
    one_process,
    tiny_plan,
)
from megatron_het.features.experts.spec import check_expert_parallel
from megatron_het.features.plan_checks import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.plan.validate import check_plan


def plan(schedule="1f1b", parameters=None, chunks=1, microbatches=64, tp=1, ep=1):
    layers = (8,) * chunks
    first = tuple(m for m in range(microbatches) if m % 3)
    second = tuple(m for m in range(microbatches) if m % 3 == 0)
    return Plan(
        ModelShape(16 * chunks, 4096, 32, 8, 4096, ffn_hidden_size=11008),
        TrainingShape(2, 2 * microbatches, precision="bf16", sequence_parallel=tp > 1, distributed_optimizer=True),
        (
            Stage(layers, (Replica(tuple(range(tp)), tuple(range(microbatches)), "new", ep=ep),)),
            Stage(layers, (Replica((tp,), first, "new"), Replica((tp + 1,), second, "old"))),
        ),
        ScheduleSpec(schedule, parameters or {}),
    )


@pytest.mark.parametrize(
    "given",
    [
        plan(),
        plan(tp=2, ep=2),
        plan("ministage", {"window": True}, chunks=2),
        plan("slimpipe", {"slices": 4}, microbatches=4),
        plan("zb-h1"),
        plan("zb-v", chunks=2),
    ],
    ids=lambda p: p.schedule.name,
)
def test_tiny_plans_are_sound_and_small(given):
    tiny = tiny_plan(given)
    check_plan(tiny)
    check_plan_alone(tiny)
    check_expert_parallel(tiny, 0)  # the tiny model is dense
    build(tiny)
    assert tiny.schedule == given.schedule and tiny.world_size == given.world_size
    assert tiny.num_microbatches <= 16 and tiny.model.num_layers <= 8 and tiny.model.hidden_size <= 128
    assert all(r.microbatches for s in tiny.stages for r in s.replicas)
    alone = one_process(tiny)
    check_plan(alone)
    assert alone.model == tiny.model and alone.training.global_batch_size == tiny.training.global_batch_size
    words = flags_of(tiny, ["--transformer-impl", "local"])
    assert words[words.index("--num-layers") + 1] == str(tiny.model.num_layers) and "--bf16" in words


def judged(*losses, alone=((5.5, 5.4, 5.3),), precision="fp32", own=()):
    answers = {r: {"losses": list(v), "precision": precision, "stored": [*LOSSES]} for r, v in enumerate(losses)}
    for r, values in own:
        answers[r]["stored"] = list(values)
    for r, values in enumerate(alone):
        answers[r] |= {"alone": list(values), "problem": ""}
    return Numerics().judge(answers, Names(tuple("ab"[: len(losses)])))


def test_losses_that_agree():
    assert [f.status for f in judged((), (5.5, 5.4, 5.30001))] == [Status.OK]
    assert [f.status for f in judged((), (5.5, 5.4, 5.31))] == [Status.FAULT]
    assert [f.status for f in judged((), (5.5, 5.4, 5.31), precision="bf16")] == [Status.OK]
    assert [f.status for f in judged((), (5.5, float("nan"), 5.3))] == [Status.FAULT]
    assert [f.status for f in judged((), (5.5, 5.4))] == [Status.FAULT]


def test_a_kind_that_computes_differently():
    found = judged((), (5.5, 5.4, 5.3), alone=((5.5, 5.4, 5.3), (5.5, 5.4, 5.2)))
    assert [(f.status, f.where) for f in found] == [(Status.FAULT, "rank 1 (b)")]
    assert "losses alone" in found[0].what


def test_a_device_that_computes_wrongly_like_all_others():
    """Its kind and the plan agree with it; the stored losses do not."""
    good, off = list(LOSSES), [LOSSES[0], LOSSES[1], 1.01 * LOSSES[2]]
    found = judged((), (5.5, 5.4, 5.3), own=((0, good), (1, off)))
    assert [(f.status, f.where) for f in found] == [(Status.FAULT, "rank 1 (b)")]
    assert "should be 2.9881, 1.9218, 1.54275" in found[0].what
    assert [f.status for f in judged((), (5.5, 5.4, 5.3), own=((1, [*LOSSES[:2], float("nan")]),))] == [Status.FAULT]
    assert [f.status for f in judged((), (5.5, 5.4, 5.3), own=((1, off),), precision="bf16")] == [Status.OK]


def test_stored_losses_are_those_of_this_machine_in_every_precision(monkeypatch):
    assert difference(fixed_model_losses("cpu", torch.float64), LOSSES) < 1e-9
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert 0 < difference(fixed_model_losses("cpu", dtype), LOSSES) < TOLERANCE[precision] / 3
    real = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda scores, dim: 1.05 * real(scores, dim))
    assert difference(fixed_model_losses("cpu", torch.float32), LOSSES) > TOLERANCE["bf16"]


def test_difference():
    assert difference([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert difference([1.1], [1.0]) == pytest.approx(0.1)
    assert difference([], []) == float("inf")


def test_what_is_slow_is_not_said_to_hang(tmp_path: Path) -> None:
    """Its reason is the last line that matters, not an earlier one."""
    log = "ValueError: first\nhet: waiting for rank 3\nlast words\n"
    (tmp_path / "plan.log").write_text(log, encoding="utf-8")
    text = _failure("plan", None, tmp_path)
    assert text == "the tiny training is slow or stuck, not done in time: het: waiting for rank 3"
