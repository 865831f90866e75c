"""Cases of SlimPipe's parity: all stages p, slices n and chunks v with features in turn, and random ones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_het.plan import Stage
from testing.cases import (
    HEADS,
    LAYERS,
    MICROBATCHES,
    SEQUENCE,
    STEPS,
    Case,
    build_plan,
    row_of,
    split_layers,
    with_replicas,
    with_schedule,
)
from testing.lab import Lab
from testing.runner import Device, Runner

_STAGES, _FACTORS, _CHUNKS = (1, 2, 4), (1, 2, 4), (1, 2)
_MICROBATCHES = (1, 2, 3, 4)
_RANDOM, _MAX_RANKS = 10, 8
_RECOMPUTE = ("none", "selective", "full", "mlp")
_OFFLOAD = (0.0, 0.75, 1.0)
_RANDOM_SHARED = 6
PLAIN: dict[str, Any] = {
    "stages": 2,
    "slices": 4,
    "chunks": 1,
    "microbatches": 2,
    "tp": 1,
    "recompute": "none",
    "tied": False,
    "distributed_optimizer": False,
    "multi_head": False,
    "uneven": False,
    "layers": 4,
}
"""The parameters of a plain case, for :func:`sliced_case`."""
_ON = {"context_exchange": True}
_ALL = {"context_exchange": True, "exchange_idle": True, "exchange_keep": True}
_EXCHANGE: dict[str, dict[str, Any]] = {
    "exchange-p2-n4": {"exchange": _ON, "microbatches": 1},
    "exchange-p2-n8-v2-tp2": row_of("slices=8 chunks=2 tp=2 distributed_optimizer recompute=selective", exchange=_ON),
    "exchange-p2-replicas": {"exchange": {**_ON, "exchange_units": 4}, "microbatches": 4, "tied": True},
    "exchange-p4-n4-keep": {"exchange": {**_ON, "exchange_keep": True}, "stages": 4, "microbatches": 3},
    "exchange-p4-n8": {"exchange": {**_ON, "exchange_units": 1}, "stages": 4, "slices": 8, "multi_head": True},
    "exchange-p4-n8-v2-all": row_of("stages=4 slices=8 chunks=2 microbatches=3 recompute=full", exchange=_ALL),
    "exchange-p4-n16-idle": row_of("stages=4 slices=16 distributed_optimizer", exchange={**_ON, "exchange_idle": True}),
    "exchange-p4-n8-vocabulary": row_of(
        "stages=4 slices=8 vocabulary offload=0.5", exchange={**_ON, "exchange_idle": True}
    ),
    "exchange-p2-replicas-vocabulary": row_of("slices=8 vocabulary microbatches=4 tied", exchange=_ALL),
    "exchange-p4-n16-keep": {"exchange": {**_ON, "exchange_keep": True}, "stages": 4, "slices": 16, "microbatches": 3},
    "exchange-p4-tp2-all": {"exchange": _ALL, "stages": 4, "slices": 8, "tp": 2, "microbatches": 1},
}
_UNEVEN: dict[str, dict[str, Any]] = {
    "exchange-p2-uneven": {"exchange": _ALL, "uneven": True, "slices": 8, "microbatches": 3, "recompute": "selective"},
    "exchange-p4-v2-uneven": row_of("stages=4 chunks=2 uneven layers=7 slices=8 vocabulary", exchange=_ON),
}
_UNEQUAL: dict[str, dict[str, Any]] = {
    "exchange-p2-unequal": row_of(
        "uneven slices=8 microbatches=3", exchange={**_ON, "exchange_attention": [1, 3], "exchange_rest": [4, 9]}
    ),
    "exchange-p4-v2-unequal-all": row_of(
        "stages=4 chunks=2 uneven layers=9 slices=8 vocabulary distributed_optimizer",
        exchange={**_ALL, "exchange_attention": [2, 5, 3, 9], "exchange_rest": [7, 7, 20, 15, 9, 9, 30, 40]},
    ),
}
"""Devices of different speed: the exchange minimises the slots' durations (``features/context_exchange/passes.py``)."""
_MEETING: dict[str, dict[str, Any]] = {
    "exchange-p2-n2-idle-vocabulary": row_of(
        "slices=2 microbatches=1 vocabulary", exchange={**_ON, "exchange_units": 1, "exchange_idle": True}
    ),
    "exchange-p2-n4-v2-vocabulary": {"exchange": _ON, "chunks": 2, "microbatches": 3, "vocabulary": True},
}
"""Keys and values of two passes are sent while the parts of the output layer run."""
_WORK = {"slice_lengths": "work"}
_LENGTHS: dict[str, dict[str, Any]] = {
    "lengths-p2-n5-tp2": {"slices": 5, "tp": 2, "recompute": "selective", "distributed_optimizer": True},
    "lengths-p4-n8-v2-work": row_of(
        "stages=4 slices=8 chunks=2 vocabulary offload=0.75 recompute=full microbatches=3", parameters=_WORK
    ),
    "lengths-seq1f1b-n3-work": {"schedule": "seq1f1b", "parameters": {**_WORK, "slices": 3}, "tied": True},
    "lengths-terapipe-n7": {"schedule": "terapipe", "parameters": {"slices": 7}, "uneven": True, "tp": 2},
    "lengths-cp2-n3-work": row_of("cp=2 slices=3 vocabulary", parameters={**_WORK, "slice_keys_per_token": 20.0}),
    "lengths-exchange-n5-tp2": {"exchange": _ALL, "slices": 5, "tp": 2, "uneven": True, "vocabulary": True},
    "lengths-exchange-p4-n8-v2-work": row_of(
        "stages=4 slices=8 chunks=2 microbatches=3 recompute=full", exchange=_ALL, parameters=_WORK
    ),
}
"""Slices of different length: of equal work, or with a number that does not divide the sequence length."""
_UNSLICED = {"schedule": "1f1b", "slices": 1}
_CONTEXT_PARALLEL: dict[str, dict[str, Any]] = {
    "cp2-1f1b": {"cp": 2, **_UNSLICED},
    "cp2-1f1b-replicas": {"cp": 2, **_UNSLICED, "microbatches": 4, "tied": True, "recompute": "selective"},
    "cp2-tp2": {"cp": 2, **_UNSLICED, "stages": 1, "tp": 2, "distributed_optimizer": True, "recompute": "full"},
    "cp2-window": row_of(
        "cp=2 schedule=ministage slices=1 chunks=2 distributed_optimizer microbatches=4",
        parameters={"window": True, "offload": True},
    ),
    "cp2-p2-n4": {"cp": 2, "multi_head": True},
    "cp2-p2-n8-v2": {"cp": 2, "slices": 8, "chunks": 2, "distributed_optimizer": True, "microbatches": 1},
    "cp2-p2-tp2-uneven": {"cp": 2, "tp": 2, "uneven": True, "microbatches": 3},
    "cp4-p1": {"cp": 4, "stages": 1, "slices": 2},
    "cp2-vocabulary": {"cp": 2, "vocabulary": True, "microbatches": 4, "tied": True},
    "cp2-1f1b-vocabulary": row_of("cp=2 vocabulary tp=2 distributed_optimizer overlap", **_UNSLICED),
    "cp2-exchange-vocabulary": {"cp": 2, "exchange": _ALL, "vocabulary": True, "offload": 0.75},
    "cp2-exchange": {"cp": 2, "exchange": _ALL, "recompute": "selective"},
    "cp2-exchange-p4-v2": {"cp": 2, "exchange": _ON, "stages": 4, "slices": 4, "chunks": 2},
}


