"""Shell completion: what a real bash completes with the printed script."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.planner.__main__ import COMMANDS, main
from tools.planner.cli.completion import SHELLS


@pytest.fixture
def scripts(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """By shell."""
    found = {}
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        found[shell] = capsys.readouterr().out
    return found


def completed(script: str, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    (folder / "script").write_text(script, encoding="utf-8")
    body = 'source ./script; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _het_plan; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-c", body, "bash", *words]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    assert not found.stderr
    return found.stdout.split()


def test_bash_completes_commands_options_values_and_files(scripts: dict[str, str], tmp_path: Path) -> None:
    bash = scripts["bash"]
    assert completed(bash, tmp_path, "het-plan", "") == list(COMMANDS)
    assert completed(bash, tmp_path, "het-plan", "dr") == ["dry-run"]
    assert completed(bash, tmp_path, "het-plan", "plan", "--obj") == ["--objective"]
    assert completed(bash, tmp_path, "het-plan", "plan", "--objective", "") == ["throughput", "cost"]
    assert completed(bash, tmp_path, "het-plan", "completion", "z") == ["zsh"]
    assert completed(bash, tmp_path, "het-plan", "dry-run", "p.json", "--", "--l") == []
    (tmp_path / "model.yaml").touch()
    assert completed(bash, tmp_path, "het-plan", "plan", "--model", "mo") == ["model.yaml"]


def test_other_shells_know_every_command(scripts: dict[str, str]) -> None:
    assert scripts["zsh"].endswith(scripts["bash"]) and "bashcompinit" in scripts["zsh"]
    for name in COMMANDS:
        assert f" -f -a {name} -d '" in scripts["fish"]
    assert "'__fish_seen_subcommand_from plan' -l objective -x -a 'throughput cost'" in scripts["fish"]
