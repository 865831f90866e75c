"""From device programs to rank programs."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_het.features.context_exchange.exchange import exchange_edges
from megatron_het.features.zero_bubble.spec import ZeroBubble
from megatron_het.lowering.programs import build
from megatron_het.lowering.ranks import BoundaryMap, edges, lower
from megatron_het.plan import Placement
from megatron_het.schedule.ir import RECEIVES, SENDS, Kind
from tests.unit.plan.test_plan import document, read


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_send_has_its_receive_in_the_same_order_on_each_edge(sequence_parallel: bool, forward_only: bool) -> None:
    placement = Placement(read(document()))
    program = build(placement.plan)[forward_only]
    boundaries = BoundaryMap(placement, 32, sequence_parallel)
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in range(placement.world_size):
        where = placement.locate(rank)
        device = program.shape.device(where.stage, where.replica)
        lowered = lower(program, boundaries, device, rank)
        for op in lowered.ops:
            if op.kind in SENDS:
                sent.setdefault((rank, op.peer), []).append((op.microbatch, op.hi - op.lo))
            elif op.kind in RECEIVES:
                received.setdefault((op.peer, rank), []).append((op.microbatch, op.hi - op.lo))
    assert sent == received
    assert set(sent) <= set(edges([program], boundaries))


@pytest.mark.parametrize("sizes", [(1, 2), (4, 2), (2, 4), (4, 1), (2, 2)])
def test_attention_is_handed_over_by_heads(sizes: tuple[int, int]) -> None:
    """Every key-value group of an owner goes to one rank of the helper, which expects as many."""
    body, world = document(), sum(sizes)
    ranks = (list(range(sizes[0])), list(range(sizes[0], world)))
    body["model"] |= {"num_attention_heads": 8, "num_query_groups": 4}
    body["stages"] = [{"layers": [2], "replicas": [{"ranks": r, "microbatches": [0, 1, 2, 3]}]} for r in ranks]
    body["schedule"] = {"name": "slimpipe", "parameters": {"slices": 4, "context_exchange": True}}
    placement = Placement(read(body))
    program, boundaries = build(placement.plan)[False], BoundaryMap(placement, 8, sequence_parallel=False)
    given: list[tuple[int, int, tuple[int, ...], int]] = []
    helped: list[tuple[int, int, tuple[int, ...], int]] = []
    groups: dict[tuple[Any, ...], set[int]] = {}
    for rank in range(world):
        where = placement.locate(rank)
        for op in lower(program, boundaries, where.stage, rank).ops:
            what = (*op.key, op.start, op.stop)
            if op.kind is Kind.ATTEND_GIVE:
                given.append((rank, op.peer, what, op.hi - op.lo))
                first = where.tp_rank * 4 // sizes[where.stage]
                groups.setdefault((where.stage, what), set()).update(range(first + op.lo, first + op.hi))
            elif op.kind is Kind.ATTEND_HELP:
                helped.append((op.peer, rank, what, op.hi - op.lo))
    assert given and sorted(given) == sorted(helped)
    assert all(found == {0, 1, 2, 3} for found in groups.values())
    assert {(owner, helper) for owner, helper, _, _ in given} <= set(exchange_edges([program], boundaries))


def test_a_rank_without_a_piece_of_a_replicated_result_keeps_nothing_to_send() -> None:
    placement = Placement(read(document()))
    program = build(placement.plan)[False]
    boundaries = BoundaryMap(placement, 32, sequence_parallel=False)
    first, second = (lower(program, boundaries, 0, t) for t in range(2))
    # Microbatch 2 goes from TP 2 to TP 1: only the first sender has a piece of it.
    assert 2 in {key[0] for _, key in first.sends}
    assert 2 not in {key[0] for _, key in second.sends}


def test_operations_without_a_handler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = document()
    body["stages"][1]["replicas"] = [{"ranks": [2, 3], "microbatches": [0, 1, 2, 3]}]
    body["schedule"] = {"name": "zb-h1", "parameters": {}}
    assert build(read(body))
    monkeypatch.setattr(ZeroBubble, "options_of", lambda self, plan: None)
    with pytest.raises(ValueError, match="it uses BACKWARD_WEIGHT, .*not executed"):
        build(read(body))
