"""Plan of SlimPipe's attention context exchange (section 4.2): which device attends for which, to which keys.

Devices run their forwards in aligned *slots*: in forward slot ``k`` stage ``s`` runs its ``(k - s)``-th
forward, in backward slot ``k`` its ``(k - (stages - 1 - s))``-th backward.  The attention of slice ``i``
costs ``i + 1`` slices of keys and values, so the loads of a slot differ; a device with more gives its query
and some keys and values to one with less, in units of ``1/units`` of a slice.

The paper pairs devices one to one and moves whole slices.  Here several devices may give to one, because
pairs cannot keep the promised difference of one slice where two microbatches meet, and units may be smaller
than a slice, because whole slices leave about 1/(slices + 1) of bubble for an even number of devices.
If devices differ in speed or in layers, times of passes are levelled instead of units (:func:`level`).
A slice always gives away the earliest keys and values that it sees: they need no mask and can be sent
ahead of time ("early key-value exchange", section 5).  If documents or sliding windows limit attention, units
are weighted by their attention (``cutting.SlicePart``), and those that a slice does not see are not sent.
Units of slices of unequal length are weighted in the same way.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from megatron_het.features.context_exchange.kinds import exchanged_layers
from megatron_het.plan.placement import joined
from megatron_het.schedule.cutting import Parts
from megatron_het.schedule.generators.listing import require
from megatron_het.schedule.ir import COMPUTE, Kind, Op, Program, Shape
from megatron_het.schedule.joint import aligned_slots

# The context exchange as the balancer of unequal devices (beyond SlimPipe, which has equal ones).
#
# The exchange makes the units of attention on the devices of a slot equal (:func:`rebalance`).  If devices
# differ in speed or in layers, equal units do not take equal times.  With :class:`PassCosts` the slowest pass of a slot
# gives units to the device that would end first, as long as the slot then ends earlier.

Shift = tuple[int, int, int]  # (giver, taker, units)
_DIAGONAL_HALVES = 1
"""A slice's attention to itself takes half as long as to another slice, because kernels skip masked scores."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Times of forward passes in one unit of time for all; backwards take a constant multiple of them."""

    attention: tuple[int, ...]  # by device, time of one layer's attention of a slice to the keys of one slice
    rest: tuple[tuple[int, ...], ...]  # by device and chunk, time of the rest of a slice's pass

    @classmethod
    def of(cls, shape: Shape, attention: Sequence[int], rest: Sequence[int]) -> "PassCosts":
        """Makes costs from flat lists.

        Args:
            attention: One figure per device.
            rest: One figure per chunk of every device, in the order of devices.

        Raises:
            ValueError: The lists do not fit the shape.
        """
        chunks = [len(shape.layers[device.stage]) for device in shape.devices]
        if len(attention) != len(chunks) or len(rest) != sum(chunks):
            raise ValueError(
                f"{len(attention)} figures of attention and {len(rest)} of the rest of a pass, for "
                f"{len(chunks)} devices with {sum(chunks)} chunks"
            )
        left = iter(rest)
        return cls(tuple(attention), tuple(tuple(next(left) for _ in range(count)) for count in chunks))

    def times(
        self,
        shape: Shape,
        passes: Mapping[int, Op],
        exchanged: int,
        units: int,
        work: Mapping[int, tuple[float, float, float]] | None = None,
    ) -> dict[int, tuple[float, float]]:
        """Returns for each device its time without attention that can be given away, and the time of one unit.

        Args:
            passes: The pass of each device that has one in the slot; the others are idle.
            exchanged: Layers of a chunk in which attention is exchanged.
            units: Exchange units per slice.
            work: For each pass its attention to earlier slices and to itself, and its tokens, if slices are of unequal
                length or documents or windows limit attention; 1 is the attention of an equal slice to all of
                another.

        Returns:
            Both in units of time of ``1 / (2 units)``, so that they are whole numbers without ``work``.
        """
        found: dict[int, tuple[float, float]] = {}
        for device, attention in enumerate(self.attention):
            fixed: float = 0
            if device in passes:
                op = passes[device]
                layers = shape.attention_layers[shape.devices[device].stage][op.chunk]
                before, own, tokens = (op.slice, _DIAGONAL_HALVES / 2, 1) if work is None else work[device]
                halves = 2 * (layers - exchanged) * before + 2 * own * layers
                fixed = units * (2 * self.rest[device][op.chunk] * tokens + halves * attention)
            found[device] = fixed, 2 * exchanged * attention
        return found


