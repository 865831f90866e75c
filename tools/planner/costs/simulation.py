"""Whole iterations through the schedule simulator: the final word on a plan."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

from megatron_het.features import features_of
from megatron_het.features.base import Figures
from megatron_het.lowering import programs
from megatron_het.lowering.programs import planned_costs, schedule_shape
from megatron_het.plan import Plan, PlanError
from megatron_het.schedule.cost import Costs, Link, Memory
from megatron_het.schedule.cutting import Parts
from megatron_het.schedule.generators.listing import ORDERS, parts_of
from megatron_het.schedule.ir import Program
from megatron_het.schedule.simulate import Result, simulate
from megatron_het.schedule.transfers import post_receives_early

from ..errors import PlannerError
from ..inputs.packing import Seat
from .build import build_plan, in_order_of, part_of, replica_group, seats
from .candidate import Candidate, Group, rank_parameters
from .estimate import Estimate, Estimator
from .operating import state_shards, unit_of_device
from .plain import End, Pipelines, Wiring, can_price, compute_orders, makespan_s, pipelines_of, pipelines_s
from .schedules import PLAIN, schedule_of
from .schedules.ministage import moves_s
from .stages import attention_layers, passes_of_plan, sharding_s, stage_tails
from .unit import Unit

Device = tuple[int, Group, Unit]  # (stage, kind of replica, its figures)
Seats = list[list[list[Seat]]]  # of every rank, by stage and replica
Rows = list[tuple[float, ...]]  # a figure of every device and chunk


@dataclass(frozen=True)
class _Placed:
    """A plan, or a part of one, on nodes, with its costs.

    Attributes:
        whole: Determines gradient reduction, gathers of parameters and memory.
        candidate: The simulated candidate: the whole or one block of it.
        seated: Nodes of the plan's ranks, in the plan's order of replicas.
    """

    estimator: Estimator
    whole: Candidate
    candidate: Candidate
    estimate: Estimate
    plan: Plan
    seated: Seats

    @cached_property
    def devices(self) -> list[Device]:
        """The replicas in the plan's order, with their figures; replicas of a kind share one entry."""
        estimator, candidate, plan = self.estimator, self.candidate, self.plan
        known: dict[tuple[int, Group, tuple[int, ...]], Device] = {}

        def device(s: int, g: Group, own: tuple[int, ...]) -> Device:
            unit = unit_of_device(estimator, candidate, g, own) if own else estimator.unit_of(candidate, g, s)
            assert unit is not None
            return s, g, unit

        passes = passes_of_plan(plan) if candidate.sizes else []
        out = []
        for s, (stage, row) in enumerate(zip(plan.stages, self.seated, strict=True)):
            for q, (replica, mine) in enumerate(zip(stage.replicas, row, strict=True)):
                kind = s, replica_group(replica, mine, candidate.cp, stage), passes[q] if passes else ()
                out.append(known.get(kind) or known.setdefault(kind, device(*kind)))
        return out

    @cached_property
    def scattered(self) -> list[int]:
        """Stages whose replicas are on several nodes; ``seated`` may be of one of the plan's pipelines."""
        estimator, whole, seated = self.estimator, self.whole, self.seated
        if [len(row) for row in seated] != [sum(g.count for g in stage.groups) for stage in whole.stages]:
            seated = seats(estimator.cluster, whole.stages, whole.cp) or seated
        return [s for s, row in enumerate(seated) if len({seat.host for mine in row for seat in mine}) > 1]

    def _figures(self) -> Figures:
        """Times of the operations of the plan's features on every device, for the simulation of its real program."""
        estimator, whole, devices = self.estimator, self.whole, self.devices
        model, batch = estimator.model, whole.micro_batch_size
        element = float(model.element_bytes)
        moved = []
        for s, stage in enumerate(whole.stages):
            units = [estimator.unit_of(whole, g, s) for g in stage.groups]
            counts = [rank_parameters(whole, u, s) for u in units if u is not None]
            moved.append(moves_s(estimator, whole, counts, s, s in self.scattered))
        kinds = [
            [estimator.cluster.gpu(estimator.cluster.nodes[p.pool].gpu) for p, _ in whole.parts_of(g)]
            for _, g, _ in devices
        ]
        host = [min(gpu.host_bytes_per_s for gpu in of) for of in kinds]
        # Figures of a layer are not measured apart from its attention: by operations, causal attention once.
        length = model.seq_length
        share = 1 - model.layer_flops(length, 0) / model.layer_flops(length)
        attending = [attention_layers(model, whole, s) for s in range(len(whole.stages))]
        if model.kinds:  # of a layer with attention, and not of the mean of all
            share *= model.num_layers / max(1, sum(attending))
        means = [estimator.unit_of(whole, g) if model.kinds else u for _, g, u in devices]
        tokens = [float(batch * length) * max(portion for _, portion in whole.parts_of(g)) for _, g, _ in devices]
        return Figures(
            gather_s=tuple(moved[s][0] for s, _, _ in devices),
            reduce_s=tuple(moved[s][1] for s, _, _ in devices),
            host_copy_s=tuple(
                n * element / state_shards(estimator, whole, s, g, n) / speed
                for (s, g, u), speed in zip(devices, host, strict=True)
                for n in (rank_parameters(whole, u, s),)
            ),
            host_bytes_per_s=tuple(host),
            embedding_forward_s=tuple(u.embedding_f for _, _, u in devices),
            embedding_backward_s=tuple(u.embedding_b for _, _, u in devices),
            head_forward_s=tuple(u.head_f for _, _, u in devices),
            head_backward_s=tuple(u.head_b for _, _, u in devices),
            head_bytes=tuple(u.head_bytes for _, _, u in devices),
            attention_forward_s=tuple(share * u.layer_f for u in means if u is not None),
            attention_backward_s=tuple(share * u.layer_b for u in means if u is not None),
            kv_bytes=tuple(
                2 * n * model.kv_size / g.tp * element for n, (_, g, _) in zip(tokens, devices, strict=True)
            ),
            query_bytes=tuple(
                2 * n * model.hidden_size / g.tp * element for n, (_, g, _) in zip(tokens, devices, strict=True)
            ),
        )

    def _passes(self) -> tuple[Rows, Rows, Rows]:
        """Seconds of forwards and backwards, and bytes of activations, by device and chunk."""
        estimator, whole, candidate = self.estimator, self.whole, self.candidate
        last = candidate.head_stage
        least: dict[int, tuple[float, float]] = {}
        if candidate.zero_stage >= 2 and not schedule_of(candidate).shards_parameters:
            for s, its in enumerate(whole.stages):
                units = [estimator.unit_of(whole, g, s) for g in its.groups]
                least[s] = sharding_s(estimator, whole, units, s, s in self.scattered)  # type: ignore[arg-type]
        known: dict[tuple[int, Group, int], tuple[tuple[float, ...], ...]] = {}

        def rows(s: int, u: Unit) -> tuple[tuple[float, ...], ...]:
            layers = self.plan.stages[s].layers
            f, b = (u.chunks_s(layers, s == 0, s == last, back) for back in (False, True))
            a = u.of_chunks("layer_bytes", layers)
            if s == 0:
                a[0] += u.embedding_bytes
            if s in least:
                f, b = [max(x, least[s][0]) for x in f], [max(x, least[s][1]) for x in b]
            return tuple(f), tuple(b), tuple(a)

        found = [known.get((s, g, id(u))) or known.setdefault((s, g, id(u)), rows(s, u)) for s, g, u in self.devices]
        forward, backward, kept = (list(column) for column in zip(*found, strict=True))
        return forward, backward, kept

    def costs(self, program: Program | None = None, parts: Parts = ()) -> Costs:
        """The simulator's costs, from the same per-layer figures as the closed form.

        Args:
            program: None: only the features that need no program are priced.
            parts: Keys that slices see; empty for the mean of all documents.
        """
        estimator, whole, candidate, plan = self.estimator, self.whole, self.candidate, self.plan
        devices = self.devices
        size = estimator.boundary_bytes_per_sequence * candidate.micro_batch_size / candidate.cp
        flat = [replica for stage in self.seated for replica in stage]
        tails = stage_tails(estimator, whole, self.scattered)
        last = candidate.head_stage

        @cache
        def price(a: End, b: End, local: bool) -> Link:
            (one, stage), (other, later) = a, b
            seconds, card_s = estimator.hand_over(one, other, size, candidate.cp, local, (stage, later))
            fixed = min(seconds, estimator.runtime.transfer_latency_s)
            # With two stages a replica sends over one boundary only.
            card = (("card", size / card_s),) if card_s and len(whole.stages) > 2 else ()
            return Link(fixed, size / max(seconds - fixed, 1e-12), card)

        # Parts of their own are in one node only where all are.
        places = [
            tuple(seat.host for seat in mine) if g.parts else mine[0].host for (_, g, _), mine in zip(devices, flat)
        ]
        by_group = {
            # The part whose activations fill its GPU most, as in the figures of a replica.
            (s, g._replace(count=1, ep=whole.cut_of(g)[0])): (
                g,
                max(of, key=lambda m: m.activation_bytes / m.capacity_bytes),
            )
            for s, stage in enumerate(whole.stages)
            for g, of in zip(stage.groups, self.estimate.memory_of(whole, s), strict=True)
        }
        groups, memories = zip(*[by_group[s, g] for s, g, _ in devices])
        kinds = [(g, whole.stages[s].groups) for g, (s, *_) in zip(groups, devices)]
        routes = [[replica.microbatches for replica in stage.replicas] for stage in plan.stages]
        stage_of = [] if all(mine == routes[0] for mine in routes) else [s for s, _, _ in devices]
        link = Wiring(kinds, places, price, stage_of)
        forward, backward, kept = self._passes()
        attention: list[Rows] = [[], []]
        if candidate.slices > 1:  # a later slice attends to more keys
            attention = [
                [tuple(u.of_chunks(name, plan.stages[s].layers)) for s, _, u in devices]
                for name in ("attention_f", "attention_b")
            ]
            forward, backward = (  # without attention, whose time depends on the slice
                [tuple(x - a for x, a in zip(row, mine)) for row, mine in zip(*rows)]
                for rows in zip((forward, backward), attention, strict=True)
            )
        whole_share = estimator.model.attention_share if parts else 1.0  # parts are of the attention of whole sequences
        attention_f, attention_b = (tuple(tuple(x / whole_share for x in row) for row in rows) for rows in attention)
        costs = Costs(
            forward_s=tuple(forward),
            backward_s=tuple(backward),
            attention_forward_s=attention_f,
            attention_backward_s=attention_b,
            diagonal=0.5,
            parts=tuple(map(tuple, parts)),
            message_bytes=size,
            link=link,
            operation_s=estimator.runtime.operation_s,
            host_blocks=estimator.runtime.host_blocks,
            keeps_sent=estimator.runtime.keeps_sent and not schedule_of(candidate).cuts_sequences,
            tail_s=tuple(tails[s] for s, _, _ in devices),
            memory=Memory(
                activation_bytes=tuple(kept),
                logits_bytes=tuple(u.head_bytes if s == last else 0.0 for s, _, u in devices),
                other_bytes=tuple(m.total_bytes - m.activation_bytes for m in memories),
            ),
        )
        if program is not None:
            figures = self._figures()
            for feature, options in features_of(plan):
                costs = feature.price(costs, options, program, figures)
        return costs

    def _alone(self) -> list[float]:
        """For each replica, ratio of a pass's time while the others wait to its time while all are busy."""
        prices, batch, nodes = self.estimator.costs, self.plan.training.micro_batch_size, self.estimator.cluster.nodes
        return [
            max(prices.alone_share(nodes[pool].gpu, batch, replica.tp) for pool in {s.pool for s in seats_of})
            for stage, row in zip(self.plan.stages, self.seated, strict=True)
            for replica, seats_of in zip(stage.replicas, row, strict=True)
        ]

    def simulate(self) -> "Simulation":
        """Simulate the program event by event; raises PlannerError."""
        parts = schedule_of(self.candidate).slice_parts(self.estimator.model, self.plan)
        program = program_of(self.plan, parts)
        if self.estimator.runtime.host_blocks:
            program = post_receives_early(program)  # as the runtime does over gloo
        result = simulate_beside(program, self.costs(program, parts), self._alone())
        return Simulation(result.makespan_s, result)

    def quick_s(self) -> float:
        """The iteration time by ``plain.py``, or by the simulator if the program has other operations."""
        inputs = programs.generator_inputs(self.plan)
        if inputs is not None:
            costs = self.costs(parts=schedule_of(self.candidate).slice_parts(self.estimator.model, self.plan))
            shape, speeds, parameters = inputs
            seconds = pipelines_s(self.plan.schedule.name, shape, speeds, costs, parameters)
            if seconds is not None:
                return seconds
            found = compute_orders(self.plan, inputs) if can_price(shape, costs) else None
            if found is not None:
                return makespan_s(*found, costs)
        return self.simulate().iteration_s


