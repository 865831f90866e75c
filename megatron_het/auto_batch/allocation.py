"""Allocation of passes to devices: Poplar's algorithm 2, from one performance curve per device."""

import bisect
import functools
import heapq
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_het.plan import Plan, PlanError, Replica, ScheduleSpec, Stage, check_plan
from megatron_het.plan.run_config import no_eval_interval, plan_from_flags, without_flags

# Time of a pass's collectives: ZeRO-2 reduces gradients after each pass, ZeRO-3 also gathers parameters twice.

SIZES_BYTES = (1 << 16, 1 << 23)  # sizes at which an all-gather and a reduce-scatter are measured


def pass_seconds(zero: int, seconds: Mapping[str, list[float]], amounts: Mapping[str, int]) -> float:
    """Seconds of the collectives of one pass, without overlap with compute (Poplar, section 3.2).

    Args:
        seconds: Result of ``measure.measure_links``.
        amounts: ``parameter_bytes`` and ``gradient_bytes`` of the model, and ``buckets``, the number of collectives.
    """
    if zero < 2 or not seconds:
        return 0.0
    gathers = 2 * _one(seconds["gather"], amounts["parameter_bytes"], amounts["buckets"]) if zero == 3 else 0.0
    return gathers + _one(seconds["reduce"], amounts["gradient_bytes"], amounts["buckets"])


def _one(times: list[float], size_bytes: int, count: int) -> float:
    """Seconds of ``count`` collectives with ``size_bytes`` in all: latencies plus transfer time."""
    small, large = SIZES_BYTES
    each_s = max(0.0, (times[1] - times[0]) / (large - small))
    latency_s = max(0.0, times[0] - each_s * small)
    return count * latency_s + size_bytes * each_s


# Performance curves: seconds of a pass as a function of its number of sequences (Poplar, section 3.2, figure 6).


