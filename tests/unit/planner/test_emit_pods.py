"""Launches without Slurm: what the files say, and which rank every pod runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_het.plan import Plan
from tests.unit.planner.emit_plans import KINDS, even_plan, make_plan
from tests.unit.planner.pods import SHELLCHECK, pods_of
from tools.planner.__main__ import main
from tools.planner.emit.command import Emitted, emit
from tools.planner.emit.elastic import ElasticOptions
from tools.planner.emit.nodes import NodeKind, components, place
from tools.planner.emit.pods import PodKind, PodOptions, part_names
from tools.planner.emit.scripts import LaunchOptions
from tools.planner.errors import PlannerError

SCHEMA = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())
POD_KINDS = {
    "big": PodKind({"gpu": "a100"}, accelerators="A100", infra="aws"),
    "small": PodKind({"gpu": "l4"}, accelerators="L4", use_spot=True),
}
# Interpreters that say what they were started as: of torchrun, and of a node of an elastic job.
PYTHON = """#!/bin/bash
echo "$MASTER_ADDR:$MASTER_PORT $MEGATRON_HET_TOKEN_FILE $* $HET_RANKS"
[[ "$*" != *controller-only* ]] || echo 0123456789abcdef >"$ELASTIC/token"
"""


def write(tmp_path: Path, target: Any, plan: Plan | None = None, elastic: bool = False, **more: Any) -> Emitted:
    out = tmp_path / "a run"
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    options = {"image": "registry/image:1", "volumes": {str(tmp_path): "shared"}, "kinds": POD_KINDS, **more}
    launch = LaunchOptions(run_dir=str(out), job_name=options.pop("job_name", "het"), python=str(python))
    return emit(
        plan or even_plan(),
        out,
        options.pop("node_kinds", KINDS),
        {},
        launch,
        elastic=ElasticOptions(inputs=("c", "m")) if elastic else None,
        pods=PodOptions(target, **options),
    )


@pytest.mark.parametrize("elastic", [False, True])
def test_a_jobset_is_one(tmp_path: Path, elastic: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = yaml.safe_load(write(tmp_path, "jobset", elastic=elastic, queue="lab").files["jobset.yaml"].read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["metadata"] == {"name": "het", "labels": {"kueue.x-k8s.io/queue-name": "lab"}}
    spec = document["spec"]
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    assert list(jobs) == [*(["controller"] if elastic else []), "big", "small"]
    assert {name: job["completions"] for name, job in jobs.items() if name != "controller"} == {"big": 1, "small": 2}
    pods = {name: job["template"]["spec"] for name, job in jobs.items()}
    assert pods["small"]["nodeSelector"] == {"gpu": "l4"}
    assert pods["small"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    if elastic:
        assert spec["successPolicy"]["targetReplicatedJobs"] == ["controller"]
        assert spec["failurePolicy"]["maxRestarts"] == 0 and jobs["small"]["backoffLimit"] > 100
        assert "resources" not in pods["controller"]["containers"][0]
    else:
        assert spec["failurePolicy"]["maxRestarts"] == 10 and jobs["small"]["backoffLimit"] == 0


def test_a_job_group_has_a_task_for_each_kind(tmp_path: Path) -> None:
    header, big, small = yaml.safe_load_all(write(tmp_path, "skypilot").files["skypilot.yaml"].read_text())
    assert header == {"name": "het", "execution": "parallel"}
    assert big["resources"] == {"accelerators": "A100:4", "infra": "aws", "image_id": "docker:registry/image:1"}
    assert small["resources"]["use_spot"] is True and small["num_nodes"] == 2
    assert big["file_mounts"] == {str(tmp_path): {"source": "shared", "mode": "MOUNT"}}
    assert big["envs"]["MASTER_ADDR"] == small["envs"]["MASTER_ADDR"] == "big-0.het"


def said(tmp_path: Path, emitted: Emitted, target: str) -> dict[str, str]:
    """What each pod's interpreter was asked to do."""
    found = {}
    for pod in pods_of(emitted.files[f"{target}.yaml"]):
        log = tmp_path / f"{pod.name}.log"
        pod.start(log, {}).wait(timeout=60.0)
        found[pod.name.removeprefix("het-")] = log.read_text()
    return found