# Devices of one machine that slow each other down while they are busy: processes on cores that share memory.
#
# A profile is taken with all devices busy, and each layer once more with the others waiting.  In a pipeline devices
# wait for each other, so how fast an operation is depends on how often the others are busy beside it.


ROUNDS = 3  # simulations after the first; each takes the overlaps of the one before
_SCALED = ("forward_s", "backward_s", "attention_forward_s", "attention_backward_s")


def simulate_beside(program: Program, costs: Costs, shares: Sequence[float]) -> Result:
    """Simulate operations that take less time while other devices wait.

    Args:
        costs: Costs measured with all devices busy.
        shares: For each device, ratio of an operation's time while all others wait to that while all are busy.
    """
    result = simulate(program, costs)
    if min(shares) == 1:
        return result
    for _ in range(ROUNDS):
        factors = [share + (1 - share) * busy for share, busy in zip(shares, others_busy(result), strict=True)]
        result = simulate(program, _scaled(costs, factors))
    return result


def others_busy(result: Result) -> list[float]:
    """For each device, the mean share of the other devices that compute while it computes."""
    spans = [[(result.start_s[i], result.end_s[i]) for i in queue] for queue in result.compute_queues]
    total = len(spans)
    edges = sorted(
        chain.from_iterable(
            ((start, 1, device), (end, -1, device)) for device, mine in enumerate(spans) for start, end in mine
        )
    )
    active, now = [0] * total, 0.0
    own, beside = [0.0] * total, [0.0] * total
    for at, step, device in edges:
        busy = [d for d in range(total) if active[d]]
        for d in busy:
            own[d] += at - now
            beside[d] += (at - now) * (len(busy) - 1)
        active[device], now = active[device] + step, at
    return [b / o / (total - 1) if o and total > 1 else 1.0 for b, o in zip(beside, own, strict=True)]


