"""Small programs that run over gloo and deadlock or corrupt data over NCCL; the simulated backend must detect each.

Every rank of a job runs one of :data:`MISTAKES`.  It exits with 0 if the backend reported the mistake by
its name, with 3 if there was no error, and with 4 if the error was another one: if only one rank makes the
mistake, others may see only a closed connection.
"""

import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.device import activate
from megatron_het.device.memory import HostPool
from testing import nccl_order
from testing.runner import Job

# Runs inside rank processes: groups with NCCL's order, before anything else is set up.


def simulate(*, rank: int, options: dict[str, Any], then: list[Any] | None = None) -> None:
    """Install the simulated backend, then call another setup function."""
    nccl_order.install(nccl_order.Options(**{"stall_s": 60.0, **options}))
    if then is not None:
        name, keywords = then
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)(rank=rank, **keywords)


STALL_S = 4.0


def _wait(*works: dist.Work | None) -> None:
    for work in works:
        assert work is not None, "this rank is in every group"
        work.wait()


def _crossed(rank: int, world: int) -> None:
    """Both ranks send first, on one communicator."""
    mine, other = torch.full((4,), float(rank)), torch.empty(4)
    peer = (rank + 1) % 2
    works = [dist.isend(mine, peer), dist.irecv(other, peer)]
    _wait(*works)


def _ring(rank: int, world: int) -> None:
    """All ranks send to the next one, then receive from the previous one: a cycle if the device holds one operation."""
    for low, high in ((0, 1), (0, 2), (1, 2)):  # connect in one order
        if rank == low:
            dist.send(torch.ones(1), high)
        elif rank == high:
            dist.recv(torch.ones(1), low)
    mine, other = torch.full((4,), float(rank)), torch.empty(4)
    works = [dist.isend(mine, (rank + 1) % world), dist.irecv(other, (rank - 1) % world)]
    _wait(*works)


def _other_collective(rank: int, world: int) -> None:
    """One rank reduces while the others broadcast."""
    tensor = torch.ones(4)
    if rank == 0:
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, 0)


def _other_size(rank: int, world: int) -> None:
    """Members reduce tensors of different sizes."""
    dist.all_reduce(torch.ones(4 + rank))


def _two_groups(rank: int, world: int) -> None:
    """Two groups with the same members are used in different orders, and the device holds one operation."""
    groups = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    order = groups if rank == 0 else groups[::-1]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in order]
    _wait(*works)


def _reused(rank: int, world: int) -> None:
    """A tensor is written to before its send has run."""
    tensor = torch.ones(4)
    if rank == 0:
        work = dist.isend(tensor, 1)
        tensor.fill_(2.0)
        _wait(work)
    else:
        time.sleep(1.0)  # busy with something else
        dist.recv(tensor, 0)


def _lazy(rank: int, world: int) -> None:
    """Communicators are first used in different orders, and connecting blocks the host."""
    groups = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]
    order = groups if rank == 0 else groups[::-1]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in order]
    _wait(*works)


def _read_early(rank: int, world: int) -> None:
    """A received tensor is read without a wait; by chance it has already arrived."""
    tensor = torch.ones(4)
    if rank == 0:
        work = dist.irecv(tensor, 1)
        time.sleep(1.0)
        tensor.sum().item()
        _wait(work)
    else:
        dist.send(tensor, 0)


def _passed_on(rank: int, world: int) -> None:
    """A tensor received over one communicator is sent over another one without a wait."""
    tensor = torch.ones(4)
    groups = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for group in groups]
    _wait(*works)


def _freed(rank: int, world: int) -> None:
    """The memory of a tensor is freed before its send has run."""
    tensor = torch.ones(4)
    if rank == 0:
        work = dist.isend(tensor, 1)
        tensor.untyped_storage().resize_(0)
        _wait(work)
    else:
        dist.recv(tensor, 0)


def _truncated(rank: int, world: int) -> None:
    """The receiver expects more than is sent."""
    if rank == 0:
        dist.send(torch.ones(4), 1)
        dist.barrier()
    else:
        dist.recv(torch.ones(8), 0)


