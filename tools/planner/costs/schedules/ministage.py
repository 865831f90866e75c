"""Zorse's ministages: parameters sharded over a stage's replicas, few ministages whole at a time (section 4.1)."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from megatron_het.features import host_parameters, switches
from megatron_het.plan.placement import route

from ..candidate import Candidate, Estimate, GroupMemory, Line, Pipeline, StageTimes, chunk_layers
from ..operating import OperatingPoints, copies_sync_s, experts_of, state_shards
from ..unit import Unit
from .base import Place, Schedule, State, while_updating
from .pipelines import CHUNKS

# How long the ministages of a pipeline take (Zorse, section 4.1.1).


class Visit(NamedTuple):
    """All microbatches in one ministage: on which stage, and seconds."""

    stage: int
    one_s: float  # one microbatch
    all_s: float  # all microbatches of the slowest replica
    way_s: float  # a transfer from the visit before
    link_s: float = 0.0  # all transfers of the two replicas that have most
    # what the stage gathers and reduces from its start on; None where it needs nothing gathered since the one before
    moved_s: float | None = None


def laps_s(visits: Sequence[Visit], gathered: Sequence[float] = ()) -> tuple[list[float], float]:
    """When each stage has computed, gathered and reduced what its visits say, and how long one waits for gathers.

    A stage begins a ministage when it has ended the one before, the first microbatch has arrived and the parameters are
    gathered.  It ends when it has done all microbatches, the last of which arrives when the stage before has ended.

    Args:
        visits: In the order in which a microbatch makes them.
        gathered: When each stage has gathered its first ministage.
    """
    moved = [*gathered] or [0.0] * (1 + max(visit.stage for visit in visits))
    ends, waits = [0.0] * len(moved), [0.0] * len(moved)
    first, last, source = 0.0, 0.0, 0  # when the first and the last microbatch leave the visit before, and its stage
    links: dict[tuple[int, int], float] = {}
    for stage, one, every, way, link, more in visits:
        before = ends[stage]
        if link:
            first = max(first, links.get((source, stage), 0.0))
            links[source, stage] = last = max(last + way, first + link)
        begin = max(before, first + way)
        if more is not None:
            ready = moved[stage]
            if ready > begin:
                waits[stage] += ready - begin
                begin = ready
            moved[stage] = max(before, ready) + more
        first, last, source = begin + one, max(begin + every, last + one), stage
        ends[stage] = last
    return [*map(max, ends, moved)], max(waits)


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
        """Candidates with several numbers of ministages, with the state on the GPUs and in main memory."""
        if not estimator.model.distributed_optimizer:
            return
        least = min(s.layers for s in plain.stages)
        for chunks in (*(n for n in CHUNKS if n < least), *([least] if least > 1 else [])):
            yield self.of(plain, chunks)
            kept = {plain.recompute, *(r for r in estimator.model.recompute if r == "full")}
            yield from (self.of(plain, chunks, offload=True).with_(recompute=again) for again in sorted(kept))

    def refined(self, candidate: Candidate) -> Iterator[Candidate]:
        """Every number of ministages."""
        for chunks in range(2, min(s.layers for s in candidate.stages) + 1):
            yield candidate.with_(chunks=chunks)

    # -- time --------------------------------------------------------------------------------------

    def pipeline(self, estimator: OperatingPoints, candidate: Candidate, line: Line, total: int) -> Pipeline:
        """One lap per ministage and direction; that of the loss goes forward and back at once."""
        stages, transfers, _ = line
        which = max(range(len(stages)), key=lambda s: stages[s].busy_s)
        widths = [sum(g.count for g in s.groups) // candidate.blocks for s in candidate.stages]
        groups, at = [stage.groups for stage in candidate.stages], (candidate.micro_batch_size, candidate.cp)
        ways = [[*transfers, estimator.around_s(groups, *at)]] * 2
        if len({g.tp for own in groups for g in own}) > 1:  # each rank of the target gets all: not the same both ways
            ways[1] = [*estimator.ways_s(groups[::-1], *at)[::-1], estimator.around_s(groups[::-1], *at)]
        figures = [_figures(estimator, candidate, stage, s) for s, stage in enumerate(stages)]
        visits: list[Visit] = []
        for back, places in enumerate((candidate.path, candidate.path[::-1])):
            for i, (s, c) in enumerate(places):
                one_s, all_s, moved_s = figures[s][0][back]
                one, every = one_s[c], all_s[c]
                if back and not i:
                    turn = visits[-1]
                    visits[-1] = turn._replace(one_s=turn.one_s + one, all_s=turn.all_s + every)
                    continue
                before = visits[-1].stage if visits else s
                way = ways[back][min(before, s) if abs(before - s) == 1 else -1] if before != s else 0.0
                visits.append(Visit(s, one, every, way, way * total / min(widths[s], widths[before]), moved_s[c]))
        ends, waits_s = laps_s(visits, [first for _, first in figures])
        return Pipeline(max(ends), stages[which].busy_s, which, waits_s, ends)

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
        """Bytes per parameter of a stage that every replica holds in full, independent of its share of the state."""
        return (estimator.model.element_bytes * min(2, like.chunks) + estimator.gradient_per_parameter) / like.chunks

    def state_per_parameter(self, estimator: OperatingPoints, like: Candidate, count: int, shards: float) -> float:
        """Returns what is whole, and an equal part of the rest; of that, offload leaves gradients."""
        found = self.whole_per_parameter(estimator, like) + estimator.gradient_per_parameter / max(1, count)
        rest = estimator.model.element_bytes / max(1, count) + estimator.optimizer_per_parameter / max(1, shards)
        return found if like.offload else found + rest

    def activations(self, candidate: Candidate, held: float, kept: float) -> tuple[float, float]:
        """Under offload all but two passes wait in main memory: of one ministage, or with one microbatch of two."""
        if not candidate.offload:
            return held * kept, 0.0
        return min(held * candidate.chunks, 2.0) * kept, max(0.0, held - 2 / candidate.chunks) * kept

    def divide(
        self, estimator: OperatingPoints, candidate: Candidate, found: list[GroupMemory], counts: list[float]
    ) -> list[GroupMemory]:
        """The shares of the candidate, or by free memory if equal ones do not fit; each rank as it is at its peak."""
        even = [1 / state_shards(estimator, candidate, m.stage, m.group, n) for m, n in zip(found, counts)]
        equal = [at_peak(estimator, candidate, *of) for of in zip(found, counts, even)]
        shares: list[float] | None = None
        groups = candidate.stages[found[0].stage].groups
        if candidate.shares is not None:
            shares = candidate.by_part(found[0].stage, candidate.shares[found[0].stage])
            if len(set(shares)) == 1 and shares[0] * sum(g.count for g in groups) < 1 + 1e-9:
                return equal  # else kinds of replicas whose largest shares are equal
        elif (
            len(found) > 1
            and not any(g.parts or candidate.spans(g) for g in groups)
            and any(m.total_bytes > estimator.memory_margin * m.capacity_bytes for m in equal)
        ):
            shares = shares_by_memory(estimator, candidate, found, counts)
        if shares is None:
            return equal
        sizes = candidate.by_part(found[0].stage, map(candidate.cp_of, groups))
        out = []
        for mine, count, share, cp, part in zip(found, counts, shares, sizes, even, strict=True):
            host, of_rank = mine.host_bytes, share / cp  # the context-parallel ranks divide the share evenly
            if candidate.offload:
                host += host_state(estimator, count, of_rank) - host_state(estimator, count, part)
            peak = at_peak(estimator, candidate, mine, count, of_rank)
            out.append(peak._replace(state_share=share, host_bytes=host))
        return out

    # -- plan --------------------------------------------------------------------------------------

    def routes(self, seconds: list[list[float]], counts: list[list[int]], total: int) -> list[list[list[int]]]:
        """The i-th microbatch that a stage completes goes where the i-th most work is left (Zorse, section 4.2)."""
        return [[list(ids) for ids in stage] for stage in route(seconds, total, counts)]

    def parameters(self, candidate: Candidate, estimate: Estimate, alike: bool) -> dict[str, object]:
        """A parameter window; with everything in main memory that can be there, as it is priced."""
        found = switches(self.name) | {"offload": candidate.offload}
        return found | host_parameters(self.name) if candidate.offload else found


# Per ministage: one microbatch, all microbatches of the slowest replica, and what is gathered and reduced beside them.
_Lap = tuple[list[float], list[float], list[float | None]]


def _figures(estimator: OperatingPoints, candidate: Candidate, stage: StageTimes, s: int) -> tuple[list[_Lap], float]:
    """Forward and backward of a stage, and the gather of its first ministage."""
    if "laps" in stage.memo:
        return stage.memo["laps"]
    groups, chunk = candidate.stages[s].groups, chunk_layers(candidate.stages[s].layers, candidate.chunks_of(s))
    first, last = candidate.ends_of(s)
    slowest, laps = stage.slowest, list[_Lap]()
    gather, reduce = moves_s(estimator, candidate, stage.parameters, s, stage.scattered)
    if candidate.offload:
        counts, own = candidate.by_part(s, stage.parameters), candidate.by_part(s, groups)
        host, element = estimator.network.host, estimator.model.element_bytes
        for ranks, n, g in zip(candidate.reducing(s), counts, own, strict=True):
            gather = max(gather, n * element / state_shards(estimator, candidate, s, g, n) / host[ranks.pool])
    gathers, reduces = ([seconds * n / sum(chunk) for n in chunk] for seconds in (gather, reduce))
    # A ministage is gathered one visit ahead, and reduced in the visit after its backward.
    ahead = gathers[1:] + gathers[-2:-1] if len(chunk) > 1 else [0.0]
    behind = [a + b for a, b in zip([0.0, *gathers], reduces[1:])]
    for back, moved in ((False, list[float | None](ahead)), (True, [*behind, None])):
        times = [u.chunks_s(chunk, first, last, back, estimator.runtime.operation_s) for u in stage.units]
        every = [t * stage.microbatches[slowest] for t in times[slowest]]
        laps.append((mean_s(times, stage.microbatches), every, moved))
    found = stage.memo["laps"] = laps, gathers[0]
    return found


def moves_s(
    estimator: OperatingPoints, candidate: Candidate, counts: Sequence[float], s: int, scattered: bool
) -> list[float]:
    """Seconds in which ranks of so many parameters gather all of their stage, and reduce all gradients."""
    sync_s = partial(estimator.network.sync_s, share=0.5, scattered=scattered)
    each = float(estimator.model.element_bytes), estimator.gradient_per_parameter
    return [copies_sync_s(estimator, candidate, s, list(counts), size, sync_s) for size in each]


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
    own = [share * n for n in each]
    if candidate.spans(mine.group):  # of experts a rank keeps more than of other weights
        experts, part = experts_of(estimator, candidate, s, mine.group), 1 / candidate.copies_of(s, mine.group)
        rest = (share * count - part * experts) / (count - experts)
        own = [rest * n + (part - rest) * experts * m / sum(layers) for n, m in zip(each, layers)]
    full = layers[: max(1, v - (s == candidate.head_stage))]  # with the activations of all microbatches
    layered, found = (mine.activation_bytes - mine.logits_bytes) / sum(layers if offload else full), []

    def add(whole: slice, gradients: float, kept: float, updated: slice = slice(0)) -> None:
        state, w = sum(own[updated] if offload else own), mine.workspace_bytes
        p = estimator.model.element_bytes * (sum(each[whole]) + state + offload * sum(own[whole]))
        o, g = estimator.optimizer_per_parameter * state, estimator.gradient_per_parameter * gradients
        if own[updated]:  # all gradients in fp32 at the end; what the optimizer needs besides, one after the other
            w = while_updating(estimator, candidate, mine.group, gradients, state * offload)
        memory = mine._replace(parameter_bytes=p, gradient_bytes=g, optimizer_bytes=o)
        found.append(memory._replace(activation_bytes=kept, workspace_bytes=w))

    for c in sorted({0, 1, v - 2, v - 1} & {*range(v)}):  # between them memory changes evenly
        held = layered * (layers[c] if offload else sum(full[: c + 1]))
        gradients = sum(each[c : c + 2]) + sum(own[c + 2 :])
        add(slice(max(0, c - 1), c + 1), gradients, held + (mine.logits_bytes if c == v - 1 else 0.0))
        if offload:
            add(slice(max(0, c - 1), c), sum(own[c:]), 0.0, slice(c, c + 1))
    add(slice(0), each[0] + sum(own), 0.0)
    if not offload:
        add(slice(0), sum(own), 0.0, slice(None))
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