@dataclass(frozen=True)
class SlicedCase(Case):
    """A case with larger microbatches than its reference, of the same samples."""

    def plan_flags(self, device: Device = "cpu") -> tuple[str, ...]:
        """Flags of a Case, with the plan's own micro batch size."""
        flags = [*super().plan_flags(device), "--micro-batch-size", str(self.plan.training.micro_batch_size)]
        flags += ["--het-thrifty-layers"] if self.chosen.get("thrifty") else []
        return tuple(flags)


class MultiHeadLab(Lab):
    """A lab whose models have as many key-value heads as query heads."""

    def __init__(self, runner: Runner, folder: Path, *, steps: int = STEPS, shared: Path | None = None) -> None:
        super().__init__(runner, folder, steps=steps, shared=(shared or folder) / "multi-head")

    def data_flags(self, long_tailed: bool = False) -> tuple[str, ...]:
        """Flags of the data set, and the number of key-value heads, which overrides an earlier flag."""
        return (*super().data_flags(long_tailed), "--num-query-groups", str(HEADS))


def replicas_of(microbatches: int) -> int:
    """Replicas per stage of a case whose first replica runs ``microbatches``."""
    return 1 if MICROBATCHES % microbatches == 0 else 2


def sliced_case(row: dict[str, Any], name: str, rng: random.Random) -> SlicedCase:
    """A case from its parameters.

    Args:
        row: ``stages``, ``slices``, ``chunks``, ``microbatches`` (of one replica), ``tp``,
            ``recompute``, ``tied``, ``distributed_optimizer``, ``multi_head``, ``uneven``; may have
            ``vocabulary`` (split over the stages), ``offload`` (share of activations), ``thrifty`` (layers),
            ``layers``, ``cp``, ``overlap`` (of the gradients' reduction), ``schedule`` with other
            ``parameters``, and ``exchange`` (parameters of the context exchange).
        name: Name of the case.
        rng: Random numbers for uneven layers.
    """
    # If the count does not divide the batch, a second replica processes the rest.
    count, replicas = row["microbatches"], replicas_of(row["microbatches"])
    size = 1 if replicas == 2 else MICROBATCHES // count
    plan = build_plan(
        [[row["tp"]] * replicas] * row["stages"],
        split_layers(row["stages"], not row["uneven"], rng, row.get("layers", LAYERS)),
        rng,
        tied=row["tied"],
        sequence_parallel=row["tp"] > 1,
        recompute=row["recompute"],
        distributed_optimizer=row["distributed_optimizer"],
    )
    model = replace(plan.model, num_query_groups=HEADS) if row["multi_head"] else plan.model
    routed = [tuple(range(count)), tuple(range(count, MICROBATCHES))][:replicas]
    plan = with_replicas(plan, lambda _, q, replica: replace(replica, microbatches=routed[q]))
    stages = with_context_parallel(plan.stages, row.get("cp", 1))
    training = replace(plan.training, micro_batch_size=size)
    plan = replace(plan, model=model, training=training, stages=stages)
    case = SlicedCase(name, plan, overlap=row.get("overlap", False), chosen={"precision": "fp32", **row})
    schedule = row.get("schedule", "slimpipe")
    parameters: dict[str, Any] = {"slices": row["slices"]} if schedule == "slimpipe" else {}
    parameters |= {**row.get("exchange", {}), **row.get("parameters", {})}
    if row.get("vocabulary"):
        parameters["vocabulary"] = True
    if row.get("offload"):
        parameters["offload_activations"] = row["offload"]
    sliced = with_schedule(case, schedule, row["chunks"], parameters)
    return replace(sliced, name=name)


