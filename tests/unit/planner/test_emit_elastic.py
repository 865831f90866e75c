"""``elastic.sbatch``: what it starts and does, with stand-ins for Slurm's commands; what is refused."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.llama.job import CPU_ARGUMENTS, model_of
from megatron_het.arguments.megatron_args import check_device_kind
from megatron_het.elastic.agent import Node as AgentNode
from megatron_het.elastic.pool import Process
from megatron_het.elastic.searched import limited
from megatron_het.plan import ModelShape, Plan, PlanError, Replica, Stage, TrainingShape, save_plan
from megatron_het.store import free_port
from tests.unit.elastic.test_controller import setting_of
from tests.unit.planner.emit_plans import (
    KINDS,
    LAUNCH,
    MODEL,
    PLAIN_KINDS,
    SMALL,
    batch_job,
    changed,
    even_plan,
    make_plan,
    nodes_of,
    program,
    uneven_plan,
)
from tools.planner.__main__ import main
from tools.planner.costs.layer import CPU_GLOO
from tools.planner.costs.operating import Network
from tools.planner.emit.command import Emitted, emit, expectations
from tools.planner.emit.elastic import ElasticOptions
from tools.planner.emit.flags import model_arguments
from tools.planner.emit.options import node_kinds
from tools.planner.emit.scripts import LaunchOptions, het_sbatch, torchrun_script
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup, cluster_from_document
from tools.planner.inputs.packing import Seat, components, place
from tools.planner.replay.replan import _split
from tools.planner.search.outcome import file_text

WAIT_S = 30.0

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
[[ "$*" == *--save* ]] || { echo 0123456789abcdef0123456789abcdef >"$ELASTIC/token"; kind=controller; }
trap 'mkdir -p "$CHECKPOINTS"; echo "$SAVED" >"$CHECKPOINTS/latest_checkpointed_iteration.txt"; exit 0' USR1
printf '%s\\n' "$*" >>"$NOTES/python"
for ((i = 0; i < 600; i++)); do
    [[ "$kind" != controller || ! -s "$CHECKPOINTS/latest_checkpointed_iteration.txt" ]] || exit "${CODE:-0}"
    sleep 0.05
done
exit 9
"""


def write(
    out: Path, plan: Plan, kinds: dict[str, NodeGroup], more: tuple[tuple[str, Plan], ...] = (), **launch: Any
) -> Emitted:
    options = LaunchOptions(**{"run_dir": str(out), "iterations": 20, **launch})
    return emit(
        plan, out, kinds, {"TRAINING": ["--train-iters", "20"]}, options, elastic=ElasticOptions(more, ("c", "m"))
    )


def start(tmp_path: Path, emitted: Emitted, variables: dict[str, str]) -> subprocess.Popen[str]:
    commands = tmp_path / "commands"
    (tmp_path / "notes").mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("python-here", PYTHON), ("scancel", "#!/bin/sh\n")):
        program(commands / name, text)
    own = {"PATH": f"{commands}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes")}
    own |= {"PYTHON": str(commands / "python-here"), "SAVED": "12"} | variables
    return batch_job(emitted.files["elastic.sbatch"], **own)


def notes(tmp_path: Path, name: str) -> list[str]:
    file = tmp_path / "notes" / name
    return file.read_text().splitlines() if file.exists() else []


def notice(tmp_path: Path, job: subprocess.Popen[str], agents: int) -> str:
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


def test_a_notice_right_after_a_start_is_heard(tmp_path: Path) -> None:
    emitted = write(tmp_path / "run", make_plan(((8,), [((0,), (0, 1, 2, 3), "big")])), KINDS)
    script, kill = emitted.files["elastic.sbatch"], "    sleep 1; kill -TERM $$\n    steps+=($!)\n"
    script.write_text(script.read_text().replace("    steps+=($!)\n", kill))
    assert "queued again" in start(tmp_path, emitted, {"SLURM_JOB_NODELIST": "b1"}).communicate(timeout=WAIT_S)[0]


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
    emitted = write(out, plan, {name: nodes_of(name, 1)})
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
    nodes = [{"gpu": kinds[name], "count": 2, "gpus_per_node": kind.gpus_per_node} for name, kind in KINDS.items()]
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


# Nodes with several kinds of GPUs: cluster file, plan, launch files, and what is checked when ranks start.

