"""What a worker does once is not done again in a change."""

from __future__ import annotations

import inspect

import pytest

from megatron_het.elastic import warm


class Thing:
    """Has a source."""


def test_sources_are_found_once(monkeypatch: pytest.MonkeyPatch):
    asked, original = [], inspect.getsource

    def getsource(thing):
        asked.append(thing)
        return original(thing)

    monkeypatch.setattr(inspect, "getsource", getsource)
    for _ in range(2):
        warm.remember_sources()
        assert "Has a source." in inspect.getsource(Thing)
    assert asked == [Thing]
