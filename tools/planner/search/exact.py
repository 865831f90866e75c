"""Branch and bound over all plans of a small cluster: stages in order, each with its replicas and layers.

A partial plan is dropped when even perfect use of what is left cannot beat the best known plan (with a
margin, because finalists are ranked by the simulator).
"""

from __future__ import annotations

from itertools import product
from math import inf

from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimator
from ..costs.schedules import PLAIN
from ..search.book import Book
from ..search.pools import Limits, all_gpus


class _GaveUp(Exception):
    """The tree is larger than allowed."""


def stage_options(estimator: Estimator, point: Candidate, limits: Limits | None = None) -> list[tuple[Group, ...]]:
    """All multisets of replicas that one stage could have, on all GPUs or these."""
    per_pool: list[list[tuple[Group, ...]]] = []
    quotas = limits or all_gpus(estimator)
    for pool, quota in enumerate(quotas):
        tps = [t for t in (1, 2, 4, 8) if estimator.unit(pool, t, point.micro_batch_size, point.recompute)]
        choices: list[tuple[Group, ...]] = []
        for counts in product(*(range(quota // t + 1) for t in tps)):
            if sum(n * t for n, t in zip(counts, tps)) <= quota:
                choices.append(tuple(Group(pool, t, n) for t, n in zip(tps, counts) if n))
        per_pool.append(choices or [()])
    return [tuple(g for part in choice for g in part) for choice in product(*per_pool) if any(choice)]


class _Tree:
    """One operating point (batch, recompute, ZeRO stage)."""

    def __init__(self, book: Book, point: Candidate, margin: float, nodes: int, known: float) -> None:
        self.book, self.point, self.margin, self.nodes, self.known = book, point, 1 + margin, nodes, known
        estimator = book.estimator
        self.estimator = estimator
        self.total = estimator.model.global_batch_size // point.micro_batch_size
        self.options = []
        for groups in stage_options(estimator, point, book.limits):
            units = [estimator.unit(g.pool, g.tp, point.micro_batch_size, point.recompute) for g in groups]
            use = [0] * len(estimator.cluster.nodes)
            for g in groups:
                use[g.pool] += g.tp * g.count
            if sum(g.count for g in groups) <= self.total and all(units):
                rate = 0.0
                for g, u in zip(groups, units):
                    assert u is not None
                    rate += g.count / (u.layer_f + u.layer_b)
                self.options.append((groups, tuple(use), units, rate))
        self.options.sort(key=lambda option: -option[3])
        self.best_rate = [0.0] * len(estimator.cluster.nodes)
        for pool in range(len(self.best_rate)):
            for tp in (1, 2, 4, 8):
                u = estimator.unit(pool, tp, point.micro_batch_size, point.recompute)
                if u:
                    self.best_rate[pool] = max(self.best_rate[pool], 1 / (u.layer_f + u.layer_b) / tp)

    def limit(self) -> float:
        """Iterations at least this long need not be looked at."""
        return min(self.book.best, self.known) * self.margin

    def run(self) -> None:
        self._grow([], self.book.limits, self.estimator.model.num_layers, 0.0, 0.0)

    def _bound(self, seconds: float, used_usd_per_s: float) -> float:
        return seconds * used_usd_per_s if self.book.goal.objective == "cost" else seconds

    def _grow(self, stages: list[Stage], left: tuple[int, ...], layers: int, before: float, price: float) -> None:
        self.nodes -= 1
        if self.nodes < 0 or self.book.progress.out_of_time:
            raise _GaveUp
        for groups, use, units, _ in self.options:
            if any(u > n for u, n in zip(use, left)):
                continue
            rest = tuple(n - u for n, u in zip(left, use))
            cost = price + sum(self.estimator.price[p] * u for p, u in enumerate(use))
            self._layers(stages, groups, units, rest, layers, before, cost)

    def _layers(
        self,
        stages: list[Stage],
        groups: tuple[Group, ...],
        units: list,
        rest: tuple[int, ...],
        layers: int,
        before: float,
        price: float,
    ) -> None:
        first = not stages
        rate_left = sum(n * r for n, r in zip(rest, self.best_rate))
        for n in range(1, layers + 1):
            last = n == layers
            rate, least = 0.0, 1e30
            for g, u in zip(groups, units):
                seconds = u.both_s(n, first, last)
                rate += g.count / seconds
                least = min(least, seconds)
            busy = before + max(self.total / rate, least)
            if self._bound(busy, price) > self.limit():
                return
            here = [*stages, Stage(n, groups)]
            if last:
                self.book.try_slack(self.point.with_(stages=tuple(here)))
                return
            if not rate_left:
                continue
            ahead = before + least + self.total * (layers - n) / rate_left
            if self._bound(ahead, price) > self.limit():
                continue
            self._grow(here, rest, layers - n, before + least, price)


def branch_and_bound(book: Book, nodes: int, margin: float, known: float = inf) -> bool:
    """Search all 1F1B plans; True when the search was complete.

    Args:
        nodes: Of the tree, at most.
        margin: Plans that are slower than the best by no more than this share are kept.
        known: Value of a plan that is known already.
    """
    model = book.estimator.model
    zeros = (0, 1) if model.distributed_optimizer else (0,)
    if PLAIN not in book.goal.allowed:
        return False
    try:
        for zero, recompute, batch in product(zeros, model.recompute, reversed(model.batch_sizes)):
            tree = _Tree(book, Candidate((), batch, recompute, zero_stage=zero), margin, nodes, known)
            try:
                tree.run()
            finally:
                nodes = tree.nodes
    except _GaveUp:
        return False
    return True
