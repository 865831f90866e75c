"""A simulated iteration as the page draws it: lanes, operations, and what is left out of large plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from megatron_het.schedule.cost import layer_share, message_bytes
from megatron_het.schedule.ir import RECEIVES, SENDS, Kind, Op
from megatron_het.schedule.kinds import Role, Stream, Work, complete
from megatron_het.schedule.result import Result

from .data import Lane, TimelineData

MAX_EVENTS = 40_000
"""Operations on a page: about 2 MB, and what a browser draws without a noticeable delay."""
MAX_LANES = 96

COLUMNS = ("lane", "start", "duration", "label", "microbatch", "slice", "chunk", "peer", "bytes")

_BY_STREAM = complete(
    Stream,
    {
        Stream.COMPUTE: "",  # by role and work
        Stream.SEND: "transfer",
        Stream.RECEIVE: "transfer",
        Stream.COLLECTIVE: "collective",
        Stream.HOST_TO_DEVICE: "host copy",
        Stream.DEVICE_TO_HOST: "host copy",
    },
)


class Event(NamedTuple):
    """One operation in time; ``size`` is None where there is nothing to say."""

    lane: int
    kind: Kind
    start_s: float
    end_s: float
    microbatch: int
    slice: int
    chunk: int
    peer: int
    size: float | None


def group_of(kind: Kind) -> str:
    """The colour of a kind on the page: what an operation is for somebody who looks at a pipeline."""
    if found := _BY_STREAM[kind.stream]:
        return found
    if kind.role is not Role.PASS:
        return "other compute"
    if Work.FORWARD in kind.work:
        return "forward"
    return "backward" if Work.INPUT in kind.work else "weight gradient"


def timeline_of(
    result: Result,
    title: str,
    names: Sequence[str],
    parameter_bytes: Sequence[float] = (),
    *,
    max_events: int = MAX_EVENTS,
    max_lanes: int = MAX_LANES,
) -> TimelineData:
    """A simulation with all its operations that take time, or as many as a page can hold.

    Args:
        result: The simulation.
        title: Above the timeline.
        names: Of every device.
        parameter_bytes: Of one rank of every device; sizes of gathers and reductions follow from them.
        max_events, max_lanes: Bounds of what is drawn.
    """
    shape, graph = result.program.shape, result.graph
    shown, left_out = _chosen_lanes(result, max_lanes)
    lane_of = {device: lane for lane, device in enumerate(shown)}
    size_of = _sizes(result, parameter_bytes)
    events = [
        Event(
            lane_of[d],
            op.kind,
            result.start_s[i],
            result.end_s[i],
            op.microbatch,
            op.slice,
            op.chunk,
            lane_of.get(op.peer, -1),
            size_of(d, op),
        )
        for i, (d, op) in enumerate(zip(graph.device, graph.ops))
        if d in lane_of and op.kind not in SENDS and result.end_s[i] > result.start_s[i]
    ]
    lanes = [
        Lane(
            name=names[d],
            stage=shape.devices[d].stage,
            compute_s=result.compute_s[d],
            idle_s={key.removesuffix("_s"): value for key, value in asdict(result.bubble[d]).items()},
        )
        for d in shown
    ]
    return pack(title, result.makespan_s, lanes, events, left_out, max_events)


def pack(
    title: str,
    makespan_s: float,
    lanes: list[Lane],
    events: list[Event],
    left_out: Sequence[str] = (),
    max_events: int = MAX_EVENTS,
) -> TimelineData:
    """Lanes and operations as columns; what exceeds the bound is left out, and the page says so."""
    events, dropped = _bounded(events, max_events)
    kinds = list(dict.fromkeys(e.kind for e in events))
    label = {kind: i for i, kind in enumerate(kinds)}
    rows = [
        (
            e.lane,
            round(e.start_s * 1e9),
            round((e.end_s - e.start_s) * 1e9),
            label[e.kind],
            e.microbatch,
            e.slice,
            e.chunk,
            e.peer,
            -1 if e.size is None else round(e.size),
        )
        for e in sorted(events, key=lambda e: (e.lane, e.start_s))
    ]
    columns = zip(*rows) if rows else ((),) * len(COLUMNS)
    return TimelineData(
        title=title,
        makespan_s=makespan_s,
        lanes=lanes,
        labels=[[k.mnemonic, k.name.lower().replace("_", " "), group_of(k)] for k in kinds],
        events={name: list(column) for name, column in zip(COLUMNS, columns)},
        left_out=[*left_out, *dropped],
    )


def _chosen_lanes(result: Result, most: int) -> tuple[list[int], list[str]]:
    """Devices to draw: all, or about equally many of every stage."""
    devices = result.program.devices
    if len(devices) <= most:
        return list(range(len(devices))), []
    by_stage: dict[int, list[int]] = {}
    for d, device in enumerate(devices):
        by_stage.setdefault(device.stage, []).append(d)
    stages = list(by_stage.values())[:most]
    taken = [1] * len(stages)
    left = most - len(stages)
    while left > 0:
        open_ = [i for i, mine in enumerate(stages) if taken[i] < len(mine)]
        for i in open_[:left]:
            taken[i] += 1
        left -= max(1, min(left, len(open_)))
    shown = [d for n, mine in zip(taken, stages) for d in mine[:n]]
    text = f"{len(shown)} of {len(devices)} replicas are drawn: the first ones of "
    text += "every stage" if len(stages) == len(by_stage) else f"the first {len(stages)} of {len(by_stage)} stages"
    return shown, [text]


def _bounded(events: list[Event], most: int) -> tuple[list[Event], list[str]]:
    """Compute first: transfers and copies go when there is too much, then the end of the iteration."""
    if len(events) <= most:
        return events, []
    computed = [e for e in events if e.kind.stream is Stream.COMPUTE]
    said = [f"{len(events) - len(computed)} transfers, collectives and copies are not drawn: too many for a page"]
    if len(computed) <= most:
        return computed, said
    first = sorted(computed, key=lambda e: e.start_s)[:most]
    said.append(f"{most} of {len(computed)} computations are drawn: those that start before {first[-1].start_s:.4g} s")
    return first, said


def _sizes(result: Result, parameter_bytes: Sequence[float]) -> Callable[[int, Op], float | None]:
    """Bytes that an operation moves, or that a pass keeps or frees."""
    program, costs = result.program, result.costs
    memory, slices, relative = costs.memory, program.shape.slices, program.shape.relative_sizes()

    def size(device: int, op: Op) -> float | None:
        if op.kind in RECEIVES:
            return message_bytes(costs, program, op.peer, op)
        if op.kind.stream is Stream.COLLECTIVE:
            if not parameter_bytes:
                return None
            layers = program.shape.layers[program.devices[device].stage]
            return parameter_bytes[device] * layers[op.chunk] / sum(layers) * layer_share(program, device, op)
        if op.kind.role in (Role.PASS, Role.ACTIVATIONS) and memory.activation_bytes:
            return memory.activation_bytes[device][op.chunk] / slices * relative[op.microbatch]
        return None

    return size