def _scaled(costs: Costs, factors: Sequence[float]) -> Costs:
    """Passes of every device, times its factor."""
    changes: dict[str, Any] = {
        name: tuple(tuple(x * factor for x in row) for row, factor in zip(rows, factors, strict=True))
        for name in _SCALED
        if (rows := getattr(costs, name))
    }
    return replace(costs, **changes)


MOST_REMEMBERED = 500_000  # compute operations of plans that are cached for simulation in other orders
WHOLE_PROGRAM = 16
"""Operations of programs that only compute that take the time of one of a program that is built."""
MOST_COUPLED = 60_000  # compute operations up to which plans whose parts gather together are simulated as a whole


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated iteration."""

    iteration_s: float  # makespan with gradient reduction and update
    result: Result  # the simulator's own result (timeline, bubble by cause, memory over time)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per device (replica), simulated peak of activations plus everything static."""
        return tuple(use.peak_bytes for use in self.result.memory)


def operations_of(estimator: Estimator, candidate: Candidate) -> int:
    """Compute operations of one of the candidate's equal pipelines; 0 for a single stage, which needs no simulation."""
    if len(candidate.stages) == 1:
        return 0
    microbatches = estimator.model.global_batch_size // candidate.micro_batch_size // candidate.blocks
    return 2 * len(candidate.path) * candidate.slices * microbatches


