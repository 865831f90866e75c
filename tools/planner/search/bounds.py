"""What no plan on some GPUs can beat: a relaxation in which every layer of every sequence only needs capacity.

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
from itertools import product
from math import inf

from ..costs.estimate import Estimator
from ..costs.schedules import Schedule
from .goal import Goal
from .pools import Limits
from .relaxation import Relaxation
from .replicas import Family, Point, Replicas, Scope

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
        """Those that might have a plan of less time on these GPUs."""
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
        """Of schedules of one kind."""
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
