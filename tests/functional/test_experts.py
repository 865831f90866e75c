"""Layers of experts under plans equal stock Megatron in one process: losses, gradients, and what Megatron logs of them.

``benchmarks/parity.py --model moe`` has more plans, of every schedule.
"""

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.nccl_order import in_nccl_order, transports
from megatron_het.plan import ScheduleSpec
from testing.cases import Case, build_plan, with_schedule
from testing.compare import compare
from testing.families import EXPERT_FAMILIES
from testing.feature_cases import with_expert_parallel
from testing.lab import Lab
from testing.runner import Finished, words
from testing.slimpipe_cases import with_context_parallel_sizes
from tests.functional.selected import compared, tiers

BAR = 1e-5
_ITERATION = re.compile(r" iteration +(\d+)/(.*)")
_LOGGED = re.compile(r" (\w*load_balancing_loss|z_loss): (\S+)")


def make(name: str, family: str, sizes: list[list[int]], layers: list[int], **plan: Any) -> Case:
    more = {"even_routing": False, "sequence_parallel": True, **plan}
    options = {key: more.pop(key) for key in ("clip", "overlap") if key in more}
    return Case(name, build_plan(sizes, layers, random.Random(name), **more), family=family, **options)


def with_ep(case: Case, sizes: list[list[int]], **more: Any) -> Case:
    return replace(case, plan=with_expert_parallel(case.plan, sizes), **more)


def with_etp(case: Case, sizes: tuple[int, ...]) -> Case:
    """With these expert-tensor-parallel sizes by stage."""
    stages = tuple(
        replace(stage, replicas=tuple(replace(r, etp=etp) for r in stage.replicas))
        for stage, etp in zip(case.plan.stages, sizes, strict=True)
    )
    return replace(case, plan=replace(case.plan, stages=stages))


def routed(case: Case) -> Case:
    """With two microbatches for each of the first two replicas of a stage of four, and one for the others."""
    first, *others = case.plan.stages
    given = ((0, 3), (1, 4), (2,), (5,))
    replicas = tuple(replace(r, microbatches=ids) for r, ids in zip(first.replicas, given, strict=True))
    return replace(case, plan=replace(case.plan, stages=(replace(first, replicas=replicas), *others)))


def sharing(case: Case, shares: tuple[int, ...] = ()) -> Case:
    """With context parallelism, and parts of these sizes."""
    sizes = [[2] * len(stage.replicas) for stage in case.plan.stages]
    stages = with_context_parallel_sizes(case.plan.stages, sizes, shares)
    return replace(case, plan=replace(case.plan, stages=stages))


def with_chunks(case: Case, schedule: str, layers: tuple[tuple[int, ...], ...], **parameters: Any) -> Case:
    stages = tuple(replace(s, layers=cut) for s, cut in zip(case.plan.stages, layers, strict=True))
    plan = replace(case.plan, stages=stages, schedule=ScheduleSpec(schedule, parameters))
    return replace(case, plan=plan)


