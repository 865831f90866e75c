"""Training under plans equals stock Megatron in one process: losses, evaluation and gradients.

Every feature occurs at least once; ``benchmarks/parity.py`` has the combinations.  At the end the
product is broken on purpose, to see that the comparison notices.
"""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec, Stage, save_plan
from testing.cases import Case, Weights, build_plan, common_flags, words
from testing.compare import Differences, compare
from testing.lab import Lab
from testing.runner import Job
from tests.functional.selected import new_case, tiers

FP32_BAR = 1e-5
# In bf16 a sum over TP ranks rounds elsewhere than the sum of one process does: one part in 2^8 per
# rounding for gradients; losses are means over hundreds of tokens.
BF16_LOSS_BAR, BF16_GRADIENT_BAR = 2e-3, 3e-2
DIVIDED: dict[str, Any] = {"sequence_parallel": True, "distributed_optimizer": True}
UNEVEN: dict[str, Any] = {"even_routing": False}
SCATTERED = UNEVEN | {"shuffle_ranks": True, "sequence_parallel": True}
CASES = [
    new_case("replicas", [[1], [1, 1]], [2, 3], clip=0.05, **UNEVEN),
    new_case(
        "replicas-distributed-optimizer", [[1, 1], [1]], [3, 2], by_samples=True, distributed_optimizer=True, **UNEVEN
    ),
    new_case("tp-by-stage", [[2], [1, 1]], [4, 1], **DIVIDED),
    new_case("tp-4-staged", [[4], [1]], [3, 2], transport="staged", sequence_parallel=True, recompute="full"),
    new_case("mixed-tp", [[1], [2, 1]], [2, 3], clip=0.05, **UNEVEN, **DIVIDED),
    new_case("norms-of-heads", [[1], [2, 1]], [2, 3], family="qk-norm", **UNEVEN),
    new_case("mixed-tp-tied", [[2, 1], [1]], [1, 4], by_samples=True, clip=0.05, tied=True, **UNEVEN),
    new_case("one-stage-mixed-tied", [[4, 1, 2]], [5], tied=True, **UNEVEN),
    new_case("four-stages", [[1], [1], [1], [1]], [2, 1, 1, 1], recompute="selective"),
    # Replicas of a stage have different TP, so that sums across classes follow what was reduced early.
    new_case(
        "overlap", [[1, 1], [2, 1, 1]], [3, 2], overlap=True, own=("--overlap-param-gather",), tied=True, **DIVIDED
    ),
    # Two of three members of the second stage are a class.
    new_case("scattered-ranks", [[1], [2, 1, 1], [1]], [1, 2, 2], tied=True, **SCATTERED),
    new_case("stock-shape", [[2, 2]], [5], distributed_optimizer=True),
    new_case("gpipe-replicas", [[1], [1, 1]], [2, 3], seed="replicas", schedule=ScheduleSpec("gpipe"), **UNEVEN),
    new_case("bf16-mixed-tp", [[1], [2, 1]], [2, 3], precision="bf16", **UNEVEN, **DIVIDED),
]
BY_NAME = {case.name: case for case in CASES}
FULL = {"tp-4-staged", "norms-of-heads", "one-stage-mixed-tied"}


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences):
    if BY_NAME[name].plan.training.precision == "bf16":
        assert found.loss <= BF16_LOSS_BAR and found.validation <= BF16_LOSS_BAR, found
        assert found.gradient <= BF16_GRADIENT_BAR, found
    else:
        assert max(found.loss, found.validation, found.gradient, found.norm) <= FP32_BAR, found


def test_cyclic_epochs_may_end_inside_an_iteration(lab: Lab):
    """Tokens and labels of a microbatch are read by different ranks, each with a loader of its own."""
    case = replace(BY_NAME["replicas"], name="cyclic-short-epochs")
    observe = "tests.functional.short_epochs:observe"
    planned = lab.job(case, "--dataloader-type", "cyclic", observe=observe)
    folder = lab.folder / "one-cyclic-short-epochs"
    flags = (
        *common_flags(*case.reference, steps=lab.steps),
        *lab.start_flags(case.weights),
        "--dataloader-type",
        "cyclic",
    )
    stock = Job(folder.name, 1, flags, folder, setup=(observe, {"out": str(folder), "gradients": True}))
    for done in lab.runner.run_all([stock, planned], at_once=2):
        done.check()
    found = compare(planned.log_dir, case.plan, folder)
    assert max(found.loss, found.validation, found.gradient) <= FP32_BAR, found


def scales_and_skips(log: str) -> list[tuple[float, int]]:
    found = re.findall(r"loss scale: (\S+) \|.*?skipped iterations: +(\d+)", log)
    return [(float(scale), int(skipped)) for scale, skipped in found]


def test_fp16_has_the_loss_scale_of_means_over_tokens(lab: Lab, tmp_path: Path):
    """Stock Megatron without ``--calculate-per-token-loss``, whose sums over tokens would overflow much earlier."""
    size = 8
    even = build_plan([[1], [1]], [3, 2], random.Random(0), precision="fp16")
    replicas = [Stage(s.layers, (replace(s.replicas[0], microbatches=tuple(range(size))),)) for s in even.stages]
    plan = replace(even, stages=tuple(replicas), training=replace(even.training, global_batch_size=size))
    assert plan.loss_divisor == size * even.model.seq_length
    case = Case("fp16-scale", plan)
    scaling = words(f"--global-batch-size {size} --initial-loss-scale {2.0**21} --loss-scale-window 2 --hysteresis 1")
    flags = (*common_flags(case.weights, steps=8), *lab.start_flags(Weights()), *scaling)
    save_plan(plan, tmp_path / "plan.json")
    jobs = [
        Job("stock", 1, tuple(w for w in flags if w != "--calculate-per-token-loss"), tmp_path / "stock"),
        Job("plan", 2, (*flags, "--het-plan", str(tmp_path / "plan.json")), tmp_path / "planned"),
    ]
    found = {done.job.name: scales_and_skips(done.check().log()) for done in lab.runner.run_all(jobs, at_once=2)}
    stock, mine = found["stock"], found["plan"]
    (_, before), (scale, both) = stock[:2]
    stock[1] = scale, both - before  # stock Megatron's second line counts what the first one has
    assert mine == stock
    assert len(stock) == 8 and 0 < sum(skipped for _, skipped in stock) < 8


# The figure that each accident must change, and by how many times the bar.  A wrong norm would hardly show in
# losses: it changes the clipping, to which Adam is nearly blind.
ACCIDENTS = {
    "no class exchange": ("overlap", "gradient", 100),
    "wrong routing": ("replicas-distributed-optimizer", "loss", 100),
    "no duplicate mark": ("mixed-tp", "norm", 1000),
    "gated as plain": ("mixed-tp", "gradient", 100),
    "own token count": ("tp-by-stage", "gradient", 100),
}


@pytest.mark.parametrize("accident", list(ACCIDENTS))
def test_the_comparison_can_fail(accident: str, lab: Lab):
    name, figure, times = ACCIDENTS[accident]
    case = replace(BY_NAME[name], name=f"{name}, {accident}")
    found = lab.differences(case, observe="testing.probe:break_and_observe", accident=accident)
    assert getattr(found, figure) > times * FP32_BAR, found