def is_built(candidate: Candidate) -> bool:
    """Whether a 1F1B-like program is built as a whole: it has more than passes, or replicas run passes together."""
    widths = [sum(g.count for g in stage.groups) for stage in candidate.stages]
    return bool(
        candidate.rows
        or candidate.exchange
        or (candidate.across_replicas and max(widths) > candidate.blocks)
        or any(candidate.spans(g) for stage in candidate.stages for g in stage.groups)
    )


def work_of(estimator: Estimator, candidate: Candidate) -> int:
    """Converts the operations to those of programs that only compute, by the time that a simulation takes."""
    return operations_of(estimator, candidate) * (WHOLE_PROGRAM if is_built(candidate) else 1)


def program_of(plan: Plan, parts: Parts = ()) -> Program:
    """The operations of one iteration: the program that the plan's ranks run.

    Plain ZeRO-2 and 3, which are compared with and have no operations, are priced in the passes.

    Args:
        parts: Keys that slices see, by microbatch and slice; empty where each sees all earlier ones.

    Raises:
        PlannerError: the schedule cannot run this shape, or has no such parameters.
    """
    given = {name: value for name, value in plan.schedule.parameters.items() if name != "zero_stage"}
    try:
        return programs.program_of(replace(plan, schedule=replace(plan.schedule, parameters=given)), parts=parts)
    except PlanError as error:
        raise PlannerError("plan", error.where, plan.schedule.parameters, error.problem, error.hint) from None


