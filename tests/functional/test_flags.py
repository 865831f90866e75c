"""Megatron's own flags under plans: training equals one process with the same flags, or the flag is refused.

``benchmarks/parity.py`` draws the combinations.
"""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec
from testing.cases import Case, build_plan
from testing.compare import Differences
from testing.lab import Lab
from tests.functional.selected import cases_of, new_case, tiers

BAR = 1e-5
# Under the fused cross entropy, gradients of logits are rounded to bf16, which enlarges rounding elsewhere.
ROUNDED_BAR = 1e-3
BY_NAME, FULL = cases_of("flags")


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences):
    fused = "--cross-entropy-loss-fusion" in BY_NAME[name].extra
    assert max(found.loss, found.validation) <= BAR, found
    assert found.gradient <= (ROUNDED_BAR if fused else BAR), found


def params_norms(log: str) -> list[float]:
    return [float(value) for value in re.findall(r"params norm: ([0-9.]+)", log)]


@pytest.mark.parametrize(
    ("precision", "distributed"),
    [
        ("fp32", False),
        ("bf16", True),
        pytest.param("fp32", True, marks=pytest.mark.full),
        pytest.param("bf16", False, marks=pytest.mark.full),
    ],
)
def test_the_norm_of_the_parameters_counts_each_once(precision: str, distributed: bool, lab: Lab, tmp_path: Path):
    plan = build_plan(
        [[1, 1], [1, 1, 2]], [2, 3], random.Random(0), precision=precision, distributed_optimizer=distributed, tied=True
    )
    case = Case(f"params-norm-{precision}-{distributed}", plan, extra=("--log-params-norm",))
    expected = params_norms((lab.reference(case) / "rank-0.log").read_text())
    found = params_norms(lab.runner.run(lab.job(case)).log())
    assert len(found) == lab.steps and found == pytest.approx(expected, rel=1e-3)


_EVALUATED = cases_of("flags-evaluated")[0]  # two times nine sequences, and six times two, in batches of six


@pytest.mark.parametrize("case", _EVALUATED.values(), ids=_EVALUATED)
def test_an_evaluation_of_another_size(case: Case, lab: Lab):
    logs = (lab.reference(case) / "rank-0.log").read_text(), lab.runner.run(lab.job(case)).log()
    expected, found = ([float(loss) for loss in re.findall(r"lm loss value: (\S+)", log)] for log in logs)
    assert found == pytest.approx(expected, rel=BAR) and len(found) > 2


@pytest.mark.parametrize(("last", "layers", "name"), [([1, 1], (2, 3), "1f1b"), ([1], ((2, 2), (3, 3)), "interleaved")])
def test_a_run_without_training_ends_well(last: list[int], layers: Any, name: str, lab: Lab):
    """``--skip-train`` evaluates only; the model is not wrapped then."""
    case = new_case("skip-train", [[1], last], layers, extra="--skip-train", schedule=ScheduleSpec(name))
    assert "validation loss at iteration 0" in lab.runner.run(lab.job(case)).log()
