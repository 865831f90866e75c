"""Layers of experts under plans equal stock Megatron in one process: losses, gradients, and what Megatron logs of them.

``benchmarks/parity.py --model moe`` has more plans, of every schedule.
"""

import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.nccl_order import in_nccl_order, transports
from megatron_het.plan import ScheduleSpec
from testing.cases import Case, with_replicas
from testing.compare import Differences, compare
from testing.families import EXPERT_FAMILIES
from testing.lab import Lab
from testing.runner import Finished, words
from testing.zorse_cases import with_shares
from tests.functional.selected import new_case, tiers

BAR = 1e-5
_ITERATION = re.compile(r" iteration +(\d+)/(.*)")
_LOGGED = re.compile(r" (\w*load_balancing_loss|z_loss): (\S+)")


def make(name: str, family: str, sizes: list[list[int]], layers: list[Any], **more: Any) -> Case:
    options = {"even_routing": False, "sequence_parallel": True, **more}
    return new_case(name, sizes, layers, family=family, **options)


def with_etp(case: Case, sizes: tuple[int, ...]) -> Case:
    """With these expert-tensor-parallel sizes by stage."""
    return replace(case, plan=with_replicas(case.plan, lambda s, _, replica: replace(replica, etp=sizes[s])))


def sharing(case: Case) -> Case:
    """With unequal shares of the state for the four replicas of the only stage."""
    return replace(case, plan=with_shares(case.plan, ((4, 2, 0, 1),)))


def routed(case: Case) -> Case:
    """With two microbatches for each of the first two replicas of a stage of four, and one for the others."""
    first, *others = case.plan.stages
    given = ((0, 3), (1, 4), (2,), (5,))
    replicas = tuple(replace(r, microbatches=ids) for r, ids in zip(first.replicas, given, strict=True))
    return replace(case, plan=replace(case.plan, stages=(replace(first, replicas=replicas), *others)))


