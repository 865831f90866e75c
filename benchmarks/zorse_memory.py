"""Compares memory and collectives of the parameter window with Zorse's formulas and the simulator.

``python -m benchmarks.zorse_memory --json OUT``: one model on two stages of four ranks, with 1, 2, 4
and 8 ministages per stage as in the paper: shards offloaded, updated at once, released at the turn.
PP + ZeRO-2 keeps the whole stage and updates at the end; PP + ZeRO-3 is the same window told to gather
one layer at a time for every microbatch.  Beside them the exact update, the optimizer's state or the
activations between layers on the host, and unequal shares of the state, one of them empty.  Reported per
rank and configuration: peaks of whole parameters, gradients, optimizer state and activations in bytes, and
collectives per iteration, beside Table 2 of the paper and beside the simulation of the very programs that
ran.

Top-level figures: ``memory_saving`` (1 minus the bytes with 8 ministages over those with 1),
``gathers_per_layer`` (of ministages, and of ZeRO-3), ``max_error_to_simulator``: the largest of
``max_errors``, which are those of whole parameters, whole gradients, all state together, gathers,
activations (saved tensors, boundaries, transfer buffers, workspace) and the total, the peak of everything
at once.  ``start_bytes`` of a rank is the peak while model and optimizer are built, ``stage_bytes`` the
parameters of its stage.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, save, scratch, write_report
from examples.llama.job import model_of
from megatron_het.features import options_of
from megatron_het.features.activation_offload.spec import offload_ratio
from megatron_het.lowering.programs import build, posted_for
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from megatron_het.plan.placement import state_parts
from megatron_het.schedule.cost import Costs, Memory, PerChunk
from megatron_het.schedule.ir import Kind, Program
from megatron_het.schedule.memory import memory_use
from megatron_het.schedule.simulate import simulate
from testing.cases import machine_flags, plain_flags
from testing.planner_cases import processors
from testing.runner import Job, Runner, words
from testing.zorse_cases import with_shares
from tools.planner.costs.layer import CPU_GLOO
from tools.planner.costs.layercost import LayerCost, MeasuredCosts
from tools.planner.profile.settings import ProfileSettings, run_profile

# The cost model's memory of a ministage run: one layer's profile, and the simulator.
#
# The planner's profiler measures embedding, one transformer layer and output layer by themselves, in one
# process; from this the planner's cost model derives a layer's kept and temporary bytes; the simulator
# sums these over the program that the ranks run.  No figure comes from the runs that it is compared with.


_FP32, _KIND = 4, "CPU"
_RECOMPUTE = ("none", "full")


@dataclass(frozen=True)
class Layers:
    """The bytes of a model's layers, for one microbatch of one sequence in fp32 on the CPU."""

    costs: MeasuredCosts

    @classmethod
    def profiled(cls, plan: Plan, vocabulary: int, folder: Path) -> Layers:
        """Profile the layers of a plan's model."""
        if plan.model.ffn_hidden_size is None:
            raise ValueError("the plan's model has no ffn_hidden_size: its layers cannot be profiled")
        own = {"vocab_size": vocabulary, "precision": "fp32", "attention": "unfused", "tied_embeddings": False}
        model = model_of(plan, **own)
        file = str(folder / "profile.json")
        settings = ProfileSettings(
            model.profiled, file, (_KIND,), recompute=_RECOMPUTE, window_s=0.02, windows=1, links=False
        )
        core = processors(1).gpu("core")
        return cls(MeasuredCosts(model, run_profile(settings, 1), lambda _: core, CPU_GLOO))

    def cost(self, kind: str, recompute: str) -> LayerCost:
        """Returns the cost of ``embedding``, ``layer`` or ``head``."""
        return self.costs.cost(_KIND, kind, 1, 1, recompute)  # type: ignore[arg-type]


def share_of(plan: Plan, stage: int, replica: int) -> float:
    """Returns the part of a stage's state that a replica keeps."""
    return state_parts(plan.stages[stage])[replica]


