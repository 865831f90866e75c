"""What the planner's tests share in a process."""

import pytest

from tools.planner.costs import plain


@pytest.fixture(scope="session", autouse=True)
def compiled_loops() -> None:
    """A process looks for a compiler once; some tests take it from the path."""
    plain.loops()


@pytest.fixture
def asks_megatron(monkeypatch):
    """``emit`` asks Megatron's own parser in a process of its own, which takes seconds: once is enough."""
    monkeypatch.setenv("HET_PLAN_VERIFY", "1")
