"""Memory and collectives of the parameter window against Zorse's formulas and the simulator.

``python -m benchmarks.zorse_memory --json OUT``: one model on two stages of two ranks, with 1, 2, 4
and 8 ministages per stage.  One ministage is PP + ZeRO-2; PP + ZeRO-3 is the same window told to
gather one layer at a time for every microbatch.  Reported per rank and configuration: peaks of whole
parameters, gradients, optimizer state and activations in bytes, and collectives per iteration,
beside Table 2 of the paper and beside the simulation of the very programs that ran.

Top-level figures: ``memory_saving`` (1 minus the bytes with 8 ministages over those with 1),
``gathers_per_layer`` (of ministages, and of ZeRO-3), ``max_error_to_simulator``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import machine_flags
from benchmarks.runner import Job, Runner, words
from megatron_het.plan import (
    ModelShape,
    Placement,
    Plan,
    Replica,
    ScheduleSpec,
    Stage,
    TrainingShape,
    save_plan,
)
from megatron_het.runtime.programs import build_programs
from megatron_het.schedule.cost import Costs, Memory
from megatron_het.schedule.ir import Kind
from megatron_het.schedule.memory import memory_use
from megatron_het.schedule.simulate import simulate

LAYERS, HIDDEN, FFN, HEADS, SEQUENCE, VOCABULARY = 16, 128, 384, 4, 32, 127
STAGES, REPLICAS, MICROBATCHES, STEPS = 2, 2, 8, 3
MINISTAGES = (1, 2, 4, 8)
_FP32 = 4
FLAGS = words(
    f"""
    --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN}
    --num-attention-heads {HEADS} --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32
    --mock-data --split 90,10,0 --micro-batch-size 1 --global-batch-size {MICROBATCHES}
    --calculate-per-token-loss --clip-grad 0 --train-iters {STEPS} --lr 1e-3 --eval-iters 0 --eval-interval 100 --log-interval 1
    --distributed-timeout-minutes 2
    """
)


@dataclass(frozen=True)
class Configuration:
    """A plan to measure: ministages per stage, and the window's options."""

    name: str
    ministages: int
    options: dict[str, Any]


def configurations() -> list[Configuration]:
    """Ministages as in the paper (released between forward and backward, updated at once), and ZeRO-3."""
    paper = {"keep_at_turn": False, "update": "at-once"}
    most = MINISTAGES[-1]
    return [
        *(Configuration(f"{n} ministages", n, paper) for n in MINISTAGES),
        Configuration(f"{most} ministages, exact", most, {"keep_at_turn": False}),
        Configuration("PP + ZeRO-3", most, {**paper, "per_microbatch": True}),
    ]


def plan_of(configuration: Configuration) -> Plan:
    """Two stages of two replicas; gathers per microbatch need equal shares."""
    owned = tuple(tuple(range(q, MICROBATCHES, REPLICAS)) for q in range(REPLICAS))
    per_chunk = LAYERS // STAGES // configuration.ministages
    stages = tuple(
        Stage(
            (per_chunk,) * configuration.ministages,
            tuple(Replica((s * REPLICAS + q,), owned[q]) for q in range(REPLICAS)),
        )
        for s in range(STAGES)
    )
    return Plan(
        ModelShape(LAYERS, HIDDEN, HEADS, HEADS, SEQUENCE, FFN),
        TrainingShape(1, MICROBATCHES, recompute="full", distributed_optimizer=True),
        stages,
        ScheduleSpec("ministage", {"window": True, **configuration.options}),
    )


