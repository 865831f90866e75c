"""What no plan on some GPUs can beat: a relaxation in which every layer of every sequence only needs capacity.

A plan of a given time ``T`` gives each layer to a stage of ``n`` layers.  The replicas of that stage cannot compute all
the time.  Before their first microbatch come the layers of earlier stages, after their last one either the backward of
these layers or the sum of the gradients of the stage's own layers.  Few layers per stage mean much of the first, many
layers per stage much of the second.  In the rest of ``T`` a replica computes a whole number of microbatches.  So
every GPU has, for every layer, a capacity at the ``n`` that suits it best, and ``T`` is possible only if the
capacities of all GPUs can cover all layers.  The least such ``T`` is the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np
from numpy.typing import NDArray

from ..estimate import Estimator, Unit
from ..search.goal import Goal
from ..search.pools import Limits

Floats = NDArray[np.float64]
TP_SIZES = (1, 2, 4, 8)
EXACT = 1e-3
"""The bound is found to this share of itself, from below."""
MOST_PLACES = 24
"""Places among the layers that are looked at; those between two of them count as the earlier one."""
MOST_CELLS = 20_000_000
"""Of a table of options, places and layers; a larger one takes seconds and gigabytes, and the bound goes without."""


@dataclass(frozen=True, slots=True)
class _Options:
    """Replicas that a plan may use, at one micro batch size and recomputation; one entry of every array each.

    Attributes:
        tp: TP size.
        layer_s, forward_s, backward_s: Of one microbatch through a layer.
        held: Most layers of which one has the state in memory.
        inside_s, outside_s: Summing the gradients of a layer over very many replicas inside a node, and over nodes.
        in_node: Replicas of a node.
    """

    tp: Floats
    layer_s: Floats
    forward_s: Floats
    backward_s: Floats
    held: Floats
    inside_s: Floats
    outside_s: Floats
    in_node: Floats


@dataclass(frozen=True, slots=True)
class _Family:
    """Schedules with the same limits.

    Attributes:
        sharded: Parameters are gathered and gradients reduced beside the passes; replicas hold parts of the state.
        sliced: Sequences are cut.
        pieces: Into so many pieces at most a microbatch is cut on a stage.
    """

    sharded: bool
    sliced: bool
    pieces: int


class _Point:
    """The options at one micro batch size and recomputation, and what a family of schedules makes of them.

    Attributes:
        rates: Per pool, layers times sequences per second of one GPU at its best TP size.
        prices: Per pool, USD of one layer of one sequence.
        ends: Embedding and head, as the fewest layers that they take anywhere.
        pass_s: The fastest forward and backward of a microbatch through all layers.
    """

    def __init__(self, estimator: Estimator, batch: int, recompute: str, family: _Family) -> None:
        self.estimator, self.batch, self.family = estimator, batch, family
        self.layers, self.sequences = estimator.model.num_layers, estimator.model.global_batch_size
        pools = range(len(estimator.cluster.nodes))
        self.rates, self.prices = [0.0 for _ in pools], [inf for _ in pools]
        rows: dict[tuple[float, ...], set[int]] = {}
        units: list[Unit] = []
        for pool, tp in product(pools, TP_SIZES):
            unit = estimator.unit(pool, tp, batch, recompute)
            held = 0 if unit is None else self._held(unit)
            if unit is None or not held:
                continue
            units.append(unit)
            layer, in_node = unit.layer_f + unit.layer_b, estimator.cluster.nodes[pool].gpus_per_node // tp
            sums = _gradient_s(estimator, pool, tp, unit, family.sharded)
            rows.setdefault((tp, layer, unit.layer_f, unit.layer_b, held, *sums, in_node), set()).add(pool)
            self.rates[pool] = max(self.rates[pool], batch / layer / tp)
            self.prices[pool] = estimator.price[pool] / self.rates[pool]
        self.options = _Options(*np.array(list(rows), dtype=float).reshape(-1, 8).T)
        self.used_by = list(rows.values())
        layer_s = [u.layer_f + u.layer_b for u in units]
        ends = [[u.ends_s(first, not first) for u in units] for first in (True, False)]
        self.ends = sum(min((e / t for e, t in zip(row, layer_s)), default=0.0) for row in ends)
        self.pass_s = self.layers * min(layer_s, default=inf) + sum(min(row, default=0.0) for row in ends)
        step = -(-self.layers // MOST_PLACES)
        self.places = np.arange(1, self.layers + 1, step, dtype=float)
        self.weights = np.minimum(step, self.layers + 1 - self.places)
        self._known: tuple[float, list[tuple[Floats, Floats]]] = (-1.0, [])

    @property
    def usable(self) -> bool:
        """Whether any GPU can hold a layer."""
        return any(self.rates)

    def _held(self, unit: Unit) -> int:
        """Most layers of which a rank could hold parameters, gradients and, unless sliced, one microbatch."""
        estimator, family = self.estimator, self.family
        if family.sharded:
            return self.layers
        free = estimator.memory_margin * unit.capacity_bytes - unit.reserved_bytes
        each = estimator.model.element_bytes + 4.0
        if not estimator.model.distributed_optimizer:
            each += estimator.optimizer_per_parameter
        one = unit.layer_parameters * each + (0.0 if family.sliced else unit.layer_bytes)
        return max(0, min(self.layers, int(free // one)))

    def possible(self, seconds: float, limits: Limits, most_gpus: int | None) -> bool:
        """Whether the relaxation has a plan of this time on these GPUs."""
        if seconds < self.pass_s / (self.family.pieces if self.family.sliced else 1):
            return False
        if len(self.used_by) * len(self.places) * self.layers > MOST_CELLS:
            return True  # for all that is known
        gpus = np.array(limits, dtype=float)
        for capacity, needed in self._tables(seconds):
            mean = gpus @ capacity
            if not mean.all():
                return False
            worth = (capacity / mean).max(axis=1)
            if most_gpus is None:
                there = float(gpus @ worth)
            else:
                there, left = 0.0, float(most_gpus)
                for p in np.argsort(-worth):
                    there, left = there + worth[p] * min(left, gpus[p]), left - min(left, gpus[p])
            if there < float((needed / mean).sum()):
                return False
        return True

    def _tables(self, seconds: float) -> list[tuple[Floats, Floats]]:
        """(sequences of a layer that a GPU of each pool can compute, by layer; sequences that each layer needs).

        Once with embedding and head, once with whole numbers of microbatches.
        """
        if self._known[0] == seconds:
            return self._known[1]
        idle, layers = self._idle_s(seconds)
        o = self.options
        each = o.layer_s[:, None, None] * layers
        left = np.maximum(0.0, seconds - idle)
        fits = (each <= left * (1 + 1e-9)) & (layers <= o.held[:, None, None])
        whole = np.where(fits, left / each, 0.0)
        needed = self.sequences * self.weights
        tables = []
        for rounded in (False, True):
            passes = np.floor(whole * (1 + 1e-9)) if rounded else whole
            best = (passes * layers).max(axis=2) * (self.batch / o.tp[:, None])
            capacity = np.zeros((len(self.rates), len(self.places)))
            for row, pools in zip(best, self.used_by):
                for pool in pools:
                    np.maximum(capacity[pool], row, out=capacity[pool])
            demand = needed.copy()
            if not rounded:
                demand[0] += self.sequences * self.ends
            tables.append((capacity, demand))
        self._known = seconds, tables
        return tables

    def _idle_s(self, seconds: float) -> tuple[Floats, Floats]:
        """How long a replica waits at least, ``[option, place, layers of its stage]``, and these numbers of layers."""
        o, family = self.options, self.family
        layers = np.arange(1, self.layers + 1, dtype=float)
        # So many replicas must share a stage of n layers, whatever they are.
        fewest = np.ceil(layers * self.sequences / (seconds * float((self.batch / o.layer_s).max())) - 1e-9)
        share = np.where(fewest > 1, 1 - 1 / np.maximum(fewest, 2), 0.0)
        sums = np.where(fewest <= o.in_node[:, None], o.inside_s[:, None], o.outside_s[:, None])
        tail = sums * share * layers
        runs = (tail <= seconds) & (o.layer_s[:, None] * layers <= seconds) & (layers <= o.held[:, None])
        before = np.maximum(0.0, self.places[:, None] - layers)
        stages = np.ceil(before / max(1, (runs * layers).max()))
        latency = stages * self.estimator.runtime.transfer_latency_s
        if family.sliced:
            passed = before / family.pieces
        else:  # the first chunk of every earlier stage, and no stage has more chunks than layers
            passed = np.maximum(stages, before / np.minimum(layers, family.pieces))
        first = passed * float(o.forward_s.min()) + latency
        last = passed * float(o.backward_s.min()) + latency
        if family.sharded:  # what is summed runs beside the passes, and takes no longer than all of it
            return np.where(tail[:, None, :] > seconds, inf, first + last), layers
        return first + np.maximum(last, tail[:, None, :]), layers


def _gradient_s(estimator: Estimator, pool: int, tp: int, unit: Unit, sharded: bool) -> tuple[float, float]:
    """Least seconds for the gradients of a layer over very many replicas, in a node and between nodes.

    With the distributed optimizer gradients are scattered, and parameters gathered.
    """
    network, model = estimator.network, estimator.model
    size = 4.0 * unit.layer_parameters
    if sharded:
        size /= 2
    elif model.distributed_optimizer:
        size = min(size, (4.0 + model.element_bytes) / 2 * unit.layer_parameters)
    size *= 2 * (1 - estimator.runtime.sync_overlap)
    gpu = estimator.cluster.nodes[pool].gpu
    between = network.rate(pool, pool, tp) / tp
    cap = min(estimator.cluster.nodes[pool].collective_bytes_per_s or inf, estimator.runtime.collective_bytes_per_s)
    inside, outside = size / network.collective[pool], size * (1.0 / between + 1.0 / cap)
    links = [k for k in network.measured if k.operation == "all_reduce" and gpu in (k.first_kind, k.second_kind)]
    each = min([size / 2 / k.bytes_per_s / (1 - 1 / max(2, k.participants)) for k in links], default=inf)
    return min(inside, outside, each), min(outside, each)


class Bounds:
    """What no plan on some GPUs can beat, for one goal; see the module's text."""

    def __init__(self, estimator: Estimator, goal: Goal) -> None:
        self.estimator, self.goal = estimator, goal
        model = estimator.model
        points = product(model.batch_sizes, model.recompute, self._families())
        made = [_Point(estimator, batch, recompute, family) for batch, recompute, family in points]
        self.points = [point for point in made if point.usable]

    def _families(self) -> list[_Family]:
        """Schedules under a parameter window, those that cut sequences, and the others."""
        most: dict[tuple[bool, bool], int] = {}
        for schedule in self.goal.allowed:
            kind = schedule.shards_parameters, schedule.cuts_sequences
            if not schedule.shards_parameters or self.estimator.model.distributed_optimizer:
                most[kind] = max(most.get(kind, 1), schedule.most_pieces(self.estimator))
        return [_Family(*kind, pieces) for kind, pieces in most.items()]

    def ideal(self, limits: Limits) -> float:
        """A weaker bound that takes no time, in the goal's terms: all GPUs compute all the time."""
        if self.goal.objective == "cost":
            return min([self._usd(point, limits) for point in self.points], default=inf)
        return min([self._ideal_s(point, limits) for point in self.points], default=inf)

    def _ideal_s(self, point: _Point, limits: Limits) -> float:
        left = sum(limits) if self.goal.max_gpus is None else self.goal.max_gpus
        rate = 0.0
        for pool in sorted(range(len(limits)), key=lambda p: -point.rates[p]):
            rate += point.rates[pool] * min(left, limits[pool])
            left -= min(left, limits[pool])
        return self._work(point) / rate if rate else inf

    def seconds(self, limits: Limits) -> float:
        """No iteration on these GPUs is shorter."""
        low = min([self._ideal_s(point, limits) for point in self.points], default=inf)
        if low == inf:
            return inf
        if self._possible_s(low, limits):
            return low
        high = 2 * low
        while not self._possible_s(high, limits) and high < 1e3 * low:
            low, high = high, 2 * high
        while high > low * (1 + EXACT):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self._possible_s(middle, limits) else (middle, high)
        return low

    def _possible_s(self, seconds: float, limits: Limits) -> bool:
        most = self.goal.max_gpus
        return any(
            point.possible(seconds, limits, most) for point in self.points if self._ideal_s(point, limits) <= seconds
        )

    def excludes(self, limits: Limits, value: float) -> bool:
        """Whether no plan on these GPUs is better than this value."""
        if self.ideal(limits) >= value:
            return True
        return self.goal.objective != "cost" and value < inf and not self._possible_s(value, limits)

    def _work(self, point: _Point) -> float:
        model = self.estimator.model
        return model.global_batch_size * (model.num_layers + point.ends)

    def value(self, limits: Limits) -> float:
        """The bound in the goal's terms: seconds or USD."""
        return self.seconds(limits) if self.goal.objective != "cost" else self.ideal(limits)

    def _usd(self, point: _Point, limits: Limits) -> float:
        prices = [price for price, n, rate in zip(point.prices, limits, point.rates) if n and rate]
        return self._work(point) * min(prices) if prices else inf
