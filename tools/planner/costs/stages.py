"""A stage's time and memory: the one place where they are computed, with a cache over candidates."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from megatron_het.features import options_of
from megatron_het.features.activation_offload.spec import offload_ratio
from megatron_het.features.context_exchange.spec import ATTENTION, REST
from megatron_het.features.registry import extra_layers
from megatron_het.plan import Plan
from megatron_het.plan.placement import PARAMETER, vocabulary_shares
from megatron_het.plan.schema import GATED_DELTA_NET, MAMBA, WITH_ATTENTION

from ..inputs.model import Model
from .candidate import (
    Candidate,
    Group,
    GroupMemory,
    Passes,
    StageTimes,
    allocate,
    chunk_layers,
    divided_alike,
    layers_at,
    rank_parameters,
)
from .catalogcost import deferred_bytes
from .layer import pool_size
from .operating import OperatingPoints, copies_sync_s, passes_of, state_shards
from .schedules import schedule_of
from .schedules.base import while_updating
from .unit import Unit

# Prices beside the schedule's: a split vocabulary, the context exchange, activations in main memory.
#
# Candidates have them in ``sizes``, ``rows``, ``exchange`` and ``host_activations``.  Plans have them among the
# parameters of the schedule, and the sizes of microbatches under ``training``.


def routes_of(candidate: Candidate) -> tuple[list[list[int]], tuple[int, ...]]:
    """Microbatch ids of every replica, in the order of its groups, and the size of each microbatch.

    The global order of samples is round-robin: the first passes of all replicas, then the second ones, and so on.
    """
    rows = [own for replicas in candidate.sizes for own in replicas]
    ids: list[list[int]] = [[] for _ in rows]
    sizes = []
    for m, (turn, q) in enumerate(sorted((turn, q) for q, own in enumerate(rows) for turn in range(len(own)))):
        ids[q].append(m)
        sizes.append(rows[q][turn])
    return ids, tuple(sizes)


def passes_of_plan(plan: Plan) -> list[Passes]:
    """The passes of every replica of a plan's only stage; empty for equal microbatches, or a pipeline."""
    sizes = plan.training.micro_batch_sizes
    if not sizes or len(plan.stages) > 1:
        return []
    return [tuple(sizes[m] for m in replica.microbatches) for replica in plan.stages[0].replicas]


def sizes_of_plan(plan: Plan, kinds: Sequence[Group]) -> tuple[tuple[Passes, ...], ...]:
    """``Candidate.sizes`` of a plan, by the kind of every replica of its stage."""
    groups: dict[Group, list[Passes]] = {}
    for kind, own in zip(kinds, passes_of_plan(plan)):
        groups.setdefault(kind, []).append(own)
    return tuple(tuple(groups[kind]) for kind in sorted(groups))


_PARTS = 1000  # units of the smallest of uneven figures in a plan, in which only ratios count
_PASSES_NEAR = 3
"""Passes whose activations are on the device under offload: one running, one on the way out, one on the way in."""


def extras_of_plan(plan: Plan) -> dict[str, Any]:
    """Returns these settings of a checked plan as fields of a candidate."""
    return {
        "rows": _vocabulary_rows(plan),
        "exchange": options_of(plan, "context_exchange") is not None,
        "host_activations": 0.0 if plan.schedule.parameters.get("offload") else offload_ratio(plan),
    }


def _vocabulary_rows(plan: Plan) -> tuple[tuple[float, float], ...]:
    """Returns each stage's part of a split vocabulary; tied embeddings have one table for both ends."""
    if not plan.schedule.parameters.get("vocabulary"):
        return ()
    shares = vocabulary_shares(plan) or (1,) * len(plan.stages)
    return rows_of(shares, plan.model.tied_embeddings)


def rows_of(shares: tuple[int, ...], tied: bool) -> tuple[tuple[float, float], ...]:
    """``Candidate.rows`` of shares of the vocabulary.

    Args:
        shares: Relative number of rows of each stage.
        tied: Whether both ends of the model have one table.
    """
    parts = [share / sum(shares) for share in shares]
    return tuple((part, 0.0 if tied else part) for part in parts)