def chunk_bytes(plan: Plan) -> list[list[int]]:
    """Whole parameters per stage and chunk, padded as Megatron's buffers are, from the shapes."""
    layer = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN) * _FP32
    padded_vocabulary = -(-(VOCABULARY + 1) // 32) * 32
    table = [[count * layer for count in stage.layers] for stage in plan.stages]
    table[0][0] += padded_vocabulary * HIDDEN * _FP32
    table[-1][-1] += (padded_vocabulary * HIDDEN + HIDDEN) * _FP32
    return table


def simulated(plan: Plan) -> list[dict[str, float]]:
    """Peaks of whole parameters and gradients, and gathers, of every device by the simulator."""
    program = build_programs(Placement(plan))[False]
    devices = program.devices
    table = chunk_bytes(plan)
    per_device = tuple(tuple(map(float, table[d.stage])) for d in devices)
    ones = tuple(tuple(1.0 for _ in row) for row in per_device)
    costs = Costs(
        forward_s=ones,
        backward_s=tuple(tuple(3.0 for _ in row) for row in per_device),
        reduce_s=ones,
        memory=Memory(parameter_bytes=per_device, gradient_bytes=per_device),
    )
    found = []
    for d, use in enumerate(memory_use(simulate(program, costs))):
        gathers = sum(op.kind == Kind.PARAM_GATHER for op in program.ops[d])
        found.append(
            {
                "parameters": use.peak_of("parameters"),
                "gradients": use.peak_of("gradients"),
                "gathers": gathers,
            }
        )
    return found


def formula(configuration: Configuration, plan: Plan, stage: int) -> dict[str, float]:
    """Table 2 of the paper for one stage: whole parameters in bytes, gathers per iteration."""
    table = chunk_bytes(plan)[stage]
    layers = sum(plan.stages[stage].layers)
    if configuration.options.get("per_microbatch"):
        busiest = max(len(r.microbatches) for r in plan.stages[stage].replicas)
        return {"parameters": 2 * max(table), "gathers": 2 * layers * busiest}
    return {"parameters": min(2, configuration.ministages) * max(table), "gathers": 2 * layers}


def measure(runner: Runner, configuration: Configuration, folder: Path) -> dict[str, Any]:
    """Run one configuration and collect the figures of its ranks."""
    plan = plan_of(configuration)
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    argv = (*FLAGS, *machine_flags(), "--het-plan", str(folder / "plan.json"),
            "--het-report", str(folder), "--het-transport", "gloo")  # fmt: skip
    runner.run(Job(configuration.name, plan.world_size, argv, folder, timeout_s=900))
    expected = simulated(plan)
    ranks, worst = [], 0.0
    for rank in range(plan.world_size):
        report = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
        window, memory = report["window"], report["memory"]
        stage = report["stage"]
        pairs = [
            (window["peak_parameter_bytes"], expected[rank]["parameters"]),
            (window["peak_gradient_bytes"], expected[rank]["gradients"]),
            (window["gathers"], expected[rank]["gathers"]),
        ]
        error = max(abs(found - wanted) / wanted for found, wanted in pairs)
        worst = max(worst, error)
        ranks.append(
            {
                "rank": rank,
                "stage": stage,
                "layers": sum(plan.stages[stage].layers),
                "parameter_bytes": window["peak_parameter_bytes"],
                "gradient_bytes": window["peak_gradient_bytes"],
                "gradient_shard_bytes": window["peak_gradient_shard_bytes"],
                # fp32: the shards of the parameters are the optimizer's main parameters.
                "optimizer_bytes": memory["optimizer_bytes"],
                "activation_bytes": _activations(configuration, window, memory),
                "state_bytes": window["peak_bytes"] - window["peak_shard_bytes"] + memory["optimizer_bytes"],
                "gathers": window["gathers"],
                "reductions": window["reductions"],
                "table_2": formula(configuration, plan, stage),
                "simulator": expected[rank],
                "error_to_simulator": error,
            }
        )
    return {**asdict(configuration), "max_error_to_simulator": worst, "ranks": ranks}


def _activations(configuration: Configuration, window: dict[str, int], memory: dict[str, int]) -> int:
    """What grew in the metered iteration, without gradient shards and new optimizer state.

    The iteration is the second one, in which exact updates run for the first time and Adam makes its
    two moments, which are two thirds of the optimizer's bytes.
    """
    grown = memory["activation_peak_bytes"] - window["peak_gradient_shard_bytes"]
    if configuration.options.get("update") != "at-once":
        grown -= 2 * memory["optimizer_bytes"] // 3
    return max(grown, 0)


def total(entry: dict[str, Any]) -> int:
    """The largest sum of state and activations of a rank."""
    return max(rank["state_bytes"] + rank["activation_bytes"] for rank in entry["ranks"])


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the benchmark is judged by."""
    by_name = {entry["name"]: entry for entry in entries}
    one, most = by_name["1 ministages"], by_name[f"{MINISTAGES[-1]} ministages"]
    zero3 = by_name["PP + ZeRO-3"]

    def per_layer(entry: dict[str, Any]) -> float:
        return max(rank["gathers"] / rank["layers"] for rank in entry["ranks"])

    window = [e for e in entries if e is not zero3]
    return {
        "memory_saving": 1 - total(most) / total(one),
        "gathers_per_layer": max(map(per_layer, window)),
        "gathers_per_layer_zero3": per_layer(zero3),
        "max_ministages_materialised": max(
            rank["parameter_bytes"] / max(chunk_bytes(plan_of(_again(e)))[rank["stage"]])
            for e in window
            for rank in e["ranks"]
        ),
        "max_error_to_simulator": max(e["max_error_to_simulator"] for e in entries),
    }


def _again(entry: dict[str, Any]) -> Configuration:
    return Configuration(entry["name"], entry["ministages"], entry["options"])


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zorse_memory", description=__doc__)
    parser.add_argument("--json", required=True, type=Path, help="where to write the figures")
    parser.add_argument("--keep", type=Path, help="keep logs and reports in this folder")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="zorse-memory-"))
    entries = []
    try:
        with Runner() as runner:
            for configuration in configurations():
                entry = measure(runner, configuration, folder / configuration.name.replace(" ", "-"))
                entries.append(entry)
                sys.stdout.write(f"{entry['name']:14} {total(entry) / 2**20:8.2f} MiB per rank\n")
                sys.stdout.flush()
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    figures = summary(entries)
    passed = figures["memory_saving"] >= 0.4 and figures["max_error_to_simulator"] <= 0.05
    report = {**figures, "passed": passed, "configurations": entries}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({**figures, "passed": passed}, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
