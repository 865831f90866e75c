"""Big plans, whose memory the planner predicts and dry runs count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.plan import Plan
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.estimates import GroupMemory
from tools.planner.costs.layercost import CatalogCosts
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster
from tools.planner.inputs.model import Model

# Layers, hidden size, width of the MLP, heads, key-value heads, rows of the vocabulary.
_SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "7B": (32, 4096, 11008, 32, 32, 32000),
    "8B": (32, 4096, 14336, 32, 8, 128256),
    "13B": (40, 5120, 13824, 40, 40, 32000),
    "34B": (48, 8192, 22016, 64, 8, 32000),
    "70B": (80, 8192, 28672, 64, 8, 128256),
    "405B": (126, 16384, 53248, 128, 8, 128256),
    "8x7B": (32, 4096, 14336, 32, 8, 32000),
    "8x22B": (56, 6144, 16384, 48, 8, 32768),
}
# Experts, and how many of them a token goes to; each is as wide as the MLP above.
_EXPERTS: dict[str, tuple[int, int]] = {"8x7B": (8, 2), "8x22B": (8, 2)}


@dataclass(frozen=True)
class BigPlan:
    """A model on a cluster of one kind of GPU.

    Attributes:
        model: Key of the shapes.
        tokens: Length of a sequence.
        layers: Per stage.
        tp: Of every replica.
        replicas: Per stage.
        microbatches: Per replica.
        schedule, chunks, slices, recompute, sequence_parallel, offload, zero: As in a candidate.
    """

    model: str
    tokens: int
    layers: tuple[int, ...]
    tp: int
    replicas: int = 1
    microbatches: int = 4
    schedule: str = "1f1b"
    chunks: int = 1
    slices: int = 1
    recompute: str = "none"
    sequence_parallel: bool = True
    offload: bool = False
    zero: int = 1
    micro_batch_size: int = 1

    @property
    def name(self) -> str:
        """Says what differs."""
        parts = [self.model, f"{self.tokens // 1024}k", self.schedule, f"{len(self.layers)} stages", f"TP {self.tp}"]
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        parts += [self.recompute] if self.recompute != "none" else []
        return ", ".join(parts + (["offload"] if self.offload else []))

    @property
    def world_size(self) -> int:
        """GPUs."""
        return len(self.layers) * self.replicas * self.tp

    def model_file(self) -> dict[str, Any]:
        """The model as a model file has it."""
        layers, hidden, ffn, heads, groups, rows = _SHAPES[self.model]
        assert sum(self.layers) == layers, self.name
        experts = {}
        if self.model in _EXPERTS:
            count, top_k = _EXPERTS[self.model]
            experts = {"experts": {"count": count, "top_k": top_k, "ffn_hidden_size": ffn}}
        return experts | {
            "name": self.model,
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "vocab_size": rows,
            "seq_length": self.tokens,
            "global_batch_size": self.replicas * self.microbatches * self.micro_batch_size,
            "distributed_optimizer": self.zero >= 1,
            "sequence_parallel": self.sequence_parallel and self.tp > 1,
            "recompute": [self.recompute],
        }

    def candidate(self) -> Candidate:
        """The point of the search space."""
        stages = tuple(Stage(count, (Group(0, self.tp, self.replicas),)) for count in self.layers)
        return Candidate(
            stages,
            self.micro_batch_size,
            self.recompute,
            self.schedule,
            self.chunks,
            self.slices,
            self.zero,
            self.offload,
        )

    def planned(self) -> tuple[Plan, list[GroupMemory]]:
        """The plan, and the predicted memory of every stage."""
        nodes = -(-self.world_size // 8)
        cluster = Cluster.model_validate(
            {
                "name": "big",
                "nodes": [
                    {"gpu": "H100-SXM", "count": nodes, "gpus_per_node": 8, "zone": "here", "network_bytes_per_s": 50e9}
                ],
            }
        )
        model = Model.model_validate(self.model_file())
        estimator = Estimator(cluster, model, CatalogCosts(model, cluster.gpu))
        candidate = self.candidate()
        estimate = estimator.estimate(candidate)
        if estimate is None:
            raise PlannerError("benchmark", "plan", self.name, "no estimate")
        return build_plan(estimator, candidate, estimate), list(estimate.memory)

    def write(self, folder: Path) -> Plan:
        """Write ``plan.json`` and ``model.yaml``."""
        import yaml

        from megatron_het.plan import save_plan

        folder.mkdir(parents=True, exist_ok=True)
        plan, _ = self.planned()
        save_plan(plan, folder / "plan.json")
        (folder / "model.yaml").write_text(yaml.safe_dump(self.model_file()), encoding="utf-8")
        return plan


def _even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple((s + 1) * layers // stages - s * layers // stages for s in range(stages))


def big_plans() -> list[BigPlan]:
    """All of them."""
    return [
        BigPlan("7B", 8192, _even(32, 4), 2, replicas=2),
        BigPlan("7B", 8192, _even(32, 2), 1, replicas=4, recompute="full", microbatches=2),
        BigPlan("7B", 8192, (9, 8, 8, 7), 1, replicas=2, zero=0),
        BigPlan("7B", 32768, _even(32, 4), 4, recompute="full"),
        BigPlan("8B", 8192, _even(32, 4), 2, replicas=2, microbatches=4),
        BigPlan("8B", 131072, _even(32, 4), 8, schedule="slimpipe", slices=8, microbatches=1),
        BigPlan("8B", 1048576, _even(32, 4), 8, schedule="slimpipe", slices=16, microbatches=1, recompute="full"),
        BigPlan("13B", 8192, _even(40, 4), 4, replicas=2),
        BigPlan("13B", 8192, _even(40, 8), 1, replicas=2, microbatches=8),
        BigPlan("13B", 8192, _even(40, 2), 2, replicas=4, schedule="ministage", chunks=4, recompute="full"),
        BigPlan("34B", 8192, _even(48, 4), 4, replicas=2, sequence_parallel=False),
        BigPlan("34B", 16384, _even(48, 8), 4, microbatches=8),
        BigPlan("34B", 8192, _even(48, 4), 4, schedule="interleaved", chunks=3, microbatches=8),
        BigPlan("70B", 8192, _even(80, 8), 8, replicas=2, microbatches=8),
        BigPlan("70B", 8192, _even(80, 16), 4, replicas=2, microbatches=16),
        BigPlan("70B", 8192, _even(80, 4), 8, recompute="selective", microbatches=4),
        BigPlan("70B", 32768, _even(80, 8), 8, recompute="full", microbatches=8),
        BigPlan("70B", 131072, _even(80, 8), 8, schedule="slimpipe", slices=16, microbatches=1),
        BigPlan("405B", 8192, _even(126, 16), 8, replicas=8, microbatches=16),
        BigPlan("405B", 131072, _even(126, 16), 8, schedule="slimpipe", slices=16, microbatches=1, recompute="full"),
        BigPlan("8x7B", 8192, _even(32, 4), 4, replicas=2),
        BigPlan("8x7B", 32768, _even(32, 4), 8, recompute="full"),
        BigPlan("8x7B", 8192, _even(32, 2), 4, replicas=2, schedule="ministage", chunks=4, recompute="full"),
        BigPlan("8x22B", 8192, _even(56, 8), 8, replicas=2, microbatches=8),
        BigPlan("8x22B", 131072, _even(56, 8), 8, schedule="slimpipe", slices=16, microbatches=1, recompute="full"),
    ]
