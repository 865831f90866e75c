"""Starting points: which pools, cut into how many stages, with which TP, batch and share of the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..candidate import Candidate, Group
from ..estimate import Estimator
from ..search.book import Book, Groups
from ..search.goal import Goal
from ..search.pools import Limits

STAGE_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
USAGE = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625, 0.0)
SLACK = 1.02
WORTH = 1.3
"""Seeds that look worse than the best so far by this factor are not evaluated."""


def operating_points(estimator: Estimator, goal: Goal, limits: Limits) -> list[Candidate]:
    """Batch, recompute and ZeRO stage without stages, the most promising first."""
    model = estimator.model
    zeros = (0, 1) if model.distributed_optimizer else (0,)
    points = [Candidate((), b, r, zero_stage=z) for b in model.batch_sizes for r in model.recompute for z in zeros]

    def bound(point: Candidate) -> float:
        return 1.0 / (1e-30 + sum(best_rate(estimator, p, point) * n for p, n in enumerate(limits) if n))

    return sorted(points, key=lambda p: (bound(p), p.recompute != "none", -p.zero_stage, p.micro_batch_size))


def best_rate(estimator: Estimator, pool: int, point: Candidate) -> float:
    """Layers times sequences per second of one GPU at its best TP size."""
    return max((unit_rate(estimator, pool, tp, point) for tp in (1, 2, 4, 8)), default=0.0)


def unit_rate(estimator: Estimator, pool: int, tp: int, point: Candidate) -> float:
    """Layers times sequences per second of one GPU at this TP size, 0 without figures."""
    unit = estimator.unit(pool, tp, point.micro_batch_size, point.recompute)
    return point.micro_batch_size / (unit.layer_f + unit.layer_b) / tp if unit else 0.0


def partitions(estimator: Estimator, subset: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """Ways to let pools share stages: each alone, all together, by kind, by region."""
    nodes = estimator.cluster.nodes
    out: list[list[tuple[int, ...]]] = [[(p,) for p in subset], [subset]]
    for attribute in (lambda n: n.gpu, lambda n: n.where):
        blocks: dict[str, list[int]] = {}
        for p in subset:
            blocks.setdefault(attribute(nodes[p]), []).append(p)
        out.append([tuple(b) for b in blocks.values()])
    unique = {tuple(sorted(way)): way for way in out}
    return list(unique.values())


class _Cut:
    """Blocks of pools at one TP level and share of their GPUs, to be cut into stages.

    Numbers of stages are in proportion to speed, units spread evenly.  Where a stage gets many units, the
    remainder is left unused (stages of equal width fit each other).
    """

    def __init__(
        self,
        estimator: Estimator,
        blocks: list[tuple[int, ...]],
        tp: dict[int, int],
        share: float,
        point: Candidate,
        limits: Limits,
    ) -> None:
        self._blocks, self._tp = [sorted(block) for block in blocks], tp
        self._units: dict[int, int] = {}
        for p in (p for block in blocks for p in block):
            node = estimator.cluster.nodes[p]
            whole, rest = divmod(limits[p], node.gpus_per_node)
            limit = whole * (node.gpus_per_node // tp[p]) + rest // tp[p]
            self._units[p] = max(1, round(limit * share)) if limit else 0
        units = self._units
        self._power = [sum(units[p] * tp[p] * unit_rate(estimator, p, tp[p], point) for p in b) for b in blocks]
        self._most = [max(units[p] for p in block) for block in blocks]
        self._made: dict[tuple[int, int], list[tuple[Group, ...]] | None] = {}

    def stages(self, wanted: int) -> Groups | None:
        """So many stages; None where that is not possible."""
        if min(self._power) <= 0:
            return None
        counts = [1] * len(self._blocks)
        for _ in range(wanted - len(counts)):
            room = [i for i, n in enumerate(counts) if n < self._most[i]]
            if not room:
                return None
            counts[max(room, key=lambda i: self._power[i] / counts[i])] += 1
        out: list[tuple[Group, ...]] = []
        for i, count in enumerate(counts):
            if (i, count) not in self._made:
                self._made[i, count] = self._of_block(i, count)
            made = self._made[i, count]
            if made is None:
                return None
            out += made
        return tuple(out)

    def _of_block(self, i: int, count: int) -> list[tuple[Group, ...]] | None:
        """The stages of one block; None where one of them would be empty."""
        out = []
        for k in range(count):
            stage = []
            for p in self._blocks[i]:
                each, rest = divmod(self._units[p], count)
                n = each + (1 if k < rest and each < 4 else 0)
                if n:
                    stage.append(Group(p, self._tp[p], n))
            if not stage:
                return None
            out.append(tuple(stage))
        return out


def tp_choices(estimator: Estimator, subset: tuple[int, ...], point: Candidate) -> list[dict[int, int]]:
    """The same TP level everywhere (as far as nodes and figures allow), and the fastest per pool."""
    out: list[dict[int, int]] = []
    for level in (1, 2, 4, 8):
        choice = {}
        for p in subset:
            known = [t for t in (1, 2, 4, 8) if t <= level and unit_rate(estimator, p, t, point) > 0]
            if known:
                choice[p] = known[-1]
        if len(choice) == len(subset) and choice not in out:
            out.append(choice)
    return out


def seeds(book: Book, limit: int, limits: Limits, hope: list[float]) -> Iterator[tuple[Groups, Candidate]]:
    """Seeds on all pools of a part of the cluster, in a promising order.

    Branches whose bound is beyond the best found so far are skipped.

    Args:
        hope: The best sketch of a seed so far, which the caller keeps up to date.
    """
    estimator, goal = book.estimator, book.goal
    model = estimator.model
    points = operating_points(estimator, goal, limits)
    subset = tuple(p for p, n in enumerate(limits) if n)
    ways = partitions(estimator, subset)
    given = 0
    for share in USAGE:
        for point in points:
            for tp in tp_choices(estimator, subset, point):
                used = {p: max(tp[p], limits[p] * share) for p in subset}
                rate = sum(unit_rate(estimator, p, tp[p], point) * n for p, n in used.items())
                bound = model.global_batch_size * model.num_layers / rate
                if goal.objective == "cost":
                    bound *= sum(estimator.price[p] * n for p, n in used.items())
                if bound > SLACK * min(book.to_beat, hope[0] * WORTH):
                    continue
                cuts = [(len(blocks), _Cut(estimator, blocks, tp, share, point, limits)) for blocks in ways]
                for (least, cut), stages in product(cuts, STAGE_COUNTS):
                    if not least <= stages <= model.num_layers:
                        continue
                    groups = cut.stages(stages)
                    if groups is None:
                        continue
                    yield groups, point
                    given += 1
                    if given >= limit:
                        return
