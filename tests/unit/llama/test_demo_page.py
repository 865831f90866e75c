"""The page that the demo writes: the report's figures, predicted above measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from examples.llama.demo import QUICK, Demo
from examples.llama.page import demo_page
from examples.llama.planning import best, devices_in_rank_order, to_plan
from examples.llama.report import Trial
from examples.llama.screen import Screen
from megatron_het.plan import Placement, TrainingShape
from tests.unit.llama.test_demo_planning import DEVICES, MODEL, SPEEDS
from tools.planner.page.html import render

_BYTES = {"parameter_bytes": 10, "gradient_bytes": 20, "optimizer_bytes": 30, "activation_bytes": 40}


def events_of(count: int) -> list[dict[str, object]]:
    """Forwards of 0.9 ms, one every millisecond, and as many waits."""
    return [
        {
            "ph": "X",
            "tid": tid,
            "ts": 1e3 * m,
            "dur": 900.0,
            "args": {"kind": "FORWARD", "microbatch": m, "slice": 0, "chunk": 0},
        }
        for m in range(count)
        for tid in (0, 1)
    ]


def test_demo_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = best(DEVICES, SPEEDS, 6, 6)[0]
    plan = to_plan(chosen, SPEEDS, MODEL, TrainingShape(1, 6), "n")
    order = devices_in_rank_order(chosen, DEVICES)
    placement = Placement(plan)
    rows = []
    for rank, device in enumerate(order):
        where = placement.locate(rank)
        count = len(placement.replica(where.stage, where.replica).microbatches)
        rows.append(
            {
                "rank": rank,
                "device": device.name,
                "stage": where.stage,
                "layers": sum(plan.stages[where.stage].layers),
                "microbatches": count,
                "predicted_compute_s": 0.1,
                "measured_compute_s": 0.2,
                "predicted_memory": _BYTES,
                "predicted_memory_bytes": 100,
                "measured_memory_bytes": 123 << 20,
            }
        )
        (tmp_path / f"trace-rank-{rank}.json").write_text(json.dumps({"traceEvents": events_of(count)}))
    result = {
        "plan": "the plan",
        "even_split": "the even split",
        "validation_loss": 2.5,
        "predicted_iteration_s": chosen.iteration_s,
        "measured_iteration_s": 0.5,
        "even_split_iteration_s": 0.75,
        "even_split_predicted_iteration_s": 0.7,
        "speedup_over_even_split": 1.5,
        "predicted_bubble_fraction": 0.1,
        "measured_bubble_fraction": 0.2,
        "per_rank": rows,
    }
    page = demo_page(result, Trial(plan, chosen), order, tmp_path)
    predicted, measured = page["timelines"]
    assert predicted["makespan_s"] == chosen.iteration_s
    microbatches = sum(r["microbatches"] for r in rows)
    assert len(predicted["events"]["lane"]) == 2 * microbatches and len(measured["events"]["lane"]) == microbatches
    assert measured["makespan_s"] == pytest.approx((max(r["microbatches"] for r in rows) - 1) * 1e-3 + 0.9e-3)
    held = [gpu for node in page["cluster"]["pools"][0]["nodes"] for gpu in node["gpus"]]
    assert sorted(rank for _, _, rank in held) == list(range(len(DEVICES)))
    assert {d.core for d in DEVICES} == {int(n["name"].split()[1]) for n in page["cluster"]["pools"][0]["nodes"]}
    text = render(page)
    assert "123 MiB" in text and "the even split" in text and "500 ms" in text
    demo = Demo(argparse.Namespace(out=tmp_path / "out"), QUICK, Screen())
    demo.out.mkdir()
    demo._finish(result | {"losses": [[1, 5.0], [2, 4.0]], "elapsed_s": 1.0}, Trial(plan, chosen), order)
    assert "report.html" in capsys.readouterr().out and "123 MiB" in (demo.out / "report.html").read_text()
    (tmp_path / "trace-rank-0.json").unlink()
    assert len(demo_page(result, Trial(plan, chosen), order, tmp_path)["timelines"]) == 1
