"""``--limit-s`` counts from the start of the command, not from that of the search."""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.planner_cases import with_catalog
from benchmarks.planner_pools import random_pool
from tools.planner.__main__ import main
from tools.planner.cli import commands
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.report.tables import MOST_ROWS, summary_tables
from tools.planner.search import finish, limit, methods, thorough
from tools.planner.search.auto import search_auto
from tools.planner.search.limit import AT_LEAST_S, WRITING_S, cpu_limit, each_s, left_s, searching_s
from tools.planner.search.outcome import Goal, Outcome, Progress

CLUSTER = {"nodes": [{"gpu": "A100-80", "count": 1, "gpus_per_node": 4, "network_bytes_per_s": 1e10}]}
SHAPE = {"num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8}
MODEL = SHAPE | {"vocab_size": 32000, "seq_length": 512, "global_batch_size": 16}
Limits = tuple[list[str], list[float]]


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Words of a ``plan`` command, and the seconds that its search and then the pricing of its plan were given."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(MODEL))
    given: list[float] = []
    search, complete = commands.search, commands.complete

    def searched(method: str, estimator: Any, goal: Any, progress: Progress, *rest: Any) -> Any:
        given.append(progress.limit_s)
        return search(method, estimator, goal, progress, *rest)

    def completed(estimator: Any, found: Any, notes: str, seconds: float) -> Any:
        given.append(seconds)
        return complete(estimator, found, notes, seconds)

    monkeypatch.setattr(commands, "search", searched)
    monkeypatch.setattr(commands, "complete", completed)
    words = ["plan", "--cluster", str(tmp_path / "c.yaml"), "--model", str(tmp_path / "m.yaml")]
    words += ["--schedules", "1f1b", "--out", str(tmp_path / "plan.json")]
    return words, given


def test_the_time_before_the_search_counts(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has had some CPU time when the command begins; a process of the command had its imports."""
    words, given = limits
    before = time.process_time()
    monkeypatch.setattr(sys, "argv", ["het-plan", *words, "--limit-s", "500"])
    assert main() == 0
    after = time.process_time()
    searching, pricing = given
    assert 500 - after <= searching <= 500 - before
    assert 500 - after <= pricing <= searching


def test_a_caller_in_the_same_process_has_the_whole_limit(limits: Limits) -> None:
    words, given = limits
    before = time.process_time()
    assert main([*words, "--limit-s", "500"]) == 0
    took = time.process_time() - before
    assert 500 - took <= given[1] <= given[0] < 500


def options_after(spent_s: float, limit_s: float) -> argparse.Namespace:
    return argparse.Namespace(limit_s=limit_s, began_s=time.process_time() - spent_s)


def test_a_search_has_a_floor() -> None:
    assert left_s(options_after(3.0, 10.0)) == pytest.approx(7.0, abs=0.1)
    assert left_s(options_after(3.0, 2.0)) == AT_LEAST_S
    assert left_s(options_after(3.0, 0.25)) == 0.25
    assert left_s(options_after(3.0, 2.0), used_s=0.75) == pytest.approx(AT_LEAST_S - 0.75)
    assert left_s(options_after(3.0, 2.0), used_s=5.0) == 0.0
    assert each_s(options_after(3.0, 23.0), 4) == pytest.approx(5.0, abs=0.1)
    assert each_s(options_after(3.0, 5.0), 4) == AT_LEAST_S


def test_the_error_names_the_option_as_it_was_given() -> None:
    with pytest.raises(PlannerError, match="--limit-s = 4") as caught, cpu_limit(Progress(limit_s=0.01), 4.0):
        while True:
            time.process_time()
    assert "from the start of the command" in str(caught.value)


@pytest.fixture
def small() -> Any:
    cluster = Cluster(nodes=(NodeGroup(gpu="A100-80", count=2, gpus_per_node=1),))
    return with_catalog(cluster, Model(**MODEL))  # type: ignore[arg-type]


def ring(*_: Any) -> None:
    signal.raise_signal(signal.SIGPROF)


def test_what_was_found_stands_whenever_the_time_is_over(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of the search and its return, and after that."""
    monkeypatch.setattr(methods, "choose", ring)
    progress = Progress(limit_s=500.0)
    with cpu_limit(progress):
        outcome = methods.search("auto", small, Goal(), progress)
        ring()
    assert outcome.best is not None and outcome.interrupted


def test_a_search_that_is_stopped_while_it_finishes_has_its_plans(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told once, and has had a quarter of its time more."""
    confirm = finish.confirm

    def stopped(*given: Any) -> Any:
        ring()
        ring()
        return confirm(*given)

    monkeypatch.setattr(finish, "confirm", stopped)
    progress = Progress(limit_s=500.0)
    with cpu_limit(progress):
        outcome = methods.search("auto", small, Goal(), progress)
    assert outcome.best is not None and outcome.interrupted


def test_large_clusters_leave_time_to_write_the_plan(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search has what is left when the plan of all its GPUs is put together and written."""
    assert searching_s(options_after(1.0, 10.0), 8) == pytest.approx(9.0, abs=0.1)
    assert searching_s(options_after(1.0, 10.0), 100_000) == pytest.approx(9.0 - 100_000 * WRITING_S, abs=0.1)
    assert searching_s(options_after(1.0, 4.0), 1_000_000) == pytest.approx(1.0, abs=0.1)
    words, given = limits
    monkeypatch.setattr(limit, "WRITING_S", 100.0)
    before = time.process_time()
    assert main([*words, "--limit-s", "1000"]) == 0
    took = time.process_time() - before
    assert 1000 - 4 * 100 - took <= given[0] <= 600


def test_a_search_that_was_stopped_before_its_first_plan_names_the_limit(
    limits: Limits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not the figures of the GPUs, none of which were looked up."""
    stopped = Outcome("auto", interrupted=True)
    monkeypatch.setattr(commands, "search", lambda *_: stopped)
    assert main([*limits[0], "--limit-s", "4"]) == 2
    assert "--limit-s = 4.0: no plan was found in this time" in capsys.readouterr().err


def test_thousands_of_stages_and_kinds_are_not_all_shown() -> None:
    """To lay out such a table takes longer than many a search."""
    row = {"stage": 0, "gpu": "A100-80", "zone": "z", "tp": 1, "replicas": 1, "layers": 1, "busy_s": 1.0}
    row |= {"microbatches_per_replica": 1, "memory_bytes": {"weights": 1.0}, "total_bytes": 1.0, "fits": True}
    row |= {"capacity_bytes": 2.0, "state_share": None}
    names = ("simulated_s", "model_flops_utilisation", "blocking_transfers_s", "offload")
    body: dict[str, Any] = dict.fromkeys(names) | {"by_cause_s": {}, "extras": [], "not_run": [], "host_memory": []}
    body |= {"catalog_prices": {}, "idle_gpus": {}, "uncertainty_of": {"runs": 1, "of": "runs"}}
    body |= {"gpus_without_price": [], "model_notes": [], "schedule": "1f1b", "recompute": "none"}
    figures = ("closed_form_s", "micro_batch_size", "zero_stage", "chunks", "slices", "iteration_s", "uncertainty")
    figures += ("tokens_per_s", "model_tflops", "usd_per_iteration", "usd_per_billion_tokens")
    body |= dict.fromkeys((*figures, "egress_bytes_per_iteration"), 1) | {"stages": [row] * 5000}
    *_, where, memory, more = summary_tables(body)
    assert where.row_count == memory.row_count == MOST_ROWS
    assert more == f"and {5000 - MOST_ROWS} rows more: --json prints all"
    body["stages"] = [row] * MOST_ROWS
    assert summary_tables(body)[-1].row_count == MOST_ROWS


def test_a_search_that_has_no_time_left_evaluates_what_it_has_sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On clusters of hundreds of pools a sketch takes a part of the time that a search has after its limit."""
    looked_at: list[int] = []
    seeds = thorough.seeds

    def counted(*words: Any) -> Iterator[Any]:
        looked_at.append(0)
        for seed in seeds(*words):
            looked_at[-1] += 1
            yield seed

    monkeypatch.setattr(thorough, "seeds", counted)
    cluster, model = random_pool(0)
    found = search_auto(with_catalog(cluster, model), Goal(), Progress(limit_s=0.0))
    assert found.best is not None
    assert looked_at[0] == 1
