"""How ranks end: finding out who has stopped when a transfer or a collective fails, and leaving after a good end.

A failed collective names an address at best, and mostly that of a neighbour which left because of its own
neighbour.  So the first rank that fails calls the roll over the store that the ranks met at: a thread on every
rank answers, whatever its rank waits for at that moment.  Who has died, was stopped or is cut off does not
answer and is named on all ranks.

A rank that leaves after its last iteration has written what it has logged, and no peer loses a connection.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_CALLED, _ENDED = "called", "ended"
_POLL_S = 0.05
_WHOLE_RUN = timedelta(days=3650)


class RollCall:
    """Answers for this rank, and calls the roll.

    Args:
        store: Of ``torch.distributed``; cloned, because one connection serves one wait at a time.
        rank: This rank.
        world_size: Number of ranks.
        answer_s: How long the caller waits for answers.
    """

    def __init__(self, store: Any, rank: int, world_size: int, answer_s: float = 2.0) -> None:
        self._store, self._ears = store.clone(), store.clone()
        self._rank, self._world_size, self._answer_s = rank, world_size, answer_s
        self._verdict: str | None = None
        self._thread = threading.Thread(target=self._answer, name="roll call", daemon=True)
        self._thread.start()

    def verdict(self) -> str:
        """Who does not answer, in words for a message; bounded by twice ``answer_s``.

        Call it when something failed.  Only the first caller asks; the others get what it found.
        """
        deadline_s = time.monotonic() + 2 * self._answer_s
        try:
            if self._verdict is None and self._store.add("het/callers", 1) == 1:
                self._call()
            while self._verdict is None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        except RuntimeError:
            if self._verdict is None:
                return (
                    "the store that ranks meet at, which is on rank 0 unless a launcher keeps it, does not answer: "
                    "rank 0 has probably stopped"
                )
        return self._verdict or "nobody could find out who has stopped"

    def close(self) -> None:
        """The thread ends; the store may have gone by then.  Further calls do nothing."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key(self._rank), _ENDED)
        self._thread.join(timeout=self._answer_s)

    @staticmethod
    def _key(rank: int) -> str:
        return f"het/call/{rank}"

    def _call(self) -> None:
        deadline_s = time.monotonic() + self._answer_s
        others = set(range(self._world_size)) - {self._rank}
        for rank in sorted(others):
            self._store.set(self._key(rank), _CALLED)
        silent, is_over = set(others), False
        while silent and not is_over:
            is_over = time.monotonic() > deadline_s  # looks once more after it, for what came meanwhile
            silent = {rank for rank in silent if not self._store.check([f"het/here/{rank}"])}
            time.sleep(_POLL_S)
        names = ", ".join(f"rank {rank}" for rank in sorted(silent))
        if names:
            verdict = f"{names} does not answer: it has stopped, hangs or is cut off; its log says more"
        else:
            verdict = "all ranks answer, so one of them has failed by itself; its log says why"
        self._store.set("het/verdict", verdict)
        self._verdict = verdict
        self._store.set(self._key(self._rank), _ENDED)
        # The store lives as long as rank 0: everybody gets the time to read what was found.
        time.sleep(10 * _POLL_S)

    def _answer(self) -> None:
        """Wait for a call or the end, on the thread."""
        with contextlib.suppress(RuntimeError):  # the store has gone: so has rank 0, or the run is over
            self._ears.wait([self._key(self._rank)], _WHOLE_RUN)
            if self._ears.get(self._key(self._rank)).decode() == _CALLED:
                self._ears.set(f"het/here/{self._rank}", "here")
                self._ears.wait(["het/verdict"], timedelta(seconds=4 * self._answer_s))
                self._verdict = self._ears.get("het/verdict").decode()


def flush_logs() -> None:
    """Write what Megatron's TensorBoard writer still holds.

    Its thread ends with the process, whatever waits in its queue, and the events since its last write, two minutes
    ago at most, are lost with it.
    """
    module = sys.modules.get("megatron.training.global_vars")
    writer = module._GLOBAL_TENSORBOARD_WRITER if module is not None else None
    if writer is not None:
        writer.flush()


@contextlib.contextmanager
def leaving_together(over_gloo: bool) -> Iterator[None]:
    """Around a training without a plan: after a good end, ranks that compute on CPUs leave with no group left.

    Gloo's threads abort a process that still has a connection to a peer that has ended.  NCCL has no such threads,
    and Megatron's own end is kept there.  The wait for the other ranks ends with ``--distributed-timeout-minutes``.

    Args:
        over_gloo: Whether the groups of this process are gloo's.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code in (None, 0):  # a planned stop, e.g. --exit-interval
            _leave(over_gloo)
        raise
    _leave(over_gloo)


def _leave(over_gloo: bool) -> None:
    with contextlib.suppress(OSError):  # a full disk loses the log, not the training
        flush_logs()
    if over_gloo and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
