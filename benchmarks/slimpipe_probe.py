"""Looks into SlimPipe and stock runs from inside: live activation bytes, and times per iteration.

Both sides get the same attention kernel: stock's core attention is replaced by PyTorch's fused
attention, which on each device is the very kernel that slices use.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import pin_rank

Step = Callable[..., Any]


class FusedAttention(torch.nn.Module):
    """Whole-sequence causal attention by PyTorch's fused operator, in place of Megatron's unfused one."""

    def __init__(self, config: Any, *_positional: Any, **_keywords: Any) -> None:
        super().__init__()
        self._scale = config.softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``[s, b, heads, d]`` in, ``[s, b, heads * d]`` out."""
        # A copy of the values, as slices make one: the view would keep the whole projection alive.
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value.clone()))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def watch(*, rank: int, out: str, memory: bool = False, fused: bool = False) -> None:
    """Wrap the forward-backward function, stock's and the extension's; for times, also pin the rank to a core.

    Args:
        rank: This rank.
        out: Folder for ``watch-<rank>.json``.
        memory: Meter the second iteration (slow; not together with times).
        fused: Give stock's layers the fused attention.
    """
    from megatron.training import training

    from megatron_het.runtime.session import HetSession

    if not memory:
        pin_rank(rank=rank)
    if fused:
        from megatron.core.models.backends import LocalSpecProvider

        LocalSpecProvider.core_attention = lambda self: FusedAttention
    watcher = Watcher(Path(out) / f"watch-{rank}.json", memory)
    original = training.get_forward_backward_func

    @functools.wraps(original)
    def get_forward_backward_func(*positional: Any, **keywords: Any) -> Step:
        return watcher.wrap(original(*positional, **keywords))

    training.get_forward_backward_func = get_forward_backward_func
    HetSession.forward_backward = watcher.wrap(HetSession.forward_backward)


class Watcher:
    """Times all training iterations; meters the memory of one.

    Args:
        path: Where to write what was found, as JSON.
        memory: Whether to meter.
    """

    metered_iteration = 1
    """Training iteration whose memory is measured, from 0."""

    def __init__(self, path: Path, memory: bool) -> None:
        self._path = path
        self._memory = memory
        self.found: dict[str, Any] = {"iterations_s": []}
        self._nested = False

    def wrap(self, step: Step) -> Step:
        """The forward-backward function with this watcher around it."""

        @functools.wraps(step)
        def watched(*positional: Any, **keywords: Any) -> Any:
            if keywords.get("forward_only") or self._nested:
                return step(*positional, **keywords)
            self._nested = True
            try:
                return self._run(step, positional, keywords)
            finally:
                self._nested = False

        return watched

    def _run(self, step: Step, positional: Any, keywords: Any) -> Any:
        times = self.found["iterations_s"]
        start_s = time.perf_counter()
        if self._memory and len(times) == self.metered_iteration:
            result = self.metered(step, positional, keywords)
        else:
            result = step(*positional, **keywords)
        times.append(time.perf_counter() - start_s)
        self._path.write_text(json.dumps(self.found), encoding="utf-8")
        return result

    def metered(self, step: Step, positional: Any, keywords: Any) -> Any:
        """Run one iteration and put its memory into ``found``."""
        from megatron_het import device as platform
        from megatron_het.device.memory import memory_meter

        pool = pool_bytes(keywords["model"])
        with memory_meter(platform.activate()) as meter, meter.region("iteration") as region:
            result = step(*positional, **keywords)
        # The key-value pool was there before the iteration began.
        self.found["kv_pool_bytes"] = pool
        self.found["activation_bytes"] = region.growth_bytes + pool
        return result


def pool_bytes(model: Any) -> int:
    """Size of the key-value pools of all layers of model chunks, wrapped or not."""
    from megatron.core.utils import unwrap_model

    from megatron_het.attention.core import slice_caches

    chunks = unwrap_model(model if isinstance(model, list) else [model])
    return sum(cache.pool_bytes for cache in slice_caches(chunks))
