"""What GPUs can do at most in a given time: the capacities that ``bounds.py`` compares with what a plan has to do.

A :class:`Relaxation` is of plans that have something in common: the family of their schedules, micro batch size,
recomputation, context-parallel size.  Its rows are the kinds of replicas that such a plan can have (``replicas.py``).
"""

from __future__ import annotations

from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .pools import Limits
from .replicas import Floats, Point, Replicas, Row

MOST_PLACES = 24
"""Places among the layers that are looked at; those between two of them count as the earlier one."""
MOST_CELLS = 20_000_000
"""Of a table of rows, places and layers; a larger one takes seconds and gigabytes, and the bound goes without."""


class _Table(NamedTuple):
    """Holds what GPUs can do in a time.

    Attributes:
        capacity: ``[pool, place]``: sequences of a layer that a GPU can compute.
        needed: Sequences that each layer needs.
        ends: ``[pool, 2]``: shares of a GPU's time that embedding and head of a sequence take; None to leave them out.
    """

    capacity: Floats
    needed: Floats
    ends: Floats | None


class Relaxation:
    """Plans of one family, micro batch size, recomputation and (range of) context-parallel size.

    Args:
        replicas: Of the cluster.
        point: What the plans have in common.
        share: What a layer counts without its attention, where anybody may attend for others; None for the best.

    Attributes:
        share: The same; 1 where nobody does.
        rates: Per pool, layers times sequences per second of one GPU at its best.
        fastest: The same of GPUs with memory for everything.
        prices: Per pool, USD of one GPU and second.
        ends: Embedding and head, as the fewest layers that a GPU of any pool could do in that time.
    """

    def __init__(self, replicas: Replicas, point: Point, share: float | None = None) -> None:
        estimator, scope = replicas.estimator, replicas.scope
        self.family, self.batch, _, self.cp = point
        self.latency_s = estimator.runtime.transfer_latency_s
        self.gathered = estimator.model.element_bytes / 4.0  # bytes of parameters over those of gradients
        self.quotas = [node.quota for node in estimator.cluster.nodes]
        self.layers, self.sequences = estimator.model.num_layers, estimator.model.global_batch_size
        self.grain, self.smallest = scope.grain or self.batch or 1, scope.smallest or self.batch or 1
        self.counts = np.array([self.layers] if self.batch is None else range(1, self.layers + 1), dtype=float)
        found = replicas.rows(point)
        self.share = self._own_share(found) if share is None else share
        self.fastest = self._rates(replicas.rows(point, is_roomy=True) if self.batch is None else found)
        self._rows = [row for row in found if self._room(row).any()]
        self._most_layers = [float((self._room(row) * self.counts).max()) for row in self._rows]
        self.used_by = [found[row] for row in self._rows]
        self.rates = self._rates({row: found[row] for row in self._rows})
        self._fill_in()
        self.prices = estimator.price
        self._known: tuple[float, list[_Table]] = (-1.0, [])

    def _rates(self, found: dict[Row, set[int]]) -> list[float]:
        """Per pool, of one GPU in the replica that suits it best."""
        rates = [0.0 for _ in self.quotas]
        for row, pools in found.items():
            rate = 1 / (_counted_s(row, self.share) * row.gpus)
            for pool in pools:
                rates[pool] = max(rates[pool], rate)
        return rates

    def _room(self, row: Row) -> NDArray[np.bool_]:
        """For which numbers of layers there is memory."""
        free, state, fixed, kept, most_kept = row.memory
        return fixed + state * self.counts + kept * np.minimum(self.counts, most_kept) <= free

    def _own_share(self, found: dict[Row, set[int]]) -> float:
        """Returns what a layer counts without its attention, when both together count one and anybody may attend.

        Any share is true.  This one gives the highest bound where all GPUs compute all the time.
        """
        if not self.family.exchanges:
            return 1.0

        def capacity(share: float) -> float:
            best: dict[int, float] = {}
            for row, pools in found.items():
                for pool in pools:
                    best[pool] = max(best.get(pool, 0.0), 1 / (_counted_s(row, share) * row.gpus))
            return sum(self.quotas[pool] * rate for pool, rate in best.items())

        shares = {1.0}
        for row in found:
            if row.given_s < inf:
                rest = row.pool_s - row.attention_s
                turns = row.given_s / (row.given_s + row.attention_s), row.given_s / row.pool_s, rest / row.pool_s
                shares |= {turn for turn in turns if 0 < turn < 1}
        return min(shares, key=capacity)

    def _fill_in(self) -> None:
        """The tables of what is known without a time."""
        rows, family = self._rows, self.family
        counts = [1] if family.sharded else [0, 1]  # embeddings alone can run while the first parameters are gathered
        each, rates = self._least(self._ends_gpu_s()), np.array(self.rates)
        there = rates > 0
        self.ends = float((each[there] * rates[there, None]).min(axis=0)[counts].sum()) if there.any() else 0.0
        self.pass_s = 0.0
        if self.batch is not None:  # of the largest microbatch; a vocabulary may be split over a stage per layer
            own = min((r.own_s for r in rows), default=inf)
            shortest = [min((r.ends_s[i] for r in rows), default=0.0) for i in (0, 1)]
            self.pass_s = self.batch * (own if family.sliced else self.layers * own + sum(shortest) / self.layers)
        waits = family.pieces < inf and self.batch is not None
        step = -(-self.layers // MOST_PLACES) if waits else self.layers
        self.places = np.arange(1, self.layers + 1, step, dtype=float)
        self.weights = np.minimum(step, self.layers + 1 - self.places)

    @property
    def usable(self) -> bool:
        """Whether any GPU can hold a layer."""
        return any(self.rates)

    # -- the capacities ----------------------------------------------------------------------------

    def ideal_s(self, limits: Limits, most_gpus: int | None) -> float:
        """All these GPUs compute all the time."""
        return _covered_s(self._work, self.rates, limits, most_gpus)

    def least_s(self, limits: Limits, most_gpus: int | None) -> float:
        """The same with memory for everything, and without embedding and head; no less for larger CP sizes."""
        return _covered_s(self.sequences * self.layers, self.fastest, limits, most_gpus)

    def usd(self, limits: Limits) -> float:
        """The work where it is cheapest."""
        return self._work * self._price(self.rates, limits)

    def least_usd(self, limits: Limits) -> float:
        """The same as :meth:`least_s`."""
        return self.sequences * self.layers * self._price(self.fastest, limits)

    def _price(self, rates: list[float], limits: Limits) -> float:
        """USD of one layer of one sequence."""
        return min((price / rate for price, n, rate in zip(self.prices, limits, rates) if n and rate), default=inf)

    @property
    def _work(self) -> float:
        """Layers times sequences, with embedding and head."""
        return self.sequences * (self.layers + self.ends)

    def possible(self, seconds: float, limits: Limits, most_gpus: int | None) -> bool:
        """Whether the relaxation has a plan of this time on these GPUs."""
        if seconds < self.pass_s or not self._hold_the_model(limits):
            return False
        if len(self._rows) * len(self.places) * len(self.counts) > MOST_CELLS:
            return True  # for all that is known
        gpus = np.array(limits, dtype=float)
        for capacity, needed, ends in self._tables(seconds):
            mean = gpus @ capacity
            if not mean.all():
                return False
            worth = (capacity / mean).max(axis=1)
            wanted = float((needed / mean).sum())
            if _of_most(worth, gpus, most_gpus) < wanted:
                return False
            if ends is not None and not self._with_ends(worth, wanted, gpus, most_gpus, ends):
                return False
        return True

    def _with_ends(self, worth: Floats, wanted: float, gpus: Floats, most_gpus: int | None, ends: Floats) -> bool:
        """Whether there is time for embedding and head as well.

        A GPU computes layers, embeddings or heads, whatever counts most.  Whatever an embedding and a head count, the
        GPUs must reach what all layers, embeddings and heads count together.  An embedding counts as much as it may
        where no GPU prefers embeddings to layers.  A head counts that, or so much that GPUs of some pools prefer it.

        Args:
            worth: Of a GPU of each pool that computes layers.
            wanted: What all layers count.
            ends: Shares of a GPU's time that embedding and head of a sequence take, by pool.
        """
        used = (gpus > 0) & (worth > 0)
        worth, gpus, shares = worth[used], gpus[used], ends[used]
        prices = worth[:, None] * shares
        wanted += self.sequences * float(prices[:, 0].min())
        of_head = sorted(prices[:, 1].tolist())
        for price in of_head if most_gpus is None and of_head[0] else of_head[:1]:
            busy = np.maximum(worth, price / shares[:, 1]) if price else worth
            if _of_most(busy, gpus, most_gpus) < wanted + self.sequences * price:
                return False
        return True

    def _hold_the_model(self, limits: Limits) -> bool:
        """Whether replicas on all these GPUs have memory for every layer once."""
        held = [0.0 for _ in limits]
        for row, most, pools in zip(self._rows, self._most_layers, self.used_by):
            for pool in pools:
                if row.gpus <= limits[pool]:
                    held[pool] = max(held[pool], most * limits[pool] / row.gpus)
        return sum(held) >= self.layers * (1 - 1e-9)

    def _tables(self, seconds: float) -> list[_Table]:
        """Once with embedding and head, once with whole numbers of sequences or microbatches."""
        if self._known[0] == seconds:
            return self._known[1]
        own, fixed, gpus = self._columns("own_s", "fixed_s", "gpus")
        each = own[:, None, None] * self.counts + fixed[:, None, None]
        idle, runs = self._idle_s(seconds)
        left = np.maximum(0.0, seconds - idle)
        fits = runs[:, None, :] & (each * self.grain <= left * (1 + 1e-9))
        counted = np.array([[_counted_s(row, self.share, row.fixed_s / n) for n in self.counts] for row in self._rows])
        needed = self.sequences * self.weights
        ends = self._ends(np.where(fits[:, 0, :], left[:, 0, :], 0.0).max(axis=1))
        tables = [_Table(self._of_pools(np.where(fits, left / counted[:, None, :], 0.0), gpus), needed, ends)]
        if self.cp[0] == self.cp[1]:
            whole = np.floor(left / (each * self.grain) * (1 + 1e-9)) * self.grain * self.counts
            tables.append(_Table(self._of_pools(np.where(fits, whole, 0.0), gpus), needed, None))
        self._known = seconds, tables
        return tables

    def _ends(self, left: Floats) -> Floats:
        """Shares of a GPU's time that embedding and head of a sequence take, by pool.

        Stages that have a part of the vocabulary can embed while they wait for the first microbatch or gather.

        Args:
            left: Seconds in which a replica of each row computes at most.
        """
        seconds = self._ends_gpu_s()
        seconds[:, 0] *= len(self.places) == 1 and not self.family.sharded
        shares = np.full_like(seconds, inf)
        np.divide(seconds, left[:, None], out=shares, where=left[:, None] > 0)
        return self._least(shares)

    def _ends_gpu_s(self) -> Floats:
        """``[row, 2]``: GPU seconds of embedding and head of a sequence."""
        return np.array([[s * row.gpus for s in row.ends_s] for row in self._rows]).reshape(-1, 2)

    def _least(self, of_rows: Floats) -> Floats:
        """``[pool, ...]``: the least of the rows of each pool."""
        least = np.full((len(self.quotas), *of_rows.shape[1:]), inf)
        for row, pools in zip(of_rows, self.used_by):
            for pool in pools:
                np.minimum(least[pool], row, out=least[pool])
        return least

    def _columns(self, *names: str) -> list[Floats]:
        return [np.array([getattr(row, name) for row in self._rows], dtype=float) for name in names]

    def _of_pools(self, work: Floats, gpus: Floats) -> Floats:
        """``[pool, place]`` of one GPU, from ``[row, place, layers of its stage]`` of a replica."""
        best = work.max(axis=2) / gpus[:, None]
        capacity = np.zeros((len(self.rates), len(self.places)))
        for row, pools in zip(best, self.used_by):
            for pool in pools:
                np.maximum(capacity[pool], row, out=capacity[pool])
        return capacity

    def _idle_s(self, seconds: float) -> tuple[Floats, NDArray[np.bool_]]:
        """How long a replica waits at least, ``[row, place, layers of its stage]``, and whether there may be one."""
        family, layers = self.family, self.counts
        own, forward, backward = self._columns("own_s", "forward_s", "backward_s")
        sums, tail = self._sums_s(seconds)
        room = np.array([self._room(row) for row in self._rows])
        runs = room & (tail <= seconds) & (own[:, None] * layers <= seconds)
        first = last = np.zeros((len(self.places), len(layers)))
        if len(self.places) > 1:
            before = np.maximum(0.0, self.places[:, None] - layers)
            stages = np.ceil(before / max(1, (runs * layers).max()))
            latency = stages * self.latency_s
            passed = family.passed(before, stages, layers) * self.smallest
            first = passed * float(forward.min()) + latency
            last = passed * float(backward.min()) + latency
        if family.sharded:  # the others are gathered and summed beside the passes
            gathered = self.gathered * sums
            return np.maximum(first, gathered[:, None, :]) + np.maximum(last, sums[:, None, :]), runs
        return first + np.maximum(last, tail[:, None, :]), runs

    def _sums_s(self, seconds: float) -> tuple[Floats, Floats]:
        """Least seconds of summing the gradients of one layer, and of what collectives and updates take in all.

        ``[row, layers of its stage]``.  The replicas of a stage do its work in the time.  So many of them must be
        there besides one of a row, at the speed of the fastest one; all of them sum.  They sum inside a node only if
        the GPUs of one node can do all the work.
        """
        layers, rows = self.counts, self._rows
        own, update, node = self._columns("own_s", "update_s", "node")
        inside, outside = np.array([row.sums_s for row in rows]).T
        work = layers * self.sequences
        others = np.maximum(0.0, work - seconds / own[:, None]) * float((own * self.cp[1]).min()) / seconds
        ranks = self.cp[0] + np.ceil(others - 1e-9)
        share = np.where(ranks > 1, 1 - 1 / np.maximum(ranks, 2), 0.0)
        is_local = work * self._fastest_s[:, None] <= node[:, None] * seconds * (1 + 1e-9)
        sums = np.where(is_local, inside[:, None], outside[:, None]) * share
        each = sums * (1 + self.gathered) if self.family.sharded else sums
        return sums, (each + update[:, None]) * layers

    @cached_property
    def _fastest_s(self) -> Floats:
        """By row, GPU seconds of one layer of one sequence in the pool where they are the fewest."""
        least = [inf for _ in self.quotas]
        for row, pools in zip(self._rows, self.used_by):
            for pool in pools:
                least[pool] = min(least[pool], row.own_s * row.gpus)
        return np.array([min(least[pool] for pool in pools) for pools in self.used_by])


def _of_most(worth: Floats, gpus: Floats, most_gpus: int | None) -> float:
    """Returns what these GPUs are worth together, or so many of them at most."""
    if most_gpus is None:
        return float(worth @ gpus)
    found, left = 0.0, float(most_gpus)
    for p in np.argsort(-worth):
        found, left = found + worth[p] * min(left, gpus[p]), left - min(left, gpus[p])
    return found


def _covered_s(work: float, rates: list[float], limits: Limits, most_gpus: int | None) -> float:
    """How long the fastest of these GPUs take."""
    left = sum(limits) if most_gpus is None else most_gpus
    rate = 0.0
    for pool in sorted(range(len(limits)), key=lambda p: -rates[p]):
        rate += rates[pool] * min(left, limits[pool])
        left -= min(left, limits[pool])
    return work / rate if rate else inf


def _counted_s(row: Row, share: float, fixed_s: float = 0.0) -> float:
    """Seconds of what counts as one layer of one sequence, whichever way they are spent best.

    On layers and their attention in the same pool; on layers whose attention other pools do; or on attention alone.

    Args:
        share: What a layer counts without its attention; 1 where nobody attends for others.
        fixed_s: Of a pass, per layer.
    """
    help_s = row.attention_s / (1 - share) if share < 1 else inf
    return min(row.pool_s + fixed_s, (row.given_s + fixed_s) / share, help_s)
