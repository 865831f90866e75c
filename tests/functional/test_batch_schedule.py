"""Plans that take turns, one for each global batch size, train as stock Megatron does with the same schedule."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_het.plan import Plan, save_plan
from testing.cases import MICROBATCHES, Weights, build_plan, common_flags, words
from testing.lab import Lab
from testing.runner import Job
from tests.functional.launch import launch

SIZES = (2, 4, 6)
SCHEDULE = "0:2 128:4 384:6"  # thresholds are tokens, of sequences of 32
SAMPLES, ITERATIONS = 24, 6


def plans() -> list[Plan]:
    """Layers and replicas differ as well."""
    rng = random.Random(3)
    layouts: list[tuple[list[list[int]], list[int]]] = [([[1], [1]], [3, 2]), ([[1, 1]], [5]), ([[1], [1]], [1, 4])]
    return [of_size(build_plan(*layout, rng), size) for size, layout in zip(SIZES, layouts, strict=True)]


def of_size(plan: Plan, size: int) -> Plan:
    """The plan with the first microbatches only, of which a second replica has one."""
    stages = []
    for stage in plan.stages:
        own = (tuple(range(size)),) if len(stage.replicas) == 1 else (tuple(range(1, size)), (0,))
        replicas = (replace(r, microbatches=ids) for r, ids in zip(stage.replicas, own, strict=True))
        stages.append(replace(stage, replicas=tuple(replicas)))
    return replace(plan, stages=tuple(stages), training=replace(plan.training, global_batch_size=size))


def steps(log: str, starts: tuple[int, ...]) -> list[tuple[float, float]]:
    """Loss and gradient norm of every iteration.

    Args:
        log: Of the last rank.
        starts: Iterations with which stock Megatron's training begins; the next line of its log has the mean of both.
    """
    found = re.findall(r"iteration +(\d+)/ +\d+ \|.*?lm loss: (\S+).*?grad norm: (\S+)", log)
    assert [int(iteration) for iteration, *_ in found] == list(range(1, ITERATIONS + 1))
    losses = [float(loss) for _, loss, _ in found]
    for start in starts:
        losses[start] = 2 * losses[start] - losses[start - 1]
    return list(zip(losses, (float(norm) for *_, norm in found), strict=True))


def test_equals_stock_megatron_with_the_schedule(lab: Lab, tmp_path: Path) -> None:
    weights = Weights()
    common = list(common_flags(weights, by_samples=True))
    at = common.index("--global-batch-size")
    assert common[at + 1] == str(MICROBATCHES)
    del common[at : at + 2]
    more = (
        f"--train-samples {SAMPLES} --lr-warmup-samples 6 --eval-iters 2 --eval-interval 2 --eval-global-batch-size 6"
    )
    flags = (*common, *lab.start_flags(weights), *words(more), "--step-batch-size-schedule", SCHEDULE)
    files = [str(tmp_path / f"plan-{size}.json") for size in SIZES]
    for plan, file in zip(plans(), files, strict=True):
        save_plan(plan, file)
    stock = lab.runner.run(Job("stock", 1, flags, tmp_path / "stock"))
    expected = steps(stock.log(), (1,))
    under_plans = ("--het-plan", *files, "--het-report", str(tmp_path / "report"))
    own = ("--pretrained-checkpoint" if word == "--load" else word for word in flags)
    turns = launch(2, ["-m", "megatron_het.pretrain_gpt", *own, *under_plans], tmp_path / "turns.txt")  # starts again
    found = steps(turns, ())
    for (loss, norm), (stock_loss, stock_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(stock_loss, rel=1e-5)
        assert norm == pytest.approx(stock_norm, abs=2e-3)  # the log has three decimals
    evaluated = [[float(x) for x in re.findall(r"lm loss value: (\S+)", log)] for log in (stock.log(), turns)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5) and len(evaluated[0]) > 3
    assert {file.name for file in (tmp_path / "report").iterdir()} == {"plan-0", "plan-1", "plan-2"}
