"""The cases of SlimPipe's parity: every p, n and v with all features in turn, and random ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cases import HEADS, MICROBATCHES, Case, build_plan, split_layers, with_schedule
from benchmarks.lab import Lab

_STAGES, _FACTORS, _CHUNKS = (1, 2, 4), (1, 2, 4), (1, 2)
_MICROBATCHES = (1, 2, 3, 4)
_RANDOM, _MAX_RANKS = 10, 8
_RECOMPUTE = ("none", "selective", "full", "up projection")
_OFFLOAD = (0.0, 0.75, 1.0)


@dataclass(frozen=True)
class SlicedCase(Case):
    """A case whose microbatches are larger than those of its reference (the same samples)."""

    def plan_flags(self) -> tuple[str, ...]:
        """As in Case, with the plan's own micro batch size."""
        flags = [*super().plan_flags(), "--micro-batch-size", str(self.plan.training.micro_batch_size)]
        flags += ["--het-thrifty-layers"] if self.chosen.get("thrifty") else []
        flags += ["--recompute-modules", "mlp"] if self.chosen["recompute"] == "up projection" else []
        return tuple(flags)


class MultiHeadLab(Lab):
    """A lab whose models have as many key-value heads as query heads."""

    def data_flags(self) -> tuple[str, ...]:
        """Flags that every run of the lab gets; the last value of a flag counts."""
        return (*super().data_flags(), "--num-query-groups", str(HEADS))


def replicas_of(microbatches: int) -> int:
    """Replicas per stage of a case whose first replica runs so many microbatches."""
    return 1 if MICROBATCHES % microbatches == 0 else 2


def sliced_case(row: dict[str, Any], name: str, rng: random.Random) -> SlicedCase:
    """A case from its parameters.

    Args:
        row: ``stages``, ``slices``, ``chunks``, ``microbatches`` (of one replica), ``tp``,
            ``recompute``, ``tied``, ``distributed_optimizer``, ``multi_head``, ``uneven``; may have
            ``vocabulary`` (split over the stages), ``offload`` (share of activations) and ``thrifty`` (layers).
        name: Name of the case.
        rng: For uneven layers.
    """
    # Where the count does not divide the batch, a second replica takes the rest.
    count, replicas = row["microbatches"], replicas_of(row["microbatches"])
    size = 1 if replicas == 2 else MICROBATCHES // count
    plan = build_plan(
        [[row["tp"]] * replicas] * row["stages"],
        split_layers(row["stages"], not row["uneven"], rng),
        rng,
        tied=row["tied"],
        sequence_parallel=row["tp"] > 1,
        recompute="selective" if row["recompute"] == "up projection" else row["recompute"],
        distributed_optimizer=row["distributed_optimizer"],
    )
    model = replace(plan.model, num_query_groups=HEADS) if row["multi_head"] else plan.model
    routed = [tuple(range(count)), tuple(range(count, MICROBATCHES))][:replicas]
    stages = tuple(
        replace(
            s,
            replicas=tuple(
                replace(r, microbatches=m) for r, m in zip(s.replicas, routed, strict=True)
            ),
        )
        for s in plan.stages
    )
    training = replace(plan.training, micro_batch_size=size)
    plan = replace(plan, model=model, training=training, stages=stages)
    case = SlicedCase(name, plan, chosen={"precision": "fp32", **row})
    parameters: dict[str, Any] = {"slices": row["slices"]}
    if row.get("vocabulary"):
        parameters["vocabulary"] = True
    if row.get("offload"):
        parameters["offload_activations"] = row["offload"]
    sliced = with_schedule(case, "slimpipe", row["chunks"], parameters)
    return replace(sliced, name=name)


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
