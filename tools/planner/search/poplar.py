"""Poplar's planner: no pipeline, uneven batches over ZeRO data parallelism, from spline performance curves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from ..candidate import Candidate, Group, Stage
from ..estimate import Estimator
from ..schedules import MINISTAGES
from ..search.book import Book
from ..search.effort import NORMAL, Effort
from ..search.finish import finish
from ..search.goal import Goal
from ..search.outcome import Outcome, Progress


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one step over the micro batch size of one GPU kind, a cubic spline through the figures."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Seconds of a step with ``size`` samples."""
        if len(self.sizes) == 1:
            return self.seconds[0] * size / self.sizes[0]
        if len(self.sizes) == 2:
            (a, b), (x, y) = self.sizes, self.seconds
            return x + (y - x) * (size - a) / (b - a)
        from scipy.interpolate import CubicSpline

        return float(CubicSpline(self.sizes, self.seconds)(size))

    @property
    def peak(self) -> tuple[float, int]:
        """(largest samples per second, the micro batch size that reaches it)."""
        return max((n / t, n) for n, t in zip(self.sizes, self.seconds))


def curve(estimator: Estimator, pool: int, zero: int, recompute: str, tp: int = 1) -> Curve | None:
    """Step times up to the largest micro batch that fits at this ZeRO stage; None when one sample does not."""
    sizes, seconds = [], []
    for batch in estimator.model.batch_sizes:
        if not _fits(estimator, pool, tp, zero, batch, recompute):
            break
        u = estimator.unit(pool, tp, batch, recompute)
        assert u is not None
        sizes.append(batch)
        seconds.append(u.both_s(estimator.model.num_layers, first=True, last=True))
    return Curve(tuple(sizes), tuple(seconds)) if sizes else None


def _fits(estimator: Estimator, pool: int, tp: int, zero: int, batch: int, recompute: str) -> bool:
    if estimator.unit(pool, tp, batch, recompute) is None:
        return False
    everywhere = widest(estimator, range(len(estimator.cluster.nodes)), batch, recompute, tp)
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


def allocate_accumulated(curves: list[Curve], global_batch: int) -> list[tuple[int, int, int]]:
    """Algorithm 2 for ZeRO-0 and 1: (micro batch, accumulation steps, last micro batch) per GPU.

    Every GPU runs at its peak; what is left over goes, sample by sample, to the GPU that would end first.
    """
    speeds = [c.peak[0] for c in curves]
    optimal_s = global_batch / sum(speeds)
    samples = [int(optimal_s * v) for v in speeds]
    while sum(samples) < global_batch:
        i = min(range(len(curves)), key=lambda i: ((samples[i] + 1) / speeds[i], i))
        samples[i] += 1
    out = []
    for c, count in zip(curves, samples):
        size = min(c.peak[1], max(1, count))
        steps, last = divmod(count, size)
        out.append((size, steps + (1 if last else 0), last or size))
    return out


def allocate_synchronised(
    curves: list[Curve], global_batch: int, communication_s: float, tries: int = 200
) -> tuple[float, list[int], int]:
    """Algorithm 2 for ZeRO-2 and 3: (seconds, micro batch per GPU, steps), minimal over the step time t."""
    shortest = min(c.at(1) for c in curves)
    longest = max(c.seconds[-1] for c in curves)
    best: tuple[float, list[int], int] | None = None
    for k in range(tries + 1):
        t = shortest + (longest - shortest) * k / tries
        sizes = [_largest(c, t) for c in curves]
        if sum(sizes) == 0:
            continue
        steps = -(-global_batch // sum(sizes))
        seconds = (t + communication_s) * steps
        if best is None or seconds < best[0]:
            best = (seconds, sizes, steps)
    assert best is not None
    return best


def _largest(c: Curve, t: float) -> int:
    """Largest micro batch that ends within ``t``."""
    low, high = 0, c.sizes[-1]
    while low < high:
        middle = (low + high + 1) // 2
        if c.at(middle) <= t + 1e-12:
            low = middle
        else:
            high = middle - 1
    return low


def search_poplar(
    estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort = NORMAL, bound_s: float = inf
) -> Outcome:
    """ZeRO-0, and the next stage whenever one sample does not fit; batches after measured speed.

    A plan has one micro batch size for all GPUs, so each of Poplar's batch sizes becomes a number of
    microbatches of the common size that serves the curves best.  ZeRO-2 and 3 are run by the parameter
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
                curves = {p: curve(estimator, p, zero, recompute) for p in range(len(nodes))}
                usable = [p for p, c in curves.items() if c is not None]
                if len(usable) < len(nodes) and zero < last:
                    continue
                # Where one sample fits nowhere, all of them, so that the caller can say what is missing.
                for batch in estimator.model.batch_sizes:
                    groups = widest(estimator, usable or curves, batch, recompute)
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
                break
    except KeyboardInterrupt:
        outcome.interrupted = True
    if not book.good:
        for candidate in plain:
            book.try_candidate(candidate)
    finish(book, outcome, estimator, goal, effort, lambda c: c, bound_s)
    outcome.cpu_s = time.process_time() - started
    return outcome