@dataclass(frozen=True)
class Curve:
    """Seconds of one forward and backward pass on one device: non-decreasing, linear between measured sizes.

    Poplar fits a cubic spline; a spline oscillates between noisy points, and could predict that a larger pass is
    faster than a smaller one.
    """

    sizes: tuple[int, ...]  # measured sizes, ascending; the last one is the largest pass that fits the device's memory
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, float]) -> "Curve":
        """The curve through measured points; a point below that of a smaller size is raised to it.

        Raises:
            ValueError: No point, or a size or time that is not positive.
        """
        if not points or min(points.values()) <= 0 or min(points) < 1:
            raise ValueError(f"a curve needs positive sizes and times, found {dict(points)}")
        sizes = tuple(sorted(points))
        seconds: list[float] = []
        for size in sizes:
            seconds.append(max(points[size], seconds[-1] if seconds else 0.0))
        return cls(sizes, tuple(seconds))

    @classmethod
    def of_passes(cls, points: Mapping[int, Sequence[float]]) -> "Curve":
        """The curve through the mean times of repeated passes.

        An iteration is a sum of passes.  On a time-sliced device a short pass either runs at full speed or includes
        a whole time slice of another process.  The median would ignore these slices.

        Args:
            points: Seconds of the passes of each size.

        Raises:
            ValueError: As for :meth:`of`, or a size without a pass.
        """
        if not all(points.values()):
            raise ValueError(f"a curve needs a pass of every size, found {dict(points)}")
        return cls.of({size: statistics.fmean(found) for size, found in points.items()})

    @property
    def largest(self) -> int:
        """Sequences of the largest pass that fits."""
        return self.sizes[-1]

    def at(self, size: int) -> float:
        """Seconds of a pass of ``size`` sequences; 0 for none.

        Raises:
            ValueError: The pass is larger than :attr:`largest`.
        """
        if size > self.largest:
            raise ValueError(f"a pass of {size} sequences does not fit; the largest has {self.largest}")
        if size <= 0:
            return 0.0
        if size <= self.sizes[0]:
            return self.seconds[0] * size / self.sizes[0]
        i = bisect.bisect_left(self.sizes, size)
        (a, b), (x, y) = self.sizes[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return x + (y - x) * (size - a) / (b - a)

    @functools.cached_property
    def best(self) -> int:
        """Size of the pass with the most sequences per second; the smallest of equal ones."""
        return max(range(1, self.largest + 1), key=lambda size: (size / self.at(size), -size))

    def passes(self, count: int) -> list[int]:
        """Sizes of passes with ``count`` sequences in all, largest first: the fastest of a few ways to divide them."""
        if count <= self.best:
            return [count] if count else []
        full, rest = divmod(count, self.best)
        ways = [[self.best] * full + ([rest] if rest else [])]
        if rest and self.best + rest <= self.largest:
            ways.append([self.best + rest] + [self.best] * (full - 1))
        for number in {full, full + 1}:  # of nearly equal size
            even, more = divmod(count, number)
            if even + bool(more) <= self.largest:
                ways.append([even + 1] * more + [even] * (number - more))
        return min(ways, key=lambda way: sum(map(self.at, way)))

    def seconds_of(self, count: int) -> float:
        """Seconds for ``count`` sequences, in the passes of :meth:`passes`."""
        return sum(map(self.at, self.passes(count)))


MOST_PASSES = 4096  # numbers of passes per iteration that are tried if all devices run equally many (ZeRO-2 and 3)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The passes of every device, in order."""

    passes: tuple[tuple[int, ...], ...]  # sizes in sequences, per device
    predicted_s: tuple[float, ...]  # compute seconds of an iteration, per device
    iteration_s: float  # seconds of an iteration: of the slowest device, with the communication of passes


def allocate(curves: Sequence[Curve], global_batch: int, zero: int, communication_s: float = 0.0) -> Allocation:
    """Returns Poplar's allocation of an iteration's sequences to devices.

    Args:
        curves: One per device.
        global_batch: Sequences of an iteration.
        zero: ZeRO stage, 0 to 3.
        communication_s: Seconds of one pass's collectives, for ZeRO-2 and 3.

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
    """Passes of every device by Algorithm 2 for ZeRO-0 and 1, where devices synchronise once per iteration.

    Every device gets a share in proportion to its peak speed.  The sequences left by rounding go one by one to the
    device that would end first with it.  Then sequences move from the last device to the first as long as this
    shortens the iteration, because the smaller last pass of a device is slower per sequence than its peak.
    """
    speeds = [c.best / c.at(c.best) for c in curves]
    together = sum(speeds)
    counts = [max(1, int(global_batch * speed / together)) for speed in speeds]
    most = [(-n / speeds[i], i) for i, n in enumerate(counts) if n > 1]
    heapq.heapify(most)
    for _ in range(sum(counts) - global_batch):
        i = most[0][1]
        counts[i] -= 1
        if counts[i] > 1:
            heapq.heapreplace(most, (-counts[i] / speeds[i], i))
        else:
            heapq.heappop(most)
    ends = _Ends(curves, counts)
    for _ in range(global_batch - sum(counts)):
        ends.give(ends.first()[1])
    for _ in range(global_batch):
        (ends_at, first), (ended, last) = ends.first(), ends.last()
        if ends_at >= ended or first == last:
            break
        ends.give(first)
        ends.take(last)
    return [c.passes(n) for c, n in zip(curves, counts, strict=True)]


class _Ends:
    """End times of devices, now and with one more sequence, in heaps because there may be thousands of devices.

    An entry is outdated if its device has another number of sequences by now; it is removed when it is at the top.

    Args:
        counts: Sequences of every device; this list is changed.
    """

    def __init__(self, curves: Sequence[Curve], counts: list[int]) -> None:
        self._counts = counts
        same = {curve: curve for curve in curves}  # devices with equal curves share the cached seconds
        self._curves = [same[curve] for curve in curves]
        self._known: dict[tuple[int, int], float] = {}
        self._with_more = [(self._seconds(i, n + 1), i, n) for i, n in enumerate(counts)]
        self._now = [(-self._seconds(i, n), i, n) for i, n in enumerate(counts) if n > 1]
        heapq.heapify(self._with_more)
        heapq.heapify(self._now)

    def _seconds(self, i: int, count: int) -> float:
        key = id(self._curves[i]), count
        if key not in self._known:
            self._known[key] = self._curves[i].seconds_of(count)
        return self._known[key]

    def first(self) -> tuple[float, int]:
        """End time and number of the device that would end first with one more sequence."""
        while self._counts[self._with_more[0][1]] != self._with_more[0][2]:
            heapq.heappop(self._with_more)
        return self._with_more[0][:2]

    def last(self) -> tuple[float, int]:
        """End time and number of the last device among those with several sequences; (0, -1) if there is none."""
        while self._now and self._counts[self._now[0][1]] != self._now[0][2]:
            heapq.heappop(self._now)
        return (-self._now[0][0], self._now[0][1]) if self._now else (0.0, -1)

    def give(self, i: int) -> None:
        """Add a sequence to a device."""
        self._change(i, 1)

    def take(self, i: int) -> None:
        """Take a sequence from a device."""
        self._change(i, -1)

    def _change(self, i: int, more: int) -> None:
        self._counts[i] += more
        count = self._counts[i]
        heapq.heappush(self._with_more, (self._seconds(i, count + 1), i, count))
        if count > 1:
            heapq.heappush(self._now, (-self._seconds(i, count), i, count))


def synchronised(curves: Sequence[Curve], global_batch: int, communication_s: float) -> list[list[int]]:
    """``sizes[pass][device]`` by Algorithm 2 for ZeRO-2 and 3, where devices synchronise in every pass.

    Poplar tries durations of a pass, each with the largest sizes that end within it.  Here numbers of passes are
    tried, each with the sizes that end first.  The search is equivalent, but leaves no nearly empty last pass.
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
    if best is None:  # every number left some device without a sequence: give each one in a first pass
        return [[1] * len(curves), *synchronised(curves, global_batch - len(curves), communication_s)]
    return best[1]


def _one_pass(curves: Sequence[Curve], sequences: int) -> list[int]:
    """Sizes by device that add up to ``sequences``, fit, and end first; a bisection on the pass's duration."""
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
    low, high = 0, curve.largest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if curve.at(middle) <= seconds * (1 + 1e-9) else (low, middle - 1)
    return low


def _seconds(curves: Sequence[Curve], steps: Sequence[Sequence[int]], communication_s: float) -> float:
    return sum(max(c.at(n) for c, n in zip(curves, row, strict=True)) + communication_s for row in steps)


# The plans of automatic batches: those for measuring, and the one for the training.


ZERO_STAGES = (0, 1, 2, 3)
_FLAG = "--het-auto-batch"
_CHUNKS = 16  # most chunks into which the layers are divided under ZeRO-2 and 3
_IMPLIED = "--calculate-per-token-loss"
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def base_plan(words: Sequence[str], world_size: int) -> tuple[Plan, list[str]]:
    """The plan of Megatron's flags with one sequence per pass, and the command-line words for Megatron.

    Raises:
        PlanError: A flag is missing, or sets a size that is measured or divides the model.
    """
    given = {word.split("=", 1)[0]: word for word in words}
    if "--micro-batch-size" in given:
        raise PlanError("--micro-batch-size", "given", f"{_FLAG} measures it", "Leave the flag out")
    if "--global-batch-size" not in given:
        raise PlanError("--global-batch-size", None, f"required with {_FLAG}", "Say how many sequences a step has")
    # As many passes as ranks for any batch: only the model and the numerics are taken from this plan.
    position = next(i for i, word in enumerate(words) if word.split("=", 1)[0] == "--global-batch-size")
    value = given["--global-batch-size"].partition("=")[2] or next(iter(words[position + 1 : position + 2]), "")
    if not value.isdecimal() or len(value) > 9 or int(value) < 1:
        raise PlanError("--global-batch-size", value, "must be a positive number of sequences")
    size = int(value)
    if size < world_size:
        raise PlanError(
            "--global-batch-size", size, f"is less than one sequence for each of {world_size} ranks", "Use fewer ranks"
        )
    if {"--train-iters", "--train-samples"} & given.keys() and not {"--eval-interval", "--skip-train"} & given.keys():
        raise no_eval_interval(None)
    rest = without_flags(words, "--global-batch-size")
    shape = [*rest, "--micro-batch-size", "1", "--global-batch-size", str(world_size)]
    plan, _ = plan_from_flags(shape, world_size, ScheduleSpec("data-parallel"))
    if len(plan.stages) > 1 or plan.stages[0].replicas[0].ranks != (0,) or len(plan.stages[0].layers) > 1:
        raise PlanError(
            _FLAG, "given", "is for data parallelism alone", "Leave out tensor, pipeline and context parallel sizes"
        )
    plan = replace(plan, training=replace(plan.training, global_batch_size=size))
    return plan, rest + ([] if _IMPLIED in given else [_IMPLIED])


def with_zero(base: Plan, zero: int, passes: Sequence[Sequence[int]], devices: Sequence[str]) -> Plan:
    """The plan of a ZeRO stage in which every rank runs passes of these sizes.

    Args:
        base: Model and numerics.
        passes: Sizes by rank, in order.
        devices: Name of each rank's device.
    """
    rows = [list(own) for own in passes]
    owners = [(turn, rank) for rank, own in enumerate(rows) for turn in range(len(own))]
    ids: list[list[int]] = [[] for _ in rows]
    sizes = []
    for m, (turn, rank) in enumerate(sorted(owners)):  # samples go to the ranks round-robin
        ids[rank].append(m)
        sizes.append(rows[rank][turn])
    replicas = tuple(
        Replica((rank,), tuple(own), device=device) for rank, (own, device) in enumerate(zip(ids, devices, strict=True))
    )
    training = replace(
        base.training,
        micro_batch_size=max(sizes),
        micro_batch_sizes=tuple(sizes),
        global_batch_size=sum(sizes),
        distributed_optimizer=zero > 0,
    )
    parameters = {"window": True, "zero": zero} if zero > 1 else {}
    layers = _chunks(base) if zero > 1 else base.stages[0].layers
    plan = replace(
        base, training=training, stages=(Stage(layers, replicas),), schedule=ScheduleSpec("data-parallel", parameters)
    )
    check_plan(plan)
    return plan


def extra_words(plan: Plan, words: Sequence[str]) -> list[str]:
    """Flags of Megatron that the plan's ZeRO stage needs and that are missing in ``words``."""
    given = {word.split("=", 1)[0] for word in words}
    saves = given & {"--save", "--load"}
    return [_RESHARDABLE] if plan.training.distributed_optimizer and saves and _RESHARDABLE not in given else []


def _chunks(base: Plan) -> tuple[int, ...]:
    """Layers per chunk under ZeRO-2 and 3, nearly equal."""
    layers = base.model.num_layers
    count = min(layers, _CHUNKS)
    even, more = divmod(layers, count)
    return (even + 1,) * more + (even,) * (count - more)
