"""Microbatches of different size train as stock Megatron does in one process.

``benchmarks/parity.py --schedule unequal-microbatches`` has more plans.
"""

import random

import pytest

from testing.cases import Case, build_plan, with_schedule
from testing.compare import Differences
from testing.feature_cases import with_sizes
from testing.slimpipe_cases import PLAIN, sliced_case
from tests.functional.selected import tiers

BAR = 1e-5
_ROW = {**PLAIN, "microbatches": 3}


def made() -> list[Case]:
    """Data parallelism alone, mixed TP, slices with what goes over the stages, context parallelism, a window."""
    rng = random.Random(5)
    dp = Case(
        "alone", build_plan([[1, 1, 1]], [2], rng, distributed_optimizer=True), own=("--eval-micro-batch-size=3",)
    )
    mixed = Case("mixed", build_plan([[2, 1], [1]], [2, 3], rng, sequence_parallel=True, tied=True))
    exchange = {"exchange": {"context_exchange": True, "exchange_idle": True}, "vocabulary": True, "offload": 0.5}
    window = Case("window", build_plan([[1, 1], [1]], [2, 2], rng, distributed_optimizer=True))
    return [
        with_sizes(dp, (3, 1, 2), rng),
        with_sizes(mixed, (1, 4, 1), rng),
        with_sizes(sliced_case({**_ROW, **exchange}, "exchange", rng), (1, 3, 2), rng),
        with_sizes(sliced_case({**_ROW, "cp": 2, "tied": True}, "context-parallel", rng), (2, 3, 1), rng),
        with_sizes(with_schedule(window, "ministage", 2, {"window": True}), (2, 1, 3), rng),
    ]


BY_NAME = {case.name: case for case in made()}
FULL = {"sizes-2-3-1-context-parallel"}


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences) -> None:
    assert max(found.loss, found.validation, found.gradient) <= BAR, found
