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


def seed_groups(
    estimator: Estimator,
    blocks: list[tuple[int, ...]],
    tp: dict[int, int],
    share: float,
    stages: int,
    point: Candidate,
    limits: Limits,
) -> Groups | None:
    """Stages for blocks of pools: numbers of stages in proportion to speed, units spread evenly.

    Where a stage gets many units, the remainder is left unused (stages of equal width fit each other).
    """
    units: dict[int, int] = {}
    for block in blocks:
        for p in block:
            node = estimator.cluster.nodes[p]
            whole, rest = divmod(limits[p], node.gpus_per_node)
            limit = whole * (node.gpus_per_node // tp[p]) + rest // tp[p]
            units[p] = max(1, round(limit * share)) if limit else 0
    power = [sum(units[p] * tp[p] * unit_rate(estimator, p, tp[p], point) for p in block) for block in blocks]
    if min(power) <= 0:
        return None
    counts = [1] * len(blocks)
    for _ in range(stages - len(blocks)):
        room = [i for i, block in enumerate(blocks) if counts[i] < max(units[p] for p in block)]
        if not room:
            return None
        counts[max(room, key=lambda i: power[i] / counts[i])] += 1
    out: list[tuple[Group, ...]] = []
    for block, count in zip(blocks, counts):
        for k in range(count):
            stage = []
            for p in block:
                n = units[p] // count + (1 if k < units[p] % count and units[p] < 4 * count else 0)
                if n:
                    stage.append(Group(p, tp[p], n))
            if not stage:
                return None
            out.append(tuple(sorted(stage)))
    return tuple(out)


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
                if bound > SLACK * min(book.best, hope[0] * WORTH):
                    continue
                for blocks, stages in product(ways, STAGE_COUNTS):
                    if not len(blocks) <= stages <= model.num_layers:
                        continue
                    groups = seed_groups(estimator, blocks, tp, share, stages, point, limits)
                    if groups is None:
                        continue
                    yield groups, point
                    given += 1
                    if given >= limit:
                        return
