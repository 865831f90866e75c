"""The command line, in this process: what is written, printed and refused."""

import ast
import json
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from megatron_het.doctor.__main__ import main as het_doctor
from megatron_het.elastic.__main__ import main as het_run
from testing.planner_cases import with_catalog
from tests.unit.planner.emit_plans import MIDDLE
from tools.planner.__main__ import _OPTIONS, main
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.report.analysis import differences
from tools.planner.report.tables import NOTATION, describe, say, shown_progress, summary

CLUSTER = {
    "nodes": [
        {"gpu": "A100-40", "count": 1, "gpus_per_node": 2, "zone": "lab-a", "usd_per_gpu_hour": 3.0},
        {"gpu": "RTX-3090", "count": 1, "gpus_per_node": 4, "zone": "lab-a", "usd_per_gpu_hour": 0.4},
    ]
}
MODEL = {**MIDDLE, "micro_batch_sizes": [1, 2]}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(MODEL))
    return tmp_path


def call(capsys, *words):
    code = main([str(w) for w in words])
    return code, capsys.readouterr()


def common(folder):
    return ["--cluster", folder / "c.yaml", "--model", folder / "m.yaml", "--json"]


def test_modules_that_are_named_in_strings_have_what_is_asked_of_them():
    """``het-doctor --cluster`` asked for a module that had been renamed."""
    root = Path(__file__).parents[3]
    pattern = re.compile(r'planner\("([a-z_]+\.[a-z_]+)"(?:, "(\w+)"|\)\.(\w+))?')
    sources = (root / "megatron_het").rglob("*.py")
    asked = {match.groups() for source in sources for match in pattern.finditer(source.read_text())}
    for run, parts, _ in _OPTIONS.values():
        asked |= {(part, "add_arguments") for part in parts if isinstance(part, str)}
        asked |= {tuple(run.rsplit(".", 1))} if isinstance(run, str) else set()
    assert len(asked) > 20
    for module, *names in asked:
        tree = ast.parse((root / "tools/planner" / (module.replace(".", "/") + ".py")).read_text())
        known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name for name in names if name} <= known, module


def test_plan_check_simulate(files, capsys):
    code, out = call(capsys, "plan", *common(files), "--out", files / "p.json", "--schedules", "1f1b")
    body = json.loads(out.out)
    assert code == 0 and body["search"]["exact"] and 0 < body["search"]["bound"] <= body["iteration_s"]
    assert body["search"]["gap_to_bound"] == pytest.approx(body["iteration_s"] / body["search"]["bound"] - 1)
    code, out = call(capsys, "check", files / "p.json", *common(files))
    assert code == 0 and json.loads(out.out)["valid"]
    drawn = ["--trace", files / "t.json", "--picture", files / "t.txt"]
    code, out = call(capsys, "simulate", files / "p.json", *common(files), *drawn)
    assert code == 0 and json.loads(out.out)["iteration_s"] == pytest.approx(body["iteration_s"], rel=0.02)
    assert json.loads((files / "t.json").read_text())
    assert sorted(p.name for p in files.iterdir()) == ["c.yaml", "m.yaml", "p.json", "t.json", "t.txt"]
    code, out = call(capsys, "check", files / "p.json", *common(files), "--memory-margin", "0.0001")
    problems = {p["key"]: p["problem"] for p in json.loads(out.out)["problems"]}
    assert code == 1 and " GiB of 0.00 GiB usable on " in problems["stages[0]"]  # not of the whole memory


def test_explain_and_compare(files, capsys):
    code, out = call(capsys, "explain", *common(files), "--schedules", "1f1b")
    body = json.loads(out.out)
    assert code == 0 and body["binding"] and len(body["one_more_node"]) == 2
    assert all(row["change"] <= 1e-9 for row in body["one_more_node"])
    code, out = call(capsys, "compare", *common(files), "--schedules", "1f1b")
    assert code == 0 and min(r["ratio"] for r in json.loads(out.out)["rows"] if r["ratio"]) == 1.0


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--max-usd-per-iteration", "1e-9"], "--max-usd-per-iteration"),
        (["--min-iterations-per-s", "1e9"], "--min-iterations-per-s"),
        (["--schedules", "waltz"], "--schedules"),
        (["--schedules", "ministage"], "--schedules"),  # without a distributed optimizer
        (["--memory-margin", "2"], "--memory-margin"),
        (["--robust", "--search", "poplar"], "--robust"),
        (["--profile", "nowhere.json"], "(file)"),
        (["--memory-margin", "0.02"], "num_layers"),
        (["--memory-margin", "0.02", "--max-gpus", "2"], "num_layers"),
    ],
)
def test_what_nothing_meets_is_refused_and_nothing_is_written(files, capsys, options, key):
    few = [] if "--schedules" in options else ["--schedules", "1f1b"]
    code, out = call(capsys, "plan", *common(files), "--out", files / "p.json", *few, *options)
    error = json.loads(out.out)["error"]
    assert code == 2 and error["key"] == key
    assert ("nothing fits within --max-gpus 2: at best" in error["problem"]) == ("--max-gpus" in options)
    assert not (files / "p.json").exists()