REPOSITORY = Path(__file__).resolve().parents[3]
A100, V100 = "A100-40", "V100-16"


def cluster(count: int = 1, typed: bool = False, **more: Any) -> Cluster:
    gpus: list[dict[str, Any]] = [{"type": A100, "count": 2}, {"type": V100, "count": 2}, {"type": A100, "count": 2}]
    if typed:
        gpus = [{**gpu, "gres": "gpu:" + str(gpu["type"]).split("-")[0].lower()} for gpu in gpus]
    return cluster_from_document({"nodes": [{"gpus": gpus, "count": count, **more}]}, "cluster.yaml")


def plan_of(first: tuple[int, ...], second: tuple[int, ...], tp: int = 1) -> Plan:
    stages = [
        [Replica(ranks[i : i + tp], tuple(range(i // tp, 4, len(ranks) // tp)), gpu) for i in range(0, len(ranks), tp)]
        for gpu, ranks in ((A100, first), (V100, second))
    ]
    shape = ModelShape(4, 32, 4, 2, 32, ffn_hidden_size=64)
    return Plan(shape, TrainingShape(1, 4), tuple(Stage((2,), tuple(replicas)) for replicas in stages))


def test_the_file_is_a_group_for_every_kind(tmp_path: Path) -> None:
    made = cluster(2, network_bytes_per_s=12e9, host_memory_bytes=6e9, hosts=["n[1-2]"])
    assert [(n.gpu, n.count, n.gpus_per_node, n.devices) for n in made.nodes] == [
        (A100, 2, 4, (0, 1, 4, 5)),
        (V100, 2, 2, (2, 3)),
    ]
    assert [(n.network_bytes_per_s, n.host_memory_bytes) for n in made.nodes] == [(8e9, 4e9), (4e9, 2e9)]
    assert made.total_gpus == 12
    assert cluster_from_document(json.loads(file_text(made)), "kept.yaml") == made
    alone = cluster_from_document({"nodes": [{"gpus": [{"type": "T4", "count": 4}], "count": 1}]}, "c.yaml")
    assert alone == cluster_from_document({"nodes": [{"gpu": "T4", "count": 1, "gpus_per_node": 4}]}, "c.yaml")


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        ({"gpu": A100}, "nodes[0].gpu", "does not go with 'gpus'"),
        ({"max_gpus": 3}, "nodes[0].max_gpus", "in the entries"),
        ({"gpus": []}, "nodes[0].gpus", "expected a list"),
        ({"gpus": [{"type": A100, "count": 0}]}, "nodes[0].gpus[0].count", "greater than or equal to 1"),
        ({"gpus": [{"type": A100}, 3]}, "nodes[0].gpus[0].count", "required"),
        ({"gpus": [{"type": A100, "count": 1}, {"type": "A101", "count": 1}]}, "nodes[0].gpus", "A101"),
        ({"gpus": [{"type": A100, "count": 1, "hosts": "x"}]}, "nodes[0].gpus[0].hosts", "unknown key"),
        ({"hosts": ["a", "b"]}, "nodes[0].hosts", "2 hosts for count = 1"),
    ],
)
def test_errors_name_the_entry(change: dict[str, Any], where: str, words: str) -> None:
    body = {"gpus": [{"type": A100, "count": 1}, {"type": V100, "count": 1}], "count": 1, **change}
    with pytest.raises(PlannerError, match=words) as caught:
        cluster_from_document({"nodes": [body]}, "cluster.yaml")
    assert caught.value.key.startswith(where)


def test_ranks_have_the_devices_of_their_kind() -> None:
    """Ranks 0 and 1 are on A100, ranks 2 and 3 on the V100 that the bus has between them."""
    made = cluster(2, hosts=["n1", "n2"])
    kinds = node_kinds(made)
    (node,) = place(plan_of((0, 1, 4), (2, 3)), kinds)
    assert (node.name, node.host) == (f"{A100} + {V100}", "n1")
    assert list(zip(node.ranks, node.devices, node.kinds, strict=True)) == [
        (0, 0, A100),
        (1, 1, A100),
        (2, 2, V100),
        (3, 3, V100),
        (4, 4, A100),
    ]
    # TP stays inside of a kind, and what does not fit opens the next node.
    first, second = place(plan_of((0, 1, 2, 3), (4, 5, 6, 7), tp=2), kinds)
    assert (first.ranks, second.ranks, second.host) == ((0, 1, 4, 5, 2, 3), (6, 7), "n2")
    with pytest.raises(PlannerError, match="TP group of 4 does not fit a node with 2"):
        place(plan_of((0, 1, 2, 3), (4, 5, 6, 7), tp=4), kinds)


def test_slurm_is_asked_for_every_kind_by_name_or_for_the_whole_node() -> None:
    plan = plan_of((0, 1), (2,))
    kinds = node_kinds(cluster(typed=True))
    text = het_sbatch(place(plan, kinds), kinds, LAUNCH)
    assert "--gres=gpu:a100:2,gpu:v100:1" in text and "HET_DEVICES" not in text
    kinds = node_kinds(cluster())
    text = het_sbatch(place(plan, kinds), kinds, LAUNCH)
    assert "--gres=gpu:6" in text and "export HET_DEVICES='0,1,2 0,1,2 0,1,2'\n" in text
    assert 'CUDA_VISIBLE_DEVICES="${devices[$SLURM_PROCID]}"' in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_torchrun_scripts_choose_devices() -> None:
    kinds = node_kinds(cluster())
    nodes = place(plan_of((0,), (1, 2)), kinds)
    assert "export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,2,3}\n" in torchrun_script(nodes, 0, LAUNCH)
    nodes = place(plan_of((0, 1, 2, 3), (4, 5)), kinds)
    assert "CUDA_VISIBLE" not in torchrun_script(nodes, 0, LAUNCH)  # all of the node


def test_nodes_that_use_other_devices_are_another_component() -> None:
    kinds = node_kinds(cluster(2))
    nodes = place(plan_of((0, 1, 2, 3), (4, 5, 6)), kinds)
    assert [len(part.nodes) for part in components(nodes, kinds)] == [1, 1]


def test_agents_of_an_elastic_job_know_the_kind_of_every_slot(tmp_path: Path) -> None:
    plan = plan_of((0, 1, 2), (3,))
    emit(plan, tmp_path, node_kinds(cluster()), {}, LAUNCH, elastic=ElasticOptions((("same", plan),)))
    text = (tmp_path / "elastic.sbatch").read_text()
    device = f"{A100}*2,{V100}*1,{A100}*1"
    assert f'HET_DEVICES="0,1,2,4" start_agent "$host" \'{device}\' 4' in text
    assert 'export CUDA_VISIBLE_DEVICES="$HET_DEVICES"' in text
    assert "CUDA_DEVICE_ORDER" in text and "CUDA_DEVICE_ORDER" in (tmp_path / "train.sbatch").read_text()
    agent = AgentNode(replace(setting_of(1, tmp_path), device=device), 4, tmp_path, (), 3)
    assert [agent.device(slot) for slot in range(4)] == [A100, A100, V100, A100]
    plain = replace(agent, setting=replace(agent.setting, device="T4 slow*"))
    assert plain.device(0) == "T4 slow*"


def test_what_is_left_of_a_cluster_keeps_its_nodes() -> None:
    document = json.loads(file_text(cluster(2)))
    pool = [Process(i, "a", A100) for i in range(4)] + [Process(9, "a", V100), Process(10, "b", V100)]
    left = cluster_from_document(limited(document, pool), "left.yaml")
    assert [(n.gpu, n.count, n.gpus_per_node, bool(n.shared_node)) for n in left.nodes] == [
        (A100, 1, 4, True),
        (V100, 1, 1, True),
        (V100, 1, 1, False),
    ]


def test_a_slow_gpu_stays_in_its_node() -> None:
    made = cluster(2, hosts=["n1", "n2"])
    split = _split(made, [([Seat(0, 1, 2, 0)], "slow")], [])
    assert [(n.gpu, n.count, n.devices, n.hosts) for n in split.nodes] == [
        (A100, 1, (0, 1, 4, 5), ("n1",)),
        (A100, 1, (0, 1, 5), ("n2",)),
        ("slow", 1, (4,), ("n2",)),
        (V100, 1, (2, 3), ("n1",)),
        (V100, 1, (2, 3), ("n2",)),
    ]
    assert cluster_from_document(json.loads(file_text(split)), "split.yaml").nodes == split.nodes


def test_transfers_inside_of_a_node_do_not_use_the_network() -> None:
    one, two = (Network(cluster(count, network_bytes_per_s=1e6), CPU_GLOO) for count in (1, 2))
    assert one.transfer_s(0, 1, 1, 1, 1e6, False, 1, 1)[0] < 0.01 * two.transfer_s(0, 1, 1, 1, 1e6, False, 1, 1)[0]
    assert two.transfer_s(0, 1, 1, 1, 1e6, True, 1, 1)[0] == one.transfer_s(0, 1, 1, 1, 1e6, False, 1, 1)[0]
    link = expectations(plan_of((0,), (1,)), cluster(2)).link(0, 1)
    assert link is not None and link.bytes_per_s == 68e9  # the slower end: V100


def test_a_rank_on_the_other_kind_of_its_node_is_refused() -> None:
    plan = plan_of((0,), (1,))
    check_device_kind(plan, 1, "Tesla V100-SXM2-16GB")
    with pytest.raises(PlanError, match="order of nvidia-smi"):
        check_device_kind(plan, 1, "NVIDIA A100-SXM4-40GB")


@pytest.mark.parametrize("source", ["nvidia-smi", "sinfo"])
def test_init_writes_what_plan_and_check_and_emit_take(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {
        "nvidia-smi": "NVIDIA A100-SXM4-40GB, 40960\n" * 2 + "Tesla V100-SXM2-16GB, 16384\n" * 2,
        "sinfo": "n1|p*|gpu:a100-40gb:2,gpu:v100-16gb:2|(null)|1000|idle\n",
    }
    program(tmp_path / "bin" / source, f"#!/bin/sh\nprintf '%s' '{answers[source]}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("HET_PLAN_VERIFY", "0")
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text(yaml.safe_dump(SMALL))
    inputs = ["--cluster", "cluster.yaml", "--model", "model.yaml"]
    assert main(["init", "--from", "slurm" if source == "sinfo" else source]) == 0
    text = Path("cluster.yaml").read_text()
    assert "gpus:" in text and ('gres: "gpu:v100-16gb"' in text) == (source == "sinfo")
    assert main(["plan", *inputs, "--schedules", "1f1b", "--no-verify"]) == 0
    assert main(["check", "plan.json", *inputs]) == 0
    capsys.readouterr()
    assert main(["emit", "plan.json", *inputs, "--out", "run", "--extra", "--mock-data", "--json"]) == 0
    assert [node["kind"] for node in json.loads(capsys.readouterr().out)["nodes"]] == [f"{A100} + {V100}"]


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.full)])
def test_two_kinds_in_one_node_start_and_train(trains: bool, tmp_path: Path) -> None:
    """The emitted script starts a process for each kind, with the device of its kind, in the plan's order."""
    plan = plan_of((1,), (0,))
    plan = replace(plan, stages=plan.stages[::-1])
    groups = {
        "MODEL": model_arguments(plan, model_of(plan)),
        "DATA": ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"],
        "TRAINING": ["--train-iters", "2", "--lr", "1e-3", "--eval-interval", "9", "--eval-iters", "0"],
        "PLATFORM": [*CPU_ARGUMENTS, "--het-report", str(tmp_path / "report")],
    }
    python = program(
        tmp_path / "python",
        f'#!/bin/bash\n[[ -z "$RANK" ]] || echo "$LOCAL_RANK $CUDA_VISIBLE_DEVICES" >"{tmp_path}/seen-$RANK"\n'
        f'[[ -z "$RANK" ]] || {str(trains).lower()} || exit 0\nexec {sys.executable} "$@"\n',
    )
    launch = replace(LAUNCH, run_dir=str(tmp_path), python=python)
    kinds = {name: changed(kind, gres="") for name, kind in node_kinds(cluster()).items()}
    (node,) = emit(plan, tmp_path, kinds, groups, launch).nodes
    assert node.ranks == (1, 0) and node.devices == (0, 2)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_PORT": str(free_port()),
    }
    command = ["bash", str(tmp_path / "torchrun-node-0.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in range(2)] == ["1 0,2\n", "0 0,2\n"]
    assert all((tmp_path / "report" / f"rank-{rank}.json").exists() == trains for rank in range(2))
