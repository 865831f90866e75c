"""The cases of one file: rows of its table, those that a session has selected, run and compared with one process."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec
from testing.cases import Case, build_plan
from testing.compare import Differences, compare
from testing.families import ALL_FAMILIES
from testing.feature_cases import with_expert_parallel
from testing.lab import Lab
from testing.runner import Finished
from testing.slimpipe_cases import with_context_parallel_sizes

_OF_A_CASE = ("transport", "by_samples", "clip", "overlap", "own")


def new_case(
    name: str,
    sizes: list[list[int]],
    layers: Sequence[int | Sequence[int]],
    *,
    family: str = "llama",
    extra: str = "",
    schedule: ScheduleSpec | None = None,
    ep: Sequence[Sequence[int]] | None = None,
    cp: int | Sequence[Sequence[int]] = 1,
    shares: tuple[int, ...] = (),
    seed: str | None = None,
    **options: Any,
) -> Case:
    """A row of a table of cases.

    Args:
        sizes: ``sizes[s][q]``: TP size of replica q of stage s.
        layers: Of every stage, or of every chunk of it.
        family: Key of ``ALL_FAMILIES``, which also says how many later tokens are predicted.
        extra: More flags, of the reference too.
        schedule: Without, 1F1B.
        ep: EP sizes as ``sizes``.
        cp: Context-parallel size, or those of all replicas.
        shares: Of the ranks of replicas that have as many.
        seed: Of routing and ranks; the name without.
        **options: Fields of Case, and of a plan as ``build_plan`` takes them.
    """
    of_case = {key: options.pop(key) for key in _OF_A_CASE if key in options}
    chunks = [(row,) if isinstance(row, int) else tuple(row) for row in layers]
    plan = build_plan(sizes, list(map(sum, chunks)), random.Random(name if seed is None else seed), **options)
    if cp != 1:
        row = [[cp] * len(stage) for stage in sizes] if isinstance(cp, int) else cp
        plan = replace(plan, stages=with_context_parallel_sizes(plan.stages, row, shares))
    plan = plan if ep is None else with_expert_parallel(plan, ep)
    flags = ALL_FAMILIES.get(family, ())
    later = int(flags[flags.index("--mtp-num-layers") + 1]) if "--mtp-num-layers" in flags else 0
    stages = tuple(replace(stage, layers=row) for stage, row in zip(plan.stages, chunks, strict=True))
    model = replace(plan.model, mtp_num_layers=later)
    plan = replace(plan, model=model, stages=stages, schedule=schedule or plan.schedule)
    return Case(name, plan, family=family, extra=tuple(extra.split()), **of_case)


def tiers(names: Iterable[str], full: Collection[str]) -> list[Any]:
    """Parameters of a test, of which those in ``full`` are for the full tier only."""
    found = list(names)
    assert set(full) <= set(found), sorted(set(full) - set(found))
    return [pytest.param(name, marks=pytest.mark.full) if name in full else name for name in found]


def selected[T](by_name: Mapping[str, T], request: pytest.FixtureRequest) -> dict[str, T]:
    """Those that selected tests of the asking file have as their ``name``."""
    wanted = [
        item.callspec.params.get("name")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return {name: value for name, value in by_name.items() if name in wanted}


def run_selected(by_name: Mapping[str, Case], lab: Lab, request: pytest.FixtureRequest) -> dict[str, Finished]:
    cases = selected(by_name, request).values()
    for case in cases:
        lab.reference(case)
    return {done.job.name: done for done in lab.runner.run_all([lab.job(case) for case in cases], at_once=2)}


def compared(case: Case, done: Finished, lab: Lab) -> Differences:
    """How far a run of a case is from one process of stock Megatron."""
    return compare(done.check().job.log_dir, case.plan, lab.reference(case))
