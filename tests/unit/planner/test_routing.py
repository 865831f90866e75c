"""Plans of the ministage schedule route microbatches by Zorse's rule, from the estimator's times."""

from megatron_het.plan.placement import route
from tests.unit.planner.test_estimate import gcp
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage


def test_ministage_plans_route_by_remaining_work():
    estimator = gcp()
    mixed = Stage(12, (Group(0, 1, 2), Group(1, 1, 2)))
    candidate = Candidate((Stage(12, (Group(0, 1, 2),)), mixed), 1, schedule="ministage", chunks=3, zero_stage=1)
    plan = build_plan(estimator, candidate, estimator.estimate(candidate))
    counts = [[len(r.microbatches) for r in stage.replicas] for stage in plan.stages]
    assert len(set(counts[1])) > 1, "a mixed stage has unequal shares"
    # Times in units of the fastest replica, as the plan holds them.
    times = [[sum(stage.layers) / r.speed for r in stage.replicas] for stage in plan.stages]
    wanted = route(times, plan.num_microbatches, counts)
    assert [[r.microbatches for r in stage.replicas] for stage in plan.stages] == wanted
