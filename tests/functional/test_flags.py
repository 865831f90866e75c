"""Megatron's own flags under plans: training equals one process with the same flags, or the flag is refused.

``benchmarks/parity.py`` draws the combinations.
"""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from testing.cases import Case, build_plan, with_schedule
from testing.lab import Lab
from testing.runner import Finished
from testing.slimpipe_cases import PLAIN, sliced_case
from tests.functional.selected import compared, tiers

BAR = 1e-5
# Under the fused cross entropy, gradients of logits are rounded to bf16, which enlarges rounding elsewhere.
ROUNDED_BAR = 1e-3


def make(name: str, sizes: list[list[int]], layers: list[int], extra: str = "", **options: object) -> Case:
    """A case with more flags; what is not an option of a case is one of its plan."""
    names = ("transport", "clip", "overlap", "family", "own")
    of_case = {key: options.pop(key) for key in names if key in options}
    built = build_plan(sizes, layers, random.Random(name), **options)  # type: ignore[arg-type]
    return Case(name, built, extra=tuple(extra.split()), **of_case)  # type: ignore[arg-type]


_SPLIT = {**PLAIN, "vocabulary": True}
CASES = [
    replace(
        sliced_case({**_SPLIT, "microbatches": 2}, "staged-large-microbatches", random.Random(0)), transport="staged"
    ),
    make("skipped-iterations", [[1, 1]], [5], "--iterations-to-skip 2 3", even_routing=False),
    make("skipped-iterations-stages", [[1], [2], [1, 1]], [2, 1, 2], "--iterations-to-skip 3", even_routing=False),
    make("softmax-offset-mixed-tp", [[1], [2, 1]], [2, 3], family="softmax-offset", even_routing=False),
    make("reset-masks", [[1], [1, 1]], [2, 3], "--reset-attention-mask --reset-position-ids", even_routing=False),
    make("fused-cross-entropy", [[2], [1]], [2, 3], "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"),
    replace(
        sliced_case(_SPLIT, "fused-split-cross-entropy", random.Random(0)),
        extra=("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"),
    ),
    replace(sliced_case(_SPLIT, "mup-split-vocabulary", random.Random(0)), family="mup"),
    replace(sliced_case(PLAIN, "rope-scaling-slices", random.Random(0)), extra=("--use-rope-scaling",)),
    replace(
        sliced_case(
            {**_SPLIT, "microbatches": 4, "distributed_optimizer": True, "overlap": True},
            "gathered-late-split-vocabulary",
            random.Random(0),
        ),
        own=("--overlap-param-gather",),
    ),
    # A replica's first forward depends on the other one's: their gathers of parameters must not wait for forwards.
    with_schedule(
        make(
            "gathered-late",
            [[1], [1, 1]],
            [2, 3],
            distributed_optimizer=True,
            overlap=True,
            own=("--overlap-param-gather",),
        ),
        "v-half",
        2,
        {},
    ),
    make("gpt", [[1], [2, 1]], [2, 3], family="gpt", even_routing=False, sequence_parallel=True),
    make("qkv-bias", [[2], [1]], [2, 3], family="qkv-bias", distributed_optimizer=True),
    make("sgd", [[1], [1, 1]], [2, 3], "--optimizer sgd", even_routing=False),
    make("layernorm-1p", [[1], [2, 1]], [2, 3], family="layernorm-1p", even_routing=False, sequence_parallel=True),
]
BY_NAME = {case.name: case for case in CASES}
FULL = {"skipped-iterations", "softmax-offset-mixed-tp", "fused-cross-entropy", "qkv-bias", "layernorm-1p"}


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, lab: Lab, finished: dict[str, Finished]):
    case = BY_NAME[name]
    found = compared(case, finished[name], lab)
    fused = "--cross-entropy-loss-fusion" in case.extra
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
    assert len(found) == len(expected) == lab.steps
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_run_without_training_ends_well(lab: Lab):
    """``--skip-train`` evaluates only; the model is not wrapped then."""
    case = make("skip-train", [[1], [1, 1]], [2, 3], "--skip-train")
    done = lab.runner.run(lab.job(case))
    assert "validation loss at iteration 0" in done.log()


def test_several_chunks_evaluate_without_training(lab: Lab):
    case = with_schedule(make("skip-train", [[1], [1]], [2, 3], "--skip-train"), "interleaved", 2, {})
    done = lab.runner.run(lab.job(case))
    assert "validation loss at iteration 0" in done.log()
