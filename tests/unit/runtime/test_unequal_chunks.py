"""Stages with different numbers of chunks: where the ends of the model are, and what Megatron is shown."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.distributed import KNOWN_STATE, Axis, PairGroups, PlanGroups, between_the_ends
from megatron_het.distributed.stage_state import install_stage_state
from megatron_het.families import pipeline_layout
from megatron_het.plan import ModelShape, Placement, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.runtime import data


def plan_of(*layers: tuple[int, ...]) -> Plan:
    stages = tuple(Stage(chunks, (Replica((s,), (0, 1, 2, 3)),)) for s, chunks in enumerate(layers))
    model = ModelShape(sum(map(sum, layers)), 64, 4, 2, 32)
    return Plan(model, TrainingShape(1, 4), stages, ScheduleSpec("interleaved"))


@pytest.mark.parametrize(
    ("layers", "last", "positions", "layout"),
    [
        # The model ends in the second chunk of the first stage, which Megatron is shown as its last rank.
        (((1, 3), (2,)), (0, 1), [(0, 1), (1,)], "Et|tt||tttL"),
        (((2,), (1, 3)), (1, 1), [(0,), (1, 1)], "Ett|t||tttL"),
        (((2, 1, 2), (1,), (1, 3)), (0, 2), [(0, 0, 2), (1,), (2, 1)], "Ett|t|t|t|ttt||||ttL"),
        (((1,), (2, 1), (1,)), (1, 1), [(0,), (1, 2), (2,)], "Et|tt|t|||tL"),
    ],
)
def test_megatron_counts_chunks_as_a_microbatch_visits_them(
    layers: tuple[tuple[int, ...], ...], last: tuple[int, int], positions: list[tuple[int, ...]], layout: str
) -> None:
    placement = Placement(plan_of(*layers))
    assert placement.first == (0, 0) and placement.last == last
    assert [placement.positions(s) for s in range(len(layers))] == positions
    assert list(placement.numbers.values()) == sorted(placement.numbers[place] for place in placement.path)
    assert pipeline_layout(placement.plan) == layout


def shown(plan: Plan, rank: int) -> Any:
    """What Megatron's ``parallel_state`` says on a rank."""
    groups = PlanGroups(Placement(plan), rank, "gloo", "world", PairGroups(rank, 1.0))  # type: ignore[arg-type]
    for role in ("self", "tp", "class", "stage"):
        groups.by_role[role] = role  # type: ignore[assignment]
    state = SimpleNamespace(__name__="fake", _set_global_memory_buffer=lambda: None, **dict.fromkeys(KNOWN_STATE))
    install_stage_state(groups, state)  # type: ignore[arg-type]
    return state


def test_every_rank_is_told_of_as_many_virtual_stages() -> None:
    plan = plan_of((1, 3, 1), (2, 1))
    for rank, by_chunk in ((0, (0, 0, 1)), (1, (1, 1))):
        state = shown(plan, rank)
        assert state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE == 3
        assert state._PIPELINE_MODEL_PARALLEL_GROUP.by_chunk == by_chunk  # so many chunks are built
    state = shown(plan, 0)
    with between_the_ends(state):
        assert Axis(1, 2) == state._PIPELINE_MODEL_PARALLEL_GROUP
        assert state._MPU_PIPELINE_MODEL_PARALLEL_RANK == 1
    assert state._MPU_PIPELINE_MODEL_PARALLEL_RANK == 0


@pytest.mark.parametrize("is_distributed", [True, False])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_rank_takes_part_for_the_chunks_that_it_lacks(
    is_distributed: bool, tp_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron builds iterators with all ranks, once per chunk."""
    from megatron.core import mpu
    from megatron.training import training

    said: list[Any] = []

    class Between:
        def __enter__(self) -> None:
            said.append("between")

        def __exit__(self, *_: object) -> None: ...

    def provider(num_samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, ...]:
        said.append(vp_stage)
        return None, None, None

    def build(provide: Any) -> None:
        """Stands for Megatron's, which calls the provider and then tells all ranks what there is to do."""
        if provide.is_distributed or tp_rank == 0:
            assert provide([1, 2, 3]) == (None, None, None)
        said.append("told")

    provider.is_distributed = is_distributed  # type: ignore[attr-defined]
    monkeypatch.setattr(data, "between_the_ends", Between)
    monkeypatch.setattr(data, "_iterator", lambda *_: None)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: tp_rank)
    monkeypatch.setattr(training, "build_train_valid_test_data_iterators", build)
    args = SimpleNamespace(consumed_train_samples=0, consumed_valid_samples=0, skip_train=False, iterations_to_skip=[])
    args.phase_transition_iterations = None
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    routed = data.routed_provider(provider, [0], [1], "single", lambda: False, lacking=2)

    def own(num_samples: Sequence[int]) -> Any:
        return routed(num_samples, vp_stage=0)

    own.is_distributed = routed.is_distributed  # type: ignore[attr-defined]
    build(own)
    absent = ["between", 0, "told"] if is_distributed else ["told"]
    assert said == [*absent, *absent, *([0] if is_distributed or tp_rank == 0 else []), "told"]
