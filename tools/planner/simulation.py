"""Whole iterations through the schedule simulator: the final word on a plan."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_het.config_plan import generator_parameters
from megatron_het.plan import Plan
from megatron_het.schedule.cost import Costs, Link, Memory
from megatron_het.schedule.generators import GENERATORS, generate
from megatron_het.schedule.ir import Program, Shape
from megatron_het.schedule.passes import add_transfers, post_receives_early
from megatron_het.schedule.simulate import Result, simulate
from tools.planner.build import build_plan, seats
from tools.planner.candidate import Candidate, Group
from tools.planner.errors import PlannerError
from tools.planner.estimate import Estimate, Estimator, Unit
from tools.planner.formulas import sharding_s, stage_tails
from tools.planner.packing import Seat

Seats = list[list[list[Seat]]]


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated iteration.

    Attributes:
        iteration_s: Makespan with gradient reduction and update.
        result: The simulator's own result (timeline, bubble by cause, memory over time).
        peak_bytes: Per device (replica), simulated peak of activations plus everything static.
    """

    iteration_s: float
    result: Result
    peak_bytes: tuple[float, ...]


def shape_of(plan: Plan, candidate: Candidate) -> Shape:
    """The schedule's shape of a plan."""
    total = plan.num_microbatches
    routes = []
    for stage in plan.stages:
        row = [0] * total
        for q, replica in enumerate(stage.replicas):
            for m in replica.microbatches:
                row[m] = q
        routes.append(tuple(row))
    return Shape(
        layers=tuple(s.layers for s in plan.stages), route=tuple(routes),
        replicas=tuple(len(s.replicas) for s in plan.stages), slices=candidate.slices,
    )


def program_of(plan: Plan, candidate: Candidate) -> Program:
    """The operations of one iteration, transfers included.

    Raises:
        PlannerError: the schedule cannot run this shape.
    """
    name, given = plan.schedule.name, plan.schedule.parameters
    speeds = [r.speed for s in plan.stages for r in s.replicas]
    try:
        if name not in GENERATORS:
            raise ValueError(f"there is no such schedule (known: {', '.join(sorted(GENERATORS))})")
        parameters = {key: given[key] for key in generator_parameters(name) if key in given}
        if name in ("1f1b", "interleaved"):
            parameters["speeds"] = speeds
        return add_transfers(generate(name, shape_of(plan, candidate), **parameters), speeds=speeds)
    except (TypeError, ValueError) as error:
        raise PlannerError("plan", "schedule", {"name": name, "parameters": given}, str(error)) from None


def costs_of(
    estimator: Estimator, whole: Candidate, candidate: Candidate, estimate: Estimate, plan: Plan, seated: Seats
) -> Costs:
    """The simulator's costs, from the same per-layer figures as the closed form.

    Args:
        whole: Decides gradient reduction and memory.
        candidate: What is simulated: the whole or one block of it.
        seated: Where the plan's ranks sit, in the plan's order of replicas.
    """
    size = estimator.boundary_bytes_per_sequence * candidate.micro_batch_size
    devices: list[tuple[int, Group, Unit]] = []
    for s, stage in enumerate(seated):
        for replica in stage:
            g = Group(replica[0].pool, len(replica), 1)
            unit = estimator.unit(g.pool, g.tp, candidate.micro_batch_size, candidate.recompute)
            assert unit is not None
            devices.append((s, g, unit))
    flat = [replica for stage in seated for replica in stage]
    tails = stage_tails(estimator, whole, estimate)
    last = len(candidate.stages) - 1

    def link(source: int, target: int) -> Link:
        (_, a, _), (_, b, _) = devices[source], devices[target]
        local = flat[source][0][:2] == flat[target][0][:2]
        seconds = estimator.network.transfer_s(a.pool, a.tp, b.pool, b.tp, size, local)
        fixed = min(seconds, estimator.runtime.transfer_latency_s)
        return Link(fixed, size / max(seconds - fixed, 1e-12))

    forward, backward, kept, static = [], [], [], []
    chunks = candidate.chunks
    least: dict[int, tuple[float, float]] = {}
    if candidate.zero_stage >= 2 and candidate.schedule != "ministage":
        for s, stage in enumerate(whole.stages):
            units = [estimator.unit(g.pool, g.tp, whole.micro_batch_size, whole.recompute) for g in stage.groups]
            least[s] = sharding_s(estimator, whole, units, s)  # type: ignore[arg-type]
    for s, _, u in devices:
        layers = plan.stages[s].layers
        f, b, a = ([n * x for n in layers] for x in (u.layer_f, u.layer_b, u.layer_bytes))
        if s == 0:
            f[0] += u.embedding_f
            b[0] += u.embedding_b
            a[0] += u.embedding_bytes
        if s == last:
            f[-1] += u.head_f
            b[-1] += u.head_b
        if s in least:
            f, b = [max(x, least[s][0]) for x in f], [max(x, least[s][1]) for x in b]
        forward.append(tuple(f))
        backward.append(tuple(b))
        kept.append(tuple(a))
    by_group = {(m.stage, m.group.pool, m.group.tp): m for m in estimate.memory}
    logits = tuple(u.head_bytes if s == last else 0.0 for s, _, u in devices)
    for s, g, _ in devices:
        m = by_group[s, g.pool, g.tp]
        static.append(m.total_bytes - m.activation_bytes)
    return Costs(
        forward_s=tuple(forward), backward_s=tuple(backward), message_bytes=size, link=link,
        operation_s=estimator.runtime.operation_s, host_blocks=estimator.runtime.host_blocks,
        keeps_sent=estimator.runtime.keeps_sent and candidate.schedule != "slimpipe",
        tail_s=tuple(tails[s] for s, _, _ in devices),
        memory=Memory(activation_bytes=tuple(kept), logits_bytes=logits, other_bytes=tuple(static)),
    )


def simulate_block(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> Simulation:
    """One of the candidate's equal, independent pipelines; it takes as long as all of them.

    Raises:
        PlannerError: the schedule cannot run this shape.
    """
    plan = build_plan(estimator, candidate, estimate, one_block=True)
    return _simulate(estimator, candidate, candidate.block(), estimate, plan, None)


def simulate_candidate(
    estimator: Estimator, candidate: Candidate, estimate: Estimate, plan: Plan, seated: Seats | None = None
) -> Simulation:
    """One iteration of a whole plan, event by event.

    Args:
        seated: Where the plan's ranks sit, for plans that list replicas in another order than the candidate.

    Raises:
        PlannerError: the schedule cannot run this shape.
    """
    return _simulate(estimator, candidate, candidate, estimate, plan, seated)


def _simulate(
    estimator: Estimator, whole: Candidate, candidate: Candidate, estimate: Estimate, plan: Plan, seated: Seats | None
) -> Simulation:
    program = program_of(plan, candidate)
    if estimator.runtime.host_blocks:
        program = post_receives_early(program)  # as the runtime does over gloo
    seated = seated or seats(estimator.cluster, candidate.stages)
    assert seated is not None  # the plan has been made of it
    costs = costs_of(estimator, whole, candidate, estimate, plan, seated)
    result = simulate(program, costs)
    peaks = tuple(use.peak_bytes for use in result.memory)
    return Simulation(result.makespan_s + estimate.gather_s, result, peaks)
