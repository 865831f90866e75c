"""Plan the demo: which device runs which layers and microbatches, from measured speeds.

The space is small enough to try everything: all ways to group the devices into pipeline stages,
all layer splits, all ways to deal the microbatches to a stage's replicas.  Every candidate is
simulated (``contention.py``) with the profile's times.  Large spaces are first cut down by a bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from examples.llama.contention import Timeline, simulate_shared
from examples.llama.devices import CpuDevice
from megatron_het.plan import ModelShape, Plan, Prediction, RankPrediction, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.schedule import Kind, Op, Program, Shape, generate
from tools.planner.inputs.profile_schema import DeviceProfile, LayerKind, LayerTiming, LinkProfile, Profile

#: Candidates that are simulated when the bound has sorted a larger space.
_SIMULATED = 400


@dataclass(frozen=True, slots=True)
class Draft:
    """One stage of a candidate.

    Attributes:
        layers: Transformer layers.
        devices: Indices into the device list, one per replica.
        microbatches: Microbatches of each replica.
    """

    layers: int
    devices: tuple[int, ...]
    microbatches: tuple[int, ...]


Candidate = tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Holds what a candidate is expected to do.

    Attributes:
        candidate: The stages.
        timeline: The simulated forward and backward part.
        tail_s: Gradient reduction and update.
        iteration_s: All together.
    """

    candidate: Candidate
    program: Program
    timeline: Timeline
    tail_s: float
    iteration_s: float

    @property
    def bubble_fraction(self) -> float:
        """(makespan - mean busy time) / mean busy time of the forward and backward part."""
        busy = sum(self.timeline.span_s) / len(self.timeline.span_s)
        return (self.timeline.makespan_s - busy) / busy


class Speeds:
    """Work and memory of the model's parts on each device, from a profile.

    The profile was taken with all devices busy, so a device that shares its core with n - 1 others
    took n times the work it did.
    """

    def __init__(self, profile: Profile, devices: Sequence[CpuDevice]) -> None:
        self.profile, self.devices = profile, devices
        self._timings = [{t.layer: t for t in self._device(d.kind).timings} for d in devices]

    def _device(self, kind: str) -> DeviceProfile:
        found = self.profile.device(kind)
        if found is None:
            raise ValueError(f"the profile has no device kind {kind!r}")
        return found

    def timing(self, device: int, layer: LayerKind) -> LayerTiming:
        """The measured figures of a layer kind on a device."""
        return self._timings[device][layer]

    def work_s(self, device: int, parts: Iterable[tuple[LayerKind, int]], backward: bool) -> float:
        """Seconds of a core for one pass through (layer kind, how many) in one direction."""
        total = 0.0
        for layer, count in parts:
            timing = self.timing(device, layer)
            each, once = timing.forward_s, timing.fixed_forward_s
            if backward:
                each, once = timing.backward_s, timing.fixed_backward_s
            total += count * (each - once) + once
        return total / self.devices[device].sharers

    def alone(self, device: int) -> float:
        """Seconds of work while the other cores wait over those while they are busy."""
        timing = self.timing(device, "layer")
        whole = (timing.forward_s + timing.backward_s) / self.devices[device].sharers
        return min(1.0, timing.alone_s / whole) if timing.alone_s else 1.0

    def update_work_s(self, device: int, parts: Iterable[tuple[LayerKind, int]]) -> float:
        """Seconds of a core for the optimizer step."""
        total = sum(count * self.timing(device, layer).update_s for layer, count in parts)
        return total / self.devices[device].sharers

    def parameters(self, parts: Iterable[tuple[LayerKind, int]]) -> int:
        """Parameters of (layer kind, how many)."""
        return sum(count * self.timing(0, layer).parameters for layer, count in parts)

    def speed(self, device: int) -> float:
        """Speed relative to the fastest device, all being busy."""

        def rate(d: int) -> float:
            timing = self.timing(d, "layer")
            return 1.0 / (timing.forward_s + timing.backward_s)

        return rate(device) / max(rate(d) for d in range(len(self.devices)))

    def link_s(self, operation: str, participants: int, size_bytes: float) -> float:
        """Time of an operation over the slowest measured link with that many participants."""
        links = [k for k in self.profile.links if k.operation == operation and k.participants == participants] or [
            k for k in self.profile.links if k.operation == operation
        ]
        return max((_link_s(k, size_bytes) for k in links), default=0.0)


def _link_s(link: LinkProfile, size_bytes: float) -> float:
    return link.latency_s + size_bytes / link.bytes_per_s


def parts_of(candidate: Candidate, stage: int) -> list[tuple[LayerKind, int]]:
    """(layer kind, how many) that a stage holds."""
    parts: list[tuple[LayerKind, int]] = [("layer", candidate[stage].layers)]
    if stage == 0:
        parts.append(("embedding", 1))
    if stage == len(candidate) - 1:
        parts.append(("head", 1))
    return parts


