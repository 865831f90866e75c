"""Parts of a cluster that are searched on their own, and what no plan on them can beat."""

from __future__ import annotations

from itertools import combinations, product
from math import inf, sqrt
from typing import NamedTuple

from ..estimate import Estimator, Unit
from ..search.goal import Goal

Limits = tuple[int, ...]
"""GPUs that may be used of each pool."""
TP_SIZES = (1, 2, 4, 8)
MOST_POOLS = 4
"""With more pools not every choice of them is a part."""


def all_gpus(estimator: Estimator) -> Limits:
    """Everything within the quotas."""
    return tuple(node.quota for node in estimator.cluster.nodes)


def parts(estimator: Estimator) -> list[Limits]:
    """Parts of the cluster worth a search of their own; the whole is not among them.

    First every choice of whole pools (on clusters of many pools: one pool, kind or region alone or left out, and
    pairs of kinds), then one node less of each pool, then half of each pool.
    """
    nodes, most = estimator.cluster.nodes, all_gpus(estimator)
    if len(nodes) <= MOST_POOLS:
        chosen = {limits for limits in product(*((0, q) for q in most)) if any(limits)}
    else:
        chosen = _by_attribute(estimator)
    out = sorted(chosen, key=lambda limits: (-sum(limits), limits))
    for less in (lambda q, n: (q - 1) // n * n, lambda q, n: q // 2 // n * n):
        for p, node in enumerate(nodes):
            out.append(tuple(less(q, node.gpus_per_node) if i == p else q for i, q in enumerate(most)))
    return [limits for limits in dict.fromkeys(out) if any(limits) and limits != most]


def one_node_less(estimator: Estimator, limits: Limits) -> bool:
    """Whether a part is the cluster without one node, or less."""
    nodes = estimator.cluster.nodes
    missing = [(most - n, node.gpus_per_node) for most, n, node in zip(all_gpus(estimator), limits, nodes) if n < most]
    return len(missing) == 1 and missing[0][0] <= missing[0][1]


def _by_attribute(estimator: Estimator) -> set[Limits]:
    """One pool alone, one left out, one kind of GPU, one region, pairs of kinds."""
    nodes, most = estimator.cluster.nodes, all_gpus(estimator)
    pools = range(len(nodes))
    kept: list[set[int]] = [{p} for p in pools] + [set(pools) - {p} for p in pools]
    for values in ([n.gpu for n in nodes], [n.where for n in nodes]):
        for count in (1, 2):
            for chosen in combinations(dict.fromkeys(values), count):
                kept.append({p for p in pools if values[p] in chosen})
    return {tuple(q if p in keep else 0 for p, q in enumerate(most)) for keep in kept}


class _Point(NamedTuple):
    """The best that GPUs can do at one micro batch size and recomputation.

    Attributes:
        rates: Per pool, layers times sequences per second of one GPU at its best TP size.
        prices: Per pool, USD of one layer of one sequence.
        ends: Embedding and head, as the fewest layers that they take anywhere.
        layer_s: The fastest forward and backward of a layer.
        held: Most layers that any rank has memory for.
    """

    rates: list[float]
    prices: list[float]
    ends: float
    layer_s: float
    held: int


class Bounds:
    """What no plan on some GPUs can beat.

    All GPUs on which a layer fits compute all the time, each at its best TP size, and nothing is ever sent.  A plan
    has one micro batch size and one recomputation.  Where sequences are not cut and parameters not sharded, two
    things come on top.  One microbatch passes all layers, forward and backward.  And ranks have no memory for all
    layers: who computes layer ``l`` of ``L`` with memory for ``c`` layers waits while one microbatch passes
    ``l - c`` layers (the least form of the bubble, :meth:`_with_bubble`).
    """

    def __init__(self, estimator: Estimator, goal: Goal) -> None:
        self.estimator, self.goal = estimator, goal
        model = estimator.model
        shards = model.distributed_optimizer and any(s.shards_parameters for s in goal.allowed)
        self.fills = not shards and not any(s.cuts_sequences for s in goal.allowed)
        self.pieces = max([s.most_pieces(estimator) for s in goal.allowed], default=1)
        points = [self._point(batch, recompute) for batch, recompute in product(model.batch_sizes, model.recompute)]
        self.points = [p for p in points if any(p.rates)]

    def _point(self, batch: int, recompute: str) -> _Point:
        estimator, rates, prices = self.estimator, [], []
        ends = layer_s = inf
        held = 1
        for pool in range(len(estimator.cluster.nodes)):
            best = 0.0
            for tp in TP_SIZES:
                unit = estimator.unit(pool, tp, batch, recompute)
                layers = 0 if unit is None else self._layers_held(unit)
                if unit is None or not layers:
                    continue
                layer = unit.layer_f + unit.layer_b
                best = max(best, batch / layer / tp)
                ends, layer_s = min(ends, unit.ends_s(first=True, last=True) / layer), min(layer_s, layer)
                held = max(held, layers)
            rates.append(best)
            prices.append(estimator.price[pool] / best if best else inf)
        return _Point(rates, prices, ends, layer_s, held)

    def _layers_held(self, unit: Unit) -> int:
        """Most layers of which a rank could hold parameters, gradients and, unless sliced, one microbatch."""
        estimator = self.estimator
        free = estimator.memory_margin * unit.capacity_bytes - unit.reserved_bytes
        one = unit.layer_parameters * (estimator.model.element_bytes + 4.0)
        if self.fills:
            one += unit.layer_bytes
        return min(estimator.model.num_layers, int(free // one))

    def seconds(self, limits: Limits) -> float:
        """No iteration on these GPUs is shorter."""
        return min([self._seconds(point, limits) for point in self.points], default=inf)

    def _work(self, point: _Point) -> float:
        model = self.estimator.model
        return model.global_batch_size * (model.num_layers + point.ends)

    def _seconds(self, point: _Point, limits: Limits) -> float:
        left = sum(limits) if self.goal.max_gpus is None else self.goal.max_gpus
        rate = 0.0
        for pool in sorted(range(len(limits)), key=lambda p: -point.rates[p]):
            rate += point.rates[pool] * min(left, limits[pool])
            left -= min(left, limits[pool])
        if not rate:
            return inf
        if not self.fills:
            return self._work(point) / rate
        model = self.estimator.model
        return max(self._with_bubble(point, rate), point.layer_s * (model.num_layers + point.ends))

    def _with_bubble(self, point: _Point, rate: float) -> float:
        """Seconds ``T`` of which the share of work in each layer is lost while ``l - c`` layers are passed.

        With the work ``W`` and the rate ``R`` of all GPUs, ``R T >= W + sum of r idle`` over the GPUs, each of which
        does at most ``r T`` of the work.  So ``R T >= W + W A / T``, where ``A`` is the mean of what is waited over
        the layers (embedding and head wait for nothing).
        """
        layers, work = self.estimator.model.num_layers, self._work(point)
        missing = max(0, layers - point.held)
        waited = point.layer_s * missing * (missing + 1) / (2 * (layers + point.ends) * self.pieces)
        return (work + sqrt(work * work + 4 * rate * work * waited)) / (2 * rate)

    def value(self, limits: Limits) -> float:
        """The same in the goal's terms: seconds or USD."""
        if self.goal.objective != "cost":
            return self.seconds(limits)
        return min([self._usd(point, limits) for point in self.points], default=inf)

    def _usd(self, point: _Point, limits: Limits) -> float:
        prices = [price for price, n, rate in zip(point.prices, limits, point.rates) if n and rate]
        return self._work(point) * min(prices) if prices else inf