def test_a_wrong_command_line_takes_one_line(files, capsys):
    for words, said in (
        (["plan"], "required: --cluster, --model"),
        (["het-run", "--contoller", "x"], "--contoller is no option of this command, --controller is"),
        (["het-run", "--copy-every", "x"], "--copy-every: 'x': auto or a whole number"),
        (["het-doctor", "--chekpoints", "x"], "--chekpoints is no option of this command, --checkpoints is"),
        (["plan", "--clster", "c.yaml"], "--clster is no option of this command, --cluster is"),
        (["dry-run", "p.json", "--cluster=c.yaml"], "dry-run --help"),
        (["rent", "--no-robust"], "--no-robust is no option"),  # its search of pools takes no notice of it
        (["dry-run", "p.json", "--limit-s", "0"], "--limit-s: '0': a number from 1"),
        (["plan", "--cluster", "c", "--model", "m", "--profile", ""], "nothing is given after --profile"),
        (["plan", "--cluster=c", "--model=m", "--profile="], "nothing is given after --profile"),
        (["plan", "--max-usd-per-iteration", "-1"], "--max-usd-per-iteration: '-1': a number from 0"),
    ):
        with pytest.raises(SystemExit) as ended:
            {"het-run": het_run, "het-doctor": het_doctor}.get(words[0], main)(words[words[0].startswith("het-") :])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and said in error and error.count("\n") == 1
    assert het_run(["statsu"]) == 2 and "'statsu' is no command; status, leave" in capsys.readouterr().err


def test_files_and_machines_that_change_places_are_named(files, capsys, monkeypatch):
    for words in (["--cluster", files / "m.yaml"], ["--model", files / "c.yaml"], ["--profile", files / "c.yaml"]):
        code, out = call(capsys, "plan", *common(files), *words)
        assert code == 2 and any(word in out.out for word in ("of a model file", "of a cluster file", "Is it YAML"))
    monkeypatch.setattr("tools.planner.profile.settings.device_kind", lambda: "CPU")
    words = ["--model", files / "m.yaml", "--kind", "A100-40", "--out", files / "profile.json"]
    assert main(["profile", *map(str, words)]) == 2 and "sees no GPU here" in capsys.readouterr().err


def test_costs_need_prices(files, capsys):
    (files / "c.yaml").write_text(yaml.safe_dump({"nodes": [{"gpu": "RTX-3090", "count": 1, "gpus_per_node": 4}]}))
    code, out = call(capsys, "plan", *common(files), "--objective", "cost", "--out", files / "p.json")
    assert code == 2 and json.loads(out.out)["error"]["key"] == "nodes[0].usd_per_gpu_hour"


def test_help_imports_nothing_heavy():
    """What makes ``--help`` slow must not be imported by it."""
    code = (
        "import sys; from tools.planner.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('pydantic', 'scipy', 'networkx', 'rich', 'torch', 'yaml') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    ("command", "options", "key"),
    [
        ("plan", ["--out", "{}"], "--out"),
        ("plan", ["--out", "{}/c.yaml/p.json"], "--out"),
        ("simulate", ["--picture", "{}/p.bmp"], "--picture"),
        ("simulate", ["--trace", "{}"], "--trace"),
    ],
)
def test_places_that_cannot_be_written_are_refused_first(files, capsys, command, options, key):
    words = [option.format(files) for option in options]
    code, out = call(capsys, command, *(["plan.json"] if command == "simulate" else []), *common(files), *words)
    assert code == 2 and json.loads(out.out)["error"]["key"] == key
    assert sorted(p.name for p in files.iterdir()) == ["c.yaml", "m.yaml"]


