"""Plans: strict reading, checks, placement, files."""

import contextlib
import copy
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import (
    Cut,
    Location,
    ModelShape,
    Placement,
    Plan,
    PlanError,
    Replica,
    ScheduleSpec,
    Stage,
    TrainingShape,
    load_plan,
    plan_hash,
    save_plan,
    topology_hash,
)
from megatron_het.plan import validate as io
from megatron_het.plan.placement import route, shares, stage_rows
from megatron_het.plan.validate import check_plan


def document() -> dict[str, Any]:
    """A valid plan: stage 0 of TP 2, stage 1 of a TP 2 and a TP 1 replica."""
    return {
        "format": "megatron_het.plan",
        "version": 1,
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "seq_length": 32,
        },
        "training": {"micro_batch_size": 2, "global_batch_size": 8, "sequence_parallel": True},
        "stages": [
            {"layers": [1], "replicas": [{"ranks": [0, 1], "microbatches": [0, 1, 2, 3]}]},
            {
                "layers": [3],
                "replicas": [
                    {"ranks": [2, 3], "microbatches": [0, 1, 3]},
                    {"ranks": [4], "microbatches": [2], "device": "old", "speed": 0.5},
                ],
            },
        ],
    }


def read(body: dict[str, Any]) -> Plan:
    plan = Plan.from_json(body)
    check_plan(plan)
    return plan


def test_a_plan_of_very_many_ranks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read(document())
    save_plan(plan, tmp_path / "lines.json")
    monkeypatch.setattr(io, "MOST_INDENTED", plan.world_size - 1)
    save_plan(plan, tmp_path / "line.json")
    counts = [(tmp_path / name).read_text().count("\n") for name in ("lines.json", "line.json")]
    assert counts[0] > 20 and counts[1] == 1
    assert load_plan(tmp_path / "line.json") == plan


def test_placement() -> None:
    placement = Placement(read(document()))
    assert placement.world_size == 5
    assert placement.locate(3) == Location(1, 0, 1)
    assert placement.route == ((0, 0, 0, 0), (0, 0, 1, 0))
    assert placement.classes(1) == [Cut(2), Cut(1)]
    assert placement.is_mixed(1) and not placement.is_mixed(0)
    assert placement.class_ranks(1, Cut(2), 1) == [3]
    assert placement.max_tp() == 2


def test_replicas_of_one_tp_and_different_ep_are_of_different_classes(tmp_path: Path) -> None:
    body = document()
    body["stages"][1]["replicas"] = [
        {"ranks": [2, 3], "microbatches": [0, 1, 3]},
        {"ranks": [4, 5], "microbatches": [2], "ep": 2},
    ]
    plan = read(body)
    placement = Placement(plan)
    assert placement.classes(1) == [Cut(2), Cut(2, 2)] and placement.is_mixed(1)
    assert [placement.class_ranks(1, cut, 1) for cut in placement.classes(1)] == [[3], [5]]
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    del body["stages"][1]["replicas"][1]["ep"]
    assert topology_hash(plan) != topology_hash(read(body))


def unequal(sizes: list[int]) -> dict[str, Any]:
    """The plan with four microbatches of other sizes."""
    body = document()
    body["training"] |= {"micro_batch_size": 4, "global_batch_size": 9, "micro_batch_sizes": sizes}
    return body


