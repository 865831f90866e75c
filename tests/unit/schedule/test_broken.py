"""Deliberately broken schedules are rejected, each for the right reason."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_helpers import full, run, swapped, with_device

from megatron_het.features.activation_offload.spec import add_activation_offload
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.features.vocab_parallel.spec import add_embedding, add_vocabulary
from megatron_het.features.window.passes import add_parameters, post_together
from megatron_het.schedule import Graph, Kind, Op, Program, ScheduleError, Shape, add_transfers, generate
from megatron_het.schedule.validate import check, deadlock, validate


def position(program: Program, device: int, kind: Kind, nth: int = 0) -> int:
    """Position of the nth operation of a kind on a device."""
    return [i for i, op in enumerate(program.ops[device]) if op.kind == kind][nth]


def without(program: Program, device: int, kind: Kind, nth: int = 0) -> Program:
    """The program without the nth operation of a kind on a device."""
    ops = list(program.ops[device])
    del ops[position(program, device, kind, nth)]
    return with_device(program, device, ops)


SLIM = Shape.uniform(4, 2, slices=8)
MINI = Shape.uniform(3, 4, chunks=3)
TWO = generate("1f1b", Shape.uniform(2, 2))


def swap_slices(kind: Kind, *slices: int) -> Program:
    """Two slices of one sequence swapped on every device, transfers added after: consistent but for the KV."""
    program = generate("slimpipe", SLIM)
    for device in range(4):
        program = swapped(program, device, *(program.ops[device].index(Op(kind, 0, piece, 0)) for piece in slices))
    return program


def crossed_sends() -> Program:
    """Two activations sent in one order and received in the other."""
    program = full("1f1b", Shape.uniform(2, 4))
    i, j = position(program, 0, Kind.SEND_FORWARD, 0), position(program, 0, Kind.FORWARD, 1)
    ops = list(program.ops[0])
    first, second = ops[i], ops[j + 1]
    assert second.kind == Kind.SEND_FORWARD
    ops[j + 1] = first
    ops.insert(j + 1, second)
    del ops[i]
    return with_device(program, 0, ops)


def gathered(**options: object) -> Program:
    return add_parameters(full("ministage", MINI), **options)  # type: ignore[arg-type]


def moved_up(device: int, late: Kind, before: Kind, nth: int | None = None) -> Program:
    """The first operation of a kind moved before the nth of another, or before the last of those that precede it."""
    program = gathered()
    ops, start = list(program.ops[device]), position(program, device, late)
    places = [i for i, op in enumerate(ops) if op.kind == before and (nth is not None or i < start)]
    ops.insert(places[-1 if nth is None else nth], ops.pop(start))
    return with_device(program, device, ops)


def crossed_gathers() -> Program:
    """Two replicas of one stage gather two chunks in different orders."""
    shape = Shape(((1, 1), (1, 1)), ((0, 1), (0, 0)), (2, 1))
    program = add_parameters(full("ministage", shape))
    first = position(program, 1, Kind.PARAM_GATHER)
    return swapped(program, 1, first, first + 1)


def no_keys() -> Program:
    """Both ends of the first transfer of keys and values are gone."""
    program = add_transfers(add_exchange(generate("slimpipe", SLIM), units=2))
    sender = next(d for d in range(4) if any(op.kind == Kind.KV_SEND for op in program.ops[d]))
    send = next(op for op in program.ops[sender] if op.kind == Kind.KV_SEND)
    peer, receive = send.partner(sender)
    program = with_device(program, sender, [op for op in program.ops[sender] if op != send])
    return with_device(program, peer, [op for op in program.ops[peer] if op != receive])


CASES: dict[str, tuple[Callable[[], Program], str, str]] = {
    "two slices swapped (forward)": (
        lambda: swap_slices(Kind.FORWARD, 2, 3),
        "dependency",
        "the keys and values of microbatch 0, slice 2",
    ),
    "two slices swapped (backward)": (
        lambda: swap_slices(Kind.BACKWARD, 5, 4),
        "dependency",
        "the gradients of keys and values from microbatch 0, slice 5",
    ),
    "missing receive": (
        lambda: without(full("slimpipe", SLIM), 2, Kind.RECV_FORWARD, 3),
        "transfer",
        "other end RF0.3.0>1.0 is missing",
    ),
    "missing send": (
        lambda: without(full("slimpipe", SLIM), 1, Kind.SEND_BACKWARD),
        "transfer",
        "is missing on device 1.0",
    ),
    "missing both ends": (
        lambda: without(without(full("1f1b", Shape.uniform(2, 4)), 0, Kind.SEND_FORWARD, 2), 1, Kind.RECV_FORWARD, 2),
        "transfer",
        "the output of microbatch 2, slice 0, chunk 0 on device 0.0 is never received",
    ),
    "crossed sends": (crossed_sends, "deadlock", "transport edge"),
    "used after release": (
        lambda: moved_up(1, Kind.PARAM_RELEASE, Kind.FORWARD),
        "lifetime",
        "parameters of layers 0 of chunk 0 are not gathered",
    ),
    "missing gather": (lambda: without(gathered(), 0, Kind.PARAM_GATHER, 1), "lifetime", "of chunk 1 are not gathered"),
    "never released": (lambda: without(gathered(), 0, Kind.PARAM_RELEASE, 4), "lifetime", "chunk 0 are never released"),
    "shard on the host": (
        lambda: without(gathered(offload=True), 0, Kind.PARAM_PREFETCH, 1),
        "lifetime",
        "is on the host (no prefetch",
    ),
    "reduced too early": (
        lambda: moved_up(0, Kind.GRAD_REDUCE, Kind.BACKWARD),
        "lifetime",
        "gradients of chunk 2 are already reduced",
    ),
    "never reduced": (
        lambda: without(gathered(step="none"), 0, Kind.GRAD_REDUCE),
        "lifetime",
        "chunk 2 are never (or not all)",
    ),
    "stepped before reduced": (
        lambda: moved_up(0, Kind.OPTIMIZER_STEP, Kind.GRAD_REDUCE, 2),
        "lifetime",
        "gradients of chunk 0 are not reduced",
    ),
    "activations on the host": (
        lambda: without(add_activation_offload(full("ministage", MINI)), 0, Kind.ACT_FETCH),
        "lifetime",
        "activations are on the host",
    ),
    "missing forward": (
        lambda: without(generate("1f1b", Shape.uniform(2, 4)), 1, Kind.FORWARD, 2),
        "completeness",
        "device 1.0: no FORWARD of microbatch 2",
    ),
    "missing backward": (
        lambda: without(generate("1f1b", Shape.uniform(2, 4)), 1, Kind.BACKWARD, 2),
        "completeness",
        "no BACKWARD (of its input) of microbatch 2",
    ),
    "missing weight gradient": (
        lambda: without(full("zb-h1", Shape.uniform(2, 4)), 0, Kind.BACKWARD_WEIGHT),
        "completeness",
        "no BACKWARD (of its weights)",
    ),
    "missing vocabulary forward": (
        lambda: without(add_transfers(add_vocabulary(generate("slimpipe", SLIM))), 1, Kind.VOCAB_FORWARD),
        "completeness",
        "no VOCAB_FORWARD of microbatch 0, slice 0",
    ),
    "collectives in different orders": (
        crossed_gathers,
        "deadlock",
        "the replicas of stage 0 differ in their collectives",
    ),
    "missing gradient of the embedding": (
        lambda: without(add_embedding(generate("1f1b", Shape.uniform(2, 2))), 1, Kind.EMBED_BACKWARD),
        "completeness",
        "no EMBED_BACKWARD of microbatch 0",
    ),
    "missing part of the embedding": (
        lambda: without(add_embedding(generate("1f1b", Shape.uniform(2, 2))), 1, Kind.EMBED_FORWARD),
        "completeness",
        "no EMBED_FORWARD of microbatch 0",
    ),
    "done twice": (
        lambda: with_device(TWO, 0, [*TWO.ops[0], TWO.ops[0][0]]),
        "completeness",
        "this work is there twice",
    ),
    "backward in evaluation": (lambda: replace(TWO, forward_only=True), "completeness", "a forward-only program"),
    "missing keys and values": (no_keys, "lifetime", "of the owner's keys and values were not received"),
    "missing help": (
        lambda: without(add_transfers(add_exchange(generate("slimpipe", SLIM))), 3, Kind.ATTEND_HELP),
        "dependency",
        "the partial attention of",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rejected_for_the_right_reason(name: str) -> None:
    make, rule, words = CASES[name]
    problems = validate(make())
    assert problems and problems[0].rule == rule, [str(p) for p in problems[:3]]
    assert any(words in p.message for p in problems if p.rule == rule), [str(p) for p in problems[:5]]


def test_fields_that_name_nothing() -> None:
    program = full("1f1b", Shape.uniform(2, 2))
    for bad in (
        Op(Kind.FORWARD, 5),
        Op(Kind.FORWARD, 0, 3),
        Op(Kind.FORWARD, 0, 0, 2),
        Op(Kind.SEND_FORWARD, 0, 0, 0, 7, 0),
        Op(Kind.SEND_FORWARD, 0, 0, 0, 0, 0),
        Op(Kind.PARAM_GATHER, chunk=4),
    ):
        problems = validate(with_device(program, 0, [bad, *program.ops[0]]))
        assert [p.rule for p in problems] == ["field"], bad
        assert problems[0].position == 0


def test_messages_show_place_neighbours_and_what_is_waited_for() -> None:
    """A deadlock names device, position, operation, neighbours and the blocking operation of the peer."""
    program = add_transfers(generate("slimpipe", SLIM), order="late")
    text = next(p.message for p in validate(program) if p.rule == "deadlock")
    assert "device 0.0, position" in text
    assert "[SF" in text and "waits for RF" in text and "which is at" in text


def test_late_receives_run_on_one_queue_per_edge() -> None:
    """The same program is fine where the transport has a queue per direction."""
    program = add_transfers(generate("slimpipe", SLIM), order="late")
    assert validate(program, transports=("edge",)) == []
    with pytest.raises(ScheduleError, match="transport rank"):
        check(program, transports=("rank",))


def test_wrong_peer() -> None:
    shape = Shape(((1,), (1,)), ((0, 0), (0, 1)), (1, 2))
    program = full("1f1b", shape)
    ops = [op._replace(peer=2) if op.kind == Kind.SEND_FORWARD and op.microbatch == 0 else op for op in program.ops[0]]
    problems = validate(with_device(program, 0, ops))
    assert problems[0].rule == "transfer"


def test_replicas_that_gather_together_can_wait_for_each_other() -> None:
    """Microbatch 1 comes to its replica only after a backward that waits for that replica's second gather."""
    shape = Shape(((1,),) * 3, ((0, 0, 0, 0, 0), (0, 0, 0, 0, 0), (0, 1, 0, 0, 0)), (1, 1, 2), slices=6)
    program = add_parameters(full("seq1f1b", shape), prefetch=0, keep_at_turn=False)
    assert deadlock(Graph(program), "edge") == ()  # of the transfers alone there is none
    problems = validate(program)
    assert {problem.rule for problem in problems} == {"deadlock"}
    assert "replicas that gather or reduce together" in problems[0].message
    with pytest.raises(ScheduleError, match="wait for each other"):
        run(program)
    assert validate(post_together(add_parameters(full("seq1f1b", shape), prefetch=0, keep_at_turn=True))) == []
