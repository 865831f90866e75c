"""Searches leave out what is refused when it is written: plans of more passes than an iteration may have."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.interpolate import PchipInterpolator

from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import validate as limits
from megatron_het.plan.validate import most_chunks
from testing.planner_cases import cluster_of, estimator_of, model_of, with_catalog
from tools.planner.__main__ import main
from tools.planner.cli.commands import larger_micro_batches
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layer import DENSE, MEGATRON_HET, SLICED
from tools.planner.costs.layercost import interpolated
from tools.planner.costs.schedules import SCHEDULES
from tools.planner.costs.simulation import block_s, simulate_candidate
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.report.tables import bound_lines, search_body
from tools.planner.search import finish
from tools.planner.search.auto import search_auto
from tools.planner.search.candidate_cache import Sketch
from tools.planner.search.methods import search
from tools.planner.search.outcome import Found, Goal, SearchResult, Shift
from tools.planner.search.overlap import NEAR, PLAINER, blocking_ratio, irregularity, prefer_plain, prefer_steady

BATCH = 64


def estimator(micro_batch_sizes: tuple[int, ...] = (1, 2)) -> Estimator:
    shape = {"layers": 12, "hidden": 2048, "ffn": 6144, "tokens": 512}
    model = model_of(**shape, batch=BATCH, precision="fp16", sizes=micro_batch_sizes, recompute=("none",))
    return with_catalog(cluster_of(("A100-40", 6, 1, 2.5e8)), model)


def most(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """So many chunks at most, at micro batches of one sequence."""
    monkeypatch.setattr(limits, "MAX_PASSES", 2 * BATCH * chunks)


def test_the_search_takes_a_plan_that_may_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in large plans, nothing is simulated, so that nothing but the closed form can leave a plan out."""
    monkeypatch.setattr(finish, "MOST_OPERATIONS", 0)
    goal = Goal(schedules=("1f1b", "interleaved", "slimpipe"))
    free = search_auto(estimator((1,)), goal).best
    passes = 2 * len(free.candidate.stages) * free.candidate.chunks * free.candidate.slices
    passes *= BATCH // free.candidate.micro_batch_size
    assert passes > 2 * BATCH
    most(monkeypatch, 1)
    known = estimator((1,))
    best = search_auto(known, goal).best
    plan = build_plan(known, best.candidate, best.estimate)  # raises where it is refused
    assert plan.num_microbatches * len(plan.stages) <= BATCH


@pytest.mark.parametrize(
    ("stages", "changes", "runs"),
    [
        (4, {}, True),
        (5, {}, False),
        (5, {"micro_batch_size": 2}, True),
        (2, {"schedule": "interleaved", "chunks": 2}, True),
        (3, {"schedule": "interleaved", "chunks": 2}, False),
        (2, {"schedule": "slimpipe", "slices": 2}, True),
        (2, {"schedule": "slimpipe", "slices": 4}, False),
    ],
)
def test_passes_of_stages_chunks_and_slices(
    monkeypatch: pytest.MonkeyPatch, stages: int, changes: dict[str, object], runs: bool
) -> None:
    most(monkeypatch, 4)
    known = estimator()
    groups = ((Group(0, 1, 1),),) * stages
    layers = (2,) * (stages - 1) + (12 - 2 * (stages - 1),)
    candidate = Candidate(tuple(map(Stage, layers, groups)), 1).with_(**changes)
    estimate = known.estimate(candidate)
    assert (estimate is not None) == runs
    assert (Sketch(known, Goal()).value(groups, candidate) < float("inf")) == runs


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[dict[str, Any], dict[str, Any]], str]:
    """Returns what the planner says of a model on a group of nodes that have no plan for it."""

    def say(model: dict[str, Any], nodes: dict[str, Any]) -> str:
        (tmp_path / "m.yaml").write_text(json.dumps(model | {"distributed_optimizer": True}))
        (tmp_path / "c.yaml").write_text(json.dumps({"nodes": [nodes]}))
        words = ["plan", "--cluster", f"{tmp_path}/c.yaml", "--model", f"{tmp_path}/m.yaml", "--out", f"{tmp_path}/p"]
        assert main(words) == 2
        return capsys.readouterr().err

    return say


