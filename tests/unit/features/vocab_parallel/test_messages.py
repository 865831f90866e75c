"""Who talks to whom about the vocabulary, and with which rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_het.features.vocab_parallel.layers import Team, VocabularyShard, edges, sides_of, token_edges
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import ModelShape, Placement, Plan, Replica, Stage, TrainingShape
from megatron_het.runtime.data import Batches
from megatron_het.schedule.ir import Kind

MODEL = ModelShape(3, 64, 8, 4, 32)
TOKENS = 8


def _placement() -> Placement:
    """Three stages of TP 2; the middle one has two replicas with two and one microbatches."""
    stages = (
        Stage((1,), (Replica((0, 1), (0, 1, 2)),)),
        Stage((1,), (Replica((2, 3), (0, 2)), Replica((4, 5), (1,)))),
        Stage((1,), (Replica((6, 7), (0, 1, 2)),)),
    )
    return Placement(Plan(MODEL, TrainingShape(1, 3), stages))


def _mixed() -> Placement:
    """The first stage has replicas of TP 1 and 2, the last one TP 4."""
    stages = (Stage((1,), (Replica((0,), (0,)), Replica((1, 2), (1,)))), Stage((1,), (Replica((3, 4, 5, 6), (0, 1)),)))
    return Placement(Plan(MODEL, TrainingShape(1, 2, sequence_parallel=True), stages))


def test_a_team_follows_the_route() -> None:
    placement = _placement()
    assert [side.groups for side in sides_of(placement, 0, 1, 0)] == [((0, 1),), ((2, 3),)]
    assert [side.groups for side in sides_of(placement, 2, 1, 1)] == [((6, 7),), ((4, 5),)]


@pytest.mark.parametrize("divided", [False, True])
def test_equal_replicas_talk_at_equal_tp_rank(divided: bool) -> None:
    there = {(6, 0), (6, 2), (6, 4), (7, 1), (7, 3), (7, 5)}
    assert edges(_placement(), 2, TOKENS, divided=divided) == sorted(there | {(b, a) for a, b in there})
    there = {(0, 2), (0, 4), (0, 6), (1, 3), (1, 5), (1, 7)}
    assert edges(_placement(), 0, TOKENS, divided=divided) == sorted(there | {(b, a) for a, b in there})


def test_tokens_come_from_the_first_tp_rank() -> None:
    assert token_edges(_placement(), TOKENS) == [(0, rank) for rank in (2, 3, 4, 5, 6, 7)]
    assert token_edges(_mixed(), TOKENS) == [(source, rank) for source in (0, 1) for rank in (3, 4, 5, 6)]


class Links:
    """Channels within the process; only pairs that were opened may talk."""

    def __init__(self, rank: int, pairs: list[tuple[int, int]], mail: dict[tuple[int, int], torch.Tensor]) -> None:
        self._rank, self._pairs, self._mail = rank, pairs, mail

    def send(self, tensor: torch.Tensor, dst: int, _label: str) -> None:
        assert (self._rank, dst) in self._pairs and (self._rank, dst) not in self._mail
        self._mail[self._rank, dst] = tensor.clone()

    def receive(self, target: torch.Tensor, src: int, _label: str) -> None:
        target.copy_(self._mail.pop((src, self._rank)))


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(("microbatch", "senders", "receivers"), [(0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1)])
def test_replicas_of_other_tp_hand_over_all_rows(divided: bool, microbatch: int, senders: int, receivers: int) -> None:
    placement, mail = _mixed(), dict[tuple[int, int], torch.Tensor]()
    pairs = edges(placement, 0, TOKENS, divided=divided)
    ends = placement.replica(0, placement.route[0][microbatch]), placement.replica(1, 0)
    ranks = [replica.ranks for replica in ends]
    whole = torch.arange(TOKENS * 3.0).view(TOKENS, 3)
    op = RankOp(Kind.VOCAB_FORWARD, microbatch, 0, 0, "part of the output layer")

    def local(rank: int, stage: int) -> torch.Tensor:
        return whole.chunk(len(ranks[stage]))[ranks[stage].index(rank)] if divided else whole

    for rank in ranks[senders]:
        links: Any = Links(rank, pairs, mail)
        team = Team(placement, rank, TOKENS, Batches())
        team.send(links, local(rank, senders), receivers, op, divided=divided)
    for rank in ranks[receivers]:
        links = Links(rank, pairs, mail)
        found = torch.full_like(local(rank, receivers), -1.0)
        team = Team(placement, rank, TOKENS, Batches())
        team.expect(links, found, senders, op, divided=divided)
        assert torch.equal(found, local(rank, receivers))
    assert not mail


@pytest.mark.parametrize(("shares", "whole", "unit"), [({}, 16, 4), ({"vocabulary_shares": [3, 1]}, 24, 2)])
def test_replicas_of_a_stage_hold_the_same_rows_and_a_stage_may_hold_more(
    shares: dict[str, list[int]], whole: int, unit: int
) -> None:
    plan, rows = _mixed().plan, 32
    placement = Placement(replace(plan, schedule=replace(plan.schedule, parameters={"vocabulary": True, **shares})))
    shards = {rank: VocabularyShard.of(placement, rank, rows) for rank in range(7)}
    half, part = whole // 2, (rows - whole) // 4
    assert {rank: (shard.first, shard.rows) for rank, shard in shards.items()} == {
        0: (0, whole),
        1: (0, half),
        2: (half, half),
        **{3 + t: (whole + part * t, part) for t in range(4)},
    }
    assert {shard.unit for shard in shards.values()} == {unit}  # of a checkpoint


def test_rows_divide_over_stages_and_ranks() -> None:
    assert VocabularyShard.of(_mixed(), 0, 36).rows == 20
    with pytest.raises(ValueError, match="0 equal parts that 4 TP ranks divide"):
        VocabularyShard.of(_mixed(), 0, 38)
