"""Nodes with several kinds of GPUs: cluster file, plan, launch files, and what is checked when ranks start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.llama.job import CPU_ARGUMENTS
from megatron_het.arguments.megatron_args import check_device_kind
from megatron_het.elastic.agent import Node as AgentNode
from megatron_het.elastic.pool import Process
from megatron_het.elastic.searched import limited
from megatron_het.plan import ModelShape, Plan, PlanError, Replica, Stage, TrainingShape
from tests.functional.launch import free_port
from tests.unit.elastic.test_away import setting_of
from tests.unit.planner.emit_plans import LAUNCH, SMALL
from tools.planner.__main__ import main
from tools.planner.costs.operating import Network
from tools.planner.costs.runtime import CPU_GLOO
from tools.planner.emit.command import emit, expectations
from tools.planner.emit.elastic import ElasticOptions
from tools.planner.emit.flags import ModelOptions, model_arguments
from tools.planner.emit.nodes import components, place
from tools.planner.emit.options import node_kinds
from tools.planner.emit.scripts import het_sbatch, torchrun_script
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, cluster_from_document
from tools.planner.inputs.kept import cluster_text
from tools.planner.inputs.packing import Seat
from tools.planner.replan.replan import _split

REPOSITORY = Path(__file__).resolve().parents[3]
A100, V100 = "A100-40", "V100-16"


def cluster(count: int = 1, typed: bool = False, **more: Any) -> Cluster:
    """Nodes with two V100 between two pairs of A100."""
    gpus: list[dict[str, Any]] = [{"type": A100, "count": 2}, {"type": V100, "count": 2}, {"type": A100, "count": 2}]
    if typed:
        gpus = [{**gpu, "gres": "gpu:" + str(gpu["type"]).split("-")[0].lower()} for gpu in gpus]
    return cluster_from_document({"nodes": [{"gpus": gpus, "count": count, **more}]}, "cluster.yaml")


def plan_of(first: tuple[int, ...], second: tuple[int, ...], tp: int = 1) -> Plan:
    """A stage on A100 and one on V100."""
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
    assert cluster_from_document(json.loads(cluster_text(made)), "kept.yaml") == made
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
        ({"hosts": ["a", "b"]}, "nodes", "2 hosts for count = 1"),
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
    document = json.loads(cluster_text(cluster(2)))
    pool = [Process(i, "a", A100) for i in range(4)] + [Process(9, "a", V100), Process(10, "b", V100)]
    left = cluster_from_document(limited(document, pool), "left.yaml")
    assert [(n.gpu, n.count, n.gpus_per_node, bool(n.shared_node)) for n in left.nodes] == [
        (A100, 1, 4, True),
        (V100, 1, 1, True),
        (V100, 1, 1, False),
    ]


def test_a_slow_gpu_stays_in_its_node() -> None:
    made = cluster(2, hosts=["n1", "n2"])
    split = _split(made, {7: ([Seat(0, 1, 2, 0)], "slow")}, [])
    assert [(n.gpu, n.count, n.devices, n.hosts) for n in split.nodes] == [
        (A100, 1, (0, 1, 4, 5), ("n1",)),
        (A100, 1, (0, 1, 5), ("n2",)),
        ("slow", 1, (4,), ("n2",)),
        (V100, 1, (2, 3), ("n1",)),
        (V100, 1, (2, 3), ("n2",)),
    ]
    assert cluster_from_document(json.loads(cluster_text(split)), "split.yaml").nodes == split.nodes


def test_transfers_inside_of_a_node_do_not_use_the_network() -> None:
    one, two = (Network(cluster(count, network_bytes_per_s=1e6), CPU_GLOO) for count in (1, 2))
    assert one.transfer_s(0, 1, 1, 1, 1e6, False) < 0.01 * two.transfer_s(0, 1, 1, 1, 1e6, False)
    assert two.transfer_s(0, 1, 1, 1, 1e6, True) == one.transfer_s(0, 1, 1, 1, 1e6, False)
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
    program = tmp_path / "bin" / source
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '%s' '{answers[source]}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
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
        "MODEL": model_arguments(plan, ModelOptions()),
        "DATA": ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"],
        "TRAINING": ["--train-iters", "2", "--lr", "1e-3", "--eval-interval", "9", "--eval-iters", "0"],
        "PLATFORM": [*CPU_ARGUMENTS, "--het-report", str(tmp_path / "report")],
    }
    launch = replace(LAUNCH, run_dir=str(tmp_path), python=str(tmp_path / "python"))
    kinds = {name: replace(kind, gres="") for name, kind in node_kinds(cluster()).items()}
    (node,) = emit(plan, tmp_path, kinds, groups, launch).nodes
    assert node.ranks == (1, 0) and node.devices == (0, 2)
    shim = tmp_path / "python"
    shim.write_text(
        f'#!/bin/bash\n[[ -z "$RANK" ]] || echo "$LOCAL_RANK $CUDA_VISIBLE_DEVICES" >"{tmp_path}/seen-$RANK"\n'
        f'[[ -z "$RANK" ]] || {str(trains).lower()} || exit 0\nexec {sys.executable} "$@"\n'
    )
    shim.chmod(0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        ["bash", str(tmp_path / "torchrun-node-0.sh")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in range(2)] == ["1 0,2\n", "0 0,2\n"]
    assert all((tmp_path / "report" / f"rank-{rank}.json").exists() == trains for rank in range(2))
