"""Model files that tests of the planner share, and plans that those of the launch files share."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from tools.planner.__main__ import main
from tools.planner.emit.scripts import LaunchOptions
from tools.planner.inputs.cluster import KubernetesSettings, NodeGroup, SkypilotSettings, SlurmSettings

SMALL = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 4, "vocab_size": 512,
         "seq_length": 128, "global_batch_size": 8, "micro_batch_sizes": [1], "precision": "fp16"}  # fmt: skip
MIDDLE = {"num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8, "vocab_size": 8192,
          "seq_length": 512, "global_batch_size": 16}  # fmt: skip
WIDE = {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 16, "vocab_size": 32000,
        "seq_length": 1024, "global_batch_size": 64}  # fmt: skip
MODEL = ModelShape(8, 64, 4, 2, 32, ffn_hidden_size=128)
TINY = ModelShape(3, 32, 4, 2, 32, ffn_hidden_size=64)  # trains in seconds on a CPU


def answer(capsys: pytest.CaptureFixture[str], words: Sequence[str], code: int = 0) -> dict[str, Any]:
    """What a command of the planner prints with ``--json``."""
    assert main([*words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def nodes_of(gpu: str, devices: int, count: int = 64, **more: Any) -> NodeGroup:
    """Equal nodes; what is no field of theirs is one of Slurm's."""
    return changed(NodeGroup(gpu=gpu, count=count, gpus_per_node=devices, slurm=SlurmSettings(gres="")), **more)


def changed(nodes: NodeGroup, **more: Any) -> NodeGroup:
    own = {key: more.pop(key) for key in [*more] if key in NodeGroup.model_fields}
    return nodes.model_copy(update={**own, "slurm": nodes.slurm.model_copy(update=more)})


def in_pods(nodes: NodeGroup, label: str, resource: str = "nvidia.com/gpu", **skypilot: Any) -> NodeGroup:
    kubernetes = KubernetesSettings.model_construct(node_selector={"gpu": label}, resource=resource)
    return changed(nodes, kubernetes=kubernetes, skypilot=SkypilotSettings(**skypilot))


KINDS = {
    "big": nodes_of("big", 4, 2, constraint="a100", gres="gpu:a100", hosts=("n1", "n2")),
    "small": nodes_of("small", 2, 2, constraint="l4", gres="gpu:l4", hosts=("n3", "n4")),
}
PLAIN_KINDS = {name: changed(kind, count=64, gres="", hosts=()) for name, kind in KINDS.items()}
POD_KINDS = {
    "big": in_pods(KINDS["big"], "a100", accelerators="A100", infra="aws"),
    "small": in_pods(KINDS["small"], "l4", accelerators="L4", use_spot=True),
}
LAUNCH = LaunchOptions(run_dir="/shared/run", python="python3")


def program(path: Path, text: str) -> str:
    """A script that stands in for another program, in a folder that is made where it is missing."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def batch_job(script: Path, **variables: str) -> subprocess.Popen[str]:
    """A batch script as Slurm starts it, with these variables beside those of this process."""
    return subprocess.Popen(
        ["bash", str(script)],
        env={**os.environ, "SLURM_JOB_ID": "7", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def make_plan(
    *stages: tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], str]]],
    batch: int = 4,
    schedule: str = "1f1b",
    model: ModelShape = MODEL,
    **training: object,
) -> Plan:
    """(layers per chunk, [(ranks, microbatches, device), ...]) per stage."""
    return Plan(
        model,
        TrainingShape(1, batch, **training),  # type: ignore[arg-type]
        tuple(Stage(layers, tuple(Replica(r, m, d) for r, m, d in replicas)) for layers, replicas in stages),
        ScheduleSpec(schedule),
    )


def even_plan() -> Plan:
    return make_plan(
        ((5,), [((0, 1), (0, 2), "big"), ((2, 3), (1, 3), "big")]),
        ((3,), [((4, 5), (0, 1), "small"), ((6, 7), (2, 3), "small")]),
    )


def uneven_plan() -> Plan:
    return make_plan(
        ((5,), [((0, 1), (0, 2, 3), "big"), ((2,), (1,), "big")]), ((3,), [((3, 4), (0, 1, 2, 3), "small")])
    )


def context_parallel_plan() -> Plan:
    """Two stages of one replica each, TP 2 x CP 2."""
    plan = make_plan(((5,), [((0, 1, 2, 3), (0, 1, 2, 3), "big")]), ((3,), [((4, 5, 6, 7), (0, 1, 2, 3), "small")]))
    stages = (replace(s, replicas=tuple(replace(r, cp=2) for r in s.replicas)) for s in plan.stages)
    return replace(plan, stages=tuple(stages))
