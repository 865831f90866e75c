"""Megatron's waits for the process that writes checkpoints end when it has died."""

import multiprocessing
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.arguments.megatron_args import check_async_save
from megatron_het.checkpoint import state_dict as asynchronous
from megatron_het.plan import PlanError

SOON_S = 60.0


def test_nobody_waits_for_a_process_that_has_died():
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time.sleep, args=(600.0,))
    caller: Any = SimpleNamespace(
        _persistent_process=process,
        _persistent_queue=context.JoinableQueue(),
        _persistent_preload_q=context.JoinableQueue(),
        _persistent_comp_q=context.Queue(),
    )
    process.start()
    assert not asynchronous._has_died(caller)
    waiting = [threading.Thread(target=q.join) for q in (caller._persistent_queue, caller._persistent_preload_q)]
    caller._persistent_queue.put("save")
    caller._persistent_preload_q.put(0)
    for thread in waiting:
        thread.daemon = True
        thread.start()
    process.kill()
    process.join(SOON_S)
    assert asynchronous._has_died(caller)
    assert all(thread.is_alive() for thread in waiting)
    asynchronous.release_waits(caller)
    for thread in waiting:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert caller._persistent_comp_q.get(timeout=SOON_S) == -1


def _fail_in_a_save() -> None:
    """End like a rank that fails while its writing process has not yet read what it is to write."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, PersistentAsyncCaller

    queue, context = AsyncCallsQueue(persistent=True), multiprocessing.get_context("fork")
    sys.modules["megatron.training.async_utils"] = SimpleNamespace(_async_calls_queue=queue)  # type: ignore[assignment]
    writer = context.Process(target=time.sleep, args=(600.0,), daemon=True)
    PersistentAsyncCaller._persistent_queue = context.JoinableQueue()
    PersistentAsyncCaller._persistent_process = queue._get_async_caller().process = writer
    writer.start()
    PersistentAsyncCaller._persistent_queue.put(bytes(1 << 20))  # more than a pipe holds
    asynchronous.abandon_saves(ends=True)


def test_a_process_ends_although_nobody_has_read_what_is_to_be_written():
    process = multiprocessing.get_context("fork").Process(target=_fail_in_a_save)
    process.start()
    process.join(SOON_S)
    process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"use_persistent_ckpt_worker": False, "async_strategy": "mcore"}, "--use-persistent-ckpt-worker"),
        ({"use_persistent_ckpt_worker": True, "async_strategy": "nvrx"}, "--async-strategy mcore"),
    ],
)
def test_what_megatron_would_switch_off_is_an_error(options: dict[str, Any], what: str):
    with pytest.raises(PlanError, match=what):
        check_async_save(SimpleNamespace(async_save=True, **options))
    check_async_save(SimpleNamespace(async_save=False, **options))
    check_async_save(SimpleNamespace(async_save=True, use_persistent_ckpt_worker=True, async_strategy="mcore"))
