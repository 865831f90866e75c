"""Prices beside the schedule's: a split vocabulary, the context exchange, activations in main memory.

Candidates say it in ``sizes``, ``rows``, ``exchange`` and ``host_activations``, plans among the parameters of the
schedule, and sizes of microbatches of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_het.features import options_of
from megatron_het.features.activation_offload.spec import offload_ratio
from megatron_het.features.context_exchange.spec import ATTENTION, REST
from megatron_het.plan import Plan
from megatron_het.plan.placement import PARAMETER, vocabulary_shares
from megatron_het.plan.schema import GATED_DELTA_NET, MAMBA, WITH_ATTENTION

from ..inputs.model import Model
from .candidate import Candidate, Group, Passes, chunk_layers, layers_at
from .estimates import Unit
from .layer import pool_size

if TYPE_CHECKING:
    from .operating import OperatingPoints


def routes_of(candidate: Candidate) -> tuple[list[list[int]], tuple[int, ...]]:
    """Ids of the passes of every replica, in the order of its groups, and the size of each id.

    The global order of samples goes round: the first passes of all replicas, then the second ones, and so on.
    """
    rows = [own for replicas in candidate.sizes for own in replicas]
    ids: list[list[int]] = [[] for _ in rows]
    sizes = []
    for m, (turn, q) in enumerate(sorted((turn, q) for q, own in enumerate(rows) for turn in range(len(own)))):
        ids[q].append(m)
        sizes.append(rows[q][turn])
    return ids, tuple(sizes)


def passes_of_plan(plan: Plan) -> list[Passes]:
    """The passes of every replica of a plan's only stage; nothing where microbatches are equal, or of a pipeline."""
    sizes = plan.training.micro_batch_sizes
    if not sizes or len(plan.stages) > 1:
        return []
    return [tuple(sizes[m] for m in replica.microbatches) for replica in plan.stages[0].replicas]


def sizes_of_plan(plan: Plan, kinds: Sequence[tuple[int, ...]]) -> tuple[tuple[Passes, ...], ...]:
    """``Candidate.sizes`` of a plan.

    Args:
        kinds: Pool, TP and EP of every replica of its stage.
    """
    groups: dict[tuple[int, ...], list[Passes]] = {}
    for kind, own in zip(kinds, passes_of_plan(plan)):
        groups.setdefault(kind, []).append(own)
    return tuple(tuple(groups[kind]) for kind in sorted(groups))


_PARTS = 1000
"""The smallest of uneven figures in a plan is so many units; only their ratios count."""
_PASSES_NEAR = 3
"""Passes whose activations are on the device under offload: of the one that runs, on the way out, on the way in."""


def extras_of_plan(plan: Plan) -> dict[str, Any]:
    """Returns what a checked plan says of it, as fields of a candidate."""
    return {
        "rows": _rows(plan),
        "exchange": options_of(plan, "context_exchange") is not None,
        "host_activations": 0.0 if plan.schedule.parameters.get("offload") else offload_ratio(plan),
    }


def _rows(plan: Plan) -> tuple[tuple[float, float], ...]:
    """Returns what each stage has of a split vocabulary; tied embeddings have one table for both ends."""
    if not plan.schedule.parameters.get("vocabulary"):
        return ()
    shares = vocabulary_shares(plan) or (1,) * len(plan.stages)
    return rows_of(shares, plan.model.tied_embeddings)


def rows_of(shares: tuple[int, ...], tied: bool) -> tuple[tuple[float, float], ...]:
    """``Candidate.rows`` of shares of the vocabulary.

    Args:
        shares: Of each stage, relative to the others.
        tied: Whether both ends of the model have one table.
    """
    parts = [share / sum(shares) for share in shares]
    return tuple((part, 0.0 if tied else part) for part in parts)


def extra_parameters(estimator: OperatingPoints, candidate: Candidate) -> dict[str, Any]:
    """The parameters of the plan's schedule that say it."""
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
    """Whole numbers in the ratios of positive figures."""
    unit = min(values) / _PARTS
    return [round(value / unit) for value in values]


def _passes(estimator: OperatingPoints, candidate: Candidate) -> tuple[list[float], list[float]]:
    """Per replica, attention of a layer and slice to one slice; per chunk of each, the rest of a slice's pass."""
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
    """Layers of a stage that have keys and values."""
    if not model.kinds:
        return candidate.stages[s].layers
    mine = "".join(layers_at(candidate, model.pattern)[s])
    return sum(mine.count(symbol) for symbol in WITH_ATTENTION)


def carried_bytes(estimator: OperatingPoints, candidate: Candidate, group: Group, s: int) -> float:
    """Bytes that the slices of a microbatch leave for each other in the recurrent layers of a rank, in fp32."""
    model = estimator.model
    mine = "".join(layers_at(candidate, model.pattern)[s])
    sizes = ((MAMBA, model.mamba), (GATED_DELTA_NET, model.delta_net))
    numbers = sum(mine.count(symbol) * x.state_numbers for symbol, x in sizes if x is not None)
    return 4.0 * candidate.slices * candidate.micro_batch_size * numbers / group.tp / candidate.cp


def moved_bytes(
    estimator: OperatingPoints, candidate: Candidate, group: Group, unit: Unit, s: int, held: float
) -> tuple[float, float]:
    """Returns what a rank holds more (or, negative, less) on the device, and in main memory.

    Keys and values stay on the device.  A rank that attends for others has their keys and values of half of the
    slices at most, in all layers of a chunk.

    Args:
        unit: The rank's figures.
        s: Its stage.
        held: Microbatches whose activations it holds.
    """
    model, layers = estimator.model, candidate.stages[s].layers
    attending = attention_layers(model, candidate, s)
    tokens = candidate.micro_batch_size * model.seq_length / candidate.cp
    pool = tokens * attending * pool_size(model, group.tp) * model.element_bytes
    more = waiting = 0.0
    if candidate.exchange:
        more += pool / candidate.chunks_of(s) / 2
    if candidate.host_activations and not candidate.offload:
        stays = pool if candidate.slices > 1 or candidate.cp > 1 else 0.0
        if candidate.recompute == "full":  # with their gradients in fp32
            stays *= 1 + 4 / model.element_bytes
        gone = max(0.0, layers * unit.layer_bytes * (unit.sliced_share if candidate.slices > 1 else 1.0) - stays)
        near = _PASSES_NEAR / (candidate.slices * candidate.chunks_of(s))
        waiting = candidate.host_activations * gone * max(0.0, held - near)
        more -= waiting
    return more, waiting
