"""All candidates met so far, each evaluated once."""

from __future__ import annotations

from math import inf

from megatron_het.schedule.generators.one_f_one_b import SLACK

from ..costs.candidate import Candidate, Group
from ..costs.estimate import Estimate, Estimator
from ..costs.schedules import PLAIN, is_ordered, schedule_of
from ..search.balance import balance
from ..search.outcome import Progress
from ..search.pools import Limits, all_gpus
from ..search.sketch import Sketch
from .outcome import PENALTY, Goal

Groups = tuple[tuple[Group, ...], ...]

LESS = (0.5, 0.0)
"""Slack to try, in this order, where the full slack does not fit."""
NEARLY = 1.6 * PENALTY
"""Scores above this multiple of the best are hopeless: too slow, or more than about half too large for memory."""


def there(estimator: Estimator, limits: Limits, groups: Groups) -> bool:
    """Whether the cluster has these GPUs, within limits and whole TP groups per node."""
    used: dict[int, int] = {}
    for stage in groups:
        for g in stage:
            if g.tp > estimator.cluster.nodes[g.pool].gpus_per_node:
                return False
            used[g.pool] = used.get(g.pool, 0) + g.tp * g.count
    return all(n <= limits[p] for p, n in used.items())


def in_regions(estimator: Estimator, goal: Goal, groups: Groups) -> bool:
    """Whether the replicas of every stage are in one region, where the goal wants that."""
    region = estimator.network.region
    return not goal.keep_data_parallel_in_region or all(len({region[g.pool] for g in stage}) == 1 for stage in groups)


