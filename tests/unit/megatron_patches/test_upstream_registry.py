"""The registry: installing, refusing, taking out; on modules made for the purpose."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator

import pytest

from megatron_het.megatron_patches import registry
from megatron_het.megatron_patches.registry import Patch, PatchError

_SOURCE = """
def greet(name):
    # a comment does not count
    return "hello " + name

class Base:
    @staticmethod
    def make(x):
        return x + 1

    def inherited(self):
        return "base"

class Derived(Base):
    pass
"""


@pytest.fixture
def upstream(tmp_path, monkeypatch) -> Iterator[types.ModuleType]:
    """An importable module that stands for upstream, and an empty record of patches."""
    (tmp_path / "standin_upstream.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_INSTALLED", {})
    import standin_upstream

    yield standin_upstream
    del sys.modules["standin_upstream"]


def _use(monkeypatch: pytest.MonkeyPatch, *patches: Patch) -> None:
    monkeypatch.setattr(registry, "all_patches", lambda: {patch.name: patch for patch in patches})


def _louder(original):
    @functools.wraps(original)
    def greet(name):
        return original(name).upper()

    return greet


def _patch(**changes) -> Patch:
    target = changes.get("target", "standin_upstream.greet")
    values = {
        "name": "louder",
        "group": "stock",
        "target": target,
        "reason": "a reason that is long enough to be one",
        "sources": {target: registry.source_hash(target)},
        "build": _louder,
    }
    return Patch(**(values | changes))


def test_install_rebinds_once_and_uninstall_restores(upstream, monkeypatch):
    original = upstream.greet
    _use(monkeypatch, _patch())
    assert registry.install("stock") == ("louder",)
    assert registry.install("louder", "stock") == ()
    assert upstream.greet("you") == "HELLO YOU"
    assert registry.installed() == ("louder",)
    assert registry.uninstall("louder") == ("louder",)
    assert upstream.greet is original
    assert registry.installed() == ()


def test_hash_is_of_upstream_even_while_installed(upstream, monkeypatch):
    patch = _patch()
    _use(monkeypatch, patch)
    registry.install("louder")
    assert registry.changed_sources(patch) == {}


def test_changed_source_is_refused_and_nothing_is_installed(upstream, monkeypatch):
    good = _patch()
    moved = _patch(
        name="moved", target="standin_upstream.Base.inherited", sources={"standin_upstream.Base.inherited": "0" * 64}
    )
    _use(monkeypatch, good, moved)
    with pytest.raises(PatchError, match="moved.*standin_upstream.Base.inherited"):
        registry.install("stock")
    assert registry.installed() == ()
    assert upstream.greet("you") == "hello you"


def test_hash_ignores_layout_but_not_code(upstream, tmp_path, monkeypatch):
    before = registry.source_hash("standin_upstream.greet")
    for name, text in (
        ("same", _SOURCE.replace("    # a comment does not count\n", "\n\n    # another\n")),
        ("other", _SOURCE.replace("hello", "goodbye")),
    ):
        (tmp_path / f"standin_{name}.py").write_text(text)
    assert registry.source_hash("standin_same.greet") == before
    assert registry.source_hash("standin_other.greet") != before


def test_static_methods_stay_static(upstream, monkeypatch):
    _use(monkeypatch, _patch(target="standin_upstream.Base.make", build=lambda make: lambda x: make(x) * 10))
    registry.install("stock")
    assert upstream.Base.make(1) == upstream.Base().make(1) == 20
    registry.uninstall()
    assert upstream.Base.make(1) == upstream.Base().make(1) == 2


def test_inherited_attribute_goes_away_again(upstream, monkeypatch):
    _use(monkeypatch, _patch(target="standin_upstream.Derived.inherited", build=lambda f: lambda self: "new"))
    registry.install("stock")
    assert (upstream.Derived().inherited(), upstream.Base().inherited()) == ("new", "base")
    registry.uninstall()
    assert "inherited" not in vars(upstream.Derived)
    assert upstream.Derived().inherited() == "base"


def test_patch_that_does_not_apply_leaves_upstream_alone(upstream, monkeypatch):
    _use(monkeypatch, _patch(applies=lambda: False, sources={"standin_upstream.greet": "0" * 64}))
    assert registry.install("stock") == ()
    assert upstream.greet("you") == "hello you"


def test_builder_given_at_install(upstream, monkeypatch):
    _use(monkeypatch, _patch(build=None))
    with pytest.raises(PatchError, match="needs its builder"):
        registry.install("louder")
    registry.install("louder", builders={"louder": _louder})
    assert upstream.greet("you") == "HELLO YOU"
    with pytest.raises(PatchError, match="has a builder already"):
        registry.install("louder", builders={"louder": _louder})


@pytest.mark.parametrize(
    "target", ["standin_upstream.gone", "standin_upstream.Gone.method", "no_such_module_at_all.name"]
)
def test_missing_upstream_name_is_named(upstream, target):
    with pytest.raises(PatchError, match=target):
        registry.source_hash(target)


def test_unknown_selection_lists_what_there_is(upstream, monkeypatch):
    _use(monkeypatch, _patch())
    with pytest.raises(PatchError, match="'sotck'.*louder.*stock"):
        registry.install("sotck")


@pytest.mark.parametrize("changes", [{"sources": {}}, {"reason": "because"}])
def test_a_patch_states_its_sources_and_its_reason(upstream, changes):
    with pytest.raises(ValueError, match="patch louder"):
        _patch(**changes)
