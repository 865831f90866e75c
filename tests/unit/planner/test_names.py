"""Launch scripts: nothing of the input runs, and every line is one that Slurm reads as meant."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bad_input_cases import CLUSTER, INJECTIONS, PLAN
from megatron_het.plan import Plan
from tools.planner.emit.checks import extra_flags
from tools.planner.emit.command import emit
from tools.planner.emit.options import node_kinds
from tools.planner.emit.scripts import LaunchOptions
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import cluster_from_document
from tools.planner.inputs.names import gres_problem, host_problem, job_problem, time_problem


@pytest.mark.parametrize("key", ["hosts", "partition", "constraint", "account", "gres"])
@pytest.mark.parametrize("text", [*INJECTIONS, "", " ", "a b", "-x"])
def test_cluster_files_with_shell_text_are_refused(key: str, text: str) -> None:
    node: dict[str, Any] = dict(CLUSTER["nodes"][0])
    if key == "hosts":
        node["hosts"] = ["n1", text]
    else:
        node["slurm"] = {**node["slurm"], key: text}
    if text == "" and key != "hosts":
        return  # an empty entry means that there is none
    with pytest.raises(PlannerError) as caught:
        cluster_from_document({**CLUSTER, "nodes": [node, CLUSTER["nodes"][1]]}, "c.yaml")
    assert "nodes[0]" in caught.value.key


@pytest.mark.parametrize("hosts", [["n1", "n1"], ["n1", "N1"], ["n1", "n3"]])
def test_one_host_in_one_place(hosts: list[str]) -> None:
    nodes = [{**CLUSTER["nodes"][0], "hosts": hosts}, CLUSTER["nodes"][1]]
    with pytest.raises(PlannerError, match="twice"):
        cluster_from_document({**CLUSTER, "nodes": nodes}, "c.yaml")


def _emit(tmp_path: Path, folder: str = "run", **launch: Any) -> Path:
    out = tmp_path / folder
    options = LaunchOptions(**{"run_dir": str(out), **launch})
    emit(Plan.from_json(PLAN), out, node_kinds(cluster_from_document(CLUSTER, "c")), {"EXTRA": ["--x", "y"]}, options)
    return out


@pytest.mark.parametrize("text", [text for text in INJECTIONS if "\n" not in text])
def test_folders_and_interpreters_are_quoted(text: str, tmp_path: Path) -> None:
    """Names that a file may have: they reach the scripts as they are."""
    mark = tmp_path / "executed.mark"
    out = _emit(tmp_path, text.replace("/", "_"), python=text, environment={"SOME": text})
    for script in [*out.glob("*.sh"), *out.glob("*.sbatch")]:
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
        for line in script.read_text().splitlines():
            if line.startswith("#SBATCH"):
                assert all(w.startswith("--") or w == "hetjob" for w in shlex.split(line)[1:])
    environment = {"PATH": "/usr/bin:/bin", "MARK_FOLDER": str(tmp_path)}
    settings = (out / "torchrun-node-0.sh").read_text().split("mkdir -p")[0] + 'printf "%s|%s" "$PYTHON" "$SOME"'
    done = subprocess.run(["bash", "-c", settings], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{text}|{text}" and not mark.exists()


@pytest.mark.parametrize(
    "launch",
    [
        *({"job_name": name} for name in ("a b", "", "x\n#SBATCH --exclusive", "$(x)", "a/b", "-x")),
        *({"time_limit": time} for time in ("never", "", "1:99", "24:00:00\nx", "１")),  # noqa: RUF001
        *({"run_dir": folder} for folder in ("relative", "/a\nb", "/a%j", "/a\\b")),
        *({"python": name} for name in ("", "a\nb")),
        {"cpus_per_task": -1},
        {"save_interval": 0},
    ],
)
def test_launch_options_that_are_refused(launch: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="emit: --"):
        _emit(tmp_path, **launch)
    assert list(tmp_path.iterdir()) == []


def test_special_files_in_the_folder_stay(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "train.sbatch").symlink_to("/dev/full")
    with pytest.raises(PlannerError, match="no place for files"):
        _emit(tmp_path)
    assert (out / "train.sbatch").is_symlink() and len(list(out.iterdir())) == 1


@pytest.mark.parametrize(
    "flags", ["--num-layers 99", "--num-lay 9", "--seq-length=1", "--het-plan x", "--bf16", "'", "x"]
)
def test_extra_flags_that_contradict(flags: str) -> None:
    with pytest.raises(PlannerError, match="--extra"):
        extra_flags(flags)


def test_extra_flags_that_are_fine(tmp_path: Path) -> None:
    words = ["--data-path", '"$(touch x)"', "--log-throughput", "--fp16-lm-cross-entropy"]
    assert extra_flags(shlex.join(words)) == words
    plan = Plan.from_json(PLAN)
    kinds = node_kinds(cluster_from_document(CLUSTER, "c"))
    emit(plan, tmp_path, kinds, {"EXTRA": words}, LaunchOptions(run_dir=str(tmp_path)))
    script = f'cd {tmp_path} && source ./args.sh && printf "%s\\n" "${{EXTRA_ARGS[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == words and not (tmp_path / "x").exists()


def test_names_that_are_fine() -> None:
    assert not any(map(host_problem, ("n1", "gpu-01.cluster.example", "10.0.0.1", "::1", "node_3")))
    assert not any(map(time_problem, ("90", "1:30", "24:00:00", "2-12", "2-12:30:00", "UNLIMITED")))
    assert not any(map(job_problem, ("megatron-het", "run_7.b")))
    assert not any(map(gres_problem, ("gpu", "gpu:a100"))) and gres_problem("gpu:a100:4")


def test_constraints_that_are_expressions_need_a_heterogeneous_job(tmp_path: Path) -> None:
    kinds = node_kinds(cluster_from_document(CLUSTER, "c"))
    kinds = {name: replace(kind, constraint=f"a{i}|b", gres="") for i, (name, kind) in enumerate(kinds.items())}
    done = emit(Plan.from_json(PLAN), tmp_path, kinds, {}, LaunchOptions(run_dir=str(tmp_path)))
    assert any("no train-plain.sbatch" in note for note in done.notes)