def _block_seats(estimator: Estimator, candidate: Candidate) -> Seats:
    """Nodes of the first of the candidate's equal pipelines, as placed with the others in the whole plan."""
    blocks, out = candidate.blocks, []
    seated = seats(estimator.cluster, candidate.stages, candidate.cp)
    assert seated is not None  # the plan has been made of it
    for stage, row in zip(candidate.stages, seated):
        mine, first = [], 0
        for g in stage.groups:
            mine += row[first : first + g.count // blocks]
            first += g.count
        out.append(mine)
    return out


def block_s(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> float:
    """The iteration time of one of the equal pipelines, known for other orders and depths; raises PlannerError."""

    def simulate_it() -> float:
        key, known = candidate.with_(order=ORDERS[0], depths=()), estimator.known_blocks
        if key not in known:
            if sum(block.operations for block in known.values()) > MOST_REMEMBERED:
                known.clear()
            known[key] = _Block(estimator, candidate, estimate)
        return known[key].seconds(candidate, estimate)

    return estimator.simulated_s(candidate, False, simulate_it)


class _Block:
    """One of a candidate's equal pipelines, for every order and any number of microbatches in flight.

    The finalists of a search are timed in several orders and depths, which differ in two parameters of the schedule.

    Attributes:
        operations: Number of its compute operations.
        placed: The pipeline in its nodes, which can also be simulated event by event.
    """

    def __init__(self, estimator: Estimator, candidate: Candidate, estimate: Estimate) -> None:
        self.operations = operations_of(estimator, candidate)
        # The many plans of 1F1B are checked when one of them is confirmed.
        is_plain = candidate.schedule == PLAIN.name
        plan = build_plan(estimator, candidate, estimate, one_block=True, checked=not is_plain)
        seated = _block_seats(estimator, candidate)
        self.placed = _Placed(estimator, candidate, candidate.block(), estimate, plan, seated)
        self._pipelines: Pipelines | None = None
        inputs = programs.generator_inputs(plan) if is_plain else None
        if inputs is not None:
            self._pipelines = pipelines_of(candidate.schedule, *inputs[:2], self.placed.costs())

    def seconds(self, candidate: Candidate, estimate: Estimate) -> float:
        """The iteration time in the candidate's order and depths."""
        plan = in_order_of(self.placed.plan, candidate)
        if self._pipelines is not None:
            return self._pipelines.seconds(programs.parameters_of(plan))
        found = replace(self.placed, whole=candidate, candidate=candidate.block(), estimate=estimate, plan=plan)
        return found.quick_s()


def simulate_parts(estimator: Estimator, candidate: Candidate, estimate: Estimate, plan: Plan, seated: Seats) -> float:
    """The iteration time of a whole plan: that of its slowest independent part. Raises PlannerError.

    Equal parts (replicas, microbatches, links) are simulated once, so that this takes a fraction of
    the time of :func:`simulate_candidate` and gives the same result.
    """
    placed = _Placed(estimator, candidate, candidate, estimate, plan, seated)
    operations = operations_of(estimator, candidate) * candidate.blocks
    # Replicas of a stage gather together, whichever part they belong to.
    gathers = schedule_of(candidate).shards_parameters and operations <= MOST_COUPLED
    pools = [tuple(seat.pool for seat in seats) for stage in seated for seats in stage]
    # Replicas that share experts go as fast as the slowest of them.
    if not gathers and all(len({pools[d] for d in alike}) == 1 for alike in schedule_shape(plan).companions):
        # A generator may order parts together that it cannot order alone.
        with suppress(PlannerError):
            return max(part.quick_s() for part in _different_parts(placed))
    return placed.simulate().iteration_s


def _different_parts(placed: _Placed) -> Iterator[_Placed]:
    """One part of each kind."""
    plan = placed.plan
    flat = [seat for stage in placed.seated for seat in stage]
    cut_of = [(replica.cut, replica.shares) for stage in plan.stages for replica in stage.replicas]
    done: set[object] = set()
    most: dict[object, int] = {}
    parts = sorted(parts_of(schedule_shape(plan)), key=lambda part: -len(part.microbatches))
    for part in parts:
        here = [flat[d] for d in part.devices]
        nodes: dict[tuple[int, int], int] = {}
        cuts = [cut_of[d] for d in part.devices]
        places = tuple(
            (tuple(seat.pool for seat in s), cut, nodes.setdefault(s[0].host, len(nodes))) for s, cut in zip(here, cuts)
        )
        if max(part.shape.replicas) == 1:  # a plain pipeline takes no longer with fewer microbatches
            key: object = places
            if most.setdefault(places, len(part.microbatches)) > len(part.microbatches):
                continue
        else:
            key = part.shape, places
        if key not in done:
            done.add(key)
            mine = iter(here)
            seats_of_stages = [[next(mine) for _ in range(count)] for count in part.shape.replicas]
            yield replace(placed, plan=part_of(plan, part), seated=seats_of_stages)


def simulate_candidate(
    estimator: Estimator, candidate: Candidate, estimate: Estimate, plan: Plan, seated: Seats | None = None
) -> Simulation:
    """One iteration of a whole plan, event by event; raises PlannerError where the schedule cannot run this shape.

    Args:
        seated: Nodes of the plan's ranks, for plans that list replicas in another order than the candidate.
    """
    seated = seated or seats(estimator.cluster, candidate.stages, candidate.cp)
    assert seated is not None  # the plan has been made of it
    return _Placed(estimator, candidate, candidate, estimate, plan, seated).simulate()


def with_costs(
    estimator: Estimator, candidate: Candidate, estimate: Estimate, plan: Plan, seated: Seats | None = None
) -> Plan:
    """The plan with the costs of its operations, for the run to compare itself with; raises PlannerError."""
    seated = seated or seats(estimator.cluster, candidate.stages, candidate.cp)
    assert plan.predicted is not None and seated is not None  # the plan has been made of it
    program = program_of(plan)
    costs = _Placed(estimator, candidate, candidate, estimate, plan, seated).costs(program)
    return replace(plan, predicted=replace(plan.predicted, costs=planned_costs(costs, program)))