def test_rank_0_reads_data_and_the_last_rank_logs() -> None:
    body = document()
    body["stages"][0]["replicas"][0]["ranks"] = [1, 2]
    body["stages"][1]["replicas"][0]["ranks"] = [0, 3]
    with pytest.raises(PlanError, match="rank 0 must be the first rank"):
        read(body)
    body = document()
    body["stages"].reverse()
    ranks = [[0, 1], [2], [3, 4]]
    body["stages"][0]["replicas"][0]["ranks"], body["stages"][0]["replicas"][1]["ranks"] = ranks[:2]
    body["stages"][1]["replicas"][0]["ranks"] = ranks[2]
    assert read(body).world_size == 5


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [([1, 2], [3, 4], True), ([1, 3], [2, 4], True), ([2, 3], [1, 4], False), ([1, 4], [2, 3], False)],
)
def test_replicas_of_equal_tp_must_not_cross(first: list[int], second: list[int], fits: bool) -> None:
    """The n-th replica has the n-th shard of Megatron's distributed optimizer at every TP rank."""
    body = document()
    body["stages"] = [
        {"layers": [1], "replicas": [{"ranks": [0], "microbatches": [0, 1, 2, 3]}]},
        {
            "layers": [2],
            "replicas": [{"ranks": first, "microbatches": [0, 1]}, {"ranks": second, "microbatches": [2, 3]}],
        },
        {"layers": [1], "replicas": [{"ranks": [5], "microbatches": [0, 1, 2, 3]}]},
    ]
    if fits:
        assert read(body).world_size == 6
    else:
        with pytest.raises(PlanError, match=r"stages\[1\].replicas\[1\].ranks = .*crosses replica 0"):
            read(body)


def test_a_bad_plan_does_not_overwrite_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = read(document())
    save_plan(plan, path)
    before = path.read_bytes()
    bad = dataclasses.replace(plan, stages=plan.stages[:1])
    with pytest.raises(PlanError):
        save_plan(bad, path)
    assert path.read_bytes() == before


def test_hashes_see_what_runs_and_nothing_else() -> None:
    plan = read(document())
    assert plan_hash(dataclasses.replace(plan, notes="x")) == plan_hash(plan)
    body = document()
    body["stages"][1]["replicas"][0]["microbatches"] = [0, 2, 3]
    body["stages"][1]["replicas"][1]["microbatches"] = [1]
    rerouted = read(body)
    assert plan_hash(rerouted) != plan_hash(plan)
    assert topology_hash(rerouted) == topology_hash(plan)
    body["stages"][0]["layers"], body["stages"][1]["layers"] = [2], [2]
    assert topology_hash(read(body)) != topology_hash(plan)


def test_damaged_documents_never_raise_anything_but_a_plan_error() -> None:
    chance = random.Random(0)
    values: list[Any] = [None, -1, 0, 3, 10**9, 1.5, "x", [], {}, [0], [[0]], True]
    for _ in range(2000):
        body = copy.deepcopy(document())
        node: Any = body
        while isinstance(node, dict | list) and node:
            key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], dict | list) or chance.random() < 0.3:
                node[key] = chance.choice(values)
                break
            node = node[key]
        with contextlib.suppress(PlanError):
            read(body)


def test_microbatches_may_differ_in_size(tmp_path: Path) -> None:
    plan = read(unequal([4, 1, 1, 3]))
    training = plan.training
    assert plan.num_microbatches == 4 and [training.sequences(m) for m in range(4)] == [4, 1, 1, 3]
    assert (training.reading_unit, training.batches_of_microbatches) == (1, (4, 1, 1, 3))
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    equal = read(document()).training
    assert (equal.reading_unit, equal.batches_of_microbatches, equal.sequences(3)) == (2, (1,) * 4, 2)
    assert "micro_batch_sizes" not in json.dumps(read(document()).to_json())


# Zorse's routing of microbatches between stages of unequal replicas.


@pytest.mark.parametrize("total", [3, 4, 7, 12])
def test_shares_are_the_best_there_are(total: int) -> None:
    seconds = [1.0, 2.5, 1.7]
    best = min(
        max(count * second for count, second in zip((a, b, total - a - b), seconds, strict=True))
        for a in range(1, total - 1)
        for b in range(1, total - a)
    )
    found = shares(seconds, total)
    assert sum(found) == total
    assert max(c * s for c, s in zip(found, seconds, strict=True)) == pytest.approx(best)


