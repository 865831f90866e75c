"""In-memory copies of every rank's state after every K iterations, in its own host memory and on another node.

A rank packs its state into one block of host memory and goes on training; a thread sends the block to the rank's
keeper on another node.  Parts that ranks of other nodes hold anyway (plain replicas) are not sent.  Copies of three
iterations are kept: the newest and the one before may be incomplete on some rank, the third is complete.
"""

import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_het.elastic.job import Generation
from megatron_het.elastic.links import Links
from megatron_het.elastic.pieces import Blocks, Piece, blocks_of, collect, common
from megatron_het.elastic.state import Snapshot, Trainee, described

# Number of iterations between copies: the smallest one with which copies keep to SHARE.

SHARE = 0.03  # largest average share of an iteration that copies may take
_SEEN = 9
_TELLS_BYTES = 2**20  # smallest copy from which a link's bandwidth is measured


@dataclass
class Cost:
    """Times and sizes of one copy."""

    held_s: float  # time that the training waited for it, without the wait for the copy before
    sent_s: float = 0.0  # time from then to its arrival, while the training went on
    processor_s: float = 0.0
    held_bytes: int = 0  # bytes packed into host memory
    sent_bytes: int = 0


class Pace:
    """Number of iterations between copies; outlives sessions.

    Args:
        every: The fixed number; 0 for no copies, None to choose it by measured times.
    """

    def __init__(self, every: int | None) -> None:
        self.is_chosen = every is None
        self.every = 1 if every is None else every
        self._iterations: list[float] = []
        self._costs: list[Cost] = []
        self._left_s: float | None = None
        # bytes per second into host memory, and over the link to another node, measured by the last copies; None before
        # the first copy was sent
        self.rates: tuple[float, float] | None = None

    def begin(self) -> None:
        """Reset the measurements at the start of a session, because another plan has other iterations and copies."""
        self._iterations, self._costs, self._left_s = [], [], None
        if self.is_chosen:
            self.every = 1

    def is_due(self, iteration: int) -> bool:
        """Whether a copy is taken after iteration number ``iteration``."""
        return bool(self.every) and iteration % self.every == 0

    def arrived(self, now_s: float) -> None:
        """Note the end of an iteration."""
        if self._left_s is not None:
            self._iterations = [*self._iterations, now_s - self._left_s][-_SEEN:]

    def left(self, now_s: float) -> None:
        """Note the start of the next iteration."""
        self._left_s = now_s

    def copied(self, cost: Cost) -> None:
        """Note the cost of a copy that has been taken and sent."""
        self._costs = [*self._costs, cost][-_SEEN:]
        sent = [cost for cost in self._costs if cost.held_s and cost.sent_s and cost.sent_bytes >= _TELLS_BYTES]
        if sent:
            self.rates = (
                statistics.median(cost.held_bytes / cost.held_s for cost in sent),
                statistics.median(cost.sent_bytes / cost.sent_s for cost in sent),
            )

    def iteration_s(self) -> float:
        """Median time of the last iterations without their copies; 0 before the first one."""
        return statistics.median(self._iterations) if self._iterations else 0.0

    def cost_s(self, *, host_computes: bool) -> float:
        """Median time that the last copies took from training, with the processor time of sending if that is shared."""
        taken = [cost.held_s + (cost.processor_s if host_computes else 0.0) for cost in self._costs]
        return statistics.median(taken) if taken else 0.0

    def wanted(self, *, host_computes: bool) -> int:
        """The smallest number of iterations between copies that keeps to ``SHARE`` without waits for earlier copies.

        Args:
            host_computes: See :meth:`cost_s`.
        """
        iteration_s = self.iteration_s()
        if not iteration_s or not self._costs:
            return 1
        sent_s = statistics.median(cost.sent_s for cost in self._costs)
        share = self.cost_s(host_computes=host_computes) / (SHARE * iteration_s)
        return max(1, math.ceil(share), math.ceil(sent_s / iteration_s))


_KEPT = 3
_ALIGNED = 16
_MEASURED = 4  # number of copies after which the pace is chosen
_FIELDS = ("iteration", "rank", "topology", "common", "numbers", "random")  # fields of a snapshot that are sent

Identity = tuple[str, str, tuple[int, ...], int]  # key that distinguishes a rank's own pieces


