"""Reading and writing plan files.  A file is either complete or absent: writes go through a rename."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from megatron_het.plan.errors import PlanError
from megatron_het.plan.schema import Plan, Replica, _plain


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.

    Raises:
        PlanError: The file is missing, truncated, not a plan, or inconsistent in itself.
    """
    from megatron_het.plan.validate import check_plan

    text = _read_text(Path(path))
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{path}:{error.lineno}:{error.colno}",
            text[max(0, error.pos - 30) : error.pos + 10],
            f"not JSON ({error.msg}); is the file truncated?",
            "Write it again",
        ) from error
    plan = Plan.from_json(document)
    check_plan(plan)
    return plan


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError("--het-plan", str(path), "no such file", "Give the path of a plan.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError("--het-plan", str(path), f"cannot be read: {error}") from error


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Check a plan and write it; an existing file is replaced only by a complete one."""
    from megatron_het.plan.validate import check_plan

    check_plan(plan)
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    scratch.write_text(json.dumps(plan.to_json(), indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, target)


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
    return _digest([[_plain(s.layers), [_ranks(r) for r in s.replicas]] for s in plan.stages])


def _ranks(replica: Replica) -> list[int]:
    return [*replica.ranks, *((-replica.cp,) if replica.cp > 1 else ())]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