def extra_parameters(estimator: OperatingPoints, candidate: Candidate) -> dict[str, Any]:
    """The schedule parameters of a plan for these settings of a candidate."""
    found: dict[str, Any] = {}
    if candidate.rows:
        found["vocabulary"] = True
        parts = [words for words, _ in candidate.rows]
        if len(set(parts)) > 1:
            found[PARAMETER] = _whole(parts)
    if candidate.exchange:
        found |= {"context_exchange": True, "exchange_idle": True}
        attention, rest = _passes(estimator, candidate)
        if len(set(attention)) > 1 or len(set(rest)) > 1:
            whole = _whole([*attention, *rest])
            found |= {ATTENTION: whole[: len(attention)], REST: whole[len(attention) :]}
    if candidate.host_activations:
        found["offload_activations"] = candidate.host_activations
    return found


def _whole(values: list[float]) -> list[int]:
    """Integers in the ratios of figures; 1 where a figure is 0, as that of a stage without attention."""
    unit = min((value for value in values if value), default=1.0) / _PARTS
    return [max(1, round(value / unit)) for value in values]


def _passes(estimator: OperatingPoints, candidate: Candidate) -> tuple[list[float], list[float]]:
    """Seconds per replica of a layer's attention of a slice to one slice, and per chunk of a slice's other work."""
    attention, rest = [], []
    pairs = candidate.slices**2 / 2  # of a slice with itself or an earlier one; the former take half as long
    for s, (layers, groups) in enumerate(candidate.stages):
        for g in groups:
            u = estimator.unit_of(candidate, g, s)
            assert u is not None
            chunks = chunk_layers(layers, candidate.chunks_of(s))
            seconds = u.chunks_s(chunks, *((0.0, 0.0) if candidate.rows else candidate.ends_of(s)), False)
            attending = u.of_chunks("attention_f", chunks)
            own = [(t - a) / candidate.slices for t, a in zip(seconds, attending)]
            each = sum(attending) / max(1, attention_layers(estimator.model, candidate, s))
            attention += [each / estimator.model.attention_share / pairs] * g.count
            rest += own * g.count
    return attention, rest


def attention_layers(model: Model, candidate: Candidate, s: int) -> int:
    """Number of attention layers of a stage."""
    if not model.kinds:
        return candidate.stages[s].layers
    mine = "".join(layers_at(candidate, model.pattern)[s])
    return sum(mine.count(symbol) for symbol in WITH_ATTENTION)


def carried_bytes(estimator: OperatingPoints, candidate: Candidate, group: Group, s: int) -> float:
    """Bytes of the states that slices of a microbatch hand over in the recurrent layers of a rank, in fp32."""
    model = estimator.model
    mine = "".join(layers_at(candidate, model.pattern)[s])
    sizes = ((MAMBA, model.mamba), (GATED_DELTA_NET, model.delta_net))
    numbers = sum(mine.count(symbol) * x.state_numbers for symbol, x in sizes if x is not None)
    return 4.0 * candidate.slices * candidate.micro_batch_size * numbers / group.tp / candidate.cp_of(group)


def moved_bytes(
    estimator: OperatingPoints,
    candidate: Candidate,
    group: Group,
    unit: Unit,
    s: int,
    *,
    held: float,
    mine: int,
    logits: float,
    portion: float,
) -> tuple[float, float, float]:
    """Additional bytes of a rank: on the device (may be negative), in main memory, and held to the iteration's end.

    Keys and values stay on the device.  Under the context exchange a rank also holds keys, values and their gradients
    of others, for at most half of the slices, in all layers of a chunk.  Gradients of keys and values, in fp32, exist
    from the backward of a microbatch's last slice on, while the next microbatch's slices take its place.

    Args:
        held: Microbatches whose activations the rank holds.
        logits: Bytes that the output layer keeps for all slices of a microbatch.
        portion: The rank's part of every sequence.
    """
    model, slices, chunks = estimator.model, candidate.slices, candidate.chunks_of(s)
    numbers = candidate.micro_batch_size * model.seq_length * portion * pool_size(model, group.tp)
    pool = numbers * attention_layers(model, candidate, s) * model.element_bytes
    collected, again = pool * 4 / model.element_bytes, 1 - group.kept if candidate.recompute == "full" else 0.0
    kept = candidate.stages[s].layers * unit.layer_bytes * (unit.sliced_share if slices > 1 else 1.0)
    more = waiting = 0.0
    stays = pool if slices > 1 or candidate.cp_of(group) > 1 else 0.0
    if slices > 1:  # figures of full recomputation count such gradients for all held passes
        gone = kept / slices / chunks if mine == 1 and not again else 0.0
        more = max(0.0, collected * (1 - 1 / slices) - gone) - collected * held * again
    elif candidate.cp_of(group) > 1:
        more = pool * held * again
    if candidate.exchange:
        more += (pool + collected) / chunks / 2
    if candidate.host_activations and not candidate.offload:
        near = stays + (collected if candidate.recompute == "full" and stays else 0.0)
        far = max(0.0, held - _PASSES_NEAR / (slices * chunks))
        waiting = candidate.host_activations * far * (max(0.0, kept - near) + (logits if slices > 1 else 0.0))
        more -= waiting
    return more, waiting, stays


