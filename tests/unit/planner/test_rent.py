"""``het-plan rent``: the ladder, the rung that is chosen, interruptions, and what is refused."""

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.planner.emit_plans import MIDDLE, answer
from tools.planner.__main__ import main
from tools.planner.inputs.cluster import load_cluster
from tools.planner.replay import command, rent
from tools.planner.search import methods
from tools.planner.search.outcome import Progress, SearchResult

Pools, Said, Patch = list[tuple[int, ...]], pytest.CaptureFixture[str], pytest.MonkeyPatch
NODES: list[dict[str, Any]] = [
    {"gpu": "A100-40", "count": 4, "gpus_per_node": 2, "usd_per_gpu_hour": 1.0},
    {"gpu": "A10G", "count": 2, "gpus_per_node": 2, "usd_per_gpu_hour": 1.0},
    {"gpu": "T4", "count": 1, "gpus_per_node": 2, "usd_per_gpu_hour": 1.0},
]
RATES = (3.0, 2.0, 0.0)  # iterations per second that a node of each group adds: 1.5, 1 and 0 for a USD per hour


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: Patch) -> Pools:
    """The pools that were searched; stands in for the search, with plans from two nodes on."""
    pools: Pools = []

    def search(_: Any, goal: Any, method: str, pool: tuple[int, ...], limit_s: float) -> command.PoolPlan:
        pools.append(pool)
        rate = sum(n * rate for n, rate in zip(pool, RATES))
        return command.PoolPlan(pool, 1 / rate if rate and sum(pool) > 1 else None, f"plan of {pool}")

    monkeypatch.setattr(command, "_search_pool", search)
    monkeypatch.setattr(rent.Ladder, "_least_s", lambda own, pool: 1e-9)
    _write(tmp_path, NODES)
    return pools


def _write(folder: Path, nodes: list[dict[str, Any]]) -> None:
    (folder / "c.yaml").write_text(yaml.safe_dump({"nodes": nodes}), encoding="utf-8")
    (folder / "m.yaml").write_text(yaml.safe_dump({**MIDDLE, "precision": "fp16"}), encoding="utf-8")


def _words(folder: Path, *more: str) -> list[str]:
    return ["rent", "--cluster", str(folder / "c.yaml"), "--model", str(folder / "m.yaml"), *more]