@dataclass(frozen=True)
class Prediction:
    """The simulator's predictions for a plan."""

    plan: Plan
    layers: Layers

    @cached_property
    def program(self) -> Program:
        """Returns the program that the ranks run over gloo."""
        return posted_for("gloo", build(self.plan)[False])

    @cached_property
    def chunk_bytes(self) -> list[list[int]]:
        """Returns the bytes of whole parameters per stage and chunk, from the shapes."""
        recompute = self.plan.training.recompute
        sizes = {kind: self.layers.cost(kind, recompute).parameters * _FP32 for kind in ("layer", "embedding", "head")}
        table = [[count * sizes["layer"] for count in stage.layers] for stage in self.plan.stages]
        table[0][0] += sizes["embedding"]
        table[-1][-1] += sizes["head"]
        return table

    def _activations(self) -> Memory:
        """Returns the kept and the temporary bytes of every chunk."""
        recompute, last = self.plan.training.recompute, len(self.plan.stages) - 1
        layer, first, head = (self.layers.cost(kind, recompute) for kind in ("layer", "embedding", "head"))
        kept, extra = [], []
        for s, stage in enumerate(self.plan.stages):
            own = [count * layer.activation_bytes for count in stage.layers]
            more = [layer.workspace_bytes if count else 0.0 for count in stage.layers]
            if s == last:
                # The backward begins with the head, whose kept tensors are freed before the layers' backward.
                own[-1] += head.activation_bytes
                more[-1] = max(head.workspace_bytes, more[-1] - head.activation_bytes)
            if s == 0:
                more[0] = max(more[0], first.workspace_bytes - own[0])
                own[0] += first.activation_bytes
            kept.append(tuple(own))
            extra.append(tuple(more))
        left = 1 - offload_ratio(self.plan)
        per_device = self._per_device
        return Memory(
            activation_bytes=per_device(kept),
            workspace_bytes=per_device(extra),
            boundary_bytes=per_device([tuple(left * value for value in row) for row in kept]),
        )

    def _per_device(self, table: list[tuple[float, ...]]) -> PerChunk:
        return tuple(table[device.stage] for device in self.program.devices)

    def _state(self) -> Memory:
        """Returns parameters, gradients and optimizer state (in fp32 the shards are the main parameters)."""
        options = options_of(self.plan, "window")
        assert options is not None
        whole = self._per_device([tuple(map(float, row)) for row in self.chunk_bytes])
        shard = tuple(
            tuple(value * share_of(self.plan, device.stage, device.replica) for value in row)
            for device, row in zip(self.program.devices, whole, strict=True)
        )
        moments = tuple(tuple(2 * value for value in row) for row in shard)
        return Memory(
            parameter_bytes=whole,
            gradient_bytes=whole,
            parameter_shard_bytes=shard,
            gradient_shard_bytes=shard,
            optimizer_bytes=() if options.offload_optimizer else moments,
        )

    @cached_property
    def peaks(self) -> list[dict[str, Any]]:
        """Returns, per device, the peaks of each kind and of all memory together, and the gathers."""
        shape = self.plan.model
        ones = tuple(tuple(1.0 for _ in self.plan.stages[d.stage].layers) for d in self.program.devices)
        threes = tuple(tuple(3.0 for _ in row) for row in ones)
        message = float(shape.seq_length * shape.hidden_size * _FP32)
        costs = Costs(ones, threes, reduce_s=ones, host_blocks=CPU_GLOO.host_blocks, keeps_sent=CPU_GLOO.keeps_sent)
        state, activations = self._state(), self._activations()
        both = replace(
            state,
            activation_bytes=activations.activation_bytes,
            workspace_bytes=activations.workspace_bytes,
            boundary_bytes=activations.boundary_bytes,
        )
        whole = replace(state, parameter_shard_bytes=(), gradient_shard_bytes=(), optimizer_bytes=())
        uses = {
            name: memory_use(simulate(self.program, replace(costs, memory=memory, message_bytes=bytes_)))
            for name, memory, bytes_ in (
                ("whole", whole, 0.0),
                ("state", state, 0.0),
                ("activations", activations, message),
                ("all", both, message),
            )
        }
        return [
            {
                "parameters": uses["whole"][d].peak_of("parameters"),
                "gradients": uses["whole"][d].peak_of("gradients"),
                "state": uses["state"][d].peak_bytes,
                "activations": uses["activations"][d].peak_bytes,
                "activations_at_peak": uses["activations"][d].at_peak_bytes,
                "total": uses["all"][d].peak_bytes,
                "total_at_peak": uses["all"][d].at_peak_bytes,
                "gathers": sum(op.kind == Kind.PARAM_GATHER for op in ops),
            }
            for d, ops in enumerate(self.program.ops)
        ]