def test_poplar_shards_parameters_as_ministages_or_says_why_not(files, capsys):
    """Too large for one GPU without sharding: the window where ministages are allowed, else a refusal."""
    sizes = {"num_layers": 24, "hidden_size": 3072, "ffn_hidden_size": 12288, "num_attention_heads": 16}
    large = {**MODEL, **sizes, "distributed_optimizer": True, "micro_batch_sizes": [1]}
    (files / "m.yaml").write_text(yaml.safe_dump(large))
    words = [*common(files), "--search", "poplar", "--out", files / "p.json"]
    code, out = call(capsys, "plan", *words)
    assert code == 0 and json.loads(out.out)["schedule"] == "ministage"
    assert call(capsys, "check", files / "p.json", *common(files))[0] == 0
    (files / "p.json").unlink()
    code, out = call(capsys, "plan", *words, "--schedules", "1f1b")
    assert code == 2 and "ministages" in json.loads(out.out)["error"]["problem"]
    assert not (files / "p.json").exists()


def hand_made(folder, schedule="1f1b", parameters=None, shares=(1.0, 1.0), chunks=1, distributed=False, tp=1, **plan):
    """A plan of one stage on two A100s (replicas) and a second one on RTX 3090s."""
    layers = [6 // 2 // chunks] * chunks
    first = [
        {"ranks": [q], "microbatches": list(range(q, 16, 2)), "device": "A100-40", "speed": 1.0, "state_share": share}
        for q, share in enumerate(shares)
    ]
    second = [{"ranks": list(range(2, 2 + tp)), "microbatches": list(range(16)), "device": "RTX-3090", "speed": 1.0}]
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "seq_length")
    training = {"micro_batch_size": 1, "global_batch_size": 16, "precision": "bf16"}
    body = {
        "format": "megatron_het.plan",
        "version": 1,
        "model": dict(zip(sizes, (6, 512, 8, 8, 512), strict=True)),
        "training": {**training, "distributed_optimizer": distributed},
        "stages": [{"layers": layers, "replicas": first}, {"layers": layers, "replicas": second}],
        "schedule": {"name": schedule, "parameters": parameters or {}},
        **plan,
    }
    (folder / "p.json").write_text(json.dumps(body))
    return folder / "p.json"


@pytest.mark.parametrize(
    ("made", "key"),
    [
        ({"shares": (2.0, 1.0)}, "stages[0].replicas[*].state_share"),
        ({"schedule": "ministage", "chunks": 3, "parameters": {"window": True}}, "training.distributed_optimizer"),
        ({"schedule": "slimpipe", "parameters": {"slices": 1}}, "--het-slices"),
        ({"parameters": {"zero_stage": 3}}, "schedule.parameters.zero_stage"),
        ({"parameters": {"slack": None}}, "schedule.parameters.slack"),
        ({"schedule": "zb-v"}, "stages[*].layers"),
        ({"schedule": "slimpipe", "parameters": {"slices": 0}}, "--het-slices"),
        ({"parameters": {"slack": "much"}}, "schedule.parameters.slack"),
        ({"schedule": "interleaved", "chunks": 3, "parameters": {"group": "all"}}, "schedule.parameters.group"),
    ],
)
def test_check_and_emit_refuse_what_the_runtime_refuses(files, capsys, made, key):
    path = hand_made(files, **made)
    code, out = call(capsys, "check", path, *common(files))
    body = json.loads(out.out)
    assert code == 1 and not body["valid"] and [p["key"] for p in body["problems"]] == [key]
    for command in (["emit", path, "--out", files / "run"], ["simulate", path]):
        code, out = call(capsys, *command, *common(files))
        assert code == 2 and json.loads(out.out)["error"]["key"] == key, command
    assert not (files / "run").exists()


@pytest.mark.parametrize("given", [(), ("--sft",), ("--reset-attention-mask",)], ids=str)
def test_emit_says_that_documents_do_not_see_each_other(files, capsys, given):
    """Where they are priced so; unless the user says what a document is."""
    path, run = hand_made(files), files / "run"
    flag = "--dataloader-inter-document-masking"
    for more in ((), ("--document-lengths", "9")):
        extra = ("--extra=" + " ".join(given),) if given else ()
        code, out = call(capsys, "emit", path, *common(files), *more, *extra, "--out", run)
        assert code == 0, out
        assert (flag in (run / "args.sh").read_text()) == (bool(more) and not given)


