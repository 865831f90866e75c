"""The examples to copy: each script's commands plan, check and write the launch files of its cluster and model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.mixed_cluster import EVEN, MICROBATCHES, PLANNED, SPEEDS, simulated
from examples.mixed_cluster import main as mixed_cluster
from megatron_het.schedule.view.visualize import draw_timelines
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
    assert len({r["device"] for s in plan["stages"] for r in s["replicas"]}) == 2, "an example shows two kinds of GPU"
    assert name != "long_context" or plan["schedule"]["name"] == "slimpipe"
    for target in targets:
        script = "train.sbatch" if target == "run" else f"{target}.yaml"
        assert (tmp_path / target / script).exists() and (tmp_path / target / "torchrun-node-0.sh").exists()
        assert "--vocab-size 32000" in (tmp_path / target / "args.sh").read_text()  # the tokenizer has no file


# The picture of docs/planner.md: what it claims is what the simulator says.


def test_the_plan_is_faster_and_both_do_the_same_work(tmp_path: Path) -> None:
    even, planned = simulated(EVEN), simulated(PLANNED)
    assert sum(EVEN) == sum(PLANNED)
    assert planned.makespan_s < even.makespan_s
    for result, layers in ((even, EVEN), (planned, PLANNED)):  # 3 s per layer and microbatch at speed 1, two replicas
        busy = [0.0] * 4
        for event in result.events():
            if event.stream == "compute":
                busy[event.device] += event.end_s - event.start_s
        per_replica = [3 * layers[d // 2] / SPEEDS[d] * MICROBATCHES / 2 for d in range(4)]
        assert busy == pytest.approx(per_replica)


def test_the_committed_picture_is_up_to_date(tmp_path: Path) -> None:
    assert mixed_cluster([str(tmp_path / "new.svg")]) == 0
    titles = [f"{simulated(layers).makespan_s:.0f} s per iteration" for layers in (EVEN, PLANNED)]
    new, committed = (
        (folder / name).read_text()
        for folder, name in ((tmp_path, "new.svg"), (EXAMPLES.parent / "docs" / "images", "mixed-cluster.svg"))
    )
    for title in titles:
        assert title in new and title in committed


def test_a_picture_needs_a_known_ending(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must end in .svg"):
        draw_timelines({"one": simulated(EVEN)}, tmp_path / "x.bmp")
    assert mixed_cluster([]) == 2
