"""The flags of ministages and their parameter window, with and without a plan file."""

from pathlib import Path

import pytest

from megatron_het.arguments.flags import split_arguments
from megatron_het.plan import PlanError, ScheduleSpec, save_plan
from tests.unit.plan.megatron_flags import TWO_BY_TWO, flags

FLAGS = flags(TWO_BY_TWO, "--use-distributed-optimizer --untie-embeddings-and-output-weights")
MINISTAGE = ("--het-schedule", "ministage")


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")


def schedule_of(*words: str) -> ScheduleSpec:
    plan = split_arguments([*FLAGS, *words])[0].plan
    return plan.schedule


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (["--het-window"], {}),
        (["--het-update", "undo"], {"update": "undo"}),
        (["--het-offload-parameters"], {"offload": True}),
        (["--het-offload-optimizer"], {"offload_optimizer": True}),
    ],
)
def test_each_option_of_the_window_implies_it(words: list[str], parameters: dict[str, object]):
    assert schedule_of(*MINISTAGE, *words).parameters == {"window": True, **parameters}


def test_a_plans_parameters_stay_unless_another_schedule_is_asked_for(tmp_path: Path):
    plan = split_arguments([*FLAGS, *MINISTAGE, "--het-update", "undo"])[0].plan
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    given = ("--het-plan", str(path))
    assert schedule_of(*given) == schedule_of(*given, *MINISTAGE) == plan.schedule
    assert schedule_of(*given, "--het-update", "exact").parameters == {"window": True, "update": "exact"}
    assert schedule_of(*given, "--het-schedule", "interleaved") == ScheduleSpec("interleaved", {})


def test_no_other_schedule_has_a_window(tmp_path: Path):
    with pytest.raises(PlanError, match="--het-window.*1f1b has no parameter window.*ministage"):
        split_arguments([*FLAGS, "--het-schedule", "1f1b", "--het-window"])
