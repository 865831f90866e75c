"""What a rank says of an operation that does not end."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.runtime.executor import StallWatch


def watched(limit_s: float, since_s: float | None) -> tuple[StallWatch, Any]:
    executor: Any = SimpleNamespace(current="F microbatch 1", since_s=since_s)
    now = time.monotonic()
    channels: Any = [
        SimpleNamespace(posted=[(now - 2, "receive from rank 2 (F microbatch 1)")]),
        SimpleNamespace(posted=[(now - 3, "send to rank 1 (B microbatch 0)")]),
    ]
    return StallWatch(executor, channels, limit_s, 3), executor


def test_a_stall_is_told_once_with_stack_and_transfers(capsys: pytest.CaptureFixture[str]) -> None:
    watch, _ = watched(0.2, time.monotonic() - 1)
    deadline_s, told = time.monotonic() + 20, ""
    while "Stack:" not in told and time.monotonic() < deadline_s:
        watch._is_over.wait(0.05)
        told += capsys.readouterr().err
    watch.close()
    assert told.count("het: rank 3: F microbatch 1 has not ended for 0.2 s") == 1
    assert told.index("send to rank 1 (B microbatch 0)") < told.index("receive from rank 2 (F microbatch 1)")
    assert "the first launch of a kernel" in told and "test_stalls.py" in told.partition("Stack:")[2]
    assert not watch._thread.is_alive()


def test_nothing_is_told_between_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    watch, _ = watched(0.02, None)
    threading.Event().wait(0.1)
    watch.close()
    assert capsys.readouterr().err == ""
