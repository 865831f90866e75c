"""What the cost model says about the memory of a ministage run: one layer's profile, and the simulator.

The planner's profiler measures embedding, one transformer layer and output layer by themselves, in one
process; the planner's cost model makes of that what a layer keeps and needs for a while; the simulator
adds it up over the very program that the ranks run.  Nothing comes from the runs that it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from megatron_het.features import options_of
from megatron_het.features.activation_offload.spec import offload_ratio
from megatron_het.lowering.programs import build, posted_for
from megatron_het.plan import Plan
from megatron_het.plan.placement import state_parts
from megatron_het.schedule.cost import Costs, Memory, PerChunk
from megatron_het.schedule.ir import Kind, Program
from megatron_het.schedule.memory import memory_use
from megatron_het.schedule.simulate import simulate
from tools.planner.costs.layercost import LayerCost, MeasuredCosts
from tools.planner.costs.runtime import CPU_GLOO
from tools.planner.inputs.model import Model
from tools.planner.inputs.profile_schema import ProfiledModel
from tools.planner.profile.command import run_profile
from tools.planner.profile.settings import ProfileSettings

_FP32, _KIND = 4, "CPU"
_RECOMPUTE = ("none", "full")


@dataclass(frozen=True)
class Layers:
    """Bytes of a model's layers, for one microbatch of one sequence in fp32 on the CPU."""

    costs: MeasuredCosts

    @classmethod
    def profiled(cls, plan: Plan, vocabulary: int, folder: Path) -> Layers:
        """Profile the layers of a plan's model.

        Args:
            plan: Whose model it is.
            vocabulary: Rows of the embedding, padding included.
            folder: Where the profile is written.
        """
        shape = plan.model
        if shape.ffn_hidden_size is None:
            raise ValueError("the plan's model has no ffn_hidden_size: its layers cannot be profiled")
        profiled = ProfiledModel(
            shape.hidden_size,
            shape.ffn_hidden_size,
            shape.num_attention_heads,
            shape.num_query_groups,
            vocabulary,
            shape.seq_length,
            "fp32",
        )
        settings = ProfileSettings(
            profiled,
            str(folder / "profile.json"),
            (_KIND,),
            recompute=_RECOMPUTE,
            window_s=0.02,
            windows=1,
            links=False,
        )
        model = Model(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            ffn_hidden_size=shape.ffn_hidden_size,
            num_attention_heads=shape.num_attention_heads,
            vocab_size=vocabulary,
            seq_length=shape.seq_length,
            global_batch_size=plan.training.global_batch_size,
            precision="fp32",
            attention="unfused",
        )

        def no_catalog(kind: str) -> NoReturn:
            raise LookupError(f"{kind} is measured")

        return cls(MeasuredCosts(model, run_profile(settings, 1), no_catalog, CPU_GLOO))

    def cost(self, kind: str, recompute: str) -> LayerCost:
        """Of ``embedding``, ``layer`` or ``head``."""
        return self.costs.cost(_KIND, kind, 1, 1, recompute)  # type: ignore[arg-type]


def share_of(plan: Plan, stage: int, replica: int) -> float:
    """The part of a stage's state that a replica keeps."""
    return state_parts(plan.stages[stage])[replica]


@dataclass(frozen=True)
class Prediction:
    """Holds what the simulator predicts for a plan.

    Attributes:
        plan: What is run.
        layers: Of the plan's model.
    """

    plan: Plan
    layers: Layers

    @cached_property
    def program(self) -> Program:
        """Returns what the ranks run, over gloo."""
        return posted_for("gloo", build(self.plan)[False])

    @cached_property
    def chunk_bytes(self) -> list[list[int]]:
        """Whole parameters per stage and chunk, from the shapes."""
        recompute = self.plan.training.recompute
        sizes = {kind: self.layers.cost(kind, recompute).parameters * _FP32 for kind in ("layer", "embedding", "head")}
        table = [[count * sizes["layer"] for count in stage.layers] for stage in self.plan.stages]
        table[0][0] += sizes["embedding"]
        table[-1][-1] += sizes["head"]
        return table

    def _activations(self) -> Memory:
        """Kept and temporary bytes of every chunk."""
        recompute, last = self.plan.training.recompute, len(self.plan.stages) - 1
        layer, first, head = (self.layers.cost(kind, recompute) for kind in ("layer", "embedding", "head"))
        kept, extra = [], []
        for s, stage in enumerate(self.plan.stages):
            own = [count * layer.activation_bytes for count in stage.layers]
            more = [layer.workspace_bytes if count else 0.0 for count in stage.layers]
            if s == last:
                # The backward begins with the head, and what it kept is gone when the layers follow.
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
        """Parameters, gradients and optimizer state (in fp32 the shards are the main parameters)."""
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
        """Per device: peaks of each kind by itself and of everything together, and gathers."""
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
