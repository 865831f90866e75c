"""Hybrid models under the plans of dense ones: every layer becomes attention and what follows it, and cuts move."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.cases import Case
from benchmarks.families import HYBRID_FAMILIES, RECURRENT_FAMILIES, has_latent_attention, hybrid_pattern
from megatron_het.plan import Plan
from megatron_het.plan.schema import later_layers


def _counts(plan: Plan, rng: random.Random, *, keeps_attention: bool) -> list[list[int]]:
    """Layers of every chunk: twice as many, some of them moved over a boundary to a neighbour on the path.

    Args:
        plan: Of a dense model.
        rng: For what moves.
        keeps_attention: Whether every chunk needs attention, which comes first of every two layers.
    """
    found = [[2 * count for count in stage.layers] for stage in plan.stages]
    for (a, b), (c, d) in zip(plan.path, plan.path[1:], strict=False):
        # A layer of an MLP begins the next chunk; with attention in every chunk the next one has some of its own too.
        if found[a][b] > 1 and rng.random() < 0.5 and not (keeps_attention and found[c][d] == 0):
            found[a][b] -= 1
            found[c][d] += 1
    return found


def as_hybrid(case: Case, family: str, cuts: random.Random | Sequence[Sequence[int]]) -> Case:
    """The case with a hybrid model.

    Args:
        case: Of a dense model.
        family: One of ``HYBRID_FAMILIES``.
        cuts: Layers of every chunk by stage, or what draws them.
    """
    plan = case.plan
    keeps = bool(plan.schedule.parameters.get("context_exchange"))
    counts = _counts(plan, cuts, keeps_attention=keeps) if isinstance(cuts, random.Random) else cuts
    stages = tuple(replace(s, layers=tuple(row)) for s, row in zip(plan.stages, counts, strict=True))
    layers = sum(map(sum, counts))
    pattern = hybrid_pattern(family, layers)
    groups = plan.model.num_attention_heads if has_latent_attention(family) else plan.model.num_query_groups
    model = replace(
        plan.model,
        num_layers=layers,
        pattern=pattern,
        mtp_num_layers=len(later_layers(pattern)),
        num_query_groups=groups,
    )
    training = plan.training
    if ("experts" in family or "G" in pattern) and max(r.tp for s in plan.stages for r in s.replicas) > 1:
        training = replace(training, sequence_parallel=True)
    chosen = {**case.chosen, "family": family, "sequence_parallel": training.sequence_parallel, "layers": counts}
    return replace(
        case, plan=replace(plan, model=model, stages=stages, training=training), family=family, chosen=chosen
    )


def families_for(plan: Plan) -> list[str]:
    """The hybrid families without recurrent layers that a plan can train."""
    found = [name for name in HYBRID_FAMILIES if name not in RECURRENT_FAMILIES]
    # Its loss is divided by the tokens of a microbatch, and the reference has microbatches of one sequence.
    if plan.schedule.parameters.get("vocabulary") or plan.training.micro_batch_size > 1:
        found.remove("hybrid-later")
    return found


def with_hybrid(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases with a hybrid family each.

    Args:
        cases: Of a dense model; those in fp32 count.
        seed: Of the choice.
    """
    return _drawn(cases, random.Random(f"hybrid {seed}"), families_for)


def with_recurrent(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases with layers that pass a state along the sequence, as :func:`with_hybrid` has others."""
    return _drawn(cases, random.Random(f"recurrent {seed}"), lambda plan: list(RECURRENT_FAMILIES))


def _drawn(cases: Sequence[Case], rng: random.Random, families: Callable[[Plan], list[str]]) -> list[Case]:
    found = []
    for case in cases:
        if case.plan.training.precision == "fp32":
            found.append(as_hybrid(case, rng.choice(families(case.plan)), rng))
    return found
