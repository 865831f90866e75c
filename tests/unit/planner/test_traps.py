"""From one command to the next: another model's plan, outputs onto inputs, jobs that cannot start, odd answers."""

import json
from types import SimpleNamespace

import pytest
import yaml

from tools.planner.__main__ import main
from tools.planner.cli.inventory import catalog_name
from tools.planner.emit.checks import check_told_apart, extra_flags, to_fill_in
from tools.planner.emit.nodes import NodeKind
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import cluster_from_document

MODEL = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000,
         "seq_length": 256, "global_batch_size": 8, "precision": "bf16", "flags": {"rotary-base": 500000}}  # fmt: skip
CLUSTER = {"nodes": [{"gpu": "A100-80", "count": 1, "gpus_per_node": 2}]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(MODEL))
    options = common(tmp_path)
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
    for words in (["check"], ["emit", "--out", str(folder / "run")]):
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
    assert main([*turns[:-2]]) == 2 and "--step-batch-size-schedule" in capsys.readouterr().err


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
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({**MODEL, "flags": flags}))
    assert main(["plan", *common(tmp_path), "--out", str(tmp_path / "p.json")]) == 2
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
    kinds = {"A100-80": NodeKind(8, gres="gpu", partition="p"), "V100-16": NodeKind(4, gres="gpu", partition="p")}
    with pytest.raises(PlannerError, match="the other's nodes"):
        check_told_apart(kinds)
    kinds["V100-16"] = NodeKind(4, gres="gpu:v100", partition="p")
    assert check_told_apart(kinds) == []
    assert check_told_apart({"a": NodeKind(8, gres="gpu"), "b": NodeKind(8, gres="gpu")})  # no Slurm: told only


@pytest.mark.parametrize(("text", "name"), [("teslav100s-32gb", "V100-32"), ("teslat4", "T4"), ("gt430", None)])
def test_odd_names_of_gpus(text, name):
    found = catalog_name(text)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(("variable", "value"), [("RANK", "abc"), ("WORLD_SIZE", "-1"), ("RANK", "9" * 5000)])
def test_a_rank_of_the_doctor_is_a_number(monkeypatch, capsys, variable, value):
    from megatron_het.doctor.__main__ import main as doctor

    for name, given in {"RANK": "0", "WORLD_SIZE": "1", variable: value}.items():
        monkeypatch.setenv(name, given)
    assert doctor(["--plan", "p.json"]) == 2
    assert f"{variable} = " in capsys.readouterr().err


def test_a_kind_of_operation_that_is_not_known():
    from tools.planner.replan.measured import _check

    plan = SimpleNamespace(stages=())
    device = SimpleNamespace(operations={"DANCE": None})
    watched = SimpleNamespace(plan_hash="x", devices=[device])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PlannerError, match="unknown operation"):
        patch.setattr("tools.planner.replan.measured.identity", lambda _: "x")
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
    from megatron_het.arguments.megatron_args import check_device_kind
    from megatron_het.plan import PlanError

    replicas = [SimpleNamespace(ranks=(i,), device=kind) for i, kind in enumerate(("A100-80", "V100-16", "mine"))]
    plan = SimpleNamespace(stages=[SimpleNamespace(replicas=replicas)])
    try:
        check_device_kind(plan, rank, name)
    except PlanError as error:
        assert wrong and "processes are on other nodes" in str(error)
    else:
        assert not wrong
