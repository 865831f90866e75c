"""Every wait of automatic batches is bounded, and says who was waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_het.auto_batch import coordinate as processes
from megatron_het.auto_batch import exchange as exchanges
from megatron_het.auto_batch.coordinate import MeasuringError, MeasuringProcess
from megatron_het.auto_batch.exchange import SIZES_BYTES, Exchange, ExchangeError, pass_seconds
from megatron_het.store import StoreServer

REQUEST = {"rank": 0, "zero": 1}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exchange]]:
    store = StoreServer("127.0.0.1", 0, "0123456789abcdef")
    store.start()
    monkeypatch.setattr(exchanges, "job_store", lambda *_: store)
    yield [Exchange(rank, 2, 1.0) for rank in range(2)]
    store.close()


def test_ranks_get_all_values_and_rank_0_decides(two: list[Exchange]) -> None:
    found: dict[int, object] = {}

    def run(rank: int) -> None:
        values = two[rank].gather("sizes", [rank])
        found[rank] = values, two[rank].decided("result", {"of": rank})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert found == dict.fromkeys(range(2), ([[0], [1]], {"of": 0}))


def test_a_rank_that_never_comes_is_named(two: list[Exchange]) -> None:
    start_s = time.monotonic()
    with pytest.raises(ExchangeError, match="nothing came from rank 1 within 1 s"):
        two[0].gather("sizes", 1)
    assert time.monotonic() - start_s < 5


def test_a_rank_that_failed_ends_the_others(two: list[Exchange]) -> None:
    two[1].fail("no memory")
    with pytest.raises(ExchangeError, match="rank 1: no memory"):
        two[0].gather("sizes", 1)
    time.sleep(0.1)
    with pytest.raises(ExchangeError, match="rank 1: no memory"):
        two[0].check()


def fake(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """In place of the measuring process."""
    (folder / "fake_measure.py").write_text("import os, sys, time\nsource, sink = map(int, sys.argv[2:])\n" + code)
    monkeypatch.setattr(processes, "_MODULE", "fake_measure")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_measuring_process_that_dies_or_hangs_is_an_error_with_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, tmp_path, "print('last words', flush=True); os._exit(9)")
    with MeasuringProcess(REQUEST, tmp_path, lambda: None, 20.0) as process, pytest.raises(MeasuringError) as caught:
        process.answer()
    assert "exit code 9" in str(caught.value) and "last words" in str(caught.value)
    fake(monkeypatch, tmp_path, "time.sleep(600)")
    start_s = time.monotonic()
    hangs = pytest.raises(MeasuringError, match="no answer after 1 s")
    with MeasuringProcess(REQUEST, tmp_path, lambda: None, 1.0) as process, hangs:
        process.ask(do="try", size=1)
    assert time.monotonic() - start_s < 30  # it is killed


def test_waiting_ends_when_another_rank_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, tmp_path, "os.read(source, 1)")

    def watch() -> None:
        raise ExchangeError("rank 1: no memory")

    with MeasuringProcess(REQUEST, tmp_path, watch, 60.0) as process, pytest.raises(ExchangeError):
        process.answer()


def test_collectives_of_a_pass() -> None:
    small, large = SIZES_BYTES
    seconds = {"gather": [1.0, 1.0 + 2e-6 * (large - small)], "reduce": [0.0, 1e-6 * (large - small)]}
    amounts = {"parameter_bytes": 1_000_000, "gradient_bytes": 2_000_000, "buckets": 3}
    latency_s = 1.0 - 2e-6 * small
    assert pass_seconds(1, seconds, amounts) == 0
    assert pass_seconds(2, seconds, amounts) == pytest.approx(2.0)
    assert pass_seconds(3, seconds, amounts) == pytest.approx(2.0 + 2 * (3 * latency_s + 2.0))
