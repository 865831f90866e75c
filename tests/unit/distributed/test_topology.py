"""Groups as data, and the guard on the globals of ``parallel_state``."""

import re
from types import SimpleNamespace

import pytest

from megatron_het.distributed import KNOWN_STATE, Axis, GroupSpec, PairGroups, PlanGroups, group_specs
from megatron_het.distributed.stage_state import as_only_reader, install_stage_state, remove_stage_state, stage_state
from megatron_het.plan import ModelShape, Placement, Plan, Replica, Stage, TrainingShape, check_plan
from tests.unit.plan.test_plan import document, read


@pytest.fixture
def placement() -> Placement:
    plan: Plan = read(document())
    return Placement(plan)


def fake_groups(placement: Placement, rank: int) -> PlanGroups:
    """Groups of strings: who is in which group is all that the state is about."""
    groups = PlanGroups(placement, rank, "gloo", "world", PairGroups(rank, 1.0))  # type: ignore[arg-type]
    for role in ("self", "tp", "class", "stage"):
        groups.by_role[role] = f"{role} of {rank}"  # type: ignore[assignment]
    groups.class_gloo = groups["class"]
    return groups


def test_groups_of_a_mixed_plan(placement: Placement) -> None:
    specs = group_specs(placement)
    assert [s.ranks for s in specs if s.role == "stage"] == [(0, 1), (2, 3, 4)]
    assert [s.ranks for s in specs if s.role == "tp"] == [(0, 1), (2, 3), (4,)]
    assert [s.ranks for s in specs if s.role == "class"] == [(0,), (1,), (2,), (3,), (4,)]
    assert [s.ranks for s in specs if s.role == "leaders"] == [(2, 3, 4)]
    assert not [s for s in specs if s.role == "ends"]
    assert GroupSpec("ends", (0, 1, 2, 3, 4)) in group_specs(placement, tied_embeddings=True)


def test_experts_are_divided_over_the_ranks_of_a_replica() -> None:
    """Megatron numbers a replica's ranks by EP rank first: neighbours have the same experts."""
    model, training = ModelShape(2, 8, 4, 4, 8), TrainingShape(1, 2)
    replicas = (Replica(tuple(range(4)), (0,), ep=2), Replica((4, 5), (1,), ep=2))
    divided = Placement(Plan(model, training, (Stage((2,), replicas),)))
    specs = group_specs(divided)
    assert [s.ranks for s in specs if s.role == "ep"] == [(0, 2), (1, 3), (4, 5)]
    assert [s.ranks for s in specs if s.role == "expert-tp"] == [(0, 1), (2, 3)]
    assert [s.ranks for s in specs if s.role == "class"] == [(r,) for r in range(6)]
    for rank, own, shared in ((3, "ep", "expert-tp"), (5, "ep", "self")):
        groups = fake_groups(divided, rank)
        groups.by_role |= {role: f"{role} of {rank}" for role in ("ep", "expert-tp")}  # type: ignore[dict-item]
        state = stage_state(groups)
        assert state["_EXPERT_MODEL_PARALLEL_GROUP"] == f"{own} of {rank}"
        assert state["_EXPERT_TENSOR_PARALLEL_GROUP"] == f"{shared} of {rank}"
        assert state["_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"] == f"tp of {rank}"
        assert state["_EXPERT_DATA_PARALLEL_GROUP"] == f"class of {rank}"
    assert stage_state(groups)["_EXPERT_MODEL_PARALLEL_RANKS"] == [4, 5]