def level(
    loads: Mapping[int, int],
    times: Mapping[int, tuple[float, float]],
    work: Mapping[int, Sequence[float]] | None = None,
) -> list[Shift]:
    """Returns (giver, taker, units) such that the last device ends as early as possible.

    Repeatedly one unit moves from the device that ends last to the device that would end first with it, while that
    is before the giver's end.  With equal units the result is optimal, and no device both gives and takes: if a device
    that has taken units ends last, no other could take them from it and end earlier.
    With unequal units a device that has taken units gives none; each of its helpers gets a run of its units.

    Args:
        loads: Units that each device may give away, or 0; other devices take no part.
        times: For every device its time without these units, and the time of one unit.
        work: For every device the sizes of its units in whole units, in the order in which it gives them; None
            if all are equal.
    """
    sizes = {d: (1,) * count for d, count in loads.items()} if work is None else work
    end = {d: times[d][0] + sum(sizes[d]) * times[d][1] for d in loads}
    given = dict.fromkeys(loads, 0)
    moved: dict[int, dict[int, float]] = {}
    while end:
        giver = max(end, key=lambda d: (end[d], -d))
        if given[giver] == loads[giver] or any(giver in takers for takers in moved.values()):
            break
        unit = sizes[giver][given[giver]]
        taker = min((d for d in end if d != giver), key=lambda d: (end[d] + unit * times[d][1], d), default=giver)
        if end[taker] + unit * times[taker][1] >= end[giver]:
            break
        takers = moved.setdefault(giver, {})
        takers[taker] = takers.get(taker, 0) + unit
        given[giver] += 1
        end[giver] -= unit * times[giver][1]
        end[taker] += unit * times[taker][1]
    return [
        (giver, taker, count)
        for giver, takers in moved.items()
        for taker, count in zip(takers, _runs(sizes[giver][: given[giver]], list(takers.values())), strict=True)
        if count
    ]


def _runs(sizes: Sequence[float], wanted: Sequence[float]) -> list[int]:
    """Divides units into runs whose sums are as near as possible to the wanted ones; returns the lengths of the runs.

    Args:
        sizes: Sizes of the units, in order.
        wanted: Wanted sums, which add up to the sum of the sizes.
    """
    until, at, found = [0.0, *itertools.accumulate(sizes)], 0, []
    for end in itertools.accumulate(wanted):
        last, at = at, min(range(at, len(until)), key=lambda i: (abs(until[i] - end), i))
        found.append(at - last)
    found[-1] += len(sizes) - at
    return found


@dataclass(frozen=True, slots=True)
class Move:
    """Attention of one slice that another device computes."""

    # owner, helper: device that gives and device that attends
    owner: int
    helper: int
    # microbatch, slice, chunk: the owner's pass
    microbatch: int
    slice: int
    chunk: int
    # start, stop: exchange units of the owner's keys and values, counted from the start of the sequence
    start: int
    stop: int
    # ranges of units whose keys and values are sent for it; the helper has kept the others
    sent: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ExchangeSlot:
    """One aligned slot with its exchange."""

    index: int  # number among the forward or backward slots
    backward: bool  # which of the two
    passes: dict[int, Op]  # the pass that each device runs, by device; idle devices are absent
    # units of attention per device before the exchange; fractions of units if slices do not see all of them
    loads: tuple[float, ...]
    moves: tuple[Move, ...]
    after: tuple[float, ...]  # units per device after it


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All slots in the order in which they run."""

    units: int  # units per slice
    slots: tuple[ExchangeSlot, ...]  # forward and backward slots, in one global order

    def volume(self, backward: bool = False) -> dict[int, float]:
        """Slices of query, output, key and value that cross each device's links, in both directions."""
        total: dict[int, float] = {}
        for slot in self.slots:
            if slot.backward != backward:
                continue
            for move in slot.moves:
                sent = sum(stop - start for start, stop in move.sent) / self.units
                for device in (move.owner, move.helper):
                    total[device] = total.get(device, 0.0) + 2 + 2 * sent
        return total

    def lines(self) -> Iterator[str]:
        """The plan as a table: slot, loads, moves, loads after (in slices)."""
        fraction = lambda n: f"{n / self.units:g}"  # noqa: E731
        for slot in self.slots:
            moves = ", ".join(f"{m.owner}>{m.helper}:{fraction(m.stop - m.start)}" for m in slot.moves)
            name = f"{'B' if slot.backward else 'F'}{slot.index}"
            yield (
                f"{name:>6} | {' '.join(map(fraction, slot.loads))} | {moves or '-'} | "
                f"{' '.join(map(fraction, slot.after))}"
            )

    def to_json(self) -> list[dict[str, object]]:
        """The plan as plain data."""
        return [
            {
                "slot": slot.index,
                "backward": slot.backward,
                "loads": [load / self.units for load in slot.loads],
                "moves": [asdict(move) | {"sent": [list(units) for units in move.sent]} for move in slot.moves],
                "after": [load / self.units for load in slot.after],
            }
            for slot in self.slots
        ]


