"""The simulator's costs of a plan, from the same per-layer figures as the closed form."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_het.features.base import Figures
from megatron_het.plan import Plan
from megatron_het.schedule.cost import Costs, Link, Memory
from megatron_het.schedule.cutting import Parts

from ..costs.candidate import Candidate, Group
from ..costs.estimate import Estimate, Estimator, Unit
from ..costs.estimates import rank_parameters
from ..costs.extras import attention_layers
from ..costs.passes import passes_of_plan, unit_of_device
from ..costs.schedules import schedule_of
from ..costs.stages import sharding_s, stage_tails
from ..inputs.packing import Seat
from .plain import Wiring

# What the operations of a plan's features take on every device, for the simulation of its real program.


Device = tuple[int, Group, Unit]
"""(stage, kind of replica, its figures)"""


def figures_of(estimator: Estimator, whole: Candidate, devices: Sequence[Device]) -> Figures:
    """Figures per device.

    Args:
        estimator: Prices links and layers.
        whole: Decides over whom parameters are gathered and gradients reduced.
        devices: Of the program.
    """
    model, batch = estimator.model, whole.micro_batch_size
    element = float(model.element_bytes)
    gathers: list[float] = []
    reduces: list[float] = []
    for s, stage in enumerate(whole.stages):
        units = [estimator.unit_of(whole, g, s) for g in stage.groups]
        counts = [rank_parameters(whole, u, s) for u in units if u is not None]
        ranks = whole.reducing(s)
        for out, bytes_each in ((gathers, element), (reduces, 4.0)):
            size = {g: n * bytes_each for g, n in zip(ranks, counts, strict=True)}
            out.append(estimator.network.sync_s(ranks, size, 0.5))
    # Replicas of one TP size share a copy of the state.
    shards = [
        {g.tp: sum(x.count for x in ranks if x.tp == g.tp) for g in ranks}
        for ranks in (whole.reducing(s) for s in range(len(whole.stages)))
    ]
    host = [estimator.cluster.gpu(estimator.cluster.nodes[g.pool].gpu).host_bytes_per_s for _, g, _ in devices]
    # Figures of a layer are not measured apart from its attention: by operations, causal attention once.
    length = model.seq_length
    share = 1 - model.layer_flops(length, 0) / model.layer_flops(length)
    attending = [attention_layers(model, whole, s) for s in range(len(whole.stages))]
    if model.kinds:  # of a layer with attention, and not of the mean of all
        share *= model.num_layers / max(1, sum(attending))
    means = [estimator.unit_of(whole, g) if model.kinds else u for _, g, u in devices]
    tokens = float(batch * length) / whole.cp
    return Figures(
        gather_s=tuple(gathers[s] for s, _, _ in devices),
        reduce_s=tuple(reduces[s] for s, _, _ in devices),
        host_copy_s=tuple(
            rank_parameters(whole, u, s) * element / shards[s][g.tp] / speed
            for (s, g, u), speed in zip(devices, host, strict=True)
        ),
        host_bytes_per_s=tuple(host),
        embedding_forward_s=tuple(u.embedding_f for _, _, u in devices),
        embedding_backward_s=tuple(u.embedding_b for _, _, u in devices),
        head_forward_s=tuple(u.head_f for _, _, u in devices),
        head_backward_s=tuple(u.head_b for _, _, u in devices),
        head_bytes=tuple(u.head_bytes for _, _, u in devices),
        attention_forward_s=tuple(share * u.layer_f for u in means if u is not None),
        attention_backward_s=tuple(share * u.layer_b for u in means if u is not None),
        kv_bytes=tuple(2 * tokens * model.kv_size / g.tp * element for _, g, _ in devices),
        query_bytes=tuple(2 * tokens * model.hidden_size / g.tp * element for _, g, _ in devices),
    )


Seats = list[list[list[Seat]]]
"""Of every rank, by stage and replica."""


def devices_of(estimator: Estimator, candidate: Candidate, plan: Plan, seated: Seats) -> list[Device]:
    """The replicas in the plan's order, with their figures; replicas of a kind share one entry."""
    known: dict[tuple[int, int, int, int, tuple[int, ...]], Device] = {}

    def device(s: int, pool: int, tp: int, ep: int, own: tuple[int, ...]) -> Device:
        g = Group(pool, tp, 1, ep)
        unit = unit_of_device(estimator, candidate, g, own) if own else estimator.unit_of(candidate, g, s)
        assert unit is not None
        return s, g, unit

    passes = passes_of_plan(plan) if candidate.sizes else []
    out = []
    for s, (stage, row) in enumerate(zip(plan.stages, seated, strict=True)):
        for q, (replica, mine) in enumerate(zip(stage.replicas, row, strict=True)):
            kind = s, mine[0].pool, replica.tp, replica.ep, passes[q] if passes else ()
            out.append(known.get(kind) or known.setdefault(kind, device(*kind)))
    return out


