"""The kinds of replicas that plans can have, as a lower bound sees them: no slower, no larger than they are.

Times are of one sequence.  ``bounds.py`` says what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from math import floor, gcd, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..costs.estimate import Estimator, Unit
from ..costs.layer import pool_size
from ..inputs.documents import shares_left
from ..inputs.model import Model
from .poplar import SIZES
from .seeds import sizes_over_replicas

Floats = NDArray[np.float64]
NEAR = 3
"""Passes whose activations are on the device at least, where the others wait in main memory."""
FEW_SIZES = 1024
"""Where so many sizes of a pass have figures all are looked at: between measured ones a curve may bend."""


_OF_A_RANK = {"gpu", "gpus_per_node", "network_bytes_per_s", "intra_node_bytes_per_s"}
"""Of a pool, what the figures of its ranks depend on."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which plans a bound is for.

    Attributes:
        batches: Sizes of microbatches.
        grain: The numbers of sequences of a replica are multiples of it; 0 for the micro batch size.
        smallest: Sequences of the smallest microbatch; 0 for the micro batch size.
        sizes: Of the passes of a plan of one stage, where they differ; empty for all, None if they do not differ.
        is_whole: With context and expert parallelism, the context exchange, and chunks and slices of any number.
    """

    batches: tuple[int, ...]
    grain: int = 0
    smallest: int = 0
    sizes: tuple[int, ...] | None = None
    is_whole: bool = False

    @classmethod
    def of_all_plans(cls, model: Model) -> Scope:
        """Every plan that the model file allows."""
        total, given = model.global_batch_size, tuple(sorted(set(model.micro_batch_sizes)))
        batches = tuple(b for b in given or range(1, total + 1) if total % b == 0)
        return cls(batches, gcd(*given) if given else 1, min(given, default=1), given, True)

    @classmethod
    def of_searched_parts(cls, model: Model) -> Scope:
        """Returns the scope on a part of a cluster: equal microbatches, neither context nor expert parallelism."""
        return cls(model.batch_sizes)


@dataclass(frozen=True, slots=True)
class Family:
    """Schedules with the same limits.

    Attributes:
        sharded: Parameters are gathered and gradients reduced beside the passes; replicas hold parts of the state.
        sliced: Sequences are cut.
        pieces: Into so many at most a microbatch is cut on a stage; without end: nobody waits for the first one.
        exchanges: Stages attend for each other.
        is_uneven: Chunks of a stage, and their numbers on different stages, are whatever they are.
    """

    sharded: bool
    sliced: bool
    pieces: float
    exchanges: bool = False
    is_uneven: bool = False

    def passed(self, before: Floats, stages: Floats, layers: Floats) -> Floats:
        """Layers of a whole microbatch that a first piece passes at least.

        Args:
            before: Layers of earlier stages.
            stages: These stages, at least.
            layers: Of the stage that waits.
        """
        if self.sliced or self.pieces == inf:
            return before / self.pieces
        if self.pieces == 1:
            return before
        if self.is_uneven:
            return stages  # the first chunk of each
        return np.maximum(stages, before / np.minimum(layers, self.pieces))  # no stage has more chunks than layers


class Row(NamedTuple):
    """A kind of replica; seconds of one sequence, bytes of a rank.

    Attributes:
        gpus: Of a replica.
        own_s: Forward and backward of a layer at least, whoever attends.
        pool_s: The same with its attention, on this GPU or another one of the pool.
        given_s: The same where GPUs of other pools attend.
        attention_s: The attention of a layer.
        fixed_s: Of a pass through any number of layers.
        forward_s, backward_s: Of a layer, as far as it is ``own_s``.
        ends_s: Embedding, and head.
        memory: What there is; state of a layer, and however many there are; activations of a layer, and of how many
            layers there are any at most.
        sums_s: Summing the gradients of a layer over very many replicas inside a node, and over nodes.
        update_s: The optimizer's step for a layer.
        node: GPUs of a node.
    """

    gpus: float
    own_s: float
    pool_s: float
    given_s: float
    attention_s: float
    fixed_s: float
    forward_s: float
    backward_s: float
    ends_s: tuple[float, float]
    memory: tuple[float, float, float, float, float]
    sums_s: tuple[float, float]
    update_s: float
    node: int


class _Kind(NamedTuple):
    """Replicas of a pool."""

    pool: int
    tp: int
    ep: int


class Point(NamedTuple):
    """Holds what the plans of a relaxation have in common.

    Attributes:
        batch: The largest microbatch; None for plans of one stage whose replicas choose the sizes of their passes.
        cp: The smallest and the largest context-parallel size.
    """

    family: Family
    batch: int | None
    recompute: str
    cp: tuple[int, int] = (1, 1)


class _Times(NamedTuple):
    """Seconds of one sequence on a rank; attention is part of forwards and backwards."""

    forward_s: float
    backward_s: float
    attention_f: float
    attention_b: float
    fixed_s: float
    embedding_s: float
    head_s: float


class Replicas:
    """All kinds of replicas on a cluster that a scope allows; it remembers what many of them have in common."""

    def __init__(self, estimator: Estimator, scope: Scope) -> None:
        self.estimator, self.scope = estimator, scope
        costs, nodes = estimator.costs, estimator.cluster.nodes
        self._tp_sizes = cache(costs.tp_sizes)
        self._max_batch = cache(costs.max_batch)
        self._merge_s = cache(self._find_merge_s)
        self._times = cache(self._find_times)
        self._of_passes = cache(self._find_of_passes)
        described = [node.model_dump_json(include=_OF_A_RANK) for node in nodes]
        self._alike = [described.index(text) for text in described]
        self._least_attention = _least_attention(estimator.model)

    def rows(self, point: Point, is_roomy: bool = False) -> dict[Row, set[int]]:
        """The kinds of replicas, and the pools that have so many GPUs.

        Args:
            is_roomy: With memory for passes of any size.
        """
        of_pool: dict[int, list[Row]] = {}
        for kind in self._kinds(point.cp[0]):
            row = self._row(kind, point, is_roomy)
            if row is not None:
                of_pool.setdefault(kind.pool, []).append(row)
        found: dict[Row, set[int]] = {}
        for pool, rows in of_pool.items():
            fastest = min(row.attention_s * row.gpus for row in rows)  # of one GPU
            for row in rows:
                helped = row._replace(pool_s=min(row.pool_s, row.own_s + fastest / row.gpus))
                found.setdefault(helped, set()).add(pool)
        return found

    def _kinds(self, cp: int) -> Iterator[_Kind]:
        x, whole = self.estimator.model.experts, self.scope.is_whole
        for pool, node in enumerate(self.estimator.cluster.nodes):
            for tp in self._tp_sizes(node.gpu):
                if tp > node.gpus_per_node or tp * cp > node.quota:
                    continue
                most = max([tp, *sizes_over_replicas(self.estimator)]) if x is not None and whole else 1
                for ep in range(1, most + 1):
                    if (tp % ep == 0 or ep % tp == 0) and (x is None or x.count % ep == 0):
                        yield _Kind(pool, tp, ep)

    def _unit(self, kind: _Kind, batch: int, recompute: str, cp: int) -> Unit | None:
        pool, tp, ep = kind
        if cp == ep == 1:
            return self.estimator.unit(pool, tp, batch, recompute)
        return self.estimator.unit(pool, tp, batch, recompute, cp, ep, expert_tp=tp // ep)

    # -- times -------------------------------------------------------------------------------------

    def _find_times(self, kind: _Kind, batch: int, recompute: str, cp: tuple[int, int]) -> _Times | None:
        unit = self._unit(kind, batch, recompute, cp[0])
        if unit is None:
            return None
        gpu, (low, high) = self.estimator.cluster.nodes[kind.pool].gpu, cp
        each = low / high / batch * self.estimator.costs.alone_share(gpu, batch, kind.tp)
        figures = (
            unit.layer_f,
            unit.layer_b,
            unit.attention_f,
            unit.attention_b,
            unit.pass_f + unit.pass_b + 2 * self.estimator.runtime.operation_s,
            unit.ends_s(True, False),
            unit.ends_s(False, True),
        )
        return _Times(*(x * each for x in figures))

    def _find_of_passes(self, kind: _Kind, most: int, recompute: str, cp: tuple[int, int]) -> _Times | None:
        """The least that passes of up to so many sequences take of each figure."""
        known = self._max_batch(self.estimator.cluster.nodes[kind.pool].gpu, kind.tp)
        sizes = self.scope.sizes or {*(range(1, most + 1) if known <= FEW_SIZES else SIZES), most}
        found = [self._times(kind, n, recompute, cp) for n in sizes if n <= most]
        there = [times for times in found if times is not None]
        return _Times(*(min(x) for x in zip(*there))) if there else None

    def _longest_pass(self, kind: _Kind, state: tuple[float, float, float, float], free: float) -> int:
        """Sequences of the longest pass through all layers for which there are memory and figures."""
        layers = self.estimator.model.num_layers
        most = self._max_batch(self.estimator.cluster.nodes[kind.pool].gpu, kind.tp)
        each, fixed, kept, most_kept = state
        fitting = (free - fixed - each * layers) / max(1.0, kept * min(layers, most_kept))
        return floor(min(most, self.estimator.model.global_batch_size, max(1, fitting)))

    # -- rows --------------------------------------------------------------------------------------

    def _row(self, kind: _Kind, point: Point, is_roomy: bool) -> Row | None:
        estimator, (low, high) = self.estimator, point.cp
        alike = kind._replace(pool=self._alike[kind.pool])
        unit = self._unit(alike, point.batch or 1, point.recompute, low)
        if unit is None:
            return None
        node = estimator.cluster.nodes[kind.pool]
        free = inf if is_roomy else estimator.memory_margin * unit.capacity_bytes - unit.reserved_bytes
        state = self._memory(kind, unit, point)
        if point.batch is None:
            times = self._of_passes(alike, self._longest_pass(kind, state, free), point.recompute, point.cp)
        else:
            times = self._times(alike, point.batch, point.recompute, point.cp)
        if times is None:
            return None
        attention, near_s, far_s = 0.0, 0.0, inf
        forward, backward = times.forward_s, times.backward_s
        if point.family.exchanges:
            attention = (times.attention_f + times.attention_b) * self._least_attention
            forward, backward = forward - times.attention_f, backward - times.attention_b
            near_s, far_s = (s / high for s in self._merge_s(kind.pool, kind.tp))
        distributed = estimator.model.distributed_optimizer
        return Row(
            gpus=kind.tp * high,
            own_s=forward + backward + min(attention, near_s),
            pool_s=forward + backward + attention,
            given_s=forward + backward + far_s,
            attention_s=attention,
            fixed_s=times.fixed_s,
            forward_s=forward,
            backward_s=backward,
            ends_s=(times.embedding_s, times.head_s),
            memory=(free, *state),
            sums_s=_gradient_s(estimator, kind, unit, point.family.sharded),
            update_s=0.0 if distributed else estimator.costs.update_s(node.gpu, unit.layer_parameters),
            node=node.gpus_per_node,
        )

    def _memory(self, kind: _Kind, unit: Unit, point: Point) -> tuple[float, float, float, float]:
        """State of a layer and besides, activations of a layer, and of how many there are activations at least."""
        model, family, (low, high) = self.estimator.model, point.family, point.cp
        element = model.element_bytes
        kept, most_kept = unit.layer_bytes * low / high, inf
        if family.sharded:  # whole parameters and gradients of the ministage that runs
            return 0.0, unit.layer_parameters * (element + 4.0), kept, NEAR
        each = element + 4.0 * (1 + self.estimator.runtime.extra_parameter_copies)
        if not model.distributed_optimizer:
            each += self.estimator.optimizer_per_parameter
        fixed = 0.0
        if point.batch is None:  # one stage has everything
            fixed = each * (unit.embedding_parameters + unit.head_parameters)
        if family.sliced:  # keys and values stay on the device
            pool = (point.batch or 1) * model.seq_length / high * pool_size(model, kind.tp) * element
            pool = min(kept * unit.sliced_share, pool)
            kept = pool if point.batch is not None else min(pool, kept * min(1.0, NEAR / model.num_layers))
        elif family.pieces > 1 and self.scope.is_whole:
            most_kept = NEAR
        return unit.layer_parameters * each, fixed, kept, most_kept

    def _find_merge_s(self, pool: int, own_tp: int) -> tuple[float, float]:
        """Returns what a rank waits for the attention of a layer and sequence at least when others do it.

        Queries go and outputs come, forwards and backwards, for every slice whose attention is given away, and the
        last slices have no more than twice their share of the attention.  By GPUs anywhere, and of other pools.
        """
        estimator, nodes = self.estimator, self.estimator.cluster.nodes
        if estimator.model.document_lengths is not None:
            return 0.0, 0.0
        size = estimator.boundary_bytes_per_sequence
        longest = size * estimator.model.global_batch_size  # long messages lose the least
        latency = estimator.runtime.transfer_latency_s
        rates = {False: 0.0, True: 0.0}
        for other, node in enumerate(nodes):
            for tp, is_local in product(self._tp_sizes(node.gpu), (False, True)):
                if not is_local or other == pool:
                    seconds = estimator.network.transfer_s(pool, own_tp, other, tp, longest, is_local)
                    rate = longest / max(seconds - min(seconds, latency), 1e-12)
                    rates[other == pool] = max(rates[other == pool], rate)
        far = 2 * size / own_tp / rates[False] if rates[False] else inf
        return min(far, 2 * size / own_tp / rates[True]), far


def _least_attention(model: Model) -> float:
    """Returns the attention of the first sequences of documents, however many, over the mean of all."""
    if model.document_lengths is None:
        return 1.0
    shares = shares_left(model.document_lengths, model.seq_length, model.attention_window, model.windowed_layers)
    means = [total / (i + 1) for i, total in enumerate(accumulate(shares))]
    return min(means) / model.attention_share


def _gradient_s(estimator: Estimator, kind: _Kind, unit: Unit, sharded: bool) -> tuple[float, float]:
    """Least seconds for the gradients of a layer over very many replicas, in a node and between nodes.

    With the distributed optimizer gradients are scattered, and parameters gathered.  Of experts over replicas there
    may be one copy, whose gradients nobody sums.
    """
    network, model, (pool, tp, ep) = estimator.network, estimator.model, kind
    count = unit.layer_parameters - (model.expert_parameters(ep, 1) if ep > tp else 0)
    size = 4.0 * count
    if sharded:
        size /= 2
    elif model.distributed_optimizer:
        size = min(size, (4.0 + model.element_bytes) / 2 * count)
    size *= 2 * (1 - estimator.runtime.sync_overlap)
    gpu = estimator.cluster.nodes[pool].gpu
    between = network.rate(pool, pool, tp) / tp
    cap = min(estimator.cluster.nodes[pool].collective_bytes_per_s or inf, estimator.runtime.collective_bytes_per_s)
    inside, outside = size / network.collective[pool], size * (1.0 / between + 1.0 / cap)
    links = [k for k in network.measured if k.operation == "all_reduce" and gpu in (k.first_kind, k.second_kind)]
    each = min([size / 2 / k.bytes_per_s / (1 - 1 / max(2, k.participants)) for k in links], default=inf)
    return min(inside, outside, each), min(outside, each)