def test_check_says_what_only_the_schedule_knows(files, capsys):
    """Two chunks of which 1F1B has one; the same plan is fine for a schedule that has several."""
    code, out = call(capsys, "check", hand_made(files, chunks=3), *common(files))
    (problem,) = json.loads(out.out)["problems"]
    assert code == 1 and problem["key"] == "schedule.name" and "chunk" in problem["problem"]
    plan = hand_made(files, chunks=3, schedule="ministage", parameters={"window": True}, distributed=True)
    code, out = call(capsys, "check", plan, *common(files))
    assert code == 0, out


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_gpus_without_transformer_engine_that_stay_idle_cost_nothing(files, capsys, objective):
    """All ranks of a plan with a T4 run slower layers; a plan without it need not."""
    values, (newer, older) = [], CLUSTER["nodes"]
    for more in ([], [{**older, "gpu": "T4", "gpus_per_node": 2}]):
        (files / "c.yaml").write_text(yaml.safe_dump({"nodes": [{**newer, "gpus_per_node": 4}, *more]}))
        words = [*common(files), "--precision", "fp16", "--seq-length", "4096"]
        code, out = call(capsys, "plan", *words, "--out", files / "p.json", "--objective", objective, "--force")
        body = json.loads(out.out)
        values.append(body["iteration_s" if objective == "throughput" else "usd_per_iteration"])
        assert code == 0 and body["iteration_s"] >= body["search"]["bound"] * (objective == "throughput")
        code, out = call(capsys, "simulate", files / "p.json", *words)
        priced = json.loads(out.out)
        assert code == 0 and priced["iteration_s"] == pytest.approx(body["iteration_s"])
        assert priced["stages"] == body["stages"]
    assert values[1] <= values[0] * (1 + 1e-9)


def test_chunks_without_layers_are_priced(files, capsys):
    """A stage of one layer beside one of five, both in two chunks."""
    body = json.loads(hand_made(files, schedule="interleaved").read_text())
    for stage, layers in zip(body["stages"], ([1, 0], [2, 3])):
        stage["layers"] = layers
    (files / "p.json").write_text(json.dumps(body))
    for command in ("check", "simulate"):
        assert call(capsys, command, files / "p.json", *common(files))[0] == 0


def test_tp_groups_go_where_they_fit(files, capsys):
    """Two kinds of node with one kind of GPU: the TP group of four is not on the nodes of two."""
    nodes = [{"gpu": "RTX-3090", "count": 1, "gpus_per_node": n, "zone": "lab-a"} for n in (2, 4)]
    (files / "c.yaml").write_text(yaml.safe_dump({"nodes": [CLUSTER["nodes"][0], *nodes]}))
    path = hand_made(files, tp=4)
    for command in ("check", "simulate"):
        assert call(capsys, command, path, *common(files))[0] == 0
    (files / "c.yaml").write_text(yaml.safe_dump({"nodes": [CLUSTER["nodes"][0], *nodes[:1]]}))
    code, out = call(capsys, "check", path, *common(files))
    (problem,) = json.loads(out.out)["problems"]
    assert code == 1 and "TP group of 4 does not fit a node with 2" in problem["problem"]


def test_replicas_are_simulated_as_what_they_are(files, capsys):
    """The order in which a stage lists its replicas changes nothing: not who is fast, not who has more work."""
    seconds = []
    for order in ((0, 1), (1, 0)):
        path = hand_made(files)
        body = json.loads(path.read_text())
        kinds = (("A100-40", list(range(12))), ("RTX-3090", list(range(12, 16))))
        replicas = [
            {"ranks": [rank], "microbatches": kinds[i][1], "device": kinds[i][0], "speed": 1.0}
            for rank, i in enumerate(order)
        ]
        path.write_text(json.dumps({**body, "stages": [{"layers": [6], "replicas": replicas}]}))
        code, out = call(capsys, "simulate", path, *common(files))
        assert code == 0
        seconds.append(json.loads(out.out)["iteration_s"])
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)


