"""Choices beside stages and batches: taken where the simulator says that they pay, and written into the plan."""

from functools import partial
from math import inf

import pytest

from megatron_het.lowering.programs import build
from megatron_het.plan import Placement
from testing.planner_cases import (
    LLAMA_70B,
    cluster_of,
    estimator_of,
    model_of,
    random_pool,
    read_back,
    simulate_block,
    with_catalog,
)
from tests.unit.planner import eight_layers
from tools.planner.costs.build import _again, build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.simulation import WHOLE_PROGRAM, block_s, operations_of, work_of
from tools.planner.costs.stages import rows_of
from tools.planner.inputs.cluster import Cluster, NodeGroup, ZoneLink
from tools.planner.inputs.model_parts import Experts
from tools.planner.search import finish
from tools.planner.search import methods as choices
from tools.planner.search.balance import balance, relieved
from tools.planner.search.candidate_cache import CandidateCache
from tools.planner.search.finish import simulated
from tools.planner.search.methods import (
    best_regular,
    changes,
    choose,
    in_slices,
    of_kinds_together,
    search,
    with_experts,
)
from tools.planner.search.outcome import Effort, Found, Goal, Progress, SearchResult
from tools.planner.search.pools import expand, merge

GOAL = Goal()


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less to simulate than in earnest."""
    monkeypatch.setattr(choices, "MOST_OPERATIONS_LONG", 30_000)


def estimator(gpu: str = "H100-SXM", nodes: int = 2, intra: float | None = None, **changed: object) -> Estimator:
    trained = {"seq_length": 4096, "global_batch_size": 16, "distributed_optimizer": True, "sequence_parallel": True}
    return eight_layers.estimator(eight_layers.model(**{**trained, **changed}), gpu, nodes, intra)


def chosen(priced: Estimator, candidate: Candidate) -> Found:
    estimate = priced.estimate(candidate)
    outcome = SearchResult("auto")
    if priced.fits(estimate):
        outcome.found = [Found(candidate, estimate, block_s(priced, candidate, estimate))]
    else:
        outcome.nearest = (candidate, estimate)
    choose(priced, GOAL, Progress(), outcome)
    assert outcome.best is not None
    return outcome.best


def check_emitted(priced: Estimator, found: Found) -> dict[str, object]:
    """The plan runs, is read back as the candidate, and takes what was promised; the schedule's parameters."""
    plan = build_plan(priced, found.candidate, found.estimate)
    build(plan)
    again, seconds = read_back(priced, plan)
    assert again == found.candidate and priced.fits(priced.estimate(again))
    assert seconds == pytest.approx(found.iteration_s, rel=1e-6)
    return plan.schedule.parameters


