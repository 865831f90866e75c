"""What ranks tell reaches log, files and TensorBoard, without anybody waiting; a watch that fails ends no training."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.features import feature
from megatron_het.features.watch.monitor import Reader, Settings
from megatron_het.features.watch.runtime import RankWatch
from megatron_het.features.watch.samples import PLACES, Board, Sample
from megatron_het.lowering.programs import program_of
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import Plan, PlanError, load_plan, save_plan
from megatron_het.report import Timeline, TransferLog
from megatron_het.schedule.kinds import Kind
from megatron_het.store import StoreError
from tests.unit.planner import watched_runs as runs
from tests.unit.store.memory import MemoryStore


class _Writer:
    def __init__(self) -> None:
        self.tags: set[str] = set()

    def add_scalar(self, tag: str, value: float, iteration: int) -> None:
        self.tags.add(tag)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> _Writer:
    global_vars = pytest.importorskip("megatron.training.global_vars")
    made = _Writer()
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: made)
    return made


def _tell(board: Board, plan: Plan, iteration: int, factor: float = 1.0) -> None:
    for hello in runs.hellos(plan):
        measured = {op: seconds * (factor if hello.rank == 1 else 1.0) for op, seconds in hello.predicted_s.items()}
        board.post("sample", hello.rank, Sample(iteration, 1.0, measured).encode(), iteration % PLACES)
        events = [["FORWARD", 0, 0, 0, -1, 0.0, 0.1, 0.02], ["SEND_FORWARD", 0, 0, 0, 1, 0.1, 0.1, 0.0]]
        told = {"iteration": iteration, "origin_s": 5.0 + hello.rank, "clock": "here", "events": events}
        board.post("timeline", hello.rank, json.dumps(told))


def _reader(plan: Plan, board: Board, folder: Path | None) -> Reader:
    for hello in runs.hellos(plan):
        board.greet(hello.rank, hello.encode())
    return Reader(plan, program_of(plan), board, Settings(), folder, SimpleNamespace(tensorboard_log_interval=1))


def _drifting(folder: Path | None) -> Reader:
    """A reader that has followed a run in which rank 1 has become slow."""
    plan, board = runs.pipeline(4, 4), Board(MemoryStore())
    reader = _reader(plan, board, folder)
    for iteration in range(1, 25):
        _tell(board, plan, iteration, 3.0 if iteration >= 15 else 1.0)
        reader.read(iteration)
    return reader


def test_a_drift_is_said_written_and_drawn(tmp_path: Path, writer: _Writer, capsys: pytest.CaptureFixture[str]) -> None:
    _drifting(tmp_path)
    out = capsys.readouterr().out
    assert out.count("het: watch:") == 1 and "iteration 17: rank 1 (stage 1, replica 0, core on here)" in out
    summary = json.loads((tmp_path / "watch.json").read_text())
    assert summary["findings"][0]["name"] == "rank 1"
    trace = json.loads((tmp_path / "watch-trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in trace if e["ph"] == "X"} == {0, 1, 2, 3}
    measured = next(e for e in trace if e["pid"] == 3 and e["ph"] == "X" and e["name"].startswith("F"))
    assert measured["ts"] == pytest.approx(1e6 * 1.02), "rank 1 started a second after rank 0, and waited"
    assert {"het/iteration-s", "het/device-1", "het/slowest-device", "het/findings"} <= writer.tags


def test_an_iteration_that_is_not_told_by_all_is_not_waited_for(tmp_path: Path, writer: _Writer) -> None:
    plan = runs.pipeline(4, 4)
    board = Board(MemoryStore())
    reader = _reader(plan, board, tmp_path)
    for iteration in range(1, 4):
        board.post("sample", 0, Sample(iteration, 1.0, {}).encode(), iteration % PLACES)
        reader.read(iteration)
    assert not writer.tags
    for iteration in range(4, 40):  # the places of the first ones are taken by others now
        _tell(board, plan, iteration)
        reader.read(iteration)
    assert writer.tags


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, writer: _Writer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _drifting(None).close()
    assert "rank 1" in capsys.readouterr().out and not list(tmp_path.iterdir())


# -- a rank ----------------------------------------------------------------------------------------


def _watch(store: MemoryStore) -> tuple[RankWatch, Timeline, Any]:
    timeline = Timeline()
    channels = SimpleNamespace(log=None)
    context: Any = SimpleNamespace(
        timeline=timeline, channels=channels, rank=0, transport="gloo", config=SimpleNamespace(trace_iteration=2)
    )
    hello = runs.hellos(runs.pipeline(4, 4))[0]
    return RankWatch(context, Board(store), hello, None), timeline, channels


def _iterate(watch: RankWatch, timeline: Timeline, iteration: int, forward_only: bool = False) -> None:
    timeline.start()
    call: Any = SimpleNamespace(forward_only=forward_only, args=SimpleNamespace(curr_iteration=iteration - 1))
    watch.begin(call, None)  # type: ignore[arg-type]
    with timeline.measure(RankOp(Kind.FORWARD, 0, 0, 0, "F0")):
        timeline.transfers.sent(1)
        arrival = timeline.transfers.receiving(1)
        arrival.waited = arrival.ended = timeline.transfers.now()


def test_a_rank_tells_of_training_and_not_of_evaluation() -> None:
    store = MemoryStore()
    watch, timeline, channels = _watch(store)
    assert isinstance(channels.log, TransferLog)
    _iterate(watch, timeline, 1)
    assert not any("sample" in key for key in store.values)
    _iterate(watch, timeline, 2, forward_only=True)
    told = [Sample.decode(text) for key, text in store.values.items() if "sample" in key]
    assert [sample.iteration for sample in told] == [1]
    assert set(told[0].measured_s) == {"FORWARD"} and told[0].elapsed_s > 0
    assert len(told[0].sent[1]) == len(told[0].received[1]) == told[0].counts[1] == 1
    _iterate(watch, timeline, 2)
    assert sum("sample" in key for key in store.values) == 1, "the evaluation is not told"
    _iterate(watch, timeline, 3)
    assert sum("sample" in key for key in store.values) == 2
    assert any("timeline" in key for key in store.values), "the second one told is traced"
    assert watch.figures()["watch"]["iterations"] == 2
    watch.close()
    assert channels.log is None and not timeline.keeps_last


def test_a_watch_that_fails_says_so_once_and_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    watch, timeline, _ = _watch(store)
    _iterate(watch, timeline, 1)
    store.error = RuntimeError("the store has gone")
    for iteration in range(2, 6):
        _iterate(watch, timeline, iteration)
    assert capsys.readouterr().out.count("the watch is off: the store has gone") == 1


def test_samples_are_dropped_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now_s = MemoryStore(), [0.0]
    monkeypatch.setattr("megatron_het.features.watch.monitor.time.monotonic", lambda: now_s[0])
    board = Board(store)
    asked: list[object] = []

    def away(*request: Any, **_: Any) -> None:
        asked.append(request)
        now_s[0] += 1.0
        raise StoreError("away")

    with monkeypatch.context() as patched:
        patched.setattr(store, "ask", away)
        for _ in range(3):
            board.post("sample", 0, "x")
            assert board.read("sample", [0]) is None
        assert len(asked) == 1, "and asks no more for a while"
        with pytest.raises(StoreError):
            board.greet(0, "hello")
    now_s[0] += 30.0
    board.post("sample", 0, "x")
    assert board.read("sample", [0]) == ["x"]


# -- the description -------------------------------------------------------------------------------


def _with(plan: Plan, **parameters: Any) -> Plan:
    from dataclasses import replace

    return replace(plan, schedule=replace(plan.schedule, parameters={**plan.schedule.parameters, **parameters}))


def test_it_is_on_where_a_plan_carries_costs(tmp_path: Path) -> None:
    spec = feature("watch")
    plan = runs.pipeline(4, 4)
    save_plan(plan, tmp_path / "plan.json")
    assert spec.options_of(load_plan(tmp_path / "plan.json")) is not None
    assert spec.options_of(_with(plan, watch="off")) is None
    spec.check(_with(plan, watch="on", watch_window=3, watch_threshold=0.5))
    without = Plan.from_json({k: v for k, v in plan.to_json().items() if k != "predicted"})
    assert spec.options_of(without) is None
    spec.check(without)
    with pytest.raises(PlanError, match=r"predicted\.costs"):
        spec.check(_with(without, watch="on"))


@pytest.mark.parametrize(
    "parameters", [{"watch": "maybe"}, {"watch_window": 0}, {"watch_threshold": 0.0}, {"watch_window": 1.5}]
)
def test_bad_options_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        feature("watch").check(_with(runs.pipeline(4, 4), **parameters))


def test_iterations_are_left_out_where_reading_takes_too_much_of_them(
    tmp_path: Path, writer: _Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = runs.pipeline(4, 4)
    board = Board(MemoryStore())
    reader = _reader(plan, board, None)
    taken: list[int] = []
    take = reader._take
    monkeypatch.setattr(reader, "_take", lambda samples: (taken.append(samples[0].iteration), take(samples)))
    clock = iter(range(1000))
    monkeypatch.setattr("megatron_het.features.watch.monitor.time.thread_time", lambda: 0.007 * next(clock))
    for iteration in range(1, 21):
        _tell(board, plan, iteration)  # an iteration of a second, of which reading takes 7 ms
        reader.read(iteration)
    assert taken == list(range(1, 21, 2))
