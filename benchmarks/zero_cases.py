"""Cases without a pipeline: ZeRO-0 to 3 under replicas of unequal work (Poplar, section 3)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cases import LAYERS, Case, build_plan
from benchmarks.poplar_cases import random_sizes, with_sizes
from benchmarks.zorse_cases import divided, with_shares
from megatron_het.plan import ScheduleSpec

# Ranks per replica, ZeRO stage, chunks, what the case has besides.
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
    """A plan of one stage at a ZeRO stage, with microbatches of any sizes on any replicas.

    Args:
        widths: Ranks of each replica, which is its TP size.
        zero: ZeRO stage, 0 to 3.
        chunks: Chunks of the stage.
        more: ``tied``, ``recompute``, ``sequence_parallel``, ``shares``, ``window`` (options).
        rng: For sizes and routing.
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
    """24 cases, six to nine for each ZeRO stage but the first two; with ``quick`` every fourth one."""
    rng = random.Random(seed)
    cases = [zero_case(*row, rng) for row in _ROWS]
    named = [replace(case, name=f"{i:02}-{case.name}") for i, case in enumerate(cases)]
    return named[::4] if quick else named
