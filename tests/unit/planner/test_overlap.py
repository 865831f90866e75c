"""Of plans that are about as fast, the one that depends less on transfers beside compute is chosen."""

from dataclasses import replace

import pytest

from testing.planner_cases import estimator_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.runtime import MEGATRON_HET
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.report.tables import bound_lines, search_body
from tools.planner.search.methods import search
from tools.planner.search.outcome import Found, Goal, Outcome
from tools.planner.search.overlap import PLAINER, SMALL, blocking_ratio, irregularity, prefer_plain, prefer_steady

MODEL = Model(
    num_layers=12,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_attention_heads=16,
    vocab_size=32000,
    seq_length=2048,
    global_batch_size=64,
    distributed_optimizer=True,
)
CLUSTER = Cluster(nodes=(NodeGroup(gpu="A100-40", count=4, gpus_per_node=1, network_bytes_per_s=1.25e9),))


def found(estimator, stages: int, seconds: float) -> Found:
    """A plan of so many equal stages that is said to take so long."""
    candidate = Candidate(tuple(Stage(12 // stages, (Group(0, 1, 4 // stages),)) for _ in range(stages)), 1, "full")
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    return Found(candidate, estimate, seconds, confirmed=True)


@pytest.mark.parametrize(("longer", "chosen"), [(SMALL / 2, 1), (SMALL * 1.1, 4)])
def test_a_plan_without_transfers_is_chosen_where_it_takes_hardly_longer(longer: float, chosen: int):
    estimator = estimator_of(CLUSTER, MODEL)
    fast, other = found(estimator, 4, 10.0), found(estimator, 1, 10.0 * (1 + longer))
    assert blocking_ratio(estimator, fast.candidate, fast.estimate) > 1.05
    assert blocking_ratio(estimator, other.candidate, other.estimate) is None
    outcome = Outcome("auto", [fast, other])
    prefer_plain(estimator, Goal(), outcome)
    assert len(outcome.best.candidate.stages) == chosen
    assert len(outcome.found) == 2
    lines = bound_lines(outcome, Goal())
    if chosen == 4:
        assert outcome.passed_over is None and not lines
        assert search_body(outcome, Goal())["passed_over"] is None
        return
    assert "chosen over a plan of 10 s" in lines[0]
    told = search_body(outcome, Goal())["passed_over"]
    assert told["iteration_s"] == 10.0 and told["blocking_s"] > told["chosen_blocking_s"] == other.iteration_s


def test_what_gains_less_than_it_loses_is_not_chosen():
    """Two plans of the same stages: the slower one depends on overlap as much."""
    estimator = estimator_of(CLUSTER, MODEL)
    outcome = Outcome("auto", [found(estimator, 4, 10.0), found(estimator, 4, 10.01)])
    prefer_plain(estimator, Goal(), outcome)
    assert outcome.passed_over is None and outcome.best.iteration_s == 10.0


def test_where_nothing_overlaps_and_under_a_goal_of_cost_the_best_stays():
    estimator = estimator_of(CLUSTER, MODEL)
    in_turn = estimator_of(CLUSTER, MODEL)
    in_turn.runtime = replace(MEGATRON_HET, transfers_in_turn=True)
    for estimators, goal in ((in_turn, Goal()), (estimator, Goal(objective="cost"))):
        outcome = Outcome("auto", [found(estimator, 4, 10.0), found(estimator, 1, 10.01)])
        prefer_plain(estimators, goal, outcome)
        assert len(outcome.best.candidate.stages) == 4 and outcome.passed_over is None


def test_the_search_of_the_commands_prefers_it():
    """The first plan of a search is never one that another beats without overlap and equals with it."""
    estimator, goal = estimator_of(CLUSTER, MODEL), Goal()
    outcome = search("auto", estimator, goal)
    best = outcome.best
    assert best is not None
    fastest = min(f.iteration_s for f in outcome.found if f.runnable)
    assert best.iteration_s <= fastest * (1 + SMALL)

    def blocked(f: Found) -> float:
        return f.iteration_s * (blocking_ratio(estimator, f.candidate, f.estimate) or 1.0)

    near = [f for f in outcome.found if f.runnable and f.iteration_s <= best.iteration_s]
    assert all(blocked(f) >= blocked(best) for f in near)


def test_of_nearly_equal_plans_the_plainest_is_chosen_and_the_other_one_named():
    estimator = estimator_of(CLUSTER, MODEL)
    plain = found(estimator, 2, 10.1)
    stages = tuple(Stage(n, (Group(0, 1, count),)) for n, count in ((1, 1), (7, 2), (4, 1)))
    odd = Candidate(stages, 1, "full")
    estimate = estimator.estimate(odd)
    assert estimate is not None
    assert irregularity(estimator, odd) == (1, 0, 1) and irregularity(estimator, plain.candidate) == (0, 0, 0)
    for longer, chosen in ((1.0, 2), (1 / (1 + 2 * PLAINER), 3)):
        outcome = Outcome("auto", [Found(odd, estimate, 10.0 * longer, confirmed=True), plain])
        prefer_plain(estimator, Goal(), outcome)
        assert outcome.best is not None and len(outcome.best.candidate.stages) == chosen
        lines = bound_lines(outcome, Goal())
        if chosen == 2:
            assert lines == ["plainer than a plan of 10 s, which has 3 stages, 2 different ones, 1 of one layer"]


MIXED = Cluster(
    nodes=(
        NodeGroup(gpu="A100-40", count=2, gpus_per_node=1, network_bytes_per_s=1.25e9),
        NodeGroup(gpu="V100-16", count=2, gpus_per_node=1, network_bytes_per_s=1.25e9),
    )
)
HALF = MODEL.model_copy(update={"precision": "fp16"})


@pytest.mark.parametrize(("longer", "is_chosen"), [(SMALL / 2, True), (SMALL * 1.1, False)])
def test_a_plan_that_loses_less_where_figures_are_off_is_chosen_where_it_takes_hardly_longer(longer, is_chosen):
    """Sums of gradients over four replicas hang on the network; a pipeline of one replica each hardly does."""
    estimator = estimator_of(CLUSTER, MODEL)
    fast, steady = found(estimator, 1, 10.0), found(estimator, 4, 10.0 * (1 + longer))
    outcome = Outcome("auto", [fast, steady])
    prefer_steady(estimator, Goal(), outcome)
    assert (outcome.best.candidate == steady.candidate) is is_chosen
    slower = next(shift for shift in outcome.shifts if shift.condition == "the network is 20 % slower")
    assert slower.share > 0
    said = "\n".join(bound_lines(outcome, Goal()))
    assert f"if the network is 20 % slower: {100 * slower.share:+.0f} %" in said
    assert ("loses less where figures are off" in said) is is_chosen
    assert search_body(outcome, Goal())["if_figures_are_off"]["the network is 20 % slower"] == slower.share


def test_a_kind_of_gpu_that_is_slower_counts_where_it_is_used():
    estimator = estimator_of(MIXED, HALF)
    candidate = Candidate((Stage(12, (Group(0, 1, 2),)),), 1, "full")
    fast = Found(candidate, estimator.estimate(candidate), 10.0, confirmed=True)
    outcome = Outcome("auto", [fast])
    prefer_steady(estimator, Goal(), outcome)
    by_name = {shift.condition: shift.share for shift in outcome.shifts}
    assert by_name["V100-16 is 10 % slower"] == 0
    assert 0.05 < by_name["A100-40 is 10 % slower"] < 0.12 and by_name["A100-40 is 10 % faster"] < -0.03


def test_a_plan_is_as_it_was_without_robust():
    estimator = estimator_of(CLUSTER, MODEL)
    outcome = search("auto", estimator, Goal(max_gpus=2), robust=False)
    assert not outcome.shifts and not outcome.steadier_than_s
    assert search("auto", estimator, Goal(max_gpus=2)).shifts
