"""Which processes become which ranks, and what a command line that cannot work says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic.__main__ import main
from megatron_het.elastic.pool import GivenFirst, GivenPlans, NoPlanError, Process, assign
from megatron_het.elastic.searched import limited
from megatron_het.plan import Plan, save_plan
from testing.cases import build_plan


def plan(sizes: list[list[int]], **more: Any) -> Plan:
    layers = [5 // len(sizes)] * len(sizes)
    layers[-1] += 5 - sum(layers)
    return build_plan(sizes, layers, random.Random(0), even_routing=False, **more)


def pool(*nodes: str) -> list[Process]:
    return [Process(i + 1, node) for i, node in enumerate(nodes)]


def test_a_tensor_parallel_group_stays_inside_of_a_node():
    processes = pool("a", "b", "b", "a", "a")
    found = assign(plan([[1], [2, 2]]), processes)
    assert found is not None and len(set(found)) == 5
    node = {p.number: p.node for p in processes}
    assert node[found[1]] == node[found[2]] and node[found[3]] == node[found[4]]
    assert assign(plan([[1], [2]]), pool("a", "b", "c")) is None


def test_kinds_count_where_everybody_has_one():
    base = plan([[1], [1]])
    document = base.to_json()
    document["stages"][0]["replicas"][0]["device"] = "new"
    document["stages"][1]["replicas"][0]["device"] = "old"
    kinds = Plan.from_json(document)
    processes = [Process(1, "a", "old"), Process(2, "b", "new")]
    assert assign(kinds, processes) == (2, 1)
    assert assign(kinds, [Process(1, "a", "old"), Process(2, "b", "old")]) is None
    assert assign(base, processes) == (1, 2)


def test_the_best_plan_that_fits():
    plans = GivenPlans([plan([[1], [1, 1]]), plan([[1], [1]])])
    assert plans.plan(pool("a", "b", "c"))[0].world_size == 3
    assert plans.plan(pool("a", "b"))[0].world_size == 2
    with pytest.raises(NoPlanError, match="3, 2 ranks"):
        plans.plan(pool("a"))
    assert plans.is_better(plan([[1]]), plan([[1], [1], [1]]))  # the one that runs is of another list


def test_plans_are_searched_where_no_given_one_fits():
    given, other = plan([[1], [1, 1]]), plan([[1]])

    class Searches(GivenPlans):
        prepared: Any = ()

        def prepare(self, pools: Any) -> None:
            self.prepared = pools

        def is_ready(self, pool: Any) -> bool:
            return False

    searches = Searches([other])
    both = GivenFirst([given], searches)
    assert both.plan(pool("a", "b", "c", "d"))[0] is given and both.is_ready(pool("a", "b", "c"))
    assert both.plan(pool("a", "b"))[0] is other and not both.is_ready(pool("a", "b"))
    both.prepare([pool("a", "b", "c"), pool("a", "b")])
    assert searches.prepared == [pool("a", "b")]
    assert both.is_better(given, other)


def test_a_cluster_file_for_the_nodes_that_are_there():
    cluster = {"nodes": [{"gpu": "A", "count": 4, "gpus_per_node": 2, "hosts": ["h"]}, {"gpu": "B", "count": 1}]}
    there = [Process(1, "a", "A"), Process(2, "a", "A"), Process(3, "b", "A"), Process(4, "b", "A")]
    assert limited(cluster, there)["nodes"] == [{"gpu": "A", "count": 2, "gpus_per_node": 2}]
    with pytest.raises(NoPlanError, match="which has A, B"):
        limited(cluster, [Process(1, "a", "C")])


BAD = {
    "address": (["--controller", "nowhere", "--", "--lr", "1"], "HOST:PORT"),
    "no flags": (["--controller", "127.0.0.1:29400"], "after --"),
    "a plan among the flags": (["--controller", "127.0.0.1:29400", "--", "--het-plan", "x"], "--plans"),
    "no plans": (["--controller", "127.0.0.1:29400", "--start-controller", "--", "--lr", "1"], "--cluster"),
    "no token": (["--controller", "127.0.0.1:29400", "--", "--lr", "1"], "token"),
    "bound": (["--controller", "127.0.0.1:29400", "--lost-s", "0", "--", "--lr", "1"], "--lost-s"),
    "endless bound": (["--controller", "127.0.0.1:29400", "--timeout-s", "inf", "--", "--lr", "1"], "--timeout-s inf"),
    "node": (["--controller", "127.0.0.1:29400", "--node", "../a", "--", "--lr", "1"], "--node '../a'"),
    "plans of two trainings": (
        ["--controller", "127.0.0.1:29400", "--controller-only", "--plans", "a.json", "b.json"],
        "global_batch_size",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_one_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    save_plan(plan([[1], [1]]), "a.json")
    other = json.loads(Path("a.json").read_text())
    other["training"]["global_batch_size"] += 1
    for stage in other["stages"]:
        stage["replicas"][0]["microbatches"].append(other["training"]["global_batch_size"] - 1)
    Path("b.json").write_text(json.dumps(other))
    words, expected = BAD[name]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("het-run: ") and expected in error and "Traceback" not in error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "b.json"], "nothing is started or written"
