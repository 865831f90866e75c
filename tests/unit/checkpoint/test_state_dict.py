"""Entries of a state dict that a rank writes: of tied embeddings the first chunk's, of two optimizers one's form."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor

from megatron_het.checkpoint.state_dict import StateDictHook, as_one_optimizer, as_own_optimizers
from megatron_het.distributed import PairGroups, PlanGroups
from megatron_het.plan import ModelShape, Placement, Plan, Replica, ScheduleSpec, Stage, TrainingShape, topology_hash

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


@pytest.mark.parametrize(("rank", "written"), [(0, {"layer", "step"}), (1, {"layer", "step"}), (2, {"step"})])
def test_one_class_of_replicas_writes(rank: int, written: set[str]) -> None:
    """The other one has the same weights, cut in another way."""
    plan = tied_plan("1f1b")
    stage = Stage((4,), (Replica((0, 1), (0,)), Replica((2,), (1,))))
    plan = replace(plan, stages=(stage,), model=replace(plan.model, tied_embeddings=False))
    groups = PlanGroups(Placement(plan), rank, "gloo", "world", PairGroups(rank, 1.0))  # type: ignore[arg-type]
    part = {"layer": entry(_LAYER, 0), "step": 3}
    assert set(StateDictHook(groups, tied_embeddings=False)._strip(part)) == written


def test_the_same_layers_in_a_v_are_another_topology() -> None:
    """Random-number states belong to the layers of a rank."""
    assert topology_hash(tied_plan("zb-v")) == topology_hash(tied_plan("v-half"))
    assert topology_hash(tied_plan("zb-v")) != topology_hash(tied_plan("interleaved"))


def test_parameters_that_are_not_whole_are_written_from_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's entries find their parameters before; an asynchronous save copies only what is no copy yet."""
    closed, whole = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))
    content, asked = torch.tensor([3.0, 4.0]), []

    def copies(parameters: Any) -> dict[torch.Tensor, torch.Tensor]:
        asked.extend(parameters)
        return {closed: content}

    groups = PlanGroups(Placement(tied_plan("interleaved")), 0, "gloo", "world", PairGroups(0, 1.0))  # type: ignore[arg-type]
    hook = StateDictHook(groups, False, copies)
    state = {
        "model0": {"a": ShardedTensor.from_rank_offsets("a", closed)},
        "model1": {"b": ShardedTensor.from_rank_offsets("b", whole)},
        "optimizer": {"a": entry("optimizer.a", 0)},
    }
    closed.data.untyped_storage().resize_(0)
    monkeypatch.setattr("megatron_het.checkpoint.state_dict.watch_writer", lambda: None)
    for is_async in (False, True):
        args = SimpleNamespace(no_save_rng=True, async_save=is_async, hybrid_layer_pattern="*-*|-", spec=["a", "b"])
        args.het_stand_in = is_async  # whether the plan chose the layers, for want of others
        found = hook._for_saving(state, args)
        assert found["args"].hybrid_layer_pattern == "*-*-"  # the chunks are of this plan, not of the model
        assert found["args"].spec == (None if is_async else ["a", "b"]) and args.spec and args.het_stand_in is is_async
        assert found["model0"]["a"].data is content and state["model0"]["a"].data is closed
        assert (found["model1"]["b"].data is whole) is not is_async
    assert [id(parameter) for parameter in asked] == 2 * [id(closed), id(whole)]
    with pytest.raises(AssertionError, match="freed"):
        StateDictHook(groups, False)._for_saving(state, args)


def optimizer_state(name: str, *, is_expert: bool, step: int = 3) -> dict[str, Any]:
    """As the distributed optimizer has it: groups, and tensors of parameters."""
    tensor = ShardedTensor.from_rank_offsets(f"optimizer.state.exp_avg.{name}", torch.ones(2))
    groups = [{"wd_mult": 1.0, "is_expert_parallel": is_expert, "step": step}]
    return {
        "optimizer": {"param_groups": groups},
        "param_state": {0: {"exp_avg": tensor}},
        "param_state_sharding_type": "fully_reshardable",
    }


def test_a_rank_with_two_optimizers_saves_the_form_of_one_and_takes_its_own() -> None:
    dense, experts = optimizer_state("dense", is_expert=False), optimizer_state("experts", is_expert=True, step=0)
    saved = as_one_optimizer({0: dense, 1: experts})
    assert {key: saved[key] for key in dense} == dense
    assert saved["experts"] == {"param_state": experts["param_state"]}
    first, second = as_own_optimizers(saved, 2)
    assert first == dense
    assert second == optimizer_state("experts", is_expert=True) | {"param_state": experts["param_state"]}


def test_undivided_optimizers_keep_their_own_parameters() -> None:
    """Megatron gives back which parameters a group has; this rank has no experts in fp16."""
    saved: list[dict[str, Any]] = [{"step": 3}, {"step": 4}]
    own = [{"params": LocalNonpersistentObject([number]), "is_expert_parallel": number == 2} for number in range(3)]
    state = as_one_optimizer({0: {"param_groups": own[:2]}, 1: {"param_groups": own[2:]}})
    first, experts = as_own_optimizers({0: {"param_groups": saved}, "fp32_from_fp16_params": [[]]} | state, 2)
    assert first["param_groups"] == [saved[0] | own[0], saved[1] | own[1]]
    assert experts["param_groups"][0] == saved[0] | own[2]
    assert experts["fp32_from_fp16_params"] == []


def test_a_rank_with_one_optimizer_takes_either_form() -> None:
    dense, experts = optimizer_state("dense", is_expert=False), optimizer_state("experts", is_expert=True)
    assert as_one_optimizer(dense) is dense
    assert as_own_optimizers(as_one_optimizer({0: dense, 1: experts}), 1) == dense
    stock = {0: {"optimizer": dense["optimizer"]}, 1: {"optimizer": experts["optimizer"]}}
    loaded = stock | {"param_state": dense["param_state"], "param_state_sharding_type": "fully_reshardable"}
    assert as_own_optimizers(loaded, 1) == dense
