"""Memory and collectives of the parameter window against Zorse's formulas and the simulator.

``python -m benchmarks.zorse_memory --json OUT``: one model on two stages of four ranks, with 1, 2, 4
and 8 ministages per stage as in the paper: shards offloaded, updated at once, released at the turn.
PP + ZeRO-2 keeps the whole stage and updates at the end; PP + ZeRO-3 is the same window told to gather
one layer at a time for every microbatch.  Beside them the exact update, and the optimizer's state or
the activations between layers on the host.  Reported per rank and configuration: peaks of whole parameters, gradients, optimizer state
and activations in bytes, and collectives per iteration, beside Table 2 of the paper and beside the
simulation of the very programs that ran.

Top-level figures: ``memory_saving`` (1 minus the bytes with 8 ministages over those with 1),
``gathers_per_layer`` (of ministages, and of ZeRO-3), ``max_error_to_simulator`` (whole parameters,
gradients, gathers, and all state together).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import machine_flags
from benchmarks.machine import machine
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
STAGES, REPLICAS, MICROBATCHES, STEPS = 2, 4, 16, 3
MINISTAGES = (1, 2, 4, 8)
ZERO2, ZERO3 = "PP + ZeRO-2", "PP + ZeRO-3"
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
    """Ministages as in the paper, what they are compared with, and further options."""
    paper = {"keep_at_turn": False, "update": "at-once", "offload": True}
    most = MINISTAGES[-1]
    return [
        Configuration(ZERO2, 1, {"update": "exact"}),
        Configuration(ZERO3, most, {"keep_at_turn": False, "update": "at-once", "per_microbatch": True}),
        *(Configuration(f"{n} ministages", n, paper) for n in MINISTAGES),
        Configuration(f"{most} ministages, exact", most, {**paper, "update": "exact"}),
        Configuration(f"{most} ministages, optimizer offloaded", most, {**paper, "offload_optimizer": True}),
        Configuration(f"{most} ministages, activations offloaded", most, {**paper, "offload_activations": 1.0}),
    ]


def plan_of(configuration: Configuration) -> Plan:
    """Two stages of equal replicas; gathers per microbatch need equal shares."""
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


def simulated(configuration: Configuration, plan: Plan) -> list[dict[str, float]]:
    """Peaks of whole parameters and gradients and of all state, and gathers, of every device."""
    program = build_programs(Placement(plan))[False]
    devices = program.devices
    table = chunk_bytes(plan)
    whole = tuple(tuple(map(float, table[d.stage])) for d in devices)
    shard = tuple(tuple(value / REPLICAS for value in row) for row in whole)
    ones = tuple(tuple(1.0 for _ in row) for row in whole)
    moments = tuple(tuple(2 * value for value in row) for row in shard)
    resident = not configuration.options.get("offload_optimizer")
    costs = Costs(
        forward_s=ones,
        backward_s=tuple(tuple(3.0 for _ in row) for row in whole),
        reduce_s=ones,
        memory=Memory(
            parameter_bytes=whole,
            gradient_bytes=whole,
            parameter_shard_bytes=shard,
            gradient_shard_bytes=shard,
            optimizer_bytes=moments if resident else (),
        ),
    )
    plain = replace(costs, memory=Memory(parameter_bytes=whole, gradient_bytes=whole))
    uses = zip(memory_use(simulate(program, costs)), memory_use(simulate(program, plain)), strict=True)
    return [
        {
            "parameters": single.peak_of("parameters"),
            "gradients": single.peak_of("gradients"),
            "state": use.peak_bytes,
            "gathers": sum(op.kind == Kind.PARAM_GATHER for op in program.ops[d]),
        }
        for d, (use, single) in enumerate(uses)
    ]


def formula(configuration: Configuration, plan: Plan, stage: int) -> dict[str, float]:
    """Table 2 of the paper for one stage: parameters in bytes, gathers per iteration.

    The paper's L is the layers of the stage and its L/S those of a ministage, which here carry
    embedding and output layer too: the largest ministage counts.
    """
    table = chunk_bytes(plan)[stage]
    layers = sum(plan.stages[stage].layers)
    if configuration.name == ZERO3:
        busiest = max(len(r.microbatches) for r in plan.stages[stage].replicas)
        sharded = (sum(table) - 2 * max(table)) / REPLICAS
        return {"materialised": 2 * max(table), "sharded": sharded, "gathers": 2 * layers * busiest}
    if configuration.name == ZERO2:
        return {"materialised": sum(table), "sharded": 0.0, "gathers": 2 * layers}
    held = min(2, configuration.ministages) * max(table)
    return {"materialised": held, "sharded": 0.0, "gathers": 2 * layers}


def measure(runner: Runner, configuration: Configuration, folder: Path) -> dict[str, Any]:
    """Run one configuration and collect the figures of its ranks."""
    plan = plan_of(configuration)
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    argv = (*FLAGS, *machine_flags(), "--het-plan", str(folder / "plan.json"),
            "--het-report", str(folder), "--het-transport", "gloo")  # fmt: skip
    runner.run(Job(configuration.name, plan.world_size, argv, folder, timeout_s=900))
    expected = simulated(configuration, plan)
    ranks, worst = [], 0.0
    for rank in range(plan.world_size):
        report = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
        window, memory = report["window"], report["memory"]
        stage = report["stage"]
        # fp32: the shards of the parameters are the optimizer's main parameters, and what is left of
        # the optimizer's state are Adam's two moments.
        moments = 2 * sum(chunk_bytes(plan)[stage]) / REPLICAS
        offloaded = "peak_optimizer_bytes" in window
        state = window["peak_bytes"] + (0 if offloaded else moments)
        pairs = [
            (state, expected[rank]["state"]),
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
                "parameter_shard_bytes": window["peak_shard_bytes"],
                "optimizer_bytes": window["peak_optimizer_bytes"] if offloaded else moments,
                "activation_bytes": _activations(configuration, window, memory, moments),
                "state_bytes": state,
                "gathers": window["gathers"],
                "reductions": window["reductions"],
                "table_2": formula(configuration, plan, stage),
                "simulator": expected[rank],
                "error_to_simulator": error,
            }
        )
    return {**asdict(configuration), "max_error_to_simulator": worst, "ranks": ranks}


def _activations(
    configuration: Configuration, window: dict[str, int], memory: dict[str, int], moments: float
) -> float:
    """What grew in the metered iteration, without gradient shards and new optimizer state.

    The iteration is the second one, in which exact updates run for the first time and Adam makes its
    two moments.
    """
    grown = memory["activation_peak_bytes"] - window["peak_gradient_shard_bytes"]
    if configuration.options.get("update") == "exact":
        grown -= moments
    return max(grown, 0)


def total(entry: dict[str, Any]) -> float:
    """The largest sum of state and activations of a rank."""
    return max(rank["state_bytes"] + rank["activation_bytes"] for rank in entry["ranks"])


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the benchmark is judged by."""
    by_name = {entry["name"]: entry for entry in entries}
    one, most = by_name["1 ministages"], by_name[f"{MINISTAGES[-1]} ministages"]
    zero3 = by_name[ZERO3]

    def per_layer(entry: dict[str, Any]) -> float:
        return max(rank["gathers"] / rank["layers"] for rank in entry["ranks"])

    window = [e for e in entries if e is not zero3]
    return {
        "memory_saving": 1 - total(most) / total(one),
        "memory_saving_over_zero2": 1 - total(most) / total(by_name[ZERO2]),
        "memory_over_zero3": total(most) / total(zero3),
        **{
            f"memory_saving_{what}_offloaded": 1
            - total(by_name[f"{MINISTAGES[-1]} ministages, {what} offloaded"]) / total(one)
            for what in ("optimizer", "activations")
        },
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


def line(entry: dict[str, Any]) -> str:
    """One configuration for the terminal: totals, and Table 2 beside what was measured."""
    rank = max(entry["ranks"], key=lambda r: r["state_bytes"] + r["activation_bytes"])
    table = rank["table_2"]
    return (
        f"{entry['name']:36} {total(entry) / 2**20:6.2f} MiB per rank "
        f"({rank['activation_bytes'] / 2**20:.2f} activations); whole parameters "
        f"{rank['parameter_bytes'] / 2**20:.2f} MiB (Table 2: {table['materialised'] / 2**20:.2f}), "
        f"gathers {rank['gathers']} (Table 2: {table['gathers']:.0f})\n"
    )


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
                sys.stdout.write(line(entry))
                sys.stdout.flush()
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    figures = summary(entries)
    passed = figures["memory_saving"] >= 0.4 and figures["max_error_to_simulator"] <= 0.05
    report = {**figures, "passed": passed, "machine": machine(), "configurations": entries}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({**figures, "passed": passed}, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
