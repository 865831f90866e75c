"""The benchmark that holds a replay against a real job: traces, plans, and what it takes from a measured job."""

import itertools

import pytest

from benchmarks.elastic import Changed
from benchmarks.replay import costs_of, iteration_times, mean_costs, paced_plan, random_trace
from megatron_het.features.registry import check_plan_alone
from tools.planner.replay.policies import Costs, run_elastic


@pytest.mark.parametrize("seed", [4, 5])
def test_the_default_traces_have_every_kind_of_change(seed: int) -> None:
    trace = random_trace(seed, 5, (15.0, 30.0))
    steps = [after.pool[0] - before.pool[0] for before, after in itertools.pairwise(trace.changes)]
    assert set(steps) == {1, -1} and all(2 <= change.pool[0] <= 4 for change in trace.changes)
    assert {change.notice for change, step in zip(trace.changes[1:], steps, strict=True) if step < 0} == {True, False}
    course = run_elastic(trace, lambda pool: 2.0 / pool[0], Costs(0.2, 0.2, 0.2, 2.0))
    assert course.changes == 5, "every node counts"


def test_more_nodes_are_faster_by_their_layers() -> None:
    slowest = []
    for replicas in (1, 2, 3):
        plan = paced_plan(replicas)
        check_plan_alone(plan)
        slowest.append(max(sum(s.layers) * max(len(r.microbatches) for r in s.replicas) for s in plan.stages))
    assert slowest == [36, 24, 16]


def test_costs_are_less_an_iteration_under_the_plan_that_follows() -> None:
    # 3 nodes do one in 2 s, 4 in 1 s, 2 in 3 s; a change takes half a second more, a death loses half an iteration too
    lines = [(0.0, 1), (2.0, 2), (4.0, 3), (5.5, 4), (6.5, 5), (7.5, 6), (10.5, 7), (12.5, 8), (14.5, 9), (18.0, 10)]
    lines += [(21.0, 11), (24.0, 12)]
    history = [{}, {"planned": 4.2, "seen": 3.0}, {"planned": 8.2, "seen": 8.1}, {"planned": 14.6, "seen": 14.0}]
    found = Changed((("join", 1.0), ("death", 8.0), ("leave", 13.0)), lines, history)
    times = iteration_times(found)
    assert times == {3: 2.0, 4: 1.0, 2: 3.0}
    costs = costs_of(found, times)
    assert (costs.join_s, costs.death_s, costs.leave_s, costs.start_s) == (0.5, 0.5, 0.5, 2.0)
    assert mean_costs([costs, Costs(1.5, 1.5, 1.5, 4.0)]).start_s == 3.0
