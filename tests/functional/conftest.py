"""Fixtures that run many distributed jobs from one process that has imported Megatron."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.lab import Lab
from benchmarks.runner import Finished, Runner
from tests.functional.selected import run_selected


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    """The rank server of the session; jobs always run on the CPU."""
    with Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def lab(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Shared data, start checkpoints and references."""
    return Lab(runner, tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def finished(lab: Lab, request: pytest.FixtureRequest) -> dict[str, Finished]:
    """The runs of all selected cases of the file's ``BY_NAME``, two at a time."""
    return run_selected(request.module.BY_NAME, lab, request)
