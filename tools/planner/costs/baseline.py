"""What a homogeneous framework would run on a mixed cluster: the plans that others are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from ..inputs.cluster import NodeGroup
from .candidate import Candidate, Group, Stage
from .estimate import Estimate, Estimator

MOST_GROUPS = 4
"""Up to so many node groups every choice of them is tried; beyond it all, each kind and each region."""


def even_splits(estimator: Estimator, zero: int | None = None) -> list[Candidate]:
    """All GPUs with TP 1, equal stages of each size, equal batches.

    Args:
        zero: ZeRO stage; by default that of Megatron's distributed optimizer where the model allows it.
    """
    model = estimator.model
    singles = [p for p, n in enumerate(estimator.cluster.nodes) for _ in range(n.quota)]
    out = []
    for count in (k for k in range(1, min(len(singles), model.num_layers) + 1) if len(singles) % k == 0):
        if model.num_layers % count == 0:
            stages = _stages(singles, 1, count, len(singles) // count, model.num_layers // count)
            out += _operating_points(estimator, stages, zero)
    return out


def stock_plans(estimator: Estimator) -> Iterator[Candidate]:
    """What stock Megatron can run: one TP size, equal stages, as many equal replicas of each, equal batches (1F1B).

    To it all GPUs look alike.  Tried are parts of the cluster (see ``MOST_GROUPS``) with the node groups in both
    orders, every TP size that all of them have, every number of stages that divides the layers, and as many
    replicas as there are GPUs for and the microbatches divide over.
    """
    model, nodes = estimator.model, estimator.cluster.nodes
    for pools in _parts(nodes):
        sizes = set.intersection(*(set(estimator.costs.tp_sizes(nodes[p].gpu)) for p in pools))
        for tp in sorted(sizes):
            for order in {pools, pools[::-1]}:
                seats = [p for p in order for _ in range(_tensor_groups(nodes[p], tp))]
                for count in range(1, min(len(seats), model.num_layers) + 1):
                    if model.num_layers % count == 0:
                        yield from _replicated(estimator, seats, tp, count)


def best_even_split(estimator: Estimator) -> tuple[Candidate, Estimate] | None:
    """The fastest plan of stock Megatron that fits, None where none does."""
    fitting = [(c, e) for c in stock_plans(estimator) if (e := estimator.estimate(c)) and estimator.fits(e)]
    return min(fitting, key=lambda pair: pair[1].iteration_s) if fitting else None


def _parts(nodes: tuple[NodeGroup, ...]) -> list[tuple[int, ...]]:
    usable = tuple(p for p, n in enumerate(nodes) if n.quota)
    if len(usable) <= MOST_GROUPS:
        return [c for k in range(1, len(usable) + 1) for c in combinations(usable, k)]
    found = {usable}
    for name in ("gpu", "where"):
        for value in {getattr(nodes[p], name) for p in usable}:
            found.add(tuple(p for p in usable if getattr(nodes[p], name) == value))
    return sorted(found)


def _tensor_groups(node: NodeGroup, tp: int) -> int:
    """How many TP groups the nodes hold, none of which leaves its node."""
    whole, rest = divmod(node.quota, node.gpus_per_node)
    return whole * (node.gpus_per_node // tp) + rest // tp


def _replicated(estimator: Estimator, seats: list[int], tp: int, count: int) -> Iterator[Candidate]:
    """Plans of so many stages, with the most replicas that equal batches allow."""
    model = estimator.model
    stages: dict[int, tuple[Stage, ...]] = {}
    for batch in model.batch_sizes:
        if model.global_batch_size % batch:
            continue
        total = model.global_batch_size // batch
        width = next((w for w in range(len(seats) // count, 0, -1) if total % w == 0), 0)
        if width not in stages:
            stages[width] = _stages(seats, tp, count, width, model.num_layers // count)
        yield from _operating_points(estimator, stages[width], None, (batch,))


def _stages(seats: list[int], tp: int, count: int, width: int, layers: int) -> tuple[Stage, ...]:
    """Stages of ``width`` replicas each, in the order of the seats (the node group of each TP group)."""
    out = []
    for s in range(count):
        mine = seats[s * width : (s + 1) * width]
        out.append(Stage(layers, tuple(Group(p, tp, mine.count(p)) for p in dict.fromkeys(mine))))
    return tuple(out)


def _operating_points(
    estimator: Estimator, stages: tuple[Stage, ...], zero: int | None, batches: tuple[int, ...] | None = None
) -> list[Candidate]:
    model = estimator.model
    if zero is None:
        zero = 1 if model.distributed_optimizer else 0
    return [
        Candidate(stages, batch, recompute, zero_stage=zero, even=True)
        for batch in batches or model.batch_sizes
        for recompute in model.recompute
    ]
