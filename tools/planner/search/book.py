"""All candidates met so far, each evaluated once."""

from __future__ import annotations

from math import inf

from megatron_het.schedule.generators.one_f_one_b import SLACK
from tools.planner.candidate import Candidate, Group
from tools.planner.estimate import Estimate, Estimator
from tools.planner.search.balance import balance
from tools.planner.search.goal import PENALTY, Goal
from tools.planner.search.outcome import Progress

Groups = tuple[tuple[Group, ...], ...]

LESS = (0.5, 0.0)
"""Slack to try, in this order, where the full slack does not fit."""
NEARLY = 1.6 * PENALTY
"""Scores above this multiple of the best are hopeless: too slow, or more than about half too large for memory."""


class Book:
    """Memo of scores; remembers the best candidates that hold all constraints.

    ``by_stages`` and ``alike`` hold the best of each number of stages, the latter with equal numbers of
    replicas (interleaved schedules need them), whatever their schedule.
    """

    KEEP = 1000

    def __init__(self, estimator: Estimator, goal: Goal, progress: Progress) -> None:
        self.estimator, self.goal, self.progress = estimator, goal, progress
        self.scores: dict[object, tuple[float, Candidate | None]] = {}
        self.good: dict[Candidate, tuple[float, Estimate]] = {}
        self.best = inf
        self.by_stages: dict[int, tuple[float, Candidate]] = {}
        self.alike: dict[int, tuple[float, Candidate]] = {}
        self.nearest: tuple[float, Candidate, Estimate] | None = None

    def try_groups(self, groups: Groups, like: Candidate) -> tuple[float, Candidate | None]:
        """Balance the layers of these stages and evaluate."""
        key = (groups, like.micro_batch_size, like.recompute, like.schedule, like.chunks, like.slices, like.zero_stage,
               like.offload)
        found = self.scores.get(key)
        if found is None:
            if not self._there(groups):
                self.scores[key] = (inf, None)
                return inf, None
            candidate = balance(self.estimator, groups, like if like.slack else like.with_(slack=SLACK))
            found = (inf, None) if candidate is None else (self.try_candidate(candidate), candidate)
            for slack in LESS if candidate is not None and self._needs_less(candidate, found[0]) else ():
                tight = balance(self.estimator, groups, like.with_(slack=slack))
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
        if candidate.schedule != "1f1b" or not candidate.slack or candidate in self.good or score > NEARLY * self.best:
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
            if score < self.best:
                self.best = self.progress.best = score
            if len(self.good) > 4 * self.KEEP:
                self._prune()
        elif self.nearest is None or score < self.nearest[0]:
            self.nearest = (score, candidate, estimate)
        return score

    def _there(self, groups: Groups) -> bool:
        """Whether the cluster has these GPUs, within quotas and whole TP groups per node."""
        used: dict[int, int] = {}
        for stage in groups:
            for g in stage:
                node = self.estimator.cluster.nodes[g.pool]
                if g.tp > node.gpus_per_node:
                    return False
                used[g.pool] = used.get(g.pool, 0) + g.tp * g.count
        return all(n <= self.estimator.cluster.nodes[p].quota for p, n in used.items())

    def _runs(self, candidate: Candidate) -> bool:
        """Whether the runtime can run this schedule on these stages; the closed form prices it all the same."""
        model, count = self.estimator.model, len(candidate.stages)
        if any(s.layers < candidate.chunks for s in candidate.stages):
            return False  # it could, with chunks of no layers, which gain nothing
        if count == 1 and candidate.chunks > 1 and model.tied_embeddings:
            return False  # both ends of the model would be in different chunks of one rank
        if candidate.schedule == "interleaved":  # in whole groups, in the plan and in each of its blocks
            return model.global_batch_size // candidate.micro_batch_size % (count * candidate.blocks) == 0
        if candidate.schedule == "ministage":
            return candidate.zero_stage >= 1 and candidate.can_shard_parameters(model.tied_embeddings)
        return candidate.schedule != "slimpipe" or self._can_slice(candidate)

    def _can_slice(self, candidate: Candidate) -> bool:
        """Whether slices are equal, keep all stages busy, divide over TP ranks, and suit the attention kernels."""
        model, cluster, slices = self.estimator.model, self.estimator.cluster, candidate.slices
        if model.seq_length % slices or slices < len(candidate.stages):
            return False
        tokens = model.seq_length // slices
        if model.sequence_parallel and any(tokens % g.tp for s in candidate.stages for g in s.groups):
            return False
        return model.head_dim % 8 == 0 or all(cluster.gpu(cluster.nodes[p].gpu).is_processor for p in candidate.gpus())

    def _allowed(self, candidate: Candidate) -> bool:
        if candidate.schedule not in self.goal.schedules:
            return False
        if not self.goal.keep_data_parallel_in_region:
            return True
        region = self.estimator.network.region
        return all(len({region[g.pool] for g in s.groups}) == 1 for s in candidate.stages)

    def _prune(self) -> None:
        kept = sorted(self.good.items(), key=lambda item: item[1][0])[: self.KEEP]
        self.good = dict(kept)

    def top(self, count: int) -> list[tuple[Candidate, Estimate]]:
        """The best candidates that hold all constraints; equal values go to fewer GPUs."""
        order = sorted(self.good.items(), key=lambda item: (item[1][0], item[0].world_size))
        return [(candidate, estimate) for candidate, (_, estimate) in order[:count]]