# Predicted memory of every rank by category.


def stage_memory(estimator: OperatingPoints, candidate: Candidate, stage: StageTimes, s: int) -> Iterable[GroupMemory]:
    """GroupMemory of every group of stage ``s``."""
    groups = candidate.stages[s].groups
    found = []
    for i, g in enumerate(groups):
        # All parts of a stage that has times have figures.
        units = (estimator.units_of_parts(candidate, g, s) or []) if g.parts else stage.units[i : i + 1]
        for (part, portion), u in zip(candidate.parts_of(g), units, strict=True):
            found.append(_memory(estimator, candidate, stage, s, i, u=u, part=part, portion=portion))
    return schedule_of(candidate).divide(estimator, candidate, found, candidate.by_part(s, stage.parameters))


def _memory(
    estimator: OperatingPoints,
    candidate: Candidate,
    stage: StageTimes,
    s: int,
    i: int,
    u: Unit,
    part: Group,
    portion: float,
) -> GroupMemory:
    """Memory of a rank of group ``i`` of stage ``s``, whose optimizer state is divided equally.

    Args:
        part: All context-parallel ranks of its kind, from :meth:`Candidate.parts_of`.
    """
    runtime, schedule, has_head = estimator.runtime, schedule_of(candidate), s == candidate.head_stage
    layers, groups = candidate.stages[s]
    boundary = estimator.boundary_bytes_per_sequence * candidate.micro_batch_size / candidate.slices * portion
    if estimator.model.sequence_parallel:
        boundary /= groups[i].tp
    mine, count = stage.microbatches[i], stage.parameters[i]
    divided = state_shards(estimator, candidate, s, groups[i], count)
    parameters, gradients, optimizer, host = schedule.state(estimator, candidate.as_of(s), u, count, divided)
    held = schedule.in_flight(candidate, stage, s, i)
    kept = layers * (u.layer_bytes * schedule.layer_share(u)) + (u.embedding_bytes if s == 0 else 0.0)
    activations, waiting = schedule.activations(candidate, held, kept)
    if candidate.slices > 1 and estimator.model.kinds:
        activations += held * carried_bytes(estimator, candidate, groups[i], s)
    logits = max(candidate.rows[s]) if candidate.rows else float(has_head)
    # Layers that are kept are full at the loss, beside all logits.
    at_loss = candidate._replace(recompute="none") if groups[i].kept else candidate
    said = schedule.logits(at_loss, held, u.head_bytes, mine <= 1) * logits if logits else 0.0
    activations, stays = activations + said, 0.0
    if candidate.host_activations or candidate.slices > 1 or candidate.cp_of(groups[i]) > 1:
        of_rank = {"held": held, "logits": said, "portion": portion}
        more, offloaded, stays = moved_bytes(estimator, candidate, groups[i], u, s, mine=mine, **of_rank)
        activations, waiting = activations + more, waiting + offloaded
    if len(candidate.stages) > 1:
        activations += 2 * boundary
        if runtime.keeps_sent and not schedule.cuts_sequences:
            # until the last forward, at the peak
            forward, backward = candidate.sends(s)
            activations += boundary * (mine * forward + (mine - held) * backward)
    workspace = u.workspace_bytes
    if candidate.rows:  # probabilities of the stage's rows in fp32; hidden states and gradients at both ends
        workspace = max(workspace, 2 * logits * u.head_workspace_bytes)
        activations += 4 * boundary * (groups[i].tp if estimator.model.sequence_parallel else 1)
    elif has_head:
        workspace = schedule.head_workspace(at_loss, u)
    workspace /= candidate.slices
    if s == 0 and not candidate.rows:  # the table's gradient is allocated after the chunk's activations are freed
        gone = (kept / candidate.chunks_of(s) + said) / candidate.slices
        workspace = max(workspace, u.embedding_workspace_bytes - gone)
    if candidate.moments:
        others = activations - held * kept - (0.0 if candidate.rows else said)
        tokens = candidate.micro_batch_size * estimator.model.seq_length * portion
        loss = workspace if has_head or candidate.rows else 0.0
        most, said, workspace = _at_most(estimator, candidate, groups[i], u, s, tokens=tokens, at_loss=loss)
        activations = others + most
    mains = optimizer / estimator.optimizer_per_parameter
    updating = stays + while_updating(estimator, candidate, groups[i], mains, mains)
    workspace = max(workspace, updating - activations)
    replicas = groups[i].count
    return GroupMemory(
        s,
        part if part.count == replicas else part._replace(count=replicas),
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        activation_bytes=activations,
        workspace_bytes=workspace,
        reserved_bytes=u.reserved_bytes,
        capacity_bytes=u.capacity_bytes,
        host_bytes=host + waiting,
        cp=part.count // replicas,
        logits_bytes=said,
    )