def _under_a_receive(rank: int, act: Callable[[dist.Work], object]) -> None:
    """Both ranks post a receive, then make the host wait for the device, then send the expected tensor."""
    mine, other = torch.full((4,), float(rank)), torch.empty(4)
    groups = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]  # one per direction
    for source, group in enumerate(groups):  # connects them, and launches the kernels of transfers
        (dist.send if rank == source else dist.recv)(mine if rank == source else other, 1 - rank, group=group)
    nccl_order.synchronize()
    expected = dist.irecv(other, 1 - rank, group=groups[1 - rank])
    assert expected is not None
    act(expected)
    _wait(dist.isend(mine, 1 - rank, group=groups[rank]), expected)


def _first_launch(rank: int, world: int) -> None:
    """A kernel is launched for the first time while a receive waits for a peer that does the same."""
    unrelated = torch.ones(4)
    _under_a_receive(rank, lambda _: unrelated.erfinv())


def _pinned(rank: int, world: int) -> None:
    """Memory is pinned during a pending receive."""
    pool = HostPool(activate())
    _under_a_receive(rank, lambda _: pool.take(64))


def _synchronised(rank: int, world: int) -> None:
    """The host waits for the device during a pending receive."""
    _under_a_receive(rank, lambda _: activate().synchronize())


def _value_read(rank: int, world: int) -> None:
    """A value is read after the compute stream was ordered after a pending receive."""
    unrelated = torch.ones(())
    unrelated.item()
    _under_a_receive(rank, lambda expected: (expected.wait(), unrelated.item()))


def _host_ahead(rank: int, world: int) -> None:
    """No mistake: the host continues after a wait, and tells the sender to send."""
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.zeros(4)
    if rank == 0:
        dist.recv(torch.empty(1), 1)  # connects, which blocks the host
        dist.recv(tensor, 1)
        store.set("go", "on")
    else:
        dist.send(torch.ones(1), 0)
        store.wait(["go"], timedelta(seconds=STALL_S))
        dist.send(torch.ones(4), 0)
    assert tensor.sum().item() == (0.0 if rank else 4.0), "the host stands still where it reads what arrives"


# Sound programs, in the form of MISTAKES; no error is expected.
SOUND: dict[str, tuple[Callable[[int, int], None], int, str]] = {"host ahead": (_host_ahead, 2, "no such words")}

# name: (program of every rank, number of ranks, words in the error of at least one rank)
MISTAKES: dict[str, tuple[Callable[[int, int], None], int, str]] = {
    "crossed": (_crossed, 2, "wait for each other"),
    "ring": (_ring, 3, "wait for each other"),
    "other collective": (_other_collective, 2, "in another collective"),
    "other size": (_other_size, 2, "of another size"),
    "two groups": (_two_groups, 2, "wait for each other"),
    "reused": (_reused, 2, "is not ordered after"),
    "read early": (_read_early, 2, "is not ordered after"),
    "passed on": (_passed_on, 2, "is not ordered after"),
    "freed": (_freed, 2, "is not ordered after"),
    "lazy": (_lazy, 2, "connected within"),
    "truncated": (_truncated, 2, "bytes arrive where"),
    "first launch": (_first_launch, 2, "first launch of aten.erfinv"),
    "pinned memory": (_pinned, 2, "an allocation of pinned memory, where the host waits"),
    "synchronised": (_synchronised, 2, "a synchronisation with the device, where the host waits"),
    "value read": (_value_read, 2, "wait for each other"),
}


def mistake_job(name: str, folder: Path) -> Job:
    """Returns the job whose ranks make a mistake, or none."""
    entry = "benchmarks.nccl_mistakes:run"
    return Job(name, (MISTAKES | SOUND)[name][1], (), folder, entry, environment={"HET_MISTAKE": name}, timeout_s=90.0)


def run() -> None:
    """Run one rank of a job."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    act, _, words = (MISTAKES | SOUND)[os.environ["HET_MISTAKE"]]
    nccl_order.install(nccl_order.Options(stall_s=STALL_S, resident=1 if act in (_ring, _two_groups) else 16))
    dist.init_process_group("nccl", timeout=timedelta(seconds=30))
    try:
        act(rank, world)
        nccl_order.synchronize()
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
        os._exit(0 if words in str(error) else 4)
    print(f"rank {rank}: nothing was noticed", flush=True)
    os._exit(3)
