"""Poplar's curves and allocation."""

import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megatron_het import device as platforms
from megatron_het.arguments.flags import split_arguments
from megatron_het.attention.kernels import CpuFlash
from megatron_het.auto_batch import allocation, measure
from megatron_het.auto_batch import coordinate as processes
from megatron_het.auto_batch.coordinate import VARIABLE, MeasuringError, MeasuringProcess, memory_limit
from megatron_het.device import activate
from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan import ModelShape, Plan, PlanError, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from megatron_het.plan.run_config import HetConfig
from megatron_het.plan.validate import check_plan
from megatron_het.safe_io import FileError
from megatron_het.store import StoreServer
from megatron_het.store import job as stores
from megatron_het.store.job import Exchange, ExchangeError


def linear(start_s: float, each_s: float, largest: int) -> allocation.Curve:
    """Seconds ``start_s + each_s n``: larger passes do more per second."""
    return allocation.Curve.of({n: start_s + each_s * n for n in sorted({1, 2, 4, largest}) if n <= largest})


FAST, SLOW = linear(1.0, 1.0, 8), linear(1.0, 3.0, 4)


def test_a_curve_never_falls_and_goes_through_its_points() -> None:
    curve = allocation.Curve.of({1: 2.0, 4: 1.5, 8: 4.0})  # the second point is noise
    assert [curve.at(n) for n in (0, 1, 4, 8)] == [0.0, 2.0, 2.0, 4.0]
    assert all(curve.at(n) <= curve.at(n + 1) for n in range(8))
    with pytest.raises(ValueError, match="9 sequences does not fit"):
        curve.at(9)


def test_a_device_that_is_shared_by_turns_is_as_fast_as_its_share() -> None:
    """A short pass fits into a turn; then one waits for the turn of the other process, which takes 0.1 s."""
    alone, shared = [0.02] * 10, ([0.02] * 4 + [0.12]) * 2
    curves = [allocation.Curve.of_passes({1: alone, 24: [0.48]}), allocation.Curve.of_passes({1: shared, 24: [0.96]})]
    assert curves[1].at(1) == pytest.approx(2 * curves[0].at(1))
    fast, slow = map(sum, allocation.accumulated(curves, 24))
    assert fast == pytest.approx(2 * slow, abs=1)
    with pytest.raises(ValueError, match="a pass of every size"):
        allocation.Curve.of_passes({1: [0.1], 2: []})


def test_the_best_pass_has_the_most_sequences_per_second() -> None:
    assert FAST.best == 8
    assert allocation.Curve.of({1: 1.0, 2: 2.0, 4: 8.0}).best == 1
    assert FAST.passes(17) == [8, 8, 1] or FAST.seconds_of(17) <= 2 * 9.0 + 2.0
    assert sum(FAST.passes(19)) == 19 and max(FAST.passes(19)) <= 8


@pytest.mark.parametrize("seed", range(8))
def test_accumulated_is_the_best_of_all_divisions(seed: int) -> None:
    rng = random.Random(seed)
    curves = [linear(rng.random(), 0.2 + rng.random(), rng.choice((2, 4, 8))) for _ in range(3)]
    batch = rng.randint(6, 24)
    passes = allocation.accumulated(curves, batch)
    assert sum(map(sum, passes)) == batch and all(passes)
    assert all(max(own) <= c.largest for own, c in zip(passes, curves, strict=True))
    took = max(sum(map(c.at, own)) for own, c in zip(passes, curves, strict=True))
    divisions = ((a, b, batch - a - b) for a, b in itertools.product(range(1, batch), repeat=2) if a + b < batch)
    best = min(max(c.seconds_of(n) for c, n in zip(curves, row, strict=True)) for row in divisions)
    assert took <= 1.03 * best


def test_synchronised_gives_all_devices_equally_many_passes_that_end_together() -> None:
    rows = allocation.synchronised([FAST, SLOW], 20, 0.1)
    assert sum(map(sum, rows)) == 20
    assert all(row[0] <= 8 and row[1] <= 4 for row in rows)
    for fast, slow in rows[:-1]:
        assert abs(FAST.at(fast) - SLOW.at(slow)) <= 3.0


def test_dear_communication_asks_for_fewer_passes() -> None:
    few, many = (len(allocation.synchronised([FAST, SLOW], 24, seconds)) for seconds in (100.0, 0.0))
    assert few == 2 <= many  # no more than 8 + 4 fit into a pass


