"""Chunks in a V: where the ends of the model are, what Megatron is shown, handovers, tied weights on one rank."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.distributed import KNOWN_STATE, Axis, PairGroups, PlanGroups, at_chunk, group_specs
from megatron_het.distributed.gradient_sums import GradientFinalizer
from megatron_het.distributed.resharding import ShardedParameter, ShardExchange
from megatron_het.distributed.stage_state import install_stage_state
from megatron_het.families import pipeline_layout
from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import build, schedule_shape
from megatron_het.lowering.ranks import BoundaryMap, lower
from megatron_het.plan import (
    ModelShape,
    Placement,
    Plan,
    PlanError,
    Replica,
    ScheduleSpec,
    Stage,
    TrainingShape,
    load_plan,
    save_plan,
)
from megatron_het.plan.run_config import plan_from_flags
from megatron_het.plan.validate import check_plan
from megatron_het.runtime.building import PositionedLayout, know_positions
from megatron_het.schedule.ir import SENDS, Kind
from testing.groups import Group
from tests.unit.plan.megatron_flags import flags


def v_plan(layers: tuple[tuple[int, int], ...], name: str = "zb-v", tied: bool = False, mixed: bool = False) -> Plan:
    """Single replicas of one rank, or in every stage one of TP 2 and one of TP 1."""
    stages, rank = [], 0
    for chunks in layers:
        replicas = [Replica((rank,), (0, 1, 2, 3))]
        if mixed:
            replicas = [Replica((rank, rank + 1), (0, 1, 2)), Replica((rank + 2,), (3,))]
        stages.append(Stage(chunks, tuple(replicas)))
        rank = stages[-1].replicas[-1].ranks[-1] + 1
    model = ModelShape(sum(map(sum, layers)), 64, 4, 2, 32, tied_embeddings=tied)
    return Plan(model, TrainingShape(1, 4), tuple(stages), ScheduleSpec(name))


LAYERS = ((1, 3), (2, 0), (1, 2))
_UNTIED = ("--untie-embeddings-and-output-weights",)


def test_one_property_says_where_chunks_are(tmp_path: Any) -> None:
    plan = v_plan(LAYERS)
    assert plan.path == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)) == schedule_shape(plan).path
    placement = Placement(plan)
    assert (placement.first, placement.last) == ((0, 0), (0, 1))
    assert [placement.positions(s) for s in range(3)] == [(0, 2), (1, 1), (2, 0)]
    looped = replace(plan, schedule=ScheduleSpec("interleaved"))
    assert Placement(looped).last == (2, 1) and Placement(looped).positions(1) == (1, 1)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan and plan.to_json()["version"] == 1


def test_the_layout_lists_chunks_as_a_microbatch_visits_them() -> None:
    assert pipeline_layout(v_plan(LAYERS)) == "Et|tt|t|tt||tttL"
    assert pipeline_layout(replace(v_plan(LAYERS), schedule=ScheduleSpec("interleaved"))) == "Et|tt|t|ttt||ttL"


@pytest.mark.parametrize("name", ["zb-v", "v-half"])
def test_flags_alone_make_a_plan_in_a_v(name: str) -> None:
    words = [*flags("--num-layers 8 --num-attention-heads 8 --pipeline-model-parallel-size 2"), *_UNTIED]
    plan, _ = plan_from_flags([*words, "--num-virtual-stages-per-pipeline-rank", "2"], 2, ScheduleSpec(name))
    check_plan(plan)
    check_plan_alone(plan)
    assert pipeline_layout(plan) == "Ett|tt|tt|ttL" and build(plan)[False].shape.path == plan.path
    with pytest.raises(PlanError, match="--num-virtual-stages-per-pipeline-rank 2"):
        check_plan_alone(plan_from_flags(words, 2, ScheduleSpec(name))[0])


@pytest.mark.parametrize("stage", range(3))
def test_megatron_finds_the_layers_of_every_chunk(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and offsets of layers, which name weights and checkpoints."""
    from megatron.core import parallel_state
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    plan = v_plan(LAYERS)
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 2)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", stage)
    stock = PipelineParallelLayerLayout.from_str(pipeline_layout(plan), 3)
    transformer = SimpleNamespace(pipeline_model_parallel_layout=stock)
    know_positions(transformer, (0, 0, 0))
    assert transformer.pipeline_model_parallel_layout is stock
    know_positions(transformer, Placement(plan).positions(stage))
    layout = transformer.pipeline_model_parallel_layout
    before = {(0, 0): 0, (1, 0): 1, (2, 0): 3, (2, 1): 4, (1, 1): 6, (0, 1): 6}
    if stage != 1:  # at the middle of three stages both ways meet
        assert isinstance(layout, PositionedLayout)
    for chunk in range(2):
        count, first = LAYERS[stage][chunk], before[stage, chunk]
        assert layout.get_num_layers_to_build(vp_stage=chunk) == count
        assert layout.get_layer_offset(vp_stage=chunk) == first
        assert layout.get_layer_id_list(vp_stage=chunk) == list(range(first, first + count))
    assert layout.get_layer_offset(vp_stage=1, pp_rank=2) == 6  # a rank that is given is Megatron's


