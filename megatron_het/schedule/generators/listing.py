"""Shared parts of the generators: checks of a shape, and merging a forward and a backward order."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_het.schedule.deps import Dependencies, produces
from megatron_het.schedule.ir import Kind, Op, Program, Shape

# Parts of a shape that exchange nothing with each other: each is scheduled as if it were alone.
#
# Replicas of neighbouring stages belong together when a microbatch goes from one to the other.  Where the
# microbatches are routed so that the replicas form several such parts, each part is a pipeline of its own.
# Equal parts get equal orders, and a part with one replica per stage gets the order of a plain pipeline.

Orders = tuple[tuple[Op, ...], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a shape."""

    devices: tuple[int, ...]  # its devices in the whole shape, stage-major, in the order of ``shape.devices``
    microbatches: tuple[int, ...]  # its microbatches in the whole shape, ascending
    shape: Shape  # the part alone


def parts_of(shape: Shape) -> list[Part]:
    """The parts of a shape, by their first device.  Replicas without microbatches belong to none."""
    leader = list(range(len(shape.devices)))

    def find(device: int) -> int:
        while leader[device] != device:
            leader[device] = leader[leader[device]]
            device = leader[device]
        return device

    paths = list(zip(*([first + r for r in row] for first, row in zip(shape.first_device, shape.route))))
    different = set(paths)
    used = sorted({device for path in different for device in path})
    apart = len(used) - 1
    for path in different:
        for device in path[1:]:
            a, b = find(path[0]), find(device)
            if a != b:
                leader[max(a, b)] = min(a, b)
                apart -= 1
        if not apart:  # all are one part, as usual where widths differ
            every = range(shape.microbatches)
            return [Part(tuple(used), tuple(every), _alone(shape, used, every))]
    members: dict[int, list[int]] = {}
    for m, path in enumerate(paths):
        members.setdefault(find(path[0]), []).append(m)
    devices: dict[int, list[int]] = {}
    for device in used:
        devices.setdefault(find(device), []).append(device)
    return [
        Part(tuple(devices[first]), tuple(members[first]), _alone(shape, devices[first], members[first]))
        for first in sorted(members)
    ]


def _alone(shape: Shape, devices: Sequence[int], microbatches: Sequence[int]) -> Shape:
    if len(devices) == len(shape.devices) and len(microbatches) == shape.microbatches:
        return shape
    by_stage: list[list[int]] = [[] for _ in range(shape.stages)]
    for d in devices:
        by_stage[shape.devices[d].stage].append(shape.devices[d].replica)
    new = [{replica: i for i, replica in enumerate(row)} for row in by_stage]
    route = tuple(tuple(names[row[m]] for m in microbatches) for names, row in zip(new, shape.route))
    sizes = tuple(shape.sizes[m] for m in microbatches) if shape.sizes else ()
    return replace(shape, route=route, replicas=tuple(map(len, by_stage)), sizes=sizes, companions=())


def by_part(shape: Shape, parts: Sequence[Part], speeds: Sequence[float], make: Callable[..., Orders]) -> Orders:
    """Orders of all devices, made part by part; equal parts are made once.

    Args:
        shape: the whole shape.
        parts: of the shape (:func:`parts_of`).
        make: ``make(shape, speeds)``, the orders of one part alone.
    """
    made: dict[tuple[Shape, tuple[float, ...]], Orders] = {}
    ops: list[tuple[Op, ...]] = [()] * len(shape.devices)
    every = tuple(range(shape.microbatches))
    for part in parts:
        key = part.shape, tuple(speeds[d] for d in part.devices)
        if key not in made:
            made[key] = make(*key)
        whole = part.microbatches == every  # then microbatches keep their numbers
        for device, order in zip(part.devices, made[key]):
            ops[device] = (
                order if whole else tuple([op._replace(microbatch=part.microbatches[op.microbatch]) for op in order])
            )
    return tuple(ops)


def require(schedule: str, condition: bool, message: str) -> None:
    """Raises a ValueError that names the schedule when a shape does not fit it."""
    if not condition:
        raise ValueError(f"schedule {schedule}: {message}")


def single_replicas(shape: Shape) -> bool:
    """Whether every stage has one replica, so that all devices see the same microbatches."""
    return all(count == 1 for count in shape.replicas)


