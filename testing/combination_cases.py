"""Plans that combine features: one for any pair of them, and few that cover all pairs.

A row maps every parameter to a value; values other than the first are features.  ``pair_row`` has a pair
and its requirements, ``covering_rows`` fills rows with further features as long as no check refuses them.
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan import PlanError, Stage, check_plan
from testing.cases import MICROBATCHES, Case, Row, build_plan, split_layers, with_replicas, with_schedule
from testing.feature_cases import with_sizes
from testing.runner import words
from testing.slimpipe_cases import with_context_parallel_sizes

_LAYERS, _MAX_RANKS, _SLICES = 4, 8, 4
_SIZES = (2, 1, 1, 2)
_SHARES = (3, 1)
ALONE = "data-parallel"
_CHUNKS = {"interleaved": 2, "ministage": 2, "zb-v": 2, "v-half": 2}
_SLICED = ("slimpipe", "seq1f1b", "terapipe")
_OF_SEVERAL_CHUNKS = ("interleaved", "ministage", "slimpipe", "terapipe")
PARAMETERS: dict[str, Sequence[Any]] = {
    "schedule": words("1f1b gpipe interleaved ministage slimpipe seq1f1b terapipe zb-h1 zb-v v-half", [ALONE]),
    "chunks": ("equal", "different"),
    "copies": ("on two stages", "on one stage"),
    "window": (False, "exact", "undo", "at-once", "per-ministage", "ZeRO-2", "ZeRO-3"),
    "tp": ("equal", "by stage", "within a stage"),
    "layers": ("even", "uneven"),
    "routing": ("even", "uneven"),
    "microbatches": ("equal", "unequal"),
    "cp": (1, 2, "different", "unequal parts"),
    "context_exchange": (False, True),
    "vocabulary": (False, True),
    "offload_activations": (0.0, 0.75),
    "recompute": ("none", "selective", "mlp", "full"),
    "tied": (False, True),
    "sequence_parallel": (False, True),
    "distributed_optimizer": (False, True),
    "precision": ("fp32", "bf16"),
    "overlap": ("none", "gradients", "gradients and parameters"),
}
"""Values of each parameter.  The first one is not a feature, but for the schedule."""
Feature = tuple[str, Any]
Pair = tuple[Feature, Feature]


def features() -> list[Feature]:
    """All features, in the order of the table."""
    return [(name, value) for name, values in PARAMETERS.items() for value in values[name != "schedule" :]]


def pairs() -> list[Pair]:
    """All pairs of features of two parameters."""
    return [(a, b) for a, b in itertools.combinations(features(), 2) if a[0] != b[0]]


def title(feature: Feature) -> str:
    """Readable name of a feature."""
    name, value = feature
    if value is True:
        return name.replace("_", " ")
    return str(value) if name in ("schedule", "precision") else f"{name.replace('_', ' ')}: {value}"


def schedules_of(feature: Feature) -> tuple[str, ...]:
    """Returns the schedules that have a feature; all if it depends on none."""
    name, value = feature
    if name == "schedule":
        return (value,)
    if name in ("chunks", "copies"):
        return _OF_SEVERAL_CHUNKS
    part_of = needs(feature).get("schedule")
    return (part_of,) if part_of else tuple(PARAMETERS["schedule"])


def needs(feature: Feature) -> Row:
    """Returns the requirements of a feature under a schedule that supports it."""
    name, value = feature
    if name == "chunks":
        return {"schedule": _OF_SEVERAL_CHUNKS[0]}
    if name == "copies":  # of tied embeddings; the last chunk is on the first stage
        return {"schedule": _OF_SEVERAL_CHUNKS[0], "chunks": "different", "tied": True}
    if name == "window":
        return {"schedule": ALONE if str(value).startswith("ZeRO") else "ministage", "distributed_optimizer": True}
    if name == "context_exchange":
        return {"schedule": "slimpipe"}
    if feature == ("overlap", "gradients and parameters"):
        return {"distributed_optimizer": True}
    return {}


def are_of_two_schedules(pair: Pair) -> bool:
    """Whether the pair is of a schedule and a part of another one, or of parts of two: there is nothing to combine."""
    one, other = map(schedules_of, pair)
    return not set(one) & set(other)


def pair_row(pair: Iterable[Feature]) -> Row:
    """The features, what they need, and nothing else."""
    row: Row = {name: values[0] for name, values in PARAMETERS.items()}
    features_of_pair = list(pair)
    for feature in features_of_pair:
        row |= needs(feature)
    row |= dict(features_of_pair)
    common = [s for s in PARAMETERS["schedule"] if all(s in schedules_of(feature) for feature in features_of_pair)]
    return row if row["schedule"] in common or not common else row | {"schedule": common[0]}


def tp_sizes(row: Row) -> list[list[int]]:
    """TP size of every replica of every stage."""
    last, first = [1], [1]
    if row["tp"] == "within a stage":
        last = [2, 1]
    elif row["tp"] == "by stage":
        first = [2]
    elif row["sequence_parallel"]:
        first, last = [2], [2]
    if row["schedule"] == ALONE:
        return [last if len(last) > 1 else last * 2]
    if (row["routing"] == "uneven" or row["cp"] == "different") and len(last) == 1:
        last = last * 2
    elif len(last) == 1 and (row["distributed_optimizer"] or row["overlap"] != "none"):
        first, last = first * 2, last * 2  # so that there are gradients to reduce
    if row["context_exchange"] and len(first) < len(last):
        first = first * len(last)  # replicas are separate pipelines
    sizes = [first, last]
    if _ranks(sizes, row) > _MAX_RANKS:
        sizes = [[tp] for tp, *_ in sizes[:-1]] + [sizes[-1] if row["cp"] == "different" else sizes[-1][:1]]
    return sizes


def cp_sizes(row: Row, sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Context-parallel size of every replica of every stage, from their TP sizes.

    Different ones differ within the last stage, and so between the stages.
    """
    if row["cp"] == "different":
        return [[2 if (s, q) == (len(sizes) - 1, 0) else 1 for q in range(len(sizes[s]))] for s in range(len(sizes))]
    return [[row["cp"] if isinstance(row["cp"], int) else 2 for _ in stage] for stage in sizes]


