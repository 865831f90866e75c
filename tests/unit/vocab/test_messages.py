"""Who talks to whom about the vocabulary."""

from __future__ import annotations

from megatron_het.plan import ModelShape, Placement, Plan, Replica, Stage, TrainingShape
from megatron_het.vocab.embedding import part_edges, token_edges
from megatron_het.vocab.messages import team
from megatron_het.vocab.team import team_edges

MODEL = ModelShape(3, 64, 8, 4, 32)


def _placement() -> Placement:
    """Three stages of TP 2; the middle one has two replicas with two and one microbatches."""
    stages = (
        Stage((1,), (Replica((0, 1), (0, 1, 2)),)),
        Stage((1,), (Replica((2, 3), (0, 2)), Replica((4, 5), (1,)))),
        Stage((1,), (Replica((6, 7), (0, 1, 2)),)),
    )
    return Placement(Plan(MODEL, TrainingShape(1, 3), stages))


def test_a_team_follows_the_route() -> None:
    placement = _placement()
    assert team(placement, 0, 0) == [0, 2, 6]
    assert team(placement, 1, 1) == [1, 5, 7]


def test_output_layer_talks_to_the_last_stage_at_equal_tp_rank() -> None:
    there = {(6, 0), (6, 2), (6, 4), (7, 1), (7, 3), (7, 5)}
    assert team_edges(_placement()) == sorted(there | {(b, a) for a, b in there})


def test_embeddings_talk_to_the_first_stage() -> None:
    there = {(0, 2), (0, 4), (0, 6), (1, 3), (1, 5), (1, 7)}
    assert part_edges(_placement()) == sorted(there | {(b, a) for a, b in there})


def test_tokens_come_from_the_first_tp_rank() -> None:
    assert token_edges(_placement()) == [(0, rank) for rank in (2, 3, 4, 5, 6, 7)]