LAYERS, HIDDEN, FFN, HEADS, SEQUENCE, VOCABULARY = 16, 128, 384, 4, 32, 127
STAGES, REPLICAS, MICROBATCHES, STEPS = 2, 4, 16, 3
MINISTAGES = (1, 2, 4, 8)
ZERO2, ZERO3 = "PP + ZeRO-2", "PP + ZeRO-3"
PADDED_VOCABULARY = 128
UNEQUAL = ((4.0, 2.0, 1.0, 1.0), (2.0, 1.0, 1.0, 0.0))
_FLAGS = words(
    """
    --make-vocab-size-divisible-by 32 --split 90,10,0 --clip-grad 0 --lr 1e-3 --distributed-timeout-minutes 2
    --rerun-mode disabled --het-transport gloo
    """
)


def arguments(plan: Plan, folder: Path, iterations: int) -> tuple[str, ...]:
    """Save a plan in the folder of the reports; returns the command line of its training."""
    save_plan(plan, folder / "plan.json")
    flags = plain_flags(plan.model, VOCABULARY, plan.num_microbatches, iterations)
    where = ("--het-plan", str(folder / "plan.json"), "--het-report", str(folder))
    return (*flags, *_FLAGS, *machine_flags(), *where)


@dataclass(frozen=True)
class Configuration:
    """A plan to measure."""

    name: str  # unique
    ministages: int  # per stage
    options: dict[str, Any]  # of the window
    recompute: str = "full"  # of the activations
    replicas: int = REPLICAS  # ranks of each of the two stages
    microbatches: int = MICROBATCHES  # per iteration
    shares: tuple[tuple[float, ...], ...] | None = None  # of the state, ``[stage][replica]``; None for equal ones


def configurations() -> list[Configuration]:
    """Yields ministages as in the paper, the configurations to compare with, and further options."""
    paper = {"keep_at_turn": False, "update": "at-once", "offload": True}
    most = MINISTAGES[-1]
    return [
        Configuration(ZERO2, 1, {"update": "exact"}),
        Configuration(ZERO3, most, {"keep_at_turn": False, "update": "at-once", "per_microbatch": True}),
        *(Configuration(f"{n} ministages", n, paper) for n in MINISTAGES),
        Configuration(f"{most} ministages, exact", most, {**paper, "update": "exact"}),
        Configuration(f"{most} ministages, optimizer offloaded", most, {**paper, "offload_optimizer": True}),
        Configuration(f"{most} ministages, activations offloaded", most, {**paper, "offload_activations": 1.0}),
        Configuration(f"{most} ministages, unequal shares", most, paper, shares=UNEQUAL),
        *_few_ranks(paper),
    ]


def _few_ranks(paper: dict[str, Any]) -> Iterator[Configuration]:
    """Yields configurations with other activations, on two replicas per stage: recomputation, offload, microbatches."""
    moving = {**paper, "offload_activations": 1.0}
    for count in (1, MINISTAGES[-1]):
        yield Configuration(f"{count} ministages, no recomputation", count, paper, "none", 2, 8)
        yield Configuration(f"{count} ministages, no recomputation, activations offloaded", count, moving, "none", 2, 8)
        yield Configuration(f"{count} ministages, few microbatches", count, paper, "full", 2, 4)
        yield Configuration(f"{count} ministages, many microbatches", count, paper, "full", 2, 32)


