"""Trainings of the benchmarks on a GPU: what a machine without one can show of them."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parity
from benchmarks.cuda_iterations import added, cuda_cases, every_rank, is_bad, left_to_do, report_of
from benchmarks.parity import all_cases, with_precision
from testing import runner
from testing.cases import common_flags
from testing.compare import BOUNDS, failures
from testing.runner import server_environment

UNTOUCHED = """
import os, torch

def touched(*_, **__):
    raise AssertionError("the server touches CUDA")

torch.cuda.is_available = lambda: True  # which NVML says
torch.cuda.device_count = torch.cuda.init = torch.cuda._lazy_init = torch._C._cuda_getDeviceCount = touched
from testing import rank_server
rank_server.import_everything("cuda")
from megatron_het import device
assert device.activate().is_cuda
torch.cuda.device_count = lambda: 1
os.environ.update(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", WORLD_SIZE="2", HET_SAME_DEVICES="1")
rank_server._take_device()
print(os.environ["LOCAL_RANK"], os.environ["NCCL_HOSTID"])
"""


def test_a_server_for_gpus_touches_no_cuda_before_it_forks():
    """And every rank has a host name of its own for NCCL, and a device that is there."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", "-c", UNTOUCHED]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said, last = done.stdout.splitlines()
    assert "2 ranks share 1 device" in said and last.startswith("0 ") and last.endswith("-1")


def test_environment_of_the_server():
    outer = {"PYTHONPATH": "somewhere", "KEPT": "1"}
    cpu, cuda = server_environment("cpu", outer), server_environment("cuda", outer)
    assert cpu["CUDA_VISIBLE_DEVICES"] == "" and "PYTORCH_NVML_BASED_CUDA_CHECK" not in cpu
    assert cuda["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1" and "CUDA_VISIBLE_DEVICES" not in cuda
    assert cuda["HET_SAME_DEVICES"] == "1" and cuda["KEPT"] == cpu["KEPT"] == "1"


@pytest.mark.parametrize("has_te", [False, True])
def test_flags_of_a_gpu(has_te):
    case = next(c for c in all_cases(0, "slimpipe", True)[0] if c.transport == "gloo")
    flags = common_flags(*case.reference, device="cuda", has_te=has_te)
    assert "gloo" not in flags and "unfused" not in flags and "--no-gradient-accumulation-fusion" not in flags
    assert ("local" in flags) != has_te
    transport = [case.plan_flags(device)[:2] for device in ("cpu", "cuda")]
    assert transport == [("--het-transport", "gloo"), ("--het-transport", "nccl")]


def test_transformer_engine_trains_in_bf16():
    cases = all_cases(random.Random(0).randrange(9), "1f1b", True)[0]
    found = with_precision(cases, "bf16")
    assert {c.plan.training.precision for c in found} == {c.chosen["precision"] for c in found} == {"bf16"}
    assert {c.name for c in found} == {c.name for c in cases if c.plan.training.precision == "fp32"}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bounds_by_device_and_precision(precision):
    for device in ("cpu", "cuda"):
        bounds = BOUNDS[device][precision]
        for wrong in bounds:
            values = {f"relative_{k}_difference": v * (1.01 if k == wrong else 0.99) for k, v in bounds.items()}
            entry = {"name": "one", "chosen": {"precision": precision}, **values}
            assert failures([entry], device) == ["one"]
            assert failures([entry | {f"relative_{wrong}_difference": bounds[wrong]}], device) == []


@pytest.mark.parametrize("words", [["--device", "cuda"], ["--transformer-impl", "transformer_engine"]])
def test_without_a_gpu_nothing_runs(words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(runner, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["parity", "--json", str(tmp_path / "out.json"), *words])
    with pytest.raises(SystemExit) as stop:
        parity.main()
    assert stop.value.code == 2
    assert "there is no NVIDIA GPU here" in (said := capsys.readouterr().err) or "needs --device cuda" in said


# The report of ``benchmarks.cuda_iterations``: results of several runs are counted together, and lines once.

LINE = "megatron_het/runtime/channels.py:1"


def run(name: str, waits: int, **more: Any) -> dict[str, Any]:
    found = [{"calls": waits, "during": "forward", "where": "megatron_het/x.py:1"}]
    return {"name": name, "host_waits": found, "traffic": [], **more}


def without(name: str, error: str) -> dict[str, Any]:
    return {"name": f"{name}, without {LINE}", "error": error}


def test_runs_go_on_from_earlier_ones(tmp_path: Path) -> None:
    first, second, third, *_ = (iteration.name for iteration in every_rank(cuda_cases()[:1]))
    runs = {first: run(first, 0, stream_waits=[LINE, "torch/other.py:1"]), second: run(second, 0, stream_waits=[LINE])}
    assert [i.ignored_wait for i in left_to_do(runs, {})] == [LINE]
    noticed = without(first, "x is not ordered after y")
    (tmp_path / "a.json").write_text(json.dumps(report_of(runs, {noticed["name"]: noticed})))
    runs, left_out = added([tmp_path / "a.json"])
    assert left_to_do(runs, left_out) == []
    report = report_of(runs | {third: run(third, 2)}, left_out)
    assert (report["runs"], report["missing_waits"], report["missing_waits_noticed"]) == (3, 1, 1)
    assert report["waits_in_operations"] == 2 and is_bad(report) and not is_bad(report_of(runs, left_out))


def test_a_line_counts_once_and_only_where_every_run_notices_it() -> None:
    entries = [without("a", "x is not ordered after y"), without("b", "something else")]
    report = report_of({}, {entry["name"]: entry for entry in entries})
    assert (report["missing_waits"], report["missing_waits_noticed"]) == (1, 0)
    assert report["missing_waits_unnoticed"] == [entries[1]["name"]] and is_bad(report)
