"""Sailor's planner (section 4.2): the same data parallelism everywhere; dynamic programming over stages, resources."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf

from ..costs.build import chunk_layers
from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimator
from ..search.book import Book
from ..search.finish import finish
from ..search.outcome import Outcome, Progress
from .outcome import NORMAL, Effort, Goal
from .pools import expand, merge

STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
PARTS = 4
"""A stage's replicas are dealt to GPU types in quarters (the paper enumerates all combinations)."""


def search_sailor(
    estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort = NORMAL, bound_s: float = inf
) -> Outcome:
    """H1 TP inside nodes, H2 smallest TP that fits, H3/H4 order of D with early stop, H5 and H6 regions.

    Args:
        bound_s: Branches whose iterations are certainly longer are left out.
    """
    progress = progress or Progress()
    started = time.process_time()
    merged = merge(estimator)
    book = Book(merged.estimator, replace(goal, keep_data_parallel_in_region=True), progress)
    outcome = Outcome("sailor")
    try:
        for stages in STAGES:
            if stages > estimator.model.num_layers:
                break
            for batch in estimator.model.batch_sizes:
                for recompute in estimator.model.recompute:
                    progress.text = f"{stages} stage(s), micro batch {batch}"
                    _degrees(book, stages, Candidate((), batch, recompute, even=True), bound_s)
                    if progress.out_of_time:
                        raise KeyboardInterrupt
    except KeyboardInterrupt:
        outcome.interrupted = True
    finish(
        book,
        outcome,
        estimator,
        goal,
        replace(effort, regroups=False),
        lambda c: expand(merged, estimator.cluster, c),
        bound=bound_s,
    )
    outcome.cpu_s = time.process_time() - started
    return outcome


