"""Packing of TP groups into nodes, and the ranks of each node: for planner, ``check`` and launch files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from megatron_het.plan import Plan, Replica

from ..errors import PlannerError
from .cluster import NodeGroup


class Room(NamedTuple):
    """A group of equal nodes, or their devices of one kind."""

    gpu: str  # kind of GPU, as named in plans
    devices: int  # GPUs in each node
    # number of nodes; None: as many as needed
    count: int | None = None  # type: ignore[assignment]  # hides tuple.count, which is not used
    quota: int | None = None  # largest number of GPUs that may be used; None: all
    zone: str = ""  # zone of the nodes; empty: unknown
    shared_node: str = ""  # name shared by rooms that are devices of the same nodes; empty if there is no other room

    @property
    def total(self) -> int | None:
        """Number of GPUs that may be used; None: as many as needed."""
        there = None if self.count is None else self.count * self.devices
        return min((n for n in (there, self.quota) if n is not None), default=None)


class Seat(NamedTuple):
    """Position of a rank: entry of ``cluster.nodes``, node within the entry, GPU within the entry's GPUs of the node.

    Entries that are GPUs of the same nodes share ``first_pool``, the index of the first of them; -1 for others.
    """

    pool: int
    node: int
    gpu: int
    first_pool: int = -1

    @property
    def host(self) -> tuple[int, int]:
        """Identity of the node, equal for all its ranks, also of different kinds of device."""
        return (self.pool if self.first_pool < 0 else self.first_pool), self.node


Wanted = tuple[Sequence[int], int]  # allowed rooms of a TP group in order of preference, and its size


def pack(rooms: Sequence[Room], wanted: Sequence[Wanted]) -> list[list[Seat]] | None:
    """Seats of TP groups, each inside one node.

    Nodes are filled in order, so that neighbouring stages share nodes if possible.  If the groups do not fit in the
    given order, the largest are placed first.

    Returns:
        The seats of each group, in the order of ``wanted``; None if they do not fit.
    """
    order = range(len(wanted))
    for turns in (order, sorted(order, key=lambda i: -wanted[i][1])):
        found = _fill(rooms, [wanted[i] for i in turns])
        if found is not None:
            seats = dict(zip(turns, found))
            return [seats[i] for i in order]
    return None


class _Filled:
    """Used GPUs of a room: first fit, with a new node when no used one has space."""

    def __init__(self, room: Room) -> None:
        self.room, self.total = room, room.total
        self.used: list[int] = []
        self.taken = 0
        self.first = dict.fromkeys(range(room.devices + 1), 0)
        """By group size: the first node that may have space for it (nodes only get fuller)."""

    def take(self, size: int) -> tuple[int, int] | None:
        """Takes GPUs for a TP group; returns the node and its first GPU, or None if there is no space."""
        room = self.room
        if size > room.devices or (self.total is not None and self.taken + size > self.total):
            return None
        node = self.first[size]
        while node < len(self.used) and self.used[node] + size > room.devices:
            node += 1
        self.first[size] = node
        if node == len(self.used):
            if node == room.count:
                return None
            self.used.append(0)
        at = self.used[node]
        self.used[node] += size
        self.taken += size
        return node, at


def _fill(rooms: Sequence[Room], wanted: Sequence[Wanted]) -> list[list[Seat]] | None:
    filled = [_Filled(room) for room in rooms]
    names = [room.shared_node for room in rooms]
    first_pool = [names.index(name) if name else -1 for name in names]
    out = []
    for choices, size in wanted:
        for r in choices:
            place = filled[r].take(size)
            if place is not None:
                node, first = place
                out.append([Seat(r, node, first + t, first_pool[r]) for t in range(size)])
                break
        else:
            return None
    return out


def seat_replicas(plan: Plan, rooms: Sequence[Room], file: str = "plan") -> list[list[list[Seat]]]:
    """Seats of a plan's ranks, ``[stage][replica][position in replica.ranks]``.

    Rooms are matched in order by the name of the GPU, and by the zone if the plan has one.  The node groups that the
    plan names are taken if all replicas fit there.

    Raises:
        PlannerError: An unknown GPU or zone, a TP group larger than every node with such GPUs, more GPUs
            than the cluster has, or TP groups that do not fit into its nodes.
    """
    wanted: list[Wanted] = []
    named: list[Wanted] = []
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            where = f"stages[{s}].replicas[{q}]"
            fitting = {
                device: _choices(replica, device, rooms, where, file) for device in dict.fromkeys(replica.devices)
            }
            wanted += [(fitting[device], replica.tp) for device in replica.devices]
            said = {device: [r for r in fitting[device] if r == replica.node_group] for device in fitting}
            named += [(said[device] or fitting[device], replica.tp) for device in replica.devices]
    found = pack(rooms, named) or pack(rooms, wanted)
    if found is None:
        raise _too_many(plan, rooms, file)
    groups = iter(found)
    return [[[seat for _ in range(r.cp) for seat in next(groups)] for r in stage.replicas] for stage in plan.stages]


def strayed(plan: Plan, seated: Sequence[Sequence[Sequence[Seat]]]) -> list[str]:
    """A note on the replicas that are not in the node groups that the plan names, if there are any."""
    pairs = [pair for stage, row in zip(plan.stages, seated) for pair in zip(stage.replicas, row)]
    lost = {r.node_group: r.device for r, seats in pairs if r.node_group not in (-1, *(seat.pool for seat in seats))}
    named = ", ".join(f"{group} ({device})" for group, device in sorted(lost.items()))
    problem = "the cluster has no such nodes, or not all replicas fit there: entries with its GPU are filled in order"
    return [f"node_group {named}: {problem}"] if lost else []


def _choices(replica: Replica, device: str, rooms: Sequence[Room], where: str, file: str) -> list[int]:
    """Indices of the rooms that have a replica's kind of device, zone and TP size."""
    choices = [r for r, room in enumerate(rooms) if room.gpu == device]
    if not choices:
        key = f"{where}.{'cp_devices' if replica.cp_devices else 'device'}"
        hint = f"It has {', '.join(sorted({room.gpu for room in rooms}))}"
        raise PlannerError(file, key, device, "the cluster has no such GPU", hint)
    choices = [r for r in choices if not replica.zone or rooms[r].zone in ("", replica.zone)]
    if not choices:
        zones = sorted({room.zone for room in rooms if room.gpu == device})
        problem = f"the cluster has no {device} there"
        raise PlannerError(file, f"{where}.zone", replica.zone, problem, f"It has them in {', '.join(zones)}")
    largest = max(rooms[r].devices for r in choices)
    if replica.tp > largest:
        problem = f"a TP group of {replica.tp} does not fit a node with {largest} devices"
        raise PlannerError(file, f"{where}.ranks", list(replica.ranks), problem)
    return choices


