"""Layers per stage so that the slowest stage is as fast as possible, within memory."""

from functools import cache
from itertools import accumulate, pairwise
from math import ceil, gcd, inf
from typing import NamedTuple

from megatron_het.plan.schema import WITH_ATTENTION, layers_of
from megatron_het.schedule.generators.one_f_one_b import NOTICEABLE, SLACK

from ..costs.candidate import MEETING, Candidate, Group, GroupMemory, Stage
from ..costs.estimate import Estimator
from ..costs.layer import Spread, pool_size
from ..costs.schedules import schedule_of
from ..costs.schedules.base import Place
from ..costs.stages import rows_of, state_shards
from ..costs.unit import Unit


class Load:
    """Time of one stage as a function of its layers (microbatches split in proportion to speed)."""

    __slots__ = ("_times", "layer_s", "rates", "units")

    def __init__(self, groups: tuple[Group, ...], units: list[Unit], first: float, last: float) -> None:
        self.units = units
        # replicas of each group, seconds of a microbatch per layer and at the ends of the model
        self.rates = [(float(g.count), u.layer_f + u.layer_b, u.ends_s(first, last)) for g, u in zip(groups, units)]
        # seconds per microbatch and layer of the whole stage
        self.layer_s = 1.0 / sum([n / t for n, t, _ in self.rates])
        self._times: dict[int, float] = {}

    def time(self, layers: int) -> float:
        """Seconds per microbatch of the whole stage."""
        found = self._times.get(layers)
        if found is None:
            found = self._times[layers] = 1.0 / sum([n / (layers * t + extra) for n, t, extra in self.rates])
        return found


class _Room(NamedTuple):
    """Memory figures of a group's replicas that do not depend on later stages; they decide how many layers fit."""

    place: Place  # of one replica; fields about later stages are filled in by ``cap``
    replicas: int
    free: float  # bytes for layers and activations, the state of embedding and head taken off
    undivided_free: float  # ``free`` without that state taken off
    held_end: float  # bytes of the embedding's activations per microbatch in flight
    head: float  # bytes of logits and loss
    layer: float  # state of a layer, and gradients of its keys and values, bytes
    held_layer: float  # activations of a layer, bytes per microbatch in flight
    ends: float  # parameters of embedding and head
    parameters: float  # of a layer


