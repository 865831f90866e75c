"""Cases of features: unequal microbatches, experts, split passes, documents, hybrid layers, optimizers, no pipeline."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_het.features.experts.spec import _unequal, _unequal_parts
from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import program_of
from megatron_het.plan import Plan, PlanError, ScheduleSpec, check_plan
from megatron_het.plan.schema import WITH_ATTENTION, later_layers
from megatron_het.schedule.joint import unequal_orders
from testing.cases import (
    LAYERS,
    MICROBATCHES,
    OF_MATRICES,
    PARAMETERS,
    Case,
    Row,
    build_plan,
    case_from_row,
    is_valid,
    pairwise,
    random_case,
    split_layers,
    with_replicas,
    with_schedule,
)
from testing.families import (
    ATTENTION_FAMILIES,
    EXPERT_FAMILIES,
    HYBRID_FAMILIES,
    MODELS,
    RECURRENT_FAMILIES,
    RECURRENT_HEADS,
    has_experts,
    has_latent_attention,
    hybrid_pattern,
)
from testing.runner import words
from testing.slimpipe_cases import slimpipe_cases, with_context_parallel_sizes
from testing.zorse_cases import divided, with_shares

# Mixture of experts under every schedule: the plans of the dense cases with layers of experts.


_WHOLE_SEQUENCES = ("capacity",)  # families that need whole sequences in a pass
_BY_SEQUENCE = ("deepseek", "sequence-balance")  # families whose balancing does not depend on the sizes of microbatches

_ONE_REPLICA = ("global-balance",)  # families whose balancing needs one replica per stage


def is_routed(case: Case) -> bool:
    """Whether tokens are routed to experts by the largest scores.

    Scores that are equal up to rounding may be ordered differently.  A token in another expert hardly changes losses,
    but Adam's moments of an expert with few tokens.
    """
    return case.family in EXPERT_FAMILIES or (case.family in MODELS and has_experts(case.family))


def _in_fp32(cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if case.plan.training.precision == "fp32"]


def with_expert_parallel(plan: Plan, sizes: Sequence[Sequence[int]]) -> Plan:
    """The plan with the EP sizes ``sizes[s][q]`` of replica q of stage s."""
    return with_replicas(plan, lambda s, q, replica: replace(replica, ep=sizes[s][q]))


def _sizes(plan: Plan) -> list[int]:
    return [replica.tp for stage in plan.stages for replica in stage.replicas]


def expert_families_for(plan: Plan) -> list[str]:
    """The families that a plan can train."""
    cuts_sequences = plan.schedule.parameters.get("slices", 1) != 1 or any(
        replica.cp > 1 for stage in plan.stages for replica in stage.replicas
    )
    if max(plan.training.micro_batch_sizes or (plan.training.micro_batch_size,)) > 1:
        return list(_BY_SEQUENCE)  # the reference has microbatches of one sequence
    drawn = [name for name in EXPERT_FAMILIES if not (cuts_sequences and name in _WHOLE_SEQUENCES)]
    if any(len(stage.replicas) > 1 for stage in plan.stages):
        drawn = [name for name in drawn if name not in _ONE_REPLICA]
    return [name for name in drawn if name != "capacity" or max(_sizes(plan)) == 1]


def with_experts(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases in fp32, each with a mixture-of-experts family; with TP under sequence parallelism, some with EP.

    Args:
        cases: Cases of a dense model.
        seed: Seed of the choice.
    """
    rng, parts, found = random.Random(seed), random.Random(f"parts of experts {seed}"), []
    for case in _in_fp32(cases):
        plan = case.plan
        if max(_sizes(plan)) > 1:
            plan = replace(plan, training=replace(plan.training, sequence_parallel=True))
        family = rng.choice(expert_families_for(plan))
        divisors = [[[ep for ep in (1, 2, 4) if r.tp % ep == 0] for r in stage.replicas] for stage in plan.stages]
        plan = with_expert_parallel(plan, [[parts.choice(sizes) for sizes in row] for row in divisors])
        gathers = family != "capacity" and parts.random() < 1 / 3
        own = (*case.own, "--moe-token-dispatcher-type", "allgather") if gathers else case.own
        chosen = {
            **case.chosen,
            "family": family,
            "sequence_parallel": plan.training.sequence_parallel,
            "ep": [[replica.ep for replica in stage.replicas] for stage in plan.stages],
            "dispatcher": "allgather" if gathers else "alltoall",
        }
        found.append(replace(case, plan=plan, family=family, own=own, chosen=chosen))
    return found