def _at_most(
    estimator: OperatingPoints, candidate: Candidate, group: Group, u: Unit, s: int, tokens: float, at_loss: float
) -> tuple[float, float, float]:
    """Returns activations, the part of them that is from the loss, and workspace, all at the peak.

    The peak is at the end of the first half of a split backward.  Either the last layer has just been recomputed, and
    the others wait for their weight gradients; or all wait, and the full gradient of embedding or output layer exists
    before it is accumulated.

    Args:
        tokens: Tokens of a microbatch on this rank.
        at_loss: Workspace of the loss on the stage with the loss, 0 on others.
    """
    model, again = estimator.model, candidate.recompute == "full"
    own = estimator.unit_of(candidate.with_(recompute="none"), group._replace(kept=0.0), s) if again else None
    kinds = "".join(layers_at(candidate, model.pattern)[s]) if model.kinds else ""
    cut = tokens, group.tp, *candidate.cut_of(group), estimator.runtime.fused
    rows = [deferred_bytes(one, *cut) for one in map(model.of_kind, kinds)] or [deferred_bytes(model, *cut)]
    layer, head = (sum(column) / len(rows) for column in zip(*rows))
    later = extra_layers(model)
    last = head + later * (layer + head)
    found = []
    for moment in candidate.moments[s]:
        losses = 0.0 if candidate.rows else moment.losses * u.head_bytes + moment.waiting_losses * last
        beside = max(u.workspace_bytes - (own.layer_bytes if own else 0.0), at_loss)
        kept = moment.layers * u.layer_bytes + (moment.waiting - (again and moment.ends)) * layer
        found.append((kept + losses, losses, beside if moment.is_forward else u.workspace_bytes))
        if moment.ends and s in (0, candidate.head_stage) and not candidate.rows:
            weights = model.vocab_size / group.tp * model.hidden_size * model.element_bytes
            found.append((moment.layers * u.layer_bytes + moment.waiting * layer + losses, losses, weights))
    return max(found, key=lambda m: m[0] + m[2])


def stages_of(
    estimator: OperatingPoints, candidate: Candidate, blocks: int, total: int, transfers: Sequence[float]
) -> list[StageTimes] | None:
    """All stages at their operating points, without their memory; None where a stage cannot run.

    Most candidates of a search differ from others in one or two stages, so every stage is priced once and cached.

    Args:
        total: Microbatches of one of the equal pipelines.
    """
    c, last = candidate, candidate.head_stage
    in_turn = estimator.runtime.transfers_in_turn
    key = c.micro_batch_size, c.recompute, c.schedule, c.chunks, c.slices, c.zero_stage, c.offload, c.even, c.cp, c.ep
    rest = c.across_replicas, c.sizes, c.rows, c.exchange, c.host_activations, c.cuts_documents, blocks, total
    known = estimator.known_stages.setdefault((key, rest, c.moments), {})
    layers = layers_at(c, estimator.model.pattern) if estimator.model.kinds else ()
    first = estimator.model.experts.dense_at_start if estimator.model.experts is not None else 0
    straddling = estimator.straddling(c.stages, c.cp)
    out: list[StageTimes] = []
    for s, stage in enumerate(c.stages):
        waits = 2 * transfers[s - 1] if in_turn and s else 0.0
        ends = c.rows[s] if c.rows else (s == 0, s == last)
        kinds = layers[s] if layers else (), c.first_layers(s, first) if first else 0
        mine = stage, ends, waits, c.chunks_of(s), kinds, straddling[s]
        if mine not in known:
            known[mine] = _stage(estimator, c, s, blocks, total, waits, scattered=straddling[s])
        found = known[mine]
        if found is None:
            return None
        out.append(found)
    return _in_flight(estimator, c, out, blocks, total)


