"""``emit`` asks Megatron's own parser in a process of its own, which takes seconds: once is enough."""

import pytest


@pytest.fixture
def asks_megatron(monkeypatch):
    """The test wants Megatron's own answer."""
    monkeypatch.setenv("HET_PLAN_VERIFY", "1")
