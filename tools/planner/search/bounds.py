"""Lower bounds on the time and the price of any plan: all GPUs compute all the time, each as fast as it can.

A plan computes every layer of every sequence forwards and backwards, and embedding and head once per sequence.  Each
GPU does each of these kinds of work at best at the rate of the TP size, EP size and microbatch size that suit it best.
So an iteration is no shorter than the work divided by the rates of all GPUs, for any plan, also a hand-written one:

- A rate is in layers per second.  An embedding counts as the fewest layers that a GPU of any pool could compute in its
  time.  A head may count as any number of layers, and each GPU does the work that counts most.  So no GPU does more
  than its rate, however the work is divided over the GPUs.
- Under schedules that cut sequences, attention may be computed on other GPUs (the context exchange).  A layer is then
  counted without attention, and attention is counted like an embedding.
- Context parallelism makes no GPU faster.  Memory is ignored: offloading and more ranks may make room.

Everything else is free: waiting in pipelines, gradient reductions, parameter gathers, transfers, layers that cannot
be divided evenly.  GPUs that a plan leaves out count as if they computed, too.

The search uses a tighter bound to decide which parts of a cluster to search: that of the plans which it
tries there, with equal microbatches, without the exchange and without expert parallelism.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from math import inf
from typing import NamedTuple

from ..costs.estimate import Estimator
from ..costs.layer import ALONE, Spread
from ..costs.unit import Unit
from ..inputs.model import Model
from ..inputs.model_parts import shares_left
from .outcome import Goal
from .pools import Limits
from .poplar import BATCH_SIZES
from .seeds import sizes_over_replicas

FEW_SIZES = 1024  # up to this many microbatch sizes with figures, all are tried: the curve may bend between them
_OF_A_RANK = {"gpu", "gpus_per_node", "network_bytes_per_s", "intra_node_bytes_per_s"}
"""Fields of a pool on which the figures of its ranks depend."""


class _Works(NamedTuple):
    """Least seconds of one GPU for one sequence, by kind of work."""

    layer_s: float
    attention_s: float
    embedding_s: float
    head_s: float


class Bounds:
    """Lower bounds for plans on given GPUs under one goal; see the module's docstring.

    Args:
        of_search: Bound only the plans that the search tries on parts of a cluster.
    """

    def __init__(self, estimator: Estimator, goal: Goal, of_search: bool = False) -> None:
        self.estimator, self.goal, self._of_search = estimator, goal, of_search
        cuts = any(s.cuts_sequences for s in goal.allowed)
        self._exchanges, self._cuts = cuts and not of_search, cuts or not of_search
        self._seconds = cache(self._find_seconds)
        self._least_attention = _least_attention(estimator.model)
        model, nodes = estimator.model, estimator.cluster.nodes
        described = [node.model_dump_json(include=_OF_A_RANK) for node in nodes]
        self._alike = [described.index(text) for text in described]
        # Layers of several kinds have no bound: a GPU may compute more of the kind that suits it.
        sizes: list[tuple[int, ...]] = [(n,) for n in model.batch_sizes] if of_search else [()]
        # The works of all pools in passes of some sizes, or of all that the model file allows.
        points = () if model.kinds else product(sizes, model.recompute)
        self._plans = [[self._best(pool, *point) for pool in range(len(nodes))] for point in points]

    def value(self, limits: Limits) -> float:
        """Returns the lower bound for plans on these GPUs, in the goal's unit (seconds or USD); 0 if unknown."""
        if self.goal.objective != "cost":
            return self.seconds(limits)
        prices = self.estimator.price
        return self._least(limits, lambda layers, rates: layers * min(p / r for p, r in zip(prices, rates) if r))

    def seconds(self, limits: Limits) -> float:
        """Returns the lower bound on the time of an iteration on these GPUs."""

        def least_s(layers: float, rates: list[float]) -> float:
            left, rate = sum(limits) if self.goal.max_gpus is None else self.goal.max_gpus, 0.0
            for each, count in sorted(zip(rates, limits), reverse=True):
                rate += each * min(left, count)
                left -= min(left, count)
            return layers / rate

        return self._least(limits, least_s)

    def is_in_time(self, limits: Limits) -> bool:
        """Whether these GPUs may reach the goal's iterations per second."""
        wanted = self.goal.min_iterations_per_s
        return wanted is None or self.seconds(limits) * wanted <= 1

    def excludes(self, limits: Limits, value: float) -> bool:
        """Whether no plan on these GPUs is better than this value."""
        return self.value(limits) >= value

    def _least(self, limits: Limits, value_of: Callable[[float, list[float]], float]) -> float:
        """The least value over all recomputations and microbatch sizes.

        Args:
            value_of: Function of the layers of an iteration, with other work counted as layers, and of the layers per
                second of a GPU of each pool.  It is a bound for any weight of a head in layers.  The largest bound is
                taken over the weights at which the GPUs of some pool are as good at heads as at layers.
        """
        model, found = self.estimator.model, []
        for works in self._plans:
            there = [w for w, n in zip(works, limits) if w is not None and n]
            if not there:
                continue
            attention, embedding = (min(w[i] / w.layer_s for w in there) for i in (1, 2))
            values = []
            for head in {w.head_s / w.layer_s for w in there}:
                layers = model.global_batch_size * (model.num_layers * (1 + attention) + embedding + head)
                rates = [  # most layers per second of a GPU
                    max(1 / w.layer_s, head / w.head_s if w.head_s else 0.0) if w is not None and n else 0.0
                    for w, n in zip(works, limits)
                ]
                values.append(value_of(layers, rates))
            found.append(max(values))
        return min(found, default=inf if self._plans else 0.0)

    def _best(self, pool: int, sizes: tuple[int, ...], recompute: str) -> _Works | None:
        """Returns the least seconds over all replicas and passes of a pool; None where none has figures."""
        node = self.estimator.cluster.nodes[pool]
        found = [
            work
            for tp, ep in self._replicas(node.gpu, min(node.gpus_per_node, node.quota))
            for size in self._sizes(node.gpu, tp, sizes)
            if (work := self._seconds(self._alike[pool], tp, ep, size, recompute)) is not None
        ]
        return _Works(*map(min, zip(*found))) if found else None

    def _replicas(self, gpu: str, most: int) -> Iterator[tuple[int, int]]:
        """Yields the (TP, EP) sizes of possible replicas."""
        experts = self.estimator.model.experts
        divided = experts is not None and not self._of_search
        for tp in (tp for tp in self.estimator.costs.tp_sizes(gpu) if tp <= most):
            largest = max([tp, *sizes_over_replicas(self.estimator)]) if divided else 1
            for ep in range(1, largest + 1):
                if (tp % ep == 0 or ep % tp == 0) and (experts is None or experts.count % ep == 0):
                    yield tp, ep

    def _sizes(self, gpu: str, tp: int, given: Sequence[int]) -> list[int]:
        """The microbatch sizes to try."""
        model, known = self.estimator.model, self.estimator.costs.max_batch(gpu, tp)
        most = int(min(known, model.global_batch_size))
        own = range(1, most + 1) if known <= FEW_SIZES else {*BATCH_SIZES, most}
        allowed = given or model.micro_batch_sizes or own
        return [n for n in allowed if n <= most]

    def _find_seconds(self, pool: int, tp: int, ep: int, size: int, recompute: str) -> _Works | None:
        """Returns the least seconds of a GPU of a replica for one sequence of a pass."""
        estimator, gpu = self.estimator, self.estimator.cluster.nodes[pool].gpu
        spread = Spread(ep=ep, expert_tp=tp // ep)
        unit = estimator.unit(pool, tp, size, recompute, spread if ep > 1 else ALONE)
        if unit is None:
            return None
        each = tp / size * estimator.costs.alone_share(gpu, size, tp)
        pass_s = unit.pass_f + unit.pass_b + 2 * estimator.runtime.operation_s
        layer_s = unit.layer_f + unit.layer_b + pass_s / estimator.model.num_layers  # of one pass through all layers
        whole_s = attention_s = unit.attention_f + unit.attention_b
        if attention_s and self._cuts:  # slice kernels may be faster; with two slices they merge least
            sliced: Unit | None = estimator.unit(pool, tp, size, recompute, spread._replace(slices=2))
            attention_s = min(attention_s, sliced.attention_f + sliced.attention_b) if sliced else attention_s
        shared_s = attention_s if self._exchanges else 0.0  # that other GPUs may do
        layer_s += attention_s - whole_s - shared_s
        ends = unit.ends_s(True, False) * each, unit.ends_s(False, True) * each
        return _Works(layer_s * each, shared_s * each * self._least_attention, *ends)


def _least_attention(model: Model) -> float:
    """Returns the least ratio of the attention of some first sequences of documents to the mean of all sequences."""
    if model.document_lengths is None:
        return 1.0
    shares = shares_left(model.document_lengths, model.seq_length, model.attention_window, model.windowed_layers)
    means = [total / (i + 1) for i, total in enumerate(accumulate(shares))]
    return min(means) / model.attention_share
