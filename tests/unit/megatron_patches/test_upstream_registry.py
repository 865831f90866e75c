"""The registry: installing, refusing, taking out; on modules made for the purpose."""

import contextlib
import functools
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

from megatron_het import megatron_patches as registry
from megatron_het.distributed import GroupError
from megatron_het.distributed import groups as creation
from megatron_het.megatron_patches import UPSTREAM_VERSION, Patch, releases
from megatron_het.megatron_patches import __main__ as command
from megatron_het.megatron_patches.releases import (
    RELEASES,
    Megatron,
    PatchError,
    Release,
    TorchName,
    check,
    differences,
    find,
)

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
    assert registry.moved(patch.sources) == {}


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


# Private names of torch: known, and looked at before they are leaned on.


def test_the_installed_torch_has_all_names() -> None:
    assert differences() == []


def test_what_is_missing_or_different_is_named() -> None:
    gone = TorchName("torch.distributed.distributed_c10d._no_such_name", (), "of a test")
    other = TorchName("torch.distributed.distributed_c10d._process_group_name", ("ranks",), "of a test")
    assert "_no_such_name is not there; of a test" in differences([gone])[0]
    assert "takes ranks, use_hashed_name, not ranks; of a test" in differences([other])[0]


@pytest.fixture
def world():
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_group_has_the_name_that_it_was_given(world: None) -> None:
    group = creation.create_group("stage", [0, 1], "fake", 5.0)
    assert group.group_name == creation.group_name("stage.fake", [0, 1]) + "/0"


_GONE = TorchName("torch.distributed.distributed_c10d._no_such_name", (), "of a test")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ((creation, "_named", lambda name: contextlib.nullcontext()), "does not name process groups as expected"),
        ((releases, "TORCH_NAMES", (_GONE,)), "_no_such_name is not there"),
    ],
)
def test_another_torch_is_refused(world: None, monkeypatch: pytest.MonkeyPatch, changed: Any, said: str) -> None:
    monkeypatch.setattr(*changed)
    with pytest.raises(GroupError, match=said):
        creation.create_group("stage", [0, 1], "fake", 5.0)


# Which Megatron runs: that of the script, said and checked before anything is imported.

ROOT = Path(__file__).resolve().parents[3]


def _checkout(folder: Path, version: str) -> Path:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    (core / "package_info.py").write_text("".join(f"{name} = {number}\n" for name, number in numbers))
    (core / "__init__.py").write_text("")
    script = folder / "pretrain_gpt.py"
    script.write_text("print('trained')\n")
    return script


def _run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_het.run", *words]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_scripts_own_megatron_is_taken_and_an_unknown_release_refused(tmp_path: Path) -> None:
    """Started elsewhere: the installed megatron-core must not take the checkout's place."""
    script = _checkout(tmp_path / "checkout", "0.99.1")
    done = _run(str(script), cwd=tmp_path)
    assert done.returncode == 2 and "trained" not in done.stdout
    assert f"megatron-core 0.99.1 in {tmp_path / 'checkout'} (the script's own)" in done.stderr
    assert "megatron_het: megatron-core 0.99.1" in done.stderr and "Traceback" not in done.stderr


def test_the_installed_release_is_known() -> None:
    megatron = find()
    assert megatron.version in {release.version for release in RELEASES}
    assert RELEASES[0].version == UPSTREAM_VERSION
    check(megatron)
    for version in ("0.19.0", "0.20.0"):
        check(Megatron(Path("/x"), version))
    for version in ("0.21.0", "0.18.3", "1.19.2"):
        with pytest.raises(PatchError, match=f"{version} in /x"):
            check(Megatron(Path("/x"), version))


@pytest.mark.parametrize("words", [["--yaml-cfg", "c.yaml"], ["--yaml-cfg=c.yaml"], ["--yaml", "c.yaml"]])
def test_yaml_configurations_are_refused_before_megatron_reads_them(words: list[str], tmp_path: Path) -> None:
    script = _checkout(tmp_path / "checkout", UPSTREAM_VERSION)
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1"
    given = [*flags.split(), "--global-batch-size", "2", "--max-position-embeddings", "16", "--het-schedule", "1f1b"]
    done = _run(str(script), *given, *words, cwd=tmp_path)
    assert done.returncode == 2 and "--yaml-cfg = 'c.yaml': cannot be used with a plan" in done.stderr
    assert "Traceback" not in done.stderr


# What a checkout of another release would break, in one table.

HERE = 'def f(a):\n    """Adds."""\n    return a + 1'
CHANGED = HERE.replace("+ 1", "+ 2")


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (HERE, "unchanged"),
        ('def f(\n    a,\n):\n    """Adds one to a number."""\n    return (a + 1)', "text only"),
        (CHANGED, "changed"),
        (None, "gone"),
    ],
)
def test_verdicts(there: str | None, expected: str) -> None:
    assert command.verdict(HERE, there) == expected
    assert command.verdict(None, there) == ("gone" if there is None else "changed")


Sources = dict[str, str | None]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sources, Sources, dict[str, str]], int]:
    """Compare sources here with those of a checkout; patch x and mtp lean on names with these hashes."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\n")

    def run(here: Sources, there: Sources, hashes: dict[str, str]) -> int:
        monkeypatch.setattr(command, "_owners", lambda: [("patch x", hashes), ("mtp", hashes)])
        monkeypatch.setattr(command, "_sources_of", lambda checkout: there if checkout else here)
        return command.main(["--against", str(tmp_path)])

    return run


def test_one_table_and_the_changes(compare: Any, capsys: pytest.CaptureFixture[str]) -> None:
    there = {"m.same": HERE, "m.other": CHANGED, "m.gone": None}
    here = dict.fromkeys([*there, "m.only_here"], HERE)  # the last one for a patch that the other release does not need
    assert compare(here, there, dict.fromkeys(here, "0" * 64)) == 1
    said = capsys.readouterr().out
    assert "| m.same | unchanged | yes | patch x, mtp |" in said
    assert "| m.other | changed | no | patch x, mtp |" in said and "-    return a + 1\n+    return a + 2" in said
    assert "| m.gone | gone | no | patch x, mtp |" in said and "only_here" not in said


def test_changes_that_were_read_are_no_failure(
    compare: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Release("9.9", "9.9.0", "a test", {"m.other": registry.text_hash(CHANGED)})
    monkeypatch.setattr("megatron_het.megatron_patches.releases.RELEASES", (*RELEASES, read))
    assert compare({"m.other": HERE}, {"m.other": CHANGED}, {"m.other": "0" * 64}) == 0
    assert "| m.other | changed | yes | patch x, mtp |" in capsys.readouterr().out


def test_the_first_releases_sources_were_read(compare: Any) -> None:
    first = registry.text_hash(HERE)
    assert compare({"m.first": CHANGED}, {"m.first": HERE}, {"m.first": first}) == 0
    both = ("m.first", "m.other")
    hashes = {"m.first": "0" * 64, "m.other": first}  # of another name
    assert compare(dict.fromkeys(both, CHANGED), dict.fromkeys(both, HERE), hashes) == 1


def test_a_release_that_is_not_known_is_one_more_failure(
    compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 99\nPATCH = 1\n")
    assert compare({"m.same": HERE}, {"m.same": HERE}, {"m.same": "0" * 64}) == 1
    assert "Runs with megatron-core 0.99.1 in" in capsys.readouterr().out.splitlines()[-1]


def test_a_folder_without_megatron_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--against", str(tmp_path / "none")]) == 2
    assert "no Megatron-LM checkout" in capsys.readouterr().err
