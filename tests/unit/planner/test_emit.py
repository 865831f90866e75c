"""Emitted flags, layouts and scripts; Megatron's own parsers judge them where they exist."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from examples.llama.job import model_of
from megatron_het.arguments.megatron_args import check_device_kind
from megatron_het.plan import Plan, PlanError, ScheduleSpec, load_plan
from testing.cases import recompute_some
from testing.feature_cases import with_expert_parallel
from tests.unit.planner.emit_plans import (
    KINDS,
    LAUNCH,
    MODEL,
    PLAIN_KINDS,
    changed,
    context_parallel_plan,
    even_plan,
    make_plan,
    nodes_of,
    uneven_plan,
)
from tools.planner.costs.build import seats
from tools.planner.costs.candidate import Group
from tools.planner.costs.candidate import Stage as Stage_
from tools.planner.emit.command import device_arguments, emit
from tools.planner.emit.flags import (
    bash_array,
    extension_reasons,
    layout_string,
    model_arguments,
    plan_arguments,
    stock_arguments,
)
from tools.planner.emit.options import node_kinds
from tools.planner.emit.scripts import LaunchOptions, het_sbatch, plain_obstacle, plain_sbatch, torchrun_script
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.packing import components, place, task_ranks


def test_layout_is_what_megatron_parses() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text = layout_string(even_plan())
    assert text == "Et*5|t*3L"
    layout = PipelineParallelLayerLayout(text, 2)
    layout.validate_layer_layout(8, 0)
    assert [row[0].count(LayerType.decoder) for row in layout.layout] == [5, 3]


def test_interleaved_layout_goes_chunk_by_chunk() -> None:
    plan = make_plan(
        ((2, 1), [((0,), (0, 1, 2, 3), "big")]), ((3, 2), [((1,), (0, 1, 2, 3), "big")]), schedule="interleaved"
    )
    assert layout_string(plan) == "Ett|t*3|t|ttL"
    assert stock_arguments(plan)[-2:] == ["--pipeline-model-parallel-layout", "Ett|t*3|t|ttL"]


def test_one_stage_gets_no_layout() -> None:
    plan = make_plan(((8,), [((0,), (0, 1), "big"), ((1,), (2, 3), "big")]))
    assert "--pipeline-model-parallel-layout" not in stock_arguments(plan)


def test_parameters_that_stock_megatron_does_not_miss() -> None:
    schedule = ScheduleSpec("1f1b", {"slack": 1.0, "vocabulary": False})
    assert not extension_reasons(replace(even_plan(), schedule=schedule))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (uneven_plan(), "tensor-parallel sizes [1, 2] differ"),
        (uneven_plan(), "replicas get"),
        (uneven_plan(), "stages have [1, 2] replicas"),
        (make_plan(((8,), [((1,), (0, 1), "big"), ((0,), (2, 3), "big")])), "not numbered in Megatron's order"),
        (make_plan(((8,), [((0,), (0, 1, 2, 3), "big")]), schedule="slimpipe"), "schedule slimpipe"),
        (context_parallel_plan(), "context-parallel size 2"),
        (with_expert_parallel(even_plan(), [[1, 1], [2, 2]]), "expert-parallel sizes [1, 2] differ"),
        (recompute_some(make_plan(((8,), [((0,), (0, 1), "big")]), recompute="full")), "recomputes some layers only"),
        (replace(even_plan(), schedule=ScheduleSpec("1f1b", {"vocabulary": True})), "its schedule sets 'vocabulary'"),
        (
            replace(even_plan(), schedule=ScheduleSpec("1f1b", {"offload_activations": 0.5})),
            "sets 'offload_activations'",
        ),
    ],
)
def test_plans_that_need_the_extension_say_why(plan: Plan, reason: str) -> None:
    assert any(reason in r for r in extension_reasons(plan))
    with pytest.raises(ValueError, match="stock Megatron cannot"):
        stock_arguments(plan)


def test_stock_megatron_divides_experts_over_the_same_ranks() -> None:
    words = " ".join(stock_arguments(with_expert_parallel(even_plan(), [[2, 2], [2, 2]])))
    assert "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1" in words
    assert "expert" not in " ".join(stock_arguments(even_plan()))


def test_flags_of_plan_and_model() -> None:
    given = {"precision": "bf16", "recompute": "full", "sequence_parallel": True, "distributed_optimizer": True}
    plan = make_plan(((8,), [((0, 1), (0, 1, 2, 3), "big")]), **given)
    words = plan_arguments(plan)
    flags = "--bf16 --sequence-parallel --use-distributed-optimizer --calculate-per-token-loss"
    assert {*flags.split(), "--dist-ckpt-optim-fully-reshardable"} <= set(words)
    assert words[words.index("--recompute-granularity") + 1] == "full"
    words = plan_arguments(make_plan(((8,), [((0,), (0, 1, 2, 3), "big")]), recompute="moe_act"))
    assert words[-4:] == ["selective", "--recompute-modules", "moe_act", "--moe-grouped-gemm"]
    words = model_arguments(plan, model_of(plan))
    assert words[words.index("--num-query-groups") + 1] == "2"
    assert "--untie-embeddings-and-output-weights" in words and "--swiglu" in words
    words = model_arguments(plan, model_of(plan, gated=False, biases=True, learned_positions=64))
    assert words[words.index("--max-position-embeddings") + 1] == "64"
    assert "--disable-bias-linear" not in words and "--fp8-format" not in words
    words = model_arguments(plan, model_of(plan, fp8=True))
    assert words[words.index("--fp8-format") + 1] == "hybrid" and words[words.index("--fp8-recipe") + 1] == "tensorwise"


def test_bash_arrays_survive_bash() -> None:
    words = ["--train-data-path", "a path/with 'quotes' and $dollars", "--swiglu"]
    script = bash_array("A", words) + 'printf "%s\\n" "${A[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == words


def test_one_kind_is_an_ordinary_job() -> None:
    plan = make_plan(((8,), [((0,), (0, 1), "big"), ((1,), (2, 3), "big")]))
    text = het_sbatch(place(plan, KINDS), KINDS, LAUNCH)
    assert "hetjob" not in text and "--het-group" not in text


def test_plain_job_and_why_there_is_none() -> None:
    nodes = place(even_plan(), KINDS)
    assert "different numbers of GPUs" in plain_obstacle(nodes, KINDS)
    with pytest.raises(ValueError, match="different numbers"):
        plain_sbatch(nodes, KINDS, LAUNCH)
    kinds = PLAIN_KINDS
    text = plain_sbatch(place(even_plan(), kinds), kinds, LAUNCH)
    assert "--constraint='[a100*1&l4*2]'" in text
    assert "--distribution=arbitrary" in text
    unnamed = {"big": nodes_of("big", 4), "small": nodes_of("small", 2)}
    assert "constraint" in plain_obstacle(place(even_plan(), unnamed), unnamed)


def run_script(script: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command, environment = ["bash", str(script)], os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def emitted(tmp_path: Path, **launch: object) -> Path:
    out = tmp_path / "a run"
    out.mkdir()
    options = LaunchOptions(run_dir=str(out), **launch)  # type: ignore[arg-type]
    result = emit(uneven_plan(), out, PLAIN_KINDS, {"TRAINING": ["--train-iters", "5"]}, options)
    names = "plan.json args.sh train.sbatch train-plain.sbatch torchrun-node-0.sh torchrun-node-1.sh"
    assert set(result.files) == set(names.split())
    assert load_plan(out / "plan.json") == uneven_plan()
    return out


@pytest.mark.parametrize(
    ("plan", "set_by_user", "value"),
    [
        (even_plan(), {}, "1"),
        (even_plan(), {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "32"),
        (make_plan(((8,), [((0,), (0, 1, 2, 3), "big")])), {}, ""),
    ],
)
def test_scripts_set_what_megatron_insists_on_with_tp(
    plan: Plan, set_by_user: dict[str, str], value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    result = emit(plan, tmp_path, KINDS, {}, LaunchOptions(run_dir=str(tmp_path)))
    scripts = [path for name, path in result.files.items() if name.startswith(("train", "torchrun"))]
    for script in scripts:
        settings = script.read_text().split("set -euo pipefail\n")[1].split("mkdir -p")[0]
        done = subprocess.run(
            ["bash", "-c", settings + 'echo "${CUDA_DEVICE_MAX_CONNECTIONS:-}"'],
            check=True,
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], **set_by_user},
        )
        assert done.stdout.strip() == value, script.name
    assert len(scripts) >= 2


def fake_python(tmp_path: Path) -> str:
    """An 'interpreter' that plays torchrun for one rank and then shows rank and flags."""
    path = tmp_path / "fake-python"
    path.write_text(
        "#!/bin/bash\n"
        'if [[ "$2" == torch.distributed.run ]]; then RANK=1 bash -c as_rank; exit; fi\n'
        'echo "rank $RANK: $*"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_ranks_resume_from_the_newest_checkpoint(tmp_path: Path) -> None:
    out = emitted(tmp_path)
    environment = {"PYTHON": fake_python(tmp_path), "MASTER_ADDR": "127.0.0.1"}
    script = out / "torchrun-node-0.sh"
    first = run_script(script, environment)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("rank 1: -m megatron_het.pretrain_gpt --train-iters 5")
    assert "--het-plan" in first.stdout and "--save" in first.stdout and "--load" not in first.stdout
    checkpoints = out / "checkpoints"
    (checkpoints / "iter_0000003").mkdir(parents=True)
    torn = run_script(script, environment)
    assert torn.returncode == 1 and "latest_checkpointed_iteration.txt" in torn.stderr
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    tracker.write_text("")  # Megatron would exit with code 0 at once
    emptied = run_script(script, environment)
    assert emptied.returncode == 1 and "latest_checkpointed_iteration.txt" in emptied.stderr
    tracker.write_text("3")
    again = run_script(script, environment)
    assert "--load" in again.stdout and "--exit-on-missing-checkpoint" in again.stdout


def test_nothing_is_written_for_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(PlannerError):
        emit(even_plan(), tmp_path, {"big": KINDS["big"]}, {}, LAUNCH)
    assert list(tmp_path.iterdir()) == []


def devices(*gpus: str) -> Cluster:
    return Cluster(nodes=tuple(NodeGroup(gpu=g, count=1, gpus_per_node=4) for g in gpus))


def on(first: str, second: str) -> Plan:
    return make_plan(((4,), [((0,), (0, 1, 2, 3), first)]), ((4,), [((1,), (0, 1, 2, 3), second)]))


def test_one_kind_without_transformer_engine_gives_all_ranks_local_layers() -> None:
    flags, notes = device_arguments(on("A100-80", "V100-32"), devices("A100-80", "V100-32", "B200"), [])
    assert flags[:2] == ["--transformer-impl", "local"] and "--no-rope-fusion" in flags
    assert "no Transformer Engine on V100-32" in notes[0]
    assert notes[1].startswith("install PyTorch's cu126 wheels on all nodes")
    given = ["--transformer-impl", "local", "--no-rope-fusion"]
    assert not {"--transformer-impl", "--no-rope-fusion"} & {
        *device_arguments(on("V100-32", "T4"), devices("V100-32", "T4"), given)[0]
    }
    with pytest.raises(PlannerError, match="no Transformer Engine on V100-32, T4"):
        device_arguments(on("V100-32", "T4"), devices("V100-32", "T4"), ["--moe-grouped-gemm"])
    assert device_arguments(on("A100-80", "H200"), devices("A100-80", "H200", "V100-32"), []) == ([], [])
    with pytest.raises(PlannerError, match="H200 and MI300X are of several vendors"):
        device_arguments(on("MI300X", "H200"), devices("MI300X", "H200"), [])


def test_kinds_that_no_build_of_pytorch_serves_get_their_own_interpreters() -> None:
    plan = on("V100-32", "B200")
    notes = device_arguments(plan, devices("V100-32", "B200"), [])[1]
    assert "no build of PyTorch has kernels for all kinds (V100-32: cu126; B200: cu130)" in notes[1]
    kinds = {"V100-32": nodes_of("V100-32", 4, python="/env/old/bin/python", gres="gpu:v100")}
    kinds["B200"] = nodes_of("B200", 8, python="/env/new/bin/python", gres="gpu:b200")
    nodes = place(plan, kinds)
    text = het_sbatch(nodes, kinds, LAUNCH)
    assert 'export HET_PYTHONS="/env/old/bin/python /env/new/bin/python"' in text
    assert "/env/new/bin/python" in torchrun_script(nodes, 1, LAUNCH, kinds["B200"].python)
    assert "HET_PYTHONS=" not in het_sbatch(nodes, {n: changed(k, python=None) for n, k in kinds.items()}, LAUNCH)
    function = text[text.index("as_task() {") : text.index("export -f train as_task")]
    script = f'train() {{ echo "$RANK $PYTHON"; }}\n{function}as_task'
    for task, seen in ((0, "0 /env/old/bin/python"), (1, "1 /env/new/bin/python")):
        environment = {
            "HET_RANKS": "0 1",
            "HET_PYTHONS": "/env/old/bin/python /env/new/bin/python",
            "WORLD_SIZE": "2",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": "0",
        }
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == seen


def test_a_tp_group_never_straddles_nodes() -> None:
    plan = make_plan(((4,), [((0,), (0, 1, 2, 3), "small")]), ((4,), [((1, 2), (0, 1, 2, 3), "small")]))
    assert [n.ranks for n in place(plan, KINDS)] == [(0,), (1, 2)]


def test_parts_of_a_sequence_are_on_the_kinds_that_the_plan_names() -> None:
    """TP groups of two kinds in each replica: a file that is read again puts the same ranks on the same nodes."""
    both = make_plan(((8,), [((0, 1, 2, 3), (0, 1), "big + small"), ((4, 5, 6, 7), (2, 3), "big + small")]))
    replicas = (replace(r, cp=2, cp_shares=(3, 1), cp_devices=("big", "small")) for r in both.stages[0].replicas)
    plan = Plan.from_json(replace(both, stages=(replace(both.stages[0], replicas=tuple(replicas)),)).to_json())
    assert [(n.kind, n.ranks) for n in place(plan, KINDS)] == [
        ("big", (0, 1, 4, 5)),
        ("small", (2, 3)),
        ("small", (6, 7)),
    ]
    check_device_kind(replace_kinds(plan, "A100-80", "L4"), 2, "NVIDIA L4")
    with pytest.raises(PlanError, match="rank 2.*L4 there, not A100-80"):
        check_device_kind(replace_kinds(plan, "A100-80", "L4"), 2, "NVIDIA A100-SXM4-80GB")
    with pytest.raises(PlannerError, match=r"replicas\[0\]\.cp_devices = 'huge': the cluster has no such GPU"):
        place(replace_kinds(plan, "big", "huge"), KINDS)


def replace_kinds(plan: Plan, *kinds: str) -> Plan:
    replicas = tuple(replace(r, cp_devices=kinds) for r in plan.stages[0].replicas)
    return replace(plan, stages=(replace(plan.stages[0], replicas=replicas),))


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    plan = make_plan(
        ((4,), [((0, 1), (0, 1), "small"), ((2, 3), (2, 3), "big")]), ((4,), [((4, 5), (0, 1, 2, 3), "big")])
    )
    kinds = {**KINDS, "small": nodes_of("small", 2, 1)}
    nodes = place(plan, kinds)
    assert [n.ranks for n in nodes] == [(0, 1), (2, 3, 4, 5)]
    assert task_ranks(components(nodes, kinds)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"big": KINDS["big"]}, "no such GPU"),
        ({**KINDS, "small": nodes_of("small", 1)}, "does not fit a node with 1 devices"),
        ({**KINDS, "small": nodes_of("small", 2, 1)}, "4 of them, more than the cluster has"),
    ],
)
def test_bad_clusters_are_named(kinds: dict[str, NodeGroup], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        place(even_plan(), kinds)


def a100(ranks: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
    return [(ranks, (0, 1, 2, 3), "A100-40")]


def test_groups_of_one_gpu_keep_their_own_nodes_and_settings() -> None:
    """Nodes of 4 and of 8 GPUs in two partitions: what needs 8 gets them, with the right names."""
    cluster = Cluster(
        nodes=(
            nodes_of("A100-40", 4, 2, hosts=("a1", "a2"), gres="gpu", partition="small", constraint="four"),
            nodes_of("A100-40", 8, 1, hosts=("b1",), gres="gpu", partition="large", constraint="eight"),
        )
    )
    kinds = node_kinds(cluster)
    wide = replace(MODEL, num_attention_heads=8, num_query_groups=8)
    plan = replace(make_plan(((4,), a100((0, 1))), ((4,), a100(tuple(range(2, 10))))), model=wide)
    nodes = place(plan, kinds)
    assert [(n.host, len(n.ranks)) for n in nodes] == [("a1", 2), ("b1", 8)]
    text = het_sbatch(nodes, kinds, LAUNCH)
    assert "--ntasks-per-node=2 --partition=small --constraint=four" in text
    assert "--ntasks-per-node=8 --partition=large --constraint=eight" in text
    assert "different numbers of GPUs" in plain_obstacle(nodes, kinds)
    with pytest.raises(PlannerError, match="TP group of 8 does not fit a node with 4"):
        place(plan, node_kinds(Cluster(nodes=cluster.nodes[:1])))


def test_accounts_and_resources_of_groups_are_their_own() -> None:
    cluster = Cluster(
        nodes=(
            nodes_of("A100-40", 4, 1, account="x", constraint="c", gres="gpu:a100"),
            nodes_of("A100-40", 4, 1, account="y", constraint="d", gres="gpu:sxm"),
        )
    )
    kinds = node_kinds(cluster)
    nodes = place(make_plan(((4,), a100((0, 1, 2, 3))), ((4,), a100((4, 5, 6, 7)))), kinds)
    text = het_sbatch(nodes, kinds, LAUNCH)
    assert "--constraint=c --account=x --gres=gpu:a100:4" in text
    assert "--constraint=d --account=y --gres=gpu:sxm:4" in text
    assert "partitions or accounts" in plain_obstacle(nodes, kinds)


def test_groups_that_the_launcher_cannot_tell_apart_are_one_component() -> None:
    cluster = Cluster(nodes=(nodes_of("A100-40", 4, 1, gres="gpu"), nodes_of("A100-40", 8, 1, gres="gpu")))
    kinds = node_kinds(cluster)
    nodes = place(make_plan(((4,), a100((0, 1, 2, 3))), ((4,), a100((4, 5, 6, 7)))), kinds)
    assert [(c.per_node, len(c.nodes)) for c in components(nodes, kinds)] == [(4, 2)]
    assert plain_obstacle(nodes, kinds) == "" and "hetjob" not in het_sbatch(nodes, kinds, LAUNCH)


def test_nodes_are_filled_as_the_planner_fills_them() -> None:
    """TP 1, three of TP 2, TP 1 on two nodes of 4: neither leaves a gap."""
    cluster = Cluster(nodes=(nodes_of("A100-40", 4, 2, gres="gpu"),))
    pairs = [((1, 2), (0, 1), "A100-40"), ((3, 4), (2,), "A100-40"), ((5, 6), (3,), "A100-40")]
    plan = make_plan(((2,), a100((0,))), ((4,), pairs), ((2,), a100((7,))))
    nodes = place(plan, node_kinds(cluster))
    assert [n.ranks for n in nodes] == [(0, 1, 2, 7), (3, 4, 5, 6)]
    stages = (Stage_(2, (Group(0, 1, 1),)), Stage_(4, (Group(0, 2, 3),)), Stage_(2, (Group(0, 1, 1),)))
    seated = [seat for stage in seats(cluster, stages) or () for replica in stage for seat in replica]
    assert [{r for r in range(8) if seated[r].node == n} for n in (0, 1)] == [set(n.ranks) for n in nodes]


def test_large_groups_find_their_nodes_after_small_ones() -> None:
    """Two single GPUs and two of TP 4 on two nodes of 5."""
    single = [((0,), (0, 1), "big"), ((1,), (2, 3), "big")]
    quads = [((2, 3, 4, 5), (0, 1), "big"), ((6, 7, 8, 9), (2, 3), "big")]
    nodes = place(make_plan(((4,), single), ((4,), quads)), {"big": nodes_of("big", 5, 2)})
    assert [n.ranks for n in nodes] == [(0, 2, 3, 4, 5), (1, 6, 7, 8, 9)]
    with pytest.raises(PlannerError, match="do not fit into the cluster's nodes"):
        place(make_plan(((4,), single), ((4,), quads)), {"big": nodes_of("big", 4, 1), "rest": nodes_of("big", 3, 2)})
