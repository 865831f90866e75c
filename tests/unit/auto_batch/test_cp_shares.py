"""Context-parallel parts by measured speed: whole numbers, what is measured, and what is refused."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_het.arguments.flags import split_arguments
from megatron_het.attention.kernels import CpuFlash
from megatron_het.auto_batch import cp_shares
from megatron_het.auto_batch.exchange import Exchange, ExchangeError
from megatron_het.device import activate
from megatron_het.plan import ModelShape, Plan, PlanError, Replica, ScheduleSpec, Stage, TrainingShape, save_plan


def plan_of(*replicas: Replica, **parameters: object) -> Plan:
    shape = ModelShape(2, 16, 4, 2, 64)
    return Plan(shape, TrainingShape(1, 2), (Stage((2,), replicas),), ScheduleSpec("slimpipe", parameters))


class Told(Exchange):
    """What the others would say."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def gather(self, name: str, value: object) -> list[object]:
        return list(self.seconds) if name.endswith("seconds") else [value] * len(self.seconds)

    def check(self) -> None:
        pass


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        ([1.0, 1.0], ()),
        ([1.0, 1.04], ()),
        ([1.0, 3.0], (75, 25)),
        ([1.0, 2.0, 4.0], (57, 29, 14)),
        ([1.0, 1000.0], (100, 1)),
    ],
)
def test_shares_are_in_proportion_to_speed(seconds: list[float], shares: tuple[int, ...]) -> None:
    assert cp_shares.shares_of(seconds) == shares


def test_a_group_is_as_fast_as_its_slowest_rank_and_others_keep_what_they_have() -> None:
    plan = plan_of(Replica((0, 1, 2, 3), (0,), cp=2), Replica((4,), (1,)))
    found = cp_shares.with_measured_shares(plan, activate(), 4, Told([1.0, 1.0, 1.0, 4.0, 0.0]))
    assert [r.cp_shares for r in found.stages[0].replicas] == [(80, 20), ()]
    assert cp_shares.described(found).endswith("stage 0, ranks 0 to 3: 80 20")


def test_what_a_plan_says_gives_way_to_what_is_measured() -> None:
    plan = plan_of(Replica((0, 1), (0, 1), cp=2, cp_shares=(3, 1)))
    found = cp_shares.with_measured_shares(plan, activate(), 0, Told([1.0, 1.0]))
    assert found.stages[0].replicas[0].cp_shares == ()
    assert "equal" in cp_shares.described(found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_measurement_is_forward_and_backward_of_a_slice(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr(cp_shares, "_SECONDS", 0.0)
    calls: list[tuple[str, torch.Size, torch.Size, torch.dtype]] = []
    kernel = CpuFlash()

    class Watched:
        def forward(self, *args: Any) -> Any:
            calls.append(("forward", args[0].shape, args[1].shape, args[0].dtype))
            return kernel.forward(*args)

        def backward(self, *args: Any, **more: Any) -> Any:
            calls.append(("backward", args[1].shape, args[2].shape, args[1].dtype))
            return kernel.backward(*args, **more)

    monkeypatch.setattr(cp_shares, "choose_kernel", lambda setting: Watched())
    plan = plan_of(Replica((0, 1, 2, 3), (0, 1), cp=2), slices=4)
    plan = replace(plan, training=replace(plan.training, precision=precision))
    cp_shares.with_measured_shares(plan, activate(), 1, Told([1.0] * 4))
    # 64 tokens: half a slice of 16 against half of all; TP 2 leaves two heads and one group of keys.
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    assert calls[0] == ("forward", torch.Size([8, 1, 2, 4]), torch.Size([32, 1, 1, 4]), dtype)
    assert {call[0] for call in calls} == {"forward", "backward"} and len(calls) == 2 * (1 + cp_shares._REPETITIONS)


def test_all_are_told_who_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    class Failing(Told):
        def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
            super().__init__([1.0] * world_size)

        def gather(self, name: str, value: object) -> list[object]:
            raise ExchangeError("nothing came from rank 1 within 300 s")

        def fail(self, problem: str) -> None:
            told.append(problem)

    monkeypatch.setattr(cp_shares, "Exchange", Failing)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        cp_shares.measured_on(plan_of(Replica((0, 1), (0, 1), cp=2)), activate(), 0)
    assert ended.value.code == 2 and told == ["nothing came from rank 1 within 300 s"]
    assert "--het-measured-cp-shares: rank 0: nothing came" in capsys.readouterr().err


def test_refused_where_there_is_nothing_to_measure(tmp_path) -> None:
    file = tmp_path / "plan.json"
    save_plan(plan_of(Replica((0,), (0, 1)), slices=4), file)
    with pytest.raises(PlanError, match="no replica of the plan has context parallelism"):
        split_arguments(["--het-plan", str(file), "--het-measured-cp-shares"])


def test_is_read(tmp_path) -> None:
    file = tmp_path / "plan.json"
    save_plan(plan_of(Replica((0, 1), (0, 1), cp=2), slices=4), file)
    config, rest = split_arguments(["--het-plan", str(file), "--het-measured-cp-shares", "--lr", "1"])
    assert config.measured_cp_shares and rest == ["--lr", "1"]
