"""Layers of experts under plans equal stock Megatron in one process: losses, gradients, and what Megatron logs of them.

``benchmarks/parity.py --model moe`` has more plans, of every schedule.
"""

import re

import pytest

from benchmarks.nccl_order import in_nccl_order, transports
from testing.compare import Differences, compare
from testing.families import EXPERT_FAMILIES
from testing.lab import Lab
from testing.runner import Finished, words
from tests.functional.selected import cases_of, tiers

BAR = 1e-5
_ITERATION = re.compile(r" iteration +(\d+)/(.*)")
_LOGGED = re.compile(r" (\w*load_balancing_loss|z_loss): (\S+)")


BY_NAME, FULL = cases_of("experts")


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences) -> None:
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found


@pytest.mark.full
@pytest.mark.parametrize("name", ["ep-in-mixed-tp", "over-replicas", "over-replicas-in-a-v"])
def test_divided_experts_in_nccls_order(lab: Lab, name: str) -> None:
    case = BY_NAME[name]
    done = lab.runner.run(in_nccl_order(lab.job(case)))
    assert transports(done.job.log_dir) == {"nccl"}
    found = compare(done.job.log_dir, case.plan, lab.reference(case))
    assert max(found.loss, found.gradient) <= BAR, found


def logged(text: str) -> dict[int, dict[str, float]]:
    return {
        int(i): {name: float(value) for name, value in _LOGGED.findall(rest)} for i, rest in _ITERATION.findall(text)
    }


LOGGED = words(
    """
    mixed-tp sequence-balance global-balance slimpipe-slices balance-in-slices sequence-balance-in-parts
    balance-recomputed balance-in-context-parallelism
    """
)


@pytest.mark.parametrize("name", tiers(LOGGED, [name for name in LOGGED if name in FULL]))
def test_balancing_losses_in_the_log_are_of_one_process(name: str, lab: Lab, finished: dict[str, Finished]) -> None:
    """Sums over stages, slices, and replicas with different numbers of microbatches."""
    case, done = BY_NAME[name], finished[name].check()
    stock = logged((lab.reference(case) / "rank-0.log").read_text())
    mine = logged(done.log(case.plan.world_size - 1))
    assert sorted(mine) == sorted(stock) and any(value > 0.1 for value in stock[1].values())
    assert ("z_loss" in stock[1]) == ("--moe-z-loss-coeff" in EXPERT_FAMILIES[case.family])
    for name, first in stock[1].items():
        stock[2][name] = 2 * stock[2][name] - first  # stock Megatron logs the mean of both
    for iteration, values in stock.items():
        assert mine[iteration] == pytest.approx(values, rel=1e-5), iteration


@pytest.mark.full
def test_a_refusal_names_the_flag_before_anything_starts(lab: Lab) -> None:
    case = BY_NAME["mixed-tp"]
    done = lab.runner.run(lab.job(case, "--moe-router-load-balancing-type", "global_aux_loss"), check=False)
    assert set(done.returncodes) == {2}
    assert "these may have different numbers of passes" in done.log(0)
