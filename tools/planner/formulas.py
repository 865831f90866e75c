"""The closed forms behind ``Estimator.estimate``: time and price of each family of schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

from tools.planner.candidate import Candidate, Group
from tools.planner.memory import group_memory, rank_parameters

if TYPE_CHECKING:
    from tools.planner.estimate import Estimate, Estimator, Unit


MISMATCH = (0.02, 0.01, 0.015, 0.08)
MISMATCH_WITH_SLACK = (0.01, 0.003, 0.0, 0.03)


def _irregular(candidate: Candidate) -> float:
    """Expected share of the busy time lost where stages of different width meet; see ``_pipeline``."""
    slack = candidate.schedule == "1f1b" and candidate.slack > 0
    base, per_stage, per_doubling, mixed = MISMATCH_WITH_SLACK if slack else MISMATCH
    loss = 0.0
    if len(candidate.stages) > 2 and candidate.schedule != "ministage":
        counts = [sum(g.count for g in s.groups) for s in candidate.stages]
        if max(counts) > min(counts):
            loss = base + per_stage * len(counts) + per_doubling * log2(max(counts) / min(counts))
    if len(candidate.stages) > 1 and any(len(s.groups) > 1 for s in candidate.stages):
        loss += mixed
    return loss


def divided_alike(candidate: Candidate, microbatches: Sequence[Sequence[int]]) -> bool:
    """Whether all stages divide the microbatches in the same way over their replicas (1F1B needs no slack)."""
    first: list[tuple[int, int]] | None = None
    for stage, counts in zip(candidate.stages, microbatches):
        mine = [(g.count, k) for g, k in zip(stage.groups, counts)]
        if first is not None and mine != first:
            return False
        first = mine
    return True


@dataclass(slots=True)
class StageTimes:
    """One stage of a candidate at its operating point.

    ``forward_s`` and ``backward_s`` are means over the microbatches; ``busy_s`` is the compute of
    the slowest replica over the iteration.
    """

    units: list[Unit]
    replica_f: list[float]
    replica_b: list[float]
    microbatches: list[int]
    busy_s: float
    forward_s: float
    backward_s: float
    in_flight: list[int]


def evaluate(estimator: Estimator, candidate: Candidate) -> Estimate | None:
    """See ``Estimator.estimate``."""
    from tools.planner.estimate import Estimate

    model = estimator.model
    if not candidate.stages or model.global_batch_size % candidate.micro_batch_size:
        return None
    total = model.global_batch_size // candidate.micro_batch_size
    for stage in candidate.stages:  # of the whole plan: a block has the rounded-up share of the microbatches
        replicas = sum(g.count for g in stage.groups)
        if not 0 < replicas <= total or candidate.even and total % replicas:
            return None
    blocks = candidate.blocks
    total = -(-total // blocks)
    transfers = estimator.transfer_times(candidate)
    stages = _stages(estimator, candidate, total, transfers)
    if stages is None:
        return None
    pipe_s, busy_s, bottleneck, gather_s, ends = _pipeline(estimator, candidate, stages, transfers, total)
    tail_s, sync_s, update_s = _tails(estimator, candidate, stages, ends)
    iteration_s = max(pipe_s, tail_s)
    memory = tuple(group_memory(estimator, candidate, stages))
    gpu_usd = iteration_s * sum(estimator.price[p] * n for p, n in candidate.gpus().items())
    egress_bytes, egress_usd = _egress(estimator, candidate, stages)
    exposed = max(0.0, iteration_s - pipe_s)
    return Estimate(
        iteration_s=iteration_s, busy_s=busy_s, fill_s=pipe_s - busy_s - gather_s,
        sync_s=min(sync_s, exposed), update_s=max(0.0, exposed - sync_s), gather_s=gather_s, bottleneck=bottleneck,
        microbatches=tuple(tuple(s.microbatches) for s in stages), memory=memory,
        usd_per_iteration=gpu_usd + egress_usd, gpu_usd_per_iteration=gpu_usd, egress_bytes=egress_bytes,
        stage_busy_s=tuple(s.busy_s for s in stages),
    )


def _stages(estimator: Estimator, candidate: Candidate, total: int, transfers: list[float]) -> list[StageTimes] | None:
    from tools.planner.estimate import allocate

    out: list[StageTimes] = []
    last, blocks = len(candidate.stages) - 1, candidate.blocks
    fixed = estimator.runtime.operation_s * candidate.chunks * candidate.slices
    for s, (layers, groups) in enumerate(candidate.stages):
        if layers < 1 or not groups:
            return None
        units: list[Unit] = []
        forward: list[float] = []
        backward: list[float] = []
        for g in groups:
            u = estimator.unit(g.pool, g.tp, candidate.micro_batch_size, candidate.recompute)
            if u is None:
                return None
            f, b = layers * u.layer_f + fixed, layers * u.layer_b + fixed
            if s == 0:
                f, b = f + u.embedding_f, b + u.embedding_b
            if s == last:
                f, b = f + u.head_f, b + u.head_b
            units.append(u)
            forward.append(f)
            backward.append(b)
        if candidate.zero_stage >= 2 and candidate.schedule != "ministage":
            least_f, least_b = sharding_s(estimator, candidate, units, s)
            forward, backward = [max(f, least_f) for f in forward], [max(b, least_b) for b in backward]
        counts = [g.count // blocks for g in groups]
        both = [f + b for f, b in zip(forward, backward)]
        if estimator.runtime.blocking_transfers:
            waits = 2 * (transfers[s] if s < last else 0.0) + 2 * (transfers[s - 1] if s else 0.0)
            both = [t + waits for t in both]
        if candidate.even:
            shares = [total // sum(counts)] * len(groups)
            busy = max(k * t for k, t in zip(shares, both))
        else:
            found = allocate(both, counts, total)
            if found is None:
                return None
            busy, shares = found
        weight = [n * k for n, k in zip(counts, shares)]
        whole = sum(weight)
        out.append(StageTimes(units, forward, backward, shares, busy,
                              sum(w * f for w, f in zip(weight, forward)) / whole,
                              sum(w * b for w, b in zip(weight, backward)) / whole, []))
    later, slack = 0, 0.0 if divided_alike(candidate, [s.microbatches for s in out]) else candidate.slack
    for s in range(last, -1, -1):
        out[s].in_flight = [estimator.max_in_flight(later, k, total, slack) for k in out[s].microbatches]
        later += sum(g.count for g in candidate.stages[s].groups) // blocks
    return out


def _pipeline(
    estimator: Estimator, candidate: Candidate, stages: list[StageTimes], transfers: list[float], total: int
) -> tuple[float, float, int, float, list[float]]:
    """(end of the pipeline, compute of the deciding stage, which, exposed gathers, end of each stage).

    Three or more stages with different numbers of replicas, or stages with replicas of different
    speeds, hand microbatches over at times that do not match.  What that costs depends on details that
    only the simulator sees; ``MISMATCH`` holds rounded regression coefficients over random plans
    (constant, per stage, per doubling of the ratio of widths, for mixed stages), with and without slack in
    the number of microbatches in flight.  Even divisions, where replicas form fixed pipelines, do not meet it.
    """
    if candidate.schedule == "ministage":
        pipe_s, busy_s, bottleneck, gather_s = _ministage(estimator, candidate, stages, transfers, total)
    else:
        pipe_s, busy_s, bottleneck, alone = _one_f_one_b(estimator, candidate, stages, transfers)
        gather_s = 0.0
    if not candidate.even:
        pipe_s += busy_s * _irregular(candidate)
    ends, before = [], 0.0
    ahead = 0.0
    for s, stage in enumerate(stages):
        if s and candidate.schedule == "1f1b" and not estimator.runtime.blocking_transfers:
            ahead = max(before, ahead + _lead(stages[s - 1], stage, transfers[s - 1]))
            ends.append(max(pipe_s - ahead, alone[s]))
        else:
            ends.append(pipe_s - before)
        step = (stage.backward_s / (candidate.chunks * candidate.slices)) + (transfers[s] if s < len(transfers) else 0.0)
        before += step
    return pipe_s, busy_s, bottleneck, gather_s, ends


def _one_f_one_b(
    estimator: Estimator, candidate: Candidate, stages: list[StageTimes], transfers: list[float]
) -> tuple[float, float, int, list[float]]:
    """1F1B and its relatives: for each stage, what must come before, between and after its own compute.

    Returns the end of the pipeline, the compute of the deciding stage, which one it is, and the earliest
    end of each stage's last backward.

    A stage starts after one forward of every earlier stage and ends one backward of each before the
    end.  Its first backward needs a round trip through the later stages, of which its warm-up
    forwards hide a part; the same holds at the end; and with ``k`` microbatches in flight, k of them
    take at least one round trip, halfway between mean and slowest replicas: backwards run in the
    order of the microbatches, so one on a slow replica holds up those behind it.  Chunks and slices cut the pieces
    that fill the pipeline.
    """
    cut = candidate.chunks * candidate.slices
    blocking = estimator.runtime.blocking_transfers
    round_trip, slowest = [0.0] * len(stages), [0.0] * len(stages)
    for s in range(len(stages) - 2, -1, -1):
        nxt = stages[s + 1]
        round_trip[s] = round_trip[s + 1] + (nxt.forward_s + nxt.backward_s) / cut + 2 * transfers[s]
        slow = max(f + b for f, b in zip(nxt.replica_f, nxt.replica_b))
        slowest[s] = slowest[s + 1] + slow / cut + 2 * transfers[s]
    before, worst, busy, which = 0.0, 0.0, 0.0, 0
    drain, alone = 0.0, []
    for s, stage in enumerate(stages):
        rt = round_trip[s]
        mine = stage.busy_s
        stall = 0.0
        if blocking:
            stall = rt
        else:
            for i, held in enumerate(stage.in_flight):
                f, b, k = stage.replica_f[i] / cut, stage.replica_b[i] / cut, stage.microbatches[i]
                ahead = (held - 1) * cut if cut > 1 else held - 1
                own = (f + b) * cut * k
                idle = max(0.0, rt - ahead * f) + max(0.0, rt - ahead * b)
                if cut == 1 and k <= held:  # all microbatches in flight at once: one round trip, not two
                    idle = max(0.0, rt + max(f + k * b, k * f + b) - own)
                elif cut == 1:
                    idle = max(idle, (k - held) * (f + b + (rt + slowest[s]) / 2) / held + f + b + rt - own)
                else:
                    idle = rt
                idle = max(idle, _link_time(s, transfers) * k * candidate.chunks - own)
                stall = max(stall, own + idle - mine)
        end = before + mine + stall
        alone.append(end - drain)
        drain += stage.backward_s / cut + (transfers[s] if s < len(transfers) else 0.0)
        if end > worst:
            worst, busy, which = end, mine, s
        step = (stage.forward_s + stage.backward_s) / cut
        before += step + 2 * (transfers[s] if s < len(transfers) else 0.0)
    return worst, busy, which, alone


def _lead(earlier: StageTimes, stage: StageTimes, transfer_s: float) -> float:
    """How long before the earlier stage a stage can end: the backwards it holds, less its last round trip."""
    left = min([min(held, k) * b for held, k, b in zip(earlier.in_flight, earlier.microbatches, earlier.replica_b)])
    return left - max([f + b for f, b in zip(stage.replica_f, stage.replica_b)]) - 2 * transfer_s


def _link_time(s: int, transfers: list[float]) -> float:
    """The longest transfer at a stage (each direction of each boundary carries one per microbatch)."""
    return max(transfers[s - 1] if s else 0.0, transfers[s] if s < len(transfers) else 0.0)


def _ministage(
    estimator: Estimator, candidate: Candidate, stages: list[StageTimes], transfers: list[float], total: int
) -> tuple[float, float, int, float]:
    """Zorse: all microbatches of a ministage, then the next; backward reversed (schedules.md's bubble).

    Gathers of the next ministage overlap with the current one; what does not fit is exposed, and so is
    the first gather of the iteration.
    """
    count, chunks = len(stages), candidate.chunks
    which = max(range(count), key=lambda s: stages[s].busy_s)
    busy = stages[which].busy_s
    replicas = max(1, sum(g.count for g in candidate.stages[which].groups) // candidate.blocks)
    rounds = max(1.0, total / replicas)
    if rounds >= count:
        bubble = (count - 1) / (chunks * rounds)
    else:
        bubble = ((count - 1) + (chunks - 1) * (count - rounds)) / (chunks * rounds)
    exposed = 0.0
    for s, stage in enumerate(stages):
        gather = estimator.network.sync_s(
            candidate.stages[s].groups, _rank_bytes(estimator, candidate, stages, s, estimator.model.element_bytes), 0.5
        )
        host = 0.0
        if candidate.offload:
            host = max(
                rank_parameters(candidate, stages[s].units[i], s) * estimator.model.element_bytes
                / estimator.cluster.gpu(estimator.cluster.nodes[g.pool].gpu).host_bytes_per_s / max(1, g.count)
                for i, g in enumerate(candidate.stages[s].groups)
            )
        each = max(gather, host) / chunks
        forward = stage.forward_s * (stage.busy_s / (stage.forward_s + stage.backward_s)) / chunks
        backward = stage.busy_s / chunks - forward
        hidden = (chunks - 1) * (max(0.0, each - forward) + max(0.0, each - backward))
        exposed = max(exposed, hidden + 2 * each / max(1, candidate.stages[s].layers // chunks))
    wraps = 2 * chunks * sum(transfers) / max(1.0, min(rounds, count))
    return busy * (1 + bubble) + exposed + wraps, busy, which, exposed


def _rank_bytes(
    estimator: Estimator, candidate: Candidate, stages: list[StageTimes], s: int, per_parameter: float
) -> dict[Group, float]:
    groups = candidate.stages[s].groups
    return {g: rank_parameters(candidate, stages[s].units[i], s) * per_parameter for i, g in enumerate(groups)}


def _tails(
    estimator: Estimator, candidate: Candidate, stages: list[StageTimes], ends: list[float]
) -> tuple[float, float, float]:
    """(end of the iteration, longest gradient reduction, longest update)."""
    end = longest_sync = longest_update = 0.0
    for s, stage in enumerate(stages):
        sync, update = _tail(estimator, candidate, stage.units, s)
        end = max(end, ends[s] + sync + update)
        longest_sync, longest_update = max(longest_sync, sync), max(longest_update, update)
    return end, longest_sync, longest_update


def stage_tails(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> list[float]:
    """Per stage, gradient reduction plus update after its last backward."""
    out = []
    for s, stage in enumerate(candidate.stages):
        units = [estimator.unit(g.pool, g.tp, candidate.micro_batch_size, candidate.recompute) for g in stage.groups]
        out.append(sum(_tail(estimator, candidate, units, s)))  # type: ignore[arg-type]
    return out


def sharding_s(estimator: Estimator, candidate: Candidate, units: list[Unit], s: int) -> tuple[float, float]:
    """Least time of a forward and of a backward of one microbatch with plain ZeRO-2 or 3, without ministages.

    Gradients are reduce-scattered after every microbatch (only shards of them are kept), and ZeRO-3
    gathers parameters before every forward and every backward.  All of it overlaps with the compute of the
    same pass, layer by layer; what takes longer than the compute shows.
    """
    groups = candidate.stages[s].groups
    element = float(estimator.model.element_bytes)
    size = {g: rank_parameters(candidate, u, s) * element for g, u in zip(groups, units)}
    half = estimator.network.sync_s(groups, size, 0.5)
    return (half, 2 * half) if candidate.zero_stage == 3 else (0.0, half)


def _tail(estimator: Estimator, candidate: Candidate, units: list[Unit], s: int) -> tuple[float, float]:
    """(gradient reduction or gather of parameters, update) of one stage after its last backward."""
    groups, network = candidate.stages[s].groups, estimator.network
    element = float(estimator.model.element_bytes)
    counts = [rank_parameters(candidate, u, s) for u in units]
    sync = network.sync_s(groups, {g: n * 4.0 for g, n in zip(groups, counts)})
    if candidate.zero_stage >= 1 and sync:
        gather = network.sync_s(groups, {g: n * element for g, n in zip(groups, counts)}, 0.5)
        sync = sync / 2 + gather
        if candidate.zero_stage >= 2 and candidate.schedule != "ministage":  # gradients have gone with each microbatch
            sync = gather if candidate.zero_stage == 2 else 0.0
    update = 0.0
    for g, n in zip(groups, counts):
        mine = n / g.count if candidate.zero_stage >= 1 else n
        update = max(update, estimator.costs.update_s(estimator.cluster.nodes[g.pool].gpu, mine))
    if candidate.schedule == "ministage":
        return sync / candidate.chunks, update / candidate.chunks
    return sync, update


def _egress(estimator: Estimator, candidate: Candidate, stages: list[StageTimes]) -> tuple[float, float]:
    """(bytes per iteration over links with a price, their price)."""
    moved = usd = 0.0
    if not estimator.network.has_egress:
        return moved, usd
    size = estimator.boundary_bytes_per_sequence * estimator.model.global_batch_size
    for s in range(len(stages)):
        groups = candidate.stages[s].groups
        if s + 1 < len(stages):
            nxt = candidate.stages[s + 1].groups
            shares = _pool_shares(stages[s], groups)
            for pool, share in shares.items():
                for other, weight in _pool_shares(stages[s + 1], nxt).items():
                    rate = estimator.network.usd_per_byte(pool, other) if pool != other else 0.0
                    if rate:
                        moved += 2 * size * share * weight * candidate.chunks
                        usd += 2 * size * share * weight * candidate.chunks * rate
        pools = sorted({g.pool for g in groups})
        for first, second in zip(pools, pools[1:]):
            rate = estimator.network.usd_per_byte(first, second)
            if rate:
                volume = 4 * 4.0 * rank_parameters(candidate, stages[s].units[0], s) * groups[0].tp
                moved += volume
                usd += volume * rate
    return moved, usd


def _pool_shares(stage: StageTimes, groups: tuple[Group, ...]) -> dict[int, float]:
    whole = sum(g.count * k for g, k in zip(groups, stage.microbatches))
    out: dict[int, float] = {}
    for g, k in zip(groups, stage.microbatches):
        out[g.pool] = out.get(g.pool, 0.0) + g.count * k / whole
    return out