@pytest.mark.parametrize("schedule", ["zb-v", "v-half"])
def test_a_plan_in_a_v_is_priced_with_both_ends_on_its_first_stage(files, capsys, schedule):
    """Embedding and output layer are on stage 0 of a V, and layers need not be even."""
    found = {}
    for name, layers in ((schedule, [1, 2]), ("interleaved", [2, 1])):
        path = hand_made(files, schedule=name, chunks=len(layers))
        body = json.loads(path.read_text())
        for stage in body["stages"]:
            stage["layers"] = layers
        path.write_text(json.dumps(body))
        code, out = call(capsys, "check", path, *common(files))
        assert code == 0 and json.loads(out.out)["valid"]
        code, out = call(capsys, "simulate", path, *common(files))
        figures = json.loads(out.out)
        assert code == 0 and figures["simulated_s"] > 0 and figures["schedule"] == name
        found[name] = [stage["memory_bytes"]["parameters"] for stage in figures["stages"]]
    head = MODEL["vocab_size"] * MODEL["hidden_size"] * 2
    (first, last), (plain_first, plain_last) = found[schedule], found["interleaved"]
    assert first - plain_first == pytest.approx(plain_last - last) == pytest.approx(head, rel=0.01)


def test_precision_of_the_command_line(files, capsys):
    """A bf16 model on GPUs that have none: no file has to be edited."""
    old = {"nodes": [{"gpu": g, "count": 1, "gpus_per_node": 2} for g in ("V100-32", "A100-40")]}
    (files / "c.yaml").write_text(yaml.safe_dump(old))
    plan = files / "p.json"
    code, out = call(capsys, "plan", *common(files), "--out", plan, "--schedules", "1f1b")
    assert code == 2 and "--precision" in json.loads(out.out)["error"]["hint"]
    half = ("--precision", "fp16")
    code, out = call(capsys, "plan", *common(files), *half, "--out", plan, "--schedules", "1f1b")
    assert code == 0 and json.loads(plan.read_text())["training"]["precision"] == "fp16"
    assert json.loads(out.out)["runtime"] == "megatron_het without Transformer Engine"
    assert call(capsys, "check", plan, *common(files))[0] == 2
    assert call(capsys, "check", plan, *common(files), *half)[0] == 0
    code, out = call(capsys, "emit", plan, *common(files), "--out", files / "run")
    assert code == 2 and json.loads(out.out)["error"]["hint"].startswith("Give --precision fp16")
    code, out = call(capsys, "emit", plan, *common(files), *half, "--out", files / "run")
    assert code == 0
    text = (files / "run" / "args.sh").read_text()
    assert "--fp16" in text and "--transformer-impl local" in text
    assert any("cu126" in note for note in json.loads(out.out)["notes"])


def test_what_a_plan_prints(files, capsys):
    """Prices nobody gave, GPUs that stay idle, and times that are shares of the iteration."""
    cluster = {"nodes": [{k: v for k, v in node.items() if k != "usd_per_gpu_hour"} for node in CLUSTER["nodes"]]}
    (files / "c.yaml").write_text(yaml.safe_dump(cluster))
    words = common(files)[:-1]
    code, out = call(capsys, "plan", *words, "--out", files / "p.json", "--schedules", "1f1b", "--max-gpus", "2")
    assert code == 0
    text = " ".join(out.out.split())
    assert "prices of the catalog, not yours: USD per GPU hour A100-40 3.673; give usd_per_gpu_hour" in text
    assert "idle GPUs: 4 RTX-3090" in text and "(lab-a)" not in text
    assert "bubble" not in text and "busy s" not in text and "sequence_parallel" not in text
    assert all(len(line) <= 80 for line in out.out.splitlines() if set(line) <= {"─", " "})  # of tables
    code, out = call(capsys, "simulate", files / "p.json", *common(files))
    body = json.loads(out.out)
    assert body["catalog_prices"] == {"A100-40": 3.673} and body["idle_gpus"] == {"RTX-3090": 4}
    assert body["bubble_fraction"] >= 0 and "bubble" not in body["by_cause_s"]
    assert body["uncertainty_of"]["runs"] > 10
    planned = json.loads((files / "p.json").read_text())["predicted"]
    assert planned["bubble_fraction"] == pytest.approx(body["bubble_fraction"], abs=0.02)  # one quantity, one name
    (files / "m.yaml").write_text(yaml.safe_dump(MODEL | {"recompute": ["full"]}))
    code, out = call(capsys, "plan", *words, "--out", files / "q.json", "--schedules", "1f1b", "--no-verify")
    assert code == 0 and "sequence_parallel is false in the model: with true, " in out.out


