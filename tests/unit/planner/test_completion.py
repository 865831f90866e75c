"""Shell completion: what real shells complete with the printed scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_het.elastic import __main__ as elastic
from tools.planner.__main__ import COMMANDS, main

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    """By shell."""
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr(sys.stdout, "write", written.append)
        found = {}
        for shell in SHELLS:
            written.clear()
            assert main(["completion", shell]) == 0
            found[shell] = "".join(written)
    return found


def in_bash(script: str, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    (folder / ".script").write_text(script, encoding="utf-8")
    function = f"_shtab_{words[0].replace('-', '_')}"
    body = 'source ./.script; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); ' + function
    body += '; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-c", body, "bash", *words]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    assert not found.stderr
    return found.stdout.split()


def test_bash_completes_commands_options_values_and_files(scripts: dict[str, str], tmp_path: Path) -> None:
    bash = scripts["bash"]
    assert in_bash(bash, tmp_path, "het-plan", "") == list(COMMANDS)
    assert in_bash(bash, tmp_path, "het-plan", "dr") == ["dry-run"]
    assert in_bash(bash, tmp_path, "het-plan", "plan", "--obj") == ["--objective"]
    assert in_bash(bash, tmp_path, "het-plan", "plan", "--objective", "") == ["throughput", "cost"]
    assert in_bash(bash, tmp_path, "het-plan", "completion", "z") == ["zsh"]
    assert in_bash(bash, tmp_path, "het-plan", "dry-run", "p.json", "--", "--l") == []
    (tmp_path / "model.yaml").touch()
    (tmp_path / "models").mkdir()
    assert sorted(in_bash(bash, tmp_path, "het-plan", "plan", "--model", "mo")) == ["model.yaml", "models"]
    assert in_bash(bash, tmp_path, "het-plan", "check", "mo") == ["model.yaml", "models"]
    assert in_bash(bash, tmp_path, "het-plan", "quickstart", "--out", "mo") == ["models"]


def test_bash_completes_the_other_programs(scripts: dict[str, str], tmp_path: Path) -> None:
    bash = scripts["bash"]
    assert in_bash(bash, tmp_path, "het-run", "--start") == ["--start-controller"]
    assert in_bash(bash, tmp_path, "het-run", "") == list(elastic.COMMANDS)
    assert in_bash(bash, tmp_path, "het-run", "status", "--js") == ["--json"]
    assert in_bash(bash, tmp_path, "het-doctor", "--ch") == ["--checkpoints"]
    assert in_bash(bash, tmp_path, "het-doctor", "--transport", "n") == ["nccl"]
    (tmp_path / "plan.json").touch()
    assert in_bash(bash, tmp_path, "het-run", "--plans", "pl") == ["plan.json"]


@pytest.mark.parametrize("program", ["het-plan", "het-run", "het-doctor"])
def test_zsh_and_fish_get_every_program(scripts: dict[str, str], program: str) -> None:
    assert f"compdef _shtab_{program.replace('-', '_')} -N {program}" in scripts["zsh"]
    assert f"complete -c {program} -f" in scripts["fish"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_options_and_values(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".script").write_text(scripts["fish"], encoding="utf-8")

    def offered(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", f"source .script; complete -C '{line}'"]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
        return [row.split("\t")[0] for row in found.stdout.splitlines()]

    assert offered("het-plan dr") == ["dry-run"]
    assert sorted(offered("het-plan plan --objective ")) == ["cost", "throughput"]
    assert offered("het-run --start") == ["--start-controller"]
    assert offered("het-doctor --transport n") == ["nccl"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_the_script(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".script").write_text(scripts["zsh"], encoding="utf-8")
    body = 'autoload -U compinit && compinit -u -D; eval "$(<.script)"; print ${_comps[het-plan]} ${_comps[het-run]}'
    found = subprocess.run(["zsh", "-fc", body], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout.split() == ["_shtab_het_plan", "_shtab_het_run"]
    assert not found.stderr


def test_without_the_library_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "shtab" in line and "pip install 'megatron-het[planner]'" in line
