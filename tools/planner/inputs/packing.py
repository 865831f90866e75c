"""TP groups into nodes: one way for the planner, for ``check`` and for the launch files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_het.plan import Plan

from ..errors import PlannerError


class Room(NamedTuple):
    """Equal nodes.

    Attributes:
        gpu: Kind of GPU, as plans name it.
        devices: GPUs in each node.
        count: Nodes that there are; None: as many as needed.
        quota: GPUs that may be used in all; None: those that there are.
        zone: Where they are; empty: unknown.
        shared_node: Name of the nodes where other rooms have more devices of the same nodes; empty: none.
    """

    gpu: str
    devices: int
    count: int | None = None  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    quota: int | None = None
    zone: str = ""
    shared_node: str = ""

    @property
    def total(self) -> int | None:
        """GPUs that may be used; None: as many as needed."""
        there = None if self.count is None else self.count * self.devices
        return min((n for n in (there, self.quota) if n is not None), default=None)


class Seat(NamedTuple):
    """Where a rank sits: entry of ``cluster.nodes``, node within the entry, GPU within those of the entry in the node.

    Entries that are GPUs of the same nodes have the same ``first_pool``, that of the first of them; -1 for others.
    """

    pool: int
    node: int
    gpu: int
    first_pool: int = -1

    @property
    def host(self) -> tuple[int, int]:
        """The node: the same for all ranks on it, whatever their kinds."""
        return (self.pool if self.first_pool < 0 else self.first_pool), self.node


Wanted = tuple[Sequence[int], int]
"""Rooms that a TP group may sit in, in order of preference, and its size."""


def pack(rooms: Sequence[Room], wanted: Sequence[Wanted]) -> list[list[Seat]] | None:
    """Seats of TP groups, none of which straddles nodes.

    Nodes are filled in order, so that neighbouring stages share nodes and ranks of a node stay together
    where that is possible; large TP groups are seated first when small ones would leave gaps.

    Returns:
        The seats of each group, in the order of ``wanted``; None when they do not fit.
    """
    order = range(len(wanted))
    for turns in (order, sorted(order, key=lambda i: -wanted[i][1])):
        found = _fill(rooms, [wanted[i] for i in turns])
        if found is not None:
            seats = dict(zip(turns, found))
            return [seats[i] for i in order]
    return None


class _Filled:
    """A room that is being filled: the first node with enough space is taken, opened if need be."""

    def __init__(self, room: Room) -> None:
        self.room, self.total = room, room.total
        self.used: list[int] = []
        self.taken = 0
        self.first = dict.fromkeys(range(room.devices + 1), 0)
        """Per size, nodes before this one have no space for it (nodes only get fuller)."""

    def take(self, size: int) -> tuple[int, int] | None:
        """Node and its first GPU for a TP group; None where there is no space."""
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

    Rooms are matched by the name of the GPU, and by the zone where the plan says one, in their order.

    Args:
        file: What errors name.

    Raises:
        PlannerError: A GPU that is not there, a TP group larger than every node with such GPUs, more GPUs
            than there are, or TP groups that leave gaps in the nodes.
    """
    wanted: list[Wanted] = []
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            where = f"stages[{s}].replicas[{q}]"
            choices = [r for r, room in enumerate(rooms) if room.gpu == replica.device]
            if not choices:
                raise PlannerError(
                    file,
                    f"{where}.device",
                    replica.device,
                    "the cluster has no such GPU",
                    f"It has {', '.join(sorted({room.gpu for room in rooms}))}",
                )
            choices = [r for r in choices if not replica.zone or rooms[r].zone in ("", replica.zone)]
            if not choices:
                zones = sorted({room.zone for room in rooms if room.gpu == replica.device})
                raise PlannerError(
                    file,
                    f"{where}.zone",
                    replica.zone,
                    f"the cluster has no {replica.device} there",
                    f"It has them in {', '.join(zones)}",
                )
            largest = max(rooms[r].devices for r in choices)
            if replica.tp > largest:
                raise PlannerError(
                    file,
                    f"{where}.ranks",
                    list(replica.ranks),
                    f"a TP group of {replica.tp} does not fit a node with {largest} devices",
                )
            wanted += [(choices, replica.tp)] * replica.cp
    found = pack(rooms, wanted)
    if found is None:
        raise _too_many(plan, rooms, file)
    groups = iter(found)
    return [[[seat for _ in range(r.cp) for seat in next(groups)] for r in stage.replicas] for stage in plan.stages]


def _too_many(plan: Plan, rooms: Sequence[Room], file: str) -> PlannerError:
    used: dict[str, int] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            used[replica.device] = used.get(replica.device, 0) + len(replica.ranks)
    for gpu, count in used.items():
        there = [room.total for room in rooms if room.gpu == gpu]
        if None not in there and count > sum(n for n in there if n is not None):
            return PlannerError(
                file,
                "stages[*].replicas[*].device",
                gpu,
                f"the plan uses {count} of them, more than the cluster has",
                f"The cluster has {sum(n for n in there if n is not None)}",
            )
    return PlannerError(
        file,
        "stages[*].replicas[*].ranks",
        [[r.tp for r in s.replicas] for s in plan.stages],
        "the TP groups do not fit into the cluster's nodes",
        "Make the plan again for this cluster",
    )