def test_no_device_is_without_work() -> None:
    slow = linear(100.0, 100.0, 4)
    for zero in range(4):
        found = allocation.allocate([FAST, slow], 9, zero, 0.1)
        assert all(found.passes) and sum(map(sum, found.passes)) == 9
    with pytest.raises(ValueError, match="not enough for 2 devices"):
        allocation.allocate([FAST, slow], 1, 0)


# The plans of automatic batches, and what is refused.

WORDS = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"]
UNTIED = [*WORDS, "--untie-embeddings-and-output-weights", "--global-batch-size", "7", "--lr", "1"]


@pytest.mark.parametrize("zero", range(4))
def test_every_zero_stage_has_a_plan_that_runs(zero: int) -> None:
    base, words = allocation.base_plan(UNTIED, 2)
    assert words[-1] == "--calculate-per-token-loss" and "--global-batch-size" not in words and "7" not in words
    plan = allocation.with_zero(base, zero, ((3, 2), (2,)), ["a", "b"])
    check_plan(plan)
    check_plan_alone(plan)
    build(plan)
    training, (first, second) = plan.training, plan.stages[0].replicas
    assert [training.sequences(m) for m in first.microbatches] == [3, 2]
    assert [training.sequences(m) for m in second.microbatches] == [2]
    assert (training.global_batch_size, training.distributed_optimizer) == (7, zero > 0)
    assert len(plan.stages[0].layers) == (4 if zero > 1 else 1)
    assert plan.schedule.parameters.get("zero", 0) == (zero if zero > 1 else 0)


def test_tied_embeddings_may_be_in_two_chunks() -> None:
    base, _ = allocation.base_plan([*WORDS, "--global-batch-size=4"], 2)
    plan = allocation.with_zero(base, 3, [[1], [1]], ["", ""])
    check_plan_alone(plan)
    assert plan.model.tied_embeddings and len(plan.stages[0].layers) == 4


def test_a_checkpoint_of_shards_is_reshardable() -> None:
    base, words = allocation.base_plan([*UNTIED, "--save", "x"], 2)
    plans = [allocation.with_zero(base, zero, [[1], [1]], ["", ""]) for zero in (0, 1)]
    assert [allocation.extra_words(plan, words) for plan in plans] == [[], ["--dist-ckpt-optim-fully-reshardable"]]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--micro-batch-size", "2"], "measures it"),
        (["--tensor-model-parallel-size", "2"], "data parallelism alone"),
        (["--pipeline-model-parallel-size", "2"], "data parallelism alone"),
        (["--train-iters=9"], "--eval-interval"),
        (["--global-batch-size", "x"], "--global-batch-size"),
        (["--global-batch-size", "1"], "--global-batch-size"),
        ([], "--global-batch-size"),
    ],
)
def test_refuses_what_it_measures_or_cannot(more: list[str], problem: str) -> None:
    words = WORDS if problem == "--global-batch-size" else UNTIED
    with pytest.raises(PlanError, match=problem):
        allocation.base_plan([*words, *more], 2)
    assert "--eval-interval" not in measure._LAST  # 0, too, is refused before passes are timed


def test_a_folder_in_place_of_a_file_is_named_before_ranks_meet(tmp_path: Path) -> None:
    (tmp_path / "measured.json").mkdir()
    maker = processes._Maker(*allocation.base_plan(UNTIED, 1), tmp_path, 0, 1, Mock(), least_zero=0)
    with pytest.raises(FileError, match="measured.json: this is a folder"):
        maker.plan()


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    config, rest = split_arguments(["--het-auto-batch", "runs/x", "--het-zero", "2", "--lr", "1"])
    assert (str(config.auto_batch), config.least_zero, rest) == ("runs/x", 2, ["--lr", "1"])
    with pytest.raises(SystemExit):
        split_arguments(["--het-auto-batch", "runs/x", "--het-plan", "plan.json"])
    assert "--het-plan does not go with --het-auto-batch" in capsys.readouterr().err


def test_an_artificial_limit_may_differ_from_rank_to_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    for value, expected in (("500", 500), ("500;700", 700)):
        monkeypatch.setenv(VARIABLE, value)
        assert memory_limit().limit_bytes == expected
    for value in ("much", "1;x", "1;0"):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(ValueError, match=VARIABLE):
            memory_limit()


