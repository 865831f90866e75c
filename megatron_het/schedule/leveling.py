"""The context exchange as the balancer of unequal devices (beyond SlimPipe, which has equal ones).

The exchange evens out how many units of attention the devices of a slot have (``exchange.rebalance``).  Where
devices differ in speed or in layers, equal units are not equal times.  With :class:`PassCosts` the slowest pass of a
slot gives units to the device that would end first, as long as that ends the slot earlier.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_het.schedule.ir import Op, Shape

Move = tuple[int, int, int]
"""(giver, taker, units)"""
_DIAGONAL_HALVES = 1
"""A slice's attention to itself takes half as long as to another slice: kernels skip what is masked."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Holds what passes take, in any unit of time that is the same for all; backwards take as many times as long.

    Attributes:
        attention: By device, the attention of one layer and slice to the keys and values of one slice.
        rest: By device and chunk, everything else of a pass of one slice.
    """

    attention: tuple[int, ...]
    rest: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shape: Shape, attention: Sequence[int], rest: Sequence[int]) -> "PassCosts":
        """From flat lists.

        Args:
            shape: Of the program.
            attention: One figure per device.
            rest: One figure per chunk of every device, those of a device side by side.

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
        """Of every device: what it takes without attention that can be given away, and one unit of that.

        Args:
            shape: Of the program.
            passes: The pass of each device that has one in the slot; the others are idle.
            exchanged: Layers of a chunk in which attention is exchanged.
            units: Exchange units per slice.
            work: Of each pass, its attention to the slices before it and to itself, and its tokens, where slices are
                of unequal length or documents or windows limit what they see; an equal slice that sees all of another
                has 1.

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
) -> list[Move]:
    """Who gives how many units to whom, so that the last device is done as early as possible.

    One unit after the other goes from the device that ends last to the one that would end first with it, while that
    is before the giver's end.  Where units are alike nothing ends earlier than what this finds, and nobody both gives
    and takes: where a device that has taken units ends last, nobody could take them from it without ending as late.
    Where they are not, a device that has taken units gives none; what each of its helpers gets is a run of its units.

    Args:
        loads: Units that each device may give away, or 0; devices that are not named take no part.
        times: Of every device: its time without these units, and that of one unit.
        work: Of every device, how much of a whole unit each of its units is, in the order in which it gives them; None
            where they are alike.
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
    """How many units in a row add up to what is wanted, as nearly as whole units can.

    Args:
        sizes: Of the units, in their order; all of them are shared out.
        wanted: Adds up to the sum of the sizes.
    """
    until, at, found = [0.0, *itertools.accumulate(sizes)], 0, []
    for end in itertools.accumulate(wanted):
        last, at = at, min(range(at, len(until)), key=lambda i: (abs(until[i] - end), i))
        found.append(at - last)
    found[-1] += len(sizes) - at
    return found