class Book:
    """Memo of scores; remembers the best candidates that hold all constraints.

    What is looked at of a schedule depends on 1F1B and on that schedule: more schedules to choose from do not change
    what is found of one of them.

    ``by_stages`` and ``alike`` hold the best of each number of stages, the latter with equal numbers of
    replicas (interleaved schedules need them), whatever their schedule.  ``steps`` says where local search goes
    from a candidate (looking at all neighbours, or in haste), None where it ends; ``even`` has the starting points
    with equal numbers of replicas.

    Args:
        limits: GPUs that may be used of each pool; None: all.
        known: Another book of the same estimator and goal, whose sketches and layers are used too.
        bound: Value of a plan that is known already: what looks much worse is of no use.
        simulated: The same of a plan that has been simulated: what computes longer is of no use.
    """

    KEEP = 1000

    def __init__(
        self,
        estimator: Estimator,
        goal: Goal,
        progress: Progress,
        limits: Limits | None = None,
        known: Book | None = None,
        bound: float = inf,
        simulated: float = inf,
    ) -> None:
        self.estimator, self.goal, self.progress = estimator, goal, progress
        self.limits = limits or all_gpus(estimator)
        self.sketch: Sketch = known.sketch if known else Sketch(estimator, goal)
        self.balanced: dict[object, Candidate | None] = known.balanced if known else {}
        self.scores: dict[object, tuple[float, Candidate | None]] = {}
        self.good: dict[Candidate, tuple[float, Estimate]] = {}
        self.best, self.bound, self.simulated = inf, bound, simulated
        self.best_of: dict[str, float] = {}
        self.by_stages: dict[int, tuple[float, Candidate]] = {}
        self.alike: dict[int, tuple[float, Candidate]] = {}
        self.nearest: tuple[float, Candidate, Estimate] | None = None
        self.even: dict[tuple[Groups, int, str, int], Candidate] = {}
        self.steps: dict[tuple[Candidate, bool], tuple[float, Candidate] | None] = {}

    @property
    def to_beat(self) -> float:
        """The best value so far, here or known before."""
        return min(self.best, self.bound)

    def to_beat_under(self, schedule: str) -> float:
        """Best value so far of one schedule and of 1F1B, here or known before."""
        return min([self.bound, *[self.best_of.get(name, inf) for name in (PLAIN.name, schedule)]])

    def try_groups(self, groups: Groups, like: Candidate) -> tuple[float, Candidate | None]:
        """Balance the layers of these stages and evaluate."""
        key = (
            groups,
            like.micro_batch_size,
            like.recompute,
            like.schedule,
            like.chunks,
            like.slices,
            like.zero_stage,
            like.offload,
            like.experts_over,
            bool(like.rows),
        )
        found = self.scores.get(key)
        if found is None:
            if not there(self.estimator, self.limits, groups):
                self.scores[key] = (inf, None)
                return inf, None
            candidate = self._balance(key, groups, like, like.slack or SLACK)
            found = (inf, None) if candidate is None else (self.try_candidate(candidate), candidate)
            for slack in LESS if candidate is not None and self._needs_less(candidate, found[0]) else ():
                tight = self._balance(key, groups, like, slack)
                if tight is None:
                    continue
                found = min(found, (self.try_candidate(tight), tight), key=lambda f: f[0])
                if tight in self.good:
                    break
            candidate = found[1]
            old = self.by_stages.get(len(groups))
            if candidate is not None and (old is None or found[0] < old[0]):
                self.by_stages[len(groups)] = (found[0], candidate)
            if candidate is not None and len({sum(g.count for g in stage) for stage in groups}) == 1:
                old = self.alike.get(len(groups))
                if old is None or found[0] < old[0]:
                    self.alike[len(groups)] = (found[0], candidate)
            self.scores[key] = found
        return found

    def _balance(self, key: object, groups: Groups, like: Candidate, slack: float) -> Candidate | None:
        """The candidate with the layers that balance it."""
        if (key, slack) not in self.balanced:
            self.balanced[key, slack] = balance(self.estimator, groups, like.with_(slack=slack))
        return self.balanced[key, slack]

    def try_slack(self, candidate: Candidate) -> tuple[float, Candidate]:
        """With slack in flight where that fits, without it where only that fits."""
        found = (self.try_candidate(candidate), candidate)
        for slack in LESS if self._needs_less(candidate, found[0]) else ():
            tight = candidate.with_(slack=slack)
            found = min(found, (self.try_candidate(tight), tight), key=lambda f: f[0])
            if tight in self.good:
                break
        return found

    def _needs_less(self, candidate: Candidate, score: float) -> bool:
        """Whether a promising 1F1B pipeline is unusable as it is, so that fewer microbatches in flight may help."""
        if not schedule_of(candidate).has_slack or not candidate.slack:
            return False
        if candidate in self.good or score > NEARLY * self.best_of.get(PLAIN.name, inf):
            return False
        first = candidate.stages[0].groups
        return any(len(s.groups) > 1 or s.groups[0].count != first[0].count for s in candidate.stages)

    def try_candidate(self, candidate: Candidate) -> float:
        """Evaluate a complete candidate."""
        known = self.scores.get(candidate)
        if known is not None:
            return known[0]
        estimate = self.estimator.estimate(candidate) if self._runs(candidate) else None
        score = self.goal.score(self.estimator, candidate, estimate)
        self.scores[candidate] = (score, candidate)
        if estimate is None or score == inf:
            return score
        if self.estimator.fits(estimate) and self.goal.violation(candidate, estimate) == 0 and self._allowed(candidate):
            self.good[candidate] = (score, estimate)
            self.best_of[candidate.schedule] = min(score, self.best_of.get(candidate.schedule, inf))
            if score < self.best:
                self.best = self.progress.best = score
            if len(self.good) > 5 * self.KEEP:
                self._prune()
        elif self.nearest is None or score < self.nearest[0]:
            self.nearest = (score, candidate, estimate)
        return score

    def _runs(self, candidate: Candidate) -> bool:
        """Whether the runtime can run this schedule on these stages; the closed form prices it all the same."""
        if any(s.layers < candidate.chunks for s in candidate.stages):
            return False  # it could, with chunks of no layers, which gain nothing
        return schedule_of(candidate).runs(self.estimator, candidate)

    def _allowed(self, candidate: Candidate) -> bool:
        if candidate.schedule not in self.goal.schedules:
            return False
        return in_regions(self.estimator, self.goal, tuple(s.groups for s in candidate.stages))

    def _prune(self) -> None:
        kept = {candidate for candidate, _ in self.top(self.KEEP)}
        kept |= {candidate for candidate, _ in self.finalists(self.KEEP // 8)}
        self.good = {candidate: entry for candidate, entry in self.good.items() if candidate in kept}

    def finalists(self, count: int) -> list[tuple[Candidate, Estimate]]:
        """The best candidates, up to ``count`` of every schedule with and without an order, or a split vocabulary."""
        taken: dict[tuple[str, bool, bool], int] = {}
        out = []
        for candidate, estimate in self.top(len(self.good)):
            kind = candidate.schedule, is_ordered(candidate), bool(candidate.rows)
            taken[kind] = taken.get(kind, 0) + 1
            if taken[kind] <= count:
                out.append((candidate, estimate))
        return out

    def top(self, count: int, schedule: str = "") -> list[tuple[Candidate, Estimate]]:
        """The best candidates that hold all constraints; equal values go to fewer GPUs.

        Args:
            schedule: Only those with this one.
        """
        items = [item for item in self.good.items() if schedule in ("", item[0].schedule)]
        order = sorted(items, key=lambda item: (item[1][0], item[0].world_size))
        return [(candidate, estimate) for candidate, (_, estimate) in order[:count]]