def _too_many(plan: Plan, rooms: Sequence[Room], file: str) -> PlannerError:
    used: dict[str, int] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            for device in replica.devices:
                used[device] = used.get(device, 0) + replica.tp
    for gpu, count in used.items():
        there = [room.total for room in rooms if room.gpu == gpu]
        if None not in there and count > sum(n for n in there if n is not None):
            problem = f"the plan uses {count} of them, more than the cluster has"
            hint = f"The cluster has {sum(n for n in there if n is not None)}"
            return PlannerError(file, "stages[*].replicas[*].device", gpu, problem, hint)
    sizes = [[r.tp for r in stage.replicas] for stage in plan.stages]
    problem, hint = "the TP groups do not fit into the cluster's nodes", "Make the plan again for this cluster"
    return PlannerError(file, "stages[*].replicas[*].ranks", sizes, problem, hint)


# Ranks of each node in a launch, from plan and cluster.


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the launch."""

    kind: str  # name of its node group; with devices of several kinds, that of the first used one
    ranks: tuple[int, ...]  # the plan's ranks on this node, by local rank
    host: str = ""  # host name, if known
    kinds: tuple[str, ...] = ()  # node group of every local rank's device, if several share the node; else empty
    devices: tuple[int, ...] = ()  # device number of every local rank in such a node; else empty

    @property
    def name(self) -> str:
        """Names of the node groups of its devices, joined with ``+``."""
        return " + ".join(dict.fromkeys(self.kinds)) or self.kind

    def kind_of(self, rank: int) -> str:
        """Name of the node group of a rank's device."""
        return self.kinds[self.ranks.index(rank)] if self.kinds else self.kind


@dataclass(frozen=True, slots=True)
class Component:
    """Nodes with equal resources: one component of a heterogeneous job of Slurm."""

    kind: str  # name of the first node's group
    per_node: int  # ranks of each node
    nodes: tuple[Node, ...]
    is_whole: bool = False  # whether the ranks use all devices of every node

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks in the order of Slurm's task numbers."""
        return tuple(r for n in self.nodes for r in n.ranks)


def place(plan: Plan, kinds: Mapping[str, NodeGroup]) -> list[Node]:
    """The nodes of a plan with their ranks, by :func:`seat_replicas` like in the planner; rank 0's node is the first.

    Raises:
        PlannerError: See :func:`seat_replicas`.
    """
    names = list(kinds)
    rooms = [Room(k.gpu, k.gpus_per_node, k.count, k.quota, k.zone, k.shared_node) for k in kinds.values()]
    found: dict[tuple[int, int], list[tuple[int, int, str]]] = {}  # device, rank and kind, by node
    for stage, seated in zip(plan.stages, seat_replicas(plan, rooms)):
        for replica, seats in zip(stage.replicas, seated):
            for rank, seat in zip(replica.ranks, seats):
                name = names[seat.pool]
                # In a node with several kinds local ranks are ordered by device number, else by rank.
                device = kinds[name].devices[seat.gpu] if kinds[name].shared_node else 0
                found.setdefault(seat.host, []).append((device, rank, name))
    nodes = []
    for (_, number), members in sorted(found.items(), key=lambda item: min(rank for _, rank, _ in item[1])):
        devices, ranks, there = zip(*sorted(members), strict=True)
        kind = kinds[there[0]]
        more = (there, devices) if kind.shared_node else ((), ())
        nodes.append(Node(there[0], ranks, kind.hosts[number] if number < len(kind.hosts) else "", *more))
    return nodes


