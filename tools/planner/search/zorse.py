"""Zorse's planner (section 4.3): SPLIT the bandwidth graph into GPU groups, then place layers and count ministages."""

from __future__ import annotations

import time

import networkx as nx

from tools.planner.candidate import Candidate, Group
from tools.planner.estimate import Estimator
from tools.planner.search.auto import Effort, finish
from tools.planner.search.book import Book, Groups
from tools.planner.search.goal import Goal
from tools.planner.search.outcome import Outcome, Progress

Vertex = tuple[int, int, int]
"""(pool, node, part of the node)"""

MAX_GROUPS = 32
FEW_CHUNKS = (2, 3, 4, 6, 8, 12, 16)


def bandwidth_graph(estimator: Estimator, parts: int) -> nx.Graph:
    """Complete graph of nodes (or of ``parts`` equal parts of each), weighted by bandwidth."""
    cluster, network = estimator.cluster, estimator.network
    vertices: list[Vertex] = []
    for p, node in enumerate(cluster.nodes):
        for n in range(min(node.count, -(-node.quota // node.gpus_per_node))):
            vertices += [(p, n, k) for k in range(min(parts, node.gpus_per_node))]
    graph = nx.Graph()
    graph.add_nodes_from(vertices)
    for i, a in enumerate(vertices):
        for b in vertices[i + 1 :]:
            same = a[:2] == b[:2]
            graph.add_edge(a, b, weight=network.intra[a[0]] if same else network.rate(a[0], b[0], 8))
    return graph


def split(graph: nx.Graph, most: int) -> list[list[set[Vertex]]]:
    """SPLIT (Saran and Vazirani): remove the lightest minimum 2-cut until ``most`` parts are there.

    Returns:
        The partitions into 1, 2, ..., ``most`` parts; each is within ``2 - 2/k`` of the minimum k-cut.
    """
    parts: list[set[Vertex]] = [set(graph.nodes)]
    cuts: dict[frozenset[Vertex], tuple[float, set[Vertex]]] = {}
    out = [list(parts)]
    while len(parts) < most:
        best: tuple[float, int, set[Vertex]] | None = None
        for i, part in enumerate(parts):
            if len(part) < 2:
                continue
            key = frozenset(part)
            if key not in cuts:
                weight, (first, _) = nx.stoer_wagner(graph.subgraph(part))
                cuts[key] = (weight, set(first))
            weight, first = cuts[key]
            if best is None or weight < best[0]:
                best = (weight, i, first)
        if best is None:
            break
        _, i, first = best
        parts = [*parts[:i], first, parts[i] - first, *parts[i + 1 :]]
        out.append(list(parts))
    return out


def _groups(estimator: Estimator, part: set[Vertex], parts: int) -> tuple[Group, ...]:
    counts: dict[int, int] = {}
    for pool, _, k in part:
        per_node = estimator.cluster.nodes[pool].gpus_per_node
        mine = min(parts, per_node)
        counts[pool] = counts.get(pool, 0) + per_node // mine + (1 if k < per_node % mine else 0)
    return tuple(Group(pool, 1, n) for pool, n in sorted(counts.items()))


def _inner_bandwidth(estimator: Estimator, part: set[Vertex]) -> float:
    """The slowest link inside a group."""
    pools = sorted({p for p, _, _ in part})
    if len({v[:2] for v in part}) == 1:
        return estimator.network.intra[pools[0]]
    return min(estimator.network.rate(a, b, 8) for a in pools for b in pools)


def search_zorse(estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort = Effort()) -> Outcome:
    """All numbers of groups, batch sizes and ministages; layers in proportion to the groups' speed."""
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
            configure_groups(book, parts)
            if progress.out_of_time:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        outcome.interrupted = True
    finish(book, outcome, estimator, goal, effort, lambda c: c)
    outcome.cpu_s = time.process_time() - started
    return outcome


def configure_groups(book: Book, parts: int, few: bool = False) -> None:
    """Phase 1 for every number of groups, then phase 2 for each (``few``: not every number of ministages)."""
    estimator = book.estimator
    nodes = sum(n.count for n in estimator.cluster.nodes)
    most = min(MAX_GROUPS, nodes * parts, estimator.model.num_layers)
    for partition in split(bandwidth_graph(estimator, parts), most):
        order = sorted(partition, key=lambda part: -_inner_bandwidth(estimator, part))
        _configure(book, tuple(_groups(estimator, part, parts) for part in order), few)


def _configure(book: Book, groups: Groups, few: bool) -> None:
    """Phase 2: every batch size and number of ministages, with and without offloading."""
    model = book.estimator.model
    zero = 1 if model.distributed_optimizer else 0
    for batch in model.batch_sizes:
        for recompute in model.recompute:
            plain = Candidate((), batch, recompute, zero_stage=zero)
            book.try_groups(groups, plain)
            if not zero or "ministage" not in book.goal.schedules:
                continue
            for chunks in range(2, model.num_layers // len(groups) + 1):
                if few and chunks not in FEW_CHUNKS:
                    continue
                for offload in (False, True):
                    like = plain.with_(schedule="ministage", chunks=chunks, offload=offload)
                    score, candidate = book.try_groups(groups, like)
                    if candidate is not None and min(s.layers for s in candidate.stages) < chunks:
                        return
