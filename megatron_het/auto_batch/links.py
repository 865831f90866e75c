"""What the collectives of a pass take: ZeRO-2 reduces gradients after it, ZeRO-3 also gathers parameters twice."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

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

        def gather(whole: Any = whole, part: Any = part) -> None:
            dist.all_gather_into_tensor(whole, part)

        def reduce(whole: Any = whole, part: Any = part) -> None:
            dist.reduce_scatter_tensor(part, whole)

        found["gather"].append(_median(gather, device))
        found["reduce"].append(_median(reduce, device))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _median(call: Callable[[], None], device: Any) -> float:
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
