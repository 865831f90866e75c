"""The doctor on this machine's processes: one launch in which three faults were put in, all of them to be found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.llama.devices import available_cores, mixed_devices
from examples.llama.doctor import MISSING_FLAG
from megatron_het.plan import load_plan

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    command = [sys.executable, "-m", "examples.llama.doctor", "--break", "--no-profile", "--out", str(folder)]
    done = subprocess.run(
        [*command, "--limit-s", "600"], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=900
    )
    (folder / "stdout").write_text(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    return folder


def found(out: Path, check: str, status: str) -> list[tuple[str, str]]:
    report = json.loads((out / "doctor.json").read_text())
    return [(f["where"], f["what"]) for f in report["findings"] if f["check"] == check and f["status"] == status]


@pytest.mark.full
def test_three_faults_are_found(out: Path) -> None:
    slowed = len(mixed_devices(available_cores(), 4)) - 1
    assert any(f"rank {slowed} " in where and "its kind" in what for where, what in found(out, "devices", "FAULT"))
    plan = load_plan(out / "plan.json")
    pairs = len(plan.stages[0].replicas) * len(plan.stages[1].replicas)
    assert len(found(out, "links", "FAULT")) == pairs
    assert all("cluster file promises 10 TB/s" in what for _, what in found(out, "links", "FAULT"))
    assert [where for where, what in found(out, "flags", "FAULT") if MISSING_FLAG in what] == ["all ranks"]


@pytest.mark.full
def test_the_rest_runs_all_the_same(out: Path) -> None:
    """One check's fault hides no other: transfers, losses, disk and versions are fine."""
    for check in ("software", "disk", "stress", "numerics"):
        assert found(out, check, "ok") and not found(out, check, "FAULT"), found(out, check, "FAULT")
    assert not [f for f in ("software", "flags", "disk", "devices", "links", "stress") if found(out, f, "not run")]
    agree = found(out, "numerics", "ok")[0][1]
    assert "kind(s) of devices alone" in agree
    text = (out / "stdout").read_text()
    assert "verdict: NOT FIT" in text and "Add it" in " ".join(text.split())  # a cell wraps


def transfers(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("doctor_transfers.py")),
        str(folder),
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def test_transfers_of_four_ranks(tmp_path: Path) -> None:
    report = transfers(tmp_path)
    assert report["links"]["errors"] == report["stress"]["errors"] == []
    assert sorted(p for d in report["links"]["data"].values() for p in d["pairs"]) == ["0-1", "0-2", "0-3"]
    assert report["links"]["rows"][0]["what"].startswith("3 of 3 pairs")
    counts = {d["iterations"] for d in report["stress"]["data"].values()}
    assert len(counts) == 1 and counts.pop() >= 1
    assert all(d["bytes"] > 0 for d in report["stress"]["data"].values())


@pytest.mark.full
def test_values_that_change_on_the_way_are_noticed(tmp_path: Path) -> None:
    report = transfers(tmp_path, "spoil")
    assert report["links"]["errors"] == []
    assert any("rank 3 sent other values" in error for error in report["stress"]["errors"])
