"""Costs of a plan's operations are added while there is time for them."""

import pytest
import yaml

from megatron_het.plan import load_plan
from tests.unit.planner.emit_plans import WIDE
from tools.planner.__main__ import main
from tools.planner.report import analysis as module

CLUSTER = {"nodes": [{"gpu": "A100-80", "count": 2, "gpus_per_node": 4, "network_bytes_per_s": 1e10}]}


@pytest.mark.parametrize("gpus", [8, 1])
def test_costs_that_would_take_too_long_are_left_out(gpus, tmp_path, capsys, monkeypatch):
    """Those of a single stage too, which is not simulated."""
    cluster = {"nodes": [{**CLUSTER["nodes"][0], "count": max(1, gpus // 4), "gpus_per_node": min(4, gpus)}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(cluster))
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(WIDE))
    out = tmp_path / "plan.json"
    words = ["plan", "--cluster", str(tmp_path / "c.yaml"), "--model", str(tmp_path / "m.yaml"), "--out", str(out)]
    words += ["--schedules", "1f1b", "--limit-s", "30"]
    assert main(words) == 0
    assert load_plan(out).predicted.costs is not None
    assert "does not watch itself" not in capsys.readouterr().out
    monkeypatch.setattr(module, "PRICING_S", 100.0)
    assert main(words) == 0
    assert load_plan(out).predicted.costs is None
    assert "does not watch itself" in " ".join(capsys.readouterr().out.split())
