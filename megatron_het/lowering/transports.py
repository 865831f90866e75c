"""Which transport the transfers between stages use: as asked for, or as the programs allow.

NCCL runs the transfers of a group one after the other on the device, so transfers that wait for each
other in a cycle hang it.  It is taken where no cycle is possible, which the schedule library decides
with its strictest model (every transfer blocks).  Elsewhere tensors are staged through host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_het.schedule.graph import Graph
from megatron_het.schedule.ir import Program
from megatron_het.schedule.passes import post_receives_early
from megatron_het.schedule.transports import deadlock

TRANSPORTS = ("auto", "nccl", "gloo", "staged")


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and why it was chosen."""

    transport: str
    reason: str

    def __str__(self) -> str:
        return f"{self.transport} ({self.reason})"


def choose_transport(requested: str, backend: str, on_cuda: bool, programs: Iterable[Program]) -> Choice:
    """Resolve ``auto`` and refuse what cannot work.

    Args:
        requested: One of ``TRANSPORTS``.
        backend: The default process group's backend.
        on_cuda: Whether activations live on a CUDA device.
        programs: Programs with transfers that will run and have not been validated; those that have been are
            free of cycles.

    Raises:
        ValueError: A transport that cannot move the tensors of this machine.
    """
    if requested == "nccl" and not on_cuda:
        raise ValueError("--het-transport nccl needs CUDA devices; use gloo or staged")
    if requested == "gloo" and on_cuda:
        raise ValueError("--het-transport gloo moves host tensors only; use nccl or staged")
    if requested != "auto":
        return Choice(requested, "as asked for")
    cycle = next((stuck[0] for p in programs if (stuck := deadlock(Graph(p), "blocking"))), None)
    possible = "no cycle of transfers is possible" if cycle is None else "transfers may form a cycle"
    if not on_cuda:
        return Choice("gloo", f"tensors are on the host; {possible}")
    if "nccl" not in backend:
        return Choice("staged", f"the backend is {backend}; {possible}")
    if cycle is None:
        return Choice("nccl", possible)
    return Choice("staged", f"{possible}: {cycle.message}")


def posted_for(transport: str, program: Program) -> Program:
    """The program with its receives where the transport wants them.

    gloo moves data once both ends are posted, and the host, which posts, is busy with compute (on the
    CPU) or waits for received data (staged): receives are posted one operation ahead.  NCCL gets them in
    the global order, which no cycle is possible in.
    """
    return program if transport == "nccl" else post_receives_early(program)
