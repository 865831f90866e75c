"""Measurements inside the ranks of a run: live bytes, times per iteration, starts of documents.

With ``fused``, SlimPipe and stock runs use the same attention kernel: stock's core attention is replaced by PyTorch's
fused attention, which on each device is the kernel of slices.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from testing.probe import Step, around, pin_rank, wrap_stock


class FusedAttention(torch.nn.Module):
    """Whole-sequence causal attention by PyTorch's fused operator, in place of Megatron's unfused one."""

    def __init__(self, config: Any, *_positional: Any, **_keywords: Any) -> None:
        super().__init__()
        self._scale = config.softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``[s, b, heads, d]`` in, ``[s, b, heads * d]`` out."""
        # A copy of the values, like in slices: a view would keep the whole projection alive.
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
        memory: Whether to meter the second iteration, which makes times useless.
        fused: Whether stock's layers use the fused attention.
    """
    from megatron_het.runtime.session import HetSession

    if not memory:
        pin_rank(rank=rank)
    if fused:
        from megatron.core.models.backends import LocalSpecProvider

        LocalSpecProvider.core_attention = lambda self: FusedAttention
    watcher = Watcher(Path(out) / f"watch-{rank}.json", memory)
    wrap_stock(watcher.wrap)
    HetSession.forward_backward = watcher.wrap(HetSession.forward_backward)


class Watcher:
    """Times all training iterations; meters the memory of one.

    Args:
        path: File for the measurements, as JSON.
        memory: Whether to meter memory.
    """

    metered_iteration = 1  # training iteration whose memory is measured, from 0

    def __init__(self, path: Path, memory: bool) -> None:
        self._path = path
        self._memory = memory
        self.found: dict[str, Any] = {"iterations_s": []}
        self._nested = False

    def wrap(self, step: Step) -> Step:
        """The forward-backward function ``step`` with this watcher's measurements."""

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
        # Added, because the key-value pool exists before the iteration.
        self.found["kv_pool_bytes"] = pool
        self.found["activation_bytes"] = region.growth_bytes + pool
        return result


def pool_bytes(model: Any) -> int:
    """Size of the key-value pools of all layers of model chunks, wrapped or not."""
    from megatron.core.utils import unwrap_model

    from megatron_het.attention.core import slice_caches

    chunks = unwrap_model(model if isinstance(model, list) else [model])
    return sum(cache.pool_bytes for cache in slice_caches(chunks))


def watch_documents(*, rank: int, out: str) -> None:
    """Measure times like :func:`watch`, and also write ``packed-<rank>.json``.

    Args:
        rank: This rank.
        out: Folder of both files.  The second has the ``documents`` of every microbatch of every iteration,
            ``pool_bytes`` of all layers after the last one, and ``sent_bytes`` to other context-parallel ranks.
    """
    from megatron_het.features.context_parallel.runtime import CommutedContextParallel
    from megatron_het.features.documents.runtime import DocumentStarts
    from megatron_het.runtime.session import HetSession

    watch(rank=rank, out=out)
    found: dict[str, Any] = {"documents": [], "pool_bytes": 0, "sent_bytes": 0}

    def count(_: Any, messages: dict[int, torch.Tensor], *more: Any) -> None:
        found["sent_bytes"] += sum(message.nbytes for message in messages.values())

    def note(_: None, starts: DocumentStarts, microbatches: int, *more: Any) -> None:
        found["documents"].append([starts.of(m) for m in range(microbatches)])

    def write(_: Any, session: HetSession, **keywords: Any) -> None:
        found["pool_bytes"] = pool_bytes(keywords["model"])
        (Path(out) / f"packed-{rank}.json").write_text(json.dumps(found), encoding="utf-8")

    around(CommutedContextParallel, "_send", before=count)
    around(DocumentStarts, "exchange", after=note)
    around(HetSession, "forward_backward", after=write)


# Ministage runs: one meter counts all allocations and the existing state, so that its peak is that of the rank.  A
# second one ignores the allocations of the parameter window: its peak is that of saved tensors, boundary inputs,
# transfer buffers and workspace.  Neither counts host memory.
_WINDOW_METHODS = ("restart", "handle", "before_backward")


