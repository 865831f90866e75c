"""Launches without Slurm: ``jobset.yaml`` for Kubernetes, and ``skypilot.yaml`` for clouds; see docs/kubernetes.md.

Every node is a pod (or a machine) of its kind.  The pod runs the script of its node, whose number is a constant of the
kind plus the pod's index; an elastic job's pods run an agent, and one more pod the controller.  A user's text is a
value of the file and never part of a command.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ..errors import PlannerError
from ..inputs.cluster import KubernetesSettings, NodeGroup, SkypilotSettings
from ..inputs.packing import Component, device_words, whole_kind
from .elastic import ElasticOptions, how
from .scripts import LaunchOptions, script

Target = Literal["slurm", "jobset", "skypilot"]
FILES: dict[Target, str] = {"jobset": "jobset.yaml", "skypilot": "skypilot.yaml"}
ELASTIC_SCRIPT = "elastic-node.sh"
CONTROLLER = "controller"
_PORT, _CONTROLLER_PORT = 29500, 29400
_LONGEST_NAME = 63
_RETRIES = 1000  # pods of an elastic job that may be replaced: any number that a training can need


@dataclass(frozen=True, slots=True)
class PodOptions:
    """Settings of a launch without Slurm."""

    target: Target  # which file is written
    image: str = ""  # of all containers; optional with SkyPilot
    # where the folder of the run is seen by all nodes: names of claims (JobSet) or addresses of buckets (SkyPilot), by
    # the folder where they are mounted
    volumes: Mapping[str, str] = field(default_factory=dict)
    queue: str = ""  # kueue's queue; empty: none
    restarts: int = 10  # restarts of a JobSet after failures


_SECTIONS = {"jobset": "kubernetes: {node_selector: {LABEL: VALUE}}", "skypilot": "skypilot: {accelerators: NAME}"}


def part_names(parts: Sequence[Component], kinds: Mapping[str, NodeGroup]) -> list[str]:
    """Returns a name for each component that DNS allows, after its GPU."""
    found: list[str] = []
    for part in parts:
        gpu = whole_kind(part.nodes[0], kinds).gpu
        name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")[:30] or "nodes"
        same = sum(other == name or re.fullmatch(rf"{re.escape(name)}-n\d+", other) is not None for other in found)
        found.append(f"{name}-n{same}" if same or name == CONTROLLER else name)
    return found


def check_pods(
    parts: Sequence[Component], kinds: Mapping[str, NodeGroup], launch: LaunchOptions, pods: PodOptions
) -> None:
    """Check names, image, volumes and kinds.

    Raises:
        PlannerError: A name that DNS does not allow, no image, no volume, or kinds that cannot be told apart.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", launch.job_name):
        problem = "is no name of DNS: small letters, digits and '-', with a letter first"
        raise PlannerError("emit", "--job-name", launch.job_name, problem)
    names = part_names(parts, kinds)
    for name, part in zip(names, parts, strict=True):
        longest = f"{launch.job_name}-{name}-0-{len(part.nodes) - 1}"
        if len(longest) > _LONGEST_NAME:
            problem = f"makes the name {longest}, which is longer than the {_LONGEST_NAME} letters of a host"
            raise PlannerError("emit", "--job-name", launch.job_name, problem, "Give a shorter one")
    if pods.target == "jobset" and not pods.image:
        raise PlannerError("emit", "--container", "", "is needed: the image of the pods", "Give --container IMAGE")
    if not any(Path(launch.run_dir).is_relative_to(folder) for folder in pods.volumes):
        problem = f"none of {[*pods.volumes]} has the run's folder {launch.run_dir}, which all nodes must see"
        hint = "Give --volume NAME:FOLDER of a folder around it, and --run-dir where nodes see it elsewhere"
        raise PlannerError("emit", "--volume", None, problem, hint)
    asked: dict[str, str] = {}
    for part in parts:
        kind, gpu = kinds[part.kind], whole_kind(part.nodes[0], kinds).gpu
        key = f"{kind.skypilot.accelerators} {kind.skypilot.infra}".strip()
        if pods.target == "jobset":
            key = " ".join(f"{label}={value}" for label, value in sorted(kind.kubernetes.node_selector.items()))
        other = asked.setdefault(key, gpu)
        if other != gpu:
            section = _SECTIONS[pods.target]
            problem = f"{other} and {gpu} are asked for by the same words, so that either may get the other's nodes"
            place = f"{part.kind}: {section.partition(':')[0]}"
            raise PlannerError("cluster", place, key or None, problem, f"Give both groups '{section}'")


def render(
    parts: Sequence[Component],
    kinds: Mapping[str, NodeGroup],
    launch: LaunchOptions,
    pods: PodOptions,
    elastic: ElasticOptions | None = None,
) -> dict[str, str]:
    """Returns the files of a launch without Slurm, by name; raises PlannerError."""
    check_pods(parts, kinds, launch, pods)
    texts = {}
    if elastic is not None:
        texts[ELASTIC_SCRIPT] = script(ELASTIC_SCRIPT, launch, note="One pod of an elastic job.", how=how(elastic))
    roles = _roles(parts, kinds, launch, pods, elastic is not None)
    documents = [_jobset(roles, launch, pods, elastic is not None)]
    note = "# Start with: kubectl apply -f jobset.yaml\n"
    if pods.target == "skypilot":
        header: dict[str, Any] = {"name": launch.job_name, "execution": "parallel"}
        header |= {"primary_tasks": [CONTROLLER]} if elastic else {}
        documents = [header, *(_task(role, launch, pods) for role in roles)]
        note = "# Start with: sky jobs launch skypilot.yaml (SkyPilot calls its job groups experimental)\n"
    text = yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    return {**texts, FILES[pods.target]: note + text}