class Copies:
    """The in-memory copies of this process, for the case that another one dies; outlives sessions.

    Args:
        every: Number of iterations between copies; 0 for no copies, None to choose it by measured times.
    """

    def __init__(self, every: int | None) -> None:
        self.pace = Pace(every)
        self._snapshots: list[Snapshot] = []
        self._links: Links | None = None
        self._thread: threading.Thread | None = None
        self._keeper: int | None = None
        self._clients: tuple[int, ...] = ()
        self._shared: set[Identity] = set()
        self._kept = 0
        self._broken = False
        self._blocks: Blocks | None = None  # of the session's models
        self._generation: Generation | None = None
        self._lock = threading.Lock()

    @property
    def snapshots(self) -> list[Snapshot]:
        """All snapshots held here, this rank's own and other ranks'."""
        with self._lock:
            return list(self._snapshots)

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot; only the newest three iterations are kept."""
        with self._lock:
            newest = sorted({one.iteration for one in (*self._snapshots, snapshot)})[-_KEPT:]
            self._snapshots = [one for one in (*self._snapshots, snapshot) if one.iteration in newest]

    def open(self, generation: Generation, rank: int, links: Links) -> None:
        """Begin a session, whose ranks ``links`` connect."""
        self._generation, self._links = generation, links
        self._shared, self._kept, self._broken = set(), 0, False
        self.pace.begin()
        keepers = keepers_of(generation.nodes)
        self._keeper = keepers[rank]
        self._clients = tuple(client for client, keeper in enumerate(keepers) if keeper == rank)

    def restored(self, iteration: int) -> None:
        """Drop snapshots of later iterations, because the session restarts from ``iteration``."""
        with self._lock:
            self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.iteration <= iteration]

    def keep(self, session: Any, trainee: Trainee, iteration: int, check: Callable[[], None] = lambda: None) -> None:
        """Copy the state if a copy is due.  All ranks call it at the same boundaries between iterations.

        Args:
            trainee: Model and optimizer.
            check: Called when the state is in host memory; raises if the state may be wrong.
        """
        if self._links is None:
            return
        self.pace.arrived(time.monotonic())
        if self.pace.is_due(iteration):
            self.wait()
            self._copy(session, trainee, iteration, check)
        self.pace.left(time.monotonic())

    def _copy(self, session: Any, trainee: Trainee, iteration: int, check: Callable[[], None]) -> None:
        began_s = time.monotonic()
        session.materialise_parameters()
        if self._blocks is None:
            self._blocks = blocks_of(trainee.models, trainee.args)
        state = collect(trainee.models, trainee.optimizer, trainee.args, self._blocks, is_updated=True)
        asked_s = time.monotonic()
        host_computes = all(tensor.device.type == "cpu" for _, tensor in state.pieces)
        self._agree([piece for piece, _ in state.pieces], host_computes)
        began_s += time.monotonic() - asked_s
        shared = self._shared
        pieces = sorted(state.pieces, key=lambda entry: _identity(entry[0]) in shared)
        number = sum(_identity(piece) not in shared for piece, _ in pieces)
        block, views = _packed(pieces)
        check()
        snapshot = described(trainee, iteration, state, views)
        self.add(snapshot)
        cost = Cost(time.monotonic() - began_s, held_bytes=block.numel(), sent_bytes=_end(snapshot.pieces[:number]))
        if not self._broken and (self._keeper is not None or self._clients):
            task = self._links, snapshot, block, number, cost
            self._thread = threading.Thread(target=self._exchange, args=task, daemon=True)
            self._thread.start()
        else:
            self.pace.copied(cost)

    def wait(self) -> None:
        """Wait until the running copy has arrived or failed; bounded by the timeout of the links."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """End the session; the snapshots stay.

        This does not wait for a running copy.  That copy may wait for a rank whose training waits for this one, and
        this one's connections are closed after this call.
        """
        links, self._links, self._blocks, self._thread = self._links, None, None, None
        if links is not None:
            links.close()

    def _agree(self, own: Sequence[Piece], host_computes: bool) -> None:
        """At copies 1, 2, 4, 8, ...: agree on pieces that other nodes hold anyway, and on the pace of copies.

        It is repeated because optimizers create their state in the first step that is not skipped, which may be any.
        New pieces are sent until then.  Collective over the session's ranks.
        """
        self._kept += 1
        if self._kept & (self._kept - 1) or self._broken:
            return
        assert self._links is not None
        wanted = self.pace.wanted(host_computes=host_computes)
        try:
            answers = self._links.gather({"pieces": [piece.to_json() for piece in own], "every": wanted})
        except RuntimeError:
            self._break(self._links)
            return
        self._shared = self._held_elsewhere(own, [answer["pieces"] for answer in answers])
        if not self.pace.is_chosen or self._kept < _MEASURED:
            return
        self.pace.every = max(answer["every"] for answer in answers)
        if self._links.rank == 0:
            cost_s, iteration_s = self.pace.cost_s(host_computes=host_computes), self.pace.iteration_s()
            times = f"here a copy takes {cost_s:.3f} s, an iteration {iteration_s:.3f} s"
            sys.stdout.write(f"copies of the state in memory: after every {self.pace.every} iterations ({times})\n")

    def _break(self, links: Links | None) -> None:
        """Stop sending copies until the next session, because a rank is lost; the training notices by itself.

        Other ranks may wait for a message of this one, so the connections are closed.
        """
        self._broken = self._broken or links is self._links
        if links is not None:
            links.close()

    def _held_elsewhere(self, own: Sequence[Piece], all_pieces: Sequence[list[Any]]) -> set[Identity]:
        """The own pieces that ranks of other nodes hold as well; ``all_pieces`` has documents of pieces by rank."""
        assert self._links is not None and self._generation is not None
        nodes = self._generation.nodes
        alone = len(set(nodes)) == 1  # on a single node processes take the place of nodes
        here = nodes[self._links.rank]
        elsewhere: dict[tuple[str, str], list[Piece]] = {}
        for rank, documents in enumerate(all_pieces):
            if rank != self._links.rank and (alone or nodes[rank] != here):
                for piece in map(Piece.from_json, documents):
                    elsewhere.setdefault(piece.name, []).append(piece)
        found = set()
        for piece in own:
            left = piece.runs()
            for other in elsewhere.get(piece.name, ()):
                if len(left):
                    left = common(left, other.runs())[2]
            if not len(left):
                found.add(_identity(piece))
        return found

    def _exchange(self, links: Links, snapshot: Snapshot, block: torch.Tensor, number: int, cost: Cost) -> None:
        """Runs on the thread: send this rank's copy to its keeper, and receive those that this rank keeps."""
        began_s, used_s = time.monotonic(), time.thread_time()
        try:
            self._swap(links, snapshot, block, number)
            cost.sent_s, cost.processor_s = time.monotonic() - began_s, time.thread_time() - used_s
            self.pace.copied(cost)
            return
        except RuntimeError:
            pass  # the objects of the error's traceback are released first
        self._break(links)

    def _swap(self, links: Links, snapshot: Snapshot, block: torch.Tensor, number: int) -> None:
        size = _end(snapshot.pieces[:number])
        document = snapshot.document(*_FIELDS, pieces=number)
        head = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        receivers = [] if self._keeper is None else [self._keeper]
        counts = [(client, torch.empty(2, dtype=torch.int64)) for client in self._clients]
        links.swap([(r, torch.tensor([len(head), size])) for r in receivers], counts)
        heads = [(client, torch.empty(int(count[0]), dtype=torch.uint8)) for client, count in counts]
        links.swap([(r, head) for r in receivers], heads)
        blocks = [(client, torch.empty(int(count[1]), dtype=torch.uint8)) for client, count in counts]
        filled = [(client, tensor) for client, tensor in blocks if tensor.numel()]
        links.swap([(r, block[:size]) for r in receivers if size], filled)
        for (_, text), (_, body) in zip(heads, blocks, strict=True):
            if self._links is not links:
                return  # the session is over, and other ranks may have agreed without this copy
            self.add(_unpacked(json.loads(text.numpy().tobytes()), body))


