"""From one command to the next: another model's plan, outputs onto inputs, jobs that cannot start, odd answers."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from benchmarks.published.accuracy import reference_nodes
from megatron_het.arguments.megatron_args import check_device_kind
from megatron_het.doctor.__main__ import main as doctor
from megatron_het.features import options_of
from megatron_het.features.activation_offload.spec import offload_ratio
from megatron_het.plan import PlanError, Replica
from testing.planner_cases import estimator_of, model_of, write_inputs
from tests.unit.plan.feature_checks import check_feature
from tests.unit.planner.emit_plans import nodes_of
from tools.planner.__main__ import main
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, GroupMemory, Stage, rank_parameters
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.schedules.ministage import at_peak, shares_by_memory
from tools.planner.costs.simulation import simulate_candidate, with_costs
from tools.planner.emit.options import check_told_apart, extra_flags, to_fill_in
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, cluster_from_document
from tools.planner.replay.measured import _check
from tools.planner.search.balance import balance

MODEL = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000,
         "seq_length": 256, "global_batch_size": 8, "precision": "bf16", "flags": {"rotary-base": 500000}}  # fmt: skip
CLUSTER = {"nodes": [{"gpu": "A100-80", "count": 1, "gpus_per_node": 2}]}


@pytest.fixture
def folder(tmp_path):
    options = write_inputs(tmp_path, CLUSTER, MODEL)
    assert main(["plan", *options, "--schedules", "1f1b", "--limit-s", "1", "--out", str(tmp_path / "p.json")]) == 0
    return tmp_path


def common(folder, model="m.yaml"):
    return ["--cluster", str(folder / "c.yaml"), "--model", str(folder / model)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ffn_hidden_size", 1024),
        ("vocab_size", 2000),
        ("tied_embeddings", True),
        ("precision", "fp16"),
        ("head_size", 64),
    ],
)
def test_the_plan_of_another_model_is_refused(folder, capsys, key, value):
    (folder / "other.yaml").write_text(yaml.safe_dump({**MODEL, key: value}))
    for words in (["check"], ["simulate"], ["emit", "--out", str(folder / "run")]):
        assert main([words[0], str(folder / "p.json"), *common(folder, "other.yaml"), *words[1:]]) == 2
        assert f"model.{key}" in (said := capsys.readouterr().err) or f"training.{key}" in said
    assert not (folder / "run").exists()


def test_no_output_replaces_an_input_or_a_file_of_another_kind(folder, capsys):
    plan, cluster = folder / "p.json", folder / "c.yaml"
    (folder / "notes.json").write_text('{"mine": 1}')
    before = {path: path.read_text() for path in folder.iterdir()}
    for words in (
        ["plan", *common(folder), "--out", str(cluster)],
        ["plan", *common(folder), "--out", str(folder / "notes.json")],
        ["simulate", str(plan), *common(folder), "--trace", str(plan)],
        ["simulate", str(plan), *common(folder), "--trace", str(folder / "notes.json")],
    ):
        assert main(words) == 2
        assert "--force" in capsys.readouterr().err
    assert {path: path.read_text() for path in folder.iterdir()} == before
    trace = ["simulate", str(plan), *common(folder), "--trace", str(folder / "notes.json")]
    assert main([*trace, "--force"]) == 0 and main(trace) == 0  # what it has written it may write again


@pytest.fixture
def turns(folder):
    """Options for a batch size that changes, with a plan for each of two sizes."""
    second = str(folder / "p-16.json")
    (folder / "m.yaml").write_text(yaml.safe_dump({**MODEL, "micro_batch_sizes": [4]}))
    assert main(["plan", *common(folder), "--limit-s", "1", "--out", str(folder / "p.json")]) == 0
    larger = ["--global-batch-size", "16", "--schedules", "1f1b", "--limit-s", "1", "--out", second]
    assert main(["plan", *common(folder), *larger]) == 0
    words = ["emit", str(folder / "p.json"), *common(folder), "--out", str(folder / "run"), "--plans", second]
    return [*words, "--step-batch-size-schedule", "0:8 64K:16"]


def test_batch_sizes_that_change_pass_megatrons_parser(folder, turns, capsys, asks_megatron):
    assert main([*turns, "--train-samples", "4096", "--extra", "--mock-data --tokenizer-type NullTokenizer"]) == 0
    assert "not checked" not in capsys.readouterr().out
    run = folder / "run"
    arguments = (run / "args.sh").read_text()
    assert "--step-batch-size-schedule '0:8 64K:16'" in arguments and "--global-batch-size" not in arguments
    assert f'HET_ARGS=(--het-plan "$HET_PLAN" {run}/plan-2.json)' in arguments and "STOCK_ARGS" not in arguments
    assert (run / "plan-2.json").exists() and not (run / "layout.txt").exists()


def test_plans_that_take_turns_fit_the_nodes_of_the_first(folder, turns, capsys):
    assert main(turns) == 2 and "Give --train-samples" in capsys.readouterr().err
    larger = [*turns[:-1], "0:8 64K:16 1M:32", "--train-samples", "4096"]
    assert main(larger) == 2 and "Give a plan for each size: --plans PLAN ..." in capsys.readouterr().err
    turns += ["--train-samples", "4096"]
    plan = json.loads((folder / "p-16.json").read_text())
    (folder / "m2.yaml").write_text(yaml.safe_dump({**MODEL, "num_layers": 8}))
    other = ["plan", *common(folder, "m2.yaml"), "--global-batch-size", "16", "--limit-s", "1", "--schedules", "1f1b"]
    assert main([*other, "--out", str(folder / "p-16.json"), "--force"]) == 0 and main(turns) == 2
    assert "p-16.json: model.num_layers = 8" in capsys.readouterr().err
    plan["stages"][0]["replicas"][0]["device"] = "B200"
    (folder / "p-16.json").write_text(json.dumps(plan))
    assert main(turns) == 2
    assert "under the first plan these ranks are on A100-80, not on B200" in capsys.readouterr().err
    assert main([*turns, "--elastic"]) == 2 and "does not go with --elastic" in capsys.readouterr().err
    assert main(turns[:-4]) == 2 and "--step-batch-size-schedule" in capsys.readouterr().err


def test_samples_of_an_elastic_job(folder):
    words = ["emit", str(folder / "p.json"), *common(folder), "--out", str(folder / "run"), "--elastic"]
    assert main([*words, "--train-samples", "640"]) == 0
    assert "(($(newest) >= 80))" in (folder / "run" / "elastic.sbatch").read_text()


def test_a_job_that_cannot_start_is_not_emitted(folder, capsys, asks_megatron):
    words = ["emit", str(folder / "p.json"), *common(folder), "--out", str(folder / "run")]
    assert main([*words, "--extra", "--no-such-flag 3"]) == 2
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err and not (folder / "run").exists()


def test_samples_and_what_is_to_be_filled_in(folder, capsys):
    words = ["emit", str(folder / "p.json"), *common(folder), "--out", str(folder / "run"), "--train-samples", "640"]
    assert main([*words, "--extra", "--mock-data --pretrained-checkpoint /base"]) == 0
    arguments = (folder / "run" / "args.sh").read_text()
    assert "--train-samples 640" in arguments and "--train-iters" not in arguments
    assert "--rotary-base 500000" in arguments and "--pretrained-checkpoint /base" in arguments
    assert "still to be filled in" in capsys.readouterr().out
    assert to_fill_in(["--data-path", "x", "--tokenizer-type", "NullTokenizer"]) == []
    for words in (["--tokenizer-type", "HuggingFaceTokenizer"], ["--tokenizer-type=HuggingFaceTokenizer"]):
        assert "files of the HuggingFaceTokenizer" in to_fill_in([*words, "--mock-data"])[0]
        assert to_fill_in([*words, "--mock-data", "--tokenizer-model", "x"]) == []
        assert to_fill_in([*words, "--mock-data", "--tokenizer-model=x"]) == []


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("--load BASE --finetune", "--pretrained-checkpoint"),
        ("--finetune", "--pretrained-checkpoint"),
        ("--rotary-base 7", "flags: {rotary-base: VALUE}"),
        ("--position-embedding-type yarn", "flags: {position-embedding-type: VALUE}"),
    ],
)
def test_what_extra_cannot_say_has_another_place(text, hint):
    with pytest.raises(PlannerError, match="contradict") as error:
        extra_flags(text, {"rotary-base": 5})
    assert hint in str(error.value)
    assert extra_flags("--attention-dropout 0", {"attention-dropout": 0.1})  # of the training


@pytest.mark.parametrize("flags", [{"rotary-bse": 1}, {"num-layers": 3}, {"qk-layernorm": 1}, {"rope-type": "a b"}])
def test_flags_of_a_model_file_are_checked(tmp_path, capsys, flags):
    inputs = write_inputs(tmp_path, CLUSTER, {**MODEL, "flags": flags})
    assert main(["plan", *inputs, "--out", str(tmp_path / "p.json")]) == 2
    assert f"flags.{next(iter(flags))}" in capsys.readouterr().err


def cluster(links=(), **node):
    nodes = [{"gpu": "T4", "count": 4, "gpus_per_node": 1, "zone": "a", **node}]
    nodes.append({"gpu": "T4", "count": 1, "gpus_per_node": 1, "zone": "b"})
    links = [{"between": ["a", "b"], "bytes_per_s": rate} for rate in links]
    return cluster_from_document({"nodes": nodes, "links": links}, "c.yaml")


def test_two_links_of_one_pair_agree():
    assert cluster((1e9, 1e9)).links
    with pytest.raises(PlannerError, match=r"links\[0\] has other figures"):
        cluster((1e9, 2e9))


def test_hosts_may_be_ranges():
    assert cluster((1e9,), hosts=["node[01-03]", "x"]).nodes[0].hosts == ("node01", "node02", "node03", "x")
    for hosts in (["node[01-99999999]"], ["no_[de"], ["a b"]):
        with pytest.raises(PlannerError, match="hosts"):
            cluster((1e9,), hosts=hosts)


def test_kinds_that_slurm_cannot_tell_apart():
    kinds = {name: nodes_of(name, 8, gres="gpu", partition="p") for name in ("A100-80", "V100-16")}
    with pytest.raises(PlannerError, match="the other's nodes"):
        check_told_apart(kinds)
    kinds["V100-16"] = nodes_of("V100-16", 4, gres="gpu:v100", partition="p")
    assert check_told_apart(kinds) == []
    assert check_told_apart({name: nodes_of(name, 8, gres="gpu") for name in "ab"})  # no Slurm: told only


@pytest.mark.parametrize(("variable", "value"), [("RANK", "abc"), ("WORLD_SIZE", "-1"), ("RANK", "9" * 5000)])
def test_a_rank_of_the_doctor_is_a_number(monkeypatch, capsys, variable, value):
    for name, given in {"RANK": "0", "WORLD_SIZE": "1", variable: value}.items():
        monkeypatch.setenv(name, given)
    assert doctor(["--plan", "p.json"]) == 2
    assert f"{variable} = " in capsys.readouterr().err


def test_a_kind_of_operation_that_is_not_known():
    plan = SimpleNamespace(stages=())
    device = SimpleNamespace(operations={"DANCE": None})
    watched = SimpleNamespace(plan_hash="x", devices=[device])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PlannerError, match="unknown operation"):
        patch.setattr("tools.planner.replay.measured.identity", lambda _: "x")
        _check(watched, plan, "watch.json")


@pytest.mark.parametrize(
    ("rank", "name", "wrong"),
    [
        (0, "NVIDIA A100-SXM4-80GB", False),
        (0, "Tesla V100-SXM2-16GB", True),
        (1, "Tesla V100-SXM2-16GB", False),
        (1, "NVIDIA A100-PCIE-40GB", True),
        (1, "Quadro GV100", False),  # no word of a kind of the plan
        (2, "Tesla V100-SXM2-16GB", False),  # the plan's name says no model
    ],
)
def test_a_rank_on_a_node_of_another_kind_does_not_start(rank, name, wrong):
    replicas = [Replica((i,), (0,), device=kind) for i, kind in enumerate(("A100-80", "V100-16", "mine"))]
    plan = SimpleNamespace(stages=[SimpleNamespace(replicas=replicas)])
    try:
        check_device_kind(plan, rank, name)
    except PlanError as error:
        assert wrong and "processes are on other nodes" in str(error)
    else:
        assert not wrong


# Unequal shares of a stage's state: only where equal ones do not fit, and the same in every estimate.


BIG, SMALL = 0, 1


def estimator(layers: int = 36, margin: float = 0.95) -> Estimator:
    model = model_of(layers=layers, hidden=2048, ffn=5632, batch=32, precision="fp16", distributed_optimizer=True)
    cluster = Cluster(nodes=(reference_nodes("A100-40", 4), reference_nodes("V100-16", 4)))
    return estimator_of(cluster, model, memory_margin=margin)


def mixed(layers: int = 36, chunks: int = 1, **more: object) -> Candidate:
    """One stage of two large and two small GPUs."""
    stage = Stage(layers, (Group(BIG, 1, 2), Group(SMALL, 1, 2)))
    return Candidate((stage,), 1, "full", schedule="ministage", chunks=chunks, zero_stage=1).with_(**more)


def test_state_goes_where_memory_is_free_when_equal_shares_do_not_fit():
    e, candidate = estimator(), mixed()
    equal = e.estimate(candidate.with_(shares=((0.25, 0.25),)))
    assert not e.fits(equal)
    estimate = e.estimate(candidate)
    assert e.fits(estimate)
    big, small = estimate.memory
    assert 2 * big.state_share + 2 * small.state_share == pytest.approx(1)
    assert big.state_share > 2 * small.state_share
    # Nothing is lost.
    assert sum(m.total_bytes for m in estimate.memory) == pytest.approx(sum(m.total_bytes for m in equal.memory))


def test_if_any_division_fits_the_one_by_memory_does():
    """Two kinds of replicas that are full at different moments."""
    e, rng, tried = estimator(), random.Random(0), 0
    for _ in range(300):
        chunks, count = rng.choice((1, 2, 4, 8)), 1e9
        candidate = mixed(chunks=chunks, offload=rng.random() < 0.3)
        found = [
            GroupMemory(0, Group(pool, 1, 1), 0.0, 0.0, 0.0, rng.random() * 6e10, 0.0, 0.0, rng.uniform(0.6e10, 6e10))
            for pool in (BIG, SMALL)
        ]

        def fits(shares, found=found, candidate=candidate, count=count):
            peaks = (at_peak(e, candidate, m, count, s) for m, s in zip(found, shares, strict=True))
            return all(m.total_bytes <= 0.95 * m.capacity_bytes * (1 + 1e-9) for m in peaks)

        if any(fits((i / 50, 1 - i / 50)) for i in range(51)):
            tried += 1
            assert fits(shares_by_memory(e, candidate, found, [count, count]))
    assert tried > 30


@pytest.mark.parametrize("change", [{"chunks": 4}, {"schedule": "1f1b"}])
def test_equal_shares_where_they_fit_and_without_a_window(change):
    estimate = estimator().estimate(mixed(**change))
    assert all(m.state_share is None for m in estimate.memory)


def test_a_plan_says_who_keeps_how_much_and_is_priced_by_that():
    e, candidate = estimator(), mixed()
    estimate = e.estimate(candidate)
    plan = build_plan(e, candidate, estimate)
    shares = [r.state_share for r in plan.stages[0].replicas]
    assert shares == pytest.approx([estimate.memory[i].state_share for i in (0, 0, 1, 1)], abs=1e-4)
    assert sum(r.optimizer_bytes for r in plan.predicted.per_rank) == pytest.approx(
        sum(m.optimizer_bytes * m.group.count for m in estimate.memory)
    )
    check_feature("window", plan, SimpleNamespace(clip_grad=0.0, log_num_zeros_in_grad=False, optimizer="adam"))
    again = e.estimate(candidate_of(plan, e.cluster)[0])
    assert e.fits(again)
    for found, expected in zip(again.memory, estimate.memory, strict=True):
        assert found.total_bytes == pytest.approx(expected.total_bytes, rel=1e-3)


def test_a_plan_with_equal_shares_is_not_priced_with_better_ones():
    e, candidate = estimator(), mixed()
    plan = build_plan(e, candidate, e.estimate(candidate))
    replicas = tuple(replace(r, state_share=1.0) for r in plan.stages[0].replicas)
    equal = replace(plan, stages=(replace(plan.stages[0], replicas=replicas),))
    assert not e.fits(e.estimate(candidate_of(equal, e.cluster)[0]))


def test_what_is_priced_as_offloaded_is_offloaded():
    e, candidate = estimator(), mixed(chunks=4, offload=True)
    plan = build_plan(e, candidate, e.estimate(candidate))
    options = options_of(plan, "window")
    assert options.offload and options.offload_optimizer and offload_ratio(plan) == 1.0
    assert candidate_of(plan, e.cluster)[0].offload


def test_of_replicas_of_one_kind_the_one_that_keeps_most_counts():
    e = estimator()
    candidate = Candidate((Stage(36, (Group(BIG, 1, 4),)),), 1, "full", schedule="ministage", zero_stage=1)
    plan = build_plan(e, candidate, e.estimate(candidate))
    even = e.estimate(candidate_of(plan, e.cluster)[0]).memory[0]
    assert even.state_share is None
    replicas = tuple(replace(r, state_share=s) for r, s in zip(plan.stages[0].replicas, (5.0, 1.0, 1.0, 1.0)))
    uneven = replace(plan, stages=(replace(plan.stages[0], replicas=replicas),))
    (most,) = e.estimate(candidate_of(uneven, e.cluster)[0]).memory
    assert most.state_share == 0.625
    assert most.optimizer_bytes == pytest.approx(2.5 * even.optimizer_bytes)


def test_balancing_layers_counts_on_divided_state():
    """The mixed stage gets layers that its small GPUs could not take with an equal share."""
    e = estimator(layers=76)
    groups = ((Group(BIG, 1, 2), Group(SMALL, 1, 2)), (Group(BIG, 1, 2),))
    candidate = balance(e, groups, mixed(chunks=2))
    estimate = e.estimate(candidate)
    assert e.fits(estimate)
    assert estimate.memory[0].state_share is not None
    assert not e.fits(e.estimate(candidate.with_(shares=((0.25, 0.25), (0.5,)))))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("ministage", 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_with_more_rows_of_the_vocabulary_takes_longer_and_holds_more(schedule: str, chunks: int, tied: bool):
    e = estimator(24)
    stages = (Stage(12, (Group(BIG, 1, 1),)), Stage(12, (Group(BIG, 1, 1),)))
    candidate = Candidate(stages, 1, "full", schedule=schedule, chunks=chunks, zero_stage=1)
    made = build_plan(e, candidate, e.estimate(candidate))
    parameters = {**made.schedule.parameters, "vocabulary": True, "vocabulary_shares": [3, 1]}
    model = replace(made.model, tied_embeddings=tied)
    plan = replace(made, model=model, schedule=replace(made.schedule, parameters=parameters))
    again, seated = candidate_of(plan, e.cluster)
    (unit,) = {e.unit_of(again, stages[0].groups[0])}
    held = [rank_parameters(again, unit, s) - 12 * unit.layer_parameters for s in range(2)]
    assert held[0] == 3 * held[1]
    assert sum(held) == unit.embedding_parameters + (0 if tied else unit.head_parameters)
    predicted = with_costs(e, again, e.estimate(again), plan, seated).predicted
    first, last = predicted.costs.devices
    assert first.vocab_forward_s == pytest.approx(3 * last.vocab_forward_s, rel=1e-4) and last.vocab_forward_s > 0
    equal = replace(plan, schedule=replace(plan.schedule, parameters={**parameters, "vocabulary_shares": [1, 1]}))
    seconds = [simulate_candidate(e, again, e.estimate(again), p, seated).iteration_s for p in (equal, plan)]
    assert seconds[0] < seconds[1]  # alike devices are best with alike parts
