"""Replicas with context and expert parallelism are priced as they are: by the search's figures, from plans as read."""

from dataclasses import replace
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_het.plan import Plan
from testing.planner_cases import cluster_of, estimator_of, read_back
from tests.unit.planner.emit_plans import WIDE
from tools.planner.cli import dry_run
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, SequencePart, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.simulation import block_s, simulate_candidate
from tools.planner.costs.stages import _whole
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, ZoneLink
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts, Mamba
from tools.planner.replay.measured import DeviceTimes, Times, Watched
from tools.planner.replay.measured import Found as WatchFound
from tools.planner.replay.replan import correct, predicted_s


def estimator(**changes: object) -> Estimator:
    fields = WIDE | {"hidden_size": 2048, "ffn_hidden_size": 8192, "seq_length": 8192, "global_batch_size": 8}
    fields |= {"distributed_optimizer": True, "sequence_parallel": True}
    return estimator_of(cluster_of(("H100-SXM", 2, 8, 50e9)), Model.model_validate(fields | changes))


EXPERTS = Experts(count=16, top_k=4, ffn_hidden_size=1024)


def stages(*groups: Group) -> tuple[Stage, ...]:
    return tuple(Stage(8 // len(groups), (g,)) for g in groups)


def planned(prices: Estimator, candidate: Candidate) -> tuple[Plan, float]:
    """The candidate's plan, and its simulated time as written and read again."""
    estimate = prices.estimate(candidate)
    plan = build_plan(prices, candidate, estimate)
    again, seconds = read_back(prices, plan)
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
    other, slower = read_back(prices, replace(plan, stages=(plan.stages[0], cut)))
    assert [g.ep for s in other.stages for g in s.groups] == [8, 1]
    assert slower > 1.01 * seconds


# Replicas whose context-parallel ranks are on several kinds of GPU, or have parts of different sizes.


def two_kinds(bytes_per_s: float = 200e9, **changes: object) -> Estimator:
    fields = WIDE | {"hidden_size": 2048, "ffn_hidden_size": 8192, "seq_length": 16384, "global_batch_size": 8}
    fields |= {"distributed_optimizer": True, "sequence_parallel": True}
    kinds = ("H100-SXM", 2, 8, 2 * bytes_per_s), ("A100-40", 2, 8, bytes_per_s)
    return estimator_of(cluster_of(*kinds), Model.model_validate(fields | changes))


def shared(*parts: tuple[int, int], tp: int = 1, count: int = 1) -> Group:
    divisor = gcd(*(share for _, share in parts))
    return Group(parts[0][0], tp, count, 0, tuple(SequencePart(pool, share // divisor) for pool, share in parts))


@st.composite
def shared_candidates(draw: st.DrawFn) -> Candidate:
    """Pipelines of replicas that have parts of their own, and of others."""
    cp, tp = draw(st.sampled_from(((2, 1), (2, 2), (4, 1))))
    made = []
    for _ in range(draw(st.integers(1, 2))):
        groups = {Group(draw(st.integers(0, 1)), tp, draw(st.integers(1, 2)))}
        for _ in range(draw(st.integers(0, 1))):
            size = draw(st.integers(1, cp))
            parts = [SequencePart(draw(st.integers(0, 1)), draw(st.integers(1, 3))) for _ in range(size)]
            if size < cp or len(set(parts)) > 1:
                groups.add(shared(*parts, tp=tp, count=draw(st.integers(1, 2))))
        made.append(tuple(sorted(groups)))
    stages = tuple(Stage(8 // len(made), groups) for groups in made)
    return draw(
        st.sampled_from(
            [
                Candidate(stages, 1, zero_stage=1, cp=cp),
                Candidate(stages, 1, zero_stage=1, cp=cp, recompute="full", host_activations=0.5),
                Candidate(stages, 1, zero_stage=1, cp=cp, schedule="slimpipe", slices=4),
            ]
        )
    )


@settings(deadline=None, max_examples=40)
@given(shared_candidates())
def test_what_is_promised_of_unequal_parts_is_written_and_simulated(candidate: Candidate) -> None:
    """Parts of a replica in one pool and with equal shares are no parts of their own, when a plan is read."""
    prices = two_kinds()
    estimate = prices.estimate(candidate)
    plan, seconds = planned_again(prices, candidate)
    assert 0.7 < estimate.iteration_s / seconds < 1.4
    if len(candidate.stages) > 1:
        assert block_s(prices, candidate, estimate) <= seconds * (1 + 1e-9)
    assert sum(m.ranks for m in estimate.memory) == plan.world_size == candidate.world_size
    assert {p.activation_bytes for p in plan.predicted.per_rank} == {int(m.activation_bytes) for m in estimate.memory}  # type: ignore[union-attr]


def planned_again(prices: Estimator, candidate: Candidate) -> tuple[Plan, float]:
    """As ``planned``, where a replica of the most ranks may not be one of those of the candidate's size."""
    estimate = prices.estimate(candidate)
    plan = Plan.from_json(build_plan(prices, candidate, estimate).to_json())
    promised = simulate_candidate(prices, candidate, estimate, plan).iteration_s
    again, seconds = read_back(prices, plan)
    assert seconds == pytest.approx(promised, rel=1e-9)
    assert again.gpus() == candidate.gpus()
    return plan, seconds


def test_parts_by_speed_are_faster_than_equal_parts() -> None:
    """Without a network between them, parts that end together take as long as the sum of the speeds says."""
    prices = two_kinds(1e15, seq_length=65536)
    one = [prices.unit_of(Candidate(stages(Group(pool, 1, 1)), 1), Group(pool, 1, 1)) for pool in (0, 1)]
    fast_s, slow_s = (u.layer_f + u.layer_b for u in one if u is not None)

    def layer_s(*shares: int) -> float:
        group = shared((0, shares[0]), (1, shares[1]))
        unit = prices.unit_of(Candidate(stages(group), 1, cp=2), group)
        return unit.layer_f + unit.layer_b

    assert layer_s(1, 1) == pytest.approx(slow_s / 2, rel=0.05)
    by_speed = layer_s(round(1000 * slow_s / fast_s), 1000)
    assert by_speed == pytest.approx(1 / (1 / fast_s + 1 / slow_s), rel=0.05) and by_speed < 0.7 * layer_s(1, 1)


def test_each_part_holds_its_share_of_the_activations() -> None:
    prices = two_kinds()
    found = prices.estimate(Candidate(stages(shared((0, 3), (1, 1)), shared((0, 3), (1, 1))), 1, cp=2, zero_stage=1))
    large, small, *_ = found.memory
    assert large.activation_bytes == pytest.approx(3 * small.activation_bytes)
    assert large.optimizer_bytes == small.optimizer_bytes
    assert [m.capacity_bytes for m in (large, small)] == [
        prices.cluster.gpu(n.gpu).memory_bytes for n in prices.cluster.nodes
    ]


def test_parts_in_different_zones_are_found_again() -> None:
    """A kind of GPU in two zones, beside one in a third."""
    prices = two_kinds()
    fast, slow = prices.cluster.nodes
    placed = zip((fast, slow, slow), ("a", "b", "c"))
    cluster = Cluster(nodes=tuple(node.model_copy(update={"zone": zone}) for node, zone in placed))
    candidate = Candidate(stages(shared((0, 1), (1, 1))), 1, cp=2)
    plan, _ = planned_again(estimator_of(cluster, prices.model), candidate)
    assert [replica.zone for replica in plan.stages[0].replicas] == [""]


def test_a_slow_link_between_parts_shows() -> None:
    kinds = [("H100-SXM", 1, 8, rate) for rate in (400e9, 5e9)]
    slow, fast = (
        estimator_of(cluster_of(kind, ("A100-40", 1, 8, 400e9)), two_kinds().model) for kind in reversed(kinds)
    )
    candidate = Candidate(stages(shared((0, 2), (1, 1))), 1, cp=2)
    assert slow.estimate(candidate).iteration_s > 1.5 * fast.estimate(candidate).iteration_s


def test_parts_between_which_bytes_have_a_price_are_not_priced() -> None:
    prices = two_kinds()
    nodes = tuple(node.model_copy(update={"zone": f"{z}-a"}) for node, z in zip(prices.cluster.nodes, "xy"))
    link = ZoneLink(between=("x-a", "y-a"), bytes_per_s=400e9, usd_per_gb=0.01)
    candidate = Candidate(stages(shared((0, 1), (1, 1))), 1, cp=2)
    plan, _ = planned_again(prices, candidate)
    with pytest.raises(PlannerError, match=r"replicas\[0\]\.cp = 2: its ranks are in regions between which bytes"):
        candidate_of(plan, Cluster(nodes=nodes, links=(link,)))


@pytest.mark.parametrize("slow", [1.0, 2.0])
def test_a_run_of_replicas_of_two_kinds_is_planned_again(slow: float) -> None:
    """One of two such replicas takes longer: both its kinds are kinds of their own then."""
    prices = two_kinds(1e15)
    candidate = Candidate(stages(shared((0, 2), (1, 1), tp=2, count=2)), 1, cp=2, zero_stage=1)
    plan, seconds = planned_again(prices, candidate)
    names = "ranks 0 to 3", "ranks 4 to 7"
    devices = tuple(
        DeviceTimes(
            device=q,
            stage=0,
            replica=q,
            ranks=replica.ranks,
            kind=replica.device,
            operations={"FORWARD": Times(predicted_s=1.0, measured_s=slow if q else 1.0, reference_s=1.0)}
            | {"BACKWARD": Times(predicted_s=2.0, measured_s=2 * slow if q else 2.0, reference_s=2.0)},
        )
        for q, replica in enumerate(plan.stages[0].replicas)
    )
    finding = WatchFound(what="device", name=names[1], factor=2.0, since=1, found=2)
    times = {"predicted_iteration_s": seconds, "iteration_s": slow * seconds}
    findings = (finding,) if slow > 1 else ()
    watched = Watched(plan_hash="", iteration=9, **times, findings=findings, devices=devices)
    found = correct(plan, prices.cluster, None, watched)
    kinds = [replica.devices for replica in found.plan.stages[0].replicas]
    ending = " slow 1" if slow > 1 else ""
    assert kinds == [("H100-SXM", "A100-40"), (f"H100-SXM{ending}", f"A100-40{ending}")]
    again = estimator_of(found.cluster, prices.model, found.profile, prices.runtime)
    assert predicted_s(again, found.plan) == pytest.approx(slow * seconds, rel=0.1)


@pytest.mark.parametrize("shares", [(3, 1), (1, 1)])
def test_dry_runs_of_parts_stand_beside_their_own_gpus(shares: tuple[int, int]) -> None:
    prices = two_kinds()
    estimate = prices.estimate(candidate := Candidate(stages(shared(*enumerate(shares))), 1, cp=2, zero_stage=1))
    plan = build_plan(prices, candidate, estimate)
    gpus = [node.gpu for node in prices.cluster.nodes]
    kinds = dry_run.rank_kinds(plan)
    assert kinds == [(0,), (1,)]
    found = [dry_run._formula(plan, kind, estimate.memory, gpus) for kind in kinds]
    assert found == list(zip(gpus, estimate.memory, strict=True))


def test_ranks_of_recurrent_layers_scan_as_many_heads_whatever_their_parts() -> None:
    """Three quarters of the tokens are not three quarters of the work: heads are divided evenly."""

    def ratio(**changes: object) -> float:
        prices = two_kinds(1e15, num_layers=8, **changes)
        units = prices.units_of_parts(Candidate((), 1, cp=2), shared((0, 3), (0, 1)))
        return units[0].layer_f / units[1].layer_f

    recurrent = {"pattern": "M" * 8, "mamba": Mamba(heads=64, state_size=1024)}  # a long scan
    assert 1 < ratio(**recurrent) < 0.6 * ratio(pattern="-" * 8)


def test_stages_without_attention_exchange_it() -> None:
    """Of a hybrid model: nothing can be divided by their attention."""
    assert _whole([0.0, 2.0, 4.0]) == [1, 1000, 2000] and _whole([0.0, 0.0]) == [1, 1]
