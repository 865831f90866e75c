"""What a worker does once is not done again in a change."""

from __future__ import annotations

import ast
import inspect

import pytest

from megatron_het.elastic import worker as warm


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


def test_configurations_are_parsed_once_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspect, "getsource", inspect.unwrap(inspect.getsource))
    monkeypatch.setattr(ast, "parse", inspect.unwrap(ast.parse))
    warm.remember_sources()
    source = "@dataclass\nclass Thing:\n    x: int = 1\n"
    assert ast.parse(source) is ast.parse(source)
    assert ast.dump(ast.parse(source)) == ast.dump(inspect.unwrap(ast.parse)(source))
    other = "class Thing:\n    x: int = 1\n"
    assert ast.parse(other) is not ast.parse(other), "somebody may change it"
    assert ast.parse(source, type_comments=True) is not ast.parse(source)
