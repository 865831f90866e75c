"""The command ``check``: whether a plan can run, and fits the cluster."""

from __future__ import annotations

import argparse
from typing import Any

from ..costs.build import rooms_of
from ..costs.estimate import Estimator
from ..errors import PlannerError
from ..inputs.packing import seat_replicas
from ..report.tables import GIB, host_memory_lines, offloaded, say, table
from .commands import load, priced


def check(options: argparse.Namespace) -> int:
    """Whether a plan can run and fits; exit code 1 when it does not."""
    estimator, made = load(options)
    problem = _obstacle(made)
    problems, notes = ([problem], []) if problem else _misfits(estimator, made, options)
    notes += estimator.model.notes
    tables: list[Any] = ["the plan is valid and fits"]
    if problems:
        tables = [table("Problems", "where", "what")]
        for problem in problems:
            tables[0].add_row(problem["key"], problem["problem"])
    say({"valid": not problems, "problems": problems, "notes": notes}, options, *tables, *notes)
    return 1 if problems else 0


def _obstacle(made: Any) -> dict[str, Any] | None:
    """Why the runtime would refuse the plan, whatever it is started on and with."""
    from megatron_het.features.plan_checks import check_plan_alone
    from megatron_het.lowering.programs import build
    from megatron_het.plan import PlanError

    try:
        check_plan_alone(made)
    except PlanError as error:
        return {"key": error.where, "problem": error.problem + (f". {error.hint}" if error.hint else "")}
    try:
        build(made)
    except PlanError as error:
        return {"key": "schedule.name", "problem": error.problem}
    return None


def _misfits(estimator: Estimator, made: Any, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns what of a plan does not fit the cluster, and what cannot be told."""
    try:
        seat_replicas(made, rooms_of(estimator.cluster), options.plan)
    except PlannerError as error:
        return [{"key": error.key, "problem": error.problem + (f". {error.hint}" if error.hint else "")}], []
    candidate, estimate, _ = priced(estimator, made, options)
    problems: list[dict[str, Any]] = []
    for m in estimate.memory:
        if m.total_bytes > estimator.memory_margin * m.capacity_bytes:
            gpu = estimator.cluster.nodes[m.group.pool].gpu
            problems.append(
                {
                    "key": f"stages[{m.stage}]",
                    "problem": f"needs {m.total_bytes / GIB:.2f} GiB of {m.capacity_bytes / GIB:.2f} GiB "
                    f"on {gpu} (TP {m.group.tp}); activations {m.activation_bytes / GIB:.2f}, "
                    f"optimizer {m.optimizer_bytes / GIB:.2f} GiB",
                }
            )
    for pool, held, limit in estimator.short_of_host_memory(estimate):
        problem = f"offloads {held / GIB:.1f} GiB to a node that has {limit / GIB:.1f} GiB of main memory for it"
        problems.append({"key": f"nodes[{pool}].host_memory_bytes", "problem": problem})
    for node in {estimator.cluster.nodes[g.pool].gpu for s in candidate.stages for g in s.groups}:
        device = estimator.cluster.gpu(node)
        if not device.supports(made.training.precision):
            problems.append(
                {"key": "training.precision", "problem": f"{node} does not support {made.training.precision}"}
            )
    return problems, host_memory_lines(offloaded(estimator, estimate))