class Rooms:
    """Most layers that fit the memory of every replica of a stage.

    Under a parameter window replicas of different memory may keep different shares of the state: together they
    hold one copy of it, and each replica holds the memory that is not divided.
    """

    __slots__ = ("_divided", "_like", "_may_divide", "_rooms", "_schedule", "_whole")

    def __init__(
        self,
        estimator: Estimator,
        groups: tuple[Group, ...],
        units: list[Unit],
        total: int,
        first: float,
        last: float,
        like: Candidate,
    ) -> None:
        schedule = self._schedule = schedule_of(like)
        self._like = like
        speed = sum([g.count / (u.layer_f + u.layer_b) for g, u in zip(groups, units)])
        boundary = 2 * estimator.boundary_bytes_per_sequence * like.micro_batch_size
        self._may_divide = schedule.shards_parameters and len(groups) > 1 and len({g.tp for g in groups}) == 1
        self._divided = estimator.state_per_parameter
        self._whole = schedule.whole_per_parameter(estimator, like) if self._may_divide else 0.0
        model, collected = estimator.model, 0.0
        if like.slices > 1:
            kinds = layers_of(model.pattern) if model.kinds else ""
            share = sum(kind in WITH_ATTENTION for kind in kinds) / len(kinds) if kinds else 1.0
            collected = 4.0 * like.micro_batch_size * model.seq_length * share
        self._rooms: list[_Room] = []
        of_one = like.with_(stages=(Stage(1, groups),))
        for g, u in zip(groups, units):
            shards = state_shards(estimator, of_one, 0, g, u.layer_parameters) if like.zero_stage >= 1 else 1.0
            per = schedule.state_per_parameter(estimator, like, g.count, shards)
            kept = u.reserved_bytes + u.workspace_bytes / like.slices + boundary
            free = u.capacity_bytes * estimator.memory_margin - kept
            ends = first * u.embedding_parameters + last * u.head_parameters
            if last:
                free -= max(0.0, u.head_workspace_bytes - u.workspace_bytes) / like.slices
            # Gradients of keys and values exist once; figures of full recomputation count them for all held passes.
            pool = collected * pool_size(model, g.tp) / like.cp_of(g)
            again = pool * (1 - g.kept) if like.recompute == "full" else 0.0
            self._rooms.append(
                _Room(
                    Place(1 / (u.layer_f + u.layer_b) / speed, total),
                    g.count,
                    free=free - ends * per,
                    undivided_free=free,
                    held_end=first * u.embedding_bytes,
                    head=last * u.head_bytes,
                    layer=u.layer_parameters * per + pool * (1 - 1 / like.slices),
                    held_layer=u.layer_bytes * schedule.layer_share(u) - again,
                    ends=ends,
                    parameters=u.layer_parameters,
                )
            )

    def cap(self, later: int, after: int, count: int) -> int:
        """Most layers of one of ``count`` stages with ``later`` replicas in ``after`` later stages; may be below 1."""
        least = 1 << 30
        for room in self._rooms:
            place = room.place
            place.later, place.after, place.stages = later, after, count
            held, ends = self._held(room)
            fitting = int((room.free - ends) // (room.layer + held * room.held_layer))
            while fitting > self._like.chunks and fitting % self._like.chunks:  # unequal chunks may hold more
                held = self._schedule.in_flight_with(self._like, place, fitting)
                if fitting * (room.layer + held * room.held_layer) <= room.free - ends:
                    break
                fitting -= 1
            if fitting < least:
                least = fitting
        return max(least, self._together()) if self._may_divide else least

    def _held(self, room: _Room) -> tuple[float, float]:
        """Microbatches in flight, and the bytes that embedding and head keep for them."""
        held = self._schedule.expected_in_flight(self._like, room.place)
        if room.head:
            return held, held * room.held_end + self._schedule.logits(self._like, held, room.head)
        return held, held * room.held_end

    def _together(self) -> int:
        """Most layers with the state divided as the replicas' memory allows."""
        alone, whole, each = 1 << 30, self._whole, self._divided / len(self._rooms)
        free_together = needed_together = 0.0
        for room in self._rooms:
            held, ends = self._held(room)
            free = room.undivided_free - ends - room.ends * whole
            needed = room.parameters * whole + held * room.held_layer
            alone = min(alone, int(free // needed))
            free_together += room.replicas * free - room.ends * each
            needed_together += room.replicas * needed + room.parameters * each
        return min(alone, int(free_together // needed_together))


def balance(
    estimator: Estimator, groups: tuple[tuple[Group, ...], ...], like: Candidate, *, fits: bool = True
) -> Candidate | None:
    """A candidate with these stages and the numbers of layers that balance them.

    Args:
        like: All other settings are taken from this candidate.
        fits: Memory limits the layers of a stage.

    Returns:
        None when there are more stages than layers or a replica kind has no figures.  Memory limits
        are respected as far as possible; the caller checks the result.
    """
    model = estimator.model
    count, wanted = len(groups), model.num_layers
    if count > wanted or model.global_batch_size % like.micro_batch_size:
        return None
    total = model.global_batch_size // like.micro_batch_size
    loads: list[Load] = []
    caps: list[int] = []
    is_even = len({sum([g.count for g in stage]) for stage in groups}) == 1
    meets = is_even and like.rows and like.slack == SLACK and schedule_of(like).has_depths
    slack = like.slack if meets or not is_even else 0.0
    later, ends = sum([g.count for stage in groups for g in stage]), ends_of(like.rows, count)
    for s, stage in enumerate(groups):
        first, last = ends[s]
        load = stage_load(estimator, stage, like, first, last)
        if load is None:
            return None
        later -= sum([g.count for g in stage])
        loads.append(load)
        rooms = layer_rooms(estimator, stage, like, total, first, last, slack=slack) if fits else None
        caps.append(max(1, rooms.cap(later, count - 1 - s, count)) if rooms is not None else 1 if fits else wanted)
    layers = by_kinds(estimator, groups[0][0], like, _split(loads, caps, wanted))
    rows = like.rows if count > 1 else ()
    if rows and len(rows) != count:
        rows = rows_of((1,) * count, model.tied_embeddings)
    stages = tuple([Stage(n, g).of(n) for n, g in zip(layers, groups)])
    like = like.with_(depths=(MEETING,) * (count - 1)) if meets else like  # twice as many microbatches in flight
    if like.across_replicas:
        return like.with_(stages=stages, rows=rows).over_replicas(like.ep)
    return like.with_(stages=stages, rows=rows, ep=gcd(like.ep, max([g.tp for stage in groups for g in stage])))


def relieved(estimator: Estimator, candidate: Candidate, most_s: float = inf) -> Candidate:
    """The candidate with as few recomputed layers as memory requires, if it recomputes all layers.

    Each layer that keeps its activations adds the same memory; without any recomputed layer no workspace is needed.

    Args:
        most_s: The candidate is returned unchanged if it takes longer even without recomputation.
    """
    c, model = candidate, estimator.model
    # Not for layers of several kinds, whose shares differ, nor for offload, which is priced with all recomputed.
    has_no_share = c.sizes or c.offload or c.host_activations or model.kinds
    if c.recompute != "full" or "none" not in model.recompute or has_no_share:
        return candidate
    ones = [[1.0] * len(s.groups) for s in candidate.stages]
    kept = estimator.estimate(candidate.keeping(ones), most_s)
    again = None if kept is None or kept.iteration_s > most_s else estimator.estimate(candidate.keeping())
    if kept is None or again is None or not estimator.fits(again):
        return candidate
    if estimator.fits(kept):
        return candidate.keeping().with_(recompute="none")
    counts = []
    for s, stage in enumerate(candidate.stages):
        pairs = zip(again.memory_of(candidate, s), kept.memory_of(candidate, s))
        mine = [min(_kept_layers(estimator, stage.layers, *pair) for pair in zip(*parts)) for parts in pairs]
        counts.append([min(mine)] * len(mine) if candidate.across_replicas else mine)
    for fewer in range(3):
        shares = [[max(0, k - fewer) / s.layers for k in mine] for mine, s in zip(counts, candidate.stages)]
        found = candidate.keeping(shares)
        estimate = estimator.estimate(found)
        if estimate is not None and estimator.fits(estimate):
            return found
    return candidate.keeping()


def _kept_layers(estimator: Estimator, layers: int, again: GroupMemory, kept: GroupMemory) -> int:
    """Number of layers whose activations fit, interpolated between the memory with none and with all of them kept."""
    free = estimator.memory_margin * again.capacity_bytes
    if kept.total_bytes <= free:
        return layers
    all_but_one = kept.total_bytes - kept.workspace_bytes + again.workspace_bytes
    each = max(1.0, (all_but_one - again.total_bytes) / layers)
    return max(0, min(layers - 1, int((free - again.total_bytes) / each)))


def by_kinds(estimator: Estimator, group: Group, like: Candidate, layers: list[int]) -> list[int]:
    """Layers of a hybrid model's stages, cut where their work is nearest to that of ``layers`` equal layers.

    Args:
        group: The group whose times weigh the kinds of layers.
        layers: Number of layers of each stage, if all took equally long.
    """
    model = estimator.model
    if not model.kinds or like.chunks > 1 or like.sizes:
        return layers
    weights = {}
    spread = Spread(like.cp, *like.cut_of(group), slices=like.slices)
    for kind, _ in model.kinds:
        unit = estimator.unit(group.pool, group.tp, like.micro_batch_size, like.recompute, spread, kind)
        if unit is None:
            return layers
        weights[kind] = unit.layer_f + unit.layer_b
    work = list(accumulate((weights[kind] for kind in layers_of(model.pattern)), initial=0.0))
    cuts, last = [0], len(layers) - 1
    for s, wanted in enumerate(accumulate(layers[:-1])):
        share = work[-1] * wanted / model.num_layers
        near = range(cuts[-1] + 1, model.num_layers - (last - s) + 1)
        cuts.append(min(near, key=lambda at: abs(work[at] - share)))
    return [b - a for a, b in pairwise([*cuts, model.num_layers])]


@cache
def ends_of(rows: tuple[tuple[float, float], ...], count: int) -> tuple[tuple[float, float], ...]:
    """The parts of the embedding and of the output layer on each of ``count`` stages.

    Args:
        rows: ``rows`` of a candidate; a vocabulary that is split over another number of stages is split evenly.
    """
    if not rows:
        return tuple((float(s == 0), float(s == count - 1)) for s in range(count))
    return tuple((rows[s][0] if len(rows) == count else 1 / count,) * 2 for s in range(count))


def layer_rooms(
    estimator: Estimator,
    groups: tuple[Group, ...],
    like: Candidate,
    total: int,
    first: float,
    last: float,
    slack: float,
) -> Rooms | None:
    """The :class:`Rooms` of a stage, cached over candidates; None where a replica has no figures.

    Args:
        first, last: The parts of the embedding and of the head that the stage has.
        slack: Replaces the slack of ``like``.
    """
    c = like
    point = (
        *(c.micro_batch_size, c.recompute, c.schedule, c.chunks, c.slices, c.zero_stage, c.offload, c.experts_over),
        *(slack, total),
    )
    known = estimator.known_rooms.setdefault(point, {})
    stage = groups, first, last
    if stage not in known:
        load = stage_load(estimator, groups, like, first, last)
        if c.slack != slack:
            c = estimator.known_points.get(point) or estimator.known_points.setdefault(point, c.with_(slack=slack))
        known[stage] = Rooms(estimator, groups, load.units, total, first, last, like=c) if load else None
    found: Rooms | None = known[stage]
    return found


def stage_load(
    estimator: Estimator, groups: tuple[Group, ...], like: Candidate, first: float, last: float
) -> Load | None:
    """The :class:`Load` of a stage, cached over candidates; None when a replica kind has no figures."""
    key = groups, like.micro_batch_size, like.recompute, like.slices, like.experts_over, first, last
    if key not in estimator.known_loads:
        units = [estimator.unit_of(like, g) for g in groups]
        there = [u for u in units if u is not None]
        estimator.known_loads[key] = Load(groups, there, first, last) if len(there) == len(units) else None
    found: Load | None = estimator.known_loads[key]
    return found


def _split(loads: list[Load], caps: list[int], wanted: int) -> list[int]:
    """Layers per stage: a proportional start, then single layers to or from the stage where that costs least."""
    speeds = [1.0 / load.time(1) for load in loads]
    whole, stages = sum(speeds), range(len(loads))
    layers = [max(1, min(cap, int(wanted * v / whole))) for cap, v in zip(caps, speeds)]
    now = [load.time(n) for load, n in zip(loads, layers)]
    more = [load.time(n + 1) for load, n in zip(loads, layers)]

    def change(s: int, by: int) -> None:
        layers[s] += by
        now[s], more[s] = loads[s].time(layers[s]), loads[s].time(layers[s] + 1)

    missing = wanted - sum(layers)
    for _ in range(-missing):
        change(max([i for i in stages if layers[i] > 1], key=now.__getitem__), -1)
    for _ in range(missing):
        change(min([i for i in stages if layers[i] < caps[i]] or stages, key=more.__getitem__), 1)
    while True:
        worst = max(stages, key=now.__getitem__)
        if layers[worst] == 1:
            return layers
        open_stages = [i for i in stages if i != worst and layers[i] < caps[i]]
        if not open_stages:
            return layers
        best = min(open_stages, key=more.__getitem__)
        if more[best] >= now[worst]:
            return layers
        change(worst, -1)
        change(best, 1)


def passes_s(estimator: Estimator, candidate: Candidate) -> list[float]:
    """For each stage, seconds of one microbatch, forward and backward, on its quickest replica.

    Microbatches in flight are counted per replica, so a stage of many replicas needs no more of them than one of few.
    """
    out = []
    for s, stage in enumerate(candidate.stages):
        units = [estimator.unit_of(candidate, g, s) for g in stage.groups]
        out.append(min(u.both_s(stage.layers, *candidate.ends_of(s)) for u in units if u is not None))
    return out


def hiding(passes: list[float], transfers: list[float]) -> tuple[int, ...]:
    """Returns the depth per boundary that hides its round trip, with one in reserve; 1 for fast boundaries."""
    hidden = [ceil(2 * seconds / max(passes)) if 2 * seconds > NOTICEABLE * max(passes) else 0 for seconds in transfers]
    return tuple(2 + n if n else 1 for n in hidden)
