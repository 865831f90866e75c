"""Megatron's own flags under plans: training equals one process with the same flags, or the flag is refused.

``benchmarks/parity.py`` draws the combinations.
"""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec
from testing.cases import Case, build_plan, words
from testing.compare import Differences
from testing.lab import Lab
from testing.slimpipe_cases import PLAIN, sliced_case
from tests.functional.selected import new_case, tiers

BAR = 1e-5
# Under the fused cross entropy, gradients of logits are rounded to bf16, which enlarges rounding elsewhere.
ROUNDED_BAR = 1e-3
_SPLIT = {**PLAIN, "vocabulary": True}
_LATE = {"distributed_optimizer": True, "overlap": True}
_GATHERED = ("--overlap-param-gather",)
_FUSED = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"
_EXCHANGED = ScheduleSpec("slimpipe", {"slices": 4, "context_exchange": True})
_V_HALF = ScheduleSpec("v-half")


def sliced(name: str, row: dict[str, Any], **fields: Any) -> Case:
    return replace(sliced_case(row, name, random.Random(0)), **fields)


CASES = [
    sliced("staged-large-microbatches", {**_SPLIT, "microbatches": 2}, transport="staged"),
    new_case("skipped", [[1], [2], [1, 1]], [2, 1, 2], extra="--iterations-to-skip 2 3", even_routing=False),
    new_case("softmax-offset-mixed-tp", [[1], [2, 1]], [2, 3], family="softmax-offset", even_routing=False),
    new_case("masks", [[1], [1, 1]], [2, 3], extra="--reset-attention-mask --reset-position-ids", even_routing=False),
    new_case("fused-cross-entropy", [[2], [1]], [2, 3], extra=_FUSED),
    sliced("fused-split-cross-entropy", _SPLIT, extra=tuple(_FUSED.split())),
    sliced("mup-split-vocabulary", _SPLIT, family="mup"),
    sliced("rope-scaling-slices", PLAIN, extra=("--use-rope-scaling",)),
    sliced("gathered-late-split-vocabulary", {**_SPLIT, **_LATE, "microbatches": 4}, own=_GATHERED),
    # A replica's first forward depends on the other one's: their gathers of parameters must not wait for forwards.
    new_case("v-half-gathered-late", [[1], [1, 1]], [(2, 2), (3, 3)], schedule=_V_HALF, own=_GATHERED, **_LATE),
    new_case("window-exchanged", [[1], [1]], [3, 2], family="sliding-window", cp=[[1], [2]], schedule=_EXCHANGED),
    new_case("gpt", [[1], [2, 1]], [2, 3], family="gpt", even_routing=False, sequence_parallel=True),
    new_case("qkv-bias", [[2], [1]], [2, 3], family="qkv-bias", distributed_optimizer=True),
    new_case("sgd", [[1], [1, 1]], [2, 3], extra="--optimizer sgd", even_routing=False),
    new_case("layernorm-1p", [[1], [2, 1]], [2, 3], family="layernorm-1p", even_routing=False, sequence_parallel=True),
]
BY_NAME = {case.name: case for case in CASES}
FULL = {"softmax-offset-mixed-tp", "fused-cross-entropy", "qkv-bias", "layernorm-1p"}


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


_EVALUATED = [  # two times nine sequences, and six times two, in batches of six
    new_case("more", [[1, 1], [2]], [2, 3], extra="--eval-global-batch-size 9 --eval-iters 2", even_routing=False),
    sliced("fewer", _SPLIT, extra=words("--eval-global-batch-size 2 --eval-iters 6 --eval-micro-batch-size 2")),
]


@pytest.mark.parametrize("case", _EVALUATED, ids=["more", "fewer"])
def test_an_evaluation_of_another_size(case: Case, lab: Lab):
    logs = (lab.reference(case) / "rank-0.log").read_text(), lab.runner.run(lab.job(case)).log()
    expected, found = ([float(loss) for loss in re.findall(r"lm loss value: (\S+)", log)] for log in logs)
    assert found == pytest.approx(expected, rel=BAR) and len(found) > 2


@pytest.mark.parametrize(("last", "layers", "name"), [([1, 1], (2, 3), "1f1b"), ([1], ((2, 2), (3, 3)), "interleaved")])
def test_a_run_without_training_ends_well(last: list[int], layers: Any, name: str, lab: Lab):
    """``--skip-train`` evaluates only; the model is not wrapped then."""
    case = new_case("skip-train", [[1], last], layers, extra="--skip-train", schedule=ScheduleSpec(name))
    assert "validation loss at iteration 0" in lab.runner.run(lab.job(case)).log()
