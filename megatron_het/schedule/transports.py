"""Can a program deadlock?  Models of how transfers are executed.

* ``blocking``: a send or receive returns when the transfer is done, as with plain ``send`` and ``recv``, and the parts
  of a split vocabulary begin when all devices have come to them (``graph.meetings``).
* ``rank``: transfers are posted without waiting and run one after the other in one queue per device (one
  communicator for the whole pipeline).  A compute operation waits for the receives that it needs.
* ``pair``: the same with one queue per pair of devices (NCCL's communicators for unbatched send and receive).
* ``edge``: the same with one queue per directed pair (one process group per direction).

Collectives of the replicas of a stage are a matter of their own, see :func:`deadlock_of_collectives`: the models
above look at transfers alone.

A transfer runs when both of its ends are at the head of their queues.  ``blocking`` is the strictest: if a
program runs there, its lists are projections of one total order in which both ends of every transfer are
neighbours, and the first unfinished transfer of that order can always finish, whatever the queues.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_het.schedule.graph import Graph, collection_paused, describe, waits_to_meet
from megatron_het.schedule.ir import SENDS, TRANSFERS, Op

TRANSPORTS = ("blocking", "rank", "pair", "edge")


@dataclass(frozen=True, slots=True)
class Stuck:
    """One device of a deadlock.

    Attributes:
        device, position, op: where it stopped.
        message: in words, with the neighbours and what it waits for.
    """

    device: int
    position: int
    op: Op
    message: str


@collection_paused()
def deadlock(graph: Graph, transport: str) -> tuple[Stuck, ...]:
    """Where every device stops when a program runs on a transport; empty when it does not deadlock.

    Raises:
        ValueError: an unknown transport.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport = {transport!r}: unknown (known: {', '.join(TRANSPORTS)})")
    if transport == "blocking":
        return _blocking(graph)
    return _Queued(graph, transport, graph.waits).run()


@collection_paused()
def deadlock_of_collectives(graph: Graph) -> tuple[Stuck, ...]:
    """Where every device stops when who waits for a collective waits for all replicas of the stage to come to it.

    Transfers have one queue per pair of devices (``pair``), as NCCL's in the executor; empty without such collectives.
    """
    waits = graph.together()
    return _Queued(graph, "pair", waits).run() if waits is not graph.waits else ()


def deadlocks(graph: Graph) -> dict[str, tuple[Stuck, ...]]:
    """:func:`deadlock` for every transport; the others are free when ``blocking`` is."""
    found = {"blocking": deadlock(graph, "blocking")}
    for name in TRANSPORTS[1:]:
        found[name] = deadlock(graph, name) if found["blocking"] else ()
    return found


def _blocking(graph: Graph) -> tuple[Stuck, ...]:
    limits, waits, other = graph.first[1:], waits_to_meet(graph), graph.other_end
    position = graph.first[:-1]
    device_of = graph.device
    is_transfer = [op.kind in TRANSFERS for op in graph.ops]
    done = bytearray(len(graph.ops))
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(limits)))[::-1]
    while ready:
        d = ready.pop()
        i, limit = position[d], limits[d]
        while i < limit:
            if done[i]:
                i += 1
                continue
            if is_transfer[i]:
                j = other[i]
                peer = device_of[j] if j >= 0 else -1
                if j < 0 or position[peer] != j:
                    break  # the peer wakes this device when it gets there
                done[i] = done[j] = 1
                if i in waiting:
                    ready += waiting.pop(i)
                if j in waiting:
                    ready += waiting.pop(j)
                ready.append(peer)
            else:
                for j in waits[i]:
                    if not done[j]:
                        waiting.setdefault(j, []).append(d)
                        break
                else:
                    done[i] = 1
                    if i in waiting:
                        ready += waiting.pop(i)
                    i += 1
                    continue
                break
            i += 1
        position[d] = i
        if i < limit and is_transfer[i] and other[i] >= 0 and position[device_of[other[i]]] == other[i]:
            ready.append(d)
    return _report(graph, waits, position, limits, done)


