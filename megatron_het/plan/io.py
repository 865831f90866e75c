"""Reading and writing plan files, within the limits of ``megatron_het.safe_io``."""

from __future__ import annotations

import hashlib
import json
import os

from megatron_het.plan.errors import PlanError
from megatron_het.plan.schema import Plan, Replica, _plain
from megatron_het.safe_io import FileError, read_json, write_json
from megatron_het.schedule.paths import PLACEMENTS, placement_of

MOST_INDENTED = 10_000
"""Ranks of a plan file that is laid out in lines."""


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.

    Raises:
        PlanError: The file is missing, truncated, not a plan, or inconsistent in itself.
    """
    from megatron_het.plan.validate import check_plan

    try:
        document = read_json(path)
    except FileError as error:
        raise _plan_error(error) from None
    plan = Plan.from_json(document)
    check_plan(plan)
    return plan


def _plan_error(error: FileError) -> PlanError:
    where = f"{error.where}: " if error.where else ""
    return PlanError(
        "plan file", error.path, where + error.problem, error.hint or "Give the path of a plan.json (a run: --het-plan)"
    )


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Check a plan and write it; an existing file is replaced only by a complete one.

    A plan of more than ``MOST_INDENTED`` ranks is one line: to lay it out takes as long as many a search.

    Raises:
        PlanError: The plan contradicts itself, or ``path`` is no place for a file.
    """
    from megatron_het.plan.validate import check_plan

    check_plan(plan)
    try:
        write_json(path, plan.to_json(), indent=2 if plan.world_size <= MOST_INDENTED else None)
    except FileError as error:
        raise _plan_error(error) from None


def plan_hash(plan: Plan) -> str:
    """Twelve hex digits over everything that determines what runs (not predictions or notes)."""
    body = plan.to_json()
    body.pop("predicted", None)
    body.pop("notes", None)
    return _digest(body)


def topology_hash(plan: Plan) -> str:
    """Twelve hex digits over who holds what: stages, layers and ranks, not the routing.

    Two runs with the same topology hash have the same per-rank state, e.g. random-number states.
    """
    held = [[_plain(s.layers), [_ranks(r) for r in s.replicas]] for s in plan.stages]
    placement = placement_of(plan.schedule.name)
    return _digest(held if placement == PLACEMENTS[0] else [placement, *held])


def _ranks(replica: Replica) -> list[int]:
    return [*replica.ranks, *((-replica.cp,) if replica.cp > 1 else ()), *((-replica.ep, 0) if replica.ep > 1 else ())]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
