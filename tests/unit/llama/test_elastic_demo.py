"""The elastic demo's plans, report and picture; ``make demo-elastic`` is the rest."""

from pathlib import Path

import pytest

from examples.llama.elastic_demo import FULL, NODES, QUICK, Size, Step, draw, plans_of, report_of
from examples.llama.job import JobError
from megatron_het.elastic.pool import Process, assign
from megatron_het.features.registry import check_plan_alone

CHANGES = [{"why": "start", "planned": 0.0}, {"why": "1 rank was lost", "planned": 23.0}]
BACK = {"why": "a node joins", "planned": 40.0}
STEPS = [Step(10.0, 1, 4.0), Step(12.0, 2, 3.9), Step(30.0, 3, 3.8), Step(45.0, 4, 3.7), Step(46.0, 4, 3.7)]


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_without_the_first_node_the_second_plan_runs(size: Size) -> None:
    first, second = plans_of(size.model)
    check_plan_alone(first)
    check_plan_alone(second)
    pool = [Process(i, name, device) for i, (name, device) in enumerate(NODES)]
    every, some = assign(first, pool), assign(second, pool[1:])
    assert every is not None and every[0] == 0 and sorted(every) == [0, 1, 2]
    assert assign(first, pool[1:]) is None and some is not None and sorted(some) == [1, 2]


def test_the_report_counts_from_the_first_iteration() -> None:
    report = report_of(STEPS, [*CHANGES, BACK], 22.5, FULL)
    assert (report["killed_s"], report["goes_on_s"], report["back_s"]) == (12.5, 20.0, 35.0)
    assert report["repeated_iterations"] == 1
    tokens = 12 * FULL.model.seq_length
    assert report["tokens_per_s"] == [tokens / 2, tokens / 15, tokens]
    assert report["tokens_per_iteration"] == 12 * FULL.model.seq_length


def test_a_worker_that_did_not_come_back_is_an_error() -> None:
    with pytest.raises(JobError, match="come back once before the end"):
        report_of(STEPS, CHANGES, 22.5, FULL)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(report_of(STEPS, [*CHANGES, BACK], 22.5, FULL), tmp_path / "elastic.svg")
    text = (tmp_path / "elastic.svg").read_text()
    assert text.startswith("<?xml") and "seconds since the first iteration" in text
