"""How ranks tell each other what they measured, before ``torch.distributed`` is up.  Every wait is bounded."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from megatron_het.store import Documents, StoreError
from megatron_het.store.job import job_store, strangers

# What the collectives of a pass take: ZeRO-2 reduces gradients after it, ZeRO-3 also gathers parameters twice.


SIZES_BYTES = (1 << 16, 1 << 23)
_REPETITIONS = 3


def measure_links(request: Mapping[str, Any], backend: str, device: Any) -> dict[str, list[float]]:
    """Seconds of a gather and a reduction over all ranks at two sizes.  Collective over the measuring processes.

    Args:
        request: ``rank``, ``world_size`` and ``store`` (prefix, timeout_s).
        backend: Of ``torch.distributed``.
        device: What the collectives move.

    Returns:
        ``gather`` and ``reduce``: medians, by :data:`SIZES_BYTES` of the whole tensor.
    """
    import torch
    import torch.distributed as dist

    from megatron_het.store.job import peer_store
    from megatron_het.store.torch_store import TorchStore

    place, world_size = request["store"], request["world_size"]
    timeout = timedelta(seconds=place["timeout_s"])
    store = TorchStore(peer_store(place["timeout_s"]), place["timeout_s"], name=place["prefix"])
    dist.init_process_group(backend, store=store, rank=request["rank"], world_size=world_size, timeout=timeout)
    found: dict[str, list[float]] = {"gather": [], "reduce": []}
    for size in SIZES_BYTES:
        part = torch.zeros(size // 4 // world_size, device=device)
        whole = torch.zeros(part.numel() * world_size, device=device)
        found["gather"].append(_median(partial(dist.all_gather_into_tensor, whole, part), device))
        found["reduce"].append(_median(partial(dist.reduce_scatter_tensor, part, whole), device))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _median(call: Callable[[], Any], device: Any) -> float:
    import torch

    times = []
    for _ in range(_REPETITIONS + 1):
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


def pass_seconds(zero: int, seconds: Mapping[str, list[float]], amounts: Mapping[str, int]) -> float:
    """Seconds of the collectives of one pass, none of which compute is taken to hide (Poplar, section 3.2).

    Args:
        zero: ZeRO stage.
        seconds: What :func:`measure_links` found.
        amounts: ``parameter_bytes`` and ``gradient_bytes`` of the model, in ``buckets`` collectives.
    """
    if zero < 2 or not seconds:
        return 0.0
    gathers = 2 * _one(seconds["gather"], amounts["parameter_bytes"], amounts["buckets"]) if zero == 3 else 0.0
    return gathers + _one(seconds["reduce"], amounts["gradient_bytes"], amounts["buckets"])


def _one(times: list[float], size_bytes: int, count: int) -> float:
    """Latency of each collective, and the rest by bytes."""
    small, large = SIZES_BYTES
    each_s = max(0.0, (times[1] - times[0]) / (large - small))
    latency_s = max(0.0, times[0] - each_s * small)
    return count * latency_s + size_bytes * each_s


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