def spread(counts: Sequence[int]) -> tuple[int, ...]:
    """Route microbatches so that every replica's share is spread evenly over the iteration.

    ``spread((4, 2))`` = (0, 1, 0, 0, 1, 0): smooth weighted round-robin.
    """
    total, credit, route = sum(counts), [0.0] * len(counts), []
    for _ in range(total):
        for i, count in enumerate(counts):
            credit[i] += count / total
        chosen = max(range(len(counts)), key=lambda i: credit[i])
        credit[chosen] -= 1.0
        route.append(chosen)
    return tuple(route)


def program_of(candidate: Candidate, speeds: Speeds) -> Program:
    """The schedule's compute order for a candidate, the same that the executor derives."""
    shape = Shape(
        layers=tuple((s.layers,) for s in candidate),
        route=tuple(spread(s.microbatches) for s in candidate),
        replicas=tuple(len(s.devices) for s in candidate),
    )
    order = [d for s in candidate for d in s.devices]
    return generate("1f1b", shape, speeds=[speeds.speed(d) for d in order])


def estimate(candidate: Candidate, speeds: Speeds) -> Estimate:
    """Simulate one iteration of a candidate."""
    order = [(s, d) for s, draft in enumerate(candidate) for d in draft.devices]
    program = program_of(candidate, speeds)
    work = [
        {
            Kind.FORWARD: speeds.work_s(d, parts_of(candidate, s), backward=False),
            Kind.BACKWARD: speeds.work_s(d, parts_of(candidate, s), backward=True),
        }
        for s, d in order
    ]
    message_bytes = speeds.timing(0, "layer").output_bytes
    message_s = speeds.link_s("p2p", 2, message_bytes) if len(candidate) > 1 else 0.0

    def work_s(device: int, op: Op) -> float:
        return work[device][op.kind]

    cores, alone = [speeds.devices[d].core for _, d in order], [speeds.alone(d) for _, d in order]
    timeline = simulate_shared(program, work_s, cores, lambda a, b: message_s, alone)
    tail_s = _tail_s(candidate, speeds)
    return Estimate(candidate, program, timeline, tail_s, timeline.makespan_s + tail_s)


def _tail_s(candidate: Candidate, speeds: Speeds) -> float:
    """Gradient all-reduce of the slowest stage, then the updates of all devices at the same time."""
    reduce_s = max(
        (
            speeds.link_s("all_reduce", len(s.devices), 4 * speeds.parameters(parts_of(candidate, i)))
            for i, s in enumerate(candidate)
            if len(s.devices) > 1
        ),
        default=0.0,
    )
    per_core: dict[int, float] = {}
    for i, draft in enumerate(candidate):
        for d in draft.devices:
            core = speeds.devices[d].core
            per_core[core] = per_core.get(core, 0.0) + speeds.update_work_s(d, parts_of(candidate, i))
    return reduce_s + max(per_core.values())


# -- candidates --------------------------------------------------------------------------------


