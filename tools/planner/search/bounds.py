"""Lower bounds on the time of any plan: a relaxation in which every layer of every sequence only needs capacity.

A plan of a given time ``T`` gives each layer to a stage of ``n`` layers.  The replicas of that stage cannot compute all
the time.  After their last microbatch come the sum of the gradients of the stage's own layers and the optimizer's step.
In the rest of ``T`` a replica computes whole sequences.  So every GPU has, for every layer, a capacity at the ``n``
that suits it best, and ``T`` is possible only if the capacities of all GPUs can cover all layers.  The least such ``T``
is the bound.  It is below every plan of the goal's schedules that keeps to the model file, searched or written by hand.
What is left out, and why a plan can only be slower for it:

- **Sizes of microbatches.**  Where the model file names none, every divisor of the global batch is one, and a plan of
  one stage may have passes of any size that fits.  In a pipeline of unequal microbatches a small one takes its share of
  the largest one's time.  So replicas compute a whole number of sequences, or of what all allowed sizes are multiples
  of, at the speed of the largest microbatch.
- **Context and expert parallelism.**  A replica of CP size ``c`` has ``c`` times as many GPUs.  It is not faster per
  GPU, but has a ``c``-th of the activations, and of the time of one sequence.  Plans have one CP size.  Sizes between
  two powers of two count together: as fast per GPU as the smallest of them, and otherwise as the largest.  Experts are
  divided over any part of a TP group, in every replica differently.
- **Waiting.**  Slices may be as small as one likes, so that nobody waits.  Without slices and chunks a replica waits
  while a whole microbatch passes the layers of earlier stages, and for their backward, unless the sum of its own
  gradients takes longer.  With chunks it waits for the first layer of every earlier stage.
- **The context exchange.**  Attention of any layer may run on any GPU, and who gives it away waits for queries and
  outputs to travel.  A layer counts ``w`` without its attention, and its attention ``1 - w``.  A GPU does what counts
  most in its time: layers with attention, layers whose attention GPUs of other pools do, or such attention.  Whole
  sequences count for what cannot be given away.  Each ``w`` gives a bound; the best one is taken.  Where documents
  share sequences, some have less attention than others, and a GPU may get those: giving it away takes no time then.
- **Memory.**  Activations that can wait in main memory do.  Keys and values of sliced sequences stay, and so do three
  passes of whole sequences.  Optimizer states are divided over any number of replicas.  All replicas
  together hold every layer once.
- **Sums of gradients.**  A replica computes no more than ``T`` long, so that so many others must share its stage, at
  the speed of the fastest one; all of them sum.  They sum inside a node only if the GPUs of one node can do the work
  of the stage in ``T``.  Under a parameter window gradients are summed beside the passes.  But nothing runs before the
  first layer of a stage is gathered, and nothing but the sum is left when the gradients of its last one are there; and
  all gathers and sums of a rank come one after the other, one of each per layer at least.
- **The largest microbatch** goes through all layers, forwards and backwards, one after the other; without slices
  ``T`` is not shorter than that.  The vocabulary may be split over as many stages as there are layers.
- **Embedding and head.**  They may be split over all stages, and TP groups that are slow at layers may be fast at
  heads.  So a GPU's time goes into layers, embeddings and heads in any parts, each in the replica that does it best.
  Let a head count ``h`` layers.  A GPU reaches what counts most in its time, ``T`` is possible only if all GPUs
  together reach what layers and heads count, and that for every ``h``.  The best ones are those at which GPUs of some
  pool are as good at heads as at layers, because between two of them both sides grow evenly.  Stages embed while they
  wait for the first microbatch or gather: embeddings count only where nobody waits.
- **Everything else** takes no time: transfers, gathers of parameters, the launches of short slices.

The search asks a tighter bound which parts of a cluster are worth a search of their own: that of the plans which it
tries there (``Scope.of_searched_parts``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..costs.estimate import Estimator
from ..costs.schedules import Schedule
from .outcome import Goal
from .pools import Limits
from .replicas import Family, Floats, Point, Replicas, Row, Scope

# What GPUs can do at most in a given time: the capacities that ``bounds.py`` compares with what a plan has to do.
#
# A :class:`Relaxation` is of plans that have something in common: the family of their schedules, micro batch size,
# recomputation, context-parallel size.  Its rows are the kinds of replicas that such a plan can have
# (``replicas.py``).


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
        """Returns the least time with memory for all, without embedding and head; no less for larger CP sizes."""
        return _covered_s(self.sequences * self.layers, self.fastest, limits, most_gpus)

    def usd(self, limits: Limits) -> float:
        """The work where it is cheapest."""
        return self._work * self._price(self.rates, limits)

    def least_usd(self, limits: Limits) -> float:
        """Returns the least money, with the same left out as in :meth:`least_s`."""
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


EXACT = 1e-3
"""The bound is found to this share of itself, from below."""


class _Chain:
    """Relaxations that differ in the context-parallel size, in ascending order; made when they are asked for.

    GPUs get no faster with larger sizes, so that beyond some of them nobody asks.
    """

    def __init__(self, replicas: Replicas, point: Point, sizes: list[tuple[int, int]]) -> None:
        self._replicas, self._point, self._sizes = replicas, point, sizes
        self._made: list[Relaxation] = []

    def __iter__(self) -> Iterator[Relaxation]:
        for i, sizes in enumerate(self._sizes):
            if i == len(self._made):
                share = self._made[0].share if self._made else None  # so that they can be compared
                self._made.append(Relaxation(self._replicas, self._point._replace(cp=sizes), share))
            yield self._made[i]

    def up_to(self, seconds: float, limits: Limits, most_gpus: int | None) -> Iterator[Relaxation]:
        """Yields the relaxations that might have a plan of less time on these GPUs."""
        for relaxation in self:
            if relaxation.least_s(limits, most_gpus) >= seconds:
                return
            if relaxation.usable and relaxation.ideal_s(limits, most_gpus) < seconds:
                yield relaxation


class Bounds:
    """Holds what no plan on some GPUs can beat, for one goal; see the module's text.

    Args:
        scope: Which plans; None for all that the model file allows.
    """

    def __init__(self, estimator: Estimator, goal: Goal, scope: Scope | None = None) -> None:
        self.estimator, self.goal = estimator, goal
        # A GPU may have more of the layers that suit it than of others, which no relaxation reckons with.
        self.is_known = not estimator.model.kinds
        model = estimator.model
        scope = scope or Scope.of_all_plans(model)
        replicas, batches = Replicas(estimator, scope), list[int | None](reversed(scope.batches))
        if scope.sizes is not None:
            batches.append(None)
        most = max(node.quota for node in estimator.cluster.nodes)
        sizes = list(_context_parallel_sizes(most)) if scope.is_whole else [(1, 1)]
        self._chains = [
            _Chain(replicas, Point(family, batch, recompute), sizes)
            for batch, family, recompute in product(batches, self._families(scope), model.recompute)
        ]

    def _families(self, scope: Scope) -> list[Family]:
        """Schedules under a parameter window, those that cut sequences, and the others.

        What some of them can do, those that cut them can do better, as far as a relaxation knows.
        """
        model = self.estimator.model
        allowed = [s for s in self.goal.allowed if model.distributed_optimizer or not s.shards_parameters]
        plain = [s for s in allowed if not s.shards_parameters]
        sliced = [s for s in plain if s.cuts_sequences]
        kinds = [[s for s in allowed if s.shards_parameters], (sliced or plain) if scope.is_whole else plain]
        if not scope.is_whole:
            kinds[1:] = [sliced, [s for s in plain if not s.cuts_sequences]]
        return [self._family(scope, kind) for kind in kinds if kind]

    def _family(self, scope: Scope, schedules: list[Schedule]) -> Family:
        """Returns the family of schedules of one kind."""
        sharded, sliced = schedules[0].shards_parameters, schedules[0].cuts_sequences
        pieces = float(max(s.most_pieces(self.estimator) for s in schedules))
        if not scope.is_whole:
            return Family(sharded, sliced, pieces)
        return Family(sharded, sliced, inf if sharded or sliced else pieces, exchanges=sliced, is_uneven=True)

    def ideal(self, limits: Limits) -> float:
        """A weaker bound that takes no time, in the goal's terms: all GPUs compute all the time."""
        return self._least_usd(limits) if self.goal.objective == "cost" else self._ideal_s(limits)

    def _ideal_s(self, limits: Limits) -> float:
        if not self.is_known:
            return 0.0
        best, most = inf, self.goal.max_gpus
        for chain in self._chains:
            for relaxation in chain.up_to(best, limits, most):
                best = min(best, relaxation.ideal_s(limits, most))
        return best

    def seconds(self, limits: Limits) -> float:
        """No iteration on these GPUs is shorter."""
        ideal, least, most = self._ideal_s(limits), inf, self.goal.max_gpus
        if not self.is_known:
            return 0.0
        for chain in self._chains:
            for relaxation in chain.up_to(least, limits, most):
                if least == inf or relaxation.possible(least * (1 - EXACT), limits, most):
                    least = min(least, _seconds_of(relaxation, limits, most))
        return max(ideal, least * (1 - EXACT)) if least < inf else ideal

    def is_in_time(self, limits: Limits) -> bool:
        """Whether these GPUs may reach the goal's iterations per second."""
        wanted = self.goal.min_iterations_per_s
        return wanted is None or self._ideal_s(limits) * wanted <= 1

    def excludes(self, limits: Limits, value: float) -> bool:
        """Whether no plan on these GPUs is better than this value."""
        if self.ideal(limits) >= value:
            return True
        return self.goal.objective != "cost" and value < inf and not self._possible_s(value, limits)

    def _possible_s(self, seconds: float, limits: Limits) -> bool:
        most = self.goal.max_gpus
        return not self.is_known or any(
            relaxation.possible(seconds, limits, most)
            for chain in self._chains
            for relaxation in chain.up_to(seconds, limits, most)
        )

    def value(self, limits: Limits) -> float:
        """The bound in the goal's terms: seconds or USD."""
        return self.seconds(limits) if self.goal.objective != "cost" else self._least_usd(limits)

    def _least_usd(self, limits: Limits) -> float:
        if not self.is_known:
            return 0.0
        best = inf
        for chain in self._chains:
            for relaxation in chain:
                if relaxation.least_usd(limits) >= best:
                    break
                if relaxation.usable:
                    best = min(best, relaxation.usd(limits))
        return best


def _seconds_of(relaxation: Relaxation, limits: Limits, most: int | None) -> float:
    """The least time that a relaxation does not exclude, from below."""
    low = relaxation.ideal_s(limits, most)
    if low == inf or relaxation.possible(low, limits, most):
        return low
    high = 2 * low
    while not relaxation.possible(high, limits, most):
        low, high = high, 2 * high
        if high > 1e6 * relaxation.ideal_s(limits, most):
            return inf
    while high > low * (1 + EXACT):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if relaxation.possible(middle, limits, most) else (middle, high)
    return low


def _context_parallel_sizes(most: int) -> Iterator[tuple[int, int]]:
    """Powers of two, and all sizes between two of them."""
    size = 1
    while size <= most:
        yield size, size
        if size > 1 and size < most:
            yield size + 1, 2 * size - 1
        size *= 2
