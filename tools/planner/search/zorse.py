"""Zorse's planner (section 4.3): SPLIT the bandwidth graph into GPU groups, then place layers and count ministages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import networkx as nx

from ..costs.candidate import Candidate, Group
from ..costs.estimate import Estimator
from ..costs.schedules import MINISTAGES
from ..search.book import Book, Groups
from ..search.finish import finish
from ..search.outcome import Outcome, Progress
from ..search.pools import Limits, all_gpus
from .outcome import NORMAL, Effort, Goal

Part = dict[tuple[int, int], int]
"""Nodes of a group: ``(pool, parts of the node that are in the group) -> number of such nodes``."""

MAX_GROUPS = 32
FEW_CHUNKS = (2, 3, 4, 6, 8, 12, 16)


def whole_cluster(estimator: Estimator, parts: int, limits: Limits | None = None) -> Part:
    """All nodes, each in ``parts`` equal parts: the vertices of the bandwidth graph.

    Args:
        limits: GPUs that may be used of each pool; None: all.
    """
    out: Part = {}
    for p, (node, most) in enumerate(zip(estimator.cluster.nodes, limits or all_gpus(estimator), strict=True)):
        nodes = min(node.count, -(-most // node.gpus_per_node))
        if nodes:
            out[p, _pieces(estimator, p, parts)] = nodes
    return out


def _pieces(estimator: Estimator, pool: int, parts: int) -> int:
    """Into how many equal parts the nodes of a pool are cut: at most ``parts``."""
    size = estimator.cluster.nodes[pool].gpus_per_node
    return max(n for n in range(1, parts + 1) if size % n == 0)


def minimum_cut(estimator: Estimator, part: Part) -> tuple[float, Part, Part]:
    """A minimum 2-cut of a group's bandwidth graph: its weight and both sides.

    Parts of a node are twins (equal bandwidth to everything else), and so are equal nodes of a pool.  The
    weight of a cut is concave in the number of twins on one side, so that twins stay together, or a single
    one of them is cut off alone.  What is left is the cut between classes of twins (Stoer and Wagner).
    """
    network = estimator.network

    def weight(a: tuple[int, int], b: tuple[int, int]) -> float:
        return a[1] * b[1] * network.rate(a[0], b[0], 8)

    options: list[tuple[float, Part, Part]] = []
    for kind, count in part.items():
        outside = sum((n - (other == kind)) * weight(kind, other) for other, n in part.items())
        pool, size = kind
        if count > 1 or len(part) > 1:
            options.append((outside, {kind: 1}, _less(part, kind, size)))
        if size > 1:
            options.append((outside / size + (size - 1) * network.intra[pool], {(pool, 1): 1}, _less(part, kind, 1)))
    if len(part) > 2:
        graph = nx.Graph()
        kinds = list(part)
        for i, a in enumerate(kinds):
            for b in kinds[i + 1 :]:
                graph.add_edge(a, b, weight=part[a] * part[b] * weight(a, b))
        value, sides = nx.stoer_wagner(graph)
        first, second = ({kind: part[kind] for kind in side} for side in sides)
        options.append((value, first, second))
    elif len(part) == 2:
        (a, m), (b, n) = part.items()
        options.append((m * n * weight(a, b), {a: m}, {b: n}))
    return min(options, key=lambda option: option[0])


def _less(part: Part, kind: tuple[int, int], size: int) -> Part:
    """The group without ``size`` parts of one node of this kind."""
    out = dict(part)
    out[kind] -= 1
    rest = (kind[0], kind[1] - size)
    if rest[1]:
        out[rest] = out.get(rest, 0) + 1
    return {k: n for k, n in out.items() if n}


def split(estimator: Estimator, parts: int, most: int, limits: Limits | None = None) -> Iterator[list[Part]]:
    """SPLIT (Saran and Vazirani): remove the lightest minimum 2-cut until ``most`` groups are there.

    Args:
        parts: Equal parts of a node.
        most: So many groups.
        limits: GPUs that may be used of each pool; None: all.

    Yields:
        The partitions into 1, 2, ..., ``most`` groups; each is within ``2 - 2/k`` of the minimum k-cut.
    """
    groups = [whole_cluster(estimator, parts, limits)]
    cuts = {}
    yield list(groups)
    while len(groups) < most:
        best: tuple[float, int, Part, Part] | None = None
        for i, part in enumerate(groups):
            if sum(n * size for (_, size), n in part.items()) < 2:
                continue
            key = tuple(sorted(part.items()))
            if key not in cuts:
                cuts[key] = minimum_cut(estimator, part)
            weight, first, second = cuts[key]
            if best is None or weight < best[0]:
                best = (weight, i, first, second)
        if best is None:
            return
        _, i, first, second = best
        groups = [*groups[:i], first, second, *groups[i + 1 :]]
        yield list(groups)


def _groups(estimator: Estimator, part: Part, parts: int) -> tuple[Group, ...]:
    counts: dict[int, int] = {}
    for (pool, size), nodes in part.items():
        each = estimator.cluster.nodes[pool].gpus_per_node // _pieces(estimator, pool, parts)
        counts[pool] = counts.get(pool, 0) + nodes * size * each
    return tuple(Group(pool, 1, n) for pool, n in sorted(counts.items()))


def _inner_bandwidth(estimator: Estimator, part: Part) -> float:
    """The slowest link inside a group."""
    pools = sorted({pool for pool, _ in part})
    if sum(part.values()) == 1:
        return estimator.network.intra[pools[0]]
    return min(estimator.network.rate(a, b, 8) for a in pools for b in pools)


def search_zorse(
    estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort = NORMAL, bound_s: float = inf
) -> Outcome:
    """All numbers of groups, batch sizes and ministages; layers in proportion to the groups' speed.

    Args:
        bound_s: Plans that certainly take longer are left out.
    """
    progress = progress or Progress()
    started = time.process_time()
    book = Book(estimator, goal, progress)
    outcome = Outcome("zorse")
    nodes = sum(n.count for n in estimator.cluster.nodes)
    try:
        for parts in (1, 2, 4):
            if nodes * parts > 4 * MAX_GROUPS and parts > 1:
                break
            progress.text = f"cutting the bandwidth graph, {parts} part(s) per node"
            configure_groups(book, parts, bound_s=bound_s)
            if progress.out_of_time:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        outcome.interrupted = True
    finish(book, outcome, estimator, goal, replace(effort, regroups=False), lambda c: c, bound=bound_s)
    outcome.cpu_s = time.process_time() - started
    return outcome


def configure_groups(book: Book, parts: int, few: bool = False, bound_s: float = inf) -> None:
    """Phase 1 for every number of groups, then phase 2 for each (``few``: not every number of ministages)."""
    estimator = book.estimator
    nodes = sum(whole_cluster(estimator, 1, book.limits).values())
    most = min(MAX_GROUPS, nodes * parts, estimator.model.num_layers)
    for partition in split(estimator, parts, most, book.limits):
        order = sorted(partition, key=lambda part: -_inner_bandwidth(estimator, part))
        _configure(book, tuple(_groups(estimator, part, parts) for part in order), few, bound_s)
        if book.progress.spent:
            return


def _configure(book: Book, groups: Groups, few: bool, bound_s: float) -> None:
    """Phase 2: every batch size and number of ministages, with and without offloading."""
    model = book.estimator.model
    zero = 1 if model.distributed_optimizer else 0
    for batch in model.batch_sizes:
        for recompute in model.recompute:
            if _least_s(book.estimator, groups, batch, recompute) > bound_s:
                continue
            plain = Candidate((), batch, recompute, zero_stage=zero)
            book.try_groups(groups, plain)
            if not zero or MINISTAGES not in book.goal.allowed:
                continue
            for chunks in range(2, model.num_layers // len(groups) + 1):
                if few and chunks not in FEW_CHUNKS:
                    continue
                for offload in (False, True):
                    like = MINISTAGES.of(plain, chunks, offload)
                    _, candidate = book.try_groups(groups, like)
                    if candidate is not None and min(s.layers for s in candidate.stages) < chunks:
                        return


def _least_s(estimator: Estimator, groups: Groups, batch: int, recompute: str) -> float:
    """All layers of all microbatches, divided perfectly over all GPUs; one layer at least on every stage."""
    whole, slowest = 0.0, inf
    for stage in groups:
        rate = 0.0
        for g in stage:
            unit = estimator.unit(g.pool, g.tp, batch, recompute)
            if unit is None:
                return inf
            rate += g.count / (unit.layer_f + unit.layer_b)
        whole, slowest = whole + rate, min(slowest, rate)
    return (estimator.model.global_batch_size // batch) * max(estimator.model.num_layers / whole, 1 / slowest)
