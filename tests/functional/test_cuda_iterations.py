"""CUDA code without CUDA: device mix-ups, waits of the host, and order between streams, on fake tensors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 1500.0


def start(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", module, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def faults() -> dict[str, Any]:
    done = start("tests.functional.cuda_faults")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


WAITS = {
    "item": ["value read"],
    "truth": ["value read"],
    "cpu": ["copy from cuda to cpu"],
    "to": ["copy from cuda to cpu"],
    "made elsewhere": ["copy from cpu to cuda"],
    "asynchronous, not pinned": ["copy from cpu to cuda of memory that is not pinned"],
    "asynchronous, pinned": [],
    "copied in place": ["copy from cuda to cpu"],
    "copied in place, asynchronous": [],
    "device": ["wait for the device"],
    "stream": ["wait for a stream"],
    "event": ["wait for an event"],
    "filled by a mask": [],
    "on the device": [],
    "on the host": [],
}


@pytest.mark.parametrize("name", list(WAITS))
def test_waits_of_the_host_are_counted(faults: dict[str, Any], name: str) -> None:
    assert faults["waits"][name] == WAITS[name]


def test_mixed_devices_are_an_error(faults: dict[str, Any]) -> None:
    assert faults["mixed"] == "FakeTensorDeviceMismatchError"
    assert faults["gradients stay"]


@pytest.mark.parametrize("name", ["receive", "send", "reduce"])
def test_tensors_of_transfers_need_their_wait(faults: dict[str, Any], name: str) -> None:
    assert faults[name] == ["", "StreamOrderError"]


PLANS = ("1f1b, mixed TP in a stage", "ministage, all offloaded", "slimpipe exchange, vocabulary, offload")


def iterations(out: Path, *words: str) -> dict[str, Any]:
    done = start("benchmarks.cuda_iterations", *words, "--json", str(out))
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text("utf-8")) | {"exit_code": done.returncode}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return iterations(tmp_path_factory.mktemp("cuda") / "found.json", "--ranks", "0", "--keep-waits", "--only", *PLANS)


def test_iterations_mix_no_devices_and_keep_the_order_of_streams(found: dict[str, Any]) -> None:
    assert found["failed"] == [], [case for case in found["cases"] if case.get("error")]
    assert found["runs"] == len(PLANS) + 1  # one of them over host memory as well


def test_the_host_waits_for_nothing_inside_operations(found: dict[str, Any]) -> None:
    assert found["waits_in_operations"] == 0, found["cases"]
    assert 0 < found["staged_waits"] <= found["staged_transfers"]


@pytest.mark.full
def test_every_wait_between_streams_is_needed(tmp_path: Path) -> None:
    """A line of ours that waits is left out: the run must notice, wherever it is."""
    found = iterations(tmp_path / "found.json", "--ranks", "0", "--only", *PLANS)
    assert found["missing_waits"] > 8
    assert found["missing_waits_unnoticed"] == []
    assert found["exit_code"] == 0


@pytest.mark.full
def test_experts_of_a_rank_with_tensor_parallelism(tmp_path: Path) -> None:
    found = iterations(tmp_path / "found.json", "--ranks", "1", "--only", "1f1b, experts, mixed TP in a stage")
    assert found["failed"] == [], [case for case in found["cases"] if case.get("error")]
    assert found["waits_in_operations"] == 0 < found["waits_for_experts"]
