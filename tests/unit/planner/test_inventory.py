"""``init``: stand-ins for nvidia-smi and sinfo on PATH, and what is written."""

import json
import os
import stat

import pytest

from tools.planner.__main__ import main
from tools.planner.cli import inventory as probes
from tools.planner.cli.inventory import _BY_MEMORY, _RULES, catalog_name, host_names
from tools.planner.errors import PlannerError
from tools.planner.inputs.catalog import catalog
from tools.planner.inputs.cluster import load_cluster


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
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

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
        ("big", None, None),
    ],
)
def test_names_of_gpus(text, memory, name):
    found = catalog_name(text, memory)
    assert (found.name if found else None) == name


def test_the_rules_name_gpus_of_the_catalog():
    named = {name for _, name in _RULES} | {name for sizes in _BY_MEMORY.values() for name, _ in sizes}
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
    code, _ = run(tmp_path, capsys, "--hosts", "n[08-10],head.example")
    (nodes,) = load_cluster(tmp_path / "c.yaml").nodes
    assert code == 0 and nodes.hosts == ("n08", "n09", "n10", "head.example") and nodes.count == 4


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
        (("--from", "slurm"), "--from"),
        (("--gpu", "A100-4"), "--gpu"),
        (("--gpu", "T4", "--hosts", "a b"), "--hosts"),
        (("--gpu", "T4", "--hosts", "n[3-x]"), "--hosts"),
        (("--gpu", "T4", "--hosts", "n[0-999999999]"), "--hosts"),
    ],
)
def test_what_cannot_be_asked_is_said_and_nothing_is_written(tools, tmp_path, capsys, words, key):
    code, said = run(tmp_path, capsys, *words)
    assert code == 2 and said["error"]["key"] == key
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


def test_host_names():
    assert host_names("a,b[1-3,7]x") == ("a", "b1x", "b2x", "b3x", "b7x")
    with pytest.raises(PlannerError, match="host name"):
        host_names("a;rm")


def test_without_asking(tmp_path, capsys):
    code, said = run(tmp_path, capsys, "--gpu", "H100-SXM", "--gpus-per-node", "4", "--hosts", "a,b")
    (nodes,) = load_cluster(tmp_path / "c.yaml").nodes
    assert code == 0 and (nodes.gpu, nodes.count, nodes.gpus_per_node) == ("H100-SXM", 2, 4)
    assert said["source"] == "the command line" and os.listdir(tmp_path) == ["c.yaml"]