def asked_gres(node: Node, kinds: Mapping[str, NodeGroup]) -> str:
    """Slurm's generic resources to request for a node, with their numbers; empty on CPU nodes.

    For a node with several kinds: the used number of each kind if each has its own name, else all of the node.
    """
    kind = kinds[node.kind]
    if not node.kinds or not kind.slurm.gres:
        return f"{kind.slurm.gres}:{len(node.ranks)}" if kind.slurm.gres else ""
    if _has_names(kind, kinds):
        return ",".join(f"{kinds[name].slurm.gres}:{count}" for name, count in Counter(node.kinds).items())
    return f"{kind.slurm.gres}:{_devices_of_nodes(kind, kinds)}"


def chosen_devices(node: Node, kinds: Mapping[str, NodeGroup]) -> str:
    """``CUDA_VISIBLE_DEVICES`` for a node with several kinds, if Slurm cannot select the used devices; else empty."""
    kind = kinds[node.kind]
    if not node.kinds or (kind.slurm.gres and _has_names(kind, kinds)):
        return ""
    if len(node.devices) == _devices_of_nodes(kind, kinds):
        return ""
    return ",".join(map(str, node.devices))


def devices_of(node: Node, kinds: Mapping[str, NodeGroup]) -> list[str]:
    """Kind of GPU of every local rank, as named in plans."""
    return [kinds[name].gpu for name in node.kinds or [node.kind] * len(node.ranks)]


def device_words(node: Node, kinds: Mapping[str, NodeGroup]) -> str:
    """The devices of a node in the form of ``het-run --device``."""
    if not node.kinds:
        return kinds[node.kind].gpu
    return ",".join(f"{name}*{len(list(members))}" for name, members in groupby(devices_of(node, kinds)))


def _in_same_nodes(kind: NodeGroup, kinds: Mapping[str, NodeGroup]) -> list[NodeGroup]:
    return [k for k in kinds.values() if k.shared_node == kind.shared_node]


def _devices_of_nodes(kind: NodeGroup, kinds: Mapping[str, NodeGroup]) -> int:
    return sum(k.gpus_per_node for k in _in_same_nodes(kind, kinds))


def _has_names(kind: NodeGroup, kinds: Mapping[str, NodeGroup]) -> bool:
    """Whether the ``gres`` of all kinds in these nodes are different and include a type (``gpu:a100``)."""
    names = [k.slurm.gres or "" for k in _in_same_nodes(kind, kinds)]
    return len(set(names)) == len(names) and all(":" in name for name in names)


def whole_kind(node: Node, kinds: Mapping[str, NodeGroup]) -> NodeGroup:
    """The node group of a node; for a node with several kinds, a group with all of its devices."""
    kind = kinds[node.kind]
    if not node.kinds:
        return kind
    gpus = " + ".join(dict.fromkeys(kinds[name].gpu for name in node.kinds))
    slurm = kind.slurm.model_copy(update={"gres": asked_gres(node, kinds)})
    return kind.model_copy(update={"gpu": gpus, "gpus_per_node": _devices_of_nodes(kind, kinds), "slurm": slurm})


def components(nodes: Sequence[Node], kinds: Mapping[str, NodeGroup]) -> list[Component]:
    """Group nodes that need equal resources; the component with rank 0 comes first."""
    groups: dict[tuple[tuple[object, ...], int, tuple[int, ...]], list[Node]] = {}
    for node in nodes:
        kind, ranks = whole_kind(node, kinds), len(node.ranks)
        # Compare the CPU cores that are requested for the ranks, not those of the node.
        slurm = kind.slurm.model_copy(update={"cpus": kind.cores(ranks)})
        seen = kind.gpu, kind.zone, kind.python, kind.shared_node, slurm
        groups.setdefault((seen, ranks, node.devices), []).append(node)
    first: dict[tuple[object, ...], str] = {}
    return [
        Component(
            first.setdefault(seen, members[0].kind),
            size,
            tuple(members),
            all(whole_kind(node, kinds).gpus_per_node == size for node in members),
        )
        for (seen, size, _), members in groups.items()
    ]


def task_ranks(parts: Sequence[Component]) -> list[int]:
    """The plan's rank of every task, by global task number."""
    return [rank for part in parts for rank in part.ranks]
