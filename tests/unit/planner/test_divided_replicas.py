"""Replicas with context and expert parallelism are priced as they are: by the search's figures, from plans as read."""

from dataclasses import replace

import pytest

from megatron_het.plan import Plan
from testing.planner_cases import cluster_of, estimator_of
from tests.unit.planner.emit_plans import WIDE
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.simulation import simulate_candidate
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts


def estimator(**changes: object) -> Estimator:
    fields = WIDE | {"hidden_size": 2048, "ffn_hidden_size": 8192, "seq_length": 8192, "global_batch_size": 8}
    fields |= {"distributed_optimizer": True, "sequence_parallel": True}
    return estimator_of(cluster_of(("H100-SXM", 2, 8, 50e9)), Model.model_validate(fields | changes))


EXPERTS = Experts(count=16, top_k=4, ffn_hidden_size=1024)


def stages(*groups: Group) -> tuple[Stage, ...]:
    return tuple(Stage(8 // len(groups), (g,)) for g in groups)


def priced(prices: Estimator, plan: Plan) -> tuple[Candidate, float]:
    candidate, seated = candidate_of(plan, prices.cluster)
    estimate = prices.estimate(candidate)
    assert estimate is not None
    return candidate, simulate_candidate(prices, candidate, estimate, plan, seated).iteration_s


def planned(prices: Estimator, candidate: Candidate) -> tuple[Plan, float]:
    """The candidate's plan, and its simulated time as written and read again."""
    estimate = prices.estimate(candidate)
    assert estimate is not None
    plan = build_plan(prices, candidate, estimate)
    again, seconds = priced(prices, plan)
    assert again == candidate
    assert seconds == pytest.approx(simulate_candidate(prices, candidate, estimate, plan).iteration_s, rel=1e-9)
    return plan, seconds


@pytest.mark.parametrize("schedule", [{}, {"schedule": "slimpipe", "slices": 4}])
def test_context_parallelism_is_priced(schedule: dict[str, object]) -> None:
    """Two context-parallel ranks halve a replica's time and activations, and join the reduction of gradients."""
    prices = estimator()
    one = Candidate(stages(Group(0, 2, 2), Group(0, 2, 2)), 1, zero_stage=1, **schedule)  # type: ignore[arg-type]
    two = one.with_(cp=2)
    assert two.world_size == 16
    plan, seconds = planned(prices, two)
    assert {r.cp for s in plan.stages for r in s.replicas} == {2}
    most = 0.75 if schedule else 0.7  # half as long slices read their operands as often
    assert 0.45 < seconds / planned(prices, one)[1] < most
    a, b = prices.estimate(one), prices.estimate(two)
    assert a is not None and b is not None
    assert b.memory[0].activation_bytes == pytest.approx(a.memory[0].activation_bytes / 2)
    assert b.memory[0].optimizer_bytes == pytest.approx(a.memory[0].optimizer_bytes / 2)
    assert b.memory[0].parameter_bytes == a.memory[0].parameter_bytes


def test_replicas_fill_nodes_with_all_their_tensor_parallel_groups() -> None:
    prices = estimator()
    candidate = Candidate(stages(Group(0, 8, 1)), 1, cp=2)
    plan, _ = planned(prices, candidate)
    _, seated = candidate_of(plan, prices.cluster)
    assert [(seat.node, seat.gpu) for seat in seated[0][0]] == [(n, g) for n in (0, 1) for g in range(8)]


def test_a_replica_that_divides_experts_moves_less() -> None:
    """A rank holds as much, but its experts are whole: fewer and larger products, and no inputs gathered for each."""
    prices = estimator(experts=EXPERTS)
    found = [prices.unit_of(Candidate(stages(Group(0, 8, 1)), 1, ep=ep), Group(0, 8, 1)) for ep in (1, 2, 8)]
    cut, some, whole = (u for u in found if u is not None)
    assert cut.layer_parameters == some.layer_parameters == whole.layer_parameters
    assert cut.layer_f > some.layer_f > whole.layer_f
    assert cut.layer_bytes > some.layer_bytes > whole.layer_bytes


def test_replicas_are_priced_with_their_own_expert_parallelism() -> None:
    """Stages of TP 8 and 4 under EP 8: each divides what it can; a plan may say something else of each replica."""
    prices = estimator(experts=EXPERTS)
    candidate = Candidate(stages(Group(0, 8, 1), Group(0, 4, 1)), 1, ep=8)
    plan, seconds = planned(prices, candidate)
    assert [s.replicas[0].ep for s in plan.stages] == [8, 4]
    cut = replace(plan.stages[1], replicas=(replace(plan.stages[1].replicas[0], ep=1),))
    other, slower = priced(prices, replace(plan, stages=(plan.stages[0], cut)))
    assert [g.ep for s in other.stages for g in s.groups] == [8, 1]
    assert slower > 1.01 * seconds
