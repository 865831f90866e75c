"""How ranks tell each other what they measured, before ``torch.distributed`` is up.  Every wait is bounded."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any, NoReturn

_POLL_S = 0.05
_LINKS_S = 300.0  # for a group of the measuring processes
_OPEN: list[Any] = []  # the store of rank 0 must live as long as others may ask it


class ExchangeError(RuntimeError):
    """The store cannot be reached, a rank failed, or nothing came in time."""


class Exchange:
    """Values of all ranks, by name.

    Args:
        rank, world_size: Of this process.
        timeout_s: Bound on every wait.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._store: Any = None
        if world_size > 1:
            self._store = _connect(rank, world_size, timeout_s)
        self._checked_s = 0.0

    def store(self, name: str) -> dict[str, Any] | None:
        """Where another process of this rank meets those of the other ranks; None if this rank is alone."""
        if self._store is None:
            return None
        return {
            "address": os.environ["MASTER_ADDR"],
            "port": int(os.environ["MASTER_PORT"]),
            "prefix": f"{_prefix()}/{name}",
            "timeout_s": min(self._timeout_s, _LINKS_S),
        }

    def gather(self, name: str, value: Any) -> list[Any]:
        """Everybody's value under a name, by rank."""
        if self._store is None:
            return [value]
        self._store.set(f"{name}/{self._rank}", json.dumps(value))
        return [json.loads(self._get(f"{name}/{rank}", f"rank {rank}")) for rank in range(self._world_size)]

    def decided(self, name: str, value: Any) -> Any:
        """Rank 0's value, on all ranks; the others' is not looked at."""
        if self._store is None:
            return json.loads(json.dumps(value))
        if self._rank == 0:
            self._store.set(f"{name}/decided", json.dumps(value))
        return json.loads(self._get(f"{name}/decided", "rank 0"))

    def fail(self, problem: str) -> None:
        """Tell the others that there is no use in waiting for this rank."""
        if self._store is not None:
            self._store.set("failed", f"rank {self._rank}: {problem}")

    def check(self) -> None:
        """Raise if a rank has failed; asks the store not more often than every 50 ms.

        Raises:
            ExchangeError: Who failed, and why.
        """
        now_s = time.monotonic()
        if self._store is None or now_s - self._checked_s < _POLL_S:
            return
        self._checked_s = now_s
        if self._store.check(["failed"]):
            raise ExchangeError(self._store.get("failed").decode())

    def _get(self, key: str, who: str) -> str:
        end_s = time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            self.check()
            if time.monotonic() > end_s:
                raise ExchangeError(f"nothing came from {who} within {self._timeout_s:.0f} s ({key})")
            time.sleep(_POLL_S)
        return self._store.get(key).decode()


def end_all(exchange: Exchange | None, flag: str, rank: int, error: Exception) -> NoReturn:
    """Say on this rank, and tell the others, why measuring has failed.

    Args:
        exchange: With the others; None if there is none yet.
        flag: That asked for the measurements.
    """
    if exchange is not None:
        exchange.fail(next(iter(str(error).splitlines()), type(error).__name__))
    sys.stderr.write(f"megatron_het: {flag}: rank {rank}: {error}\n")
    sys.stderr.flush()
    time.sleep(1.0)  # rank 0 keeps the store: the others shall read why
    raise SystemExit(2) from None


def _connect(rank: int, world_size: int, timeout_s: float) -> Any:
    """A part of the store at which ``torch.distributed`` will meet too, as its ``env://`` does."""
    import torch.distributed as dist

    try:
        store = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s))))[0]
    except (RuntimeError, ValueError) as error:
        raise ExchangeError(f"the ranks' store cannot be reached: {error}") from error
    _OPEN.append(store)
    return dist.PrefixStore(_prefix(), store)


def _prefix() -> str:
    return f"het-auto-batch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
