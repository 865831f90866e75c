"""What no plan needs more of: bounds on sizes, so that a mistyped number is an error and not a hang."""

from __future__ import annotations

import math

from megatron_het.plan.costs import check_costs
from megatron_het.plan.errors import PlanError
from megatron_het.plan.schema import ModelShape, Plan, TrainingShape
from megatron_het.safe_io import MAX_PASSES

LARGEST = {
    "num_layers": 10_000,
    "hidden_size": 1 << 20,
    "ffn_hidden_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_query_groups": 1 << 16,
    "vocab_size": 1 << 26,
    "seq_length": 1 << 27,
    "micro_batch_size": 1 << 17,
    "global_batch_size": 1 << 17,
}
"""Largest values of a model's and a batch's sizes; the model file has the same."""
SLOWEST, FASTEST = 1e-6, 1e6
"""Range of relative speeds."""
LARGEST_SHARE = 1_000_000
"""Of a context-parallel rank, relative to the others."""
MAX_NAME, MAX_NOTES = 200, 20_000
"""Characters of a device's name and of the notes."""


def check_sizes(shape: ModelShape | TrainingShape, section: str) -> None:
    """Raise a PlanError for a size below 1 or above ``LARGEST``."""
    for name, most in LARGEST.items():
        value = getattr(shape, name, None)
        if value is not None and not 1 <= value <= most:
            raise PlanError(f"{section}.{name}", value, f"must be at least 1 and at most {most}")


def check_limits(plan: Plan) -> None:
    """Raise a PlanError for numbers and texts that no plan needs."""
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            where = f"stages[{s}].replicas[{q}]"
            if not SLOWEST <= replica.speed <= FASTEST:
                raise PlanError(
                    f"{where}.speed",
                    replica.speed,
                    f"must be positive: {SLOWEST:g} to {FASTEST:g} (1 = as fast as the fastest)",
                )
            check_name(replica.device, f"{where}.device")
            check_name(replica.zone, f"{where}.zone")
    if len(plan.notes) > MAX_NOTES:
        raise PlanError("notes", plan.notes, f"longer than {MAX_NOTES} characters")
    _check_parameters(plan)
    _check_prediction(plan)
    check_passes(plan)


def check_name(name: str, where: str) -> None:
    """A device's name: one short line, because scripts and tables show it."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise PlanError(where, name, f"a name has at most {MAX_NAME} characters, all printable")


def _check_parameters(plan: Plan) -> None:
    for name, value in plan.schedule.parameters.items():
        numbers = isinstance(value, list) and all(type(n) is int for n in value)
        if value is not None and not numbers and not isinstance(value, bool | int | float | str):
            raise PlanError(
                f"schedule.parameters.{name}", value, "must be a number, a text, true, false or a list of whole numbers"
            )


def most_chunks(microbatches: int, slices: int) -> int:
    """Chunks of all stages together that an iteration may go through, forwards and backwards.

    Args:
        microbatches: Of the iteration, over all replicas.
        slices: Of each microbatch.
    """
    return MAX_PASSES // (2 * microbatches * slices)


def check_passes(plan: Plan) -> None:
    """Refuse an iteration of more passes than can be laid out in reasonable time."""
    slices = plan.schedule.parameters.get("slices", 1)
    slices = slices if isinstance(slices, int) and slices > 0 else 1
    chunks = sum(len(stage.layers) for stage in plan.stages)
    if chunks > most_chunks(plan.num_microbatches, slices):
        passes = 2 * chunks * plan.num_microbatches * slices
        raise PlanError(
            "training.global_batch_size",
            plan.training.global_batch_size,
            f"{plan.num_microbatches} microbatches of {slices} slices through {chunks} chunks are {passes} passes "
            f"per iteration, more than {MAX_PASSES}",
            "Use larger micro batches, fewer slices or fewer chunks",
        )


def _check_prediction(plan: Plan) -> None:
    """Predictions are printed beside what is measured: finite, not negative, of ranks that exist, once each."""
    if plan.predicted is None:
        return
    for name in ("iteration_s", "bubble_fraction"):
        _check_amount(getattr(plan.predicted, name), f"predicted.{name}")
    seen: set[int] = set()
    ranks = plan.world_size
    for i, rank in enumerate(plan.predicted.per_rank):
        where = f"predicted.per_rank[{i}]"
        if not 0 <= rank.rank < ranks or rank.rank in seen:
            raise PlanError(f"{where}.rank", rank.rank, "no such rank, or a rank that was there before")
        seen.add(rank.rank)
        for name in ("compute_s", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"):
            _check_amount(getattr(rank, name), f"{where}.{name}")
    if plan.predicted.costs is not None:
        check_costs(plan.predicted.costs, [len(s.layers) for s in plan.stages for _ in s.replicas])


def _check_amount(value: float, where: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise PlanError(where, value, "must be a finite number, not negative")