def watch_window(*, rank: int, out: str) -> None:
    """Meter the start and the third iteration of this rank into ``watch-<rank>.json``."""
    from megatron.training import training

    from megatron_het.report import RunReport
    from megatron_het.runtime.session import HetSession

    RunReport._meter = lambda self: contextlib.nullcontext()  # off, because this watcher has its own meters
    watcher = WindowWatcher(Path(out) / f"watch-{rank}.json", memory=True)
    HetSession.forward_backward = watcher.wrap(HetSession.forward_backward)
    around(HetSession, "before_loading", after=watcher.load_begins)
    around(HetSession, "settle", before=watcher.save_begins)
    around(HetSession, "copies", after=watcher.save_ends)
    training.setup_model_and_optimizer = watcher.start(training.setup_model_and_optimizer)


class WindowWatcher(Watcher):
    """Meters the third iteration, in which all optimizer state exists from the start."""

    metered_iteration = 2
    _loads: Any = None  # the session into which a checkpoint is loaded

    def start(self, setup: Step) -> Step:
        """The function ``setup`` of model, optimizer and checkpoint, with its peak memory put into ``found``."""

        @functools.wraps(setup)
        def metered(*positional: Any, **keywords: Any) -> Any:
            from megatron_het.device.memory import CpuMemoryMeter

            with CpuMemoryMeter() as meter, meter.region("start") as visit:
                result = setup(*positional, **keywords)
            self.found["start_bytes"] = visit.peak_bytes
            if self._loads is not None:
                self.found["loading"] = self._loads.feature("window").use.as_json()
            return result

        return metered

    def load_begins(self, _: Any, session: Any, *more: Any, **named: Any) -> None:
        """Reset the window's peak before a checkpoint is loaded."""
        self._loads = session
        session.feature("window").use.restart()

    def save_begins(self, session: Any) -> None:
        """Reset the window's peak before a checkpoint is saved."""
        session.feature("window").use.restart()

    def save_ends(self, _: Any, session: Any, parameters: Any) -> None:
        """Put the window's memory during a save into ``found``, after the checkpoint's copies are made."""
        self.found["saving"] = session.feature("window").use.as_json()

    def metered(self, step: Step, positional: Any, keywords: Any) -> Any:
        from megatron_het.device.memory import CpuMemoryMeter

        session = positional[0]
        offload = session.feature("activation_offload")
        if offload is not None:
            offload.pool.reset_peak()
        with CpuMemoryMeter() as everything, CpuMemoryMeter() as activations:
            everything.add(_state(session))
            with (
                _window_overlooked(activations),
                everything.region("iteration") as whole,
                activations.region("iteration") as part,
            ):
                result = step(*positional, **keywords)
        self.found["total_bytes"] = whole.peak_bytes
        self.found["activation_bytes"] = part.peak_bytes
        host = offload.pool.peak_bytes if offload is not None else 0
        self.found["host_activation_bytes"] = host
        return result


def _state(session: Any) -> Iterator[torch.Tensor]:
    """Parameters, gradients and optimizer state of a rank, open or closed."""
    from megatron.core.utils import get_model_config

    from megatron_het.report import optimizer_tensors
    from megatron_het.runtime.feature import optimizer_of

    yield from optimizer_tensors(optimizer_of(get_model_config(session._models[0])))
    for chunk in session.feature("window").windows():
        yield from _tensors(chunk)


def _tensors(chunk: Any) -> Iterator[torch.Tensor]:
    for buffer in chunk.buffers:
        yield from (buffer.param_data, buffer.grad_data)
    for bucket in chunk.buckets:
        yield bucket.shard
        if bucket.gradient is not None:
            yield bucket.gradient


@contextlib.contextmanager
def _window_overlooked(activations: Any) -> Iterator[None]:
    """Context in which a meter ignores the allocations of the parameter window."""
    from megatron_het.features.window.chunk import ChunkWindow
    from megatron_het.features.window.runtime import ParameterWindow

    def overlooked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*positional: Any, **keywords: Any) -> Any:
            with activations.ignoring():
                return method(*positional, **keywords)

        return run

    with contextlib.ExitStack() as undo:
        for name in _WINDOW_METHODS:
            undo.enter_context(_replaced(ParameterWindow, name, overlooked))
        undo.enter_context(_replaced(ChunkWindow, "keep_gradient_shards", overlooked))
        yield


@contextlib.contextmanager
def _replaced(owner: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