@pytest.mark.parametrize(
    ("tp", "count", "ep", "etp", "experts", "parts", "copies", "companions"),
    [
        (1, 4, 2, 0, [(0, 1), (2, 3)], [], [(0, 2), (1, 3)], [(0, 1), (2, 3)]),
        (2, 4, 4, 0, [(0, 1, 2, 3), (4, 5, 6, 7)], [], [(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 1), (2, 3)]),
        (2, 2, 2, 2, [(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)], [(0, 1)]),
        (1, 2, 1, 2, [(0, 1)], [(0, 1)], [(0,), (1,)], [(0, 1)]),
        (2, 2, 1, 1, [(0,), (1,), (2,), (3,)], [], [(0, 1, 2, 3)], []),  # copies within a TP group
    ],
)
def test_experts_are_divided_over_replicas(
    tp: int,
    count: int,
    ep: int,
    etp: int,
    experts: list[tuple[int, ...]],
    parts: list[tuple[int, ...]],
    copies: list[tuple[int, ...]],
    companions: list[tuple[int, ...]],
) -> None:
    """Expert groups follow one another over TP groups, as Megatron lays them."""
    replicas = tuple(Replica(tuple(range(q * tp, (q + 1) * tp)), (q,), ep=ep, etp=etp) for q in range(count))
    plan = Plan(ModelShape(2, 8, 4, 4, 8), TrainingShape(1, count), (Stage((2,), replicas),))
    check_plan(plan)
    spanning = Placement(plan)
    specs = group_specs(spanning)
    found = {role: [s.ranks for s in specs if s.role == role] for role in ("experts", "expert-tp", "experts-class")}
    assert found == {"experts": experts, "expert-tp": parts, "experts-class": copies}
    assert spanning.companions(0) == companions
    for rank in range(spanning.world_size):
        group = next(g for g in experts if rank in g)
        assert group[spanning.expert_rank(rank)] == rank
        groups = fake_groups(spanning, rank)
        groups.by_role |= {s.role: s.ranks for s in specs if rank in s.ranks}  # type: ignore[misc]
        state = stage_state(groups)
        assert state["_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"] == group
        assert state["_EXPERT_DATA_PARALLEL_GROUP"] == next(c for c in copies if rank in c)
        assert state["_DATA_PARALLEL_GROUP"] == tuple(range(rank % tp, count * tp, tp))
        assert rank in state["_EXPERT_MODEL_PARALLEL_RANKS"] and len(state["_EXPERT_MODEL_PARALLEL_RANKS"]) == ep


def test_every_rank_has_every_role_once(placement: Placement) -> None:
    for rank in range(placement.world_size):
        roles = [s.role for s in group_specs(placement) if rank in s.ranks]
        assert len(roles) == len(set(roles))
        assert {"self", "tp", "class", "stage"} <= set(roles)


def test_state_is_local_to_the_stage(placement: Placement) -> None:
    state = stage_state(fake_groups(placement, 4))
    assert state["_PIPELINE_MODEL_PARALLEL_GROUP"] == Axis(1, 2)
    assert state["_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"] == [4]
    assert state["_MODEL_PARALLEL_GROUP"] == "world"
    assert state["_MPU_DATA_PARALLEL_WORLD_SIZE"] == 1
    assert state["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] is None


def test_known_state_is_exactly_the_globals_of_the_installed_release() -> None:
    """Fails when an upgrade of Megatron brings a new global or drops one."""
    from megatron.core import parallel_state

    found = {n for n in vars(parallel_state) if re.fullmatch(r"_[A-Z][A-Z_]*", n)}
    assert found == KNOWN_STATE


def test_install_and_remove(placement: Placement) -> None:
    groups = fake_groups(placement, 2)
    module = SimpleNamespace(__name__="fake", _set_global_memory_buffer=lambda: None, **dict.fromkeys(KNOWN_STATE))
    install_stage_state(groups, module)  # type: ignore[arg-type]
    assert module._TENSOR_MODEL_PARALLEL_GROUP == "tp of 2"
    with as_only_reader(module):  # type: ignore[arg-type]
        assert module._MPU_DATA_PARALLEL_RANK == 0
    assert module._MPU_DATA_PARALLEL_RANK is None
    remove_stage_state(module)  # type: ignore[arg-type]
    assert all(getattr(module, name) is None for name in KNOWN_STATE)
    incomplete = SimpleNamespace(__name__="fake")
    with pytest.raises(RuntimeError, match="another release"):
        install_stage_state(groups, incomplete)  # type: ignore[arg-type]
