"""The choice between nearly equally fast plans: by regularity, need of overlap, and loss where figures are off."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

from ..costs.candidate import Candidate
from ..costs.estimate import Estimate, Estimator
from ..costs.unit import Unit
from ..inputs.cluster import NodeGroup
from .balance import relieved
from .finish import confirm, pools_of, simulated
from .outcome import Found, Goal, PassedOver, SearchResult, Shift

NEAR = 0.005
"""Share by which an iteration may be longer for less dependence on overlap.

Plans of a cluster and of one with a node more are compared within the same share: both may have been chosen so.
"""
PLAINER = 0.02  # share by which an iteration may be longer for a plainer plan
SHARED_BUS = 6.5e10  # bytes per second of a GPU to its node below which TP goes over PCIe; the NVLink of V100 has 68e9
NETWORK_OFF, KIND_OFF = 0.2, 0.1
"""Shares by which the network, and the speed of one kind of GPU, may differ from the figures given."""
MOST_WORLDS_TRIED = 24  # most plans that are priced with changed figures


def irregularity(estimator: Estimator, candidate: Candidate) -> tuple[int, int, int, int]:
    """Counts stages that differ (beyond one per kind), have TP over PCIe, or one layer, and alternations of kinds.

    State in main memory counts as a stage of one layer: it needs that memory, and copies that overlap.
    """
    stages, intra = candidate.keeping().stages, estimator.network.intra
    shapes = {s.groups for s in stages}
    kinds = {frozenset(p for g in groups for p in g.pools) for groups in shapes}
    shared = sum(any(g.tp > 1 and intra[p] < SHARED_BUS for g in s.groups for p in g.pools) for s in stages)
    short = sum(s.layers == 1 for s in stages) if len(stages) < estimator.model.num_layers else 0
    pools = pools_of(candidate)
    turns = sum(a != b for a, b in pairwise(pools)) + 1 - len(set(pools))
    return len(shapes) - len(kinds), shared, short + candidate.offload, turns


def prefer_plain(estimator: Estimator, goal: Goal, outcome: SearchResult) -> None:
    """Put the plainest of the plans that are nearly as good as the best first, and record the one passed over."""
    if outcome.best is None or outcome.interrupted:
        return
    if outcome.best.candidate.offload and (resident := _resident(estimator, goal, outcome.best.candidate)) is not None:
        outcome.found = confirm(estimator, goal, [*outcome.found, resident])
    best = outcome.best
    limit, least = best.value(goal) * (1 + PLAINER), irregularity(estimator, best.candidate)
    near = [f for f in outcome.found if f.runnable and f.value(goal) <= limit]
    for found in sorted(near, key=lambda f: (irregularity(estimator, f.candidate), f.value(goal))):
        plainness = irregularity(estimator, found.candidate)
        if plainness >= least:
            break
        if plainness[:3] == least[:3] and found.value(goal) > best.value(goal) * (1 + PLAINER / 2):
            continue  # alternating kinds may cost only half of that
        if _is_taken(estimator, goal, outcome, found, limit):
            outcome.passed_over = _passed_over(estimator, best, outcome.found[0], _in_words(estimator, best.candidate))
            return
    _prefer_independent(estimator, goal, outcome)


def _resident(estimator: Estimator, goal: Goal, offloaded: Candidate) -> Found | None:
    """The plan with its state on the GPUs, in the largest microbatches that fit; None where it does not fit."""
    for batch in sorted((b for b in estimator.model.batch_sizes if b <= offloaded.micro_batch_size), reverse=True):
        c = relieved(estimator, offloaded.with_(offload=False, shares=None, micro_batch_size=batch))
        estimate = goal.usable(estimator, c)
        if estimate is not None:
            return simulated(estimator, c, estimate)
    return None


def _is_taken(estimator: Estimator, goal: Goal, outcome: SearchResult, found: Found, limit: float) -> bool:
    """Put a plan first if its whole program meets the limit; returns whether it does."""
    confirmed = [f for f in confirm(estimator, goal, [found]) if f.value(goal) <= limit]
    if confirmed:
        outcome.found = confirmed + [f for f in outcome.found if f is not found]
    return bool(confirmed)


def _in_words(estimator: Estimator, candidate: Candidate) -> str:
    """Returns the irregularities of a plan, for the output."""
    _, shared, short, turns = irregularity(estimator, candidate)
    words = f"{len(candidate.stages)} stages, {len({s.groups for s in candidate.stages})} different ones"
    words = words if len(candidate.stages) > 1 else "one stage"
    words += f", {short - candidate.offload} of one layer" if short > candidate.offload else ""
    words += ", state in main memory" if candidate.offload else ""
    words += f", {shared} with TP over PCIe" if shared else ""
    return words + (", kinds of GPU in turns" if turns else "")


def _passed_over(estimator: Estimator, best: Found, chosen: Found, plan: str = "") -> PassedOver:
    return PassedOver(best.iteration_s, _blocked_s(estimator, best), _blocked_s(estimator, chosen), plan)


def blocking_ratio(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> float | None:
    """Ratio of the iteration times without and with overlapped transfers; None where nothing overlaps anyway."""
    if len(candidate.stages) == 1 or not _overlaps(estimator):
        return None
    in_turn = replace(estimator.runtime, transfers_in_turn=True)
    other = Estimator(estimator.cluster, estimator.model, estimator.costs, in_turn, estimator.memory_margin)
    found = other.estimate(candidate)
    return None if found is None else max(1.0, found.iteration_s / estimate.iteration_s)


def _overlaps(estimator: Estimator) -> bool:
    """Whether the runtime overlaps transfers with compute."""
    return not (estimator.runtime.transfers_in_turn or estimator.runtime.host_blocks)


def _prefer_independent(estimator: Estimator, goal: Goal, outcome: SearchResult) -> None:
    """Put the plan first that takes least time without overlap, among those nearly as fast as the best.

    It must gain more without overlap than it loses with it.  Under the objective ``cost`` the cheapest plan stays.
    """
    best = outcome.best
    if best is None or goal.objective == "cost" or not _overlaps(estimator):
        return
    limit_s, blocked_s = best.iteration_s * (1 + NEAR), _blocked_s(estimator, best)
    near = [f for f in outcome.found if f.runnable and f is not best and f.iteration_s <= limit_s]
    for found in sorted(near, key=lambda f: _blocked_s(estimator, f)):
        if blocked_s - _blocked_s(estimator, found) <= max(0.0, found.iteration_s - best.iteration_s):
            return
        if _is_taken(estimator, goal, outcome, found, limit_s):
            outcome.passed_over = _passed_over(estimator, best, outcome.found[0])
            return


def _blocked_s(estimator: Estimator, found: Found) -> float:
    """Seconds of an iteration without overlapped transfers."""
    return found.iteration_s * (blocking_ratio(estimator, found.candidate, found.estimate) or 1.0)


class _Scenario(Estimator):
    """Estimator of a cluster whose network or whose GPUs of one kind have another speed.

    Args:
        network: Factor of the bandwidth between nodes and between zones.
        kind: Name of the kind of GPU whose speed differs; empty: none.
        speed: Factor of its speed.
    """

    def __init__(self, base: Estimator, network: float = 1.0, kind: str = "", speed: float = 1.0) -> None:
        self.kind, self._speed, cluster = kind, speed, base.cluster
        if network != 1.0:
            nodes = tuple(_on_network(node, network) for node in cluster.nodes)
            links = tuple(k.model_copy(update={"bytes_per_s": k.bytes_per_s * network}) for k in cluster.links)
            cluster = cluster.model_copy(update={"nodes": nodes, "links": links})
        super().__init__(cluster, base.model, base.costs, base.runtime, base.memory_margin)
        measured = self.network.measured
        self.network.measured = [
            replace(k, bytes_per_s=k.bytes_per_s * network) if k.scope == "network" else k for k in measured
        ]

    def _unit(self, pool: int, *args: Any, **named: Any) -> Unit | None:
        unit = super()._unit(pool, *args, **named)
        if unit is None or self.cluster.nodes[pool].gpu != self.kind:
            return unit
        return replace(unit, **{name: getattr(unit, name) / self._speed for name in _UNIT_SECONDS})


_UNIT_SECONDS = tuple(f.name for f in fields(Unit) if f.name.endswith(("_f", "_b")))


def _on_network(node: NodeGroup, factor: float) -> NodeGroup:
    """The nodes with their network bandwidths multiplied by a factor."""
    rates = ("network_bytes_per_s", "stream_bytes_per_s", "collective_bytes_per_s")
    changed: dict[str, Any] = {name: getattr(node, name) * factor for name in rates if getattr(node, name)}
    if node.measured_rates:
        changed["measured_rates"] = tuple((*row[:2], row[2] * factor) for row in node.measured_rates)
    return node.model_copy(update=changed)


def _scenarios(estimator: Estimator) -> Iterator[tuple[str, _Scenario]]:
    """Yields deviations from the given figures: a description, and the estimator of the deviating cluster."""
    yield f"the network is {100 * NETWORK_OFF:.0f} % slower", _Scenario(estimator, network=1 - NETWORK_OFF)
    yield f"the network is {100 * NETWORK_OFF:.0f} % faster", _Scenario(estimator, network=1 + NETWORK_OFF)
    kinds = list(dict.fromkeys(node.gpu for node in estimator.cluster.nodes))
    for kind in kinds if len(kinds) > 1 else ():
        for factor, word in ((1 - KIND_OFF, "slower"), (1 + KIND_OFF, "faster")):
            yield f"{kind} is {100 * KIND_OFF:.0f} % {word}", _Scenario(estimator, kind=kind, speed=factor)


def prefer_steady(estimator: Estimator, goal: Goal, outcome: SearchResult) -> None:
    """Put the plan first that loses least where figures are off, and record the changes of its iteration.

    Only plans that take hardly longer than the first one, and are as plain, may replace it.  Microbatches are
    divided anew where figures differ.  The closed form gives the changed times.
    """
    first = outcome.best
    if first is None or outcome.interrupted:
        return
    limit, least = first.value(goal) * (1 + NEAR), irregularity(estimator, first.candidate)
    near = [first]
    if outcome.passed_over is None and goal.objective != "cost":
        others = (f for f in outcome.found if f is not first and f.runnable and f.value(goal) <= limit)
        near += [f for f in others if irregularity(estimator, f.candidate) <= least][: MOST_WORLDS_TRIED - 1]
    scenarios = list(_scenarios(estimator))
    shifts = {id(f): _shifts(scenarios, f) for f in near}

    def worst_s(found: Found) -> float:
        return found.iteration_s * max([1.0, *(1 + shift.share for shift in shifts[id(found)])])

    for found in sorted(near, key=worst_s):
        if worst_s(first) - worst_s(found) <= max(0.0, found.iteration_s - first.iteration_s):
            break
        if _is_taken(estimator, goal, outcome, found, limit):
            outcome.steadier_than_s, outcome.shifts = first.iteration_s, shifts[id(found)]
            return
    outcome.shifts = shifts[id(first)]


def _shifts(scenarios: list[tuple[str, _Scenario]], found: Found) -> tuple[Shift, ...]:
    """Relative change of a plan's iteration in each scenario that concerns GPUs or links of the plan."""
    out = []
    for words, world in scenarios:
        used = {world.cluster.nodes[pool].gpu for pool in found.candidate.gpus()}
        estimate = world.estimate(found.candidate) if world.kind in ("", *used) else None
        if estimate is not None:
            out.append(Shift(words, estimate.iteration_s / found.estimate.iteration_s - 1))
    return tuple(out)