def test_the_error_says_that_larger_micro_batches_allow_more_stages(refused: Any) -> None:
    """70 billion parameters on ten GPUs of 40 GB: two stages do not hold them, and more have too many passes."""
    model = {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
    model |= {"vocab_size": 128000, "seq_length": 4096, "global_batch_size": 100_000}
    model |= {"micro_batch_sizes": [1], "recompute": ["full"]}
    told = refused(model, {"gpu": "A100-40", "count": 10, "gpus_per_node": 1, "network_bytes_per_s": 1e10})
    assert "the model fits nowhere" in told
    assert "allow micro_batch_sizes of 4 or more, with which there may be 10 stages" in told
    assert "those of 1 leave room for 2 stages" in told


def test_the_error_says_that_main_memory_is_short(refused: Any) -> None:
    """What came nearest filled no GPU: the error said 20.8 GiB of 22.8 GiB usable, and to add about 0 GPUs."""
    model = {"num_layers": 24, "hidden_size": 4096, "ffn_hidden_size": 16384, "num_attention_heads": 32}
    model |= {"vocab_size": 32000, "seq_length": 1024, "global_batch_size": 16}
    told = refused(model, {"gpu": "RTX-3090", "count": 1, "gpus_per_node": 2, "host_memory_bytes": 80e9})
    assert "to main memory per node, of 75 GiB" in told and "usable" not in told
    assert "Nearest changes: more main memory (host_memory_bytes in the cluster file" in told and "about" not in told


@pytest.mark.parametrize(
    ("batch", "sizes", "nodes", "overfull", "advice"),
    [
        (100_000, (1,), 2, 9.0, ""),  # as many stages as GPUs were looked at
        (100_000, (1, 4), 10, 9.0, ""),
        (100_000, (1, 2), 10, 9.0, "micro_batch_sizes of 4 or more"),
        (100_000, (1,), 10, 2.5, "may be 5 stages"),
        (131_072, (1,), 10, 1.01, "room for one stage,"),
    ],
)
def test_when_larger_micro_batches_are_advised(
    batch: int, sizes: tuple[int, ...], nodes: int, overfull: float, advice: str
) -> None:
    known = estimator()
    model = known.model.model_copy(update={"global_batch_size": batch, "micro_batch_sizes": sizes})
    group = known.cluster.nodes[0].model_copy(update={"count": nodes})
    told = larger_micro_batches(known.cluster.model_copy(update={"nodes": (group,)}), model, overfull)
    assert advice in told and bool(told) == bool(advice), told
    if advice:  # what is advised is enough, and one less is not
        enough = int(told.split(" of ")[1].split()[0])
        stages = int(told.split("there may be ")[1].split()[0])
        assert stages <= min(model.num_layers, nodes)
        assert most_chunks(-(-batch // enough), 1) >= stages > most_chunks(-(-batch // (enough - 1)), 1)


MODEL = model_of(layers=12, hidden=2048, tokens=2048, batch=64, distributed_optimizer=True)
CLUSTER = cluster_of(("A100-40", 4, 1, 1.25e9))


def found(estimator, stages: int, seconds: float) -> Found:
    """A plan of so many equal stages that is said to take so long."""
    candidate = Candidate(tuple(Stage(12 // stages, (Group(0, 1, 4 // stages),)) for _ in range(stages)), 1, "full")
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    return Found(candidate, estimate, seconds, confirmed=True)


@pytest.mark.parametrize(("longer", "chosen"), [(NEAR / 2, 1), (NEAR * 1.1, 4)])
def test_a_plan_without_transfers_is_chosen_where_it_takes_hardly_longer(longer: float, chosen: int):
    estimator = estimator_of(CLUSTER, MODEL)
    fast, other = found(estimator, 4, 10.0), found(estimator, 1, 10.0 * (1 + longer))
    assert blocking_ratio(estimator, fast.candidate, fast.estimate) > 1.05
    assert blocking_ratio(estimator, other.candidate, other.estimate) is None
    outcome = SearchResult("auto", [fast, other])
    prefer_plain(estimator, Goal(), outcome)
    assert len(outcome.best.candidate.stages) == chosen
    assert len(outcome.found) == 2
    lines = bound_lines(outcome, Goal())
    if chosen == 4:
        assert outcome.passed_over is None and not lines
        assert search_body(outcome, Goal())["passed_over"] is None
        return
    assert lines[0].startswith("a plan of 10 s (") and "depends more on transfers beside compute" in lines[0]
    told = search_body(outcome, Goal())["passed_over"]
    assert told["iteration_s"] == 10.0 and told["blocking_s"] > told["chosen_blocking_s"] == other.iteration_s


def test_what_gains_less_than_it_loses_is_not_chosen():
    """Two plans of the same stages: the slower one depends on overlap as much."""
    estimator = estimator_of(CLUSTER, MODEL)
    outcome = SearchResult("auto", [found(estimator, 4, 10.0), found(estimator, 4, 10.01)])
    prefer_plain(estimator, Goal(), outcome)
    assert outcome.passed_over is None and outcome.best.iteration_s == 10.0


def test_where_nothing_overlaps_and_under_a_goal_of_cost_the_best_stays():
    estimator = estimator_of(CLUSTER, MODEL)
    in_turn = estimator_of(CLUSTER, MODEL)
    in_turn.runtime = replace(MEGATRON_HET, transfers_in_turn=True)
    for estimators, goal in ((in_turn, Goal()), (estimator, Goal(objective="cost"))):
        outcome = SearchResult("auto", [found(estimator, 4, 10.0), found(estimator, 1, 10.01)])
        prefer_plain(estimators, goal, outcome)
        assert len(outcome.best.candidate.stages) == 4 and outcome.passed_over is None


def test_the_search_of_the_commands_prefers_it():
    """The first plan of a search is never one that another beats without overlap and equals with it."""
    estimator, goal = estimator_of(CLUSTER, MODEL), Goal()
    outcome = search("auto", estimator, goal)
    best = outcome.best
    fastest = min(f.iteration_s for f in outcome.found if f.runnable)
    assert best.iteration_s <= fastest * (1 + NEAR)

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
    assert irregularity(estimator, odd) == (1, 0, 1, 0) and irregularity(estimator, plain.candidate) == (0, 0, 0, 0)
    for gpu, over_pcie in (("A40", 1), ("V100-32", 0)):  # whose NVLink is slow
        nodes = (NodeGroup(gpu=gpu, count=1, gpus_per_node=4),)
        with_tp = Candidate((Stage(6, (Group(0, 4, 1),)),), 1)
        assert irregularity(with_catalog(Cluster(nodes=nodes), MODEL), with_tp)[1] == over_pcie
    for longer, chosen in ((1.0, 2), (1 / (1 + 2 * PLAINER), 3)):
        outcome = SearchResult("auto", [Found(odd, estimate, 10.0 * longer, confirmed=True), plain])
        prefer_plain(estimator, Goal(), outcome)
        assert outcome.best is not None and len(outcome.best.candidate.stages) == chosen
        lines = bound_lines(outcome, Goal())
        if chosen == 2:
            said = "because it is less regular: 3 stages, 2 different ones, 1 of one layer"
            assert len(lines) == 1 and lines[0].startswith("a plan of 10 s (") and lines[0].endswith(said)


@pytest.mark.parametrize(("longer", "is_offloaded"), [(1.0, False), (1 / (1 + 2 * PLAINER), True)])
def test_state_stays_on_gpus_that_have_room(longer: float, is_offloaded: bool):
    """A plan of 48 GPUs kept 500 GB of a node's state in main memory, and no more than half of each GPU was full."""
    estimator = estimator_of(CLUSTER, MODEL)
    stage = (Stage(12, (Group(0, 1, 4),)),)
    resident = Candidate(stage, 1, "full", "ministage", 12, zero_stage=1)
    seconds, offloaded = block_s(estimator, resident, estimator.estimate(resident)), resident.with_(offload=True)
    plan = Found(offloaded, estimator.estimate(offloaded), seconds * longer, confirmed=True)
    outcome = SearchResult("auto", [plan])
    prefer_plain(estimator, Goal(), outcome)
    assert outcome.best.candidate.offload == is_offloaded and plan in outcome.found


MIXED = cluster_of(("A100-40", 2, 1, 1.25e9), ("V100-16", 2, 1, 1.25e9))
HALF = MODEL.model_copy(update={"precision": "fp16"})


@pytest.mark.parametrize(("longer", "is_chosen"), [(NEAR / 2, True), (NEAR * 1.1, False)])
def test_a_plan_that_loses_less_where_figures_are_off_is_chosen_where_it_takes_hardly_longer(longer, is_chosen):
    """Sums of gradients over four replicas hang on the network; a pipeline of one replica each hardly does."""
    estimator = estimator_of(CLUSTER, MODEL)
    fast, steady = found(estimator, 1, 10.0), found(estimator, 4, 10.0 * (1 + longer))
    outcome = SearchResult("auto", [fast, steady])
    prefer_steady(estimator, Goal(), outcome)
    assert (outcome.best.candidate == steady.candidate) is is_chosen
    slower = next(shift for shift in outcome.shifts if shift.condition == "the network is 20 % slower")
    assert slower.share > 0
    said = "\n".join(bound_lines(outcome, Goal()))
    assert f"if the network is 20 % slower: {100 * slower.share:+.0f} %" in said
    assert ("loses more where figures are off" in said) is is_chosen
    assert search_body(outcome, Goal())["if_figures_are_off"]["the network is 20 % slower"] == slower.share


def test_what_changes_nothing_is_one_line():
    """No line says "-0 %", and kinds that the plan does not use take no line each."""
    shares = {"the network is 20 % slower": 0.03, "T4 is 10 % slower": 0.0, "T4 is 10 % faster": -1e-4, "A is new": 0.0}
    lines = bound_lines(SearchResult("auto", shifts=tuple(Shift(*pair) for pair in shares.items())), Goal())
    assert lines == [
        "if the network is 20 % slower: +3 %",
        "less than 1 % of a difference if T4 is 10 % slower or faster, or if A is new",
    ]


@pytest.mark.parametrize(
    ("bound", "in_use", "said"),
    [
        (9.0, 9.5, "at most 11.1 % from the best possible: no plan on these GPUs takes less than 9 s"),
        (4.0, 9.5, "it leaves out that GPUs stay idle (5.5 s of this plan)"),
    ],
)
def test_the_bound_says_how_near_or_what_is_free(bound, in_use, said):
    outcome = SearchResult("auto", [found(estimator_of(CLUSTER, MODEL), 4, 10.0)], bound=bound, bound_in_use=in_use)
    assert bound_lines(outcome, Goal())[0].endswith(said)


def test_a_kind_of_gpu_that_is_slower_counts_where_it_is_used():
    estimator = estimator_of(MIXED, HALF)
    candidate = Candidate((Stage(12, (Group(0, 1, 2),)),), 1, "full")
    fast = Found(candidate, estimator.estimate(candidate), 10.0, confirmed=True)
    outcome = SearchResult("auto", [fast])
    prefer_steady(estimator, Goal(), outcome)
    by_name = {shift.condition: shift.share for shift in outcome.shifts}
    assert not any("V100-16" in condition for condition in by_name)
    assert 0.05 < by_name["A100-40 is 10 % slower"] < 0.12 and by_name["A100-40 is 10 % faster"] < -0.03


def test_a_plan_is_as_it_was_without_robust():
    estimator = estimator_of(CLUSTER, MODEL)
    outcome = search("auto", estimator, Goal(max_gpus=2), robust=False)
    assert not outcome.shifts and not outcome.steadier_than_s
    assert search("auto", estimator, Goal(max_gpus=2)).shifts


# Layers for multi-token prediction in the cost model: whole sequences, slices and a parameter window.


@pytest.mark.parametrize("tied", [False, True])
def test_later_tokens_are_priced_on_the_last_stage(tied):
    """As a layer more there at least, the output layer again, and a second table where there is none yet."""
    sizes = {"num_layers": 8, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32}
    more = {"vocab_size": 32000, "seq_length": 4096, "global_batch_size": 16, "tied_embeddings": tied}
    cluster = cluster_of(("A100-80", 2, 1, 25e9))

    def priced(later, layers=4):
        model = Model(**sizes, **more, mtp_num_layers=later)
        estimator = estimator_of(cluster, model, memory_margin=99)
        candidate = Candidate((Stage(8 - layers, (Group(0, 1, 1),)), Stage(layers, (Group(0, 1, 1),))), 1)
        return estimator.estimate(candidate)

    plain, deeper, later = priced(0), priced(0, 5), priced(1)
    assert later.stage_busy_s[0] == plain.stage_busy_s[0] and later.memory[0] == plain.memory[0]
    layer_s = deeper.stage_busy_s[1] - plain.stage_busy_s[1]
    assert layer_s < later.stage_busy_s[1] - plain.stage_busy_s[1] < 3 * layer_s
    table = 0 if tied else 32000 * 4096
    layer = 4096 * 4096 * 4 + 3 * 4096 * 11008 + 2 * 4096
    weights = layer + 2 * 4096**2 + 3 * 4096 + table
    assert later.memory[1].parameter_bytes - plain.memory[1].parameter_bytes == pytest.approx(2 * weights, rel=0.01)
    assert later.memory[1].activation_bytes > deeper.memory[1].activation_bytes > plain.memory[1].activation_bytes


@pytest.mark.parametrize(
    ("width", "more", "held"),
    [
        (1, {"schedule": "slimpipe", "slices": 4}, "total_bytes"),
        (2, {"schedule": "ministage", "chunks": 2, "zero_stage": 1}, "parameter_bytes"),
    ],
    ids=["slices", "window"],
)
def test_later_tokens_in_slices_or_under_a_window_are_priced(width, more, held):
    """The last stage has more to do and to hold, as with whole sequences, and the plan is one that runs."""
    cluster = cluster_of(("A100-80", 2, width, 25e9))
    shape = {"layers": 8, "hidden": 4096, "ffn": 11008, "heads": 32, "tokens": 8192, "batch": 16}
    stage = Stage(4, (Group(0, 1, width),))
    candidate = Candidate((stage, stage), 1, **more)
    found = []
    for later in (0, 1):
        model = model_of(**shape, distributed_optimizer=True, mtp_num_layers=later)
        estimator = estimator_of(cluster, model, memory_margin=99)
        assert SCHEDULES[more["schedule"]].runs(estimator, candidate)
        estimate = estimator.estimate(candidate)
        plan = build_plan(estimator, candidate, estimate)
        check_plan_alone(plan)
        seconds = simulate_candidate(estimator, candidate, estimate, plan).iteration_s
        found.append((seconds, [getattr(memory, held) for memory in estimate.memory]))
    (plain_s, plain), (later_s, later) = found
    assert later_s > 1.1 * plain_s and later[0] == plain[0] and later[1] > 1.1 * plain[1]


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_it_is_that_of_scipy(count: int):
    rng = random.Random(count)
    for kind in range(60):
        xs = sorted(rng.sample(range(1, 200), count))
        ys = [rng.choice((0.0, 1.0, rng.uniform(-2, 2))) for _ in xs]
        ys = sorted(ys) if kind % 3 else ys
        whole = PchipInterpolator(xs, ys)
        for x in [*xs, *(rng.uniform(xs[0], xs[-1]) for _ in range(12))]:
            assert interpolated(xs, ys, x) == pytest.approx(float(whole(x)), rel=1e-12, abs=1e-12)


def test_it_does_not_overshoot():
    """Where measured times rise, all between them rises."""
    xs, ys = [1, 2, 4, 8], [1.0, 1.01, 5.0, 5.02]
    found = [interpolated(xs, ys, 1 + 7 * i / 100) for i in range(101)]
    assert found == sorted(found) and found[0] == 1.0 and found[-1] == pytest.approx(5.02)


@pytest.mark.parametrize(("longer", "chosen"), [(1.008, 0), (1.012, 2)])
def test_kinds_do_not_take_turns_for_nothing(longer: float, chosen: int) -> None:
    nodes = tuple(NodeGroup(gpu=gpu, count=1, gpus_per_node=2) for gpu in ("A100-40", "A100-80"))
    estimator = estimator_of(Cluster(nodes=nodes), MODEL)
    plans = []
    for pools, seconds in (((0, 1, 0, 1), 10.0), ((0, 0, 1, 1), 10.0 * longer)):
        candidate = Candidate(tuple(Stage(3, (Group(pool, 1, 1),)) for pool in pools), 1, "full")
        plans.append(Found(candidate, estimator.estimate(candidate), seconds, confirmed=True))
    outcome = SearchResult("auto", plans)
    prefer_plain(estimator, Goal(), outcome)
    assert irregularity(estimator, outcome.best.candidate) == (0, 0, 0, chosen)
    assert (outcome.passed_over is not None) == (chosen == 0)
    if outcome.passed_over is not None:
        assert "a plan of 10 s (0.8 % shorter) was passed over" in bound_lines(outcome, Goal())[-1]
        slower = SearchResult("auto", [replace(outcome.best, simulated_s=8.0)], passed_over=outcome.passed_over)
        assert "a cheaper plan of 10 s (25.0 % longer) was passed over" in bound_lines(slower, Goal("cost"))[-1]


def test_figures_of_slices_are_less_certain() -> None:
    estimator = estimator_of(Cluster(nodes=(NodeGroup(gpu="H200", count=1, gpus_per_node=2),)), MODEL)
    plain = Candidate((Stage(12, (Group(0, 1, 2),)),), 1, "full")
    assert estimator.uncertainty(plain) == DENSE and estimator.uncertainty(plain.with_(slices=4)) == SLICED
