"""From command-line options to an Estimator and a Goal, with checks of input; and inputs kept for ``replan``."""

from __future__ import annotations

import argparse
from math import inf
from typing import TYPE_CHECKING

from ..costs.estimate import Estimator
from ..costs.layer import runtime_for
from ..costs.layercost import CatalogCosts, LayerCosts, MeasuredCosts
from ..costs.schedules import SCHEDULES
from ..errors import PlannerError, command
from ..inputs.cluster import Cluster, load_cluster
from ..inputs.model import Model, model_of
from ..inputs.profile_schema import load_profile
from .outcome import Goal

if TYPE_CHECKING:
    from megatron_het.plan import Plan
import json
from pathlib import Path

from ..inputs.files import write_text
from ..inputs.profile_schema import Profile, save_profile

# The planner's inputs in a run's folder, for ``replan`` to start from.


CLUSTER, MODEL, PROFILE = "planned-cluster.yaml", "planned-model.yaml", "planned-profile.json"


def keep_inputs(folder: Path, cluster: Cluster, model: Model, profile: Profile | None) -> dict[str, Path]:
    """Write what a plan was made from beside it; the files, by name."""
    write_text(folder / CLUSTER, cluster_text(cluster))
    write_text(folder / MODEL, model_text(model))
    written = {CLUSTER: folder / CLUSTER, MODEL: folder / MODEL}
    (folder / PROFILE).unlink(missing_ok=True)  # of an earlier plan
    if profile is not None:
        save_profile(profile, folder / PROFILE)
        written[PROFILE] = folder / PROFILE
    return written


def cluster_text(cluster: Cluster) -> str:
    """A cluster file; JSON, which is YAML too."""
    return json.dumps(cluster.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"


def model_text(model: Model) -> str:
    """A model file; JSON, which is YAML too."""
    return json.dumps(model.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"


def check_memory_margin(options: argparse.Namespace) -> None:
    """Whether ``--memory-margin`` is a share.

    Raises:
        PlannerError: It is not.
    """
    if not 0 < options.memory_margin <= 1:
        raise PlannerError("command line", "--memory-margin", options.memory_margin, "must be above 0 and at most 1")


def estimator_from(options: argparse.Namespace) -> Estimator:
    """Read cluster, model and profile.

    Raises:
        PlannerError: see the readers; a precision that no GPU of the cluster supports; a bad margin.
    """
    cluster, model = load_cluster(options.cluster), model_of(options)
    check_memory_margin(options)
    runtime = runtime_for([cluster.gpu(node.gpu) for node in cluster.nodes])
    costs: LayerCosts
    if options.profile:
        profile = load_profile(options.profile)
        if not profile.complete:
            raise PlannerError(
                options.profile,
                "complete",
                False,
                "profiling was interrupted",
                f"Run '{command()} profile' again; it goes on where it stopped",
            )
        costs = MeasuredCosts(model, profile, cluster.gpu, runtime, file=options.profile)
        for node in cluster.nodes:
            costs.tp_sizes(node.gpu)
    else:
        costs = CatalogCosts(model, cluster.gpu, runtime)
        check_precision(cluster, model, options.cluster, options.model)
    return Estimator(cluster, model, costs, runtime, options.memory_margin)


def check_precision(cluster: Cluster, model: Model, cluster_file: str, model_file: str) -> None:
    """Every GPU computes in the model's precision (V100, T4 and RTX-20 have no bf16)."""
    without = sorted({n.gpu for n in cluster.nodes if not cluster.gpu(n.gpu).supports(model.precision)})
    if not without:
        low = model.linear_precision
        slow = sorted({n.gpu for n in cluster.nodes if not cluster.gpu(n.gpu).supports(low)})
        if slow:
            problem = f"{', '.join(slow)} in {cluster_file} cannot compute in {low}"
            raise PlannerError(model_file, low, True, problem, f"Set {low}: false, or remove {', '.join(slow)}")
        return
    common = set.intersection(*(set(cluster.gpu(n.gpu).flops) for n in cluster.nodes))
    raise PlannerError(
        model_file,
        "precision",
        model.precision,
        f"{', '.join(without)} in {cluster_file} cannot compute in it",
        f"All GPUs of the cluster support {', '.join(sorted(common)) or 'nothing in common'}: "
        f"give --precision, or remove {', '.join(without)}",
    )


def check_planned_precision(made: Plan, model: Model, file: str) -> None:
    """A plan trains in the precision that it was made for.

    Raises:
        PlannerError: The model file, or ``--precision``, says another.
    """
    planned, mine = made.training.precision, "fp32" if model.precision == "tf32" else model.precision
    if planned != mine:
        problem, hint = f"the model's is {mine}", f"Give --precision {planned}, or plan again"
        raise PlannerError(file, "training.precision", planned, problem, hint)


def check_prices(estimator: Estimator, goal: Goal, file: str) -> None:
    """Money needs prices: every kind of GPU has one when the goal speaks of costs.

    Raises:
        PlannerError: naming the node group without a price.
    """
    if goal.objective != "cost" and goal.max_usd_per_iteration is None:
        return
    for i, node in enumerate(estimator.cluster.nodes):
        if node.usd_per_gpu_hour is None and estimator.cluster.gpu(node.gpu).usd_per_hour is None:
            raise PlannerError(
                file,
                f"nodes[{i}].usd_per_gpu_hour",
                None,
                f"{node.gpu} has no known price",
                "Give your price per GPU hour (0 for GPUs that cost nothing)",
            )


def goal_from(options: argparse.Namespace) -> Goal:
    """Objective and constraints.

    Raises:
        PlannerError: a constraint that is not positive, an unknown schedule.
    """
    for name in ("max_usd_per_iteration", "min_iterations_per_s", "max_gpus", "limit_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < inf:
            raise PlannerError("command line", "--" + name.replace("_", "-"), value, "must be positive")
    schedules = tuple(s.strip() for s in options.schedules.split(",") if s.strip())
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise PlannerError(
                "command line", "--schedules", schedule, "unknown schedule", f"Known: {', '.join(SCHEDULES)}"
            )
    if not schedules:
        raise PlannerError("command line", "--schedules", options.schedules, "at least one schedule is needed")
    return Goal(
        options.objective, options.max_usd_per_iteration, options.min_iterations_per_s, options.max_gpus, schedules
    )
