"""Model files that tests of the planner share, and plans that those of the launch files share."""

from dataclasses import replace
from pathlib import Path

from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from tools.planner.emit.scripts import LaunchOptions
from tools.planner.inputs.packing import NodeKind

SMALL = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 4, "vocab_size": 512,
         "seq_length": 128, "global_batch_size": 8, "micro_batch_sizes": [1], "precision": "fp16"}  # fmt: skip
MIDDLE = {"num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8, "vocab_size": 8192,
          "seq_length": 512, "global_batch_size": 16}  # fmt: skip
WIDE = {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 16, "vocab_size": 32000,
        "seq_length": 1024, "global_batch_size": 64}  # fmt: skip
MODEL = ModelShape(8, 64, 4, 2, 32, ffn_hidden_size=128)
KINDS = {
    "big": NodeKind(devices=4, count=2, constraint="a100", gres="gpu:a100", hosts=("n1", "n2")),
    "small": NodeKind(devices=2, count=2, constraint="l4", gres="gpu:l4", hosts=("n3", "n4")),
}
LAUNCH = LaunchOptions(run_dir="/shared/run", python="python3")


def program(path: Path, text: str) -> str:
    """A script that stands in for another program, in a folder that is made where it is missing."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def make_plan(
    *stages: tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], str]]],
    batch: int = 4,
    schedule: str = "1f1b",
    **training: object,
) -> Plan:
    """(layers per chunk, [(ranks, microbatches, device), ...]) per stage."""
    return Plan(
        MODEL,
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
