"""The examples to copy: each script's commands plan, check and write the launch files of its cluster and model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.planner.__main__ import main

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NAMES = ("two_kinds", "long_context", "slurm", "kubernetes")
RECORDER = "import json, sys\nwith open(sys.argv[1], 'a') as log:\n    log.write(json.dumps(sys.argv[2:]) + '\\n')\n"


def commands_of(script: Path, out: Path) -> list[list[str]]:
    """The planner's command lines that a script gives, recorded instead of run."""
    recorder, log = out / "recorder.py", out / "commands"
    recorder.write_text(RECORDER)
    environment = {**os.environ, "PLANNER": f"{sys.executable} {recorder} {log}"}
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    subprocess.run([str(script), str(out)], check=True, timeout=60, env=environment, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_plans_checks_and_emits(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / name / "plan.sh"
    assert len(script.read_text().splitlines()) <= 60
    commands = commands_of(script, tmp_path)
    targets = ("jobset", "skypilot") if name == "kubernetes" else ("run",)
    assert [words[0] for words in commands] == ["plan", "check", *("emit" for _ in targets)]
    for words in commands:
        cheap = ["--no-verify", "--limit-s", "5"] if words[0] == "plan" else []
        assert main([*words, *cheap]) == 0, words
    plan = json.loads((tmp_path / "plan.json").read_text())
    if name == "long_context":
        assert plan["schedule"]["name"] == "slimpipe"
    for target in targets:
        script = "train.sbatch" if target == "run" else f"{target}.yaml"
        assert (tmp_path / target / script).exists() and (tmp_path / target / "torchrun-node-0.sh").exists()
