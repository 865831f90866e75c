"""Lower bounds on the time and the price of any plan: all GPUs compute all the time, each as fast as it can.

A plan computes every layer of every sequence forwards and backwards, and embeds and judges every sequence once.  For
each of these works a GPU takes no less than in the replica (TP and EP size) and the pass (number of sequences) that
suit it best.  So an iteration is no shorter than the work over the rates of all GPUs, whoever has made the plan:

- A rate is in layers per second.  An embedding counts as the fewest layers that a GPU of any pool could compute in its
  time.  A head counts any number, and a GPU does what counts most.  So no GPU does more than its rate says, however the
  works are divided over the GPUs.
- Under schedules that cut sequences attention may be computed on other GPUs (the context exchange).  A layer then is
  one without attention, and attention counts as an embedding does.
- Context parallelism makes no GPU faster.  Memory is not looked at: main memory and more ranks may make room.

Everything else is free: waiting in pipelines, sums of gradients, gathers of parameters, transfers, layers that cannot
be divided evenly.  GPUs that a plan leaves out count as if they computed too.

The search asks a tighter bound which parts of a cluster are worth a search of their own: that of the plans which it
tries there, with equal microbatches, without the exchange and without expert parallelism.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from math import inf
from typing import NamedTuple

from ..costs.estimate import Estimator
from ..costs.unit import Unit
from ..inputs.model import Model
from ..inputs.model_parts import shares_left
from .outcome import Goal
from .pools import Limits
from .poplar import BATCH_SIZES
from .seeds import sizes_over_replicas

FEW_SIZES = 1024  # where so many sizes of a pass have figures all are looked at: between measured ones a curve may bend
_OF_A_RANK = {"gpu", "gpus_per_node", "network_bytes_per_s", "intra_node_bytes_per_s"}
"""Of a pool, what the figures of its ranks depend on."""


class _Works(NamedTuple):
    """Least seconds of one GPU for one sequence."""

    layer_s: float
    attention_s: float
    embedding_s: float
    head_s: float


class Bounds:
    """Holds what no plan on some GPUs can beat, for one goal; see the module's text.

    Args:
        of_search: Only of what the search tries on parts of a cluster.
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
        # A GPU may have more of the layers that suit it than of others, which no rate reckons with.
        sizes: list[tuple[int, ...]] = [(n,) for n in model.batch_sizes] if of_search else [()]
        # The works of all pools in passes of some sizes, or of all that the model file allows.
        points = () if model.kinds else product(sizes, model.recompute)
        self._plans = [[self._best(pool, *point) for pool in range(len(nodes))] for point in points]

    def value(self, limits: Limits) -> float:
        """Returns what no plan on these GPUs can beat, in the goal's terms (seconds or USD); 0 if unknown."""
        if self.goal.objective != "cost":
            return self.seconds(limits)
        prices = self.estimator.price
        return self._least(limits, lambda layers, rates: layers * min(p / r for p, r in zip(prices, rates) if r))

    def seconds(self, limits: Limits) -> float:
        """Returns a time that no iteration on these GPUs can beat."""

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
        """The least value of plans of any recomputation and size of passes.

        Args:
            value_of: By layers of an iteration, with all else counted as layers, and layers per second of a GPU of
                each pool.  Whatever a head counts, the value holds; the largest one is taken of those at which the
                GPUs of a pool are as good at heads as at layers.
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
                rates = [  # layers that a GPU does at most in a second
                    max(1 / w.layer_s, head / w.head_s if w.head_s else 0.0) if w is not None and n else 0.0
                    for w, n in zip(works, limits)
                ]
                values.append(value_of(layers, rates))
            found.append(max(values))
        return min(found, default=inf if self._plans else 0.0)

    def _best(self, pool: int, sizes: tuple[int, ...], recompute: str) -> _Works | None:
        """Returns the least of all replicas and passes of a pool; None where none has figures."""
        node = self.estimator.cluster.nodes[pool]
        found = [
            work
            for tp, ep in self._replicas(node.gpu, min(node.gpus_per_node, node.quota))
            for size in self._sizes(node.gpu, tp, sizes)
            if (work := self._seconds(self._alike[pool], tp, ep, size, recompute)) is not None
        ]
        return _Works(*map(min, zip(*found))) if found else None

    def _replicas(self, gpu: str, most: int) -> Iterator[tuple[int, int]]:
        """TP and EP sizes."""
        experts = self.estimator.model.experts
        divided = experts is not None and not self._of_search
        for tp in (tp for tp in self.estimator.costs.tp_sizes(gpu) if tp <= most):
            largest = max([tp, *sizes_over_replicas(self.estimator)]) if divided else 1
            for ep in range(1, largest + 1):
                if (tp % ep == 0 or ep % tp == 0) and (experts is None or experts.count % ep == 0):
                    yield tp, ep

    def _sizes(self, gpu: str, tp: int, given: Sequence[int]) -> list[int]:
        """Sequences of a pass."""
        model, known = self.estimator.model, self.estimator.costs.max_batch(gpu, tp)
        most = int(min(known, model.global_batch_size))
        own = range(1, most + 1) if known <= FEW_SIZES else {*BATCH_SIZES, most}
        allowed = given or model.micro_batch_sizes or own
        return [n for n in allowed if n <= most]

    def _find_seconds(self, pool: int, tp: int, ep: int, size: int, recompute: str) -> _Works | None:
        """Returns what a GPU of a replica takes for one sequence of a pass, at least."""
        estimator, gpu = self.estimator, self.estimator.cluster.nodes[pool].gpu
        cut = {"ep": ep, "expert_tp": tp // ep}
        unit = estimator.unit(pool, tp, size, recompute, **cut if ep > 1 else {})
        if unit is None:
            return None
        each = tp / size * estimator.costs.alone_share(gpu, size, tp)
        pass_s = unit.pass_f + unit.pass_b + 2 * estimator.runtime.operation_s
        layer_s = unit.layer_f + unit.layer_b + pass_s / estimator.model.num_layers  # of one pass through all layers
        whole_s = attention_s = unit.attention_f + unit.attention_b
        if attention_s and self._cuts:  # the kernels of slices may be faster; two have fewest sums
            sliced: Unit | None = estimator.unit(pool, tp, size, recompute, **cut, slices=2)
            attention_s = min(attention_s, sliced.attention_f + sliced.attention_b) if sliced else attention_s
        shared_s = attention_s if self._exchanges else 0.0  # that other GPUs may do
        layer_s += attention_s - whole_s - shared_s
        ends = unit.ends_s(True, False) * each, unit.ends_s(False, True) * each
        return _Works(layer_s * each, shared_s * each * self._least_attention, *ends)


def _least_attention(model: Model) -> float:
    """Returns the attention of the first sequences of documents, however many, over the mean of all."""
    if model.document_lengths is None:
        return 1.0
    shares = shares_left(model.document_lengths, model.seq_length, model.attention_window, model.windowed_layers)
    means = [total / (i + 1) for i, total in enumerate(accumulate(shares))]
    return min(means) / model.attention_share
