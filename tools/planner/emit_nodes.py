"""Which node runs which ranks: the part of a launch that plan and cluster decide together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_het.plan import Plan
from tools.planner.errors import PlannerError


@dataclass(frozen=True, slots=True)
class NodeKind:
    """What the launcher has to know about nodes of one kind.

    Attributes:
        devices: GPUs (or ranks, on CPU nodes) that one node offers.
        count: Nodes that exist; None = as many as needed.
        hosts: Their host names, if known; used by the torchrun scripts.
        partition, constraint, account: Slurm's names for them.
        gres: Slurm's generic resource without the number, e.g. ``gpu:a100``; empty on CPU nodes.
    """

    devices: int
    count: int | None = None
    hosts: tuple[str, ...] = ()
    partition: str = ""
    constraint: str = ""
    account: str = ""
    gres: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the launch.

    Attributes:
        kind: Device kind, as in the plan.
        ranks: The plan's ranks on it, by local rank.
        host: Its name, if known.
    """

    kind: str
    ranks: tuple[int, ...]
    host: str = ""


@dataclass(frozen=True, slots=True)
class Component:
    """Equal nodes in a row: one component of a heterogeneous job."""

    kind: str
    per_node: int
    nodes: tuple[Node, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks in the order of Slurm's task numbers."""
        return tuple(r for n in self.nodes for r in n.ranks)


def place(plan: Plan, kinds: Mapping[str, NodeKind]) -> list[Node]:
    """Fill nodes with replicas in rank order; a TP group never straddles two nodes.

    Args:
        plan: Replicas name their device kind.
        kinds: The cluster's node kinds by device kind.

    Returns:
        Nodes, the one with rank 0 first.

    Raises:
        PlannerError: An unknown kind, a TP group larger than a node, too few nodes.
    """
    filling: dict[str, list[list[int]]] = {}
    order: list[tuple[str, int]] = []
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            where = f"stages[{s}].replicas[{q}]"
            kind = kinds.get(replica.device)
            if kind is None:
                raise PlannerError(
                    "plan", f"{where}.device", replica.device, "the cluster has no nodes of this kind",
                    f"Known: {', '.join(sorted(kinds))}",
                )
            if replica.tp > kind.devices:
                raise PlannerError(
                    "plan", f"{where}.ranks", list(replica.ranks),
                    f"a TP group of {replica.tp} does not fit a node with {kind.devices} devices",
                )
            nodes = filling.setdefault(replica.device, [])
            if not nodes or len(nodes[-1]) + replica.tp > kind.devices:
                nodes.append([])
                order.append((replica.device, len(nodes) - 1))
            nodes[-1].extend(replica.ranks)
    for name, nodes in filling.items():
        available = kinds[name].count
        if available is not None and len(nodes) > available:
            raise PlannerError(
                "plan", f"nodes of {name}", len(nodes), f"the cluster has {available}",
                "Make the plan again for this cluster",
            )
    return [
        Node(name, tuple(filling[name][i]), _host(kinds[name].hosts, i)) for name, i in order
    ]


def _host(hosts: Sequence[str], index: int) -> str:
    return hosts[index] if index < len(hosts) else ""


def components(nodes: Sequence[Node]) -> list[Component]:
    """Group nodes of the same kind and size; the component with rank 0 comes first."""
    groups: dict[tuple[str, int], list[Node]] = {}
    for node in nodes:
        groups.setdefault((node.kind, len(node.ranks)), []).append(node)
    return [Component(kind, size, tuple(members)) for (kind, size), members in groups.items()]


def task_ranks(parts: Sequence[Component]) -> list[int]:
    """The plan's rank of every task, by global task number."""
    return [rank for part in parts for rank in part.ranks]
