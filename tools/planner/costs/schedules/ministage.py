"""Zorse's ministages: parameters sharded over a stage's replicas, few ministages whole at a time (section 4.1)."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from megatron_het.features import host_parameters, switches
from megatron_het.plan.placement import route

from ..candidate import Candidate, Estimate, GroupMemory, Pipeline, StageTimes, chunk_layers, rank_bytes
from ..operating import OperatingPoints
from ..unit import Unit
from .base import Place, Schedule, State
from .pipelines import CHUNKS

# How long the ministages of a pipeline take (Zorse, section 4.1.1).


class Visit(NamedTuple):
    """All microbatches in one ministage: on which stage, and seconds."""

    stage: int
    one_s: float  # one microbatch
    all_s: float  # all microbatches of the slowest replica
    way_s: float  # a transfer from the visit before


def laps_s(visits: Sequence[Visit]) -> float:
    """Seconds from the first start to the last end.

    A stage begins a ministage when it has ended the one before and the first microbatch has arrived.  It
    ends when it has done all microbatches, the last of which arrives when the stage before has ended.

    Args:
        visits: In the order in which a microbatch makes them.
    """
    ends: dict[int, float] = {}
    first, last = 0.0, 0.0  # when the first and the last microbatch leave the visit before
    for stage, one, every, way in visits:
        begin = max(ends.get(stage, 0.0), first + way)
        first, last = begin + one, max(begin + every, last + way + one)
        ends[stage] = last
    return max(ends.values())


def mean_s(times: Sequence[Sequence[float]], microbatches: Sequence[int]) -> list[float]:
    """The mean over kinds of replicas, weighted by what each runs."""
    whole = sum(microbatches)
    return [sum(t * k for t, k in zip(column, microbatches)) / whole for column in zip(*times)]


class Ministage(Schedule):
    """All microbatches of a ministage, then the next; backward reversed."""

    name = "ministage"
    has_order = False
    shards_parameters = True

    # -- what the search may ask -------------------------------------------------------------------

    def runs(self, estimator: OperatingPoints, candidate: Candidate) -> bool:
        """A parameter window shards over the distributed optimizer."""
        return candidate.zero_stage >= 1

    def of(self, plain: Candidate, chunks: int, offload: bool = False) -> Candidate:
        """A 1F1B candidate with ``chunks`` ministages per stage."""
        return plain.with_(schedule=self.name, chunks=chunks, zero_stage=1, offload=offload)

    def variants(self, estimator: OperatingPoints, plain: Candidate) -> Iterator[Candidate]:
        """With several numbers of ministages, on the GPUs and in main memory."""
        if not estimator.model.distributed_optimizer:
            return
        least = min(s.layers for s in plain.stages)
        for chunks in (*(n for n in CHUNKS if n < least), *([least] if least > 1 else [])):
            yield self.of(plain, chunks)
            if "full" in estimator.model.recompute:
                yield self.of(plain, chunks, offload=True).with_(recompute="full")

    def refined(self, candidate: Candidate) -> Iterator[Candidate]:
        """Every number of ministages."""
        for chunks in range(2, min(s.layers for s in candidate.stages) + 1):
            yield candidate.with_(chunks=chunks)

    # -- time --------------------------------------------------------------------------------------

    def pipeline(
        self,
        estimator: OperatingPoints,
        candidate: Candidate,
        stages: Sequence[StageTimes],
        transfers: Sequence[float],
        total: int,
    ) -> Pipeline:
        """One lap per ministage and direction; that of the loss goes forward and back at once.

        Gathers of the next ministage overlap with the current one; what does not fit is exposed, and so is
        the first gather of the iteration.
        """
        which = max(range(len(stages)), key=lambda s: stages[s].busy_s)
        widths = [sum(g.count for g in s.groups) // candidate.blocks for s in candidate.stages]
        busiest = max((t * total / max(a, b, 1) for t, a, b in zip(transfers, widths, widths[1:])), default=0.0)
        figures = [_figures(estimator, candidate, stage, s) for s, stage in enumerate(stages)]
        visits: list[Visit] = []
        for back, places in enumerate((candidate.path, candidate.path[::-1])):
            for i, (s, c) in enumerate(places):
                one, every = (of[c] for of in figures[s][0][back])
                if back and not i:
                    visits[-1] = Visit(s, visits[-1].one_s + one, visits[-1].all_s + every, visits[-1].way_s)
                    continue
                before = visits[-1].stage if visits else s
                way = transfers[min(before, s)] if abs(before - s) == 1 else max(transfers) if before != s else 0.0
                visits.append(Visit(s, one, every if c == places[0][1] else max(every, busiest), way))
        exposed = max(0.0, *[gathers for _, gathers in figures])
        return Pipeline(laps_s(visits) + exposed, stages[which].busy_s, which, exposed, ())

    def exposed(self, candidate: Candidate, sync_s: float, update_s: float) -> tuple[float, float]:
        """Returns the seconds of the last ministage; the others are beside compute."""
        return sync_s / candidate.chunks, update_s / candidate.chunks

    # -- memory ------------------------------------------------------------------------------------

    def in_flight(self, candidate: Candidate, stage: StageTimes, s: int, i: int) -> float:
        """All of them; of the last ministage, which has the loss, one."""
        mine, layers = stage.microbatches[i], candidate.stages[s].layers
        last = chunk_layers(layers, candidate.chunks)[-1] / layers if s == candidate.head_stage else 0.0
        return mine - max(0, mine - 1) * last

    def expected_in_flight(self, like: Candidate, place: Place) -> float:
        """All of them, or two passes of a ministage on the device."""
        held = place.microbatches
        return 2.0 / like.chunks if like.offload else held if place.later else held - (held - 1) / like.chunks

    def state(self, estimator: OperatingPoints, candidate: Candidate, unit: Unit, count: float, shards: float) -> State:
        """Equal parts in main memory; :meth:`divide` says what is on the device."""
        return 0.0, 0.0, 0.0, host_state(estimator, count, 1 / shards) if candidate.offload else 0.0

    def whole_per_parameter(self, estimator: OperatingPoints, like: Candidate) -> float:
        """Bytes per parameter of a stage that every replica holds, whatever its share of the state."""
        return (estimator.model.element_bytes * min(2, like.chunks) + estimator.gradient_per_parameter) / like.chunks

    def state_per_parameter(self, estimator: OperatingPoints, like: Candidate, count: int, shards: float) -> float:
        """Returns what is whole, and an equal part of the rest; of that, offload leaves gradients."""
        found = self.whole_per_parameter(estimator, like) + estimator.gradient_per_parameter / max(1, count)
        rest = estimator.model.element_bytes / max(1, count) + estimator.optimizer_per_parameter / max(1, shards)
        return found if like.offload else found + rest

    def activations(self, candidate: Candidate, held: float, kept: float) -> tuple[float, float]:
        """Under offload all but two passes of a ministage wait in main memory."""
        near, far = (min(held, 2.0), max(0.0, held - 2 / candidate.chunks)) if candidate.offload else (held, 0.0)
        return near * kept, far * kept

    def divide(
        self, estimator: OperatingPoints, candidate: Candidate, found: list[GroupMemory], counts: list[float]
    ) -> list[GroupMemory]:
        """The shares of the candidate, or by free memory if equal ones do not fit; each rank as it is at its peak."""
        equal = [at_peak(estimator, candidate, m, count, 1 / _shards(found, m)) for m, count in zip(found, counts)]
        shares: list[float] | None = None
        groups = candidate.stages[found[0].stage].groups
        if candidate.shares is not None:
            shares = candidate.by_part(found[0].stage, candidate.shares[found[0].stage])
            if len(set(shares)) == 1 and shares[0] * sum(g.count for g in groups) < 1 + 1e-9:
                return equal  # else kinds of replicas whose largest shares are equal
        elif (
            len(found) > 1
            and not any(g.parts for g in groups)
            and any(m.total_bytes > estimator.memory_margin * m.capacity_bytes for m in equal)
        ):
            shares = shares_by_memory(estimator, candidate, found, counts)
        if shares is None:
            return equal
        sizes = candidate.by_part(found[0].stage, map(candidate.cp_of, groups))
        return [
            _with_share(estimator, candidate, found, m, count, share=share, cp=cp)
            for m, count, share, cp in zip(found, counts, shares, sizes, strict=True)
        ]

    # -- plan --------------------------------------------------------------------------------------

    def routes(self, seconds: list[list[float]], counts: list[list[int]], total: int) -> list[list[list[int]]]:
        """The i-th microbatch that a stage completes goes where the i-th most work is left (Zorse, section 4.2)."""
        return [[list(ids) for ids in stage] for stage in route(seconds, total, counts)]

    def parameters(self, candidate: Candidate, estimate: Estimate, alike: bool) -> dict[str, object]:
        """A parameter window; with everything in main memory that can be there, as it is priced."""
        found = switches(self.name) | {"offload": candidate.offload}
        return found | host_parameters(self.name) if candidate.offload else found


_Lap = tuple[list[float], list[float]]  # per ministage: one microbatch, and all microbatches of the slowest replica


def _figures(estimator: OperatingPoints, candidate: Candidate, stage: StageTimes, s: int) -> tuple[list[_Lap], float]:
    """Forward and backward of a stage, and the gathers that its compute does not cover."""
    if "laps" in stage.memo:
        return stage.memo["laps"]
    chunk = chunk_layers(candidate.stages[s].layers, candidate.chunks_of(s))
    first, last = candidate.ends_of(s)
    slowest, laps = stage.slowest, list[_Lap]()
    for back in (False, True):
        times = [u.chunks_s(chunk, first, last, back, estimator.runtime.operation_s) for u in stage.units]
        laps.append((mean_s(times, stage.microbatches), [t * stage.microbatches[slowest] for t in times[slowest]]))
    found = laps, _exposed_s(estimator, candidate, stage, s)
    stage.memo["laps"] = found
    return found


def _exposed_s(estimator: OperatingPoints, candidate: Candidate, stage: StageTimes, s: int) -> float:
    """Gathers of one stage that its compute does not cover."""
    groups, chunks = candidate.stages[s].groups, candidate.chunks_of(s)
    element = float(estimator.model.element_bytes)
    ranks = candidate.reducing(s)
    size = rank_bytes(candidate, stage.units, s, element)
    of_rank = candidate.by_part(s, [size[g] for g in groups])
    gather = estimator.network.sync_s(ranks, dict(zip(ranks, of_rank, strict=True)), 0.5)
    host = 0.0
    if candidate.offload:
        host = max(
            mine / estimator.network.host[r.pool] / max(1, g.count * candidate.cp_of(g))
            for mine, r, g in zip(of_rank, ranks, candidate.by_part(s, groups), strict=True)
        )
    each = max(gather, host) / chunks
    forward = stage.forward_s * (stage.busy_s / (stage.forward_s + stage.backward_s)) / chunks
    backward = stage.busy_s / chunks - forward
    hidden = (chunks - 1) * (max(0.0, each - forward) + max(0.0, each - backward))
    return hidden + 2 * each / max(1, candidate.stages[s].layers // chunks)


def _with_share(
    estimator: OperatingPoints,
    candidate: Candidate,
    found: list[GroupMemory],
    mine: GroupMemory,
    count: float,
    share: float,
    cp: int,
) -> GroupMemory:
    """A rank of a replica with its share of the state, which its ``cp`` context-parallel ranks divide evenly."""
    host, of_rank = mine.host_bytes, share / cp
    if candidate.offload:
        host += host_state(estimator, count, of_rank) - host_state(estimator, count, 1 / _shards(found, mine))
    peak = at_peak(estimator, candidate, mine, count, of_rank)
    return peak._replace(state_share=share, host_bytes=host)


def _shards(found: Sequence[GroupMemory], mine: GroupMemory) -> int:
    """Ranks of a stage that divide one copy of the state."""
    return sum(x.cp * x.group.count for x in found if x.group.tp == mine.group.tp)


def at_peak(
    estimator: OperatingPoints, candidate: Candidate, mine: GroupMemory, count: float, share: float
) -> GroupMemory:
    """Returns what a rank holds when it needs the most; ministages come in reverse order in the backward.

    When the backward of ministage ``c`` begins, the activations of those after it are gone, its own parameters and the
    next one's are whole, its gradients are whole, those of ``c + 1`` are being reduced, and of the rest the rank keeps
    its share.  At last the reduction of the first ministage ends.  The ministage of the loss has next to none.  Under
    offload the optimizer's state of a ministage is on the device while it is updated, before its forward.

    Args:
        mine: With the activations when the backward of the last ministage begins.
        count: Parameters of the stage at this TP.
        share: The part of the stage's state that the rank keeps.
    """
    return max(_over_time(estimator, candidate, mine, count, share), key=lambda m: m.total_bytes)


def _over_time(
    estimator: OperatingPoints, candidate: Candidate, mine: GroupMemory, count: float, share: float
) -> list[GroupMemory]:
    """A rank at each of the moments that may need most; arguments as of :func:`at_peak`."""
    s, candidate = mine.stage, candidate.as_of(mine.stage)
    v, offload = candidate.chunks, candidate.offload
    unit, layers = estimator.unit_of(candidate, mine.group, s), chunk_layers(candidate.stages[s].layers, v)
    assert unit is not None  # it has been priced
    each = unit.of_chunks("layer_parameters", layers)
    words, output = candidate.rows[s] if candidate.rows else (s == 0, s == candidate.head_stage)
    each[0] += words * unit.embedding_parameters
    each[-1] += output * unit.head_parameters
    each = [n * count / sum(each) for n in each]  # the first layers may have fewer
    full = layers[: max(1, v - (s == candidate.head_stage))]  # with the activations of all microbatches
    layered, found = (mine.activation_bytes - mine.logits_bytes) / sum(layers if offload else full), []

    def add(whole: float, gradients: float, kept: float, updated: float = 0.0) -> None:
        p = estimator.model.element_bytes * (whole + share * (whole + updated if offload else count))
        o = estimator.optimizer_per_parameter * share * (updated if offload else count)
        g = estimator.gradient_per_parameter * gradients
        found.append(mine._replace(parameter_bytes=p, gradient_bytes=g, optimizer_bytes=o, activation_bytes=kept))

    for c in sorted({0, 1, v - 2, v - 1} & {*range(v)}):  # between them memory changes evenly
        held = layered * (layers[c] if offload else sum(full[: c + 1]))
        gradients = sum(each[c : c + 2]) + share * sum(each[c + 2 :])
        add(sum(each[max(0, c - 1) : c + 1]), gradients, held + (mine.logits_bytes if c == v - 1 else 0.0))
        if offload:
            add(sum(each[max(0, c - 1) : c]), share * sum(each[c:]), 0.0, each[c])
    add(0.0, each[0] + share * sum(each), 0.0)
    return found


def host_state(estimator: OperatingPoints, count: float, share: float) -> float:
    """Bytes of parameters and optimizer state that a rank keeps in main memory under offload."""
    return count * share * (estimator.model.element_bytes + estimator.optimizer_per_parameter)


def shares_by_memory(
    estimator: OperatingPoints, candidate: Candidate, found: list[GroupMemory], counts: list[float]
) -> list[float] | None:
    """The part of a stage's state for a replica of each group, in proportion to the largest that fits there.

    If any division fits, this one does.

    Returns:
        None where replicas differ in TP, so that they cannot share, or nothing is free.
    """
    if len({m.group.tp for m in found}) > 1:
        return None
    largest = []
    for m, count in zip(found, counts):
        budget, most = estimator.memory_margin * m.capacity_bytes, inf
        ends = [_over_time(estimator, candidate, m, count, s) for s in (0.0, 1.0 / candidate.cp)]
        for none, every in zip(*ends):  # memory grows evenly with the share
            most = min(most, (budget - none.total_bytes) / max(every.total_bytes - none.total_bytes, 1.0))
        largest.append(max(0.0, most))
    total = sum(share * m.group.count for share, m in zip(largest, found))
    return [share / total for share in largest] if total else None
