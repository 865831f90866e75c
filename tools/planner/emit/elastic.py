"""``elastic.sbatch``: a job whose plan changes while it runs; see docs/elastic.md.

The batch script runs the controller on the first node, and one agent per node, each in a Slurm step of its own, so that
a node that goes down takes no other step with it.  The script knows the kind of every node from the component of the
job that the node is in, and passes it to the agent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_het.arguments.megatron_args import environment_of
from megatron_het.elastic.pool import Process, assign
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import Plan, load_plan

from ..errors import PlannerError, plan_errors
from ..inputs.cluster import NodeGroup
from ..inputs.files import quote
from ..inputs.packing import Component, Node, chosen_devices, components, device_words, devices_of
from .flags import named_plans
from .scripts import LaunchOptions, features_of, plain_obstacle, resources, script

SCRIPT = "elastic.sbatch"


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Settings of an elastic job beyond :class:`LaunchOptions`."""

    # further plans with their files, the best one first; the job's own plan comes before them
    more: tuple[tuple[str, Plan], ...] = ()
    # names of cluster file, model file and (where there is one) profile in the run's folder, from which plans are
    # searched for pools that no given plan fits; empty: none are searched
    inputs: tuple[str, ...] = ()

    @property
    def named(self) -> dict[str, Plan]:
        """The further plans, by their names in the run's folder."""
        return named_plans(self.more)


def load_more(files: Sequence[Path]) -> tuple[tuple[str, Plan], ...]:
    """Returns the plans of ``--plans`` by file; raises PlannerError for a bad file or a plan that cannot run."""
    found = []
    for file in files:
        with plan_errors(str(file)):
            plan = load_plan(file)
            check_plan_alone(plan)
        found.append((str(file), plan))
    return tuple(found)


def checked_sbatch(
    plan: Plan, nodes: Sequence[Node], kinds: Mapping[str, NodeGroup], launch: LaunchOptions, elastic: ElasticOptions
) -> str:
    """Returns the job with one task per node: a plain job if one suffices, else a component per kind of node.

    Slurm leaves the job alone when a node fails (``--no-kill``), queues it again when the first node fails
    (``--requeue``), and tells the batch script before its time is over (``--signal``).  Raises PlannerError.
    """
    if launch.container and launch.container.runtime != "apptainer":
        runtime = launch.container.runtime
        problem = f"{runtime} starts containers for steps only; the controller runs in the batch script"
        raise PlannerError("emit", "--container-runtime", runtime, problem, "Use apptainer")
    check_elastic(plan, nodes, kinds, launch, elastic)
    options = replace(launch, environment=elastic_environment(plan, launch, elastic))
    parts = components(nodes, kinds)
    plain = not plain_obstacle(nodes, kinds)
    parts = parts if plain else _leader_first(parts)
    requests = [parts] if plain else [[part] for part in parts]
    blocks = [resources(request, kinds, options, tasks_per_node=1) for request in requests]
    first = "SLURM_JOB_NODELIST" if plain else "SLURM_JOB_NODELIST_HET_GROUP_0"
    groups = [() if plain else (f"--het-group={i}",) for i in range(len(parts))]
    return script(
        SCRIPT,
        options,
        signal="TERM",
        note=f"Submit with: sbatch {SCRIPT}",
        script=SCRIPT,
        requests=[[*words, "--no-kill"] for words in blocks],
        first=f'$(scontrol show hostnames "${first}" | head -n1)',
        node_count=len(nodes),
        how=how(elastic),
        # Agents choose devices if Slurm allocates more of a node than the plan uses.
        chooses=any(chosen_devices(node, kinds) for node in nodes),
        features=features_of(parts, kinds) if plain else [],
        agents=[_agent(part, kinds, *group) for part, group in zip(parts, groups, strict=True)],
    )


def check_elastic(
    plan: Plan, nodes: Sequence[Node], kinds: Mapping[str, NodeGroup], launch: LaunchOptions, elastic: ElasticOptions
) -> None:
    """Check that the plans are of one training, and that the job's nodes can run each; raises PlannerError."""
    if launch.doctor:
        problem = "checks the ranks of one plan, and an elastic job starts one task per node, whose plan changes"
        hint = "Leave one of --doctor and --elastic out; a job of its own can check the nodes"
        raise PlannerError("emit", "--doctor", True, problem, hint)
    pool = [
        Process(i * 4096 + slot, f"node {i}", device)
        for i, node in enumerate(nodes)
        for slot, device in enumerate(devices_of(node, kinds))
    ]
    for file, other in elastic.more:
        for key, value, first in (
            ("model", other.model, plan.model),
            ("training.global_batch_size", other.training.global_batch_size, plan.training.global_batch_size),
            ("training.precision", other.training.precision, plan.training.precision),
        ):
            if value != first:
                hint = "Give plans for one training (--plans)"
                raise PlannerError(file, key, str(value), f"the first plan has {first}", hint)
        if assign(other, pool) is None:
            there = [f"{n} x {device}" for node in nodes for device, n in Counter(devices_of(node, kinds)).items()]
            problem = f"its {other.world_size} ranks do not fit the job's nodes, which are those of the first plan: "
            hint = "Give the plan that needs most nodes first"
            raise PlannerError(file, "stages", None, problem + ", ".join(there), hint)


def notes(nodes: Sequence[Node], kinds: Mapping[str, NodeGroup]) -> list[str]:
    """Returns notes on node failures that requeue the whole job."""
    if not plain_obstacle(nodes, kinds) or len(_leader_first(components(nodes, kinds))[0].nodes) > 1:
        return []
    return [
        f"{SCRIPT}: a heterogeneous job whose components have one node each is queued again by Slurm when any node "
        "fails, and resumes from the newest checkpoint"
    ]


def _leader_first(parts: Sequence[Component]) -> list[Component]:
    """Sort the component with most nodes first; the placement of ranks does not depend on the order.

    It is the leader of the heterogeneous job.  When a node of any component fails, Slurm leaves a leader of several
    nodes alone, and queues the whole job again where the leader has one node.
    """
    return sorted(parts, key=lambda part: -len(part.nodes))


def _agent(part: Component, kinds: Mapping[str, NodeGroup], *words: str) -> str:
    kind = kinds[part.kind]
    if kind.python:
        words = *words, quote(f"--export=ALL,PYTHON={kind.python}")
    node = part.nodes[0]
    visible = chosen_devices(node, kinds)
    start = f'HET_DEVICES="{visible}" start_agent "$host"' if visible else 'start_agent "$host"'
    return " ".join([start, quote(device_words(node, kinds)), str(part.per_node), *words])


def how(elastic: ElasticOptions) -> str:
    """Bash words for the sources of the controller's plans."""
    words = ["--plans", *(f'"$RUN_DIR/{name}"' for name in ("plan.json", *elastic.named))]
    for flag, name in zip(("--cluster", "--model", "--profile"), elastic.inputs, strict=False):
        words += [flag, f'"$RUN_DIR/{name}"']
    return f"HOW=({' '.join(words)})"


def elastic_environment(plan: Plan, launch: LaunchOptions, elastic: ElasticOptions) -> dict[str, str]:
    """Variables of every rank: those that one of the plans needs, and those that a searched plan may need."""
    found: dict[str, str] = {}
    for one in (plan, *(other for _, other in elastic.more)):
        found |= environment_of(one)
    # It is read once, when CUDA starts; a later plan with TP would be refused without it.
    found = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **found} if elastic.inputs else found
    return {**found, **(launch.environment or {})}
