"""What a checkout of another release would break, in one table."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from megatron_het.megatron_patches import __main__ as command
from megatron_het.megatron_patches.releases import RELEASES, Release

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


def test_one_table_and_the_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    there = {"m.same": HERE, "m.other": CHANGED, "m.gone": None}
    monkeypatch.setattr(command, "whose", lambda: {dotted: ["patch x", "mtp"] for dotted in there})
    monkeypatch.setattr(command, "_sources_of", lambda checkout: there if checkout else dict.fromkeys(there, HERE))
    assert command.main(["--against", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "| m.same | unchanged | yes | patch x, mtp |" in said
    assert "| m.other | changed | no | patch x, mtp |" in said and "-    return a + 1\n+    return a + 2" in said
    assert "| m.gone | gone | no | patch x, mtp |" in said


def test_changes_that_were_read_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    monkeypatch.setattr(command, "whose", lambda: {"m.other": ["mtp"]})
    monkeypatch.setattr(command, "_sources_of", lambda checkout: {"m.other": CHANGED if checkout else HERE})
    read = Release("9.9", "9.9.0", "a test", {"m.other": hashlib.sha256(CHANGED.encode()).hexdigest()})
    monkeypatch.setattr("megatron_het.megatron_patches.releases.RELEASES", (*RELEASES, read))
    assert command.main(["--against", str(tmp_path)]) == 0
    assert "| m.other | changed | yes | mtp |" in capsys.readouterr().out


def test_the_first_releases_sources_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    owners = [("mtp", {"m.first": hashlib.sha256(HERE.encode()).hexdigest()})]
    monkeypatch.setattr(command, "_owners", lambda: owners)
    monkeypatch.setattr(command, "_sources_of", lambda checkout: {"m.first": HERE if checkout else CHANGED})
    assert command.main(["--against", str(tmp_path)]) == 0
    monkeypatch.setattr(
        command, "_owners", lambda: [("mtp", {"m.first": "0" * 64, "m.other": owners[0][1]["m.first"]})]
    )
    monkeypatch.setattr(
        command, "_sources_of", lambda checkout: dict.fromkeys(("m.first", "m.other"), HERE if checkout else CHANGED)
    )
    assert command.main(["--against", str(tmp_path)]) == 1  # of another name


def test_a_folder_without_megatron_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--against", str(tmp_path / "none")]) == 2
    assert "no Megatron-LM checkout" in capsys.readouterr().err