def _in_flight(
    estimator: OperatingPoints, candidate: Candidate, stages: list[StageTimes], blocks: int, total: int
) -> list[StageTimes]:
    """The stages, completed by their numbers of microbatches in flight."""
    last, later, out = len(stages) - 1, 0, []
    depths = candidate.depths or (1,) * last
    alike = divided_alike(candidate, [s.microbatches for s in stages])
    for s in range(last, -1, -1):
        stage = stages[s]
        if alike:  # separate pipelines, each in Megatron's order
            held = tuple([min(k, 1 + sum(depths[s:])) for k in stage.microbatches])
        else:  # a share of what the later stages keep busy, slack, and its own
            held = tuple(
                [min(k, 1 + ceil((1 + candidate.slack) * k / total * later - 1e-9)) for k in stage.microbatches]
            )
        if s:
            later += depths[s - 1] * sum([g.count for g in candidate.stages[s].groups]) // blocks
        key = s, last, held
        known = stage.memo.get(key) if candidate.shares is None else None
        if known is None:
            known = replace(stage, in_flight=held)
            if candidate.shares is None:
                stage.memo[key] = known
        out.append(known)
    return out[::-1]


def remember_memory(estimator: OperatingPoints, candidate: Candidate, stages: list[StageTimes]) -> None:
    """Add the predicted memory to stages."""
    for s, stage in enumerate(stages):
        if not stage.memory:
            stage.memory = tuple(stage_memory(estimator, candidate, stage, s))
            stage.fullest = max([m.full for m in stage.memory])