CASES = [
    make("mixed-tp", "mixtral", [[1], [2, 1]], [2, 3], distributed_optimizer=True, clip=0.05),
    # More TP than ranks per stage in the mean.
    make("dense-first-with-biases", "deepseek", [[2], [1], [1, 1]], [1, 2, 2], distributed_optimizer=True),
    make("norms-of-heads-in-mixed-tp", "qwen3-moe", [[1, 2], [1]], [3, 2], tied=True),
    with_ep(
        make("sequence-balance", "sequence-balance", [[2, 1], [2]], [3, 2], recompute="full"),
        [[2, 1], [1]],
        own=("--moe-token-dispatcher-type", "allgather"),
    ),
    with_ep(make("global-balance", "global-balance", [[2], [1]], [3, 2], recompute="selective"), [[2], [1]]),
    make("capacity", "capacity", [[1, 1], [1]], [3, 2], overlap=True),
    with_chunks(make("in-a-v", "mixtral", [[1], [1, 1]], [2, 3]), "zb-v", ((1, 1), (2, 1))),
    with_chunks(make("interleaved", "deepseek", [[1], [1]], [3, 2]), "interleaved", ((2, 1), (1, 1))),
    with_ep(
        with_chunks(
            make("window", "deepseek", [[2, 2], [1]], [3, 2], distributed_optimizer=True),
            "ministage",
            ((2, 1), (1, 1)),
            window=True,
            update="exact",
        ),
        [[2, 1], [1]],
    ),
    # In one stage a rank has half of the experts cut in two, or all of them whole.
    with_ep(
        make("ep-in-mixed-tp", "deepseek", [[2], [4, 1]], [2, 3], distributed_optimizer=True, clip=0.05, overlap=True),
        [[2], [2, 1]],
    ),
    # The experts of a layer on two replicas, or on all of a stage's ranks, each of which has a copy of attention.
    with_ep(make("over-replicas", "mixtral", [[1, 1], [1, 1]], [3, 2], even_routing=True, clip=0.05), [[2, 2], [2, 2]]),
    with_ep(
        make(
            "over-replicas-with-tp",
            "deepseek",
            [[2, 2], [1]],
            [3, 2],
            even_routing=True,
            distributed_optimizer=True,
            overlap=True,
        ),
        [[4, 4], [1]],
    ),
    with_etp(make("copies-within-tp", "sequence-balance", [[2], [1, 1]], [3, 2], even_routing=True), (1, 2)),
    # Two expert groups of one stage with different numbers of microbatches.
    with_ep(routed(make("over-pairs-of-replicas", "mixtral", [[1, 1, 1, 1], [1]], [3, 2])), [[2, 2, 2, 2], [1]]),
    # All experts once on the ranks that share sequences, or on those of two replicas.
    with_ep(sharing(make("over-parts-of-sequences", "sequence-balance", [[1, 1]], [5], even_routing=True)), [[4, 4]]),
    with_ep(
        with_chunks(
            make(
                "over-replicas-interleaved",
                "mixtral",
                [[1, 1], [1, 1]],
                [3, 2],
                even_routing=True,
                distributed_optimizer=True,
                recompute="full",
            ),
            "interleaved",
            ((2, 1), (1, 1)),
            vocabulary=True,
            offload_activations=0.75,
        ),
        [[2, 2], [2, 2]],
    ),
    with_ep(
        with_chunks(
            make("over-replicas-zero-bubble", "deepseek", [[1], [1, 1], [1, 1, 1]], [2, 2, 1], even_routing=True),
            "zb-h1",
            ((2,), (2,), (1,)),
        ),
        [[1], [2, 2], [1, 1, 1]],
    ),
    with_ep(
        with_chunks(
            make("over-replicas-in-a-v", "mixtral", [[1, 1], [1, 1]], [2, 3], even_routing=True),
            "zb-v",
            ((1, 1), (2, 1)),
        ),
        [[2, 2], [2, 2]],
    ),
    with_schedule(
        with_ep(
            make("over-replicas", "deepseek", [[1, 1], [1, 1]], [3, 2], even_routing=True, distributed_optimizer=True),
            [[2, 2], [2, 2]],
            own=("--moe-token-dispatcher-type", "allgather"),
        ),
        "slimpipe",
        1,
        {"slices": 4},
    ),
    with_schedule(make("slices", "deepseek", [[1], [1]], [3, 2]), "slimpipe", 1, {"slices": 4}),
    # Balancing losses of whole microbatches and sequences, of which a pass has a part.
    with_schedule(
        with_ep(make("balance", "mixtral", [[2, 1], [1]], [3, 2], distributed_optimizer=True), [[2, 1], [1]]),
        "slimpipe",
        1,
        {"slices": 4},
    ),
    sharing(
        with_schedule(
            make("sequence-balance-in-parts", "sequence-balance", [[1], [1, 1]], [3, 2], recompute="full"),
            "slimpipe",
            1,
            {"slices": 2},
        )
    ),
    with_schedule(
        make("global-balance-recomputed", "global-balance", [[2], [1]], [3, 2], recompute="full"),
        "slimpipe",
        1,
        {"slices": 8},
    ),
    # At the usual rate the scores of two experts are equal up to rounding in the seventh step, and chance orders them.
    replace(
        sharing(make("balance-in-context-parallelism", "qwen3-moe", [[2, 1]], [5]), (3, 1)), extra=("--lr", "9e-4")
    ),
]
BY_NAME = {case.name: case for case in CASES}
FULL = words(
    """
    dense-first-with-biases norms-of-heads-in-mixed-tp global-balance in-a-v interleaved ep-in-mixed-tp
    over-replicas-with-tp copies-within-tp over-pairs-of-replicas over-parts-of-sequences
    over-replicas-interleaved over-replicas-zero-bubble over-replicas-in-a-v slimpipe-slices
    slimpipe-over-replicas slimpipe-sequence-balance-in-parts balance-in-context-parallelism
    """
)


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, lab: Lab, finished: dict[str, Finished]) -> None:
    case = BY_NAME[name]
    found = compared(case, finished[name], lab)
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
    """Balancing losses by iteration and name."""
    return {
        int(i): {name: float(value) for name, value in _LOGGED.findall(rest)} for i, rest in _ITERATION.findall(text)
    }


LOGGED = words(
    """
    mixed-tp sequence-balance global-balance slimpipe-slices slimpipe-balance slimpipe-sequence-balance-in-parts
    slimpipe-global-balance-recomputed balance-in-context-parallelism
    """
)


@pytest.mark.parametrize("name", tiers(LOGGED, set(FULL) & set(LOGGED)))
def test_balancing_losses_in_the_log_are_those_of_one_process(
    name: str, lab: Lab, finished: dict[str, Finished]
) -> None:
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
