"""Fixtures that run many distributed jobs from one process that has imported Megatron."""

import functools
import os
from collections.abc import Callable, Iterator

import pytest

from testing.compare import Differences
from testing.lab import Lab
from testing.runner import Finished, Runner
from tests.functional.selected import compared, run_selected

# The gradients of the first step and three updates show any wrong sum; benchmarks.parity trains for longer.
STEPS = 4


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def lab_of(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[Lab]], Lab]:
    """The lab of each kind; data, start checkpoints and references are those of all workers of the session."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "lab"

    @functools.cache
    def lab_of(kind: type[Lab]) -> Lab:
        return kind(runner, tmp_path_factory.mktemp(kind.__name__), steps=STEPS, shared=shared)

    return lab_of


@pytest.fixture(scope="session")
def lab(lab_of: Callable[[type[Lab]], Lab]) -> Lab:
    return lab_of(Lab)


@pytest.fixture(scope="module")
def finished(lab: Lab, request: pytest.FixtureRequest) -> dict[str, Finished]:
    """The runs of all selected cases of the file's ``BY_NAME``, two at a time."""
    return run_selected(request.module.BY_NAME, lab, request)


@pytest.fixture
def found(name: str, lab: Lab, finished: dict[str, Finished], request: pytest.FixtureRequest) -> Differences:
    """How far the run of one of these cases is from one process of stock Megatron."""
    return compared(request.module.BY_NAME[name], finished[name], lab)