def most_chunks(shape: Shape) -> int:
    """The number of chunks of the stage that has most."""
    return max(map(len, shape.layers))


def equal_chunks(shape: Shape) -> bool:
    """Whether all stages have the same number of chunks."""
    return len(set(map(len, shape.layers))) == 1


def forward_program(name: str, shape: Shape, orders: Sequence[Sequence[Op]]) -> Program:
    """The evaluation program of given forward orders."""
    return Program(name, shape, tuple(tuple(order) for order in orders), forward_only=True)


def in_turns(count: int, warmup: int) -> bytes:
    """Whether each operation is a backward: ``warmup`` forwards, pairs of a forward and a backward, backwards."""
    warmup = min(warmup, count)
    return b"\0" * warmup + b"\0\1" * (count - warmup) + b"\1" * warmup


def in_order(forward: Sequence[Op], backward: Sequence[Op], ways: Sequence[int]) -> tuple[Op, ...]:
    """Both queues merged by ``ways``: 1 takes the next backward, 0 the next forward."""
    queues = iter(forward), iter(backward)
    return tuple([next(queues[back]) for back in ways])


def alternate(forward: Sequence[Op], backward: Sequence[Op], warmup: int) -> tuple[Op, ...]:
    """``warmup`` forwards, then pairs of one forward and one backward, then the remaining backwards."""
    return in_order(forward, backward, in_turns(len(forward), warmup))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Relative durations of passes, from which a greedy order is decided."""

    forward_s: tuple[tuple[float, ...], ...]  # ``forward_s[device][chunk]``, time of one forward of one slice
    backward_s: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, shape: Shape, speeds: Sequence[float] | None = None) -> "Speeds":
        """From layers per chunk and the relative speed of each device (1 by default); backward = 2 forward.

        Raises:
            ValueError: the number of speeds differs from the number of devices, or one is not positive.
        """
        speeds = [1.0] * len(shape.devices) if speeds is None else list(speeds)
        if len(speeds) != len(shape.devices):
            raise ValueError(f"speeds: {len(speeds)} values for {len(shape.devices)} devices")
        if min(speeds) <= 0:
            raise ValueError(f"speeds: {min(speeds)} is not positive")
        forward = tuple(
            tuple(max(n, 0.01) / speed for n in shape.layers[d.stage]) for d, speed in zip(shape.devices, speeds)
        )
        return cls(forward, tuple(tuple(2 * t for t in row) for row in forward))


def merge(
    shape: Shape,
    forward: Sequence[Sequence[Op]],
    backward: Sequence[Sequence[Op]],
    limits: Sequence[int],
    speeds: Speeds,
    order: str = "greedy",
) -> tuple[tuple[Op, ...], ...]:
    """Merges each device's forward and backward order by simulating the iteration.

    Whenever a device is free it runs its next backward or its next forward, a forward only while fewer than
    ``limits[device]`` forwards wait for their backward.  The result cannot deadlock, because the simulation
    has run it.

    Raises:
        ValueError: the orders and limits cannot run (a limit below what the schedule needs).
    """
    deps = Dependencies(shape)
    ops = _MERGERS[order](deps, forward, backward, limits, speeds).run()
    require_all(shape, ops, [len(f) + len(b) for f, b in zip(forward, backward)], limits, order)
    return ops


def require_all(
    shape: Shape, ops: Sequence[Sequence[object]], wanted: Sequence[int], limits: Sequence[int], order: str
) -> None:
    """Raises a ValueError where a merge could not run all operations of a device."""
    for d, queue in enumerate(ops):
        if len(queue) < wanted[d]:
            raise ValueError(
                f"device {shape.devices[d]}: with {limits[d]} forwards in flight and order {order} it waits forever"
            )


class Loop:
    """An event loop over the times at which a device may start an operation; base of the greedy orders.

    Subclasses decide in :meth:`choose` which operation a free device runs next.
    """

    def __init__(self, deps: Dependencies, speeds: Speeds) -> None:
        count = len(deps.shape.devices)
        self.deps, self.speeds = deps, speeds
        self.free = [0.0] * count
        self.done: dict[tuple[int, tuple[int, ...]], float] = {}
        self.wanted: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self.out: list[list[Op]] = [[] for _ in range(count)]
        self.events: list[tuple[float, int]] = [(0.0, d) for d in range(count)]

    def choose(self, device: int, now: float) -> tuple[Op, float] | float | None:
        """(operation, duration) to start now, or the time at which to ask again, or None to be woken."""
        raise NotImplementedError

    def ready_at(self, device: int, op: Op) -> float | None:
        """When an operation could start on a device; None if that is not known yet: the device is then woken later."""
        at = self.free[device]
        for need in self.deps.requires(device, op):
            end = self.done.get(need)
            if end is None:
                self.wanted.setdefault(need, []).append(device)
                return None
            at = max(at, end)
        return at

    def run(self) -> tuple[tuple[Op, ...], ...]:
        """Run until no operation can start any more; returns the operations of each device in order."""
        while self.events:
            now, device = heapq.heappop(self.events)
            if now < self.free[device]:
                continue
            choice = self.choose(device, now)
            if choice is None:
                continue
            if isinstance(choice, float):
                heapq.heappush(self.events, (choice, device))
                continue
            op, seconds = choice
            self.out[device].append(op)
            self.free[device] = end = now + seconds
            made = produces(op)
            assert made is not None  # listed operations are passes
            self.done[device, made] = end
            heapq.heappush(self.events, (end, device))
            for other in self.wanted.pop((device, made), ()):
                heapq.heappush(self.events, (max(end, self.free[other]), other))
        return tuple(tuple(queue) for queue in self.out)


class _Merger(Loop):
    """Greedy: the pass that can start first; the forward on a tie, because more work depends on it."""

    ties = (0, 1)  # forward (0) and backward (1), the preferred one first

    def __init__(
        self,
        deps: Dependencies,
        forward: Sequence[Sequence[Op]],
        backward: Sequence[Sequence[Op]],
        limits: Sequence[int],
        speeds: Speeds,
    ) -> None:
        super().__init__(deps, speeds)
        self.queues, self.limits = list(zip(forward, backward)), limits
        self.next = [[0, 0] for _ in self.queues]

    def choose(self, device: int, now: float) -> tuple[Op, float] | float | None:
        at, position = self.next[device], self.queues[device]
        best: tuple[float, int] | None = None
        for which in self.ties:
            if at[which] == len(position[which]):
                continue
            if which == 0 and position[1] and at[0] - at[1] >= self.limits[device]:
                continue
            time = self.ready_at(device, position[which][at[which]])
            if time is not None and (best is None or time < best[0]):
                best = time, which
        if best is None:
            return None
        return self.take(device, now, *best)

    def take(self, device: int, now: float, time: float, which: int) -> tuple[Op, float] | float:
        """The next forward (0) or backward (1), or the time at which to ask again."""
        if time > now:
            return time
        at = self.next[device]
        op = self.queues[device][which][at[which]]
        at[which] += 1
        return op, (self.speeds.backward_s if which else self.speeds.forward_s)[device][op.chunk]


class _BackwardFirst(_Merger):
    """Greedy: the pass that can start first; the backward on a tie, so that fewer activations are held."""

    ties = (1, 0)


class _Alternating(_Merger):
    """1F1B on every replica: forwards up to the limit, then one backward and one forward in turn, waiting for each."""

    def choose(self, device: int, now: float) -> tuple[Op, float] | float | None:
        at, (forward, backward) = self.next[device], self.queues[device]
        which = 0 if at[0] < len(forward) and at[0] - at[1] < self.limits[device] else 1
        if at[which] == len((forward, backward)[which]):
            return None
        time = self.ready_at(device, (forward, backward)[which][at[which]])
        return None if time is None else self.take(device, now, time, which)


_MERGERS: dict[str, type[_Merger]] = {"greedy": _Merger, "alternating": _Alternating, "backward-first": _BackwardFirst}
ORDERS = tuple(_MERGERS)  # how :func:`merge` decides between a forward and a backward, the default first


def require_order(schedule: str, order: object) -> None:
    """Raises a ValueError for an unknown order."""
    require(schedule, order in ORDERS, f"order = {order!r}: must be one of {', '.join(ORDERS)}")


def compute_ops(kind: Kind, microbatches: Sequence[int], slices: Sequence[int], chunk: int) -> list[Op]:
    """One operation per microbatch and slice of a chunk, in the order given."""
    return [Op(kind, m, s, chunk) for m in microbatches for s in slices]
