"""``init``: stand-ins for nvidia-smi and sinfo on PATH, and what is written."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from benchmarks.published.calibrate import SHAPES
from megatron_het.elastic import __main__ as elastic
from megatron_het.plan import load_plan
from testing.planner_cases import write_inputs
from tests.unit.planner.emit_plans import SMALL, WIDE
from tools.planner.__main__ import COMMANDS, main, parser_of
from tools.planner.cli import inventory as probes
from tools.planner.cli.inventory import _BY_MEMORY, catalog_name
from tools.planner.emit.scripts import LaunchOptions
from tools.planner.errors import PlannerError
from tools.planner.inputs.catalog import catalog, gpu_names
from tools.planner.inputs.cluster import load_cluster
from tools.planner.inputs.model import load_model
from tools.planner.report import analysis as module


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH with nothing but what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name, text, code=0):
        (folder / f"{name}.txt").write_text(text)
        file = folder / name
        file.write_text(f'#!/bin/sh\necho "$@" > {folder}/{name}.asked\n/bin/cat {folder}/{name}.txt\nexit {code}\n')
        file.chmod(0o755)

    return put


def run(tmp_path, capsys, *words):
    code = main(["init", "--out", str(tmp_path / "c.yaml"), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", None, "A100-40"),
        ("NVIDIA A100 80GB PCIe", None, "A100-80"),
        ("NVIDIA A100-SXM4", 81920 * 2.0**20, "A100-80"),
        ("NVIDIA H100 80GB HBM3", None, "H100-SXM"),
        ("NVIDIA H100 PCIe", None, "H100-PCIe"),
        ("NVIDIA H100 NVL", None, "H100-NVL"),
        ("NVIDIA GH200 480GB", None, "GH-96"),
        ("NVIDIA H200", None, "H200"),
        ("Tesla V100-SXM2-16GB", None, "V100-16"),
        ("Tesla V100-SXM2-32GB", None, "V100-32"),
        ("Tesla T4", None, "T4"),
        ("teslav100s-32gb", None, "V100-32"),
        ("teslat4", None, "T4"),
        ("NVIDIA A10G", None, "A10G"),
        ("NVIDIA L4", None, "L4"),
        ("NVIDIA L40S", None, "L40S"),
        ("NVIDIA GeForce RTX 3090", None, "RTX-3090"),
        ("NVIDIA RTX A6000", None, "A6000"),
        ("nvidia_h100_80gb_hbm3", None, "H100-SXM"),
        ("NVIDIA B200", None, "B200"),
        ("NVIDIA GB200", None, "GB200"),
        ("NVIDIA L40", None, "L40"),
        ("NVIDIA A40", None, "A40"),
        ("NVIDIA H20", None, "H20"),
        ("NVIDIA RTX 6000 Ada Generation", None, "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", None, "RTX-PRO-6000"),
        ("Quadro RTX 8000", None, "RTX-8000"),
        ("Tesla P100-SXM2-16GB", None, "P100-16"),
        ("NVIDIA GeForce GTX 1080", None, None),
        ("gt430", None, None),
        ("big", None, None),
    ],
)
def test_names_of_gpus(text, memory, name):
    found = catalog_name(text, memory)
    assert (found.name if found else None) == name


def test_the_rules_name_gpus_of_the_catalog():
    named = set(gpu_names().values()) | {name for sizes in _BY_MEMORY.values() for name, _ in sizes}
    assert named <= set(catalog())
    assert "does not say" in catalog_name("a100").doubt


def test_nvidia_smi(tools, tmp_path, capsys):
    tools("nvidia-smi", "NVIDIA A100-SXM4-40GB, 40960\n" * 4 + "Tesla T4, 15360\n")
    code, said = run(tmp_path, capsys)
    assert code == 0 and said["source"] == "nvidia-smi"
    asked = (tmp_path / "bin" / "nvidia-smi.asked").read_text()
    assert "--query-gpu=name,memory.total" in asked
    cluster = load_cluster(tmp_path / "c.yaml")
    assert [(n.gpu, n.count, n.gpus_per_node) for n in cluster.nodes] == [("A100-40", 1, 4), ("T4", 1, 1)]
    text = (tmp_path / "c.yaml").read_text()
    assert "# usd_per_gpu_hour: 3.673" in text and "nvidia-smi" in text.splitlines()[0]


def test_hosts_like_this_one(tools, tmp_path, capsys):
    tools("nvidia-smi", "NVIDIA H200, 143771\n" * 8)
    tools("sinfo", "x|p|gpu:8|(null)|1\n")
    code, _ = run(tmp_path, capsys, "--hosts", "n[08-09,11]x,head.example")
    (nodes,) = load_cluster(tmp_path / "c.yaml").nodes
    assert code == 0 and nodes.hosts == ("n08x", "n09x", "n11x", "head.example") and nodes.count == 4


def test_sinfo(tools, tmp_path, capsys):
    rows = [
        "n1|debug|gpu:a100:8(S:0-1)|a100_80gb,ib|1031000",
        "n1|big*|gpu:a100:8(S:0-1)|a100_80gb,ib|1031000",
        "n2|big*|gpu:a100:8(S:0-1)|a100_80gb,ib|1031000",
        "m1|old|gpu:4|v100-32gb|385000|idle|48",
        "m2|old|gpu:strange:2|(null)|385000",
        "login|big*|(null)|(null)|64000",
        "$(reboot)|big*|gpu:a100:8|(null)|1",
        "broken line",
    ]
    tools("sinfo", "\n".join(rows) + "\n")
    code, said = run(tmp_path, capsys)
    assert code == 0 and said["unknown"] == ["strange"]
    text = (tmp_path / "c.yaml").read_text()
    assert "reboot" not in text and "gpu: FILL-IN" in text
    (tmp_path / "c.yaml").write_text(text.replace("FILL-IN", "T4"))
    first, second, third = load_cluster(tmp_path / "c.yaml").nodes
    assert (first.gpu, first.hosts, first.slurm.partition) == ("A100-80", ("n1", "n2"), "big")
    assert first.slurm.constraint == "a100_80gb" and first.slurm.gres == "gpu:a100"
    assert (second.gpu, second.gpus_per_node, second.slurm.constraint) == ("V100-32", 4, "v100-32gb")
    assert (first.slurm.cpus, second.slurm.cpus) == (None, 48)
    assert third.gpus_per_node == 2 and third.slurm.constraint is None


def test_nodes_that_no_job_gets_are_left_out(tools, tmp_path, capsys):
    rows = [f"n{i}|big*|gpu:h100:8|(null)|1|{state}" for i, state in enumerate(("idle", "drained", "down*", "mixed"))]
    rows += ["n4|big*|gpu:h100:8|(null)|1|reserved", "n5|big*|gpu:h100:8|(null)|1|idle*"]
    tools("sinfo", "\n".join(rows) + "\n")
    code, said = run(tmp_path, capsys)
    assert code == 0 and said["left_out"] == ["n1 (drained)", "n2 (down*)", "n4 (reserved)", "n5 (idle*)"]
    assert load_cluster(tmp_path / "c.yaml").nodes[0].hosts == ("n0", "n3")


def test_an_answer_without_end_is_refused(tools, tmp_path, capsys):
    tools("sinfo", "n|p|gpu:8|(null)|1|idle\n" * 30_000)
    code, said = run(tmp_path, capsys)
    assert code == 2 and "30000 lines" in said["error"]["problem"]


def test_an_existing_file_stays_without_force(tools, tmp_path, capsys):
    tools("nvidia-smi", "Tesla T4, 15360\n")
    (tmp_path / "c.yaml").write_text("mine")
    code, said = run(tmp_path, capsys)
    assert code == 2 and "--force" in said["error"]["hint"] and (tmp_path / "c.yaml").read_text() == "mine"
    assert run(tmp_path, capsys, "--force")[0] == 0 and "T4" in (tmp_path / "c.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((), "--from"),
        (("--from", "nvidia-smi"), "--from"),
        (("--from", "slurm"), "--from"),
        (("--gpu", "A100-4"), "--gpu"),
        (("--gpu", "T4", "--hosts", "a b"), "--hosts"),
    ],
)
def test_what_cannot_be_asked_is_said_and_nothing_is_written(tools, tmp_path, capsys, words, key):
    code, said = run(tmp_path, capsys, *words)
    assert code == 2 and said["error"]["key"] == key
    assert ("sinfo" in said["error"]["problem"]) == (words in ((), ("--from", "slurm")))  # who was asked
    assert not (tmp_path / "c.yaml").exists()


def test_a_program_that_fails_or_hangs_is_named(tools, tmp_path, capsys, monkeypatch):
    tools("nvidia-smi", "NVIDIA-SMI has failed: no driver", code=9)
    code, said = run(tmp_path, capsys)
    assert code == 2 and said["error"]["file"] == "nvidia-smi" and "no driver" in said["error"]["problem"]
    monkeypatch.setattr(probes, "LIMIT_S", 0.2)
    file = tmp_path / "bin" / "nvidia-smi"
    file.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    code, said = run(tmp_path, capsys)
    assert code == 2 and "no answer" in said["error"]["problem"]


def test_without_asking(tmp_path, capsys):
    code, said = run(tmp_path, capsys, "--gpu", "H100-SXM", "--gpus-per-node", "4", "--hosts", "a,b")
    (nodes,) = load_cluster(tmp_path / "c.yaml").nodes
    assert code == 0 and (nodes.gpu, nodes.count, nodes.gpus_per_node) == ("H100-SXM", 2, 4)
    assert said["source"] == "the command line" and os.listdir(tmp_path) == ["c.yaml"]


# ``quickstart``: what it runs, what it writes, what it refuses.


@pytest.fixture
def folder(tools: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools("nvidia-smi", "Tesla V100-SXM2-16GB, 16384\n" * 2)
    tools("sinfo", "", code=1)
    monkeypatch.setenv("HET_PLAN_VERIFY", "0")
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text(yaml.safe_dump(SMALL))
    return tmp_path


def test_from_a_machine_and_a_file_to_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--model", "model.yaml", "--precision", "fp16", "--extra", "--mock-data"]) == 0
    said = capsys.readouterr().out
    shown = [line for line in said.splitlines() if line.startswith("$ ")]
    assert [line.split(" tools.planner ")[-1].split()[0] for line in shown] == ["init", "plan", "check", "emit"]
    assert "--precision fp16" in shown[1]
    assert "(--tokenizer-type and --tokenizer-model)\n\nWhen that is filled in, start the job with:\n" in said
    assert said.endswith("\nbash run/job/torchrun-node-0.sh\n")
    assert "--mock-data" in Path("run/job/args.sh").read_text()
    assert main(["quickstart", "--model", "model.yaml"]) == 2 and "--force" in capsys.readouterr().err


def test_known_models_are_those_of_the_examples_and_the_published_runs() -> None:
    root, fields = Path(__file__).parents[3], ("num_hidden_layers", "hidden_size", "intermediate_size")
    fields += ("num_attention_heads", "num_key_value_heads", "vocab_size", "rope_theta", "rms_norm_eps")
    flags = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "vocab-size")
    flags += ("rotary-base", "norm-epsilon")
    known = json.loads((root / "tools/planner/inputs/data/known_models.json").read_text())
    large = known.pop("llama-3.1-70b")["config"]
    assert [large[field] for field in fields[:6]] == SHAPES["LLAMA3_70B"]["shape"]
    assert large | dict.fromkeys(fields[:6], 0) == known["llama-3.1-8b"]["config"] | dict.fromkeys(fields[:6], 0)
    for entry in known.values():
        text = subprocess.run([root / entry["source"], "full"], capture_output=True, text=True, check=True).stdout
        of_script = [float(re.findall(rf"--{flag} (\S+)", text)[0]) for flag in flags]
        assert [entry["config"][field] for field in fields] == of_script
        assert ("sliding_window" in entry["config"]) == ("--window-size 4095,0" in text)
        assert ("rope_scaling" in entry["config"]) == ("--rope-scaling-factor 8\n" in text)


def test_a_known_name_and_a_wrong_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "H100-SXM", "--gpus-per-node", "8", "--hosts", "n[1-2]", "--limit-s", "1", "--out", "r"]
    assert main(["quickstart", "--model", "Mistral-7B", *words, "--global-batch-size", "64"]) == 0
    said = capsys.readouterr().out
    assert "--model Mistral-7B --global-batch-size 64" in said and "r/job/torchrun-node-1.sh   # on node 1" in said
    for asked in (
        *("mistral-8b", "mistral-7b --gpu A100-4", "mistral-7b --gpus-per-node 4", "mistral-7b --gpu T4 --from slurm"),
        *("mistral-7b --from slurm --hosts n1", "mistral-7b --cluster c --gpu T4"),
    ):
        assert main(["quickstart", "--model", *asked.split()]) == 2
        assert asked.split()[-1] in capsys.readouterr().err and not Path("run").exists()  # it can be tried again
    model = load_model("mistral-7b")
    assert (model.name, model.attention_window, model.global_batch_size) == ("mistral-7b", 4096, 256)
    with pytest.raises(PlannerError, match="mistral-8b: no such file. Known by name: .*mistral-7b"):
        load_model("mistral-8b")


NOTHING = (None, False, "", [], argparse.SUPPRESS)


def test_every_option_of_emit_shows_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["emit", "--help"])
    shown = "".join(capsys.readouterr().out.split())  # lines are broken at hyphens too
    found = [a for a in parser_of("emit")._actions if a.option_strings and a.default not in NOTHING]
    assert {"--out", "--lr", "--save-interval", "--python"} <= {action.option_strings[-1] for action in found}
    launch = LaunchOptions(run_dir="")  # has the defaults of options that are for Slurm only
    assert all(f"(default{getattr(launch, name)}" in shown for name in ("time_limit", "notice_s", "at_time_limit"))
    for action in found:
        assert f"(default{action.default}" in shown, action.option_strings
        assert "(default %(default)s" in (action.help or ""), action.option_strings


CLUSTER = {"nodes": [{"gpu": "A100-80", "count": 2, "gpus_per_node": 4, "network_bytes_per_s": 1e10}]}


@pytest.mark.parametrize("gpus", [8, 1])
def test_costs_that_would_take_too_long_are_left_out(gpus, tmp_path, capsys, monkeypatch):
    """Those of a single stage too, which is not simulated."""
    cluster = {"nodes": [{**CLUSTER["nodes"][0], "count": max(1, gpus // 4), "gpus_per_node": min(4, gpus)}]}
    out = tmp_path / "plan.json"
    inputs = write_inputs(tmp_path, cluster, WIDE)
    words = ["plan", *inputs, "--out", str(out), "--schedules", "1f1b", "--limit-s", "30"]
    assert main(words) == 0 and load_plan(out).predicted.costs is not None
    assert "does not watch itself" not in capsys.readouterr().out
    monkeypatch.setattr(module, "PRICING_S", 100.0)
    assert main(words) == 0 and load_plan(out).predicted.costs is None
    assert "does not watch itself" in " ".join(capsys.readouterr().out.split())


# Shell completion: what real shells complete with the printed scripts.

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr(sys.stdout, "write", written.append)
        found = {}
        for shell in SHELLS:
            written.clear()
            assert main(["completion", shell]) == 0
            found[shell] = "".join(written)
    return found


def in_bash(script: str, folder: Path, *words: str) -> list[str]:
    (folder / ".script").write_text(script, encoding="utf-8")
    function = f"_shtab_{words[0].replace('-', '_')}"
    body = 'source ./.script; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); ' + function
    body += '; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-c", body, "bash", *words]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    assert not found.stderr
    return found.stdout.split()


def test_bash_completes_commands_options_values_and_files(scripts: dict[str, str], tmp_path: Path) -> None:
    bash = scripts["bash"]
    assert in_bash(bash, tmp_path, "het-plan", "") == list(COMMANDS)
    assert in_bash(bash, tmp_path, "het-plan", "dr") == ["dry-run"]
    assert in_bash(bash, tmp_path, "het-plan", "plan", "--obj") == ["--objective"]
    assert in_bash(bash, tmp_path, "het-plan", "plan", "--objective", "") == ["throughput", "cost"]
    assert in_bash(bash, tmp_path, "het-plan", "completion", "z") == ["zsh"]
    assert in_bash(bash, tmp_path, "het-plan", "dry-run", "p.json", "--", "--l") == []
    (tmp_path / "model.yaml").touch()
    (tmp_path / "models").mkdir()
    assert sorted(in_bash(bash, tmp_path, "het-plan", "plan", "--model", "mo")) == ["model.yaml", "models"]
    assert in_bash(bash, tmp_path, "het-plan", "check", "mo") == ["model.yaml", "models"]
    assert in_bash(bash, tmp_path, "het-plan", "quickstart", "--out", "mo") == ["models"]


def test_bash_completes_the_other_programs(scripts: dict[str, str], tmp_path: Path) -> None:
    bash = scripts["bash"]
    assert in_bash(bash, tmp_path, "het-run", "--start-c") == ["--start-controller"]
    assert in_bash(bash, tmp_path, "het-run", "") == list(elastic.COMMANDS)
    assert in_bash(bash, tmp_path, "het-run", "status", "--js") == ["--json"]
    assert in_bash(bash, tmp_path, "het-doctor", "--ch") == ["--checkpoints"]
    assert in_bash(bash, tmp_path, "het-doctor", "--transport", "n") == ["nccl"]
    (tmp_path / "plan.json").touch()
    assert in_bash(bash, tmp_path, "het-run", "--plans", "pl") == ["plan.json"]


@pytest.mark.parametrize("program", ["het-plan", "het-run", "het-doctor"])
def test_zsh_and_fish_get_every_program(scripts: dict[str, str], program: str) -> None:
    assert f"compdef _shtab_{program.replace('-', '_')} -N {program}" in scripts["zsh"]
    assert f"complete -c {program} -f" in scripts["fish"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_options_and_values(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".script").write_text(scripts["fish"], encoding="utf-8")

    def offered(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", f"source .script; complete -C '{line}'"]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
        return [row.split("\t")[0] for row in found.stdout.splitlines()]

    assert offered("het-plan dr") == ["dry-run"]
    assert sorted(offered("het-plan plan --objective ")) == ["cost", "throughput"]
    assert offered("het-run --start") == ["--start-controller"]
    assert offered("het-doctor --transport n") == ["nccl"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_the_script(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".script").write_text(scripts["zsh"], encoding="utf-8")
    body = 'autoload -U compinit && compinit -u -D; eval "$(<.script)"; print ${_comps[het-plan]} ${_comps[het-run]}'
    found = subprocess.run(["zsh", "-fc", body], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout.split() == ["_shtab_het_plan", "_shtab_het_run"]
    assert not found.stderr


@pytest.mark.parametrize(("package", "words"), [("shtab", "completion bash"), ("yaml", "init --gpu T4 --hosts a")])
def test_without_a_package_one_line_says_what_to_install(
    package: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"package {package}," in line and "checkout of megatron_het: pip install -e '.[planner]'" in line
