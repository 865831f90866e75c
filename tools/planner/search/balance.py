"""Layers per stage so that the slowest stage is as fast as possible, within memory."""

from __future__ import annotations

from math import ceil

from tools.planner.candidate import Candidate, Group, Stage
from tools.planner.estimate import Estimator, Unit


class _Load:
    """Time of one stage as a function of its layers (microbatches split in proportion to speed)."""

    __slots__ = ("rates", "cap")

    def __init__(self, groups: tuple[Group, ...], units: list[Unit], first: bool, last: bool) -> None:
        self.rates = []
        for g, u in zip(groups, units):
            extra = (u.embedding_f + u.embedding_b if first else 0.0) + (u.head_f + u.head_b if last else 0.0)
            self.rates.append((float(g.count), u.layer_f + u.layer_b, extra))
        self.cap = 0

    def time(self, layers: int) -> float:
        """Seconds per microbatch of the whole stage."""
        return 1.0 / sum(n / (layers * t + extra) for n, t, extra in self.rates)


def _cap(estimator: Estimator, groups: tuple[Group, ...], units: list[Unit], later: int, total: int, first: bool,
         last: bool, like: Candidate) -> int:
    """Most layers that fit the memory of every replica of a stage.

    With ministages replicas of different memory may keep different shares of the state: together they
    must hold one copy of it, and each what is not divided.
    """
    mixed, copies = float(estimator.model.element_bytes), estimator.runtime.extra_parameter_copies
    speed = sum(g.count / (u.layer_f + u.layer_b) for g, u in zip(groups, units))
    boundary = 2 * estimator.boundary_bytes_per_sequence * like.micro_batch_size
    least = alone = 1 << 30
    may_divide = like.schedule == "ministage" and len(groups) > 1 and len({g.tp for g in groups}) == 1
    divided = mixed + 4.0 + estimator.optimizer_per_parameter
    free_together = needed_together = 0.0
    for g, u in zip(groups, units):
        shards = sum(h.count for h in groups if h.tp == g.tp) if like.zero_stage >= 1 else 1
        per = mixed + 4.0 * (1 + copies) + estimator.optimizer_per_parameter / shards
        share = 1 / (u.layer_f + u.layer_b) / speed
        if like.schedule == "ministage":
            held: float = 2.0 if like.offload else max(1.0, share * total)
            per = mixed * min(1.0, 2 / like.chunks) + 4.0 / like.chunks + (4.0 + mixed) / max(1, g.count) \
                + estimator.optimizer_per_parameter / max(1, shards)
        elif like.schedule == "slimpipe":
            held = 1.0 + 2 * later / (like.slices * like.chunks)
        else:
            held = min(max(1.0, share * total), 1 + ceil((1 + like.slack) * share * later - 1e-9))
        free = u.capacity_bytes * estimator.memory_margin - u.reserved_bytes - u.workspace_bytes / like.slices - boundary
        ends = 0
        if first:
            ends += u.embedding_parameters
            free -= held * u.embedding_bytes
        if last:
            ends += u.head_parameters
            free -= (u.head_bytes + max(0.0, u.head_workspace_bytes - u.workspace_bytes)) / like.slices
        least = min(least, int((free - ends * per) // (u.layer_parameters * per + held * u.layer_bytes)))
        if may_divide:
            whole = mixed * min(1.0, 2 / like.chunks) + 4.0 / like.chunks
            free -= ends * whole
            needed = u.layer_parameters * whole + held * u.layer_bytes
            alone = min(alone, int(free // needed))
            free_together += g.count * free - ends * divided / len(groups)
            needed_together += g.count * needed + u.layer_parameters * divided / len(groups)
    return max(least, min(alone, int(free_together // needed_together))) if may_divide else least


def balance(estimator: Estimator, groups: tuple[tuple[Group, ...], ...], like: Candidate) -> Candidate | None:
    """A candidate with these stages and the numbers of layers that balance them.

    Args:
        groups: Replicas of each stage.
        like: Everything else is taken from here.

    Returns:
        None when there are more stages than layers or a replica kind has no figures.  Memory limits
        are respected as far as possible; the caller checks the result.
    """
    model = estimator.model
    count, wanted = len(groups), model.num_layers
    if count > wanted or model.global_batch_size % like.micro_batch_size:
        return None
    total = model.global_batch_size // like.micro_batch_size
    loads: list[_Load] = []
    widths = {sum(g.count for g in stage) for stage in groups}
    capped = like if len(widths) > 1 else like.with_(slack=0.0)
    later = sum(g.count for stage in groups for g in stage)
    for s, stage in enumerate(groups):
        units = []
        for g in stage:
            unit = estimator.unit(g.pool, g.tp, like.micro_batch_size, like.recompute)
            if unit is None:
                return None
            units.append(unit)
        later -= sum(g.count for g in stage)
        load = _Load(stage, units, s == 0, s == count - 1)
        load.cap = max(1, _cap(estimator, stage, units, later, total, s == 0, s == count - 1, capped))
        loads.append(load)
    layers = _split(loads, wanted)
    return like.with_(stages=tuple(Stage(n, g) for n, g in zip(layers, groups)))


def _split(loads: list[_Load], wanted: int) -> list[int]:
    """Proportional start, then one layer at a time to or from the stage where it matters least or most."""
    speeds = [1.0 / load.time(1) for load in loads]
    whole = sum(speeds)
    layers = [max(1, min(load.cap, int(wanted * v / whole))) for load, v in zip(loads, speeds)]
    while sum(layers) > wanted:
        s = max((i for i in range(len(loads)) if layers[i] > 1), key=lambda i: loads[i].time(layers[i]))
        layers[s] -= 1
    while sum(layers) < wanted:
        open_stages = [i for i in range(len(loads)) if layers[i] < loads[i].cap] or range(len(loads))
        s = min(open_stages, key=lambda i: loads[i].time(layers[i] + 1))
        layers[s] += 1
    while True:
        worst = max(range(len(loads)), key=lambda i: loads[i].time(layers[i]))
        if layers[worst] == 1:
            return layers
        open_stages = [i for i in range(len(loads)) if i != worst and layers[i] < loads[i].cap]
        if not open_stages:
            return layers
        best = min(open_stages, key=lambda i: loads[i].time(layers[i] + 1))
        if loads[best].time(layers[best] + 1) >= loads[worst].time(layers[worst]):
            return layers
        layers[worst] -= 1
        layers[best] += 1
