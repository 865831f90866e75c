"""ZeRO-0 to 3 without a pipeline train as stock Megatron does in one process, under unequal replicas.

``benchmarks/parity.py --schedule data-parallel`` has more plans.
"""

import json
import random

import pytest

from testing.cases import Case
from testing.compare import Differences
from testing.feature_cases import zero_case
from testing.runner import Finished

BAR = 1e-5


def made() -> list[Case]:
    """Replicas with other numbers of passes of other sizes; one replica of ZeRO-3 keeps no state."""
    rng = random.Random(0)
    return [
        zero_case((1, 1), 0, 1, {}, rng),
        zero_case((1, 1), 1, 2, {}, rng),
        zero_case((1, 1, 1), 2, 2, {}, rng),
        zero_case((1, 1, 1), 3, 4, {"window": {"offload": True}, "shares": (2, 1, 0)}, rng),
    ]


BY_NAME = {case.name: case for case in made()}


@pytest.mark.parametrize("name", list(BY_NAME))
def test_equals_one_process(name: str, found: Differences) -> None:
    assert max(found.loss, found.validation, found.gradient) <= BAR, found


@pytest.mark.parametrize("name", [name for name, case in BY_NAME.items() if case.chosen["zero"] > 1])
def test_collectives_are_per_pass(name: str, finished: dict[str, Finished]) -> None:
    """As many on every replica, however few passes it has."""
    case, done = BY_NAME[name], finished[name].check()
    reports = [json.loads((done.job.log_dir / f"rank-{r}.json").read_text()) for r in range(case.plan.world_size)]
    layers = sum(max(1, n) for n in case.plan.stages[0].layers)
    passes = max(len(replica.microbatches) for replica in case.plan.stages[0].replicas)
    assert {report["window"]["reductions"] for report in reports} == {layers * passes}
    assert len({len(replica.microbatches) for replica in case.plan.stages[0].replicas}) > 1
    gathers = {report["window"]["gathers"] for report in reports}
    assert len(gathers) == 1
    assert gathers == {layers} if case.chosen["zero"] == 2 else min(gathers) >= layers * passes
