"""``quickstart``: what it runs, what it writes, what it refuses."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.planner.emit_plans import SMALL
from tools.planner.__main__ import main
from tools.planner.published.calibrate import SHAPES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two V100 and a Slurm that does not answer."""
    for name, script in {
        "nvidia-smi": "echo Tesla V100-SXM2-16GB, 16384; echo Tesla V100-SXM2-16GB, 16384",
        "sinfo": "exit 1",
    }.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HET_PLAN_VERIFY", "0")
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text(yaml.safe_dump(SMALL))
    return tmp_path


def test_from_a_machine_and_a_file_to_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--model", "model.yaml", "--precision", "fp16", "--extra", "--mock-data"]) == 0
    said = capsys.readouterr().out
    shown = [line for line in said.splitlines() if line.startswith("$ ")]
    assert [line.split(" tools.planner ")[-1].split()[0] for line in shown] == ["init", "plan", "check", "emit"]
    assert "--precision fp16" in shown[1]
    assert "(--tokenizer-type and --tokenizer-model)\n\nWhen that is filled in, start the job with:\n" in said
    assert said.endswith("\nbash run/job/torchrun-node-0.sh\n")
    assert "--mock-data" in Path("run/job/args.sh").read_text()
    assert main(["quickstart", "--model", "model.yaml"]) == 2
    assert "--force" in capsys.readouterr().err


def test_known_models_are_those_of_the_examples_and_the_published_runs() -> None:
    root, fields = Path(__file__).parents[3], ("num_hidden_layers", "hidden_size", "intermediate_size")
    fields += ("num_attention_heads", "num_key_value_heads", "vocab_size", "rope_theta", "rms_norm_eps")
    flags = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "vocab-size")
    flags += ("rotary-base", "norm-epsilon")
    known = json.loads((root / "tools/planner/inputs/data/known_models.json").read_text())
    large = known.pop("llama-3.1-70b")["config"]
    assert tuple(large[field] for field in fields[:6]) == SHAPES["LLAMA3_70B"]["shape"]
    assert large | dict.fromkeys(fields[:6], 0) == known["llama-3.1-8b"]["config"] | dict.fromkeys(fields[:6], 0)
    for entry in known.values():
        text = subprocess.run([root / entry["source"], "full"], capture_output=True, text=True, check=True).stdout
        of_script = [float(re.findall(rf"--{flag} (\S+)", text)[0]) for flag in flags]
        assert [entry["config"][field] for field in fields] == of_script
        assert ("sliding_window" in entry["config"]) == ("--window-size 4095,0" in text)
        assert ("rope_scaling" in entry["config"]) == ("--rope-scaling-factor 8\n" in text)


def test_a_known_name_and_a_wrong_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "H100-SXM", "--gpus-per-node", "8", "--hosts", "n[1-2]", "--limit-s", "1", "--out", "r"]
    assert main(["quickstart", "--model", "Mistral-7B", *words, "--global-batch-size", "64"]) == 0
    said = capsys.readouterr().out
    assert "--seq-length 4096 --global-batch-size 64" in said and "r/job/torchrun-node-1.sh   # on node 1" in said
    assert main(["quickstart", "--model", "mistral-8b"]) == 2
    assert "mistral-7b" in capsys.readouterr().err and not Path("run").exists()