def test_the_first_completed_goes_to_the_replica_with_the_most_work_left() -> None:
    # Stage 0 completes 0, 1, 2, ... in order.  Stage 1: remaining work is 6, 5, ..., 1 on the fast
    # replica and 6, 3 on the slow one.
    first, second = route([[1.0], [1.0, 3.0]], 8)
    assert first == [tuple(range(8))]
    assert second == [(0, 2, 3, 4, 6, 7), (1, 5)]


def test_completion_times_decide_not_microbatch_numbers() -> None:
    # Replica 1 of stage 0 is slow, so its microbatches reach stage 1 late.
    first, second = route([[1.0, 10.0], [1.0, 1.0]], 4, counts=[[2, 2], [3, 1]])
    assert first == [(2, 3), (0, 1)]
    # Completed: 2 (1 s), 3 (2 s), 0 (10 s), 1 (20 s); work left in stage 1: 3, 2, 1 and 1.
    assert second == [(0, 2, 3), (1,)]


def test_bad_times_and_counts_are_refused() -> None:
    with pytest.raises(PlanError, match="positive"):
        shares([1.0, 0.0], 4)
    with pytest.raises(PlanError, match="fewer"):
        shares([1.0, 1.0, 1.0], 2)
    with pytest.raises(PlanError, match="add up"):
        route([[1.0, 1.0]], 4, counts=[[1, 2]])


# How many rows of a split vocabulary every stage has.

MODEL = ModelShape(3, 64, 8, 4, 32)


def plan(tp: tuple[int, ...], shares: Any = None, **parameters: Any) -> Plan:
    stages, first = [], 0
    for size in tp:
        stages.append(Stage((1,), (Replica(tuple(range(first, first + size)), (0, 1)),)))
        first += size
    if shares is not None:
        parameters["vocabulary_shares"] = shares
    return Plan(MODEL, TrainingShape(1, 2), tuple(stages), ScheduleSpec("1f1b", parameters))


def test_equal_without_shares() -> None:
    assert stage_rows(plan((1, 2)), 64) == (32, 32)
    assert stage_rows(plan((1, 2)), 66) == (34, 32)  # 33 pairs of rows
    with pytest.raises(ValueError, match="6 rows has 3 equal parts that 2 TP ranks divide, for 4 stages"):
        stage_rows(plan((1, 2, 2, 1)), 6)


def test_as_the_shares_say() -> None:
    assert stage_rows(plan((1, 1), [3, 1]), 64) == (48, 16)
    assert stage_rows(plan((1, 1, 1), [1, 1, 1]), 64) == (22, 21, 21)  # 64 does not divide by 3
    assert stage_rows(plan((1, 2), [1000, 1]), 64) == (62, 2)  # at least a row for each rank
    assert stage_rows(plan((1, 1), [2, 1]), 50304) == (33536, 16768)
    with pytest.raises(ValueError, match="65 rows has 0 equal parts that 2 TP ranks divide"):
        stage_rows(plan((1, 2), [2, 1]), 65)


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 50)), min_size=1, max_size=6), st.integers(2, 3000)
)
def test_all_rows_are_held_once(stages: list[tuple[int, int]], multiple: int) -> None:
    rows = 24 * multiple
    found = stage_rows(plan(tuple(tp for tp, _ in stages), [share for _, share in stages]), rows)
    assert sum(found) == rows and min(found) > 0
    assert all(held % tp == 0 for held, (tp, _) in zip(found, stages, strict=True))


@pytest.mark.parametrize("shares", [[1], [1, 0], [1, True], [1.5, 1], "1,2", [1, 2, 3], [[1], 1]])
def test_shares_that_mean_nothing(shares: Any) -> None:
    with pytest.raises(PlanError, match="vocabulary_shares.*one per stage"):
        check_plan_alone(plan((1, 1), shares, vocabulary=True))


def test_shares_of_a_vocabulary_that_is_whole() -> None:
    with pytest.raises(PlanError, match="vocabulary_shares.*option of the split vocabulary"):
        check_plan_alone(plan((1, 1), [1, 2]))
    check_plan_alone(plan((1, 1), [1, 2], vocabulary=True))
