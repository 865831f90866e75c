"""``init`` asks a real Slurm: its cluster file can be planned for as it is."""

import json
from pathlib import Path

import pytest

from tests.functional.slurm_cluster import SlurmCluster, missing
from tools.planner.__main__ import main
from tools.planner.inputs.cluster import load_cluster

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is there")]


def test_init_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["gpu:a100:4", "gpu:a100:4", "gpu:t4:2", ""]
    with SlurmCluster(tmp_path / "slurm", ["a100_80gb", "a100_80gb", "old", "head"], gpus=kinds) as slurm:
        monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
        assert main(["init", "--from", "slurm", "--out", str(tmp_path / "c.yaml"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["source"] == "sinfo" and said["unknown"] == []
    big, small = load_cluster(tmp_path / "c.yaml").nodes
    assert (big.gpu, big.count, big.gpus_per_node) == ("A100-80", 2, 4)
    assert big.hosts == ("127.0.0.11", "127.0.0.12")
    assert (big.slurm.partition, big.slurm.gres, big.slurm.constraint) == ("all", "gpu:a100", "a100_80gb")
    assert big.slurm.cpus == 4
    assert (small.gpu, small.count, small.gpus_per_node) == ("T4", 1, 2)
