"""Cases whose microbatches differ in size: other parities' cases, with the same samples cut otherwise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.cases import MICROBATCHES, Case, build_plan, random_case, split_layers, with_schedule
from benchmarks.slimpipe_cases import slimpipe_cases
from benchmarks.zero_bubble_cases import zero_bubble_cases

_MIXED, _SLICED, _SHARED, _SPLIT = 6, 5, 6, 3


def with_sizes(case: Case, sizes: Sequence[int], rng: random.Random) -> Case:
    """The case with microbatches of these sizes, each on any replica of its stages.

    Args:
        case: Any case; its flags stay.
        sizes: Sequences per microbatch, at least as many as a stage has replicas.
        rng: For the routing.
    """
    assert sum(sizes) == MICROBATCHES
    training = replace(case.plan.training, micro_batch_size=max(sizes), micro_batch_sizes=tuple(sizes))
    stages = []
    owners: list[int] = []
    aligned = len({tuple(r.microbatches for r in stage.replicas) for stage in case.plan.stages}) == 1
    for stage in case.plan.stages:
        count = len(stage.replicas)
        if not (aligned and owners):  # pipelines that do not cross stay such
            owners = [*range(count), *(rng.randrange(count) for _ in range(len(sizes) - count))]
            rng.shuffle(owners)
        replicas = (
            replace(r, microbatches=tuple(m for m, owner in enumerate(owners) if owner == q))
            for q, r in enumerate(stage.replicas)
        )
        stages.append(replace(stage, replicas=tuple(replicas)))
    plan = replace(case.plan, training=training, stages=tuple(stages))
    # Samples, not passes, are what the reference has in common.
    own = (*case.own, "--micro-batch-size", str(max(sizes)))
    chosen = {**case.chosen, "sizes": list(sizes)}
    return replace(case, plan=plan, own=own, chosen=chosen, name=f"sizes-{'-'.join(map(str, sizes))}-{case.name}")


def random_sizes(least: int, rng: random.Random) -> list[int]:
    """At least so many sizes that differ and add up to the batch."""
    while True:
        cuts = sorted(rng.sample(range(1, MICROBATCHES), rng.randint(max(least, 2), MICROBATCHES - 1) - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, MICROBATCHES], strict=True)]
        if len(set(sizes)) > 1:
            return sizes


def poplar_cases(seed: int, quick: bool) -> list[Case]:
    """All cases; with ``quick`` every fourth one."""
    rng = random.Random(seed)
    bases: list[Case] = []
    while len(bases) < _MIXED:
        case = random_case(f"mixed-{len(bases)}", rng)
        if case.plan.training.precision == "fp32":
            bases.append(case)
    sliced = slimpipe_cases(seed, quick=False)
    shared = [case for case in sliced if case.chosen.get("exchange") or case.chosen.get("cp", 1) > 1]
    bases += rng.sample([case for case in sliced if case not in shared], _SLICED)
    bases += rng.sample(shared, _SHARED)
    bases += rng.sample([case for case in zero_bubble_cases(seed, quick=False) if _is_fp32(case)], _SPLIT)
    for name, chunks, parameters in (
        ("interleaved", 2, {}),
        ("ministage", 2, {"window": True}),
        ("ministage", 2, {"window": True, "per_microbatch": True, "offload": True}),
        ("gpipe", 1, {}),
    ):
        plan = build_plan([[1, 1], [2]], split_layers(2, False, rng), rng, distributed_optimizer=True)
        if parameters.get("per_microbatch"):
            plan = build_plan([[1], [1]], split_layers(2, False, rng), rng, distributed_optimizer=True)
        bases.append(
            with_schedule(
                Case(f"plain-{len(bases)}", plan, chosen={"precision": "fp32"}), name, chunks, dict(parameters)
            )
        )
    cases = [with_sizes(case, _sizes_for(case, rng), rng) for case in bases]
    return cases[::4] if quick else cases


def _sizes_for(case: Case, rng: random.Random) -> list[int]:
    """Sizes of as many microbatches as the case's schedule can run."""
    least, whole = max(len(stage.replicas) for stage in case.plan.stages), 1
    if case.plan.schedule.name == "interleaved":  # microbatches go in groups of at least the number of stages
        whole = len(case.plan.stages)
    while True:
        sizes = random_sizes(least, rng)
        if len(sizes) % whole == 0:
            return sizes


def _is_fp32(case: Case) -> bool:
    return case.plan.training.precision == "fp32"
