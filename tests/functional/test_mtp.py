"""Multi-token prediction under plans: training and the losses in the log equal those of one process."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cases import Case, build_plan, with_schedule
from benchmarks.compare import compare
from benchmarks.expert_cases import divided
from benchmarks.families import ALL_FAMILIES
from benchmarks.lab import Lab
from benchmarks.runner import Finished

BAR = 1e-5


def make(name: str, sizes: list[list[int]], layers: list[int], family: str = "later-tokens", **options: Any) -> Case:
    """A case; what is not an option of a case is one of its plan."""
    of_case = {key: options.pop(key) for key in ("overlap", "own") if key in options}
    plan = build_plan(sizes, layers, random.Random(name), **{"even_routing": False, **options})
    flags = ALL_FAMILIES[family]
    later = int(flags[flags.index("--mtp-num-layers") + 1])
    return Case(name, replace(plan, model=replace(plan.model, mtp_num_layers=later)), family=family, **of_case)


BY_NAME = {
    case.name: case
    for case in (
        make("mixed-tp", [[1], [2, 1]], [2, 3], sequence_parallel=True, distributed_optimizer=True),
        make("one-stage", [[1, 1]], [5], recompute="full"),
        replace(
            with_schedule(make("tied", [[1, 1], [1]], [1, 2], tied=True, overlap=True), "interleaved", 2, {}),
            name="tied",
        ),
        replace(
            with_schedule(make("in-a-v", [[2, 1], [1]], [2, 1], distributed_optimizer=True), "zb-v", 2, {}),
            name="in-a-v",
        ),
        make("experts", [[1], [2, 1]], [2, 3], "later-tokens-experts", sequence_parallel=True),
    )
}
BY_NAME["experts"] = replace(BY_NAME["experts"], plan=divided(BY_NAME["experts"].plan, [[1], [2, 1]]))


def logged(log: str) -> list[float]:
    return [float(value) for value in re.findall(r"mtp_\d loss: (\S+)", log)]


@pytest.mark.parametrize("name", list(BY_NAME))
def test_equals_one_process(name: str, lab: Lab, finished: dict[str, Finished]):
    case, done = BY_NAME[name], finished[name].check()
    reference = lab.reference(case)
    found = compare(done.job.log_dir, case.plan, reference)
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found
    expected = logged((reference / "rank-0.log").read_text())
    assert len(expected) == 10 * case.plan.model.mtp_num_layers
    assert logged(done.log()) == pytest.approx(expected, rel=BAR)