def test_parallel_state_follows_the_chunk() -> None:
    groups = PlanGroups(Placement(v_plan(LAYERS)), 0, "gloo", "world", PairGroups(0, 1.0))  # type: ignore[arg-type]
    for role in ("self", "tp", "class", "stage"):
        groups.by_role[role] = role  # type: ignore[assignment]
    state: Any = SimpleNamespace(__name__="fake", _set_global_memory_buffer=lambda: None, **dict.fromkeys(KNOWN_STATE))
    install_stage_state(groups, state)
    for chunk, position in ((0, 0), (1, 2), (None, 0)):
        with at_chunk(chunk, state):
            assert position == state._MPU_PIPELINE_MODEL_PARALLEL_RANK
            assert state._PIPELINE_MODEL_PARALLEL_GROUP.rank() == position
    with pytest.raises(KeyError), at_chunk(1, state):
        raise KeyError
    assert state._MPU_PIPELINE_MODEL_PARALLEL_RANK == state._PIPELINE_MODEL_PARALLEL_GROUP.rank() == 0
    assert state._PIPELINE_MODEL_PARALLEL_GROUP.of_chunk(1) == Axis(2, 3, (0, 2))


@pytest.mark.parametrize("mixed", [False, True])
def test_the_turn_of_the_v_is_a_handover(mixed: bool) -> None:
    """On every TP rank of every replica of the last stage, forwards and backwards alike."""
    plan = v_plan(((1, 1), (1, 1)), mixed=mixed)
    placement, program = Placement(plan), build(plan)[False]
    boundaries = BoundaryMap(placement, 32, False)
    for replica in plan.stages[1].replicas:
        for rank in replica.ranks:
            where = placement.locate(rank)
            device = program.shape.device(1, where.replica)
            lowered = lower(program, boundaries, device, rank)
            assert lowered.handovers == {
                slot: there
                for m in replica.microbatches
                for slot, there in (
                    ((Kind.SEND_FORWARD, (m, 0, 0)), (Kind.RECV_FORWARD, (m, 0, 1))),
                    ((Kind.SEND_BACKWARD, (m, 0, 1)), (Kind.RECV_BACKWARD, (m, 0, 0))),
                )
            }
            peers = {op.peer for op in lowered.ops if op.kind in SENDS}
            assert peers <= set(placement.stage_ranks(0))


def test_groups_of_a_v() -> None:
    """Both ends of the model are on one stage; the loss is told to the stage on which Megatron logs it."""
    specs = group_specs(Placement(v_plan(((1, 1), (1, 1)), tied=True, mixed=True)), tied_embeddings=True)
    assert [s.ranks for s in specs if s.role == "ends"] == [(0, 1, 2)]
    assert [s.ranks for s in specs if s.role == "loss"] == [(0, 3, 4, 5)]
    looped = replace(v_plan(((1, 1), (1, 1))), schedule=ScheduleSpec("interleaved"))
    assert not [s for s in group_specs(Placement(looped)) if s.role == "loss"]


class _End(torch.nn.Module):
    """The chunk of one end of the model, with its copy of the tied weights."""

    def __init__(self, weight: float, gradient: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=False, qk_layernorm=False)
        self.weight: Any = torch.nn.Parameter(torch.full((2,), weight))
        self.weight.main_grad = torch.full((2,), gradient)

    pre_process = post_process = True

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.weight


def test_tied_weights_on_one_rank_are_summed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[list[float]] = []

    def note(_exchange: ShardExchange, parameters: list[ShardedParameter]) -> None:
        exchanged.append([p.tensor[0].item() for p in parameters])

    monkeypatch.setattr(ShardExchange, "copy_weights", note)
    monkeypatch.setattr(ShardExchange, "sum_gradients", note)
    placement = Placement(v_plan(((1, 1), (1, 1)), tied=True))
    roles: Any = {role: Group() for role in ("tp", "class", "ends")}
    groups = PlanGroups(placement, 0, "gloo", Group(), PairGroups(0, 1.0), roles)  # type: ignore[arg-type]
    chunks: list[torch.nn.Module] = [_End(3.0, 1.0), _End(0.0, 2.0)]
    finalizer = GradientFinalizer(groups, tied_embeddings=True)
    finalizer.copy_initial_weights(chunks)
    finalizer._sum_across_classes(chunks)
    assert exchanged == [[3.0], [3.0]]  # one copy travels: its weight, and the sum of both gradients
    for chunk in chunks:
        weight: Any = chunk.weight
        assert weight.tolist() == weight.main_grad.tolist() == [3.0, 3.0]
