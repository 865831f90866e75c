"""Sailor's dynamic programming against all ways to deal replicas to stages."""

from dataclasses import dataclass
from itertools import product
from math import inf

import pytest

from testing.planner_cases import estimator_of, random_case
from tools.planner.costs.build import chunk_layers
from tools.planner.costs.candidate import Candidate
from tools.planner.costs.estimate import Estimator
from tools.planner.search.candidate_cache import CandidateCache
from tools.planner.search.outcome import Goal, Progress
from tools.planner.search.papers import _combinations, _solve, smallest_tp

Dealt = tuple[tuple[int, int], ...]


@dataclass
class Exhaustive:
    """All ways to deal the replicas of a pipeline, one after the other."""

    estimator: Estimator
    layers: tuple[int, ...]
    tps: list[dict[int, int]]
    degree: int
    like: Candidate

    @property
    def total(self) -> int:
        return self.estimator.model.global_batch_size // self.like.micro_batch_size // self.degree

    def seconds(self, s: int, pool: int) -> float:
        unit = self.estimator.unit(pool, self.tps[s][pool], self.like.micro_batch_size, self.like.recompute)
        return unit.both_s(self.layers[s], s == 0, s == len(self.layers) - 1)

    def value(self, dealt: list[Dealt]) -> float:
        own = [max(self.seconds(s, pool) for pool, _ in part) for s, part in enumerate(dealt)]
        return (self.total - 1) * max(own) + sum(own)

    def least(self, free: tuple[int, ...], dealt: list[Dealt]) -> float:
        s = len(dealt)
        if s == len(self.layers):
            return self.value(dealt)
        regions = self.estimator.network.region
        found = inf
        for region in set(regions):
            pools = [p for p in self.tps[s] if regions[p] == region]
            for part in _combinations(self.degree, pools):
                rest = list(free)
                for pool, n in part:
                    rest[pool] -= n * self.tps[s][pool]
                if min(rest) < 0:
                    continue
                found = min(found, self.least(tuple(rest), [*dealt, part]))
        return found


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_was_left_out_is_better(seed: int):
    cluster, model = random_case(seed, largest=8)
    estimator = estimator_of(cluster, model)
    memo = CandidateCache(estimator, Goal(schedules=("1f1b",)), Progress())
    like = Candidate((), model.batch_sizes[0], model.recompute[0], even=True)
    for stages, degree in product(range(1, min(4, model.num_layers) + 1), (1, 2)):
        layers = chunk_layers(model.num_layers, stages)
        tps = [smallest_tp(estimator, stages, s, layers[s], like) for s in range(stages)]
        everything = Exhaustive(estimator, layers, tps, degree, like)
        expected = everything.least(tuple(n.quota for n in estimator.cluster.nodes), [])
        solved = _solve(memo, layers, tps, degree, like, inf)
        if solved is None:
            assert expected == inf
            continue
        dealt = [tuple((g.pool, g.count) for g in stage.groups) for stage in solved.stages]
        assert everything.value(dealt) == pytest.approx(expected, rel=1e-12)
        # A bound leaves out what is slower, and nothing else.
        assert _solve(memo, layers, tps, degree, like, expected * 1.001) is not None
        assert _solve(memo, layers, tps, degree, like, expected * 0.5) is None