def _report(
    graph: Graph, waits: Sequence[Sequence[int]], position: list[int], limits: list[int], done: bytearray
) -> tuple[Stuck, ...]:
    out = []
    for d, i in enumerate(position):
        if i >= limits[d]:
            continue
        op, at = graph.ops[i], i - graph.first[d]
        blocker = next((j for j in waits[i] if not done[j]), -1)
        if op.kind in TRANSFERS:
            blocker = graph.other_end[i]
        reason = "waits for its missing other end"
        if blocker >= 0:
            other, where = graph.where(blocker)
            reason = f"waits for {graph.ops[blocker]} of device {graph.program.devices[other]}, position {where}"
            if position[other] < limits[other] and other != d and blocker > position[other]:
                reason += f", which is at {graph.ops[position[other]]}"
        out.append(Stuck(d, at, op, f"{describe(graph.program, d, at)} {reason}"))
    return tuple(out)


class _Queued:
    """Transfers in queues; see the module's text."""

    def __init__(self, graph: Graph, transport: str, waits: Sequence[Sequence[int]]) -> None:
        self.graph, self.waits = graph, waits
        keys: dict[str, Callable[[int, int, bool], tuple[int, ...]]] = {
            "rank": lambda d, peer, send: (d,),
            "pair": lambda d, peer, send: (d, peer),
            "edge": lambda d, peer, send: (d, peer, send),
        }
        self.key = keys[transport]
        self.queues: dict[tuple[int, ...], deque[int]] = {}
        self.queue_of: dict[int, deque[int]] = {}
        self.done = bytearray(len(graph.ops))
        self.waiting: dict[int, list[int]] = {}
        self.ready = list(range(len(graph.first) - 1))[::-1]
        self.position = graph.first[:-1]

    def run(self) -> tuple[Stuck, ...]:
        graph, limits = self.graph, self.graph.first[1:]
        while self.ready:
            d = self.ready.pop()
            while self.position[d] < limits[d]:
                i = self.position[d]
                op = graph.ops[i]
                if op.kind in TRANSFERS:
                    self._post(d, i, op)
                else:
                    blocker = next((j for j in self.waits[i] if not self.done[j]), -1)
                    if blocker >= 0:
                        self.waiting.setdefault(blocker, []).append(d)
                        break
                    self._finish(i)
                self.position[d] += 1
        stuck = _report(graph, self.waits, self.position, limits, self.done)
        return stuck or self._unfinished()

    def _post(self, device: int, i: int, op: Op) -> None:
        queue = self.queues.setdefault(self.key(device, op.peer, op.kind in SENDS), deque())
        queue.append(i)
        self.queue_of[i] = queue
        if queue[0] == i:
            self._match(i)

    def _match(self, head: int) -> None:
        """Runs a transfer whose ends are both heads of their queues, and those that this uncovers."""
        heads = [head]
        while heads:
            i = heads.pop()
            j = self.graph.other_end[i]
            if self.done[i] or j < 0 or j not in self.queue_of:
                continue
            if self.queue_of[i][0] != i or self.queue_of[j][0] != j:
                continue
            for node in (i, j):
                queue = self.queue_of[node]
                queue.popleft()
                self._finish(node)
                if queue:
                    heads.append(queue[0])

    def _finish(self, i: int) -> None:
        self.done[i] = 1
        self.ready += self.waiting.pop(i, ())

    def _unfinished(self) -> tuple[Stuck, ...]:
        """Transfers that nobody waits for but that never run: the buffers are never released."""
        out = []
        for queue in self.queues.values():
            if queue:
                d, at = self.graph.where(queue[0])
                text = f"{describe(self.graph.program, d, at)} is never matched at the head of its queue"
                out.append(Stuck(d, at, self.graph.ops[queue[0]], text))
        return tuple(out)


__all__ = ["TRANSPORTS", "Stuck", "deadlock", "deadlock_of_collectives", "deadlocks"]
