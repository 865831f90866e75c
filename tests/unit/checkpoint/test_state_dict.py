"""Which entries of a state dict a rank writes: of tied embeddings the model's first chunk alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_het.platform import activate

activate()  # before Megatron is imported, which binds what the platform replaces

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

from megatron_het.checkpoint.state_dict import StateDictHook  # noqa: E402
from megatron_het.plan import ModelShape, Placement, Plan, Replica, ScheduleSpec, Stage, TrainingShape, topology_hash  # noqa: E402
from megatron_het.topology import PairGroups, PlanGroups  # noqa: E402

_WORDS, _LAYER = "embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight"


def tied_plan(schedule: str) -> Plan:
    stages = tuple(Stage((1, 1), (Replica((rank,), (0, 1)),)) for rank in range(2))
    return Plan(ModelShape(4, 64, 4, 2, 32, tied_embeddings=True), TrainingShape(1, 2), stages, ScheduleSpec(schedule))


def entry(key: str, copy: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(2), replica_id=(copy, 0, 0))


@pytest.mark.parametrize(
    ("schedule", "rank", "written"),
    [("zb-v", 0, {"first", "layer"}), ("zb-v", 1, {"first", "layer", "copy"}), ("interleaved", 1, {"first", "layer"})],
)
def test_a_copy_of_tied_weights_is_written_once(schedule: str, rank: int, written: set[str]) -> None:
    """In a V both copies are on one stage; no copy comes to the other one, so nothing is dropped there."""
    groups = PlanGroups(Placement(tied_plan(schedule)), rank, "gloo", "world", PairGroups(rank, 1.0))  # type: ignore[arg-type]
    hook = StateDictHook(groups, tied_embeddings=True)
    for prefix in ("", "optimizer.state.exp_avg."):
        part: dict[str, Any] = {
            "first": entry(prefix + _WORDS, 0),
            "copy": entry(prefix + _WORDS, 1),
            "layer": entry(prefix + _LAYER, 0),
        }
        assert set(hook._strip(part)) == written


def test_the_same_layers_in_a_v_are_another_topology() -> None:
    """Random-number states belong to the layers of a rank."""
    assert topology_hash(tied_plan("zb-v")) == topology_hash(tied_plan("v-half"))
    assert topology_hash(tied_plan("zb-v")) != topology_hash(tied_plan("interleaved"))
