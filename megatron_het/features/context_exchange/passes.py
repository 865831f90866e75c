"""Adds the attention context exchange of a plan to a program."""

from dataclasses import replace

from megatron_het.schedule.exchange import ExchangePlan, Move, plan_exchange
from megatron_het.schedule.ir import COMPUTE, Kind, Op, Program

_KINDS = (
    (Kind.ATTEND_GIVE, Kind.ATTEND_HELP, Kind.ATTEND_MERGE, Kind.KV_SEND),
    (Kind.ATTEND_GIVE_BACKWARD, Kind.ATTEND_HELP_BACKWARD, Kind.ATTEND_MERGE_BACKWARD, Kind.KV_SEND_BACKWARD),
)


def add_exchange(program: Program, plan: ExchangePlan | None = None, **options: object) -> Program:
    """The program with KV_SEND, ATTEND_GIVE, ATTEND_HELP and ATTEND_MERGE operations.

    In a slot a device first gives its queries away, then attends for others, then runs its own pass, then
    merges what comes back; devices without a pass only attend.  Keys and values are sent one slot ahead
    when they exist by then.  Run this before transfers are added: KV_SEND gets its KV_RECV there.

    Args:
        program: compute operations only.
        plan: from :func:`~megatron_het.schedule.exchange.plan_exchange`; made with ``options`` if absent.
        **options: of ``plan_exchange``.

    Raises:
        ValueError: the program has other operations already, or cannot be aligned in slots.
    """
    if any(op.kind not in COMPUTE for ops in program.ops for op in ops):
        raise ValueError(f"program {program.name}: the exchange comes first, before other passes")
    plan = plan or plan_exchange(program, **options)  # type: ignore[arg-type]
    ahead: list[list[tuple[int, Op]]] = [[] for _ in plan.slots]
    made: dict[tuple[int, int, int, int], int] = {}
    for s, slot in enumerate(plan.slots):
        for move in slot.moves:
            for device, send in _sends(move, slot.backward):
                newest = (move.owner, move.microbatch, -(-send.stop // plan.units) - 1, move.chunk)
                ahead[s - 1 if s and made.get(newest, s) < s - 1 else s].append((device, send))
        if not slot.backward:
            for device, op in slot.passes.items():
                made[device, op.microbatch, op.slice, op.chunk] = s
    out: list[list[Op]] = [[] for _ in program.ops]
    for s, slot in enumerate(plan.slots):
        for device, send in ahead[s]:
            out[device].append(send)
        give, help_, merge, _ = _KINDS[slot.backward]
        for move in slot.moves:
            out[move.owner].append(_op(give, move, move.helper))
        for move in slot.moves:
            out[move.helper].append(_op(help_, move, move.owner))
        for device, op in slot.passes.items():
            out[device].append(op)
        for move in slot.moves:
            out[move.owner].append(_op(merge, move, move.helper))
    return replace(program, ops=tuple(map(tuple, out)), attention_units=plan.units)


def _op(kind: Kind, move: Move, peer: int) -> Op:
    return Op(kind, move.microbatch, move.slice, move.chunk, peer, move.chunk, move.start, move.stop)


def _sends(move: Move, backward: bool) -> list[tuple[int, Op]]:
    kind = _KINDS[backward][3]
    return [
        (move.owner, Op(kind, move.microbatch, move.slice, move.chunk, move.helper, move.chunk, start, stop))
        for start, stop in move.sent
    ]