# Plans with split backward passes (zero bubble), for the comparison with one process.


SCHEDULE, V_SCHEDULES = "zb-h1", ("zb-v", "v-half")
_FAMILIES = ("llama", "gpt", "qkv-bias", "squared-relu")
_RANDOM, _BF16_ROWS = 6, 3
_FAMILY_PARAMETERS: dict[str, Sequence[Any]] = {**PARAMETERS, "family": _FAMILIES}
_V_PARAMETERS: dict[str, Sequence[Any]] = {**_FAMILY_PARAMETERS, "schedule": V_SCHEDULES}


def zero_bubble_cases(seed: int, quick: bool) -> list[Case]:
    """Plans of pairwise combinations of features and model families, some also in bf16, and random ones."""
    rng = random.Random(seed)
    rows, _ = pairwise(_FAMILY_PARAMETERS, is_valid, rng)
    cases = [_case(row, f"pair-{i:02}", rng) for i, row in enumerate(rows)]
    bf16 = [_case(row, f"bf16-{i:02}", rng, "bf16") for i, row in enumerate(rows[:_BF16_ROWS])]
    drawn = [random_case(f"random-{i:02}", rng) for i in range(_RANDOM)]
    if quick:
        cases, bf16, drawn = cases[:8], bf16[:1], drawn[:2]
    return [_allowed(with_schedule(case, SCHEDULE, 1, {})) for case in cases + bf16 + drawn] + _v_cases(seed, quick)


def _allowed(case: Case) -> Case:
    """The case, without overlapped gradient reductions if tied replicas would start them in different orders."""
    if case.overlap and case.plan.model.tied_embeddings and unequal_orders(program_of(case.plan)) is not None:
        return replace(case, overlap=False, chosen={**case.chosen, "overlap": False})
    return case


def _v_cases(seed: int, quick: bool) -> list[Case]:
    """Cases with two chunks per stage in a V; the schedule is one of the combined features."""
    rng = random.Random(f"v {seed}")
    rows, _ = pairwise(_V_PARAMETERS, lambda row: is_valid(row) and _can_be_tied(row), rng)
    found = [(row["schedule"], _case(row, f"pair-{i:02}", rng)) for i, row in enumerate(rows)]
    found += [(row["schedule"], _case(row, f"bf16-{i:02}", rng, "bf16")) for i, row in enumerate(rows[:_BF16_ROWS])]
    for i in range(_RANDOM):
        case = random_case(f"random-{i:02}", rng)
        while not _can_be_tied(case.chosen):
            case = random_case(f"random-{i:02}", rng)
        found.append((V_SCHEDULES[i % len(V_SCHEDULES)], case))
    return [_allowed(with_schedule(case, schedule, 2, {})) for schedule, case in (found[:8] if quick else found)]


def _can_be_tied(row: Row) -> bool:
    """Whether embeddings may be tied: not in a single stage, whose embedding and output layer are in two chunks."""
    return not (row["tied"] and row["stages"] == 1)


def _case(row: Row, name: str, rng: random.Random, precision: str = "fp32") -> Case:
    return replace(case_from_row(row, name, rng, precision), family=row["family"])


# Packed documents and kinds of attention under every schedule: the plans of the dense cases with other models.


_PACKED_FAMILIES = ("llama", "gpt", "qk-norm", "softmax-offset", "off-by-one")
# Ways to separate documents: flags of the run and its reference, and of the run only.  Stock Megatron in one
# process cannot use the dataset's document boundaries.  Every document ends with the end token, so both ways agree.
DOCUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "by token": (words("--reset-attention-mask"), ()),
    "by token, with positions": (words("--reset-attention-mask --reset-position-ids"), ()),
    "by dataset": (words("--reset-attention-mask --reset-position-ids"), words("--dataloader-inter-document-masking")),
    "positions alone": (words("--reset-position-ids"), ()),
}