@dataclass(frozen=True, slots=True)
class _Role:
    """One group of equal pods."""

    name: str
    count: int
    gpus: int
    environment: Mapping[str, str]
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    skypilot: SkypilotSettings = field(default_factory=SkypilotSettings)


def _roles(
    parts: Sequence[Component], kinds: Mapping[str, NodeGroup], launch: LaunchOptions, pods: PodOptions, elastic: bool
) -> list[_Role]:
    """Returns all groups of pods, the one that the others wait for first."""
    names, first = part_names(parts, kinds), 0
    leader = CONTROLLER if elastic else names[0]
    pod = f"{leader}-0" if pods.target == "skypilot" else f"{launch.job_name}-{leader}-0-0"
    host = f"{pod}.{launch.job_name}"
    common = {"RUN_DIR": launch.run_dir, "MASTER_ADDR": host, "MASTER_PORT": str(_PORT)}
    # Pods share no home folder.
    common["MEGATRON_HET_TOKEN_FILE"] = f"{launch.run_dir}/token"
    if elastic:
        port = str(_CONTROLLER_PORT)
        common = {"RUN_DIR": launch.run_dir, "CONTROLLER_HOST": host, "CONTROLLER_PORT": port}
    roles = []
    if elastic:
        count = sum(len(part.nodes) for part in parts)
        roles.append(_Role(CONTROLLER, 1, 0, {**common, "HET_NODES": str(count)}))
    for name, part in zip(names, parts, strict=True):
        node = part.nodes[0]
        kind = whole_kind(node, kinds)
        own = {"HET_FIRST_NODE": str(first)}
        if elastic:
            own = {"HET_GROUP": name, "HET_DEVICE": device_words(node, kinds), "HET_WORKERS": str(part.per_node)}
            own |= {"PYTHON": kind.python} if kind.python else {}
        if elastic and node.kinds:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.devices))
        # A pod gets all GPUs of a node with several kinds: a resource count selects no kind.  Its ranks choose theirs.
        gpus = kind.gpus_per_node if node.kinds else part.per_node
        roles.append(_Role(name, len(part.nodes), gpus, {**common, **own}, kind.kubernetes, kind.skypilot))
        first += len(part.nodes)
    return roles


_START = [
    # A new value for every start of the JobSet, the same for replacements of a pod within one start.
    {
        "name": "HET_START",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
    }
]
_NODE = 'exec bash "$RUN_DIR/torchrun-node-$((HET_FIRST_NODE + INDEX)).sh"'
_ELASTIC_NODE = f'exec bash "$RUN_DIR/{ELASTIC_SCRIPT}"'


def _jobset(roles: Sequence[_Role], launch: LaunchOptions, pods: PodOptions, elastic: bool) -> dict[str, Any]:
    """Returns the JobSet: one replicated job for each group of pods, each an indexed job."""
    metadata: dict[str, Any] = {"name": launch.job_name}
    if pods.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": pods.queue}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": launch.job_name, "publishNotReadyAddresses": True},
        # All pods begin again together, from the newest checkpoint; an elastic job replaces its pods one by one.
        "failurePolicy": {"maxRestarts": 0 if elastic else pods.restarts, "restartStrategy": "BlockingRecreate"},
    }
    if elastic:
        spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": [CONTROLLER]}
    spec["replicatedJobs"] = [
        {
            "name": role.name,
            "replicas": 1,
            "template": {
                "spec": {
                    "parallelism": role.count,
                    "completions": role.count,
                    "completionMode": "Indexed",
                    "backoffLimit": _RETRIES if elastic else 0,
                    "template": {"spec": _pod(role, pods, elastic)},
                }
            },
        }
        for role in roles
    ]
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _pod(role: _Role, pods: PodOptions, elastic: bool) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "node",
        "image": pods.image,
        "command": ["bash", "-c", _ELASTIC_NODE if elastic else _NODE.replace("INDEX", "JOB_COMPLETION_INDEX")],
        "env": [*({"name": name, "value": value} for name, value in role.environment.items()), *_START[: int(elastic)]],
        "volumeMounts": [
            *({"name": f"volume-{i}", "mountPath": folder} for i, folder in enumerate(pods.volumes)),
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if role.gpus and role.kubernetes.resource:
        container["resources"] = {"limits": {role.kubernetes.resource: role.gpus}}
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    if role.kubernetes.node_selector:
        pod["nodeSelector"] = dict(role.kubernetes.node_selector)
    pod["volumes"] = [
        *(
            {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
            for i, claim in enumerate(pods.volumes.values())
        ),
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    return pod


def _task(role: _Role, launch: LaunchOptions, pods: PodOptions) -> dict[str, Any]:
    elastic = "HET_FIRST_NODE" not in role.environment
    kind = role.skypilot
    resources = {
        "accelerators": f"{kind.accelerators}:{role.gpus}" if role.gpus and kind.accelerators else "",
        "infra": kind.infra,
        "use_spot": kind.use_spot,
        "image_id": f"docker:{pods.image}" if pods.image else "",
    }
    resources = {name: value for name, value in resources.items() if value}
    return {
        "name": role.name,
        "num_nodes": role.count,
        **({"resources": resources} if resources else {}),
        "file_mounts": {folder: {"source": bucket, "mode": "MOUNT"} for folder, bucket in pods.volumes.items()},
        "envs": dict(role.environment),
        "run": (_ELASTIC_NODE if elastic else _NODE.replace("INDEX", "SKYPILOT_NODE_RANK")) + "\n",
    }