def plan_of(configuration: Configuration) -> Plan:
    """Returns a plan of two stages of equal replicas; gathers per microbatch need equal shares."""
    replicas, microbatches = configuration.replicas, configuration.microbatches
    owned = tuple(tuple(range(q, microbatches, replicas)) for q in range(replicas))
    per_chunk = LAYERS // STAGES // configuration.ministages
    stages = tuple(
        Stage(
            (per_chunk,) * configuration.ministages,
            tuple(Replica((s * replicas + q,), owned[q]) for q in range(replicas)),
        )
        for s in range(STAGES)
    )
    plan = Plan(
        ModelShape(LAYERS, HIDDEN, HEADS, HEADS, SEQUENCE, FFN),
        TrainingShape(1, microbatches, recompute=configuration.recompute, distributed_optimizer=True),
        stages,
        ScheduleSpec("ministage", {"window": True, **configuration.options}),
    )
    return plan if configuration.shares is None else with_shares(plan, configuration.shares)


def formula(configuration: Configuration, plan: Plan, table: list[int], stage: int) -> dict[str, float]:
    """Returns Table 2 of the paper for one stage: parameters in bytes, gathers per iteration.

    The paper's L is the layers of the stage and its L/S those of a ministage, which here carry
    embedding and output layer too: the largest ministage of ``table`` counts.
    """
    layers = sum(plan.stages[stage].layers)
    if configuration.name == ZERO3:
        busiest = max(len(r.microbatches) for r in plan.stages[stage].replicas)
        sharded = (sum(table) - 2 * max(table)) / configuration.replicas
        return {"materialised": 2 * max(table), "sharded": sharded, "gathers": 2 * layers * busiest}
    if configuration.name == ZERO2:
        return {"materialised": sum(table), "sharded": 0.0, "gathers": 2 * layers}
    held = min(2, configuration.ministages) * max(table)
    return {"materialised": held, "sharded": 0.0, "gathers": 2 * layers}


def measure(runner: Runner, configuration: Configuration, layers: Layers, folder: Path) -> dict[str, Any]:
    """Run one configuration and compare its ranks with formula and simulator."""
    plan = plan_of(configuration)
    folder.mkdir(parents=True)
    watch = ("testing.watches:watch_window", {"out": str(folder)})
    argv = arguments(plan, folder, STEPS)
    runner.run(Job(configuration.name, plan.world_size, argv, folder, setup=watch, timeout_s=900))
    expected = Prediction(plan, layers)
    ranks = [_rank(configuration, expected, rank, folder) for rank in range(plan.world_size)]
    worst = {what: max(rank["errors"][what] for rank in ranks) for what in ranks[0]["errors"]}
    return {
        **asdict(configuration),
        "max_error_to_simulator": max(worst.values()),
        "errors": worst,
        "largest_ministage_bytes": [max(row) for row in expected.chunk_bytes],
        "ranks": ranks,
    }