def test_what_brings_most_for_its_price_comes_first(searched: Pools, tmp_path: Path, capsys: Said) -> None:
    body = answer(capsys, _words(tmp_path))
    pools = [tuple(rung["nodes"]) for rung in body["rungs"]]
    assert pools == [(2, 0, 0), (3, 0, 0), (4, 0, 0), (4, 1, 0), (4, 2, 0)]  # no plan has one node; T4 bring nothing
    tokens = [rung["tokens_per_s"] for rung in body["rungs"]]
    assert tokens == pytest.approx([n * MIDDLE["seq_length"] * MIDDLE["global_batch_size"] for n in (6, 9, 12, 14, 16)])
    more = [rung["usd_per_billion_more_tokens"] for rung in body["rungs"]]
    assert more == sorted(more) and body["chosen"] in (0, 1, 2) and body["left"] == "1 node of 2 T4"
    assert len(searched) == len(set(searched))
    assert main(_words(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "no plan with 1 node of 2 T4 more was found to be faster" in text and "1: plan of (2, 0, 0)" in text


def test_nodes_that_a_plan_leaves_idle_are_given_back(
    searched: Pools, tmp_path: Path, capsys: Said, monkeypatch: Patch
) -> None:
    """Plans with A100 use no A10G, which were the cheaper ones to begin with."""

    def search(_: Any, goal: Any, method: str, pool: tuple[int, ...], limit_s: float) -> command.PoolPlan:
        used = (pool[0], 0, 0) if pool[0] else (0, pool[1], 0)
        return command.PoolPlan(pool, 1 / (5 * used[0] + 2 * used[1]) if any(used) else None, used=used)

    monkeypatch.setattr(command, "_search_pool", search)
    _write(tmp_path, [NODES[0] | {"usd_per_gpu_hour": 4.0}, *NODES[1:]])
    rungs = answer(capsys, _words(tmp_path))["rungs"]
    assert [rung["nodes"] for rung in rungs] == [[0, 1, 0], [0, 2, 0], [4, 0, 0]]
    assert rungs[-1]["added"] == "4 nodes of 2 A100-40, without 2 nodes of 2 A10G"
    assert rungs[-1]["usd_per_hour"] == pytest.approx(4 * 2 * 4.0)


def test_nodes_at_two_prices_are_told_apart(searched: Pools, tmp_path: Path, capsys: Said) -> None:
    _write(tmp_path, [NODES[0] | {"count": 2}, NODES[0] | {"count": 2, "usd_per_gpu_hour": 2.5}])
    added = [rung["added"] for rung in answer(capsys, _words(tmp_path))["rungs"]]
    assert added[0] == "2 nodes of 2 A100-40 at USD 1" and added[-1].endswith("of 2 A100-40 at USD 2.5")


def test_ctrl_c_ends_the_command(searched: Pools, tmp_path: Path, capsys: Said, monkeypatch: Patch) -> None:
    """In the search of the second rung, with the first one printed; in a search, which ends with what it has found."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    monkeypatch.setattr(rent.Ladder, "_next", lambda *_: signal.raise_signal(signal.SIGINT))
    body = answer(capsys, _words(tmp_path), code=130)
    assert len(body["rungs"]) == 1 and body["interrupted"]
    monkeypatch.setattr(methods, "search", lambda *_: SearchResult("auto", interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        methods.search_on("auto", *[None] * 2, Progress())  # type: ignore[arg-type]


def test_nodes_that_cannot_bring_more_are_not_searched(
    searched: Pools, tmp_path: Path, capsys: Said, monkeypatch: Patch
) -> None:
    def least_s(own: Any, pool: tuple[int, ...]) -> float:
        return 1 / max(1e-9, sum(n * rate for n, rate in zip(pool, RATES)))

    monkeypatch.setattr(rent.Ladder, "_least_s", least_s)
    answer(capsys, _words(tmp_path))
    assert (3, 1, 0) not in searched and not any(pool[0] and pool[2] for pool in searched)


@pytest.mark.parametrize(
    ("limits", "pool"),
    [
        # 36,000 iterations take 10 hours at one per second.
        (("--finish-by", "0.8"), (4, 1, 0)),
        (("--budget-total", "7.2"), (4, 1, 0)),
        (("--finish-by", "1.2", "--budget-total", "7"), (3, 0, 0)),
    ],
)
def test_the_rung_is_chosen_for_the_job(
    searched: Pools, tmp_path: Path, capsys: Said, limits: tuple[str, ...], pool: tuple[int, ...]
) -> None:
    out = tmp_path / "rented.yaml"
    body = answer(capsys, _words(tmp_path, "--train-iters", "36000", *limits, "--out", str(out)))
    rung = body["rungs"][body["chosen"]]
    assert tuple(rung["nodes"]) == pool
    assert rung["hours"] * rung["usd_per_hour"] == pytest.approx(rung["usd"])
    assert [node.count for node in load_cluster(str(out)).nodes] == [n for n in pool if n]


def test_interruptions_cost_time(searched: Pools, tmp_path: Path, capsys: Said) -> None:
    """Two interruptions a day of each of four nodes, with pauses of 300 s: 8 x 900 s, and half an iteration each."""
    _write(tmp_path, [{**NODES[0], "interruptions_per_day": 2.0}])
    pauses = ["--death-s", "300", "--join-s", "300", "--start-s", "1200"]
    rung = answer(capsys, _words(tmp_path, "--train-iters", "1200", *pauses))["rungs"][-1]
    assert rung["goodput"] == pytest.approx(1 / (1 + 8 * (300 + 300 + 1 / 24 + 300) / 86400))
    assert rung["hours"] == pytest.approx(1200 / 12 / rung["goodput"] / 3600)


@pytest.mark.parametrize(
    ("more", "key", "said"),
    [
        (("--finish-by", "1"), "--finish-by", "the job's length is missing"),
        (("--objective", "cost"), "--objective", "weighs speed and money itself"),
        (("--train-iters", "36000", "--finish-by", "0.1"), "--finish-by", "no rung keeps to it"),
        (("--train-iters", "36000", "--budget-total", "0.1"), "--budget-total", "no rung keeps to it"),
    ],
)
def test_what_cannot_be_is_refused(
    searched: Pools, tmp_path: Path, capsys: Said, more: tuple[str, ...], key: str, said: str
) -> None:
    error = answer(capsys, _words(tmp_path, *more), code=2)["error"]
    assert error["key"] == key and said in error["problem"]


def test_prices_are_needed(tmp_path: Path, capsys: Said) -> None:
    _write(tmp_path, [{"gpu": "T4", "count": 1, "gpus_per_node": 2}])
    assert answer(capsys, _words(tmp_path), code=2)["error"]["key"] == "nodes[0].usd_per_gpu_hour"


def test_plans_are_those_of_the_search(tmp_path: Path, capsys: Said) -> None:
    """A first node, a second one and one of another price, searched for real, with a picture."""
    _write(tmp_path, [{**NODES[0], "count": 2}, {**NODES[1], "count": 1, "usd_per_gpu_hour": 0.5}])
    picture = tmp_path / "p.svg"
    body = answer(capsys, _words(tmp_path, "--schedules", "1f1b", "--picture", str(picture)))
    assert body["rungs"] and picture.stat().st_size > 1000
    tokens = [rung["tokens_per_s"] for rung in body["rungs"]]
    assert tokens == sorted(tokens) and all("1f1b" in rung["plan"] for rung in body["rungs"])