def _ranks(sizes: Sequence[Sequence[int]], row: Row) -> int:
    cps = cp_sizes(row, sizes)
    return sum(tp * cp for stage in zip(sizes, cps, strict=True) for tp, cp in zip(*stage, strict=True))


def case_of(row: Row, name: str, seed: int) -> Case:
    """The plan and the flags of a row.

    Raises:
        PlanError: The row contradicts itself, or the plan's checks refuse it.
    """
    rng = random.Random(f"{seed} {name}")
    if row["schedule"] == ALONE and row["tp"] == "by stage":
        raise PlanError("tp", "by stage", "there is one stage only")
    sizes = tp_sizes(row)
    plan = build_plan(
        sizes,
        split_layers(len(sizes), row["layers"] == "even", rng, _LAYERS),
        rng,
        even_routing=row["routing"] == "even",
        tied=row["tied"],
        precision=row["precision"],
        sequence_parallel=row["sequence_parallel"],
        recompute=row["recompute"],
        distributed_optimizer=row["distributed_optimizer"],
    )
    if row["context_exchange"]:
        first = plan.stages[0].replicas  # every microbatch goes to one replica number in all stages
        plan = with_replicas(plan, lambda _, q, r: replace(r, microbatches=first[q].microbatches, speed=first[q].speed))
    shares = _SHARES if row["cp"] == "unequal parts" else ()
    plan = replace(plan, stages=with_context_parallel_sizes(plan.stages, cp_sizes(row, sizes), shares))
    own: tuple[str, ...] = ("--overlap-param-gather",) if row["overlap"] == "gradients and parameters" else ()
    chosen: Row = {"precision": row["precision"], "row": dict(row)}
    window = _window(row)
    if window:  # parameters after the last step are compared as well
        chosen |= {"ministages": 2, "window": window}
    clip = 0.0 if row["window"] == "at-once" else 1.0
    case = Case(name, plan, clip=clip, overlap=row["overlap"] != "none", chosen=chosen, own=own)
    parameters = {key: row[key] for key in ("context_exchange", "vocabulary", "offload_activations") if row[key]}
    parameters |= window
    if row["schedule"] in _SLICED:
        parameters["slices"] = _SLICES
    case = replace(with_schedule(case, row["schedule"], _chunks(row), parameters), name=name)
    if row["layers"] == "uneven" and _chunks(row) > 1:  # among the chunks of a stage too
        case = replace(case, plan=replace(case.plan, stages=tuple(_shifted(s) for s in case.plan.stages)))
    if row["chunks"] == "different":
        fewer = len(sizes) - 1 if row["copies"] == "on one stage" else rng.randrange(len(sizes))
        case = replace(case, plan=replace(case.plan, stages=_with_fewer_chunks(case.plan.stages, fewer)))
    if row["microbatches"] == "unequal":
        case = replace(with_sizes(case, _SIZES, rng), name=name)
    check_plan(case.plan)
    check_plan_alone(case.plan)
    build(case.plan)
    return case


