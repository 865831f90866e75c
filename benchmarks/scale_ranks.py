"""Light rank processes, forked from one that has imported torch, which only create groups and channels.

The store runs in a process of its own, so that its CPU time is measured apart from that of the ranks.
"""

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_het.distributed import Edge, build_groups, group_specs, in_rounds
from megatron_het.lowering.programs import build
from megatron_het.lowering.ranks import BoundaryMap, edges
from megatron_het.plan import ModelShape, Placement, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.runtime.channels import Channels
from megatron_het.schedule.ir import Program
from testing.forked import Forked

# Plans of any world size for ``benchmarks.scale``, and the counts that need no run.

SEQUENCE = 4096
STAGES = 8
BLOCK = 16  # ranks of a stage that share microbatches with each other, in plans of blocks
_SIZES = ((8, 4, 2, 1, 1), (4, 4, 4, 4), (8, 8), (2, 2, 4, 4, 2, 2))  # TP sizes of a block's replicas, by stage in turn
ROLES = 7  # roles of groups that a rank is in at most, and the world


def sizes_of(stage: int, ranks: int) -> tuple[int, ...]:
    """Returns the TP sizes of the replicas on ``ranks`` ranks of a stage, a power of two."""
    if ranks >= BLOCK:
        return _SIZES[stage % len(_SIZES)] * (ranks // BLOCK)
    scaled = tuple(max(1, size * ranks // BLOCK) for size in _SIZES[stage % len(_SIZES)])
    kept: list[int] = []
    for size in scaled:
        if sum(kept) + size <= ranks:
            kept.append(size)
    return tuple(kept) + (1,) * (ranks - sum(kept))


def plan_of(world_size: int, microbatches: int, mixed: bool) -> Plan:
    """Returns a 1F1B plan of eight stages of replicas with TP 1 to 8.

    Args:
        world_size: A power of two, at least 16.
        microbatches: Of an iteration.
        mixed: Whether microbatches go from any replica to any replica; else within blocks of 16 ranks per stage.
    """
    per_stage = world_size // STAGES
    width = per_stage if mixed else min(BLOCK, per_stage)
    blocks = per_stage // width
    rank, stages = 0, []
    for s in range(STAGES):
        replicas = []
        for block in range(blocks):
            sizes = sizes_of(s, width)
            own = range(block, microbatches, blocks)
            for ids, size in zip(_dealt(own, sizes, s), sizes, strict=True):
                replicas.append(Replica(tuple(range(rank, rank + size)), ids, speed=size / max(sizes)))
                rank += size
        stages.append(Stage((4,), tuple(replicas)))
    model = ModelShape(4 * STAGES, 4096, 32, 8, SEQUENCE)
    training = TrainingShape(1, microbatches, "bf16", sequence_parallel=True, distributed_optimizer=True)
    return Plan(model, training, tuple(stages), ScheduleSpec("1f1b"))


def _dealt(ids: Sequence[int], sizes: Sequence[int], stage: int) -> list[tuple[int, ...]]:
    """Deals microbatches in proportion to the TP sizes, in another order on every stage."""
    places = [q for q, size in enumerate(sizes) for _ in range(size)]
    turn = 1 + 2 * stage
    found: list[list[int]] = [[] for _ in sizes]
    for i, m in enumerate(ids):
        found[places[(i * turn) % len(places)]].append(m)
    return [tuple(own) for own in found]


@dataclass(frozen=True)
class Counted:
    """The groups and transfers of one rank."""

    groups: int  # process groups, the world included
    peers: int  # ranks with which it exchanges transfers
    rounds: int  # in which its groups of two are created
    memberships: int  # groups of all ranks together, counted once per member
    chain_by_rank: int  # groups that wait for each other in turn if edges are created in the order of ranks


def edges_of(plan: Plan, programs: Sequence[Program]) -> list[Edge]:
    """Returns the directed edges of the transfers."""
    return edges(programs, BoundaryMap(Placement(plan), SEQUENCE, True))


def counted(plan: Plan) -> Counted:
    """Returns the counts of the plan's rank with the most groups, those of two peers included."""
    pairs = {(min(e), max(e)) for e in edges_of(plan, list(build(plan).values()))}
    peers = dict.fromkeys(range(plan.world_size), 0)
    for pair in pairs:
        for rank in pair:
            peers[rank] += 1
    roles = dict.fromkeys(range(plan.world_size), 1)  # the world
    for spec in group_specs(Placement(plan)):
        for rank in spec.ranks:
            roles[rank] += 1
    rank = max(peers, key=lambda r: (peers[r] + roles[r], r))
    chain: dict[int, int] = {}
    for a, b in sorted(pairs):
        chain[a] = chain[b] = max(chain.get(a, 0), chain.get(b, 0)) + 1
    return Counted(
        peers[rank] + roles[rank],
        peers[rank],
        max(number for number, _ in in_rounds(pairs)) + 1,
        2 * len(pairs) + sum(roles.values()),
        max(chain.values()),
    )


Body = Callable[[int, dist.Store], dict[str, Any]]  # called on a rank once it is connected to the store


def cpu_s() -> float:
    """Returns the CPU seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_ranks(world_size: int, body: Body, limit_s: float) -> tuple[list[dict[str, Any]], float]:
    """Run ``body`` on forked ranks; returns ``(result of each rank, CPU seconds of the store)``.

    Raises:
        RuntimeError: A rank failed or did not end in time; with the ends of what the ranks printed.
    """
    port_reader, port_writer = Pipe(duplex=False)
    stop_reader, stop_writer = Pipe(duplex=False)
    spent_reader, spent_writer = Pipe(duplex=False)
    own = sys.stdout.fileno()
    store = Forked(lambda: _keep_store(world_size, port_writer, stop_reader, spent_writer), own)
    children: dict[int, tuple[Forked, Connection]] = {}
    try:
        if not port_reader.poll(limit_s):
            raise RuntimeError("the store did not start")
        port = port_reader.recv()
        for rank in range(world_size):
            reader, writer = Pipe(duplex=False)
            work = functools.partial(_rank, rank, world_size, port, body, writer, limit_s)
            children[rank] = Forked(work, own), reader
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
        for process in (store, *(process for process, _ in children.values())):
            process.finish(0.0)


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
    """Start ``torch.distributed`` over gloo without connecting all ranks, which the groups of a plan do not need."""
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
    """Start a rank under a plan, and send one element over each of its edges."""

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
    """Send one element over each edge of this rank; returns the number that arrived."""
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
