"""Shares of a stage's state: from replicas to ranks, and where buffers are cut."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_het.plan import Placement, Plan, PlanError, check_plan, load_plan, save_plan, topology_hash
from megatron_het.plan.placement import ALIGNMENT, cuts, rank_shares, state_shares


def plan_with(*shares: float | None, tp: int = 1, cp: int = 1, ep: int = 1) -> Plan:
    replicas: list[dict[str, Any]] = []
    for q, share in enumerate(shares):
        ranks = list(range(q * tp * cp, (q + 1) * tp * cp))
        replicas.append({"ranks": ranks, "microbatches": [q], "cp": cp, "ep": ep})
        if share is not None:
            replicas[-1]["state_share"] = share
    document = {
        "format": "megatron_het.plan",
        "version": 1,
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2, "seq_length": 8},
        "training": {"micro_batch_size": 1, "global_batch_size": len(shares)},
        "stages": [{"layers": [1], "replicas": replicas}],
    }
    plan = Plan.from_json(document)
    check_plan(plan)
    return plan


def test_shares_are_relative_to_the_stage() -> None:
    plan = plan_with(3, 1, 0)
    assert state_shares(plan.stages[0]) == (0.75, 0.25, 0.0)
    assert state_shares(plan_with(None, 3).stages[0]) == (0.25, 0.75)


@pytest.mark.parametrize("shares", [(None, None), (1, None), (2, 2), (7,)])
def test_equal_shares_are_no_shares(shares: tuple[float | None, ...]) -> None:
    plan = plan_with(*shares)
    assert state_shares(plan.stages[0]) is None
    assert rank_shares(Placement(plan), 0) is None


def test_every_tp_rank_divides_alike_and_context_parallel_ranks_share_evenly() -> None:
    placement = Placement(plan_with(1, 3, tp=2))
    assert [rank_shares(placement, rank) for rank in range(4)] == [(0.25, 0.75)] * 4
    placement = Placement(plan_with(1, 3, cp=2))
    assert [rank_shares(placement, rank) for rank in range(4)] == [(0.125, 0.125, 0.375, 0.375)] * 4
    placement = Placement(plan_with(4, 0, 1, 0, ep=2))  # experts have copies on every second rank
    assert [rank_shares(placement, rank, of_experts=True) for rank in range(4)] == [(0.8, 0.2), None] * 2


@pytest.mark.parametrize("shares", [(-1, 1), (float("nan"), 1), (float("inf"), 1), (0, 0), (0,)])
def test_impossible_shares_are_named(shares: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match=r"stages\[0\]\.replicas\[.\]\.state_share"):
        plan_with(*shares)


def test_a_share_of_the_wrong_type_is_named() -> None:
    document = plan_with(1, 2).to_json()
    for value in (True, "half", None):
        broken = copy.deepcopy(document)
        broken["stages"][0]["replicas"][1]["state_share"] = value
        with pytest.raises(PlanError, match=r"stages\[0\]\.replicas\[1\]\.state_share"):
            Plan.from_json(broken)


def test_shares_are_written_only_where_given(tmp_path: Any) -> None:
    plan = plan_with(None, 2.5)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    written = [("state_share" in r) for r in plan.to_json()["stages"][0]["replicas"]]
    assert written == [False, True]


def test_who_computes_what_does_not_depend_on_shares() -> None:
    even, uneven = plan_with(1, 1), plan_with(1, 5)
    assert topology_hash(even) == topology_hash(uneven)


@given(st.integers(1, 5000), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_cuts_cover_a_buffer_in_aligned_parts_near_their_shares(numel: int, weights: list[int]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    edges = cuts(numel, shares)
    assert len(edges) == len(shares) + 1 and edges[0] == 0 and edges[-1] == numel
    for share, start, stop in zip(shares, edges, edges[1:]):
        assert start <= stop and (stop % ALIGNMENT == 0 or stop == numel)
        assert abs((stop - start) - share * numel) <= ALIGNMENT
        assert stop == start or share > 0