def _stage(
    estimator: OperatingPoints, candidate: Candidate, s: int, blocks: int, total: int, waits_s: float, scattered: bool
) -> StageTimes | None:
    """Stage ``s``: passes of its replicas and their shares of ``total`` microbatches; ``in_flight`` is left open.

    ``waits_s`` is the time that transfers without overlap add to each microbatch.
    """
    layers, groups = candidate.stages[s]
    if layers < 1 or not groups:
        return None
    first, last = candidate.ends_of(s)
    chunks = candidate.chunks_of(s)
    operations = chunks + (2 if candidate.rows else 0)  # parts of the vocabulary have their own
    fixed = estimator.runtime.operation_s * operations * candidate.slices
    units: list[Unit] = []
    forward: list[float] = []
    backward: list[float] = []
    for g in groups:
        u = estimator.unit_of(candidate, g, s)
        if u is None:
            return None
        units.append(u)
        forward.append(u.forward_s(layers, first, last, chunks) + fixed)
        backward.append(u.backward_s(layers, first, last, chunks) + fixed)
    if candidate.zero_stage >= 2 and not schedule_of(candidate).shards_parameters:
        least_f, least_b = sharding_s(estimator, candidate, units, s, scattered)
        overlap = estimator.runtime.gather_overlap
        forward = [beside(f, least_f, overlap) for f in forward]
        backward = [beside(b, least_b, overlap) for b in backward]
    if any(candidate.spans(g) for g in groups):
        if not may_share_experts(candidate, s, total * blocks):
            return None
        forward, backward = [max(forward)] * len(groups), [max(backward)] * len(groups)
    counts = [g.count // blocks for g in groups]
    both = [f + b + waits_s for f, b in zip(forward, backward)]
    if candidate.sizes:
        shares = passes_of(estimator, candidate)
        busy = max(k * t for k, t in zip(shares, both))
    elif candidate.even:
        shares = [total // sum(counts)] * len(groups)
        busy = max(k * t for k, t in zip(shares, both))
    else:
        found = allocate(both, counts, total)
        if found is None:
            return None
        busy, shares = found
    weight = [n * k for n, k in zip(counts, shares)]
    forward_s = sum(w * f for w, f in zip(weight, forward)) / sum(weight)
    backward_s = sum(w * b for w, b in zip(weight, backward)) / sum(weight)
    sync, update = tail_s(estimator, candidate, units, s, scattered)
    parameters = tuple(rank_parameters(candidate, u, s) for u in units)
    return StageTimes(
        units,
        forward,
        backward,
        shares,
        counts,
        busy,
        forward_s=forward_s,
        backward_s=backward_s,
        sync_s=sync,
        update_s=update,
        parameters=parameters,
        scattered=scattered,
    )


def may_share_experts(candidate: Candidate, s: int, total: int) -> bool:
    """Whether the replicas of a stage may share experts: they fill whole expert groups and run equally many passes.

    Args:
        total: Microbatches of the whole plan.
    """
    groups = candidate.stages[s].groups
    cuts = {(g.tp, candidate.cut_of(g)) for g in groups}
    replicas = sum(g.count for g in groups)
    (tp, (ep, expert_tp)), *others = cuts
    whole = sum(g.count * candidate.cp_of(g) for g in groups) * tp % (ep * expert_tp) == 0
    return not others and whole and ep % tp == 0 and total % replicas == 0 and not candidate.sizes


def stage_tails(estimator: OperatingPoints, candidate: Candidate, scattered: Sequence[int] = ()) -> list[float]:
    """Seconds per stage after the last operation of its program: gradient reduction and update.

    Under a parameter window the reduction consists of operations of the program.

    Args:
        scattered: Stages whose replicas are on several nodes, even if one could hold them.
    """
    out: list[float] = []
    for s, stage in enumerate(candidate.stages):
        units = [estimator.unit_of(candidate, g, s) for g in stage.groups]
        sync, update = tail_s(estimator, candidate, units, s, s in scattered)  # type: ignore[arg-type]
        out.append(update if schedule_of(candidate).shards_parameters else sync + update)
    return out


def beside(compute_s: float, other_s: float, overlap: float) -> float:
    """Seconds of two activities of which the share ``overlap`` of the shorter one can be hidden."""
    return max(compute_s, other_s) + (1 - overlap) * min(compute_s, other_s)


def sharding_s(
    estimator: OperatingPoints, candidate: Candidate, units: list[Unit], s: int, scattered: bool
) -> tuple[float, float]:
    """Least time of a forward and of a backward of one microbatch with plain ZeRO-2 or 3, without ministages.

    Gradients are reduce-scattered after every microbatch (only shards of them are kept), and ZeRO-3
    gathers parameters before every forward and every backward.  All of it overlaps with the compute of the
    same pass, layer by layer; only the time beyond the compute is exposed.
    """
    groups = candidate.reducing(s)
    element = float(estimator.model.element_bytes)
    size = {g: rank_parameters(candidate, u, s) * element for g, u in zip(groups, candidate.by_part(s, units))}
    half = estimator.network.sync_s(groups, size, 0.5, scattered=scattered)
    return (half, 2 * half) if candidate.zero_stage == 3 else (0.0, half)


def tail_s(
    estimator: OperatingPoints, candidate: Candidate, units: list[Unit], s: int, scattered: bool = False
) -> tuple[float, float]:
    """(gradient reduction or gather of parameters, update) of one stage after its last backward."""
    schedule = schedule_of(candidate)
    element = float(estimator.model.element_bytes)
    counts = [rank_parameters(candidate, u, s) for u in units]
    sync_s = partial(estimator.network.sync_s, scattered=scattered)
    sync = copies_sync_s(estimator, candidate, s, counts, estimator.gradient_per_parameter, sync_s)
    if schedule.shards_parameters:  # the next iteration gathers
        sync /= 2
    elif candidate.zero_stage >= 1 and sync:
        gather = copies_sync_s(estimator, candidate, s, counts, element, partial(sync_s, share=0.5))
        sync = sync / 2 + gather
        if candidate.zero_stage >= 2:  # gradients were reduced with each microbatch
            sync = gather if candidate.zero_stage == 2 else 0.0
    update = 0.0
    for own, n in zip(candidate.stages[s].groups, counts):
        mine = n / state_shards(estimator, candidate, s, own, n) if candidate.zero_stage >= 1 else n
        for g, _ in candidate.parts_of(own):
            update = max(update, estimator.costs.update_s(estimator.cluster.nodes[g.pool].gpu, mine))
    sync *= 1 - estimator.runtime.sync_overlap
    return schedule.exposed(candidate, sync, update)
