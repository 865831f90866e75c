"""Point-to-point transfers between ranks: posting, waiting, and saying which one failed.

The groups are those of ``distributed/groups.py``.  They are connected before the first iteration.

Transports:

- ``nccl``: device tensors travel directly.
- ``gloo``: host tensors travel directly (CPU training).
- ``staged``: tensors are copied to host memory, travel over gloo, and are copied back.  For programs whose
  transfers may form a cycle, and for devices without a common communication library.

Every wait is bounded by the timeout, and every failure names the operation and the peer.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.distributed import Edge, Link, PairGroups
from megatron_het.report import Arrival, TransferLog

Moment = torch.cuda.Event  # recorded on the compute stream of a device
_REMEMBERED = 6


class TransferError(RuntimeError):
    """A transfer failed or timed out.  The message names operation, peer and cause."""


@dataclass(slots=True)
class PendingReceive:
    """A posted receive of one piece."""

    work: dist.Work
    target: torch.Tensor
    host: torch.Tensor | None
    peer: int
    label: str
    arrival: Arrival | None = None


@dataclass(slots=True)
class _PendingSend:
    work: dist.Work
    tensor: torch.Tensor  # kept alive until the transfer is done
    peer: int
    label: str


@dataclass(eq=False)
class Channels:
    """This rank's ends of all edges that a plan's programs use."""

    links: Mapping[Edge, Link]  # the links of this rank's edges (``distributed/groups.py``)
    transport: str  # ``nccl``, ``gloo`` or ``staged``
    timeout_s: float  # bound on every wait, in seconds
    rank: int
    # Sends to one peer that may be in flight on gloo, None for any number.  With many small transfers, as of slices,
    # tensors of finished sends would otherwise fill the memory until the end of the iteration.  Not for programs with
    # collectives of replicas between their operations.
    pending_per_edge: int | None = None

    def __post_init__(self) -> None:
        self._timeout = timedelta(seconds=self.timeout_s)
        self._sends: list[_PendingSend] = []
        self._posting: torch.cuda.Stream | None = None
        self.log: TransferLog | None = None  # where transfers are logged; None for nowhere
        # the last transfers, in words, with the time of their post; for messages
        self.posted: deque[tuple[float, str]] = deque(maxlen=_REMEMBERED)

    @property
    def on_device(self) -> bool:
        """Whether transfers run on the device (``nccl``); the host sometimes has to wait for these explicitly."""
        return self.transport == "nccl"

    def moment(self, device: torch.device) -> Moment | None:
        """Record an event on the compute stream; None where transfers do not run on a CUDA device."""
        if not self.on_device or device.type != "cuda":
            return None
        return torch.cuda.current_stream(device).record_event()

    @classmethod
    def open(
        cls,
        pairs: PairGroups,
        purpose: str,
        edges: Iterable[Edge],
        transport: str,
        timeout_s: float,
        rank: int,
        *,
        pending_per_edge: int | None = None,
        one_order: bool = False,
    ) -> "Channels":
        """Connect a purpose and make its channels; see :meth:`PairGroups.connect`, which is collective."""
        links = pairs.connect(edges, "nccl" if transport == "nccl" else "gloo", purpose, one_order=one_order)
        return cls(links, transport, timeout_s, rank, pending_per_edge)

    def send(self, tensor: torch.Tensor, dst: int, label: str, after: Moment | None = None) -> None:
        """Post a send; the tensor is kept until ``wait_sends`` or its completion is seen.

        Args:
            after: The send waits for this event of the compute stream; None for all work queued so far.
        """
        self._drop_finished_sends(dst)
        if self.transport == "staged":
            # The default keeps strides, which gloo refuses.  The host waits here: gloo sends from host memory.
            tensor = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        elif not tensor.is_contiguous():
            tensor = tensor.contiguous()
        try:
            link = self.links[self.rank, dst]
            with self._ordered(after):
                work = dist.isend(tensor, dst, group=link.group, tag=link.tag)
        except RuntimeError as error:
            raise self._failure("send to", dst, label, error) from error
        if work is None:
            raise self._failure("send to", dst, label, "this rank is not in the group")
        self.posted.append((time.monotonic(), f"send to rank {dst} ({label})"))
        if self.log is not None:
            self.log.sent(dst)
        self._sends.append(_PendingSend(work, tensor, dst, label))

    def receive(self, target: torch.Tensor, src: int, label: str, after: Moment | None = None) -> PendingReceive:
        """Post a receive into a contiguous view, which ``wait_receive`` completes; ``after`` as for :meth:`send`."""
        host = None
        if self.transport == "staged":
            host = torch.empty_like(target, device="cpu", pin_memory=target.is_cuda)
        try:
            link = self.links[src, self.rank]
            with self._ordered(after):
                work = dist.irecv(target if host is None else host, src, group=link.group, tag=link.tag)
        except RuntimeError as error:
            raise self._failure("receive from", src, label, error) from error
        if work is None:
            raise self._failure("receive from", src, label, "this rank is not in the group")
        self.posted.append((time.monotonic(), f"receive from rank {src} ({label})"))
        arrival = self.log.receiving(src) if self.log is not None else None
        return PendingReceive(work, target, host, src, label, arrival)

    def wait_receive(self, pending: PendingReceive) -> None:
        """Block until the data is there (on NCCL: until the current stream is ordered after it)."""
        arrival = pending.arrival
        if arrival is not None and self.log is not None:
            arrival.waited = self.log.now()
        self._wait(pending.work, "receive from", pending.peer, pending.label)
        if arrival is not None and self.log is not None:
            arrival.ended = self.log.now()
        if pending.host is not None:
            pending.target.copy_(pending.host, non_blocking=True)

    def wait_sends(self) -> None:
        """Complete every posted send."""
        for pending in self._sends:
            self._wait(pending.work, "send to", pending.peer, pending.label)
        self._sends.clear()

    def close(self) -> None:
        """Let go of what was sent; the groups belong to :class:`~megatron_het.distributed.PlanGroups`."""
        self._sends.clear()

    def _ordered(self, after: Moment | None) -> contextlib.AbstractContextManager[Any]:
        """Make a stream current that waits only for ``after``: NCCL orders a transfer after the current stream."""
        if after is None:
            return contextlib.nullcontext()
        if self._posting is None:
            self._posting = torch.cuda.Stream()
        self._posting.wait_event(after)
        return torch.cuda.stream(self._posting)

    def _drop_finished_sends(self, dst: int) -> None:
        """Free the tensors of sends that have completed.

        gloo reports completion only to a wait, so the oldest send to a peer is waited
        for when several are in flight.  That cannot deadlock: the peer's list of operations and
        this one are projections of one order, in which that send and its receive come before
        all further operations of this rank.
        """
        if self.transport == "nccl":
            if self._sends and self._sends[0].work.is_completed():
                self._sends = [s for s in self._sends if not s.work.is_completed()]
            return
        if self.pending_per_edge is None:
            return
        under_way = [s for s in self._sends if s.peer == dst]
        if len(under_way) >= self.pending_per_edge:
            oldest = under_way[0]
            self._wait(oldest.work, "send to", oldest.peer, oldest.label)
            self._sends = [s for s in self._sends if s is not oldest]

    def _wait(self, work: dist.Work, verb: str, peer: int, label: str) -> None:
        try:
            if self.transport == "nccl":
                work.wait()  # the watchdog enforces the group's timeout
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self._failure(verb, peer, label, error) from error

    def _failure(self, verb: str, peer: int, label: str, cause: object) -> TransferError:
        now = time.strftime("%H:%M:%S")
        return TransferError(
            f"[{now}] rank {self.rank}: {label}: {verb} rank {peer} failed "
            f"(timeout {self._timeout.total_seconds():.0f} s): {cause}. "
            f"Rank {peer} has probably stopped; look at its log first."
        )