def _rank(configuration: Configuration, expected: Prediction, rank: int, folder: Path) -> dict[str, Any]:
    """Returns the measurements of one rank, beside the figures of the simulator and the paper."""
    plan, simulated = expected.plan, expected.peaks[rank]
    report = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
    watched = json.loads((folder / f"watch-{rank}.json").read_text(encoding="utf-8"))
    window, stage = report["window"], report["stage"]
    # fp32: the shards of the parameters are the optimizer's main parameters, and what is left of
    # the optimizer's state are Adam's two moments.
    share = share_of(plan, stage, report["replica"])
    moments = 2 * sum(expected.chunk_bytes[stage]) * share
    offloaded = "peak_optimizer_bytes" in window
    measured = {
        "parameters": window["peak_parameter_bytes"],
        "gradients": window["peak_gradient_bytes"],
        "state": window["peak_bytes"] + (0 if offloaded else moments),
        "gathers": window["gathers"],
        "activations": watched["activation_bytes"],
        "total": watched["total_bytes"],
    }
    return {
        "rank": rank,
        "stage": stage,
        "layers": sum(plan.stages[stage].layers),
        "state_share": share,
        "measured": measured,
        "gradient_shard_bytes": window["peak_gradient_shard_bytes"],
        "parameter_shard_bytes": window["peak_shard_bytes"],
        "optimizer_bytes": window["peak_optimizer_bytes"] if offloaded else moments,
        "host_activation_bytes": watched["host_activation_bytes"],
        "start_bytes": watched["start_bytes"],
        "stage_bytes": sum(expected.chunk_bytes[stage]),
        "reductions": window["reductions"],
        "table_2": formula(configuration, plan, expected.chunk_bytes[stage], stage),
        "simulator": simulated,
        "errors": {name: abs(found / simulated[name] - 1) for name, found in measured.items()},
    }


def total(entry: dict[str, Any]) -> float:
    """Returns the peak of all memory of a rank."""
    return max(rank["measured"]["total"] for rank in entry["ranks"])


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the top-level figures."""
    by_name = {entry["name"]: entry for entry in entries}
    one, most = by_name["1 ministages"], by_name[f"{MINISTAGES[-1]} ministages"]
    zero3 = by_name[ZERO3]

    def per_layer(entry: dict[str, Any]) -> float:
        return max(rank["measured"]["gathers"] / rank["layers"] for rank in entry["ranks"])

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
            rank["measured"]["parameters"] / e["largest_ministage_bytes"][rank["stage"]]
            for e in window
            for rank in e["ranks"]
        ),
        "max_error_to_simulator": max(e["max_error_to_simulator"] for e in entries),
        "max_errors": {name: max(e["errors"][name] for e in entries) for name in entries[0]["errors"]},
    }


def line(entry: dict[str, Any]) -> str:
    """Returns a configuration's line for the terminal: totals, and Table 2 beside the measurements."""
    rank = max(entry["ranks"], key=lambda r: r["measured"]["total"])
    table, found = rank["table_2"], rank["measured"]
    errors = ", ".join(f"{name} {error:.3f}" for name, error in entry["errors"].items())
    return (
        f"{entry['name']:60} {total(entry) / 2**20:6.2f} MiB per rank "
        f"({found['activations'] / 2**20:.2f} activations); whole parameters "
        f"{found['parameters'] / 2**20:.2f} MiB (Table 2: {table['materialised'] / 2**20:.2f}), "
        f"gathers {found['gathers']} (Table 2: {table['gathers']:.0f}); "
        f"start {rank['start_bytes'] / rank['stage_bytes']:.2f} stages; errors {errors}\n"
    )


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.zorse_memory", __doc__)
    parser.add_argument("--only", metavar="NAME", default="*", help="configurations by name; * stands for anything")
    parser.add_argument("--keep", type=Path, help="keep logs and reports in this folder")
    options = parser.parse_args()
    chosen = [c for c in configurations() if fnmatch.fnmatchcase(c.name, options.only)]
    if not chosen:
        parser.error(f"--only {options.only}: no such configuration")
    entries = []
    with scratch("zorse-memory-", options.keep) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        layers = Layers.profiled(plan_of(chosen[0]), PADDED_VOCABULARY, folder)
        with Runner() as runner:
            for configuration in chosen:
                entry = measure(runner, configuration, layers, folder / configuration.name.replace(" ", "-"))
                entries.append(entry)
                sys.stdout.write(line(entry))
                sys.stdout.flush()
    if len(chosen) < len(configurations()):
        save(options.json, {"configurations": entries})
        return 0
    figures = summary(entries)
    passed = figures["memory_saving"] >= 0.4 and figures["max_error_to_simulator"] <= 0.05
    report = {**figures, "passed": passed, "configurations": entries}
    write_report(options.json, report, unprinted=("configurations",))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