def _degrees(book: Book, stages: int, like: Candidate, bound_s: float) -> None:
    """Data-parallel degrees in decreasing order until throughput stops rising (H3), or the reverse for cost (H4)."""
    estimator = book.estimator
    total = estimator.model.global_batch_size // like.micro_batch_size
    layers = chunk_layers(estimator.model.num_layers, stages)
    tps = [smallest_tp(estimator, stages, s, layers[s], like) for s in range(stages)]
    units = sum(
        max((n.quota // tps[s][p] for s in range(stages) if p in tps[s]), default=0)
        for p, n in enumerate(estimator.cluster.nodes)
    )
    degrees = [d for d in _divisors(total) if d * stages <= units]
    best, misses = inf, 0
    for degree in degrees if book.goal.objective == "cost" else reversed(degrees):
        if bound_s < inf and total / degree * _straggler_s(estimator, layers, tps, degree, like) > bound_s:
            continue
        found = _solve(book, layers, tps, degree, like, bound_s)
        if found is None:
            continue
        score = book.try_candidate(found)
        if score < best:
            best, misses = score, 0
        else:
            misses += 1
            if misses == 2:
                return


def _straggler_s(
    estimator: Estimator, layers: tuple[int, ...], tps: list[dict[int, int]], degree: int, like: Candidate
) -> float:
    """At least this long takes a microbatch on the slowest replica: the fastest pools fill up first."""
    fastest: list[tuple[float, int]] = []
    for pool, node in enumerate(estimator.cluster.nodes):
        kinds = [
            (layers[s] * (u.layer_f + u.layer_b), tp[pool])
            for s, tp in enumerate(tps)
            if pool in tp and (u := estimator.unit(pool, tp[pool], like.micro_batch_size, like.recompute))
        ]
        if kinds:
            fastest.append((min(t for t, _ in kinds), node.quota // min(tp for _, tp in kinds)))
    wanted = degree * len(layers)
    for seconds, replicas in sorted(fastest):
        wanted -= replicas
        if wanted <= 0:
            return seconds
    return inf


def _divisors(total: int) -> list[int]:
    return [d for d in range(1, total + 1) if total % d == 0]


def smallest_tp(estimator: Estimator, stages: int, s: int, layers: int, like: Candidate) -> dict[int, int]:
    """Per pool, the smallest TP with which this stage fits a GPU's memory (H2)."""
    out = {}
    for pool, node in enumerate(estimator.cluster.nodes):
        for tp in (1, 2, 4, 8):
            unit = estimator.unit(pool, tp, like.micro_batch_size, like.recompute)
            if unit is None or tp > node.gpus_per_node:
                continue
            count = layers * unit.layer_parameters
            held = min(stages - s, 1 << 20)
            kept = held * layers * unit.layer_bytes
            if s == 0:
                count, kept = count + unit.embedding_parameters, kept + held * unit.embedding_bytes
            if s == stages - 1:
                count, kept = count + unit.head_parameters, kept + unit.head_bytes
            per = estimator.model.element_bytes + 4.0 + estimator.optimizer_per_parameter
            need = count * per + kept + unit.workspace_bytes + unit.reserved_bytes
            if need <= estimator.memory_margin * unit.capacity_bytes:
                out[pool] = tp
                break
    return out


def _combinations(degree: int, pools: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ways to deal ``degree`` replicas to at most two pools, in quarters: ((pool, replicas), ...)."""
    for p in pools:
        yield ((p, degree),)
    for p, q in itertools.combinations(pools, 2):
        for k in range(1, PARTS):
            n = degree * k // PARTS
            if 0 < n < degree:
                yield ((p, n), (q, degree - n))


Offer = tuple[float, float, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
"""Least value, seconds of the stage, replicas by pool, and GPUs by pool."""


class _Offers:
    """Holds what the stages of a pipeline with one data-parallel degree may be given, the most promising first.

    Args:
        tps: Per stage: TP by pool.
        total: Microbatches of a pipeline.
    """

    def __init__(
        self,
        estimator: Estimator,
        layers: tuple[int, ...],
        tps: list[dict[int, int]],
        degree: int,
        total: int,
        like: Candidate,
        bound_s: float,
    ) -> None:
        self._estimator, self._tps, self._degree, self._total = estimator, tps, degree, total
        self._bound_s = bound_s
        last = len(layers) - 1
        self._seconds: list[dict[int, float]] = []
        for s, tp in enumerate(tps):
            units = {p: estimator.unit(p, tp[p], like.micro_batch_size, like.recompute) for p in tp}
            self._seconds.append({p: u.both_s(layers[s], s == 0, s == last) for p, u in units.items() if u is not None})
        region, in_time = estimator.network.region, bound_s / total
        self._regions = [
            [pools for r in dict.fromkeys(region) if (pools := [p for p in of if region[p] == r and of[p] <= in_time])]
            for of in self._seconds
        ]
        # What the stages after a stage take at least, on GPUs that nobody else has.
        fastest = [min(seconds.values(), default=inf) for seconds in self._seconds]
        self._sums = [sum(fastest[s + 1 :]) for s in range(last + 1)]
        self._slowest = [max(fastest[s + 1 :], default=0.0) for s in range(last + 1)]

        self._known: dict[int, list[Offer]] = {}

    def of(self, s: int) -> list[Offer]:
        """Returns what stage ``s`` may be given if all GPUs were free, the least value first.

        The least value is that of stages ``s`` to the last if nobody else needed a GPU.
        """
        if s not in self._known:
            self._known[s] = self._all(s)
        return self._known[s]

    def _all(self, s: int) -> list[Offer]:
        out: list[Offer] = []
        seconds, tp = self._seconds[s], self._tps[s]
        quota = [node.quota for node in self._estimator.cluster.nodes]
        for pools in self._regions[s]:
            for combination in _combinations(self._degree, pools):
                needs = tuple([(pool, n * tp[pool]) for pool, n in combination])
                if any(n > quota[pool] for pool, n in needs):
                    continue
                mine = max([seconds[pool] for pool, _ in combination])
                least = (self._total - 1) * max(mine, self._slowest[s]) + mine + self._sums[s]
                if least <= self._bound_s:
                    out.append((least, mine, combination, needs))
        return sorted(out, key=lambda offer: offer[0])


def _solve(
    book: Book, layers: tuple[int, ...], tps: list[dict[int, int]], degree: int, like: Candidate, bound_s: float
) -> Candidate | None:
    """Listing 1: the straggler time plus the stages' sum, minimal over the resources given to each stage."""
    estimator = book.estimator
    total = estimator.model.global_batch_size // like.micro_batch_size // degree
    offers = _Offers(estimator, layers, tps, degree, total, like, bound_s=bound_s)
    last = len(layers) - 1

    @cache
    def best(
        s: int, free: tuple[int, ...]
    ) -> tuple[float, float, float, tuple[tuple[tuple[int, int], ...], ...]] | None:
        """(value, straggler, sum, resources per stage) of stages s to the last."""
        if s > last:
            return 0.0, 0.0, 0.0, ()
        if book.progress.out_of_time:
            raise KeyboardInterrupt
        found = None
        for least, mine, combination, needs in offers.of(s):
            if found is not None and least >= found[0]:
                break
            rest = list(free)
            for pool, n in needs:
                rest[pool] -= n
            if min(rest) < 0:
                continue
            after = best(s + 1, tuple(rest))
            if after is None:
                continue
            straggler, whole = max(mine, after[1]), mine + after[2]
            value = (total - 1) * straggler + whole
            if found is None or value < found[0]:
                found = (value, straggler, whole, (combination, *after[3]))
        return found

    solved = best(0, tuple(n.quota for n in estimator.cluster.nodes))
    if solved is None:
        return None
    stages = tuple(
        Stage(layers[s], tuple(Group(p, tps[s][p], n) for p, n in sorted(combination)))
        for s, combination in enumerate(solved[3])
    )
    return like.with_(stages=stages)