def with_context_parallel(stages: tuple[Stage, ...], cp: int) -> tuple[Stage, ...]:
    """The stages with ``cp`` ranks in place of each rank."""
    return with_context_parallel_sizes(stages, [[cp] * len(s.replicas) for s in stages])


def with_context_parallel_sizes(
    stages: tuple[Stage, ...], sizes: Sequence[Sequence[int]], shares: tuple[int, ...] = ()
) -> tuple[Stage, ...]:
    """The stages with context-parallel sizes ``sizes[s][q]``; replicas of matching size get ``shares``."""
    first, found = 0, []
    for stage, row in zip(stages, sizes, strict=True):
        replicas = []
        for replica, cp in zip(stage.replicas, row, strict=True):
            end = first + cp * replica.tp
            own = shares if cp == len(shares) else ()
            replicas.append(replace(replica, ranks=tuple(range(first, end)), cp=cp, cp_shares=own))
            first = end
        found.append(replace(stage, replicas=tuple(replicas)))
    return tuple(found)


def slimpipe_cases(seed: int, quick: bool) -> list[SlicedCase]:
    """All cases; with ``quick`` every fourth one."""
    rng = random.Random(seed)
    grid = [(p, p * f, v) for p in _STAGES for f in _FACTORS for v in _CHUNKS]
    cases = []
    for i, (stages, slices, chunks) in enumerate(grid):
        microbatches = _MICROBATCHES[(i + i // 4) % 4]
        row = {
            "stages": stages,
            "slices": slices,
            "chunks": chunks,
            "microbatches": microbatches,
            "tp": 2 if i % 5 == 3 and stages * replicas_of(microbatches) <= _MAX_RANKS // 2 else 1,
            "recompute": _RECOMPUTE[(i + i // 4) % 4],
            "tied": i % 7 == 6 and (stages > 1 or chunks == 1),
            "distributed_optimizer": i % 2 == 1,
            "multi_head": i % 4 == 1,
            "uneven": chunks == 1 and i % 8 == 4,
            "vocabulary": i % 3 == 1,
            "offload": _OFFLOAD[i % 5] if i % 5 < len(_OFFLOAD) else 0.0,
            "thrifty": i % 6 == 5,
        }
        cases.append(sliced_case(row, f"p{stages}-n{slices}-v{chunks}", rng))
    for i in range(_RANDOM):
        cases.append(sliced_case(_random_row(rng), f"random-{i}", rng))
    for name, row in {**_EXCHANGE, **_CONTEXT_PARALLEL}.items():
        cases.append(sliced_case({**PLAIN, **row}, name, rng))
    for i in range(_RANDOM_SHARED):
        cases.append(sliced_case(_random_shared_row(rng), f"random-shared-{i}", rng))
    cases += [
        sliced_case({**PLAIN, **row}, name, rng)
        for name, row in {**_UNEVEN, **_MEETING, **_UNEQUAL, **_LENGTHS}.items()
    ]
    return cases[3::4] if quick else cases


def _random_row(rng: random.Random) -> dict[str, Any]:
    while True:
        stages, chunks, tp = rng.choice(_STAGES), rng.choice(_CHUNKS), rng.choice((1, 1, 2))
        microbatches = rng.choice(_MICROBATCHES)
        if stages * tp * replicas_of(microbatches) > _MAX_RANKS:
            continue
        return {
            "stages": stages,
            "slices": stages * rng.choice(_FACTORS),
            "chunks": chunks,
            "microbatches": microbatches,
            "tp": tp,
            "recompute": rng.choice(_RECOMPUTE),
            "tied": rng.random() < 0.3 and (stages > 1 or chunks == 1),
            "distributed_optimizer": rng.random() < 0.5,
            "multi_head": rng.random() < 0.5,
            "uneven": chunks == 1 and rng.random() < 0.5,
            "vocabulary": rng.random() < 0.5,
            "offload": rng.choice(_OFFLOAD),
            "thrifty": rng.random() < 0.3,
        }


def _random_shared_row(rng: random.Random) -> dict[str, Any]:
    """Parameters of a case with the context exchange, context parallelism or both."""
    while True:
        row = {**_random_row(rng), "uneven": False, "layers": 4, "cp": rng.choice((1, 2))}
        tokens = SEQUENCE // row["slices"] // row["cp"]
        exchange: dict[str, Any] = {}
        if row["stages"] > 1 and (row["cp"] == 1 or rng.random() < 0.5):
            units = rng.choice([u for u in (1, 2, 4) if tokens % u == 0])
            exchange = {"context_exchange": True, "exchange_units": units}
            exchange |= {name: True for name in ("exchange_keep", "exchange_idle") if rng.random() < 0.5}
        ranks = row["stages"] * row["tp"] * row["cp"] * replicas_of(row["microbatches"])
        blocks = 2 * row["cp"] if row["cp"] > 1 else 1
        divides = SEQUENCE // row["slices"] % blocks == 0 and tokens % row["tp"] == 0
        if ranks <= _MAX_RANKS and divides and (exchange or row["cp"] > 1):
            return {**row, "exchange": exchange}
