"""Light rank processes: forked from one that has imported torch, they create groups and channels and nothing else.

A process of its own keeps the store, so that the store's time is known apart from that of the ranks.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.scale_plans import edges_of
from megatron_het.distributed import build_groups
from megatron_het.lowering.programs import build
from megatron_het.plan import Placement, Plan
from megatron_het.runtime.channels import Channels

Body = Callable[[int, dist.Store], dict[str, Any]]
"""What a rank does once it is connected to the store."""


def cpu_s() -> float:
    """CPU seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_ranks(world_size: int, body: Body, limit_s: float) -> tuple[list[dict[str, Any]], float]:
    """Run ``body`` on forked ranks; (what each returned, CPU seconds of the store).

    Raises:
        RuntimeError: A rank failed or did not end in time; with the ends of what the ranks printed.
    """
    port_reader, port_writer = Pipe(duplex=False)
    stop_reader, stop_writer = Pipe(duplex=False)
    spent_reader, spent_writer = Pipe(duplex=False)
    store = _fork(lambda: _keep_store(world_size, port_writer, stop_reader, spent_writer))
    children: dict[int, tuple[int, Connection]] = {}
    try:
        if not port_reader.poll(limit_s):
            raise RuntimeError("the store did not start")
        port = port_reader.recv()
        for rank in range(world_size):
            reader, writer = Pipe(duplex=False)
            children[rank] = _fork(functools.partial(_rank, rank, world_size, port, body, writer, limit_s)), reader
            writer.close()
        deadline = time.monotonic() + limit_s
        found: dict[int, dict[str, Any]] = {}
        for rank, (_, reader) in children.items():
            if not reader.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"rank {rank} has not answered after {limit_s:g} s")
            try:
                found[rank] = json.loads(reader.recv())
            except EOFError:
                found[rank] = {"error": "the process ended without an answer"}
        failed = {rank: answer["error"] for rank, answer in found.items() if "error" in answer}
        if failed:
            first = min(failed)
            raise RuntimeError(f"{len(failed)} ranks failed; rank {first}: {failed[first]}")
        stop_writer.send(None)
        return [found[rank] for rank in range(world_size)], spent_reader.recv() if spent_reader.poll(10.0) else 0.0
    finally:
        for pid in (store, *(pid for pid, _ in children.values())):
            _end(pid)


def _fork(work: Callable[[], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    return pid


def _end(pid: int) -> None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def _keep_store(world_size: int, port: Connection, stop: Connection, spent: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    port.send(store.port)
    before = cpu_s()
    stop.poll(None)
    spent.send(cpu_s() - before)


def _rank(rank: int, world_size: int, port: int, body: Body, answer: Connection, limit_s: float) -> None:
    try:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=limit_s))
        result = body(rank, store)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    answer.send(json.dumps(result))


def start_world(rank: int, world_size: int, store: dist.Store, timeout_s: float) -> None:
    """``torch.distributed`` over gloo without connections between all ranks, which the groups of a plan do not need."""
    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    del os.environ["TORCH_GLOO_LAZY_INIT"]


def meet(store: dist.Store, world_size: int, name: str, timeout_s: float) -> None:
    """Wait until all ranks are here."""
    if store.add(f"scale/{name}", 1) == world_size:
        store.set(f"scale/{name}/all", "1")
    store.wait([f"scale/{name}/all"], timedelta(seconds=timeout_s))


def start_of(plan: Plan, limit_s: float) -> Body:
    """A rank's start under a plan, and one element over each of its edges."""

    def body(rank: int, store: dist.Store) -> dict[str, Any]:
        world = plan.world_size
        start_world(rank, world, store, limit_s)
        began = cpu_s()
        programs = list(build(plan, rank).values())
        all_edges = edges_of(plan, programs)
        built = cpu_s()
        meet(store, world, "built", limit_s)
        clock, spent = time.monotonic(), cpu_s()
        groups = build_groups(Placement(plan), tied_embeddings=False, timeout_s=limit_s)
        channels = Channels.open(groups.pairs, "transfers", all_edges, "gloo", limit_s, rank, one_order=True)
        wall, used = time.monotonic() - clock, cpu_s() - spent
        meet(store, world, "open", limit_s)
        open_s = time.monotonic() - clock
        moved = _move(rank, all_edges, channels)
        found = {
            "program_s": built - began,
            "groups_wall_s": wall,
            "all_open_s": open_s,
            "groups_cpu_s": used,
            "groups": len(distributed_c10d._world.pg_map),
            "peers": len({other for edge in all_edges if rank in edge for other in edge} - {rank}),
            "moved": moved,
        }
        meet(store, world, "moved", limit_s)
        channels.close()
        groups.close()
        return found

    return body


def _move(rank: int, edges: list[tuple[int, int]], channels: Channels) -> int:
    """One element over each edge of this rank; how many arrived."""
    pending = []
    for edge in edges:
        if edge[1] == rank:
            buffer = torch.empty(1)
            pending.append((edge[0], buffer, channels.receive(buffer, edge[0], f"element of {edge}")))
    for edge in edges:
        if edge[0] == rank:
            channels.send(torch.tensor([float(rank)]), edge[1], f"element of {edge}")
    for src, buffer, receive in pending:
        channels.wait_receive(receive)
        if int(buffer) != src:
            raise RuntimeError(f"rank {rank} got {int(buffer)} where rank {src} had sent")
    channels.wait_sends()
    return len(pending)