def groupings(devices: Sequence[CpuDevice]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Ordered ways to group the devices into stages, equal devices being interchangeable."""
    kinds = [d.kind for d in devices]
    seen: set[tuple[tuple[str, ...], ...]] = set()
    for stages in range(1, len(devices) + 1):
        for assignment in itertools.product(range(stages), repeat=len(devices)):
            if len(set(assignment)) != stages:
                continue
            groups = tuple(tuple(d for d, s in enumerate(assignment) if s == stage) for stage in range(stages))
            key = tuple(tuple(sorted(kinds[d] for d in g)) for g in groups)
            if key not in seen:
                seen.add(key)
                yield groups


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as an ordered sum of ``parts`` positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def _deals(group: Sequence[int], total: int, devices: Sequence[CpuDevice]) -> list[tuple[int, ...]]:
    """Ways to deal microbatches to a stage's replicas; equal devices get equal shares, up to one."""
    kinds = [devices[d].kind for d in group]
    found = []
    for counts in splits(total, len(group)):
        by_kind: dict[str, list[int]] = {}
        for kind, count in zip(kinds, counts, strict=True):
            by_kind.setdefault(kind, []).append(count)
        if all(c == sorted(c, reverse=True) and c[0] - c[-1] <= 1 for c in by_kind.values()):
            found.append(counts)
    return found


def candidates(devices: Sequence[CpuDevice], layers: int, microbatches: int) -> Iterator[Candidate]:
    """The whole space."""
    for groups in groupings(devices):
        if len(groups) > layers:
            continue
        deals = [_deals(g, microbatches, devices) for g in groups]
        for split in splits(layers, len(groups)):
            for deal in itertools.product(*deals):
                yield tuple(Draft(n, g, m) for n, g, m in zip(split, groups, deal, strict=True))


def bound_s(candidate: Candidate, speeds: Speeds) -> float:
    """No schedule is faster: the work of the busiest core, as fast as if the others waited."""
    per_core: dict[int, float] = {}
    for s, draft in enumerate(candidate):
        parts = parts_of(candidate, s)
        for d, count in zip(draft.devices, draft.microbatches, strict=True):
            one = speeds.work_s(d, parts, False) + speeds.work_s(d, parts, True)
            core = speeds.devices[d].core
            per_core[core] = per_core.get(core, 0.0) + count * one * speeds.alone(d)
    return max(per_core.values()) + _tail_s(candidate, speeds)


def best(
    devices: Sequence[CpuDevice], speeds: Speeds, layers: int, microbatches: int, within: float = 0.0
) -> list[Estimate]:
    """Candidates by predicted time, best first.  Exhaustive unless more than a few hundred compete.

    All that are predicted to be at most the fraction ``within`` slower than the best are there.
    """
    bounded = sorted(((bound_s(c, speeds), i, c) for i, c in enumerate(candidates(devices, layers, microbatches))))
    found: list[Estimate] = []
    for bound, _, candidate in bounded:
        if found and bound > min(e.iteration_s for e in found) * (1 + within):
            break
        found.append(estimate(candidate, speeds))
        if len(found) >= _SIMULATED:
            break
    return sorted(found, key=lambda e: e.iteration_s)


def shortlist(ranked: Sequence[Estimate], devices: Sequence[CpuDevice], within: float, count: int) -> list[Estimate]:
    """The best candidate of each grouping of devices that is predicted to be nearly as fast as the best.

    Candidates a few percent apart are nearer to each other than a prediction is to the truth, so they
    are worth a short run each.

    Args:
        ranked: Candidates, best first.
        devices: What the candidates' indices mean.
        within: Largest predicted distance from the best, as a fraction of it.
        count: At most this many.
    """
    found: dict[tuple[tuple[str, ...], ...], Estimate] = {}
    for one in ranked:
        if one.iteration_s > ranked[0].iteration_s * (1 + within):
            break
        grouping = tuple(tuple(sorted(devices[d].kind for d in draft.devices)) for draft in one.candidate)
        found.setdefault(grouping, one)
    return list(found.values())[:count]


def even_splits(devices: Sequence[CpuDevice], layers: int, microbatches: int) -> list[Candidate]:
    """Returns what a planner blind to speeds can do: equal layers per stage, equal microbatches per replica.

    These are the layouts that stock Megatron offers on this many devices: every pipeline size that
    divides the devices and the layers, with the rest as data parallelism that divides the batch.
    """
    found = []
    count = len(devices)
    for stages in range(1, count + 1):
        replicas = count // stages
        if count % stages or layers % stages or microbatches % replicas:
            continue
        found.append(
            tuple(
                Draft(
                    layers // stages,
                    tuple(range(s * replicas, (s + 1) * replicas)),
                    (microbatches // replicas,) * replicas,
                )
                for s in range(stages)
            )
        )
    if not found:
        raise ValueError(f"{count} devices cannot split {layers} layers and {microbatches} microbatches evenly")
    return found


# -- plans -------------------------------------------------------------------------------------


def to_plan(result: Estimate, speeds: Speeds, model: ModelShape, training: TrainingShape, notes: str = "") -> Plan:
    """The estimate as a plan with ranks numbered stage by stage, prediction included."""
    stages, rank = [], 0
    for draft in result.candidate:
        route = spread(draft.microbatches)
        replicas = []
        for q, d in enumerate(draft.devices):
            ids = tuple(m for m, owner in enumerate(route) if owner == q)
            device = speeds.devices[d]
            replicas.append(Replica((rank,), ids, device=device.kind, speed=speeds.speed(d)))
            rank += 1
        stages.append(Stage((draft.layers,), tuple(replicas)))
    return Plan(
        model=model,
        training=training,
        stages=tuple(stages),
        schedule=ScheduleSpec("1f1b"),
        predicted=Prediction(result.iteration_s, result.bubble_fraction, _per_rank(result, speeds)),
        notes=notes,
    )


def devices_in_rank_order(result: Estimate, devices: Sequence[CpuDevice]) -> list[CpuDevice]:
    """The device of rank 0, 1, ..."""
    return [devices[d] for draft in result.candidate for d in draft.devices]


def _per_rank(result: Estimate, speeds: Speeds) -> tuple[RankPrediction, ...]:
    predictions = []
    rank = 0
    for s, draft in enumerate(result.candidate):
        parts = parts_of(result.candidate, s)
        parameters = speeds.parameters(parts)
        for d in draft.devices:
            held = in_flight(result.program, rank)
            kept = sum(n * speeds.timing(d, layer).activation_bytes for layer, n in parts)
            workspace = max(speeds.timing(d, layer).workspace_bytes for layer, n in parts if n)
            predictions.append(
                RankPrediction(
                    rank=rank,
                    compute_s=result.timeline.span_s[rank],
                    parameter_bytes=4 * parameters,
                    gradient_bytes=4 * parameters,
                    # Adam keeps two moments of four bytes.
                    optimizer_bytes=8 * parameters,
                    activation_bytes=math.ceil(held * kept + workspace),
                )
            )
            rank += 1
    return tuple(predictions)


def in_flight(program: Program, device: int) -> int:
    """The most microbatches that a device holds between their forward and their backward."""
    held = most = 0
    for op in program.compute(device):
        held += 1 if op.kind == Kind.FORWARD else -1
        most = max(most, held)
    return most
