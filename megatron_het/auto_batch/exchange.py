"""How ranks tell each other what they measured, before ``torch.distributed`` is up.  Every wait is bounded."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any, NoReturn

from megatron_het.store import Documents, StoreError
from megatron_het.store.job import job_store, strangers

_POLL_S = 0.05
_LINKS_S = 300.0  # for a group of the measuring processes
_PREFIX = "auto-batch"
_FAILED = "failed"


class ExchangeError(RuntimeError):
    """The store cannot be reached, a rank failed, or nothing came in time."""


class Exchange:
    """Values of all ranks, by name.

    Args:
        rank, world_size: Of this process.
        timeout_s: Bound on every wait.

    Raises:
        ExchangeError: The store cannot be reached.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._store: Documents | None = None
        if world_size > 1:
            try:
                self._store = job_store(rank, timeout_s).under(_PREFIX)
            except StoreError as error:
                raise ExchangeError(str(error)) from error
        self._checked_s = 0.0

    def meeting(self, name: str) -> dict[str, Any] | None:
        """Where another process of this rank meets those of the other ranks; None if this rank is alone."""
        if self._store is None:
            return None
        return {"prefix": f"{_PREFIX}/{name}", "timeout_s": min(self._timeout_s, _LINKS_S)}

    def gather(self, name: str, value: Any) -> list[Any]:
        """Everybody's value under a name, by rank."""
        if self._store is None:
            return [value]
        self._store.put(f"{name}/{self._rank}", value)
        return self._come({f"{name}/{rank}": f"rank {rank}" for rank in range(self._world_size)})

    def decided(self, name: str, value: Any) -> Any:
        """Rank 0's value, on all ranks; the others' is not looked at."""
        if self._store is None:
            return json.loads(json.dumps(value))
        if self._rank == 0:
            self._store.put(f"{name}/decided", value)
        return self._come({f"{name}/decided": "rank 0"})[0]

    def fail(self, problem: str) -> None:
        """Tell the others that there is no use in waiting for this rank."""
        if self._store is not None:
            self._store.put(_FAILED, f"rank {self._rank}: {problem}")

    def check(self) -> None:
        """Raise if a rank has failed; asks the store not more often than every 50 ms.

        Raises:
            ExchangeError: Who failed, and why.
        """
        now_s = time.monotonic()
        if self._store is None or now_s - self._checked_s < _POLL_S:
            return
        self._checked_s = now_s
        problem = self._store.get(_FAILED)
        if problem is not None:
            raise ExchangeError(problem)

    def _come(self, keys: dict[str, str]) -> list[Any]:
        """Values of some keys, once all are there; the keys say who writes them."""
        assert self._store is not None
        found = self._store.wait(list(keys), [_FAILED], self._timeout_s, patience_s=None)
        if found == "lost":
            raise ExchangeError(self._store.get(_FAILED))
        if found == "late":
            key = next(key for key in keys if not self._store.has(key))
            who = f"nothing came from {keys[key]} within {self._timeout_s:.0f} s ({key})"
            raise ExchangeError(who + strangers(self._store))
        return self._store.read(*keys)


def end_all(exchange: Exchange | None, flag: str, rank: int, error: Exception) -> NoReturn:
    """Say on this rank, and tell the others, why measuring has failed.

    Args:
        exchange: With the others; None if there is none yet.
        flag: That asked for the measurements.
    """
    with contextlib.suppress(StoreError):  # it may have gone
        if exchange is not None:
            exchange.fail(next(iter(str(error).splitlines()), type(error).__name__))
    sys.stderr.write(f"megatron_het: {flag}: rank {rank}: {error}\n")
    sys.stderr.flush()
    time.sleep(1.0)  # rank 0 keeps the store: the others shall read why
    raise SystemExit(2) from None