@pytest.mark.parametrize("target", ["jobset", "skypilot"])
def test_every_pod_runs_the_ranks_of_its_node(tmp_path: Path, target: str) -> None:
    # Kinds take turns: the nodes of a kind are not in a row in the plan.
    rows = [((i,), (0, 1, 2, 3), "big" if i % 2 == 0 else "small") for i in range(4)]
    plan = make_plan(*(((2,), [row]) for row in rows))
    kinds = {name: NodeKind(1, count=2, gres="gpu") for name in ("big", "small")}
    found = said(tmp_path, write(tmp_path, target, plan, node_kinds=kinds), target)
    suffix = "-0" if target == "jobset" else ""
    names = [f"{kind}{suffix}-{index}" for kind in ("big", "small") for index in (0, 1)]
    assert list(found) == names
    for i, name in enumerate(names):
        assert f"--nnodes=4 --node-rank={i} --nproc-per-node=1" in found[name]
        assert found[name].startswith(f"127.0.0.1:29500 {tmp_path}/a run/token ")
        assert found[name].rstrip().endswith("0 2 1 3")


@pytest.mark.parametrize("target", ["jobset", "skypilot"])
def test_an_elastic_job_has_a_controller_and_an_agent_in_every_pod(tmp_path: Path, target: str) -> None:
    emitted = write(tmp_path, target, elastic=True)
    if SHELLCHECK:
        subprocess.run([SHELLCHECK, str(emitted.files["elastic-node.sh"])], check=True)
    assert "torchrun-node-0.sh" not in emitted.files
    found = list(said(tmp_path, emitted, target).values())
    assert "--controller 127.0.0.1:29400" in found[0] and "--controller-only --nodes 3" in found[0]
    assert [line.split("--node ")[1].split(" -- ")[0] for line in found[1:]] == [
        "big-0 --device big --workers 4",
        "small-0 --device small --workers 2",
        "small-1 --device small --workers 2",
    ]
    # Its state belongs to one start: a controller that comes back has it, another start keeps it aside.
    folder = tmp_path / "a run" / "elastic"
    (folder / "state.json").write_text("{}")
    said(tmp_path, emitted, target)
    assert (folder / "state.json").exists()
    (folder / "start").write_text("of another start")
    said(tmp_path, emitted, target)
    assert not (folder / "state.json").exists() and len(list(folder.glob("state-before-*"))) == 1


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"image": ""}, "--container"),
        ({"volumes": {"/elsewhere": "x"}}, "--volume"),
        ({"job_name": "a_b"}, "--job-name"),
        ({"job_name": "a" * 60}, "longer than the 63 letters"),
        ({"kinds": {}}, "are asked for by the same words"),
    ],
)
def test_what_kubernetes_would_refuse(tmp_path: Path, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlannerError, match=problem):
        write(tmp_path, "jobset", **more)
    assert not (tmp_path / "a run").exists()


def test_names_of_groups_differ() -> None:
    gpus = ["RTX-3090", "rtx 3090", "controller", "***"]
    kinds = {name: NodeKind(1, gres=f"gpu:{i}") for i, name in enumerate(gpus)}
    plan = make_plan(*(((2,), [((i,), (0, 1, 2, 3), name)]) for i, name in enumerate(gpus)))
    names = part_names(components(place(plan, kinds), kinds), kinds)
    assert names == ["rtx-3090", "rtx-3090-n1", "controller-n0", "nodes"]


def test_the_command_takes_settings_of_the_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [("A100-80", "a100"), ("V100-32", "v100")]
    nodes = [
        {"gpu": gpu, "count": 1, "gpus_per_node": 1, "kubernetes": {"node_selector": {"gpu": label}}}
        for gpu, label in groups
    ]
    model = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000}
    model |= {"seq_length": 256, "global_batch_size": 8, "precision": "fp16"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"nodes": nodes}))
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(model))
    inputs = ["--cluster", str(tmp_path / "c.yaml"), "--model", str(tmp_path / "m.yaml")]
    assert main(["plan", *inputs, "--limit-s", "1", "--schedules", "1f1b", "--out", str(tmp_path / "p.json")]) == 0
    words = ["emit", str(tmp_path / "p.json"), *inputs, "--out", str(tmp_path / "run"), "--container", "image"]
    assert main([*words, "--target", "jobset", "--volume", f"claim:{tmp_path}", "--queue", "lab"]) == 0
    text = (tmp_path / "run" / "jobset.yaml").read_text()
    assert "gpu: a100" in text and "claimName: claim" in text and not (tmp_path / "run" / "train.sbatch").exists()
    capsys.readouterr()
    assert main([*words, "--target", "skypilot", "--volume", f"s3://b:{tmp_path}"]) == 2
    assert "skypilot.accelerators" in capsys.readouterr().err
    assert main([*words, "--volume", f"claim:{tmp_path}"]) == 2
    assert "--volume" in capsys.readouterr().err