def _with_fewer_chunks(stages: tuple[Stage, ...], chosen: int) -> tuple[Stage, ...]:
    """One stage has all of its layers in one chunk; where that is the last one, another ends the model."""
    return tuple(
        replace(stage, layers=(sum(stage.layers),)) if s == chosen else stage for s, stage in enumerate(stages)
    )


def _window(row: Row) -> Row:
    """Options of the window in the plan."""
    if not row["window"]:
        return {}
    zero = str(row["window"]).removeprefix("ZeRO-")
    return {"window": True, "zero": int(zero)} if zero.isdigit() else {"window": True, "update": row["window"]}


def _chunks(row: Row) -> int:
    return 2 if row["window"] or row["chunks"] == "different" else _CHUNKS.get(row["schedule"], 1)


def _shifted(stage: Any) -> Any:
    """One layer goes from the last chunk of a stage to the first."""
    first, *middle, last = stage.layers
    return replace(stage, layers=(first + 1, *middle, last - 1)) if last > 0 else stage


def covering_rows(wanted: Iterable[Pair], refused: set[Pair], seed: int) -> list[Row]:
    """Returns rows with all wanted pairs and without refused ones."""
    rng = random.Random(seed)
    left, rows = list(wanted), []
    bad = {frozenset(pair) for pair in refused}
    while left:
        row = pair_row(left[0])
        fixed = {name for feature in left[0] for name in (feature[0], *needs(feature))}
        others = [feature for feature in features() if feature[0] not in fixed]
        rng.shuffle(others)
        open_pairs = {frozenset(pair) for pair in left}
        for feature in others:
            if row[feature[0]] != PARAMETERS[feature[0]][0] or feature[0] == "schedule":
                continue
            more = {frozenset((feature, item)) for item in row.items()}
            if more & bad or not more & open_pairs or not _goes_with(feature, row):
                continue
            if _runs(row | dict([feature]), seed):
                row |= dict([feature])
        rows.append(row)
        have = {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        left = [pair for pair in left[1:] if frozenset(pair) not in have]
    return rows


def _goes_with(feature: Feature, row: Row) -> bool:
    """Whether a row meets the requirements of a feature."""
    others = {name: value for name, value in needs(feature).items() if name != "schedule"}
    return row["schedule"] in schedules_of(feature) and others.items() <= row.items()


def _runs(row: Row, seed: int) -> bool:
    try:
        case_of(row, "candidate", seed)
    except (PlanError, ValueError):
        return False
    return True


assert sum(_SIZES) == MICROBATCHES
