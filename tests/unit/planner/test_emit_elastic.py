"""``elastic.sbatch``: what it starts and does, with stand-ins for Slurm's commands; what is refused."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import Plan, save_plan
from tests.unit.planner.emit_plans import KINDS, MODEL, even_plan, make_plan, uneven_plan
from tools.planner.__main__ import main
from tools.planner.emit.command import Emitted, emit
from tools.planner.emit.elastic import ElasticOptions
from tools.planner.emit.nodes import NodeKind
from tools.planner.emit.scripts import LaunchOptions
from tools.planner.errors import PlannerError

PLAIN_KINDS = {name: NodeKind(kind.devices, constraint=kind.constraint) for name, kind in KINDS.items()}
WAIT_S = 30.0

# Slurm's commands, as far as the script asks them.
SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") tr , '\\n' <<<"$3" ;;
    "show node") echo "NodeName=$3 NodeAddr=127.0.0.1 ActiveFeatures=$([[ $3 == b* ]] && echo a100 || echo l4) x=1" ;;
    "show job") echo "JobId=$3 JobState=RUNNING" ;;
    "requeue $2") echo "$2" >"$NOTES/requeued"; kill -KILL $PPID ;;
esac
"""
SRUN = """#!/bin/bash
echo "$*" >>"$NOTES/srun"
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
# Controller and agents: an agent saves and ends on SIGUSR1, the controller ends when somebody has.
PYTHON = """#!/bin/bash
printf '%s\\n' "$*" >>"$NOTES/python"
[[ "$*" == *--save* ]] || { echo 0123456789abcdef0123456789abcdef >"$ELASTIC/token"; kind=controller; }
trap 'mkdir -p "$CHECKPOINTS"; echo "$SAVED" >"$CHECKPOINTS/latest_checkpointed_iteration.txt"; exit 0' USR1
for ((i = 0; i < 600; i++)); do
    [[ "$kind" != controller || ! -s "$CHECKPOINTS/latest_checkpointed_iteration.txt" ]] || exit "${CODE:-0}"
    sleep 0.05
