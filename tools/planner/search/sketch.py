"""A quick guess of an iteration time, which says what is worth evaluating: the coarse step before the closed form.

Stages are known by a few figures each, which candidates share: the rate at which their replicas compute layers,
the layers that fit into memory, and what reducing the gradients of a layer takes.  A guess needs no more than
dividing the layers by these rates.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from ..candidate import Candidate, Group, Stage
from ..estimate import Estimator, allocate
from ..schedules import schedule_of
from ..search.balance import layer_cap, stage_load
from ..search.goal import Goal
from ..stages import tail_s

Groups = tuple[tuple[Group, ...], ...]

TOO_LARGE = 100.0
"""Factor of what does not fit into memory, by far above all that does."""
DOUBTFUL = 0.125
"""Stages that lack memory for no more than this share of the layers may fit after all."""


class _Stage(NamedTuple):
    """What a stage is taken for.

    Attributes:
        layer_s: All microbatches through one layer, on the replica that takes longest.
        ends: Embedding and head, as so many layers.
        pass_s: Forward and backward of one microbatch through a layer, on average.
        ends_size: Parameters of embedding and head, as so many layers.
        width: Replicas.
        usd_per_s: Of its GPUs.
    """

    layer_s: float
    ends: float
    pass_s: float
    ends_size: float
    width: int
    usd_per_s: float


class Sketch:
    """Guesses of one search, in the goal's terms."""

    def __init__(self, estimator: Estimator, goal: Goal) -> None:
        self.estimator, self.goal = estimator, goal
        self.known: dict[object, dict[object, _Stage | None]] = {}
        self.tails: dict[object, float] = {}

    def value(self, groups: Groups, like: Candidate, most: float = inf) -> float:
        """About the seconds or USD of the best layers for these stages.

        Returns:
            Infinite when they cannot run, or certainly look worse than ``most``.
        """
        model, last = self.estimator.model, len(groups) - 1
        if last >= model.num_layers or model.global_batch_size % like.micro_batch_size:
            return inf
        total = model.global_batch_size // like.micro_batch_size
        known = self.known.setdefault((like.micro_batch_size, like.recompute), {})
        stages: list[_Stage] = []
        for s, groups_of in enumerate(groups):
            key = groups_of, s == 0, s == last
            if key not in known:
                known[key] = self._priced(groups_of, like, total, s == 0, s == last)
            found = known[key]
            if found is None:
                return inf
            stages.append(found)
        usd = sum([s.usd_per_s for s in stages]) if self.goal.objective == "cost" else 1.0
        if usd * model.num_layers > most * sum([1.0 / s.layer_s for s in stages]):
            return inf
        later = sum([s.width for s in stages])
        caps: list[int] = []
        for s, groups_of in enumerate(groups):
            later -= stages[s].width
            caps.append(layer_cap(self.estimator, groups_of, like, later, total, s == 0, s == last, 0.0))
        lacking = model.num_layers - sum(caps)
        if lacking > 0:
            factor = 1.05 if lacking <= DOUBTFUL * model.num_layers else TOO_LARGE * (1 + lacking)
            usd, caps = usd * factor, [model.num_layers] * (last + 1)
        return usd * self._seconds(groups, like, stages, caps, total)

    def _seconds(self, groups: Groups, like: Candidate, stages: list[_Stage], caps: list[int], total: int) -> float:
        layers = divide([s.layer_s for s in stages], [s.ends for s in stages], caps, self.estimator.model.num_layers)
        cut = like.chunks * like.slices
        worst, busy_s, passes = 0, 0.0, 0.0
        for i, (n, s) in enumerate(zip(layers, stages)):
            all_s = (n + s.ends) * s.layer_s
            passes += (n + s.ends) * s.pass_s
            if all_s > busy_s:
                worst, busy_s = i, all_s
        passes -= (layers[worst] + stages[worst].ends) * stages[worst].pass_s
        ways = self.estimator.ways_s(groups, like.micro_batch_size, like.cp)
        widths = [s.width for s in stages]
        each = total * like.chunks
        link_s = max([way * each / min(a, b) for way, a, b in zip(ways, widths, widths[1:])], default=0.0)
        schedule = schedule_of(like)
        loss = 0.0
        if len(groups) > 1:
            loss = schedule.loss_of(schedule.mismatch(like), widths, any(len(g) > 1 for g in groups))
        tail = 0.0
        for n, s, groups_of in zip(layers, stages, groups):
            tail = max(tail, (n + s.ends_size) * self._tail(groups_of, like))
        return max(busy_s * (1 + loss), link_s) + passes / cut + 2 * sum(ways) + tail

    def _priced(self, groups: tuple[Group, ...], like: Candidate, total: int, first: bool, last: bool) -> _Stage | None:
        load = stage_load(self.estimator, groups, like, first, last)
        width = sum([g.count for g in groups])
        if load is None or width > total:
            return None
        found = allocate([t for _, t, _ in load.rates], [g.count for g in groups], total)
        if found is None:
            return None
        usd = sum([self.estimator.price[g.pool] * g.tp * g.count for g in groups])
        unit = load.units[0]
        size = (unit.embedding_parameters if first else 0) + (unit.head_parameters if last else 0)
        ends = load.time(1) / load.layer_s - 1.0
        return _Stage(found[0], ends, width * load.layer_s, size / unit.layer_parameters, width, usd)

    def _tail(self, groups: tuple[Group, ...], like: Candidate) -> float:
        """Gradient reduction and update of a layer."""
        key = groups, like.zero_stage, like.schedule, like.chunks
        if key not in self.tails:
            load = stage_load(self.estimator, groups, like, False, False)
            assert load is not None  # the caller knows its load
            one = like.with_(stages=(Stage(1, groups),) * 3)
            self.tails[key] = tail_s(self.estimator, one, load.units, 1)
        return self.tails[key]


def divide(seconds: list[float], ends: list[float], caps: list[int], wanted: int) -> list[int]:
    """Layers of each stage so that the slowest ends as early as possible: the integer optimum, by rising levels.

    Args:
        seconds: Of one layer.
        ends: What comes on top, in layers.
        caps: Most layers of each stage.
        wanted: Layers in all, at most the sum of ``caps``.
    """
    level = (wanted + sum(ends)) / sum([1.0 / t for t in seconds])
    layers = [min(cap, max(1, int(level / t - e))) for t, e, cap in zip(seconds, ends, caps)]
    missing = wanted - sum(layers)
    while missing < 0:  # stages that must have a layer although they are slow
        at = max([i for i, n in enumerate(layers) if n > 1], key=lambda i: (layers[i] + ends[i]) * seconds[i])
        layers[at] -= 1
        missing += 1
    while missing > 0:
        open_stages = [i for i, n in enumerate(layers) if n < caps[i]]
        if not open_stages:
            return layers
        at = min(open_stages, key=lambda i: (layers[i] + 1 + ends[i]) * seconds[i])
        layers[at] += 1
        missing -= 1
    return layers
