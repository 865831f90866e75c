"""Random pools with plans for them: any schedule, mixed stages and options, and smaller plans for what is left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cases import Case, Row, Weights, build_plan, common_flags
from benchmarks.combination_cases import PARAMETERS, case_of, needs
from megatron_het.elastic.pool import Process, assign
from megatron_het.plan import Plan, PlanError

LAYERS, STEPS = 8, 16
_LARGEST, _OPTIONS, _ATTEMPTS = 4, 3, 400
# Left out: another precision is not exact to 1e-5, a clip per ministage and another recompute module are not the same
# training for all plans of a list, unequal microbatches change what Megatron reads at once.
_LEFT_OUT = {"precision", "microbatches"}
_VALUES = {
    name: [value for value in values if value not in ("per-ministage", "mlp")]
    for name, values in PARAMETERS.items()
    if name not in _LEFT_OUT
}
SCHEDULES: tuple[str, ...] = tuple(PARAMETERS["schedule"])


@dataclass(frozen=True)
class Pool:
    """A job's nodes and plans.

    Attributes:
        plans: The best one first; the last one has one rank.
        nodes: Workers of every node.
        weights: What the model is.
        clip: Bound on the gradient norm.
        own: More flags under all plans.
        rows: What the first two plans consist of, for the record.
    """

    plans: tuple[Plan, ...]
    nodes: tuple[int, ...]
    weights: Weights
    clip: float
    own: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the nodes."""
        return tuple("abcdefgh"[: len(self.nodes)])

    def flags(self) -> tuple[str, ...]:
        """Of the training, but for data and checkpoints."""
        # Updates that are never taken back need the last flag, and others do not mind.
        return (*common_flags(self.weights, self.clip, steps=STEPS), *self.own, "--rerun-mode", "disabled")


def draw(rng: random.Random, schedule: str) -> Pool:
    """A pool whose first plan has a schedule.

    Raises:
        RuntimeError: No drawn plan was valid; never seen.
    """
    for _ in range(_ATTEMPTS):
        first = _draw_case(rng, schedule, 3, _LARGEST, {})
        if first is None:
            continue
        nodes = _nodes(first.plan, rng)
        shared = {name: first.chosen["row"][name] for name in ("tied", "overlap", "distributed_optimizer")}
        if nodes is None:
            continue
        left = first.plan.world_size - max(nodes)
        second = next(filter(None, (_draw_case(rng, rng.choice(SCHEDULES), 2, left, shared) for _ in range(60))), None)
        cases = [case for case in (first, second) if case is not None]
        at_once = any(case.chosen["row"]["window"] == "at-once" for case in cases)
        return Pool(
            (*(case.plan for case in cases), *_smallest(shared)),
            nodes,
            replace(first.weights, layers=LAYERS),
            0.0 if at_once else 1.0,
            first.plan_flags(),
            tuple(_options(case) for case in cases),
        )
    raise RuntimeError(f"no plan of {_ATTEMPTS} with the schedule {schedule} is valid")


def _draw_case(rng: random.Random, schedule: str, least: int, largest: int, shared: Row) -> Case | None:
    """A valid case of so many ranks, or None."""
    row: Row = {name: values[0] for name, values in PARAMETERS.items()} | {"schedule": schedule}
    for name in rng.sample([name for name in _VALUES if name != "schedule"], _OPTIONS):
        value = rng.choice(_VALUES[name])
        if needs((name, value)).get("schedule", schedule) == schedule:
            row |= needs((name, value)) | {name: value}
    row |= shared
    try:
        case = case_of(row, "plan", rng.randrange(10**6))
    except (PlanError, ValueError):
        return None
    plan = _of_all_layers(case.plan)
    return replace(case, plan=plan) if least <= plan.world_size <= largest else None


def _of_all_layers(plan: Plan) -> Plan:
    """The plan for a model of LAYERS layers: all plans of a list train one model."""
    times = LAYERS // plan.model.num_layers
    stages = tuple(replace(s, layers=tuple(times * layers for layers in s.layers)) for s in plan.stages)
    return replace(plan, stages=stages, model=replace(plan.model, num_layers=times * plan.model.num_layers))


def _smallest(shared: Row) -> list[Plan]:
    """Plans for two ranks and for one."""
    common: dict[str, Any] = {name: shared[name] for name in ("tied", "distributed_optimizer")}
    two = build_plan([[1], [1]], [LAYERS // 2, LAYERS // 2], random.Random(0), **common)
    return [two, build_plan([[1]], [LAYERS], random.Random(0), **common)]


def _nodes(plan: Plan, rng: random.Random) -> tuple[int, ...] | None:
    """A division of the plan's ranks over at least two nodes, in which its TP groups fit."""
    for _ in range(20):
        left, found = plan.world_size, list[int]()
        while left:
            found.append(min(left, rng.choice((1, 1, 2, 2, 3))))
            left -= found[-1]
        pool = [Process(i, str(n)) for i, n in enumerate(n for n, size in enumerate(found) for _ in range(size))]
        if len(found) > 1 and assign(plan, pool) is not None:
            return tuple(found)
    return None


def _options(case: Case) -> Row:
    """Returns what is not the default in a case, as JSON values."""
    row = case.chosen["row"]
    return {name: row[name] for name, values in PARAMETERS.items() if name == "schedule" or row[name] != values[0]}


def problems(pool: Pool, files: Sequence[str]) -> list[str]:
    """Returns what the start of the training would refuse under any of the plans; for a process of its own."""
    import os

    from megatron_het import device as platform
    from megatron_het import megatron_patches as upstream
    from megatron_het.doctor.flags import problems_of

    device = platform.activate()
    upstream.install("stock")
    found: list[str] = []
    for plan, file in zip(pool.plans, files, strict=True):
        os.environ["WORLD_SIZE"] = str(plan.world_size)
        missing, texts = problems_of((*pool.flags(), "--mock-data", "--het-plan", file), device)
        found += [*missing.values(), *texts]
    return found
