"""Poplar's planner: no pipeline, uneven batches over ZeRO data parallelism."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from math import inf

from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimator
from ..costs.schedules import MINISTAGES
from ..costs.stages import tail_s
from ..search.book import Book
from ..search.effort import NORMAL, Effort
from ..search.finish import finish
from ..search.goal import Goal
from ..search.outcome import Outcome, Progress
from ..search.unequal import SIZES, can_differ, unequal


def _fits(estimator: Estimator, pool: int, zero: int, batch: int, recompute: str) -> bool:
    """Whether the GPUs of a pool hold the model and one micro batch at this ZeRO stage."""
    if estimator.unit(pool, 1, batch, recompute) is None:
        return False
    everywhere = widest(estimator, range(len(estimator.cluster.nodes)), batch, recompute)
    found = estimator.estimate(
        Candidate((Stage(estimator.model.num_layers, everywhere),), batch, recompute, zero_stage=zero)
    )
    if found is None:
        return False
    mine = [m for m in found.memory if m.group.pool == pool]
    return all(m.total_bytes <= estimator.memory_margin * m.capacity_bytes for m in mine)


def widest(estimator: Estimator, pools: Iterable[int], batch: int, recompute: str, tp: int = 1) -> tuple[Group, ...]:
    """All replicas of these pools; the fastest only where there are fewer microbatches than replicas."""

    def seconds(pool: int) -> float:
        u = estimator.unit(pool, tp, batch, recompute)
        return u.layer_f + u.layer_b if u else inf

    left, counts = estimator.model.global_batch_size // batch, {}
    for pool in sorted(pools, key=seconds):
        counts[pool] = min(left, estimator.cluster.nodes[pool].quota // tp)
        left -= counts[pool]
    return tuple(Group(pool, tp, n) for pool, n in sorted(counts.items()) if n)


def _try_unequal(book: Book, pools: Iterable[int], recompute: str, zero: int, bound_s: float) -> None:
    """Passes of other sizes on other GPUs, as Poplar has them: on all pools, and without the slowest ones.

    What certainly takes longer than ``bound_s`` is left out.
    """
    estimator = book.estimator
    whole = widest(estimator, pools, 1, recompute)

    def seconds(group: Group) -> float:
        unit = estimator.unit(group.pool, 1, 1, recompute)
        return unit.layer_f + unit.layer_b if unit else inf

    fastest = sorted(whole, key=seconds)
    for count in range(len(fastest), 0, -1):
        stage = Stage(estimator.model.num_layers, tuple(sorted(fastest[:count])))
        base = Candidate((stage,), 1, recompute, zero_stage=zero)
        if _least_s(estimator, base) > bound_s:
            continue
        candidate = unequal(estimator, base) if can_differ(estimator, base) else None
        if candidate is not None:
            book.try_candidate(candidate)


def _least_s(estimator: Estimator, candidate: Candidate) -> float:
    """All sequences through all layers at every GPU's best size of a pass, then the sum of the gradients."""
    stage, model, rate = candidate.stages[0], estimator.model, 0.0
    for g in stage.groups:
        best = [(b, estimator.unit(g.pool, g.tp, b, candidate.recompute)) for b in SIZES]
        rate += g.count * max((b / (u.layer_f + u.layer_b) for b, u in best if u is not None), default=0.0)
    units = [estimator.unit_of(candidate, g) for g in stage.groups]
    there = [u for u in units if u is not None]
    if not rate or len(there) < len(units):
        return inf
    return model.global_batch_size * stage.layers / rate + tail_s(estimator, candidate, there, 0)


def search_poplar(
    estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort = NORMAL, bound_s: float = inf
) -> Outcome:
    """ZeRO-0, and the next stage whenever one sample does not fit; batches after measured speed.

    With ZeRO-0 and 1 every GPU runs passes of its own size, and a smaller last one (``unequal``); equal
    microbatches of every size are tried beside that.  ZeRO-2 and 3 are run by the parameter
    window (schedule ``ministage`` on one stage, all its chunk counts): parameters and gradients are sharded, and
    gathered and reduced once per ministage instead of once per microbatch.  Only where these are not allowed,
    the outcome holds the plain forms, which ``Found.runnable`` marks as not for this runtime.

    Args:
        bound_s: Time of a plan that is known already; slower ones are of no use.
    """
    progress = progress or Progress()
    started = time.process_time()
    book = Book(estimator, goal, progress)
    outcome = Outcome("poplar")
    nodes, last = estimator.cluster.nodes, 3 if estimator.model.distributed_optimizer else 0
    plain: list[Candidate] = []
    try:
        for recompute in estimator.model.recompute:
            for zero in range(last + 1):
                progress.text = f"ZeRO-{zero}"
                smallest = estimator.model.batch_sizes[0]
                usable = [p for p in range(len(nodes)) if _fits(estimator, p, zero, smallest, recompute)]
                if len(usable) < len(nodes) and zero < last:
                    continue
                # Where one sample fits nowhere, all of them, so that the caller can say what is missing.
                for batch in estimator.model.batch_sizes:
                    groups = widest(estimator, usable or range(len(nodes)), batch, recompute)
                    if not groups:
                        continue
                    stage = Stage(estimator.model.num_layers, groups)
                    candidate = Candidate((stage,), batch, recompute, zero_stage=zero)
                    if zero < 2:
                        book.try_candidate(candidate)
                        continue
                    plain.append(candidate)
                    for chunks in range(2, estimator.model.num_layers + 1):
                        book.try_candidate(MINISTAGES.of(candidate, chunks))
                _try_unequal(book, usable or range(len(nodes)), recompute, zero, bound_s)
                break
    except KeyboardInterrupt:
        outcome.interrupted = True
    if not book.good:
        for candidate in plain:
            book.try_candidate(candidate)
    finish(book, outcome, estimator, goal, replace(effort, regroups=False), lambda c: c, bound_s)
    outcome.cpu_s = time.process_time() - started
    return outcome
