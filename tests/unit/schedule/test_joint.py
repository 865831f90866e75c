"""Joint passes: what the context exchange makes wait for each other can run, and what cannot is found."""

import pytest
from schedule_helpers import with_device

from megatron_het.features.context_exchange.kinds import ExchangeRules, joint_slots
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.features.vocab_parallel.spec import add_embedding, add_vocabulary
from megatron_het.schedule import Kind, Op, Program, Shape, add_transfers, generate
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.joint import stuck_events
from megatron_het.schedule.validate import validate


def exchanging(stages: int, slices: int, chunks: int, microbatches: int, **options: object) -> Program:
    shape = Shape.uniform(stages, microbatches, slices=slices, chunks=chunks)
    return add_transfers(add_exchange(generate("slimpipe", shape), **options))


OPTIONS = ({}, {"units": 1}, {"units": 4, "keep": True}, {"helping": True}, {"helping": True, "keep": True})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("stages", "slices", "chunks", "microbatches"), [(2, 4, 1, 1), (3, 6, 2, 2), (4, 8, 2, 3)])
def test_can_run(stages: int, slices: int, chunks: int, microbatches: int, options: dict[str, object]) -> None:
    program = exchanging(stages, slices, chunks, microbatches, **options)
    assert list(stuck_events(Graph(program))) == []
    assert validate(program) == []


def test_separate_pipelines() -> None:
    """Two replicas per stage with unequal shares; nothing is exchanged between them."""
    route = (0, 1, 0, 0, 1)
    shape = Shape(((1,),) * 3, (route,) * 3, (2, 2, 2), slices=6)
    program = add_transfers(add_exchange(generate("slimpipe", shape), helping=True))
    assert validate(program) == []
    replicas = [d.replica for d in program.devices]
    pairs = [(d, op.peer) for d, ops in enumerate(program.ops) for op in ops if op.peer >= 0]
    assert pairs and all(replicas[a] == replicas[b] for a, b in pairs)
    mixed = Shape(((1,),) * 2, ((0, 1), (1, 0)), (2, 2), slices=2)
    with pytest.raises(ValueError, match="not separate pipelines"):
        add_exchange(generate("slimpipe", mixed))


@pytest.mark.parametrize("options", [{}, {"helping": True}], ids=str)
@pytest.mark.parametrize(("stages", "slices", "chunks"), [(2, 4, 1), (4, 8, 2), (4, 4, 1)])
def test_with_a_split_vocabulary(stages: int, slices: int, chunks: int, options: dict[str, object]) -> None:
    """Its operations come between slots."""
    shape = Shape.uniform(stages, 2, slices=slices, chunks=chunks)
    program = add_exchange(generate("slimpipe", shape), **options)
    assert validate(add_transfers(add_embedding(add_vocabulary(program)))) == []


def test_idle_devices_work_in_their_last_help() -> None:
    """Devices without a pass take part once per slot; with a pass, in the pass."""
    program = exchanging(4, 8, 1, 1, helping=True)
    idle = 0
    for slot in joint_slots(program):
        for owner, helper in slot.helped:
            assert slot.event(owner) == slot.passes[owner]
            assert (helper in slot.passes) != (helper in slot.idle)
            idle += helper in slot.idle
    assert idle > 10
    assert not any(slot.idle for slot in joint_slots(exchanging(4, 8, 1, 1)))


def _first(program: Program, kind: Kind) -> tuple[int, int]:
    """(device, position) of the first operation of a kind."""
    return next((d, i) for d, ops in enumerate(program.ops) for i, op in enumerate(ops) if op.kind == kind)


def test_a_result_that_its_helper_waits_for_is_found() -> None:
    """A device receives another one's activations of a slot before its own pass in that slot."""
    program = exchanging(4, 8, 1, 2)
    slot = next(s for s in joint_slots(program) if s.helped and s.passes[0].kind == Kind.FORWARD)
    owner, helper = min(slot.helped)
    extra = Op(Kind.KV_SEND, *slot.passes[owner][1:4], helper, 0, 90, 91)
    peer, receive = extra.partner(owner)
    ops, others = list(program.ops[owner]), list(program.ops[peer])
    ops.insert(ops.index(slot.passes[owner]) + 1, extra)
    others.insert(others.index(slot.passes[helper]), receive)
    broken = with_device(with_device(program, owner, ops), peer, others)
    stuck = list(stuck_events(Graph(broken)))
    assert stuck
    assert Graph(broken).ops[stuck[0]] in (slot.passes[owner], slot.passes[helper], extra, receive)


def test_transfers_placed_without_lockstep_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placed as if helpers did not hold their owners up, some transfers cross their slots."""
    program = add_exchange(generate("slimpipe", Shape.uniform(4, 1, slices=4)), helping=True)
    assert validate(add_transfers(program)) == []
    monkeypatch.setattr(ExchangeRules, "lockstep", lambda rules, graph, duration: None)
    problems = validate(add_transfers(program))
    assert problems and {p.rule for p in problems} == {"deadlock"}
    assert "attend for each other" in problems[0].message


def test_passes_that_are_not_aligned_are_a_problem() -> None:
    """Not an exception: the validator reports what it finds."""
    program = exchanging(4, 8, 1, 2)
    ops = list(program.ops[3])
    last = max(i for i, op in enumerate(ops) if op.kind == Kind.FORWARD)
    first = min(i for i, op in enumerate(ops) if op.kind == Kind.BACKWARD)
    assert first < last
    ops.insert(first, ops.pop(last))
    assert validate(with_device(program, 3, ops))
