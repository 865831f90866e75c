"""The picture of docs/planner.md: what it claims is what the simulator says."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.mixed_cluster import EVEN, MICROBATCHES, PLANNED, SPEEDS, main, simulated
from megatron_het.schedule.view.visualize import draw_timelines

ROOT = Path(__file__).resolve().parents[3]


def test_the_plan_is_faster_and_both_do_the_same_work(tmp_path: Path) -> None:
    even, planned = simulated(EVEN), simulated(PLANNED)
    assert sum(EVEN) == sum(PLANNED)
    assert planned.makespan_s < even.makespan_s
    for result, layers in ((even, EVEN), (planned, PLANNED)):  # 3 s per layer and microbatch at speed 1, two replicas
        busy = [0.0] * 4
        for event in result.events():
            if event.stream == "compute":
                busy[event.device] += event.end_s - event.start_s
        per_replica = [3 * layers[d // 2] / SPEEDS[d] * MICROBATCHES / 2 for d in range(4)]
        assert busy == pytest.approx(per_replica)


def test_the_committed_picture_is_up_to_date(tmp_path: Path) -> None:
    assert main([str(tmp_path / "new.svg")]) == 0
    titles = [f"{simulated(layers).makespan_s:.0f} s per iteration" for layers in (EVEN, PLANNED)]
    new, committed = (
        (folder / name).read_text()
        for folder, name in ((tmp_path, "new.svg"), (ROOT / "docs" / "images", "mixed-cluster.svg"))
    )
    for title in titles:
        assert title in new and title in committed


def test_a_picture_needs_a_known_ending(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must end in .svg"):
        draw_timelines({"one": simulated(EVEN)}, tmp_path / "x.bmp")
    assert main([]) == 2
