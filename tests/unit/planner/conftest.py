"""``emit`` asks Megatron's own parser in a process of its own, which takes seconds: once is enough."""

import pytest


@pytest.fixture(autouse=True)
def _without_a_start(request, monkeypatch):
    if "asks_megatron" not in request.fixturenames:
        monkeypatch.setattr("tools.planner.emit.command.check_start", lambda words, world_size: [])


@pytest.fixture
def asks_megatron():
    """The test wants Megatron's own answer."""