_GATHERS = ("--moe-token-dispatcher-type", "allgather")
_SINKHORN = "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-router-topk 1"
_DIVIDED: dict[str, Any] = {"distributed_optimizer": True}
_EVEN: dict[str, Any] = {"even_routing": True}
_BOTH = _EVEN | _DIVIDED
_CHUNKS, _ROWS = [(2, 1), (1, 1)], [[1], [1, 1], [1, 1, 1]]
_FOUR, _PAIRS = [[1, 1], [1, 1]], [[2, 2], [2, 2]]
_WINDOW = ScheduleSpec("ministage", {"window": True, "update": "exact"})
_ZERO_3 = ScheduleSpec("data-parallel", {"window": True, "zero": 3})
_SPLIT = ScheduleSpec("interleaved", {"vocabulary": True, "offload_activations": 0.75})
_ZB_H1, _ZB_V = ScheduleSpec("zb-h1"), ScheduleSpec("zb-v")
_IN_TWO = ScheduleSpec("slimpipe", {"slices": 2})
_IN_FOUR = ScheduleSpec("slimpipe", {"slices": 4})
_IN_EIGHT = ScheduleSpec("slimpipe", {"slices": 8})
CASES = [
    make("mixed-tp", "mixtral", [[1], [2, 1]], [2, 3], clip=0.05, **_DIVIDED),
    # More TP than ranks per stage in the mean.
    make("dense-first-with-biases", "deepseek", [[2], [1], [1, 1]], [1, 2, 2], **_DIVIDED),
    make("norms-of-heads-in-mixed-tp", "qwen3-moe", [[1, 2], [1]], [3, 2], tied=True),
    make(
        "sequence-balance", "sequence-balance", [[2, 1], [2]], [3, 2], ep=[[2, 1], [1]], own=_GATHERS, recompute="full"
    ),
    make("global-balance", "global-balance", [[2], [1]], [3, 2], ep=[[2], [1]], recompute="selective"),
    make("capacity", "capacity", [[1, 1], [1]], [3, 2], overlap=True),
    # Normalised over all tokens of a microbatch, of which a TP rank has a part.
    make("sinkhorn", "mixtral", [[1], [2, 1]], [2, 3], recompute="full", extra=_SINKHORN, **_DIVIDED),
    make("in-a-v", "mixtral", [[1], [1, 1]], [(1, 1), (2, 1)], schedule=_ZB_V),
    make("interleaved", "deepseek", [[1], [1]], _CHUNKS, schedule=ScheduleSpec("interleaved")),
    make("window", "deepseek", [[2, 2], [1]], _CHUNKS, ep=[[2, 1], [1]], schedule=_WINDOW, **_DIVIDED),
    # In one stage a rank has half of the experts cut in two, or all of them whole.
    make("ep-in-mixed-tp", "deepseek", [[2], [4, 1]], [2, 3], ep=[[2], [2, 1]], clip=0.05, overlap=True, **_DIVIDED),
    # The experts of a layer on two replicas, or on all of a stage's ranks, each of which has a copy of attention.
    make("over-replicas", "mixtral", [[1, 1], [1, 1]], [3, 2], ep=[[2, 2], [2, 2]], clip=0.05, **_EVEN),
    make(
        "over-replicas-with-tp", "deepseek", [[2, 2], [1]], [3, 2], ep=[[4, 4], [1]], overlap=True, **_EVEN, **_DIVIDED
    ),
    with_etp(make("copies-within-tp", "sequence-balance", [[2], [1, 1]], [3, 2], **_EVEN), (1, 2)),
    # Two expert groups of one stage with different numbers of microbatches.
    routed(make("over-pairs-of-replicas", "mixtral", [[1, 1, 1, 1], [1]], [3, 2], ep=[[2, 2, 2, 2], [1]])),
    # All experts once on the ranks that share sequences, or on those of two replicas.
    make("over-parts-of-sequences", "sequence-balance", [[1, 1]], [5], cp=2, ep=[[4, 4]], **_EVEN),
    make("over-replicas-interleaved", "mixtral", _FOUR, _CHUNKS, ep=_PAIRS, schedule=_SPLIT, recompute="full", **_BOTH),
    make(
        "over-replicas-zero-bubble", "deepseek", _ROWS, [2, 2, 1], ep=[[1], [2, 2], [1, 1, 1]], schedule=_ZB_H1, **_EVEN
    ),
    # The second stage has all experts with its other weights.
    make(
        "over-replicas-in-a-window",
        "mixtral",
        [[1, 1], [1]],
        _CHUNKS,
        ep=[[2, 2], [1]],
        schedule=_WINDOW,
        clip=0.05,
        **_BOTH,
    ),
    make("over-replicas-zero-3", "deepseek", [[1] * 4], [5], ep=[[2] * 4], schedule=_ZERO_3, clip=0.05, **_BOTH),
    sharing(make("over-replicas-in-shares", "mixtral", [[1] * 4], [(2, 3)], ep=[[2] * 4], schedule=_WINDOW, **_BOTH)),
    make("over-replicas-in-a-v", "mixtral", _FOUR, [(1, 1), (2, 1)], ep=_PAIRS, schedule=_ZB_V, **_EVEN),
    make("slimpipe-over-replicas", "deepseek", _FOUR, [3, 2], ep=_PAIRS, own=_GATHERS, schedule=_IN_FOUR, **_BOTH),
    make("slimpipe-slices", "deepseek", [[1], [1]], [3, 2], schedule=_IN_FOUR),
    # Balancing losses of whole microbatches and sequences, of which a pass has a part.
    make("balance-in-slices", "mixtral", [[2, 1], [1]], [3, 2], ep=[[2, 1], [1]], schedule=_IN_FOUR, **_DIVIDED),
    make(
        "sequence-balance-in-parts", "sequence-balance", [[1], [1, 1]], [3, 2], cp=2, schedule=_IN_TWO, recompute="full"
    ),
    make("balance-recomputed", "global-balance", [[2], [1]], [3, 2], schedule=_IN_EIGHT, recompute="full"),
    # At the usual rate the scores of two experts are equal up to rounding in the seventh step, and chance orders them.
    make("balance-in-context-parallelism", "qwen3-moe", [[2, 1]], [5], cp=2, shares=(3, 1), extra="--lr 9e-4"),
]
BY_NAME = {case.name: case for case in CASES}
FULL = words(
    """
    dense-first-with-biases norms-of-heads-in-mixed-tp global-balance in-a-v interleaved ep-in-mixed-tp
    over-replicas-with-tp copies-within-tp over-pairs-of-replicas over-parts-of-sequences over-replicas-interleaved
    over-replicas-zero-bubble over-replicas-zero-3 over-replicas-in-shares over-replicas-in-a-v slimpipe-slices
    slimpipe-over-replicas sequence-balance-in-parts balance-in-context-parallelism
    """
)


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences) -> None:
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["ep-in-mixed-tp", "over-replicas", "over-replicas-in-a-v", "over-replicas-in-a-window"]
)
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