def test_ranks_that_share_a_device_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ``LOCAL_RANK`` is the device, and limits are given by the launcher's local rank."""
    monkeypatch.setattr(platforms, "activate", lambda: SimpleNamespace(is_cuda=True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="G", total_memory=10000))
    own = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert memory_limit().limit_bytes == 9200
    environment = own | {"LOCAL_RANK": "2", platforms.SAME_DEVICES: "1"}
    assert platforms.share_devices(environment, 2)
    for name in ("LOCAL_RANK", platforms.SHARING_RANK):
        monkeypatch.setenv(name, environment[name])
    assert memory_limit().limit_bytes == 4600
    monkeypatch.setenv(VARIABLE, "500;600;700")
    assert memory_limit().limit_bytes == 700


# Every wait of automatic batches is bounded, and says who was waited for.

REQUEST = {"rank": 0, "zero": 1}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exchange]]:
    store = StoreServer("127.0.0.1", 0, "0123456789abcdef")
    store.start()
    monkeypatch.setattr(stores, "job_store", lambda *_: store)
    yield [Exchange(rank, 2, 60.0) for rank in range(2)]
    store.close()


def test_ranks_get_all_values_and_rank_0_decides(two: list[Exchange]) -> None:
    def run(exchange: Exchange) -> object:
        return exchange.gather("sizes", [exchange._rank]), exchange.decided("result", {"of": exchange._rank})

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(run, two)) == 2 * [([[0], [1]], {"of": 0})]


def test_a_rank_that_never_comes_is_named(two: list[Exchange]) -> None:
    start_s, two[0]._timeout_s = time.monotonic(), 1.0
    with pytest.raises(ExchangeError, match="nothing came from rank 1 within 1 s"):
        two[0].gather("sizes", 1)
    assert time.monotonic() - start_s < 30


def test_a_rank_that_failed_ends_the_others(two: list[Exchange]) -> None:
    two[1].fail("no memory")
    with pytest.raises(ExchangeError, match="rank 1: no memory"):
        two[0].gather("sizes", 1)
    time.sleep(0.1)
    with pytest.raises(ExchangeError, match="rank 1: no memory"):
        two[0].check()


def fake(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """In place of the measuring process."""
    (folder / "fake_measure.py").write_text("import os, sys, time\n" + code)
    monkeypatch.setattr(processes, "_MODULE", "fake_measure")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_measuring_process_that_dies_or_hangs_is_an_error_with_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for words, code, left_out in (("last words", 9, "none"), ("megatron_het: --lr is refused", 2, "a warning")):
        fake(monkeypatch, tmp_path, f"print('a warning\\n{words}', flush=True); os._exit({code})")
        with MeasuringProcess(REQUEST, tmp_path, lambda: None, 20.0) as process, pytest.raises(MeasuringError) as found:
            process.answer()
        said = str(found.value)
        assert f"exit code {code}" in said and words in said and left_out not in said
    fake(monkeypatch, tmp_path, "time.sleep(600)")
    start_s = time.monotonic()
    hangs = pytest.raises(MeasuringError, match="no answer after 1 s")
    with MeasuringProcess(REQUEST, tmp_path, lambda: None, 1.0) as process, hangs:
        process.ask(do="try", size=1)
    assert time.monotonic() - start_s < 30  # it is killed


def test_waiting_ends_when_another_rank_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, tmp_path, "os.read(int(sys.argv[2]), 1)")
    watch = Mock(side_effect=ExchangeError("rank 1: no memory"))
    with MeasuringProcess(REQUEST, tmp_path, watch, 60.0) as process, pytest.raises(ExchangeError):
        process.answer()


def test_collectives_of_a_pass() -> None:
    small, large = allocation.SIZES_BYTES
    seconds = {"gather": [1.0, 1.0 + 2e-6 * (large - small)], "reduce": [0.0, 1e-6 * (large - small)]}
    amounts = {"parameter_bytes": 1_000_000, "gradient_bytes": 2_000_000, "buckets": 3}
    latency_s = 1.0 - 2e-6 * small
    assert allocation.pass_seconds(1, seconds, amounts) == 0
    assert allocation.pass_seconds(2, seconds, amounts) == pytest.approx(2.0)
    assert allocation.pass_seconds(3, seconds, amounts) == pytest.approx(2.0 + 2 * (3 * latency_s + 2.0))


# Context-parallel parts by measured speed: whole numbers, what is measured, and what is refused.


