"""Figures of replicas at their operating points, and transfers between stages: the inputs of the closed forms."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations, product, repeat
from math import inf
from operator import add
from typing import Any

from megatron_het.features.registry import extra_layers
from megatron_het.plan.schema import later_layers

from ..errors import PlannerError
from ..inputs.cluster import Cluster, NodeGroup
from ..inputs.model import Model, kinds_of
from ..inputs.profile_schema import LinkProfile
from .candidate import Candidate, Estimate, Group, Passes, SequencePart, StageTimes, layers_at
from .layer import ALONE, MEGATRON_HET, LayerCost, Runtime, Spread
from .layercost import LayerCosts
from .unit import Unit, mixed, unit_of_kinds, unit_of_parts

# Seconds for moving activations between stages and for summing gradients inside a stage.


class Network:
    """Link rates and latencies of a cluster, by pool (index into ``cluster.nodes``)."""

    def __init__(self, cluster: Cluster, runtime: Runtime, measured: Sequence[LinkProfile] = ()) -> None:
        self.cluster, self.runtime = cluster, runtime
        self.measured = list(measured)
        self.intra = [n.intra_node_bytes_per_s or cluster.gpu(n.gpu).intra_node_bytes_per_s for n in cluster.nodes]
        self.collective = [
            cluster.gpu(n.gpu).collective_rate * i / cluster.gpu(n.gpu).intra_node_bytes_per_s
            for n, i in zip(cluster.nodes, self.intra)
        ]
        self.host = [n.host_bytes_per_s or cluster.gpu(n.gpu).host_bytes_per_s for n in cluster.nodes]
        self.region = [n.where for n in cluster.nodes]
        self.pair = cache(lambda first, second: cluster.link(cluster.nodes[first], cluster.nodes[second]))
        self.transfer_s = cache(self._transfer_s)
        self.ends = cache(self._ends)
        self.has_egress = any(link.usd_per_gb for link in cluster.links)

    def between(self, first: int, second: int) -> float:
        """Bytes per second of a GPU of one pool to those of another, while all GPUs of their nodes send."""
        nodes = self.cluster.nodes[first], self.cluster.nodes[second]
        if self.cluster.in_one_node(*nodes):
            return min(self.collective[first], self.collective[second])
        return self.pair(first, second)[0] / max(node.gpus_per_node for node in nodes)

    def _link(self, operation: str, pools: Sequence[int], participants: int, local: bool) -> LinkProfile | None:
        """The measured link between these kinds with the nearest number of participants; None without one."""
        kinds = {self.cluster.nodes[p].gpu for p in pools}
        fitting = [
            k
            for k in self.measured
            if k.operation == operation
            and {k.first_kind, k.second_kind} >= kinds
            and (k.scope == "node") == (local and any(m.scope == "node" for m in self.measured))
        ]
        return min(fitting, key=lambda k: (abs(k.participants - participants), -k.latency_s), default=None)

    def rate(self, first: int, second: int, streams: int, size: float = inf) -> float:
        """Bytes per second between two nodes for ``streams`` GPU pairs at once, in messages of ``size`` bytes."""
        node, single, ends = self.ends(first, second)
        return min(node, streams * single, *[n.measured_rate(streams, size) for n in ends])

    def _ends(self, first: int, second: int) -> tuple[float, float, list[NodeGroup]]:
        """Rates of the nodes and of one stream between two pools, and the pools with measured rates."""
        ends = [self.cluster.nodes[p] for p in (first, second)]
        single = min(n.stream_bytes_per_s or inf for n in ends)
        return self.pair(first, second)[0], single, [n for n in ends if n.measured_rates]

    def _transfer_s(
        self, first: int, first_tp: int, second: int, second_tp: int, size: float, local: bool, sent: int, met: int
    ) -> tuple[float, float]:
        """Seconds of one boundary tensor from a replica to a replica of the next stage, and in the sender's network.

        Its other messages share the sender's part of the network of its node, in which this one takes no longer.

        Args:
            sent, met: Replicas of each pool, or parts of them, that send at once; those of one node share its network.
        """
        runtime, nodes = self.runtime, self.cluster.nodes
        ends = (sent, first, first_tp), (met, second, second_tp)
        beside, others = (max(1, min(units, nodes[p].gpus_per_node // t)) for units, p, t in ends)
        own, beside = nodes[first].network_bytes_per_s / beside, max(beside, others)
        local = local or (first == second and nodes[first].count == 1)
        local = local or self.cluster.in_one_node(nodes[first], nodes[second])
        once = local or runtime.split_transfers or runtime.leader_transfers
        moved = size if once else second_tp * size
        link = self._link("p2p", (first, second), 2, local) if self.measured else None
        if link is not None:
            rate = link.bytes_per_s  # of one pair alone
            if not local:
                rate = min(rate, max(rate, self.pair(first, second)[0]) / beside)
            seconds = runtime.transfer_latency_s + link.latency_s + moved / rate
            return seconds, 0.0 if local else moved / max(own, rate)
        if local:
            return runtime.transfer_latency_s + size / min(self.intra[first], self.intra[second]), 0.0
        streams = 1 if runtime.leader_transfers else min(first_tp, second_tp)
        rate = self.rate(first, second, beside * streams, size / streams if once else size) / beside
        seconds = runtime.transfer_latency_s + self.pair(first, second)[1] + moved / rate
        if once and second_tp > 1:
            seconds += size * (second_tp - 1) / second_tp / self.intra[second]
        return seconds, moved / max(own, rate)

    def sync_s(
        self, groups: tuple[Group, ...], rank_bytes: dict[Group, float], share: float = 1.0, *, scattered: bool = False
    ) -> float:
        """Seconds of an all-reduce of gradients over the replicas of a stage.

        One ring per TP rank goes through all nodes of the stage, so a node's network carries
        ``2 (d - 1) / d`` of the stage's gradients in each direction, shared by its rings.  The messages of a
        ring of ``d`` replicas are a ``d``-th of a rank's gradients.

        Args:
            rank_bytes: Gradient bytes of one rank of each group.
            share: 0.5 for a reduce-scatter or an all-gather alone.
            scattered: The replicas are on several nodes, even if one node could hold them.
        """
        replicas = sum(g.count for g in groups)
        if replicas == 1:
            return 0.0
        factor = share * 2.0 * (replicas - 1) / replicas
        pools = tuple(sorted({g.pool for g in groups}))
        worst = 0.0
        nodes = [self.cluster.nodes[p] for p in pools]
        fits = len(pools) == 1 and sum(g.count * g.tp for g in groups) <= nodes[0].gpus_per_node
        in_one = len(pools) > 1 and all(self.cluster.in_one_node(nodes[0], other) for other in nodes[1:])
        single_node = (fits or in_one) and not scattered
        link = self._link("all_reduce", pools, replicas, single_node) if self.measured else None
        for group in groups:
            size = rank_bytes[group]
            if link is not None:
                scale = replicas / (replicas - 1) * (link.participants - 1) / link.participants
                worst = max(worst, share * (link.latency_s + size / (link.bytes_per_s * scale)))
                continue
            if single_node:
                worst = max(worst, factor * size / self.collective[group.pool] + 30e-6)
                continue
            latency = max([self.pair(group.pool, other)[1] for other in pools])
            rate = min([self.rate(group.pool, other, group.tp, size / replicas) for other in pools]) / group.tp
            cap = min(self.cluster.nodes[group.pool].collective_bytes_per_s or inf, self.runtime.collective_bytes_per_s)
            seconds = factor * size * (1.0 / rate + 1.0 / cap) + 2 * (replicas - 1) * min(latency, 1e-3) / max(
                1, replicas // 8
            )
            worst = max(worst, seconds)
        return worst

    def usd_per_byte(self, first: int, second: int) -> float:
        """Egress price between two pools."""
        return self.pair(first, second)[2] / 1e9


def _with_later_tokens(model: Model, layer: LayerCost, first: LayerCost, last: LayerCost, tp: int) -> LayerCost:
    """Returns the cost of the work after the last layer, with the layers for multi-token prediction.

    Each of these embeds the tokens again, projects two rows of the hidden size to one, runs a layer and then the
    head.  They share the embedding table of the first stage, of which the last stage holds a copy; with tied embeddings
    the head has it already.
    """
    count, hidden = extra_layers(model), model.hidden_size
    if not count:
        return last
    projection = 2 * hidden * hidden // tp
    share = 1 + 4.0 * model.seq_length * hidden**2 / model.layer_flops(model.seq_length)
    if model.kinds:  # each is made of these layers
        each = len(later_layers(model.pattern)[0])
        names = ("forward_s", "backward_s", "activation_bytes")
        figures = {name: each * getattr(layer, name) for name in names}
        layer, share = replace(layer, parameters=each * layer.parameters, **figures), 1 + (share - 1) / each
    norms = 3 * hidden * (2 if model.biases else 1)
    return replace(
        last,
        forward_s=last.forward_s + count * (share * layer.forward_s + first.forward_s + last.forward_s),
        backward_s=last.backward_s + count * (share * layer.backward_s + first.backward_s + last.backward_s),
        parameters=last.parameters
        + count * (layer.parameters + projection + norms)
        + (0 if model.tied_embeddings else first.parameters),
        activation_bytes=last.activation_bytes
        + count * (layer.activation_bytes + first.activation_bytes + last.activation_bytes),
    )


Ways = tuple[float, float, float]  # over a boundary: seconds, and what it takes of the sender's network, there and back
Ends = tuple[tuple[Group, ...], tuple[Group, ...]]  # all groups of two neighbouring stages


class OperatingPoints:
    """Figures of replicas for one cluster and model, with the caches of the closed form."""

    writes_plans = True  # whether candidates are to be written as plans, which have a bound on passes per iteration

    def __init__(
        self,
        cluster: Cluster,
        model: Model,
        costs: LayerCosts,
        runtime: Runtime = MEGATRON_HET,
        memory_margin: float = 0.95,
        follows_gpus: bool = False,  # whether the GPUs of a plan decide about its layers (``runtime_for``)
    ) -> None:
        self.cluster, self.model, self.costs, self.runtime = cluster, model, costs, runtime
        self.follows_gpus = follows_gpus
        self.network = Network(cluster, runtime, costs.profile.links if costs.profile else ())
        self.memory_margin = memory_margin
        self.unit = cache(self._unit)
        # known_stages, known_ways, known_loads, known_rooms, known_points: what the closed form and the balancing of
        # layers remember, by all that it depends on (``stages.py``, ``search/balance.py``)
        self.known_stages: dict[object, dict[object, StageTimes | None]] = {}
        self.known_ways: dict[tuple[int, int], dict[object, Ways]] = {}
        self.known_transfers: dict[object, tuple[list[float], list[float]]] = {}  # of whole candidates
        self.known_loads: dict[object, Any] = {}
        self.known_rooms: dict[object, dict[object, Any]] = {}
        self.known_points: dict[object, Candidate] = {}
        self.known_sketches: dict[str, Any] = {}  # of plans that are changed, by objective
        self.known_refined: dict[Any, dict[Candidate, Any]] = {}  # ends of refinements, by goal and visited plan
        # known_estimates, known_seconds: what was evaluated, and simulated (with whether it was the whole plan);
        # parts of a cluster are searched again and again, and meet the same candidates
        self.known_estimates: dict[Candidate, Estimate | None] = {}
        self.known_seconds: dict[tuple[Candidate, bool], float | PlannerError] = {}
        self.known_blocks: dict[Candidate, Any] = {}  # pipelines that can be simulated in other orders
        # default main memory of a node: that of servers is two to four times the memory of their GPUs
        gpus = ((n, cluster.gpu(n.gpu)) for n in cluster.nodes)
        assumed = (inf if g.is_processor else 2.0 * n.gpus_per_node * g.memory_bytes for n, g in gpus)
        self.host_limits = [n.host_memory_bytes or most for n, most in zip(cluster.nodes, assumed)]
        usd = ((n.usd_per_gpu_hour, cluster.gpu(n.gpu).usd_per_hour) for n in cluster.nodes)
        self.price = [((usual if own is None else own) or 0.0) / 3600.0 for own, usual in usd]
        self.optimizer_per_parameter = 12.0 if model.element_bytes == 2 else 8.0
        wide, narrow = (bool(model.flags.get(f)) for f in ("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"))
        in_16_bits = {"bf16": narrow, "fp16": not wide}.get(model.precision, False)
        self.gradient_per_parameter = 2.0 if in_16_bits else 4.0  # dtype of Megatron's accumulation
        self.state_per_parameter = model.element_bytes + self.gradient_per_parameter + self.optimizer_per_parameter

    def _unit(
        self, pool: int, tp: int, batch: int, recompute: str, spread: Spread = ALONE, kind: str = ""
    ) -> Unit | None:
        """Figures of a replica kind, None where there are none; times are of all slices together.

        Args:
            spread: Without the links, which the pool has.
            kind: Kind of layer of a hybrid model; empty: the mean of all.
        """
        node = self.cluster.nodes[pool]
        network = node.network_bytes_per_s / node.gpus_per_node
        spread = spread._replace(domain=node.gpus_per_node, network_bytes_per_s=network)
        spread = spread._replace(intra_node_bytes_per_s=node.intra_node_bytes_per_s)
        kinds = ((kind, 1),) if kind else ()
        if any(x is not None and x.all_heads < tp * spread.cp for x in (self.model.mamba, self.model.delta_net)):
            return None  # plans refuse it, too: ranks divide heads
        is_known = tp in self.costs.tp_sizes(node.gpu) and batch <= self.costs.max_batch(node.gpu, tp)
        if tp > node.gpus_per_node or not is_known:
            return None
        gpu = self.cluster.gpu(node.gpu)
        try:
            layer = self.costs.cost(node.gpu, "layer", batch, tp, recompute, spread._replace(kinds=kinds))
            first = self.costs.cost(node.gpu, "embedding", batch, tp, recompute, spread)
            last = self.costs.cost(node.gpu, "head", batch, tp, recompute, spread)
            later = kinds_of("".join(later_layers(self.model.pattern)))
            block = self.costs.cost(node.gpu, "layer", batch, tp, recompute, spread._replace(kinds=later))
        except PlannerError:
            return None
        without = self.model.first_layers(tp, spread.ep, spread.expert_parts(tp))
        more = round(without[0] * without[1] / self.model.num_layers)  # than the mean, in a layer that has experts
        last = _with_later_tokens(self.model, replace(block, parameters=block.parameters + more), first, last, tp)
        reserved = self.runtime.reserved_bytes if self.runtime.reserved_bytes is not None else gpu.reserved_bytes
        reserved += self.runtime.framework_bytes
        return Unit(
            layer_f=layer.forward_s,
            layer_b=layer.backward_s,
            embedding_f=first.forward_s,
            embedding_b=first.backward_s,
            head_f=last.forward_s,
            head_b=last.backward_s,
            layer_parameters=layer.parameters,
            embedding_parameters=first.parameters,
            head_parameters=last.parameters,
            tied_parameters=self.model.tied_embeddings
            * (first.parameters - self.model.learned_positions * self.model.hidden_size),
            layer_bytes=layer.activation_bytes,
            embedding_bytes=first.activation_bytes,
            head_bytes=last.activation_bytes,
            workspace_bytes=layer.workspace_bytes,
            head_workspace_bytes=last.workspace_bytes,
            embedding_workspace_bytes=first.workspace_bytes,
            capacity_bytes=gpu.memory_bytes,
            reserved_bytes=reserved,
            sliced_share=self.costs.sliced_share(node.gpu, batch, tp, recompute, kinds),
            attention_f=layer.attention_forward_s,
            attention_b=layer.attention_backward_s,
            pass_f=layer.fixed_forward_s,
            pass_b=layer.fixed_backward_s,
            first_layers=without,
        )

    def unit_of(self, candidate: Candidate, group: Group, stage: int | None = None) -> Unit | None:
        """Figures of a group's replicas at the candidate's operating point, CP and EP included.

        Args:
            stage: For a hybrid model, the stage whose layers are run; None for the mean of all layers.
        """
        c = candidate
        if group.kept and c.recompute == "full":
            both = [self.unit_of(c._replace(recompute=r), group._replace(kept=0.0), stage) for r in ("full", "none")]
            of_chunk = 0 if stage is None else round(group.kept * c.stages[stage].layers) // c.chunks_of(stage)
            return mixed(both[0], both[1], group.kept, of_chunk) if both[0] and both[1] else None
        if c.sizes:  # the mean pass of the slowest replica, with the memory of its largest pass
            slowest = _slowest(self, c, _place(c, group))
            return None if slowest is None else slowest[1]
        if group.parts:
            units = self.units_of_parts(c, group, stage)
            return None if units is None else unit_of_parts(units)
        if c.cp == c.ep == c.slices == 1 and group.ep < 2 and not (stage is not None and self.model.kinds):
            return self.unit(group.pool, group.tp, c.micro_batch_size, c.recompute)
        return self._unit_of_layers(c, group, stage, group.pool, 0.0, None)

    def units_of_parts(self, candidate: Candidate, group: Group, stage: int | None = None) -> list[Unit] | None:
        """Figures of each kind of context-parallel rank (``Candidate.parts_of``) of a group with parts of its own."""
        c = candidate
        if group.kept and c.recompute == "full":
            whole = group._replace(kept=0.0)
            again, kept = (self.units_of_parts(c._replace(recompute=r), whole, stage) or [] for r in ("full", "none"))
            return [mixed(a, k, group.kept) for a, k in zip(again, kept)] or None
        if c.sizes:
            c = c.with_(micro_batch_size=max(map(max, c.sizes[_place(c, group)])), sizes=())
        pools = tuple({part.pool: None for part in group.parts})
        rate = min((self.network.between(a, b) for a, b in combinations(pools, 2)), default=None)
        found = [self._unit_of_layers(c, group, stage, mine.pool, portion, rate) for mine, portion in c.parts_of(group)]
        units = [unit for unit in found if unit is not None]
        return units if len(units) == len(found) else None

    def _unit_of_layers(
        self, candidate: Candidate, group: Group, stage: int | None, pool: int, portion: float, rate: float | None
    ) -> Unit | None:
        """Figures of a part of a replica; of a hybrid model the mean of a stage's layers, by their kinds."""
        c, (ep, expert_tp) = candidate, candidate.cut_of(group)
        spread = Spread(c.cp_of(group), ep, expert_tp, slices=c.slices, cut=c.cuts_documents)
        spread = spread._replace(portion=portion, between_bytes_per_s=rate)
        at = pool, group.tp, c.micro_batch_size, c.recompute, spread
        mean_unit = self.unit(*at)
        if stage is None or not self.model.kinds or mean_unit is None:
            return mean_unit
        kinds, chunks = [], layers_at(c, self.model.pattern)[stage]
        for kind in sorted(set("".join(chunks))):
            unit = self.unit(*at, kind)
            if unit is None:
                return None
            kinds.append((unit, tuple(chunk.count(kind) for chunk in chunks)))
        return unit_of_kinds(mean_unit, tuple(kinds))

    @property
    def boundary_bytes_per_sequence(self) -> float:
        """Bytes of one sequence's activations between two layers."""
        return float(self.model.seq_length * self.model.hidden_size * self.model.element_bytes)

    def transfers_of(self, candidate: Candidate, kind: int | None = None) -> tuple[list[float], list[float]]:
        """Returns :class:`Line`'s figures of transfers; ``kind``: index of groups that are a pipeline of their own."""
        groups = tuple([stage.groups for stage in candidate.stages])
        at = candidate.micro_batch_size, candidate.cp, kind
        if (groups, at) not in self.known_transfers:
            ways = self.ways(groups, *at)
            cards_s = map(add, [*[way[1] for way in ways], 0.0], [0.0, *[way[2] for way in ways]])
            self.known_transfers[groups, at] = [way[0] for way in ways], [*cards_s]
        return self.known_transfers[groups, at]

    def ways_s(self, stages: Sequence[tuple[Group, ...]], micro_batch_size: int, cp: int = 1) -> list[float]:
        """Returns the seconds of one transfer over each boundary between the groups of stages."""
        return [way[0] for way in self.ways(stages, micro_batch_size, cp)]

    def ways(
        self, stages: Sequence[tuple[Group, ...]], micro_batch_size: int, cp: int = 1, kind: int | None = None
    ) -> list[Ways]:
        """Returns the slowest transfer over each boundary between the groups of stages, there and back."""
        known = self.known_ways.setdefault((micro_batch_size, cp), {})
        out: list[Any] = [*map(known.get, zip(stages, stages[1:], repeat(kind)))]
        if None in out:
            used: dict[int, int] = {}  # GPUs of earlier stages, by pool
            for i, way in enumerate(out):
                if way is None:
                    out[i] = self._way((stages[i], stages[i + 1]), kind, used, micro_batch_size, cp)
                for pool, tp, count, *_ in stages[i]:
                    used[pool] = used.get(pool, 0) + cp * tp * count
        return out

    def straddling(self, stages: Sequence[tuple[int, tuple[Group, ...]]], cp: int) -> list[bool]:
        """Whether each stage's replicas are on several nodes though one could hold them; nodes are filled in order."""
        used: dict[int, int] = {}  # GPUs of the stages so far, by pool
        out = []
        for _, groups in stages:
            pool, gpus = groups[0].pool, cp * sum([g.tp * g.count for g in groups])
            for g in groups:
                used[g.pool] = used.get(g.pool, 0) + cp * g.tp * g.count
            per_node = self.cluster.nodes[pool].gpus_per_node
            fits = gpus <= per_node and all(g.pool == pool for g in groups)
            out.append(fits and (used[pool] - gpus) // per_node != (used[pool] - 1) // per_node)
        return out

    def around_s(self, stages: Sequence[tuple[Group, ...]], micro_batch_size: int, cp: int = 1) -> float:
        """Seconds of one transfer from the last stage to the first one."""
        size, groups = self.boundary_bytes_per_sequence * micro_batch_size / cp, [g for stage in stages for g in stage]
        pool, gpus = groups[0].pool, cp * sum([g.tp * g.count for g in groups])
        local = {g.pool for g in groups} == {pool} and gpus <= self.cluster.nodes[pool].gpus_per_node
        ends = stages[-1], stages[0]
        return max([self.hand_over(g, h, size, cp, local, ends)[0] for g, h in product(*ends)])

    def _way(self, ends: Ends, kind: int | None, used: dict[int, int], batch: int, cp: int) -> Ways:
        """The slowest transfer from a stage to the next one, and back; ``used``: GPUs of earlier stages, by pool."""
        (a, b), local = ends, None
        own = 0 if kind is None and len(a) == len(b) == 1 else kind
        pairs = [*product(a, b)] if own is None else [(a[own], b[own])]
        if own is not None and len({(g.pool, g.parts) for g in pairs[0]} | {(a[own].pool, ())}) == 1:
            pool = a[own].pool  # both in one node? Nodes are filled in order
            before, end, per_node = used.get(pool, 0), used.get(pool, 0), self.cluster.nodes[pool].gpus_per_node
            before += cp * sum([g.tp * g.count for g in a[:own] if g.pool == pool])
            end += cp * sum([g.tp * g.count for g in (*a, *b[: own + 1]) if g.pool == pool])
            local = before // per_node == (end - 1) // per_node
        known, key = self.known_ways[batch, cp], (a, b, kind) if local is None else (a, b, kind, local)
        if key not in known:
            size = self.boundary_bytes_per_sequence * batch / cp
            # stages of the same replicas divide the microbatches alike: nothing goes from one kind to another
            if own is None and [(g.pool, g.count) for g in a] == [(h.pool, h.count) for h in b]:
                pairs = [*zip(a, b)]
            there = max([self.hand_over(g, h, size, cp, bool(local), ends) for g, h in pairs])
            back = max([self.hand_over(h, g, size, cp, bool(local), ends[::-1]) for g, h in pairs])
            known[key] = *there, back[1]
        return known[key]

    def hand_over(self, a: Group, b: Group, size: float, cp: int, local: bool, stages: Ends) -> tuple[float, float]:
        """Seconds of one boundary tensor from a replica to one of the next stage, and in the sender's network.

        They are those of its slowest part.

        A part sends, and receives, its tokens of the sequence over the slowest link to a part with common tokens.

        Args:
            size: Bytes of an equal part of ``cp``.
            stages: All groups of both stages: replicas of a pool share the networks of its nodes, whatever their TP.
        """
        own, others = stages
        sent = cp * min(sum([g.count for g in own if g.pool == a.pool]), sum([g.count for g in others]))
        met = cp * min(sum([g.count for g in others if g.pool == b.pool]), sum([g.count for g in own]))
        if not (a.parts or b.parts):
            return self.network.transfer_s(a.pool, a.tp, b.pool, b.tp, size, local, sent=sent, met=met)
        return max(
            self.network.transfer_s(
                pool, a.tp, other, b.tp, size * cp * max(end - first, last - start), local, sent=sent, met=met
            )
            for first, end, pool in _places(a, cp)
            for start, last, other in _places(b, cp)
            if min(end, last) - max(first, start) > 1e-9
        )


def _places(group: Group, cp: int) -> list[tuple[float, float, int]]:
    """(begin, end, pool) of each context-parallel rank's part of a sequence, which is 0 to 1."""
    parts = group.parts or (SequencePart(group.pool, 1),) * cp
    edges = list(accumulate((part.share for part in parts), initial=0))
    return [(a / edges[-1], b / edges[-1], part.pool) for a, b, part in zip(edges, edges[1:], parts)]


# Microbatches of different sizes without a pipeline (Poplar, section 3): times of the passes of each replica.

_TIMES = ("layer_f", "layer_b", "embedding_f", "embedding_b", "head_f", "head_b", "attention_f", "attention_b")
_KEPT = ("layer_bytes", "embedding_bytes", "head_bytes")


def passes_of(estimator: OperatingPoints, candidate: Candidate) -> list[int]:
    """Returns the number of passes of the slowest replica of each group; all groups must have figures."""
    slowest = (_slowest(estimator, candidate, i) for i in range(len(candidate.sizes)))
    return [0 if found is None else len(found[0]) for found in slowest]


def _place(candidate: Candidate, group: Group) -> int:
    """Index of the group in its stage, whatever the group's number of replicas."""
    kinds = [(g.pool, g.tp, candidate.cut_of(g), g.parts) for g in candidate.stages[0].groups]
    return kinds.index((group.pool, group.tp, candidate.cut_of(group), group.parts))


def pass_s(estimator: OperatingPoints, candidate: Candidate, group: Group, size: int) -> float:
    """Seconds of one pass of ``size`` sequences on a replica of a group that has figures for it."""
    unit = _resized_unit(estimator, candidate, group, size)
    assert unit is not None
    return unit.both_s(candidate.stages[0].layers, True, True) + estimator.runtime.operation_s


def mean_size(candidate: Candidate, group: Group) -> float:
    """Mean number of sequences of a pass of a group's replicas."""
    i = _place(candidate, group)
    passes = [n for own in candidate.sizes[i] for n in own]
    return sum(passes) / len(passes)


def _slowest(estimator: OperatingPoints, candidate: Candidate, i: int) -> tuple[Passes, Unit] | None:
    """The passes of the replica of group ``i`` that computes longest, and their mean."""
    group, layers = candidate.stages[0].groups[i], candidate.stages[0].layers
    different = dict.fromkeys(candidate.sizes[i])
    largest = max(map(max, different))
    best: tuple[float, Passes, Unit] | None = None
    for own in different:
        unit = _mean(estimator, candidate, group, own, largest)
        if unit is None:
            return None
        seconds = len(own) * (unit.both_s(layers, True, True) + estimator.runtime.operation_s)
        if best is None or seconds > best[0]:
            best = seconds, own, unit
    return None if best is None else best[1:]


def _mean(estimator: OperatingPoints, candidate: Candidate, group: Group, own: Passes, largest: int) -> Unit | None:
    """Mean figures of passes, with the memory of a pass of ``largest`` sequences."""
    found = {n: _resized_unit(estimator, candidate, group, n) for n in {*own, largest}}
    if any(unit is None for unit in found.values()):
        return None
    times = {name: sum(getattr(found[n], name) for n in own) / len(own) for name in _TIMES}
    return replace(found[largest], **times)  # type: ignore[type-var]


def _resized_unit(estimator: OperatingPoints, candidate: Candidate, group: Group, size: int) -> Unit | None:
    plain = candidate.with_(micro_batch_size=size, sizes=())
    return estimator.unit_of(plain, group)


def unit_of_device(estimator: OperatingPoints, candidate: Candidate, group: Group, own: Passes) -> Unit:
    """Returns a replica's figures for a microbatch of the plan's largest size, as the simulator needs them.

    The simulator gives a smaller microbatch its share of the largest one's time and memory.  Small passes take more
    than their share, so the figures are chosen such that the total time of the replica's passes is right.

    Args:
        own: The replica's passes, which must have figures.
    """
    unit = _mean(estimator, candidate, group, own, max(own))
    assert unit is not None
    most = candidate.micro_batch_size
    slower, larger = most * len(own) / sum(own), most / max(own)
    figures = {name: getattr(unit, name) * slower for name in _TIMES}
    return replace(unit, **figures, **{name: getattr(unit, name) * larger for name in _KEPT})


def state_shards(estimator: OperatingPoints, candidate: Candidate, s: int, group: Group, count: float) -> float:
    """Number of ranks over which the distributed optimizer divides a rank's ``count`` parameters, on average.

    They are of one TP size.  Experts over replicas have fewer copies than other weights.
    """
    shards = sum([g.count * candidate.cp_of(g) for g in candidate.stages[s].groups if g.tp == group.tp])
    if not candidate.spans(group):
        return shards
    experts = experts_of(estimator, candidate, s, group)
    return count / ((count - experts) / shards + experts / candidate.copies_of(s, group))


def experts_of(estimator: OperatingPoints, candidate: Candidate, s: int, group: Group) -> float:
    """Parameters of experts of a rank."""
    layers, model = float(candidate.stages[s].layers), estimator.model
    first = model.experts.dense_at_start if model.experts is not None else 0
    if first and sum([stage.layers for stage in candidate.stages]) == model.num_layers:
        layers = (layers - candidate.first_layers(s, first)) / (1 - first / model.num_layers)
    return layers * model.expert_parameters(*candidate.cut_of(group))


Sync = Callable[[tuple[Group, ...], dict[Group, float]], float]  # ``Network.sync_s`` of these ranks


def copies_sync_s(
    estimator: OperatingPoints, candidate: Candidate, s: int, counts: list[float], bytes_each: float, sync_s: Sync
) -> float:
    """Seconds to reduce (or scatter, gather) ``bytes_each`` per parameter over a stage's copies of its weights."""
    groups, own, counts = candidate.reducing(s), candidate.stages[s].groups, candidate.by_part(s, counts)
    if not candidate.spans(own[0]):
        return sync_s(groups, {g: n * bytes_each for g, n in zip(groups, counts)})
    experts = candidate.by_part(s, [experts_of(estimator, candidate, s, g) for g in own])
    rest = {g: (n - e) * bytes_each for g, n, e in zip(groups, counts, experts)}
    # Copies of a rank's experts are an expert group apart.
    size = math.prod(candidate.cut_of(own[0]))
    apart = tuple(g._replace(tp=size, count=max(1, g.count * g.tp // size)) for g in groups)
    return sync_s(groups, rest) + sync_s(apart, {g: e * bytes_each for g, e in zip(apart, experts)})
