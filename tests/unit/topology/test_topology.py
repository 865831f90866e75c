"""Groups as data, and the guard on the globals of ``parallel_state``."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from megatron_het.plan import Placement, Plan
from megatron_het.topology import KNOWN_STATE, Axis, GroupSpec, PairGroups, group_specs
from megatron_het.topology.groups import PlanGroups
from megatron_het.topology.stage_state import as_only_reader, install_stage_state, remove_stage_state, stage_state
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