def test_what_a_comparison_prints(files, capsys):
    """A price that is not known is not 0, and why there is no plan stands where the plan would."""
    code, out = call(capsys, "compare", *common(files)[:-1], "--schedules", "1f1b,ministage", "--max-gpus", "4")
    assert code == 0 and "unknown" not in out.out
    (row,) = (line for line in out.out.splitlines() if "schedule ministage only" in line)
    number = row.split(":")[0]
    assert f"\n{number}: no plan: it needs distributed_optimizer: true in the model file\n" in out.out
    assert out.out.count(NOTATION) == 1
    cluster = {"nodes": [{**CLUSTER["nodes"][0], "gpu": "H100-SXM", "usd_per_gpu_hour": None}, CLUSTER["nodes"][1]]}
    (files / "c.yaml").write_text(yaml.safe_dump(cluster))
    code, out = call(capsys, "compare", *common(files)[:-1], "--schedules", "1f1b")
    assert code == 0 and ["unknown" in line for line in out.out.splitlines() if "H100-SXM only" in line] == [True]


def test_a_kind_in_two_zones_is_named_with_its_zone():
    nodes = tuple(NodeGroup(gpu="A100-40", count=1, gpus_per_node=4, zone=zone) for zone in ("us-a", "us-b"))
    estimator = with_catalog(Cluster(nodes=nodes), Model(**MIDDLE))
    both, one = (Candidate(tuple(Stage(3, (Group(p, 1, 2),)) for p in pools), 1) for pools in ((0, 1), (0, 0)))
    assert differences(estimator, both, one) == "4 of 4 A100-40 (us-a), no A100-40 (us-b)"
    assert describe(estimator, both) == "1f1b mb1 3L 2xA100-40@us-a / 3L 2xA100-40@us-b"
    for zone, counted in (("us-b", {"A100-40 (us-a)": 2, "A100-40 (us-b)": 2}), ("us-a", {"A100-40": 4})):
        nodes = (nodes[0], nodes[1].model_copy(update={"zone": zone}))
        estimator = with_catalog(Cluster(nodes=nodes), Model(**MIDDLE))
        assert summary(estimator, both, estimator.estimate(both), None)["gpus"] == counted


def test_plans_are_on_gpus_of_one_vendor_and_others_are_priced_only(files, capsys):
    nodes = [{"gpu": gpu, "count": 1, "gpus_per_node": 2} for gpu in ("MI300X", "A10G", "H100-SXM")]
    (files / "c.yaml").write_text(yaml.safe_dump({"nodes": nodes}))
    flags = (*common(files), "--out", files / "p.json", "--schedules", "1f1b", "--no-verify")
    made = json.loads(call(capsys, "plan", *flags)[1].out)
    ((other, alone_s),) = made["search"]["other_vendors"].items()
    assert other == "MI300X" and made["idle_gpus"] == {"MI300X": 2} and made["iteration_s"] < alone_s
    assert not made["model_notes"]
    assert call(capsys, "check", files / "p.json", *common(files))[0] == 0
    mixed = json.loads(call(capsys, "plan", *flags, "--mix-vendors")[1].out)
    assert mixed["iteration_s"] < made["iteration_s"] and not mixed["search"]["other_vendors"]
    assert "priced only: " in mixed["model_notes"][-1] and call(capsys, "check", files / "p.json", *common(files))[0]


def test_equal_stages_in_a_row_are_written_once():
    estimator = with_catalog(Cluster(nodes=(NodeGroup(gpu="A100-40", count=2, gpus_per_node=4),)), Model(**MIDDLE))
    stages = (Stage(1, (Group(0, 1, 1),)), *[Stage(2, (Group(0, 2, 1),))] * 2)
    plan = Candidate(stages, 4, schedule="slimpipe", slices=8)
    assert describe(estimator, plan) == "slimpipe n8 mb4 1L 1xA100-40 / 2L 1xA100-40.tp2 (2 times)"
    assert " recompute full offload " in describe(estimator, plan.with_(recompute="full", offload=True))


def test_progress_is_said_where_nobody_sees_a_line_move(capsys):
    with shown_progress(lambda: "searching, best 1.5", Namespace(json=True), every_s=0.01):
        deadline = time.monotonic() + 20
        while "searching" not in (said := capsys.readouterr()).err and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said.err.endswith(" s: searching, best 1.5\n") and not said.out


def test_lines_are_not_wrapped(capsys):
    say({}, Namespace(json=False), line := "stock Megatron can run this plan: " + "--flag value " * 20)
    assert capsys.readouterr().out == line + "\n"