def targets(loads: Mapping[int, int], floors: Mapping[int, int]) -> dict[int, int]:
    """Loads as equal as the floors allow, differing by at most one unit where no floor binds.

    Args:
        floors: units that a device cannot give away.
    """
    fixed: dict[int, int] = {}
    while True:
        free = sorted((d for d in loads if d not in fixed), key=lambda d: (-loads[d], d))
        if not free:
            return fixed
        low, extra = divmod(sum(loads.values()) - sum(fixed.values()), len(free))
        wanted = {d: low + (1 if i < extra else 0) for i, d in enumerate(free)}
        bound = {d: floors[d] for d in free if wanted[d] < floors[d]}
        if not bound:
            return fixed | wanted
        fixed |= bound


def rebalance(loads: Mapping[int, int], floors: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """(giver, taker, units): the heaviest gives to the lightest, many to one, until the targets are met."""
    wanted = targets(loads, floors)
    order = sorted(loads, key=lambda d: (-loads[d], d))
    give = [[d, loads[d] - wanted[d]] for d in order if loads[d] > wanted[d]]
    take = [[d, wanted[d] - loads[d]] for d in reversed(order) if loads[d] < wanted[d]]
    moves = []
    while give and take:
        amount = min(give[0][1], take[0][1])
        moves.append((give[0][0], take[0][0], amount))
        for queue in (give, take):
            queue[0][1] -= amount
            if queue[0][1] == 0:
                queue.pop(0)
    return moves


def plan_exchange(
    program: Program,
    *,
    units: int = 2,
    helping: bool = False,
    keep: bool = False,
    costs: PassCosts | None = None,
    parts: Parts = (),
) -> ExchangePlan:
    """Plans the exchange of a SlimPipe (or TeraPipe) compute order.

    Args:
        program: one replica per stage or separate pipelines; forwards and joint backwards.
        units: exchange units per slice.
        helping: devices without a pass of their own in a slot attend for others.
        keep: keys and values stay at the helper until their microbatch's backward is done; later passes
            send only what is new.  Costs memory there, saves most of the traffic.
        costs: times of passes, to make slots as short as possible; without them units are made equal.
        parts: the attention of slices, by microbatch and slice; empty if each sees all tokens before it.

    Raises:
        ValueError: microbatches that change between replicas, units below 1, or passes that are not aligned.
    """
    require("exchange", units >= 1, f"units = {units}: must be at least 1")
    kept: dict[tuple[int, int, int, int], set[int]] = {}
    slots = []
    for index, backward, passes in aligned_slots(program):
        team = next(t for t in program.shape.pipelines() or () if not passes.keys().isdisjoint(t))
        busy = [d for d in team if d in passes or helping]
        if parts:
            offers = _limited_offers(program, passes, busy, units, costs, parts)
        else:
            offers = _offers(program, passes, busy, units, costs)
        moves: list[Move] = []
        given: dict[int, int] = {}
        after = dict(offers.loads)
        for owner, helper, amount in offers.agreed:
            op, start = passes[owner], given.get(owner, offers.first.get(owner, 0))
            given[owner] = start + amount
            work = offers.work_of(owner, start, start + amount)
            after[owner] -= work
            after[helper] += work
            have = kept.setdefault((owner, helper, op.microbatch, op.chunk), set()) if keep else set()
            sent = joined((u, u + 1) for u in range(start, start + amount) if u not in have)
            have.update(range(start, start + amount))
            moves.append(
                Move(
                    owner=owner,
                    helper=helper,
                    microbatch=op.microbatch,
                    slice=op.slice,
                    chunk=op.chunk,
                    start=start,
                    stop=start + amount,
                    sent=sent,
                )
            )
        before, left = (tuple(counts.get(d, 0) for d in range(len(program.ops))) for counts in (offers.loads, after))
        slots.append(ExchangeSlot(index, backward, passes, before, tuple(moves), left))
    return ExchangePlan(units, tuple(slots))


@dataclass(frozen=True, slots=True)
class _Offers:
    """Units of the devices of a slot, and the agreed moves."""

    loads: dict[int, float]
    agreed: list[tuple[int, int, int]]  # (giver, taker, units)
    # the first unit that a device gives away, if not unit 0
    first: dict[int, int] = field(default_factory=dict)
    # sizes of a device's units in whole units, from its first on, if not 1
    work: dict[int, Sequence[float]] = field(default_factory=dict)

    def work_of(self, device: int, start: int, stop: int) -> float:
        """Size of units ``[start, stop)`` of a device, in whole units."""
        if device not in self.work:
            return stop - start
        first = self.first[device]
        return sum(self.work[device][start - first : stop - first])


def _offers(
    program: Program, passes: Mapping[int, Op], busy: Sequence[int], units: int, costs: PassCosts | None
) -> _Offers:
    """The offers of a slot if every slice sees all tokens before it."""
    loads = {d: (passes[d].slice + 1) * units if d in passes else 0 for d in busy}
    floors = {d: units if d in passes else 0 for d in loads}  # a slice's own keys need a mask, and stay
    if costs is None:
        return _Offers(dict(loads), rebalance(loads, floors))
    times = costs.times(program.shape, passes, exchanged_layers(program.shape.attention_layers), units)
    return _Offers(dict(loads), level({d: loads[d] - floors[d] for d in loads}, times))


def _limited_offers(
    program: Program, passes: Mapping[int, Op], busy: Sequence[int], units: int, costs: PassCosts | None, parts: Parts
) -> _Offers:
    """The offers of a slot if documents or windows limit attention, or slices are of unequal length.

    Without ``costs``, slices of equal work are levelled with the rest of their passes: longer ones have less attention.
    """
    slices = program.shape.slices
    whole = 2 / (slices * slices * units)  # a unit's share of a sequence's attention, if all of a slice sees it
    first = dict[int, int]()
    work: dict[int, Sequence[float]] = dict.fromkeys(busy, ())
    before, own, rest = (dict.fromkeys(busy, 0.0) for _ in range(3))
    tokens: dict[int, float] = {}
    for d, op in passes.items():
        part = parts[op.microbatch][op.slice]
        seen = [unit for unit, share in enumerate(part.units) if share]
        before[d] = sum(part.units) / whole
        own[d] = part.attention / whole - before[d]
        rest[d], tokens[d] = part.rest / whole, part.tokens * slices
        if seen:
            first[d] = seen[0]
            work[d] = [share / whole for share in part.units[seen[0] :]]
    if costs is None:
        times = {d: (own[d] + rest[d], 1.0) for d in busy}
    else:
        seen_by = {d: (before[d] / units, own[d] / units, tokens[d]) for d in passes}
        times = costs.times(program.shape, passes, exchanged_layers(program.shape.attention_layers), units, seen_by)
    counts = {d: len(work[d]) for d in busy}
    return _Offers({d: before[d] + own[d] for d in busy}, level(counts, times, work), first, work)


def balance(slots: Sequence[ExchangeSlot]) -> float:
    """The largest difference between two working devices of a slot after the exchange, in units."""
    return max(max(s.after[d] for d in s.passes) - min(s.after[d] for d in s.passes) for s in slots)


# Adds the attention context exchange of a plan to a program.

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
        plan: from ``plan_exchange``; made with ``options`` if absent.
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
    return Op(
        kind=kind,
        microbatch=move.microbatch,
        slice=move.slice,
        chunk=move.chunk,
        peer=peer,
        peer_chunk=move.chunk,
        start=move.start,
        stop=move.stop,
    )


def _sends(move: Move, backward: bool) -> list[tuple[int, Op]]:
    kind = _KINDS[backward][3]
    return [(move.owner, _op(kind, replace(move, start=a, stop=b), move.helper)) for a, b in move.sent]
