"""Groups of two ranks, for transfers: who shares one, and in which order they are created."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_het.distributed.creation import create_group

Edge = tuple[int, int]
"""(source, destination), world ranks."""


class Link(NamedTuple):
    """Where the transfers of an edge go.

    Attributes:
        group: The group of the two ranks.
        tag: Tells the purposes that share the group apart.
    """

    group: dist.ProcessGroup
    tag: int


def in_rounds(edges: Iterable[Edge]) -> list[tuple[int, Edge]]:
    """(round, edge), ascending: no rank has two edges of one round.

    A rank that creates its edges in this order never waits in a circle, since the order is the same for all.  The
    chain of ranks that wait for each other is at most as long as there are rounds, and there are fewer rounds than
    twice the most edges of a rank, whatever the size of the world.  In the order of rank numbers the chain would
    be as long as the pipeline.

    Args:
        edges: The same on all ranks that any of them joins.
    """
    taken: dict[int, int] = {}
    found = []
    for edge in sorted(set(edges)):
        rounds = taken.get(edge[0], 0) | taken.get(edge[1], 0)
        free = ~rounds & (rounds + 1)  # the lowest bit that is not set
        for rank in edge:
            taken[rank] = taken.get(rank, 0) | free
        found.append((free.bit_length() - 1, edge))
    return sorted(found)


class PairGroups:
    """This rank's groups of two.  ``close`` destroys them.

    gloo runs the transfers of a group in any order, tells purposes apart by tags, and has a connection for both
    directions: two ranks share one group for everything.  NCCL runs the transfers of a group one after the other, so
    every purpose has groups of its own, and both directions share one only where the transfers of a pair have one
    order on both ranks.

    Args:
        rank: This rank.
        timeout_s: Bound on the creation and on every operation, in seconds.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._groups: dict[tuple[str, Edge], dist.ProcessGroup] = {}
        self._purposes: list[str] = []

    def __len__(self) -> int:
        return len(self._groups)

    def connect(self, edges: Iterable[Edge], backend: str, purpose: str, *, one_order: bool) -> dict[Edge, Link]:
        """The links of this rank's edges; groups that are not there yet are created and connected.

        Collective: all ranks that have an edge call it with the same purposes in the same order.

        Args:
            edges: Of all ranks that are connected to this one by edges; the same on all of them.
            backend: ``nccl`` or ``gloo``.
            purpose: What travels; a name that was not connected before.
            one_order: The transfers of a pair, both directions together, have one order on both ranks.

        Raises:
            GroupError: A group was not created in time.
        """
        if purpose in self._purposes:
            raise ValueError(f"transfers of {purpose!r} are connected already")
        self._purposes.append(purpose)
        shared = backend != "nccl"
        joined = shared or one_order
        wanted = list(edges)
        for _, pair in in_rounds((min(e), max(e)) if joined else e for e in wanted):
            key = ("" if shared else purpose, pair)
            if self._rank in pair and key not in self._groups:
                role = "pair" if shared else f"{purpose} from {pair[0]}"
                self._groups[key] = create_group(role, sorted(pair), backend, self._timeout_s)
                if backend == "nccl":
                    self._move_one(pair, self._groups[key])
        tag = len(self._purposes) - 1 if shared else 0
        key_of = {e: ("" if shared else purpose, (min(e), max(e)) if joined else e) for e in wanted if self._rank in e}
        return {edge: Link(self._groups[key], tag) for edge, key in key_of.items()}

    def _move_one(self, pair: Edge, group: dist.ProcessGroup) -> None:
        """Move one element, so that the communicator exists before the first iteration.

        NCCL connects at the first use, where both ranks wait: in the order of their programs they may wait in a
        circle.
        """
        probe = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
        if self._rank == pair[0]:
            dist.send(probe, pair[1], group=group)
        else:
            dist.recv(probe, pair[0], group=group)

    def close(self) -> None:
        """Destroy the groups, in the order of creation.  Pending operations must have completed."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop(next(iter(self._groups))))
