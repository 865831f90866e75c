"""Measure links: latency and bandwidth of point-to-point and of collectives, per pair of node kinds.

Only unique pairs of kinds are measured, each between the first two ranks that form the pair.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..inputs.profile_schema import LinkProfile, LinkScope, Operation
from .settings import fit_line

_COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")


class Seat(NamedTuple):
    """Node and kind of device of a rank in the profiling run."""

    rank: int
    node: int
    kind: str


class Link(NamedTuple):
    """One thing to measure."""

    scope: LinkScope
    first_kind: str
    second_kind: str
    operation: Operation
    ranks: tuple[int, ...]


def links_to_measure(seats: Sequence[Seat]) -> list[Link]:
    """Unique pairs of kinds inside a node and between nodes, and collectives over whole groups.

    Collectives are measured inside one node of each kind, between the first ranks of two nodes
    of each pair of kinds, and over all ranks of the run when there are more than two.
    """
    links: list[Link] = []
    seen: set[tuple[str, str, str]] = set()
    for a, b in itertools.combinations(seats, 2):
        scope: LinkScope = "node" if a.node == b.node else "network"
        first, second = sorted((a.kind, b.kind))
        if (scope, first, second) in seen:
            continue
        seen.add((scope, first, second))
        pair = (a.rank, b.rank)
        links.append(Link(scope, first, second, "p2p", pair))
        links += [Link(scope, first, second, op, pair) for op in _COLLECTIVES]
    nodes: dict[int, list[Seat]] = {}
    for seat in seats:
        nodes.setdefault(seat.node, []).append(seat)
    kinds_done: set[str] = set()
    for members in nodes.values():
        if len(members) > 2 and members[0].kind not in kinds_done:
            kinds_done.add(members[0].kind)
            group = tuple(s.rank for s in members)
            links += [Link("node", members[0].kind, members[0].kind, op, group) for op in _COLLECTIVES]
    if len(nodes) > 1 and len(seats) > 2:
        kinds = sorted({s.kind for s in seats})
        everyone = tuple(s.rank for s in seats)
        links += [Link("network", kinds[0], kinds[-1], op, everyone) for op in _COLLECTIVES]
    return links


def measure_link(link: Link, sizes: Sequence[int], device: torch.device, repeats: int = 7) -> LinkProfile | None:
    """Measure one link on ``link.ranks``, the first of which gets it; every rank of the run calls this.

    Args:
        sizes: Payload sizes in bytes, as the caller of the operation sees them.
        repeats: Number of repetitions whose median is kept, after one warm-up.
    """
    group = dist.new_group(list(link.ranks))
    rank = dist.get_rank()
    samples: list[tuple[int, float]] = []
    if rank in link.ranks:
        for size in sizes:
            seconds = _seconds(_operation(link, size, group, device), device, repeats)
            # A ping-pong is two messages.
            samples.append((size, seconds / 2 if link.operation == "p2p" else seconds))
        dist.destroy_process_group(group)
    dist.barrier()
    if rank != link.ranks[0]:
        return None
    latency_s, bytes_per_s = fit_line(samples)
    return LinkProfile(
        scope=link.scope,
        first_kind=link.first_kind,
        second_kind=link.second_kind,
        operation=link.operation,
        participants=len(link.ranks),
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        samples=samples,
    )


def _operation(link: Link, size: int, group: Any, device: torch.device) -> Callable[[], object]:
    """One repetition of the operation on this rank."""
    count = len(link.ranks)
    elements = max(count, size // 4 // count * count)
    whole = torch.zeros(elements, device=device)
    share = torch.zeros(elements // count, device=device)
    if link.operation == "p2p":
        first, second = link.ranks
        if dist.get_rank() == first:
            return lambda: (dist.send(whole, second, group=group), dist.recv(whole, second, group=group))
        return lambda: (dist.recv(whole, first, group=group), dist.send(whole, first, group=group))
    if link.operation == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if link.operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, share, group=group)
    return lambda: dist.reduce_scatter_tensor(share, whole, group=group)


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of one repetition, after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_bandwidth(device: torch.device, size: int = 1 << 26) -> tuple[float, float] | None:
    """(host to device, device to host) bytes per second through pinned memory; None on a CPU."""
    if device.type != "cuda":
        return None
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    to_device_s = _seconds(lambda: there.copy_(host, non_blocking=True), device, 5)
    return size / to_device_s, size / _seconds(lambda: host.copy_(there, non_blocking=True), device, 5)