def keepers_of(nodes: Sequence[str]) -> list[int | None]:
    """For each rank the rank that keeps its copy: the next one on another node, or on a single node the next one."""
    size = len(nodes)
    found: list[int | None] = []
    for rank in range(size):
        others = [(rank + step) % size for step in range(1, size)]
        away = [other for other in others if nodes[other] != nodes[rank]]
        # Ranks of a node choose different keepers.
        place = sum(node == nodes[rank] for node in nodes[:rank])
        found.append(away[place % len(away)] if away else next(iter(others), None))
    return found


def _identity(piece: Piece) -> Identity:
    return piece.key, piece.kind, piece.offset, piece.start


def _packed(pieces: Sequence[tuple[Piece, torch.Tensor]]) -> tuple[torch.Tensor, list[tuple[Piece, torch.Tensor]]]:
    """Packs all pieces into one block of host memory; returns the block, and each piece as a view of it."""
    sizes = [_aligned(tensor.nbytes) for _, tensor in pieces]
    block = torch.empty(sum(sizes), dtype=torch.uint8)
    views, at = [], 0
    for (piece, tensor), size in zip(pieces, sizes, strict=True):
        view = block[at : at + tensor.nbytes].view(tensor.dtype)
        view.copy_(tensor)
        views.append((piece, view))
        at += size
    return block, views


def _unpacked(head: dict[str, Any], body: torch.Tensor) -> Snapshot:
    pieces, at = [], 0
    for document in head.pop("pieces"):
        piece = Piece.from_json(document)
        dtype = getattr(torch, piece.dtype)
        pieces.append((piece, body[at : at + piece.size * dtype.itemsize].view(dtype)))
        at += _aligned(piece.size * dtype.itemsize)
    return Snapshot(**head, pieces=pieces)


def _end(pieces: Sequence[tuple[Piece, torch.Tensor]]) -> int:
    return sum(_aligned(tensor.nbytes) for _, tensor in pieces)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