def plan_of(*replicas: Replica, **parameters: object) -> Plan:
    shape = ModelShape(2, 16, 4, 2, 64)
    return Plan(shape, TrainingShape(1, 2), (Stage((2,), replicas),), ScheduleSpec("slimpipe", parameters))


class Told(Exchange):
    """What the others would say."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def gather(self, name: str, value: object) -> list[object]:
        return list(self.seconds) if name.endswith("seconds") else [value] * len(self.seconds)

    def check(self) -> None:
        pass


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        ([1.0, 1.0], ()),
        ([1.0, 1.04], ()),
        ([1.0, 3.0], (75, 25)),
        ([1.0, 2.0, 4.0], (57, 29, 14)),
        ([1.0, 1000.0], (100, 1)),
    ],
)
def test_shares_are_in_proportion_to_speed(seconds: list[float], shares: tuple[int, ...]) -> None:
    assert measure.shares_of(seconds) == shares


def test_a_group_is_as_fast_as_its_slowest_rank_and_others_keep_what_they_have() -> None:
    plan = plan_of(Replica((0, 1, 2, 3), (0,), cp=2), Replica((4,), (1,)))
    found = measure.with_measured_shares(plan, activate(), 4, Told([1.0, 1.0, 1.0, 4.0, 0.0]))
    assert [r.cp_shares for r in found.stages[0].replicas] == [(80, 20), ()]
    assert measure.described(found).endswith("stage 0, ranks 0 to 3: 80 20")


def test_what_a_plan_says_gives_way_to_what_is_measured() -> None:
    plan = plan_of(Replica((0, 1), (0, 1), cp=2, cp_shares=(3, 1)))
    found = measure.with_measured_shares(plan, activate(), 0, Told([1.0, 1.0]))
    assert found.stages[0].replicas[0].cp_shares == ()
    assert "equal" in measure.described(found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_measurement_is_forward_and_backward_of_a_slice(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr(measure, "_SECONDS", 0.0)
    calls: list[tuple[str, torch.Size, torch.Size, torch.dtype]] = []
    kernel = CpuFlash()

    class Watched:
        def forward(self, *args: Any) -> Any:
            calls.append(("forward", args[0].shape, args[1].shape, args[0].dtype))
            return kernel.forward(*args)

        def backward(self, *args: Any) -> Any:
            query, key, *_ = args[1]
            calls.append(("backward", query.shape, key.shape, query.dtype))
            return kernel.backward(*args)

    monkeypatch.setattr(measure, "choose_kernel", lambda setting: Watched())
    plan = plan_of(Replica((0, 1, 2, 3), (0, 1), cp=2), slices=4)
    plan = replace(plan, training=replace(plan.training, precision=precision))
    measure.with_measured_shares(plan, activate(), 1, Told([1.0] * 4))
    # 64 tokens: half a slice of 16 against half of all; TP 2 leaves two heads and one group of keys.
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    assert calls[0] == ("forward", torch.Size([8, 1, 2, 4]), torch.Size([32, 1, 1, 4]), dtype)
    assert {call[0] for call in calls} == {"forward", "backward"} and len(calls) == 2 * (1 + measure._REPETITIONS)


def test_all_are_told_who_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    class Failing(Told):
        def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
            super().__init__([1.0] * world_size)

        def gather(self, name: str, value: object) -> list[object]:
            raise ExchangeError("nothing came from rank 1 within 300 s")

        def fail(self, problem: str) -> None:
            told.append(problem)

    monkeypatch.setattr(measure, "Exchange", Failing)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        measure.measured_config(HetConfig(plan_of(Replica((0, 1), (0, 1), cp=2))), activate())
    assert ended.value.code == 2 and told == ["nothing came from rank 1 within 300 s"]
    assert "--het-measured-cp-shares: rank 0: nothing came" in capsys.readouterr().err


def test_refused_where_there_is_nothing_to_measure(tmp_path) -> None:
    file = tmp_path / "plan.json"
    save_plan(plan_of(Replica((0,), (0, 1)), slices=4), file)
    with pytest.raises(PlanError, match="no replica of the plan has context parallelism"):
        split_arguments(["--het-plan", str(file), "--het-measured-cp-shares"])


def test_is_read(tmp_path) -> None:
    file = tmp_path / "plan.json"
    save_plan(plan_of(Replica((0, 1), (0, 1), cp=2), slices=4), file)
    config, rest = split_arguments(["--het-plan", str(file), "--het-measured-cp-shares", "--lr", "1"])
    assert config.measured_cp_shares and rest == ["--lr", "1"]
