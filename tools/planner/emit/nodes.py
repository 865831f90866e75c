"""Which node runs which ranks: the part of a launch that plan and cluster decide together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_het.plan import Plan

from ..inputs.packing import Room, seat_replicas


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Holds what the launcher has to know about nodes of one kind.

    Attributes:
        devices: GPUs (or ranks, on CPU nodes) that one node offers.
        count: Nodes that exist; None = as many as needed.
        quota: Devices that may be used in all; None = those that exist.
        gpu: Device kind, as in the plan; empty = the name of the node kind.
        hosts: Their host names, if known; used by the torchrun scripts.
        partition, constraint, account, qos, reservation, licenses, mem: What Slurm is asked for them.
        zone: Where they are; empty: unknown.
        python: Their interpreter; empty: that of the launch.
        gres: Slurm's generic resource without the number, e.g. ``gpu:a100``; empty on CPU nodes.
        exclusive: Whether the job has its nodes for itself; None: where it uses all GPUs of nodes
            whose cores are not known.
        cpus: Cores of a node; 0: unknown.
    """

    devices: int
    count: int | None = None
    hosts: tuple[str, ...] = ()
    partition: str = ""
    constraint: str = ""
    account: str = ""
    gres: str = ""
    gpu: str = ""
    quota: int | None = None
    zone: str = ""
    python: str = ""
    qos: str = ""
    reservation: str = ""
    licenses: str = ""
    mem: str = ""
    exclusive: bool | None = None
    cpus: int = 0

    def cores(self, ranks: int) -> int:
        """Cores for so many ranks of a node, which share them; 0: unknown."""
        return self.cpus * ranks // self.devices


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the launch.

    Attributes:
        kind: Name of its node kind.
        ranks: The plan's ranks on it, by local rank.
        host: Its name, if known.
    """

    kind: str
    ranks: tuple[int, ...]
    host: str = ""


@dataclass(frozen=True, slots=True)
class Component:
    """Equal nodes in a row, named after the kind of the first: one component of a heterogeneous job.

    Attributes:
        kind: Name of the node kind.
        per_node: Ranks of each node.
        nodes: The nodes.
        is_whole: Whether the ranks use all devices of every node.
    """

    kind: str
    per_node: int
    nodes: tuple[Node, ...]
    is_whole: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks in the order of Slurm's task numbers."""
        return tuple(r for n in self.nodes for r in n.ranks)


def place(plan: Plan, kinds: Mapping[str, NodeKind]) -> list[Node]:
    """Fill nodes with replicas, as the planner does; a TP group never straddles two nodes.

    Args:
        plan: Replicas name their device kind.
        kinds: The cluster's node kinds by name.

    Returns:
        Nodes, the one with rank 0 first.

    Raises:
        PlannerError: An unknown kind, a TP group larger than a node, too few nodes.
    """
    names = list(kinds)
    rooms = [Room(k.gpu or name, k.devices, k.count, k.quota, k.zone) for name, k in kinds.items()]
    ranks: dict[tuple[int, int], list[int]] = {}
    for stage, seated in zip(plan.stages, seat_replicas(plan, rooms)):
        for replica, seats in zip(stage.replicas, seated):
            for rank, seat in zip(replica.ranks, seats):
                ranks.setdefault(seat[:2], []).append(rank)
    return [
        Node(names[room], tuple(sorted(ranks[room, node])), _host(kinds[names[room]].hosts, node))
        for room, node in sorted(ranks, key=lambda place: min(ranks[place]))
    ]


def _host(hosts: Sequence[str], index: int) -> str:
    return hosts[index] if index < len(hosts) else ""


def components(nodes: Sequence[Node], kinds: Mapping[str, NodeKind]) -> list[Component]:
    """Group nodes that the launcher sees as equal; the component with rank 0 comes first."""
    groups: dict[tuple[NodeKind, int], list[Node]] = {}
    for node in nodes:
        kind, ranks = kinds[node.kind], len(node.ranks)
        seen = replace(
            kind,
            gpu=kind.gpu or node.kind,
            # What is asked for the ranks of a node counts, not what else the node has.
            devices=0,
            cpus=kind.cores(ranks),
            count=None,
            quota=None,
            hosts=(),
        )
        groups.setdefault((seen, len(node.ranks)), []).append(node)
    first: dict[NodeKind, str] = {}
    return [
        Component(
            first.setdefault(seen, members[0].kind),
            size,
            tuple(members),
            all(kinds[node.kind].devices == size for node in members),
        )
        for (seen, size), members in groups.items()
    ]


def task_ranks(parts: Sequence[Component]) -> list[int]:
    """The plan's rank of every task, by global task number."""
    return [rank for part in parts for rank in part.ranks]
