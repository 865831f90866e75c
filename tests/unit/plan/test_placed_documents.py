"""Which context-parallel rank holds which packed documents."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import Plan, PlanError, ScheduleSpec
from megatron_het.plan.placement import DocumentPlacing, part_tokens, placed_documents, token_blocks
from testing.slimpipe_cases import with_context_parallel_sizes
from tests.unit.plan.feature_checks import check_feature
from tests.unit.plan.test_slices import arguments, plan

Span = tuple[int, int]
SHARES = st.lists(st.integers(1, 4), min_size=2, max_size=6)
CUTS = st.sets(st.integers(1, 599), max_size=80)
KEYS = st.sampled_from([0.0, 100.0, math.inf])


def pieces_of(cuts: set[int]) -> list[Span]:
    return list(itertools.pairwise([0, *sorted(cuts), 600]))


def ranks_of(piece: Span, placed: list[Any]) -> set[int]:
    return {r for r, own in enumerate(placed) for first, end in own if first < piece[1] and piece[0] < end}


@given(SHARES, SHARES, CUTS, KEYS)
def test_every_token_is_on_one_rank_and_ranks_have_what_they_had(
    widest: list[int], own: list[int], cuts: set[int], keys: float
) -> None:
    """Also where another replica's ranks say where documents are: both have one order of the same tokens."""
    pieces, orders = pieces_of(cuts), []
    for shares in (widest, own, [1]):
        placed = DocumentPlacing(widest, 1, shares, 1).blocks(pieces, keys)
        places = token_blocks(shares, 600)
        assert list(map(part_tokens, placed)) == list(map(part_tokens, places))
        assert sorted(t for blocks in placed for span in blocks for t in range(*span)) == list(range(600))
        order = {}
        for tokens, where in zip(placed, places, strict=True):
            each = ([t for span in blocks for t in range(*span)] for blocks in (where, tokens))
            order |= dict(zip(*each, strict=True))
        orders.append(order)
        assert placed == DocumentPlacing(tuple(widest), 1, tuple(shares), 1).blocks(tuple(pieces), keys)
    assert orders[0] == orders[1] == orders[2]


@given(SHARES, CUTS)
def test_most_documents_are_whole(shares: list[int], cuts: set[int]) -> None:
    """One that any rank can have is on several only to fill all of them but one."""
    room = list(map(part_tokens, token_blocks(shares, 600)))
    placed = placed_documents(pieces_of(cuts), room, math.inf)
    assert all(list(blocks) == sorted(blocks) for blocks in placed)
    short = [piece for piece in pieces_of(cuts) if piece[1] - piece[0] <= max(room)]
    assert sum(len(ranks_of(piece, placed)) > 1 for piece in short) < len(room)


def test_attention_says_what_is_too_long() -> None:
    """A document that fits is spread where one rank would be done too late, on as few ranks as are in time."""
    pieces = [(0, 300), *((at, at + 10) for at in range(300, 1200, 10))]
    assert len(ranks_of((0, 300), placed_documents(pieces, [300] * 4, math.inf))) == 1
    placed = placed_documents(pieces, [300] * 4, 1000.0)
    assert len(ranks_of((0, 300), placed)) == 2
    assert len(ranks_of((0, 300), placed_documents(pieces, [300] * 4, 0.0))) == 4
    # Two that would take the slower rank too long are both on the faster one, though this one has more to do then.
    pair = [(0, 200), (200, 400), *((at, at + 10) for at in range(400, 1200, 10))]
    placed = placed_documents(pair, [900, 300], 100.0)
    assert ranks_of((0, 200), placed) == ranks_of((200, 400), placed) == {0}
    # Where documents are alike, all ranks have as much attention.
    alike = placed_documents([(at, at + 50) for at in range(0, 1200, 50)], [300] * 4, math.inf)
    assert all(len(ranks_of((at, at + 50), alike)) == 1 for at in range(0, 1200, 50))


def whole(made: Plan, **parameters: Any) -> Plan:
    given = {**made.schedule.parameters, **parameters, "cp_documents": "whole"}
    return replace(made, schedule=ScheduleSpec(made.schedule.name, given))


SHARED = plan("--pipeline-model-parallel-size 2 --context-parallel-size 2")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (whole(plan("--pipeline-model-parallel-size 4")), "cp_documents = 'whole': no replica of the plan has context"),
        (whole(SHARED, context_exchange=True), "cp_documents = 'whole': with the context exchange"),
        (
            whole(replace(SHARED, training=replace(SHARED.training, micro_batch_size=2))),
            "up to 2 sequences.*Use a micro batch size of 1",
        ),
        (
            whole(
                replace(
                    SHARED,
                    model=replace(SHARED.model, pattern="M*-" * 3),
                    stages=with_context_parallel_sizes(SHARED.stages, [[2], [1]]),
                )
            ),
            "a replica has cp 1, its recurrent layers",
        ),
    ],
)
def test_refused(made: Plan, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_plan_alone(made)


def test_goes_with_documents_only() -> None:
    check_plan_alone(whole(SHARED))
    check_feature("context_parallel", whole(SHARED), arguments(reset_attention_mask=True))
    with pytest.raises(PlanError, match="--het-cp-documents = 'whole': a sequence is one document"):
        check_feature("context_parallel", whole(SHARED), arguments())