done
exit 9
"""


def write(
    out: Path, plan: Plan, kinds: dict[str, NodeKind], more: tuple[tuple[str, Plan], ...] = (), **launch: Any
) -> Emitted:
    options = LaunchOptions(**{"run_dir": str(out), "iterations": 20, **launch})
    return emit(
        plan, out, kinds, {"TRAINING": ["--train-iters", "20"]}, options, elastic=ElasticOptions(more, ("c", "m"))
    )


def start(tmp_path: Path, emitted: Emitted, variables: dict[str, str]) -> subprocess.Popen[str]:
    commands = tmp_path / "commands"
    commands.mkdir()
    (tmp_path / "notes").mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("python-here", PYTHON), ("scancel", "#!/bin/sh\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    own = {"PATH": f"{commands}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes"), "SLURM_JOB_ID": "7"}
    own |= {"PYTHON": str(commands / "python-here"), "SAVED": "12"} | variables
    return subprocess.Popen(
        ["bash", str(emitted.files["elastic.sbatch"])],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def notes(tmp_path: Path, name: str) -> list[str]:
    file = tmp_path / "notes" / name
    return file.read_text().splitlines() if file.exists() else []


def notice(tmp_path: Path, job: subprocess.Popen[str], agents: int) -> str:
    """SIGTERM once all are there; what the job said."""
    deadline_s = time.monotonic() + WAIT_S
    while len(notes(tmp_path, "python")) < agents + 1:
        assert time.monotonic() < deadline_s and job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    return job.communicate(timeout=WAIT_S)[0]


HET = {"SLURM_JOB_NODELIST_HET_GROUP_0": "s1,s2", "SLURM_JOB_NODELIST_HET_GROUP_1": "b1"}


def test_a_notice_saves_and_queues_the_job_again(tmp_path: Path) -> None:
    emitted = write(tmp_path / "a run", even_plan(), KINDS)
    job = start(tmp_path, emitted, {**HET, "SLURM_JOB_ID_HET_GROUP_1": "8"})
    said = notice(tmp_path, job, 3)
    assert notes(tmp_path, "requeued") == ["7"], said
    assert "stopped after iteration 12 of 20" in said
    steps = notes(tmp_path, "srun")
    assert sorted(step.split()[0] for step in steps) == ["--het-group=0", "--het-group=0", "--het-group=1"]
    assert all("--no-kill" in step and "--kill-on-bad-exit=0" in step for step in steps)
    controller, *agents = sorted(notes(tmp_path, "python"), key=lambda line: "--controller-only" not in line)
    assert f"--nodes 3 --lost-s 30 --plans {tmp_path}/a run/plan.json --cluster" in controller
    assert sorted(line.split("--node ")[1].split(" -- ")[0] for line in agents) == [
        "b1 --device big --workers 4",
        "s1 --device small --workers 2",
        "s2 --device small --workers 2",
    ]
    assert all("--exit-signal SIGUSR1" in line and "--het-plan" not in line for line in agents)
    assert all(f"--load {tmp_path}/a run/checkpoints" in line for line in agents)
    token = tmp_path / "a run" / "elastic" / "token"
    assert token.stat().st_mode & 0o077 == 0 and token.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("saved", "code", "wanted"), [("20", "0", 0), ("0", "1", 1)])
def test_a_job_that_is_done_or_has_saved_nothing_is_not_queued_again(
    tmp_path: Path, saved: str, code: str, wanted: int
) -> None:
    emitted = write(tmp_path / "run", even_plan(), KINDS)
    job = start(tmp_path, emitted, {**HET, "SLURM_JOB_ID_HET_GROUP_1": "8", "SAVED": saved, "CODE": code})
    said = notice(tmp_path, job, 3)
    assert notes(tmp_path, "requeued") == [] and job.returncode == wanted, said


def test_kinds_of_a_plain_job_are_told_apart_by_their_features(tmp_path: Path) -> None:
    emitted = write(tmp_path / "run", uneven_plan(), PLAIN_KINDS)
    text = emitted.files["elastic.sbatch"].read_text()
    assert "#SBATCH --nodes=2 --ntasks-per-node=1 --constraint='[a100*1&l4*1]' --no-kill" in text
    assert "hetjob" not in text
    job = start(tmp_path, emitted, {"SLURM_JOB_NODELIST": "b1,s1"})
    said = notice(tmp_path, job, 2)
    agents = [line for line in notes(tmp_path, "python") if "--node " in line]
    found = sorted(line.split("--node ")[1].split(" -- ")[0] for line in agents)
    assert found == ["b1 --device big --workers 3", "s1 --device small --workers 2"], said


def test_cores_of_all_ranks_go_to_the_agent(tmp_path: Path) -> None:
    text = write(tmp_path / "run", even_plan(), KINDS, cpus_per_task=3).files["elastic.sbatch"].read_text()
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH --nodes")]
    # The component with more nodes leads: Slurm leaves it alone when a node fails.
    assert lines[0].startswith(
        "#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=6 --constraint=l4 --gres=gpu:l4:2"
    )
    assert lines[1].startswith("#SBATCH --nodes=1 --ntasks-per-node=1 --cpus-per-task=12 ")
    assert "--requeue" in text and "--signal=B:TERM@120" in text


def test_a_job_of_single_nodes_says_what_a_failure_costs(tmp_path: Path) -> None:
    first: Any = [((0, 1), (0, 2), "big"), ((2, 3), (1, 3), "big")]
    plan = make_plan(((5,), first), ((3,), [((4, 5), (0, 1, 2, 3), "small")]))
    found = write(tmp_path / "run", plan, KINDS).notes
    assert any("queued again by Slurm when any node" in note for note in found)


def test_strange_names_stay_words(tmp_path: Path) -> None:
    name = "A'; touch $(pwd)/bad; '"
    plan = make_plan(((8,), [((0,), (0, 1, 2, 3), name)]))
    out = tmp_path / "a $(touch bad) run"
    emitted = write(out, plan, {name: NodeKind(1)})
    job = start(tmp_path, emitted, {"SLURM_JOB_NODELIST": "s1"})
    notice(tmp_path, job, 1)
    (agent,) = [line for line in notes(tmp_path, "python") if "--node " in line]
    assert f"--device {name} --workers 1" in agent
    assert not list(tmp_path.rglob("bad")) and not Path("bad").exists()


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="one task per node"):
        write(tmp_path / "run", even_plan(), KINDS, doctor=True)
    other = replace(even_plan(), model=replace(MODEL, hidden_size=128))
    with pytest.raises(PlannerError, match=r"other\.json: model .*one training"):
        write(tmp_path / "run", even_plan(), KINDS, more=(("other.json", other),))
    with pytest.raises(PlannerError, match=r"8 ranks do not fit the job's nodes.*3 x big, 2 x small"):
        write(tmp_path / "run", uneven_plan(), PLAIN_KINDS, more=(("large.json", even_plan()),))
    assert not (tmp_path / "run").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"big": "A100-40", "small": "A10G"}
    for name, plan in (("first", even_plan()), ("second", uneven_plan())):
        save_plan(plan, tmp_path / f"{name}.json")
        text = (tmp_path / f"{name}.json").read_text()
        for kind, gpu in kinds.items():
            text = text.replace(f'"{kind}"', f'"{gpu}"')
        (tmp_path / f"{name}.json").write_text(text)
    model = {"name": "m", "num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}
    model |= {"num_query_groups": 2, "vocab_size": 100, "seq_length": 32, "global_batch_size": 4, "precision": "fp32"}
    (tmp_path / "model.json").write_text(json.dumps(model))
    nodes = [{"gpu": kinds[name], "count": 2, "gpus_per_node": kind.devices} for name, kind in KINDS.items()]
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": nodes}))
    words = f"emit {tmp_path}/first.json --cluster {tmp_path}/cluster.json --model {tmp_path}/model.json --json"
    words += f" --out {tmp_path}/run --plans {tmp_path}/second.json"
    assert main(shlex.split(words)) == 2
    assert "--elastic" in json.loads(capsys.readouterr().out)["error"]["problem"]
    assert main([*shlex.split(words), "--elastic"]) == 0, capsys.readouterr().out
    assert {"elastic.sbatch", "plan.json", "plan-2.json"} <= set(json.loads(capsys.readouterr().out)["files"])
    text = (tmp_path / "run" / "elastic.sbatch").read_text()
    assert 'HOW=(--plans "$RUN_DIR/plan.json" "$RUN_DIR/plan-2.json" --cluster "$RUN_DIR/planned-cluster.yaml"' in text
    assert "ELASTIC_ARGS=(" in (tmp_path / "run" / "args.sh").read_text()
