"""1F1B (PipeDream-Flush), GPipe, interleaved 1F1B and Zorse's ministages; depths of 1F1B across slow links.

Stages may have one or several replicas.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from megatron_het.schedule.generators.listing import (
    Part,
    Speeds,
    alternate,
    by_part,
    compute_ops,
    equal_chunks,
    forward_program,
    in_order,
    in_turns,
    merge,
    most_chunks,
    parts_of,
    require,
    require_all,
    require_order,
    single_replicas,
)
from megatron_het.schedule.ir import Kind, Op, Program, Shape


def _check(name: str, shape: Shape) -> None:
    require(name, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(name, all(len(c) == 1 for c in shape.layers), "every stage has exactly one chunk (use interleaved)")


def _orders(shape: Shape, kind: Kind) -> list[list[Op]]:
    return [compute_ops(kind, shape.microbatches_of(d), (0,), 0) for d in range(len(shape.devices))]


SLACK = 1.0  # default of ``slack`` in :func:`in_flight_limits`


def in_flight_limits(shape: Shape, slack: float = SLACK, depths: Sequence[int] = ()) -> list[int]:
    """Microbatches that each device may hold between forward and backward in 1F1B.

    Stages after ``s`` keep one microbatch per device busy; a device of stage ``s`` feeds them in
    proportion to its share of the microbatches, and works on one itself.  With one replica per stage this
    is ``stages - s``, as in Megatron.

    Where stages divide the microbatches differently, their devices become free at times that do not match.
    They may then hold ``slack`` times as many in addition, so that a device finds its next input ready.  Stages that
    divide them equally form fixed pipelines that run in step; these get no slack.

    ``depths[s]`` is the number of microbatches in flight that every replica of stage ``s + 1`` adds to the earlier
    stages; 1 everywhere by default.
    """
    spread = 1.0 if len(set(shape.route)) == 1 else 1.0 + slack
    depths = depths or (1,) * (shape.stages - 1)
    later = [sum(n * depth for n, depth in zip(shape.replicas[s + 1 :], depths[s:])) for s in range(shape.stages)]
    shares = [len(shape.microbatches_of(d)) / shape.microbatches for d in range(len(shape.devices))]
    return [1 + math.ceil(spread * share * later[d.stage] - 1e-9) for share, d in zip(shares, shape.devices)]


def one_f_one_b(
    shape: Shape,
    *,
    forward_only: bool = False,
    speeds: Sequence[float] | None = None,
    slack: float = SLACK,
    order: str = "greedy",
    depths: Sequence[int] = (),
) -> Program:
    """1F1B.

    With one replica per stage the order is Megatron's: ``stages - 1 - stage`` warm-up forwards, then pairs
    of a forward and a backward.  Replicas that fall into separate pipelines each get the order of their
    pipeline alone (:mod:`~megatron_het.schedule.generators.listing`).  Other replicas get their order from
    a simulation of the iteration (:func:`~megatron_het.schedule.generators.listing.merge`): forwards and
    backwards ascend in the microbatch, and their number in flight is bounded by :func:`in_flight_limits`.

    Across a slow link a stage waits for the round trip of each microbatch, unless the stages before the
    link have more microbatches in flight.  ``depths`` sets how many.

    Args:
        shape: one chunk per stage, no slices.
        slack: share of additional microbatches in flight where stages divide them differently, 0 for least memory.
        order: how that simulation decides, one of :data:`~megatron_het.schedule.generators.listing.ORDERS`.
        depths: by boundary between stages, how many more microbatches the stage before it has in flight than the
            stage after it, at least 1; ``()`` stands for 1 everywhere, which is Megatron's order.

    Raises:
        ValueError: the shape has chunks or slices, ``speeds`` do not fit the devices, ``slack`` is negative,
            ``order`` is unknown or cannot run, or ``depths`` are not one positive number per boundary.
    """
    _check_all(shape, slack, order, depths)
    if forward_only:
        return forward_program("1f1b", shape, _orders(shape, Kind.FORWARD))
    Speeds.of(shape, speeds)  # checks them
    given = [1.0] * len(shape.devices) if speeds is None else speeds

    def make(part: Shape, own: Sequence[float]) -> tuple[tuple[Op, ...], ...]:
        forward, backward = _orders(part, Kind.FORWARD), _orders(part, Kind.BACKWARD)
        found = ways(part, own, slack=slack, order=order, depths=depths)
        return tuple(in_order(f, b, mine) for f, b, mine in zip(forward, backward, found))

    return Program("1f1b", shape, by_part(shape, parts_of(shape), given, make))


def _check_all(shape: Shape, slack: float, order: str, depths: Sequence[int]) -> None:
    _check("1f1b", shape)
    valid = isinstance(slack, (int, float)) and 0 <= slack < math.inf
    require("1f1b", valid, f"slack = {slack!r}: must be a number of at least 0")
    require_order("1f1b", order)
    fits = not depths or (len(depths) == shape.stages - 1 and all(isinstance(n, int) and n > 0 for n in depths))
    require("1f1b", fits, f"depths = {depths!r}: must be one positive whole number per boundary of stages")


Ways = Sequence[Sequence[int]]
"""For each device, whether each of its operations is a backward; both kinds ascend in the microbatch."""


def merged(shape: Shape, limits: Sequence[int], times: Speeds, order: str) -> Ways:
    """:data:`Ways` of stages with one chunk, decided by :func:`~megatron_het.schedule.generators.listing.merge`."""
    found = merge(shape, _orders(shape, Kind.FORWARD), _orders(shape, Kind.BACKWARD), limits, times, order)
    return [[op.kind is Kind.BACKWARD for op in own] for own in found]


def ways(
    part: Shape,
    speeds: Sequence[float],
    *,
    slack: float = SLACK,
    order: str = "greedy",
    depths: Sequence[int] = (),
    decide: Callable[[Shape, Sequence[int], Speeds, str], Ways] = merged,
) -> Ways:
    """The order of one part of a shape (see ``generators.listing``), by device; raises ValueError.

    Args:
        part: a shape whose devices form one part.
        speeds, slack, order, depths: as in :func:`one_f_one_b`.
        decide: merges the orders where a stage has several replicas; returns the same as :func:`merged`, or too few
            operations where that raises.
    """
    _check_all(part, slack, order, depths)
    if single_replicas(part):
        warmup = [sum(depths[s:]) if depths else part.stages - 1 - s for s in range(part.stages)]
        return [in_turns(part.microbatches, n) for n in warmup]
    limits = in_flight_limits(part, slack, depths)
    found = decide(part, limits, Speeds.of(part, speeds), order)
    require_all(part, found, [2 * len(part.microbatches_of(d)) for d in range(len(part.devices))], limits, order)
    return found


def gpipe(shape: Shape, *, forward_only: bool = False) -> Program:
    """GPipe: all forwards, then all backwards in the same order.

    Raises:
        ValueError: the shape has chunks or slices.
    """
    _check("gpipe", shape)
    forward = _orders(shape, Kind.FORWARD)
    if forward_only:
        return forward_program("gpipe", shape, forward)
    backward = _orders(shape, Kind.BACKWARD)
    return Program("gpipe", shape, tuple(tuple(f + b) for f, b in zip(forward, backward)))


# No pipeline: every replica runs its microbatches one after the other (Poplar, section 3).

DATA_PARALLEL = "data-parallel"


def data_parallel(shape: Shape, *, forward_only: bool = False) -> Program:
    """Each microbatch forward through all chunks and back, then the next microbatch.

    At most one microbatch's activations are held, and the parameters of one chunk after the other are needed, as
    ZeRO-2 and 3 require (``features/window/passes.py``).

    Args:
        shape: one stage; any chunks and replicas, no slices.

    Raises:
        ValueError: several stages, slices, or the V placement.
    """
    require(DATA_PARALLEL, shape.stages == 1, f"stages = {shape.stages}: it is for plans of one stage")
    require(DATA_PARALLEL, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(DATA_PARALLEL, shape.placement == "loop", f"placement = {shape.placement}: must be loop")
    chunks = range(len(shape.layers[0]))
    orders = []
    for d in range(len(shape.devices)):
        order = []
        for m in shape.microbatches_of(d):
            order += [op for c in chunks for op in compute_ops(Kind.FORWARD, (m,), (0,), c)]
            if not forward_only:
                order += [op for c in reversed(chunks) for op in compute_ops(Kind.BACKWARD, (m,), (0,), c)]
        orders.append(order)
    if forward_only:
        return forward_program(DATA_PARALLEL, shape, orders)
    return Program(DATA_PARALLEL, shape, tuple(map(tuple, orders)))


# Zorse's schedule: GPipe over ministages (Zorse, section 4.1.1).

MINISTAGE = "ministage"


def ministage(shape: Shape, *, forward_only: bool = False) -> Program:
    """All microbatches of a ministage, then the next ministage; backwards from the last ministage to the first.

    A ministage is a chunk; stages may have different numbers of them, of different sizes, and any
    replicas and routes.  So parameters are needed for one ministage at a time only.

    The ministage of the loss runs each microbatch forward and back before the next one, so that the logits of one
    microbatch are held.  Hence backwards of all ministages ascend in the microbatch.

    Args:
        shape: any with ``placement`` loop and without slices.

    Raises:
        ValueError: slices, or the V placement.
    """
    require(MINISTAGE, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(MINISTAGE, shape.placement == "loop", f"placement = {shape.placement}: must be loop")
    orders: list[tuple[Op, ...]] = []
    for d, (stage, _) in enumerate(shape.devices):
        own, chunks = shape.microbatches_of(d), range(len(shape.layers[stage]))
        forward = [op for c in chunks for op in compute_ops(Kind.FORWARD, own, (0,), c)]
        backward = [op for c in reversed(chunks) for op in compute_ops(Kind.BACKWARD, own, (0,), c)]
        in_turns = len(own) if stage == shape.path[-1][0] else 0
        orders.append(tuple(forward) if forward_only else alternate(forward, backward, len(forward) - in_turns))
    return Program(MINISTAGE, shape, tuple(orders), forward_only)


INTERLEAVED = "interleaved"


def interleaved(
    shape: Shape,
    *,
    forward_only: bool = False,
    group: int | None = None,
    speeds: Sequence[float] | None = None,
    order: str = "greedy",
) -> Program:
    """Interleaved 1F1B.

    Microbatches go in groups: every chunk forwards the whole group before the next chunk does; backwards
    likewise from the last chunk.  With one replica per stage the warm-up is Megatron's,
    ``(chunks - 1) * group + 2 * (stages - 1 - stage)`` forwards; with several, the order comes from a
    simulation whose limit of forwards in flight is the same number scaled by the device's share.
    Replicas that fall into separate pipelines, each with microbatches for whole groups, get the order of
    their pipeline alone, as Megatron's data-parallel replicas do.

    Stages may have different numbers of chunks: microbatches skip a stage in the sweeps for which it has no chunk.
    Its order then comes from the simulation, and it may hold as many forwards as if it had all the chunks: a
    group passes through the chunks of other stages while its activations are held here.

    Args:
        shape: no slices.
        group: microbatches of a pipeline per group, at least the number of stages (the default).
        order: how the simulation decides, one of :data:`~megatron_het.schedule.generators.listing.ORDERS`.

    Raises:
        ValueError: slices, an unknown ``order``, or a number of microbatches that leaves
            a group smaller than the number of stages.
    """
    chunks, stages = most_chunks(shape), shape.stages
    group = stages if group is None else group
    require(INTERLEAVED, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(INTERLEAVED, shape.placement == "loop", f"placement = {shape.placement}: must be loop")
    require(INTERLEAVED, group >= stages, f"group = {group}: must be at least the {stages} stages")
    require_order(INTERLEAVED, order)
    parts = parts_of(shape)
    if not all(_whole_groups(part.shape, group) for part in parts):
        parts = [Part(tuple(range(len(shape.devices))), tuple(range(shape.microbatches)), shape)]
        require(
            INTERLEAVED,
            _whole_groups(shape, group),
            f"{shape.microbatches} microbatches leave a group of {shape.microbatches % group}, "
            f"fewer than the {stages} stages",
        )
    Speeds.of(shape, speeds)  # checks them
    given = [1.0] * len(shape.devices) if speeds is None else speeds

    def make(part: Shape, own: Sequence[float]) -> tuple[tuple[Op, ...], ...]:
        forward = [_order(part, d, group, Kind.FORWARD) for d in range(len(part.devices))]
        if forward_only:
            return tuple(map(tuple, forward))
        backward = [_order(part, d, group, Kind.BACKWARD) for d in range(len(part.devices))]
        if single_replicas(part) and equal_chunks(part):
            # Megatron's forwards before the first backward.
            first, each = (chunks - 1) * group * (chunks > 1), 1 + (chunks > 1)
            warmup = (first + each * (stages - 1 - s) for s in range(stages))
            return tuple(alternate(f, b, w) for f, b, w in zip(forward, backward, warmup))
        return merge(part, forward, backward, _limits(part, chunks, group), Speeds.of(part, own), order)

    return Program(INTERLEAVED, shape, by_part(shape, parts, given, make), forward_only)


def _whole_groups(shape: Shape, group: int) -> bool:
    """Whether the last group of microbatches has at least as many as there are stages."""
    rest = shape.microbatches % group
    return most_chunks(shape) == 1 or rest == 0 or rest >= shape.stages


def _limits(shape: Shape, chunks: int, group: int) -> list[int]:
    """Forwards in flight on every device: Megatron's number, scaled by the device's share."""
    limits = []
    for d, (stage, _) in enumerate(shape.devices):
        own = shape.microbatches_of(d)
        largest = max((sum(m // group == g for m in own) for g in range(-(-shape.microbatches // group))), default=1)
        share = len(own) / shape.microbatches
        ahead = 2 * math.ceil(share * sum(shape.replicas[stage + 1 :]) - 1e-9)
        limits.append((chunks - 1) * largest + ahead + 1)
    return limits


def _order(shape: Shape, device: int, group: int, kind: Kind) -> list[Op]:
    own = shape.microbatches_of(device)
    chunks = range(len(shape.layers[shape.devices[device].stage]))
    order: list[Op] = []
    for first in range(0, shape.microbatches, group):
        members = [m for m in own if first <= m < first + group]
        for chunk in chunks if kind == Kind.FORWARD else reversed(chunks):
            order += compute_ops(kind, members, (0,), chunk)
    return order


# How many microbatches 1F1B has in flight across slow links.
#
# Under 1F1B a stage has one microbatch more in flight than the stage after it.  Where a transfer between the two takes
# long, both stages idle.  More microbatches in flight before the slow boundary fill that time, but their
# activations need memory.  Their number (the depth) is chosen here, boundary by boundary, by simulation.

FASTER = 0.005  # other depths must shorten the iteration by this share, because they take memory
SAME = 0.001  # smaller depths are taken if they lengthen the iteration by no more than this share
NOTICEABLE = 0.1  # a boundary is slow if its round trip takes more than this share of the slowest stage's time
_MORE = (0, 1, 2)
_MOST_CHANGES = 24  # most simulations for changing the depths of single boundaries
_MOST_STEPS = 8  # most simulations for making depths smaller again
_ALMOST_FREE, _HALF = 0.1, 0.5


def published_depths(stage_s: Sequence[float], transfer_s: Sequence[float], slow: Sequence[bool]) -> tuple[int, ...]:
    """The rule of HARP (EuroSys 2026), as a baseline.

    Args:
        stage_s: Seconds that each stage needs for one microbatch, forward and backward.
        transfer_s: Seconds of a transfer across each boundary between stages.
        slow: Which boundaries lie between clusters.

    Returns:
        For each boundary, the number of microbatches in flight that the stage before it adds: 1, and between clusters
        another 1 if the transfer takes less than a tenth of the slowest stage's time, 2 below a half, else 3.
    """
    longest = max(stage_s)
    out = []
    for seconds, is_slow in zip(transfer_s, slow, strict=True):
        more = 1 if seconds < _ALMOST_FREE * longest else 2 if seconds < _HALF * longest else 3
        out.append(1 + (more if is_slow else 0))
    return tuple(out)


def choose_depths(
    stage_s: Sequence[float], transfer_s: Sequence[float], time_of: Callable[[tuple[int, ...]], float | None]
) -> tuple[int, ...]:
    """The smallest depths with which the iteration is shortest.

    Args:
        stage_s: Seconds that each stage needs for one microbatch, forward and backward.
        transfer_s: Seconds of a transfer across each boundary between stages.
        time_of: Simulated seconds of an iteration with these depths; None where they do not fit into memory.

    Returns:
        One number per boundary, 1 for Megatron's order; ``()`` where no other depths shorten the iteration.
    """
    plain = (1,) * len(transfer_s)
    longest = max(stage_s)
    slow = [b for b, seconds in enumerate(transfer_s) if 2 * seconds > NOTICEABLE * longest]
    if not slow:
        return ()
    search = _Search(time_of)
    start = search.time(plain)
    best = plain
    hidden = {b: math.ceil(2 * transfer_s[b] / longest) for b in slow}
    for more in _MORE:
        best = search.better(best, tuple(1 + hidden[b] + more if b in hidden else 1 for b in range(len(plain))))
    rule = published_depths(stage_s, transfer_s, [b in hidden for b in range(len(plain))])
    best = _one_by_one(search, search.better(best, rule), slow)
    if start is not None and search.seconds(best) > start * (1 - FASTER):
        return ()
    best = _smallest(search, best, hidden)
    return best if best != plain else ()


def _one_by_one(search: "_Search", best: tuple[int, ...], slow: Sequence[int]) -> tuple[int, ...]:
    """Change the depths of single boundaries by one, as long as that is faster."""
    left, is_better = _MOST_CHANGES, True
    while is_better:
        is_better = False
        for b, by in itertools.product(slow, (-1, 1)):
            other = (*best[:b], max(1, best[b] + by), *best[b + 1 :])
            left -= 1
            if left >= 0 and search.seconds(other) < search.seconds(best) * (1 - SAME):
                best, is_better = other, True
    return best


def _smallest(search: "_Search", best: tuple[int, ...], hidden: Mapping[int, int]) -> tuple[int, ...]:
    """Smaller depths that are as fast.

    Boundaries whose transfers hide behind equally many microbatches have one depth, so that a long pipeline needs no
    more simulations than a short one.
    """
    steps = _MOST_STEPS
    for level in sorted(set(hidden.values()), reverse=True):
        alike = [b for b, needed in hidden.items() if needed == level]
        while steps and all(best[b] > 1 for b in alike):
            steps -= 1
            smaller = tuple(depth - (b in alike) for b, depth in enumerate(best))
            if search.seconds(smaller) > search.seconds(best) * (1 + SAME):
                break
            best = smaller
    return best


class _Search:
    """Cache of simulated times."""

    def __init__(self, time_of: Callable[[tuple[int, ...]], float | None]) -> None:
        self._time_of = time_of
        self._known: dict[tuple[int, ...], float | None] = {}

    def time(self, depths: tuple[int, ...]) -> float | None:
        """Seconds, None where the depths do not fit."""
        if depths not in self._known:
            self._known[depths] = self._time_of(depths)
        return self._known[depths]

    def seconds(self, depths: tuple[int, ...]) -> float:
        """Seconds, infinite where the depths do not fit."""
        found = self.time(depths)
        return float("inf") if found is None else found

    def better(self, best: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        """The faster of two."""
        return other if self.seconds(other) < self.seconds(best) else best