Rows = list[tuple[float, ...]]
"""A figure of every device and chunk."""


def _passes(
    estimator: Estimator, whole: Candidate, candidate: Candidate, plan: Plan, devices: list[Device]
) -> tuple[Rows, Rows, Rows]:
    """Seconds of forwards and backwards, and bytes of activations, by device and chunk."""
    last = candidate.head_stage
    least: dict[int, tuple[float, float]] = {}
    if candidate.zero_stage >= 2 and not schedule_of(candidate).shards_parameters:
        for s, its in enumerate(whole.stages):
            units = [estimator.unit_of(whole, g, s) for g in its.groups]
            least[s] = sharding_s(estimator, whole, units, s)  # type: ignore[arg-type]
    known: dict[tuple[int, Group, int], tuple[tuple[float, ...], ...]] = {}

    def rows(s: int, u: Unit) -> tuple[tuple[float, ...], ...]:
        layers = plan.stages[s].layers
        f, b = (u.chunks_s(layers, s == 0, s == last, back) for back in (False, True))
        a = u.of_chunks("layer_bytes", layers)
        if s == 0:
            a[0] += u.embedding_bytes
        if s in least:
            f, b = [max(x, least[s][0]) for x in f], [max(x, least[s][1]) for x in b]
        return tuple(f), tuple(b), tuple(a)

    found = [known.get((s, g, id(u))) or known.setdefault((s, g, id(u)), rows(s, u)) for s, g, u in devices]
    forward, backward, kept = (list(column) for column in zip(*found, strict=True))
    return forward, backward, kept


def _without_attention(rows: Rows, attention: Rows) -> Rows:
    """Returns what is left of passes when attention, whose time depends on the slice, is told apart."""
    return [tuple(x - a for x, a in zip(row, mine)) for row, mine in zip(rows, attention)]


def costs_of(
    estimator: Estimator,
    whole: Candidate,
    candidate: Candidate,
    estimate: Estimate,
    plan: Plan,
    seated: Seats,
    parts: Parts = (),
) -> Costs:
    """The simulator's costs, from the same per-layer figures as the closed form.

    Args:
        whole: Decides gradient reduction and memory.
        candidate: What is simulated: the whole or one block of it.
        seated: Where the plan's ranks sit, in the plan's order of replicas.
        parts: What slices see; empty for the mean of all documents.
    """
    size = estimator.boundary_bytes_per_sequence * candidate.micro_batch_size / candidate.cp
    devices = devices_of(estimator, candidate, plan, seated)
    flat = [replica for stage in seated for replica in stage]
    tails = stage_tails(estimator, whole, estimate)
    last = candidate.head_stage

    def price(a: Group, b: Group, local: bool) -> Link:
        seconds = estimator.network.transfer_s(a.pool, a.tp, b.pool, b.tp, size, local)
        fixed = min(seconds, estimator.runtime.transfer_latency_s)
        return Link(fixed, size / max(seconds - fixed, 1e-12))

    link = Wiring([g for _, g, _ in devices], [replica[0].host for replica in flat], price)
    forward, backward, kept = _passes(estimator, whole, candidate, plan, devices)
    by_group = {(m.stage, m.group.pool, m.group.tp, whole.cut_of(m.group)[0]): m for m in estimate.memory}
    memories = [by_group[s, g.pool, g.tp, g.ep] for s, g, _ in devices]
    attention: list[Rows] = [[], []]
    if candidate.slices > 1:  # a later slice attends to more keys
        attention = [
            [tuple(u.of_chunks(name, plan.stages[s].layers)) for s, _, u in devices]
            for name in ("attention_f", "attention_b")
        ]
        forward, backward = (_without_attention(*rows) for rows in zip((forward, backward), attention, strict=True))
    whole_share = estimator.model.attention_share if parts else 1.0  # parts are of the attention of whole sequences
    attention_f, attention_b = (tuple(tuple(x / whole_share for x in row) for row in rows) for rows in attention)
    return Costs(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        attention_forward_s=attention_f,
        attention_backward_s=attention_b,
        diagonal=0.5,
        parts=tuple(map(tuple, parts)),
        message_bytes=size,
        link=link,
        operation_s=estimator.runtime.operation_s,
        host_blocks=estimator.runtime.host_blocks,
        keeps_sent=estimator.runtime.keeps_sent and not schedule_of(candidate).cuts_sequences,
        tail_s=tuple(tails[s] for s, _, _ in devices),
        memory=Memory(
            activation_bytes=tuple(kept),
            logits_bytes=tuple(u.head_bytes if s == last else 0.0 for s, _, u in devices),
            other_bytes=tuple(m.total_bytes - m.activation_bytes for m in memories),
        ),
    )
