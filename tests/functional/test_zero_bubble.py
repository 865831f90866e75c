"""Split backward passes train as stock Megatron does in one process; ``benchmarks/parity.py`` has more plans."""

import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec
from testing.cases import LAYERS, Case
from testing.lab import Lab
from testing.runner import words
from testing.slimpipe_cases import PLAIN, sliced_case
from tests.functional.selected import new_case, tiers

BAR = 1e-5
_ROW = {**PLAIN, "slices": 1, "microbatches": 3, "layers": LAYERS, "schedule": "zb-h1"}
ZB_H1 = ScheduleSpec("zb-h1")
_DIVIDED: dict[str, Any] = {"distributed_optimizer": True, "schedule": ZB_H1}
CASES = [
    new_case("plain", [[1], [1]], [2, 3], schedule=ZB_H1),
    new_case("tp", [[2], [2]], [3, 2], sequence_parallel=True, recompute="full", **_DIVIDED),
    new_case("mixed-tp-tied", [[2, 1], [1]], [1, 4], even_routing=False, tied=True, **_DIVIDED),
    new_case("overlap", [[1, 1], [2]], [3, 2], overlap=True, even_routing=False, **_DIVIDED),
    new_case("biases", [[1], [2], [1]], [2, 1, 2], family="gpt", schedule=ZB_H1),
    sliced_case({**_ROW, "vocabulary": True}, "vocabulary", random.Random(0)),
    sliced_case({**_ROW, "offload": 0.75}, "offload", random.Random(0)),
    sliced_case({**_ROW, "cp": 2, "uneven": True}, "context-parallel", random.Random(0)),
]


def in_a_v(case: Case, schedule: str) -> Case:
    """The layers of every stage in two chunks, one of which may be empty."""
    stages = tuple(replace(s, layers=(s.layers[0] // 2, s.layers[0] - s.layers[0] // 2)) for s in case.plan.stages)
    plan = replace(case.plan, stages=stages, schedule=replace(case.plan.schedule, name=schedule))
    return replace(case, plan=plan, name=f"{schedule}-{case.name}")


_V_OF = {"plain": "zb-v", "mixed-tp-tied": "v-half", "overlap": "zb-v", "vocabulary": "v-half", "offload": "zb-v"}
CASES += [in_a_v(case, _V_OF[case.name]) for case in CASES if case.name in _V_OF]
CASES += [
    in_a_v(new_case("three-stages", [[1], [2], [1]], [2, 1, 2], sequence_parallel=True, recompute="full"), "v-half"),
    in_a_v(sliced_case({**_ROW, "cp": 2, "uneven": True}, "context-parallel", random.Random(0)), "zb-v"),
]
BY_NAME = {case.name: case for case in CASES}
FULL = words("mixed-tp-tied overlap biases vocabulary offload zb-v-plain v-half-three-stages zb-v-context-parallel")


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, lab: Lab) -> None:
    found = lab.differences(BY_NAME[name])
    assert max(found.loss, found.validation, found.gradient) <= BAR, found


def test_the_comparison_can_fail(lab: Lab) -> None:
    """One microbatch without its second half is seen in gradients and losses."""
    case = replace(CASES[0], name="lost-weight-gradients")
    found = lab.differences(case, observe="tests.functional.break_zero_bubble:lose_weight_gradients")
    assert found.gradient > 100 * BAR and found.loss > 3 * BAR, found


@pytest.mark.parametrize("layers", ["fused", "unfused"])
@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.full)])
def test_reductions_wait_for_layers_of_transformer_engine(schedule: str, layers: str, lab: Lab) -> None:
    """Gradients of weights are complete with the second half of a backward, also where it has run again."""
    options: dict[str, Any] = {"overlap": True, **_DIVIDED}
    case = new_case(f"late-{layers}", [[1, 1], [1]], [2, 2], even_routing=False, recompute="full", **options)
    case = case if schedule == "zb-h1" else in_a_v(case, schedule)
    found = lab.differences(case, observe=f"tests.functional.engine_layers:{layers}")
    assert max(found.loss, found.validation, found.gradient) <= BAR, found
