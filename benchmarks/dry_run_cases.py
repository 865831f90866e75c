"""Small plans of every schedule and feature, for the comparison of dry runs with real ones."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from benchmarks.cases import Case, build_plan, common_flags, with_schedule
from benchmarks.poplar_cases import with_sizes
from benchmarks.slimpipe_cases import PLAIN, sliced_case
from benchmarks.zero_cases import zero_case
from benchmarks.zorse_cases import with_shares

_EXCHANGE = {"context_exchange": True, "exchange_idle": True, "exchange_keep": True}
_SLICED_CASES: dict[str, dict[str, Any]] = {
    "slimpipe": {"distributed_optimizer": True},
    "slimpipe exchange, vocabulary, offload": {"exchange": _EXCHANGE, "slices": 8, "vocabulary": True, "offload": 0.5},
    "slimpipe chunks, TP 2, thrifty layers": {"chunks": 2, "tp": 2, "thrifty": True, "recompute": "selective"},
    "context parallel 2": {"schedule": "1f1b", "slices": 1, "cp": 2},
    "1f1b vocabulary": {"schedule": "1f1b", "slices": 1, "vocabulary": True, "tied": True},
}


def _plain(sizes: list[list[int]], layers: list[int], **training: Any) -> Case:
    return Case("", build_plan(sizes, layers, random.Random(1), **training))


def _window(sizes: list[list[int]], layers: list[int], **parameters: Any) -> Case:
    case = _plain(sizes, layers, distributed_optimizer=True, recompute="full", precision="bf16")
    return with_schedule(case, "ministage", 2, {"window": True, **parameters})


def _unequal() -> dict[str, Case]:
    """Microbatches, depths, shares of the state and ZeRO stages that Megatron has not."""
    rng = random.Random(3)
    sizes = with_sizes(_plain([[1, 1], [1]], [2, 2], distributed_optimizer=True), (1, 3, 2), rng)
    depths = with_schedule(_plain([[1], [1], [1]], [1, 1, 1]), "1f1b", 1, {"depths": [2, 1]})
    shares = _window([[1, 1], [1]], [1, 1], per_layer=False)
    found = {
        "1f1b, unequal microbatches": sizes,
        "1f1b, depths, messages over host memory": replace(depths, transport="staged"),
        "ministage, unequal shares of the state": replace(shares, plan=with_shares(shares.plan, ((3, 1), (1,)))),
        "data-parallel, ZeRO-3, all offloaded": zero_case(
            (1, 1), 3, 2, {"window": {"offload": True, "offload_optimizer": True}}, rng
        ),
    }
    return found | {f"data-parallel, ZeRO-{zero}": zero_case((1, 1), zero, 2, {}, rng) for zero in range(4)}


def _experts() -> dict[str, Case]:
    """Layers of experts, all of which every token is sent to, so that a dry run knows how many each gets."""
    plain = {
        "1f1b, experts, mixed TP in a stage": _plain([[1], [2, 1]], [2, 3], sequence_parallel=True),
        "ministage with a window, experts": _window([[1, 1], [1]], [1, 1]),
        "zero-bubble, experts, full recompute": with_schedule(_plain([[1], [1]], [2, 2]), "zb-h1", 1, {}),
    }
    sliced = sliced_case({**PLAIN, "slices": 4}, "", random.Random(4))
    return {
        name: replace(case, family="every-expert") for name, case in ({**plain, "slimpipe, experts": sliced}).items()
    }


def dry_run_cases() -> list[Case]:
    """All cases, with names of their own."""
    mixed = _plain([[1], [2, 1]], [2, 3], sequence_parallel=True, tied=True, even_routing=False)
    found = {
        "1f1b, TP by stage": _plain([[1], [2], [1]], [1, 2, 2]),
        "1f1b, distributed optimizer, bf16": _plain(
            [[1, 1], [1, 1]], [2, 3], distributed_optimizer=True, precision="bf16", recompute="full"
        ),
        "1f1b, mixed TP in a stage": mixed,
        "1f1b, selective recompute, fp16": _plain([[2], [2]], [2, 2], precision="fp16", recompute="selective"),
        "gpipe": with_schedule(_plain([[1], [1]], [2, 2]), "gpipe", 1, {}),
        "interleaved": with_schedule(_plain([[1], [1]], [1, 1], distributed_optimizer=True), "interleaved", 2, {}),
        "zero-bubble": with_schedule(_plain([[1], [2], [1]], [1, 1, 1]), "zb-h1", 1, {}),
        "zero-bubble in a V": with_schedule(_plain([[1, 1], [2]], [1, 1], tied=True), "zb-v", 2, {}),
        "v-half": with_schedule(_plain([[1], [1], [1]], [1, 1, 1]), "v-half", 2, {}),
        "ministage without a window": with_schedule(_plain([[1], [1]], [1, 1]), "ministage", 2, {"window": False}),
        "ministage with a window": _window([[1, 1], [1]], [1, 1]),
        "ministage with a window, split vocabulary": _window(
            [[1, 1], [2]], [1, 1], vocabulary=True, vocabulary_shares=[3, 1], update="undo"
        ),
        "ministage, all offloaded": _window(
            [[1, 1]], [2], offload=True, offload_optimizer=True, offload_activations=0.5
        ),
    }
    cases = [replace(case, name=name) for name, case in (found | _unequal() | _experts()).items()]
    rng = random.Random(2)
    return cases + [sliced_case({**PLAIN, **row}, name, rng) for name, row in _SLICED_CASES.items()]


def flags_of(case: Case) -> tuple[str, ...]:
    """The flags of a run of the case, without the plan and without data."""
    return (
        *common_flags(*case.reference),
        *case.plan_flags(),
        "--distributed-timeout-minutes",
        "10",
        "--initial-loss-scale",
        "1",
    )