def packed[C: Case](case: C, documents: str, family: str) -> C:
    """The case with packed documents, separated in one of the ways of :data:`DOCUMENTS`."""
    extra, own = DOCUMENTS[documents]
    chosen = {**case.chosen, "family": family, "documents": documents}
    return replace(case, family=family, extra=(*case.extra, *extra), own=(*case.own, *own), chosen=chosen)


def with_documents(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases in fp32 with several documents of long-tailed lengths in every sequence."""
    rng, ways = random.Random(seed), [*DOCUMENTS, "by dataset", "by token, with positions"]
    return [packed(case, rng.choice(ways), rng.choice(_PACKED_FAMILIES)) for case in _in_fp32(cases)]


def with_attention(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases in fp32, each with a family of :data:`ATTENTION_FAMILIES`."""
    rng = random.Random(seed)
    drawn = [(case, rng.choice(list(ATTENTION_FAMILIES))) for case in _in_fp32(cases)]
    return [replace(case, family=family, chosen={**case.chosen, "family": family}) for case, family in drawn]


# Hybrid models under the plans of dense ones: every layer becomes two, attention first, and chunk boundaries move.


def _counts(plan: Plan, rng: random.Random, *, keeps_attention: bool) -> list[list[int]]:
    """Layers of every chunk: twice those of the plan, with one moved to the next chunk at some boundaries.

    Args:
        plan: Plan of a dense model.
        rng: Random numbers for the boundaries.
        keeps_attention: Whether every chunk needs attention, the first of every two layers.
    """
    found = [[2 * count for count in stage.layers] for stage in plan.stages]
    for (a, b), (c, d) in zip(plan.path, plan.path[1:], strict=False):
        # The moved layer is an MLP, so the next chunk must have layers of its own to have attention.
        if found[a][b] > 1 and rng.random() < 0.5 and not (keeps_attention and found[c][d] == 0):
            found[a][b] -= 1
            found[c][d] += 1
    return found


def as_hybrid(case: Case, family: str, cuts: random.Random | Sequence[Sequence[int]]) -> Case:
    """The case with a hybrid model.

    Args:
        case: Case of a dense model.
        family: One of ``HYBRID_FAMILIES``.
        cuts: Layers of every chunk by stage, or random numbers to draw them.
    """
    plan = case.plan
    keeps = bool(plan.schedule.parameters.get("context_exchange"))
    counts = _counts(plan, cuts, keeps_attention=keeps) if isinstance(cuts, random.Random) else cuts
    stages = tuple(replace(s, layers=tuple(row)) for s, row in zip(plan.stages, counts, strict=True))
    layers = sum(map(sum, counts))
    pattern = hybrid_pattern(family, layers)
    groups = plan.model.num_attention_heads if has_latent_attention(family) else plan.model.num_query_groups
    later = len(later_layers(pattern))
    model = replace(plan.model, num_layers=layers, pattern=pattern, mtp_num_layers=later, num_query_groups=groups)
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
    # hybrid-later divides its loss by the tokens of a microbatch, and the reference has microbatches of one sequence.
    if plan.schedule.parameters.get("vocabulary") or plan.training.micro_batch_size > 1:
        found.remove("hybrid-later")
    return found


def with_hybrid(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases in fp32, each with a hybrid family without recurrent layers."""
    return _drawn(cases, random.Random(f"hybrid {seed}"), families_for)


def with_recurrent(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases in fp32, each with a hybrid family with recurrent layers.

    Plans with a TP size above the number of recurrent heads are left out.
    """
    drawn = _drawn(cases, random.Random(f"recurrent {seed}"), lambda plan: list(RECURRENT_FAMILIES))
    return [case for case in drawn if max(_sizes(case.plan)) <= RECURRENT_HEADS]


def _drawn(cases: Sequence[Case], rng: random.Random, families: Callable[[Plan], list[str]]) -> list[Case]:
    found = [as_hybrid(case, rng.choice(families(case.plan)), rng) for case in _in_fp32(cases)]
    return [case for case in found if not case.plan.schedule.parameters.get("context_exchange") or _attends(case.plan)]


def _attends(plan: Plan) -> bool:
    """Whether every chunk has attention, which the context exchange requires."""
    sizes = (plan.stages[stage].layers[chunk] for stage, chunk in plan.path)
    ends = itertools.accumulate(sizes, initial=0)
    return all(set(plan.model.pattern[first:end]) & set(WITH_ATTENTION) for first, end in itertools.pairwise(ends))


# Context parallelism, experts over replicas and whole documents, under every schedule and with all kinds of models.


_MOST_RANKS, _TRIES = 8, 100


def with_sharing(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases in fp32 with random context-parallel sizes, a kind of model and, most of them, packed documents.

    Args:
        cases: Cases of a dense model; those with context parallelism, or too many ranks with it, are left out.
        seed: Seed of the choice.
    """
    rng, found = random.Random(f"sharing {seed}"), []
    for case in cases:
        given = {name for name in ("cp", "multi_head", "exchange") if case.chosen.get(name, 1) not in (1, False)}
        if case.plan.training.precision == "fp32" and not given:
            kinds = rng.sample(_SHARING, len(_SHARING))  # kinds are tried in this order until a plan is valid
            drawn = (_shared(case, kind, rng) for kind in kinds for _ in range(_TRIES))
            found += next(([one] for one in drawn if one is not None), [])
    return found


def _with_later_tokens(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases with multi-token prediction."""
    return [
        replace(c, family="later-tokens", plan=replace(c.plan, model=replace(c.plan.model, mtp_num_layers=2)))
        for c in cases
    ]


def _with_experts_over_replicas(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases with experts divided over the ranks of several replicas of a stage."""
    rng, found = random.Random(f"over replicas {seed}"), []
    for case in with_experts(cases, seed):
        sizes = [[rng.choice((1, 2, 2, 4))] * len(stage.replicas) for stage in case.plan.stages]
        plan = with_expert_parallel(case.plan, sizes)
        if "allgather" in case.own and (_unequal(plan) or _unequal_parts(plan)):
            continue  # refused: it gathers equally many tokens from each rank
        if any(not replica.cut.divides_alike for stage in plan.stages for replica in stage.replicas):
            found.append(replace(case, plan=plan, chosen={**case.chosen, "ep": sizes}))
    return found


_SHARING = (
    *(with_documents, with_attention, with_hybrid, with_recurrent, _with_later_tokens),
    *(with_experts, *4 * (_with_experts_over_replicas,)),
)


def _shared(case: Case, kind: Callable[[list[Case], int], list[Case]], rng: random.Random) -> Case | None:
    """The case with drawn context-parallel sizes and a kind of model; None if the plan is not valid."""
    plan = case.plan
    sizes = [[rng.choice((1, 1, 2, 2, 3)) for _ in stage.replicas] for stage in plan.stages]
    shares = rng.choice(((), (), (3, 1), (1, 2), (2, 1, 1)))
    plan = replace(plan, stages=with_context_parallel_sizes(plan.stages, sizes, shares))
    at = rng.randrange(1 << 30)
    if plan.world_size > _MOST_RANKS or not (drawn := kind([replace(case, plan=plan)], at)):
        return None
    (found,) = drawn
    if kind not in (with_documents, with_attention):
        # For other kinds of layers stock Megatron in one process cannot use the dataset's document boundaries.
        found = packed(found, rng.choice(("by token", "by token, with positions")), found.family)
    plan = found.plan
    if max(map(max, sizes)) > 1 and DOCUMENTS["by token"][0][0] in found.extra and rng.random() < 0.8:
        schedule = replace(plan.schedule, parameters={**plan.schedule.parameters, "cp_documents": "whole"})
        plan = replace(plan, schedule=schedule)
    try:
        check_plan(plan)
        check_plan_alone(plan)
        program_of(plan)
    except (PlanError, ValueError):
        return None
    chosen = {**found.chosen, "cp": sizes, "shares": shares, "kind": kind.__name__}
    return replace(found, plan=plan, chosen=chosen)


# Plans with Lion, Muon and LayerNorm-1p, drawn separately so that the recorded seeds of other cases keep their plans.


_NORM = "layernorm-1p"
_BF16 = 3
_PARAMETERS: dict[str, Sequence[Any]] = {
    **PARAMETERS,
    "family": ("llama", "gpt", "output-gate", _NORM),
    "flags": (*OF_MATRICES, "none"),
}


def optimizer_cases(seed: int) -> list[Case]:
    """Plans of pairwise combinations of all features, some also in bf16."""
    rng = random.Random(f"optimizers {seed}")
    rows, _ = pairwise(_PARAMETERS, _is_new, rng)
    cases = [case_from_row(row, f"optimizer-{i:02}", rng) for i, row in enumerate(rows)]
    return cases + [case_from_row(row, f"optimizer-bf16-{i:02}", rng, "bf16") for i, row in enumerate(rows[:_BF16])]


def _is_new(row: Row) -> bool:
    """Whether a row is valid and has an optimizer or norm that other cases do not have."""
    return is_valid(row) and (row["flags"] in OF_MATRICES or row["family"] == _NORM)


_MIXED, _SLICED, _SHARED, _SPLIT = 6, 5, 6, 3


def with_sizes(case: Case, sizes: Sequence[int], rng: random.Random) -> Case:
    """The case with microbatches of these sizes, each on any replica of its stages.

    Args:
        case: Any case; its flags are kept.
        sizes: Sequences per microbatch, at least one microbatch per replica of a stage.
        rng: Random numbers for the routing.
    """
    assert sum(sizes) == MICROBATCHES
    training = replace(case.plan.training, micro_batch_size=max(sizes), micro_batch_sizes=tuple(sizes))
    stages = []
    owners: list[int] = []
    aligned = len({tuple(r.microbatches for r in stage.replicas) for stage in case.plan.stages}) == 1
    for stage in case.plan.stages:
        count = len(stage.replicas)
        if not (aligned and owners):  # replicas with equal routing in all stages keep it
            owners = [*range(count), *(rng.randrange(count) for _ in range(len(sizes) - count))]
            rng.shuffle(owners)
        replicas = (
            replace(r, microbatches=tuple(m for m, owner in enumerate(owners) if owner == q))
            for q, r in enumerate(stage.replicas)
        )
        stages.append(replace(stage, replicas=tuple(replicas)))
    plan = replace(case.plan, training=training, stages=tuple(stages))
    # The reference has the same samples, but not the same passes.
    own = (*case.own, "--micro-batch-size", str(max(sizes)))
    chosen = {**case.chosen, "sizes": list(sizes)}
    return replace(case, plan=plan, own=own, chosen=chosen, name=f"sizes-{'-'.join(map(str, sizes))}-{case.name}")


def random_sizes(least: int, rng: random.Random) -> list[int]:
    """At least ``least`` sizes, not all equal, that add up to the batch."""
    while True:
        cuts = sorted(rng.sample(range(1, MICROBATCHES), rng.randint(max(least, 2), MICROBATCHES - 1) - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, MICROBATCHES], strict=True)]
        if len(set(sizes)) > 1:
            return sizes


def poplar_cases(seed: int, quick: bool) -> list[Case]:
    """Cases with microbatches of different sizes under all kinds of schedules; with ``quick`` every fourth one."""
    rng = random.Random(seed)
    bases: list[Case] = []
    while len(bases) < _MIXED:
        case = random_case(f"mixed-{len(bases)}", rng)
        if case.plan.training.precision == "fp32":
            bases.append(case)
    sliced = slimpipe_cases(seed, quick=False)
    shared = [case for case in sliced if case.chosen.get("exchange") or case.chosen.get("cp", 1) > 1]
    bases += rng.sample([case for case in sliced if case not in shared], _SLICED)
    bases += rng.sample(shared, _SHARED)
    split = zero_bubble_cases(seed, quick=False)
    bases += rng.sample([case for case in split if case.plan.training.precision == "fp32"], _SPLIT)
    for name, chunks, parameters in (
        ("interleaved", 2, {}),
        ("ministage", 2, {"window": True}),
        ("ministage", 2, {"window": True, "per_microbatch": True, "offload": True}),
        ("gpipe", 1, {}),
    ):
        plan = build_plan([[1, 1], [2]], split_layers(2, False, rng), rng, distributed_optimizer=True)
        if parameters.get("per_microbatch"):
            plan = build_plan([[1], [1]], split_layers(2, False, rng), rng, distributed_optimizer=True)
        bases.append(
            with_schedule(
                Case(f"plain-{len(bases)}", plan, chosen={"precision": "fp32"}), name, chunks, dict(parameters)
            )
        )
    cases = [with_sizes(case, _sizes_for(case, rng), rng) for case in bases]
    return cases[::4] if quick else cases


def _sizes_for(case: Case, rng: random.Random) -> list[int]:
    """Sizes of a number of microbatches that the case's schedule supports."""
    least, whole = max(len(stage.replicas) for stage in case.plan.stages), 1
    if case.plan.schedule.name == "interleaved":  # it runs microbatches in groups of the number of stages
        whole = len(case.plan.stages)
    while True:
        sizes = random_sizes(least, rng)
        if len(sizes) % whole == 0:
            return sizes


# Cases without a pipeline: ZeRO-0 to 3 with replicas of unequal work (Poplar, section 3).


# Ranks per replica, ZeRO stage, chunks, further options of the case.
_ROWS: tuple[tuple[tuple[int, ...], int, int, dict[str, Any]], ...] = (
    ((1, 1), 0, 1, {}),
    ((1, 1, 1), 0, 2, {}),
    ((2, 1), 0, 1, {}),
    ((1, 1, 1, 1), 0, 1, {"tied": True}),
    ((1, 1, 1), 1, 1, {}),
    ((1, 1), 1, 3, {}),
    ((1, 1), 1, 1, {"tied": True, "recompute": "full"}),
    ((2, 2), 1, 1, {"sequence_parallel": True}),
    ((1, 1), 2, 1, {}),
    ((1, 1, 1), 2, 3, {}),
    ((1, 1, 1), 2, 3, {"tied": True}),
    ((1, 1), 2, 2, {"window": {"per_layer": False}}),
    ((1, 1, 1), 2, 4, {"window": {"offload": True}}),
    ((2, 2), 2, 2, {"sequence_parallel": True}),
    ((1, 1, 1), 2, 2, {"shares": (3, 1, 0)}),
    ((1, 1), 3, 2, {}),
    ((1, 1, 1), 3, 4, {}),
    ((1, 1, 1), 3, 3, {"window": {"prefetch": 0}}),
    ((1, 1), 3, 4, {"window": {"keep_at_turn": False, "prefetch": 2}}),
    ((1, 1, 1, 1), 3, 2, {"window": {"offload": True, "offload_optimizer": True}}),
    ((1, 1), 3, 2, {"tied": True}),
    ((2, 2), 3, 2, {"window": {"per_layer": False}, "recompute": "full"}),
    ((1, 1, 1), 3, 3, {"shares": (1, 2.5, 0)}),
    ((1, 1, 1), 3, 4, {"window": {"offload_activations": 1.0}, "recompute": "full"}),
)


def zero_case(widths: Sequence[int], zero: int, chunks: int, more: dict[str, Any], rng: random.Random) -> Case:
    """A case with one pipeline stage at a ZeRO stage, with random microbatch sizes and routing.

    Args:
        widths: TP size of each replica.
        zero: ZeRO stage, 0 to 3.
        chunks: Chunks of the stage.
        more: ``tied``, ``recompute``, ``sequence_parallel``, ``shares``, ``window`` (options).
        rng: Random numbers for sizes and routing.
    """
    plain = {key: value for key, value in more.items() if key in ("tied", "recompute", "sequence_parallel")}
    plan = build_plan([list(widths)], [LAYERS], rng, distributed_optimizer=zero > 0, **plain)
    parameters = {"window": True, "zero": zero, **more.get("window", {})} if zero > 1 else {}
    chosen = {"precision": "fp32", "zero": zero, "widths": list(widths), "chunks": chunks, **more}
    stage = replace(plan.stages[0], layers=divided(LAYERS, chunks, rng))
    plan = replace(plan, stages=(stage,), schedule=ScheduleSpec("data-parallel", parameters))
    case = Case(f"zero-{zero}", plan, clip=0.05, chosen=chosen)
    if "shares" in more:
        case = replace(case, plan=with_shares(case.plan, (more["shares"],)))
    return with_sizes(case, random_sizes(len(widths), rng), rng)


def zero_cases(seed: int, quick: bool) -> list[Case]:
    """The cases of all ZeRO stages; with ``quick`` every fourth one."""
    rng = random.Random(seed)
    cases = [zero_case(*row, rng) for row in _ROWS]
    named = [replace(case, name=f"{i:02}-{case.name}") for i, case in enumerate(cases)]
    return named[::4] if quick else named
