"""A note after each forward, of how many sequences it had: a parameter with its check, a kind, a pass, a price."""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from megatron_het.features.base import Feature, Figures, Option, option
from megatron_het.plan import Plan, PlanError
from megatron_het.schedule import Costs, Kind, Op, Program
from megatron_het.schedule.deps import Lifetimes, State
from megatron_het.schedule.kinds import (
    GREY,
    NEITHER,
    OWN_OUTPUT,
    PASS_FIELDS,
    Direction,
    Effect,
    Price,
    Role,
    Stream,
    add_kinds,
)
from megatron_het.schedule.memory import OTHER, BytesOf, Holdings

NOTE_S, NOTE_BYTES = 0.25, 7.0


class _Notes(State):
    """One note of each pass."""

    def __init__(self, held: Lifetimes, program: Program, kinds: Set[Kind]) -> None:
        super().__init__(held, program, kinds)
        self._made: set[tuple[int, int]] = set()

    def note(self, node: int, op: Op, found: list[int]) -> None:
        """A second one of a pass does not fit."""
        if (op.microbatch, op.chunk) in self._made:
            self.held.unfit(node, "noted twice")
        self._made.add((op.microbatch, op.chunk))


class _NoteBytes(BytesOf):
    def __init__(self, held: Holdings, kinds: Set[Kind]) -> None:
        super().__init__(held, kinds)

    def note(self, node: int, op: Op) -> None:
        """It stays."""
        self.held.found.append((self.held.start[node], NOTE_BYTES, OTHER))


add_kinds(
    {
        "NOTE": NEITHER
        | {
            "mnemonic": "NN",
            "executor": "room",
            "stream": Stream.COMPUTE,
            "role": Role.OTHER,
            "direction": Direction.FORWARD,
            "fields": PASS_FIELDS,
            "needs": OWN_OUTPUT,
            "effect": Effect(
                lifetime=lambda held: held.state(_Notes).note, memory=lambda held: held.state(_NoteBytes).note
            ),
            "price": Price(seconds=lambda prices: lambda device, op: NOTE_S),
            "colour": GREY,
        }
    }
)


@dataclass(frozen=True, slots=True)
class NoteOptions:
    """Which microbatches are noted."""

    # one of so many
    every: int = option("note_every", 1, flag="--het-note-every", metavar="N", help="note one microbatch of N")


class Notes(Feature):
    """Writes down how many sequences each forward had."""

    name = "room"
    title = "notes"
    options = NoteOptions
    switch = Option("notes", flag="--het-notes", help="note passes", problem="must be true or false")

    def check_plan(self, plan: Plan, options: NoteOptions) -> None:
        """As many microbatches as that at least."""
        if options.every > plan.num_microbatches:
            raise PlanError("schedule.parameters.note_every", options.every, "is more than all microbatches")

    def before_transfers(self, program: Program, options: NoteOptions, speeds: Any) -> Program:
        """Notes after forwards."""
        return replace(program, ops=tuple(tuple(_with_notes(ops, options.every)) for ops in program.ops))

    def price(self, costs: Costs, options: NoteOptions, program: Program, figures: Figures) -> Costs:
        """Notes take what their kind says."""
        return costs


def _with_notes(ops: tuple[Op, ...], every: int) -> list[Op]:
    out: list[Op] = []
    for op in ops:
        out.append(op)
        if op.kind is Kind.FORWARD and op.microbatch % every == 0:
            out.append(Op(Kind.NOTE, op.microbatch, op.slice, op.chunk))
    return out
