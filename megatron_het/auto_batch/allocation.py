"""Who runs which passes: Poplar's algorithm 2, from one performance curve per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_het.auto_batch.curve import Curve

MOST_PASSES = 4096
"""Passes per iteration that are tried where all devices run equally many."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The passes of every device, in order.

    Attributes:
        passes: Sizes in sequences, per device.
        predicted_s: Compute seconds of an iteration, per device.
        iteration_s: Seconds of the slowest, with the communication of passes.
    """

    passes: tuple[tuple[int, ...], ...]
    predicted_s: tuple[float, ...]
    iteration_s: float


def allocate(curves: Sequence[Curve], global_batch: int, zero: int, communication_s: float = 0.0) -> Allocation:
    """Poplar's allocation.

    Args:
        curves: One per device.
        global_batch: Sequences of an iteration.
        zero: ZeRO stage, 0 to 3.
        communication_s: Of one pass, for ZeRO-2 and 3.

    Raises:
        ValueError: Fewer sequences than devices.
    """
    if global_batch < len(curves):
        raise ValueError(f"a batch of {global_batch} sequences is not enough for {len(curves)} devices")
    if zero < 2:
        passes = accumulated(curves, global_batch)
        predicted = [sum(map(c.at, own)) for c, own in zip(curves, passes, strict=True)]
        return Allocation(tuple(map(tuple, passes)), tuple(predicted), max(predicted))
    steps = synchronised(curves, global_batch, communication_s)
    passes = [[size for size in row if size] for row in zip(*steps, strict=True)]
    predicted = [sum(map(c.at, own)) for c, own in zip(curves, passes, strict=True)]
    return Allocation(tuple(map(tuple, passes)), tuple(predicted), _seconds(curves, steps, communication_s))


def accumulated(curves: Sequence[Curve], global_batch: int) -> list[list[int]]:
    """Algorithm 2 for ZeRO-0 and 1, where devices meet once per iteration.

    Every device gets its share by its peak speed; what is left over goes, sequence by sequence, to the device that
    would end first.  Then sequences move from the last to the first as long as the last one ends earlier by it:
    the last, smaller pass of a device is slower per sequence than its peak.

    Returns:
        Sizes of the passes of every device.
    """
    speeds = [c.best / c.at(c.best) for c in curves]
    counts = [max(1, int(global_batch * speed / sum(speeds))) for speed in speeds]
    while sum(counts) > global_batch:
        counts[max((i for i, n in enumerate(counts) if n > 1), key=lambda i: counts[i] / speeds[i])] -= 1
    for _ in range(global_batch - sum(counts)):
        i = min(range(len(curves)), key=lambda i: (curves[i].seconds_of(counts[i] + 1), i))
        counts[i] += 1
    for _ in range(global_batch):
        ends = [c.seconds_of(n) for c, n in zip(curves, counts, strict=True)]
        last = max((i for i, n in enumerate(counts) if n > 1), key=lambda i: ends[i], default=0)
        first = min(range(len(curves)), key=lambda i: (curves[i].seconds_of(counts[i] + 1), i))
        if curves[first].seconds_of(counts[first] + 1) >= ends[last] or first == last:
            break
        counts[first] += 1
        counts[last] -= 1
    return [c.passes(n) for c, n in zip(curves, counts, strict=True)]


def synchronised(curves: Sequence[Curve], global_batch: int, communication_s: float) -> list[list[int]]:
    """Algorithm 2 for ZeRO-2 and 3, where devices meet in every pass.

    Poplar tries every time of a pass and takes the largest sizes that end within it.  Here every number of passes
    is tried, with the sizes that end first: the same search, without a last pass that is nearly empty.

    Returns:
        ``sizes[pass][device]``.
    """
    fewest = -(-global_batch // sum(c.largest for c in curves))
    best: tuple[float, list[list[int]]] | None = None
    for steps in range(fewest, min(max(fewest + 1, global_batch // len(curves)), fewest + MOST_PASSES) + 1):
        even, more = divmod(global_batch, steps)
        if best is not None and steps * communication_s >= best[0]:
            break
        larger = [_one_pass(curves, even + 1)] * more if more else []
        rows = larger + [_one_pass(curves, even)] * (steps - more)
        seconds = _seconds(curves, rows, communication_s)
        if all(map(sum, zip(*rows, strict=True))) and (best is None or seconds < best[0]):
            best = (seconds, rows)
        elif best is not None and seconds > 2 * best[0]:
            break
    if best is None:  # every device needs a sequence, however slow it is
        return [[1] * len(curves), *synchronised(curves, global_batch - len(curves), communication_s)]
    return best[1]


def _one_pass(curves: Sequence[Curve], sequences: int) -> list[int]:
    """Sizes that add up to ``sequences`` and end first, none larger than what fits."""
    low, high = 0.0, max(c.seconds[-1] for c in curves)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(_within(c, middle) for c in curves) >= sequences else (middle, high)
    sizes = [_within(c, high) for c in curves]
    for _ in range(sum(sizes) - sequences):
        i = max((i for i, size in enumerate(sizes) if size), key=lambda i: curves[i].at(sizes[i]))
        sizes[i] -= 1
    return sizes


def _within(curve: Curve, seconds: float) -> int:
    """The largest pass that ends within a time."""
    low, high = 0, curve.largest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if curve.at(middle) <= seconds * (1 + 1e-9) else (low, middle - 1)
    return low


def _seconds(curves: Sequence[Curve], steps: Sequence[Sequence[int]], communication_s: float) -> float:
    return sum(max(c.at(n) for c, n in zip(curves, row, strict=True)) + communication_s for row in steps)
