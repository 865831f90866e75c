"""Starting points for long sequences: regular pipelines of slices, as SlimPipe's authors train (section 6.5)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimate, Estimator
from .goal import Goal

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of activations in main memory, in the order in which they are tried."""
SIZES = (1, 2, 4, 8, 16)
_SLICES_PER_STAGE = 4
_LEAST_TOKENS = 1024


def regular_pipelines(estimator: Estimator, goal: Goal, count: int) -> list[tuple[Candidate, Estimate]]:
    """The best by the closed form that fit, one of each number of stages.

    Args:
        count: So many.
    """
    best: dict[int, tuple[float, Candidate, Estimate]] = {}
    sliced = [schedule.name for schedule in goal.allowed if schedule.cuts_sequences]
    for stages, cp in _shapes(estimator) if sliced else ():
        for found in _fitting(estimator, goal, sliced, stages, cp):
            value = goal.value(found[1])
            if value < best.get(len(stages), (inf,))[0]:
                best[len(stages)] = value, *found
    order = sorted(best.values(), key=lambda entry: entry[0])
    return [(candidate, estimate) for _, candidate, estimate in order[:count]]


def _shapes(estimator: Estimator) -> Iterator[tuple[tuple[Stage, ...], int]]:
    """Stages of equally many replicas of one TP and CP size, layers by speed; and the CP size."""
    model, nodes = estimator.model, estimator.cluster.nodes
    for tp, cp, width in product(SIZES, SIZES, SIZES):
        if width > model.global_batch_size or tp * cp > 64:
            continue
        pools = [p for p, n in enumerate(nodes) if tp <= n.gpus_per_node]
        counts = {p: nodes[p].count * (nodes[p].gpus_per_node // tp) // (cp * width) for p in pools}
        counts = {p: n for p, n in counts.items() if n and nodes[p].quota >= n * tp * cp * width}
        if not 1 < sum(counts.values()) <= model.num_layers:
            continue
        like = Candidate((), 1, cp=cp)
        units = {p: estimator.unit_of(like, Group(p, tp, 1)) for p in counts}
        if any(unit is None for unit in units.values()):
            continue
        rate = {p: 1 / (u.layer_f + u.layer_b) for p, u in units.items() if u is not None}
        order = [p for p, n in sorted(counts.items(), key=lambda item: -rate[item[0]]) for _ in range(n)]
        head = units[order[-1]]
        assert head is not None
        ends = [0.0] * (len(order) - 1) + [head.head_f + head.head_b]
        layers = balanced(model.num_layers, [rate[p] for p in order], ends)
        yield tuple(Stage(n, (Group(p, tp, width),)) for n, p in zip(layers, order)), cp


def _fitting(
    estimator: Estimator, goal: Goal, schedules: list[str], stages: tuple[Stage, ...], cp: int
) -> Iterator[tuple[Candidate, Estimate]]:
    """Under each schedule and with each recomputation, and as little in main memory as fits."""
    model, wanted = estimator.model, _SLICES_PER_STAGE * len(stages)
    slices = next((n for n in range(wanted, 4 * wanted) if model.seq_length % n == 0), 0)
    if not slices or model.seq_length // slices < _LEAST_TOKENS * cp:
        return
    zero = 1 if model.distributed_optimizer else 0
    for name, recompute in product(schedules, model.recompute):
        for share in SHARES:
            candidate = Candidate(
                stages, 1, recompute, name, slices=slices, zero_stage=zero, cp=cp, host_activations=share
            )
            estimate = estimator.estimate(candidate)
            if estimate is None or goal.violation(candidate, estimate) > 0:
                break
            if estimator.fits(estimate):
                yield candidate, estimate
                break


def balanced(total: int, rates: list[float], ends: list[float], least: int = 1) -> list[int]:
    """Layers of each stage such that all take as long.

    Args:
        total: Layers.
        rates: Layers per second of each stage.
        ends: Seconds of what else each stage does of a microbatch.
        least: Layers of a stage at least.
    """
    layers = [least] * len(rates)
    for _ in range(total - sum(layers)):
        s = min(range(len(rates)), key=lambda s: (layers[s] + 1) / rates[s] + ends[s])
        layers[s] += 1
    return layers