def two_stages(tp: int = 8) -> tuple[Stage, ...]:
    return (Stage(4, (Group(0, tp, 8 // tp),)), Stage(4, (Group(0, tp, 8 // tp),)))


def test_experts_are_divided_over_the_ranks_of_a_replica_where_there_are_experts() -> None:
    experts = Experts(count=8, top_k=2, ffn_hidden_size=14336)
    priced = estimator(experts=experts)
    found = chosen(priced, Candidate(two_stages(), 1, zero_stage=1))
    assert found.candidate.ep > 1
    check_emitted(priced, found)
    plan = build_plan(priced, found.candidate, found.estimate)
    assert {r.ep for s in plan.stages for r in s.replicas} == {found.candidate.ep}
    three = estimator(experts=experts.model_copy(update={"count": 3}))
    assert {c.ep for c in changes(three, GOAL, Candidate(two_stages(), 1))} == {1}
    assert {c.ep for c in changes(estimator(), GOAL, Candidate(two_stages(), 1))} == {1}


def test_experts_are_divided_over_replicas_where_these_have_room_for_a_part_only() -> None:
    """Ranks of their own sequences make larger products than ranks that cut matrices."""
    priced = estimator(experts=Experts(count=8, top_k=2, ffn_hidden_size=14336), global_batch_size=64)
    start = Candidate(two_stages(), 1, zero_stage=1)
    before, found = priced.estimate(start), chosen(priced, start)
    assert before is not None and found.iteration_s < 0.8 * before.iteration_s
    plan = build_plan(priced, found.candidate, found.estimate)
    assert any(r.ep > r.tp for s in plan.stages for r in s.replicas)
    check_emitted(priced, found)
    assert Placement(plan).companions(0)
    together = found.candidate.with_(rows=())
    alone = together.with_(ep=1, across_replicas=False)
    assert work_of(priced, together) == WHOLE_PROGRAM * operations_of(priced, together)  # its loops are not compiled
    assert work_of(priced, alone) == operations_of(priced, alone)


@pytest.mark.parametrize(("other", "simulated"), [(inf, 1), (1 / 3, 0)])
def test_finalists_far_behind_another_schedule_are_not_simulated(
    other: float, simulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced, candidate = estimator(), Candidate(two_stages(), 1, zero_stage=1)
    memo, outcome = CandidateCache(priced, GOAL, Progress()), SearchResult("auto")
    known = other * memo.try_candidate(candidate)
    monkeypatch.setattr(finish, "least_s", lambda *_: 0.0)  # nothing certain is known of it
    queues = finish._queues(memo, 1)
    found = [*finish._finalists(memo, outcome, priced, Effort(), queues, lambda c: c, bound=inf, known=known)]
    assert len(found) == outcome.simulations == simulated


def test_state_of_experts_over_replicas_is_divided_over_their_copies() -> None:
    """Eight ranks with an eighth of the experts each have them once: nobody shares their optimizer's state."""
    priced = estimator(experts=Experts(count=8, top_k=2, ffn_hidden_size=14336))
    model, stages = priced.model, two_stages(1)
    found = priced.estimate(Candidate(stages, 1, zero_stage=1).over_replicas(8))
    experts = 4 * 8 * 3 * model.hidden_size * 14336 // 8
    whole = found.memory[0].parameter_bytes / model.element_bytes
    expected = priced.optimizer_per_parameter * (experts + (whole - experts) / 8)
    assert found.memory[0].optimizer_bytes == pytest.approx(expected, rel=1e-6)
    assert priced.estimate(Candidate(stages, 8, zero_stage=1).over_replicas(8)) is None  # two for eight replicas


def test_a_vocabulary_is_split_where_the_last_stage_would_be_late() -> None:
    """Eight stages of one layer: no other division of layers evens out a large output layer."""
    stages = tuple(Stage(1, (Group(0, 1, 1),)) for _ in range(8))
    priced = estimator(vocab_size=256000, hidden_size=2048, ffn_hidden_size=8192)
    before = priced.estimate(Candidate(stages, 1, zero_stage=1))
    found = chosen(priced, Candidate(stages, 1, zero_stage=1))
    assert before is not None and found.candidate.rows and found.iteration_s < 0.8 * before.iteration_s
    assert check_emitted(priced, found)["vocabulary"] is True
    # The closed form knows where the output layer is computed, too.
    busy, whole_busy = found.estimate.stage_busy_s, before.stage_busy_s
    assert sum(busy) == pytest.approx(sum(whole_busy), rel=0.01) and max(busy) < 1.01 * min(busy)
    assert max(whole_busy) > 2 * min(whole_busy)
    assert found.estimate.iteration_s == pytest.approx(found.iteration_s, rel=0.1)
    assert not chosen(estimator(vocab_size=1024), Candidate(two_stages(1), 1, zero_stage=1)).candidate.rows
    later = estimator(vocab_size=256000, mtp_num_layers=1)  # their layers read whole tables
    assert not any(c.rows for c in changes(later, GOAL, Candidate(stages, 1, zero_stage=1)))


def test_equal_stages_with_unequal_parts_of_a_vocabulary() -> None:
    """What the closed form remembers of a stage is of its part, by which time and parameters differ."""
    priced = estimator(vocab_size=256000, hidden_size=2048, ffn_hidden_size=8192)
    stages = tuple(Stage(2, (Group(0, 1, 1),)) for _ in range(4))
    for schedule, chunks in (("1f1b", 1), ("ministage", 2)):
        c = Candidate(stages, 1, zero_stage=1, schedule=schedule, chunks=chunks, rows=rows_of((1, 1, 3, 1), False))
        found = priced.estimate(c)
        unit = priced.unit_of(c, stages[0].groups[0])
        more = (unit.embedding_f + unit.embedding_b + unit.head_f + unit.head_b) / 3 * 16
        assert found.stage_busy_s[2] - found.stage_busy_s[1] == pytest.approx(more)
        assert found.stage_busy_s[3] == pytest.approx(found.stage_busy_s[1])
        assert found.memory[2].parameter_bytes > 2 * found.memory[1].parameter_bytes


def test_long_sequences_are_cut_exchanged_and_offloaded() -> None:
    """What does not fit at all becomes a plan, without computing everything again."""
    priced = estimator("A100-80", seq_length=1048576, global_batch_size=4, recompute=("none", "full"))
    plain = Candidate(two_stages(), 1, zero_stage=1)
    estimate = priced.estimate(plain)
    assert estimate is not None and not priced.fits(estimate)
    found = chosen(priced, plain)
    c = found.candidate
    assert c.schedule == "slimpipe" and c.recompute == "none" and (c.host_activations or c.cp > 1)
    parameters = check_emitted(priced, found)
    assert parameters["slices"] == c.slices and bool(parameters.get("offload_activations")) == bool(c.host_activations)
    short = estimator()
    for changed in changes(short, GOAL, plain):
        assert changed.cp == 1 and changed.slices == 1 and not changed.exchange and not changed.host_activations


def test_the_exchange_pays_where_slices_are_few() -> None:
    """Late slices attend to more keys than early ones; stages share that out, over a network of a link per GPU."""
    priced = estimator(seq_length=131072, global_batch_size=2, recompute=("full",))
    nodes = tuple(node.model_copy(update={"network_bytes_per_s": 400e9}) for node in priced.cluster.nodes)
    priced = priced.on(priced.cluster.model_copy(update={"nodes": nodes}))
    plain = Candidate(two_stages(), 1, "full", "slimpipe", slices=4, zero_stage=1)
    found = chosen(priced, plain)
    assert found.candidate.exchange
    assert check_emitted(priced, found)["context_exchange"] is True


def test_attention_counts_once_under_an_exchange() -> None:
    """Passes were priced without attention, and it was taken off them once more."""
    priced = estimator(seq_length=131072, global_batch_size=2, recompute=("full",))
    seconds = []
    for exchange in (False, True):
        c = Candidate(two_stages(), 1, "full", "slimpipe", slices=4, zero_stage=1, exchange=exchange)
        estimate = priced.estimate(c)
        result = simulate_block(priced, c, estimate).result
        seconds.append(sum(result.compute_s))
    assert seconds[0] <= seconds[1] < 1.15 * seconds[0]  # queries and outputs that travel are waited for


def test_unequal_stages_say_what_passes_take() -> None:
    nodes = tuple(NodeGroup(gpu=gpu, count=1, gpus_per_node=8) for gpu in ("H100-SXM", "A100-80"))
    model = estimator(seq_length=131072, global_batch_size=2, recompute=("full",)).model
    priced = estimator_of(Cluster(nodes=nodes), model)
    stages = (Stage(5, (Group(0, 8, 1),)), Stage(3, (Group(1, 8, 1),)))
    c = Candidate(stages, 1, "full", "slimpipe", slices=8, zero_stage=1, exchange=True)
    estimate = priced.estimate(c)
    parameters = build_plan(priced, c, estimate).schedule.parameters
    fast, slow = parameters["exchange_attention"]
    assert fast == 1000 < slow and len(parameters["exchange_rest"]) == 2


def test_regular_pipelines_fit_and_use_all_kinds() -> None:
    nodes = (NodeGroup(gpu="H100-SXM", count=2, gpus_per_node=8), NodeGroup(gpu="A100-80", count=2, gpus_per_node=8))
    model = estimator(seq_length=131072, global_batch_size=4).model
    priced = estimator_of(Cluster(nodes=nodes), model)
    found = best_regular(priced, GOAL, in_slices)
    assert {tuple(c.gpus()) for c, _ in found} == {(0,), (1,), (0, 1)}
    for c, estimate in found:
        assert priced.fits(estimate) and c.slices >= len(c.stages)
        build_plan(priced, c, estimate)
    for c in in_slices(priced, GOAL, mixed=True):
        tp = {g.pool: g.tp for s in c.stages for g in s.groups}
        assert tp.keys() == {0, 1} and max(tp.values()) == 2 * min(tp.values())


def test_regular_stages_may_straddle_zones_and_groups_of_equal_nodes() -> None:
    """Of two zones with 6 GPUs each, stages of 4 GPUs took only one each."""
    model = estimator(seq_length=131072, global_batch_size=4).model
    node = NodeGroup(gpu="A100-80", count=6, gpus_per_node=2, network_bytes_per_s=400e9)
    half, other = (node.model_copy(update={"count": 3, "zone": zone}) for zone in ("a-1", "a-2"))
    links = (ZoneLink(between=("a-1", "a-2"), bytes_per_s=400e9),)
    times = []
    for nodes in ((node,), (half, half), (half, other)):
        priced = estimator_of(Cluster(nodes=nodes, links=links if other in nodes else ()), model)
        found = [simulated(priced, *pair) for pair in best_regular(priced, GOAL, in_slices)]
        times.append(min(f.iteration_s for f in found if f is not None))
    assert times[1:] == pytest.approx([times[0]] * 2, rel=0.01)
    three = Candidate((Stage(8, (Group(0, 2, 3),)),), 1, cp=2)  # a zone has room for one replica, with 2 GPUs left
    assert not expand(merge(priced), priced.cluster, three).stages


def of_two_kinds(first: str, second: str, **changes: object) -> Estimator:
    nodes = tuple(
        NodeGroup(gpu=gpu, count=n, gpus_per_node=8, network_bytes_per_s=400e9) for gpu, n in ((first, 1), (second, 2))
    )
    return estimator_of(Cluster(nodes=nodes), estimator(seq_length=131072, global_batch_size=1, **changes).model)


def test_replicas_of_several_kinds_fit_and_have_all_gpus() -> None:
    """In one stage, and in several under slices."""
    priced = of_two_kinds("H100-SXM", "A100-80")
    found = best_regular(priced, GOAL, of_kinds_together)
    assert {len(c.stages) for c, _ in found} >= {1, 2}
    for c, estimate in found:
        assert priced.fits(estimate) and c.gpus() == {0: 8, 1: 16}
        assert candidate_of(build_plan(priced, c, estimate), priced.cluster)[0].stages == c.stages
        by_speed = [o for o in changes(priced, GOAL, c) if o.stages[0].groups[0].parts != c.stages[0].groups[0].parts]
        units = [priced.units_of_parts(o, o.stages[0].groups[0]) or [] for o in (c, *by_speed)]
        seconds = [[u.layer_f + u.layer_b for u in mine] for mine in units]
        assert min(max(mine) / min(mine) for mine in seconds) < 1.05
    assert not [*of_kinds_together(priced.only([1]), GOAL)]
    twice = priced.only([0, 1, 1])  # a plan would not tell the A100 of one entry from those of the other
    assert not [*of_kinds_together(twice, GOAL)]


def test_two_kinds_share_the_only_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    best = choices.search("auto", of_two_kinds("A100-80", "L40S"), GOAL).best
    assert best is not None and best.candidate.stages[0].groups[0].pools == (0, 1)
    monkeypatch.setattr(choices, "of_kinds_together", lambda *_: iter(()))
    other = choices.search("auto", of_two_kinds("A100-80", "L40S"), GOAL).best
    assert other is not None and best.iteration_s < 0.95 * other.iteration_s


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_regular_plans_with_experts_are_of_each_kind_alone_too(objective: str) -> None:
    """Such a plan of one kind was 12 % cheaper than the plan that was found on all kinds."""
    kinds = {"H200": 9.0, "L40S": 20.0}
    nodes = tuple(NodeGroup(gpu=gpu, count=1, gpus_per_node=8, usd_per_gpu_hour=usd) for gpu, usd in kinds.items())
    model = estimator(experts=Experts(count=8, top_k=2, ffn_hidden_size=14336)).model
    priced, goal = estimator_of(Cluster(nodes=nodes), model), Goal(objective)
    found = best_regular(priced, goal, with_experts)
    assert {frozenset({0}), frozenset({0, 1})} <= {frozenset(c.gpus()) for c, _ in found}
    least = min(goal.value(e) for c, e in found if set(c.gpus()) == {0})
    one = priced.only([0])
    alone = best_regular(one, goal, with_experts)
    assert least == pytest.approx(min(goal.value(estimate) for _, estimate in alone))
    near = best_regular(priced, goal, with_experts, 1.04 * least)
    assert near and all(goal.value(estimate) <= 1.04 * least for _, estimate in near)


def test_regular_plans_with_experts_may_leave_slow_gpus_out() -> None:
    """With a node more of the slow kind the plan was 13 % slower: it was only tried on all nodes of all kinds."""
    cluster, model = random_pool(9313, "experts")
    slow, fast = cluster.nodes
    least = []
    for count in (1, 2):
        nodes = slow.model_copy(update={"count": count}), fast
        priced = with_catalog(Cluster(nodes=nodes), model)
        found = best_regular(priced, GOAL, with_experts)
        least.append(min(estimate.iteration_s for _, estimate in found))
    assert least[1] <= least[0]


def test_the_best_change_of_a_plan_with_many_microbatches_is_simulated() -> None:
    """Four interleaved stages, 480 microbatches: no change was, and the plan was 5 % dearer than a split vocabulary."""
    best = search("auto", with_catalog(*random_pool(10838)), Goal("cost")).best
    assert best is not None and best.candidate.rows and best.usd_per_iteration < 0.53


def test_plans_that_differ_in_microbatches_in_flight_only_count_as_one() -> None:
    priced, stages = estimator(), two_stages()
    estimate = priced.estimate(Candidate(stages, 1))
    assert estimate is not None
    alike = [Candidate(stages, 1), Candidate(stages, 1, depths=(2,)), Candidate(stages, 1, slack=0.0)]
    others = [Candidate(stages, 2), Candidate(stages[::-1], 1, recompute="full")]
    found = [Found(c, estimate, 1.0 + i) for i, c in enumerate([*alike, *others])]
    assert choices._distinct(found) == [found[0], *found[3:]]


def test_layers_run_again_only_where_memory_is_short() -> None:
    """Each stage keeps as many as fit, and the written plan says which run again."""
    cluster = cluster_of(("RTX-4090", 1, 4, 12.5e9), ("L40S", 1, 4, 12.5e9))
    sizes = {"layers": 16, "hidden": 4096, "heads": 32, "tokens": 8192, "batch": 32}
    priced = estimator_of(cluster, model_of(**sizes, distributed_optimizer=True))
    groups = (((Group(0, 1, 2),),) * 2) + (((Group(1, 1, 2),),) * 2)
    whole = balance(priced, groups, Candidate((), 1, "full", zero_stage=1))
    found = relieved(priced, whole)
    kept = [s.groups[0].kept for s in found.stages]
    assert 0 < kept[0] < kept[1] < kept[2] == kept[3] == 1
    assert priced.fits(priced.estimate(found))
    assert priced.estimate(found).iteration_s < 0.85 * priced.estimate(whole).iteration_s
    for s in (0, 1):  # one more would be too much
        more = [[k + (i == s) / found.stages[i].layers] for i, k in enumerate(kept)]
        assert not priced.fits(priced.estimate(found.keeping(more)))
    sliced = balance(priced, groups, Candidate((), 1, zero_stage=1, schedule="slimpipe", slices=8))
    same = sliced.with_(recompute="full").keeping([[1.0]] * 4)
    last = [priced.estimate(c).memory_of(c, 3)[0][0].total_bytes for c in (sliced, same)]
    assert last[0] == pytest.approx(last[1])  # logits of all slices, too
    assert (_again(5, 3, 0.6), _again(5, 3, 0.4), _again(4, 2, 0.25)) == ((1, 1, 0), (2, 1, 0), (2, 1))
    best = search("auto", priced, Goal(schedules=("1f1b",))).best
    check_emitted(priced, best)
    assert best.candidate.host_activations, "nothing runs again where main memory has room for it"
    nodes = tuple(node.model_copy(update={"host_memory_bytes": 1e9}) for node in cluster.nodes)
    best = search("auto", priced.on(cluster.model_copy(update={"nodes": nodes})), Goal(schedules=("1f1b",))).best
    assert 0 < best.candidate.stages[0].groups[0].kept < 1
    assert relieved(priced, whole.with_(offload=True)).offload
    assert relieved(estimator_of(cluster, priced.model.model_copy(update={"recompute": ("full",)})), whole) == whole


def test_a_stage_gets_layers_that_memory_holds_back_if_few_of_them_run_again() -> None:
    """70B on A100 and H100: a stage of H100 can hold 12 layers, so the others had more than their share."""
    cluster = cluster_of(("H100-SXM", 2, 8, 50e9), ("A100-80", 2, 8, 25e9))
    more = {"words": 128256, "distributed_optimizer": True, "sequence_parallel": True}
    priced = estimator_of(cluster, model_of(layers=80, **LLAMA_70B, tokens=8192, batch=512, **more))
    groups = (((Group(1, 4, 1),),) * 4) + (((Group(0, 4, 1),),) * 4)
    held_back = balance(priced, groups, Candidate((), 1, zero_stage=1, slack=1.0))
    start = Found(held_back, estimate := priced.estimate(held_back), block_s(priced, held_back, estimate))
    simulate = partial(finish._simulated, priced, GOAL, tries=1)
    found = min(finish.freed(priced, GOAL, start, simulate, start.iteration_s), key=lambda f: f.iteration_s)
    assert found.iteration_s < 0.96 * start.iteration_s and priced.fits(found.estimate)
    assert found.candidate.stages[4].layers > held_back.stages[4].layers
    assert not list(finish.freed(priced, GOAL, found, simulate, found.iteration_s))  # it runs some again already
