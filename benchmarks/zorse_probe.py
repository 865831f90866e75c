"""Looks into ministage runs from inside: live bytes of activations, of everything, at the start, in a save, in a load.

One meter sees whatever operators allocate and has been shown the state that was there before: its
peak is that of the rank.  A second one overlooks what the parameter window allocates: its peak is
that of saved tensors, boundary inputs, transfer buffers and workspace.  Neither counts host memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.slimpipe_probe import Step, Watcher

_WINDOW_METHODS = ("begin", "handle", "before_backward")
_RESIZING = ("fetch", "store", "open", "close", "open_gradients", "drop_gradients")


def watch(*, rank: int, out: str) -> None:
    """Meter the start and the third iteration of this rank into ``watch-<rank>.json``."""
    from megatron.training import training

    from megatron_het.report.run_report import RunReport
    from megatron_het.runtime.session import HetSession

    RunReport._meter = lambda self: contextlib.nullcontext()  # meters one more time, and differently
    watcher = WindowWatcher(Path(out) / f"watch-{rank}.json", memory=True)
    HetSession.forward_backward = watcher.wrap(HetSession.forward_backward)
    HetSession.before_loading = watcher.load_begins(HetSession.before_loading)
    HetSession.settle = watcher.save_begins(HetSession.settle)
    HetSession.copies = watcher.save_ends(HetSession.copies)
    training.setup_model_and_optimizer = watcher.start(training.setup_model_and_optimizer)


class WindowWatcher(Watcher):
    """Meters an iteration in which all state exists from the start: updates have been made before."""

    metered_iteration = 2
    _loads: Any = None
    """The session into which a checkpoint is loaded."""

    def start(self, setup: Step) -> Step:
        """The building of model and optimizer and the loading of a checkpoint, with their peaks put into ``found``."""

        @functools.wraps(setup)
        def metered(*positional: Any, **keywords: Any) -> Any:
            from megatron_het.device.memory import CpuMemoryMeter

            with CpuMemoryMeter() as meter, _resizes_shown(), meter.region("start") as visit:
                result = setup(*positional, **keywords)
            self.found["start_bytes"] = visit.peak_bytes
            if self._loads is not None:
                self.found["loading"] = self._loads.feature("window").window.use.as_json()
            return result

        return metered

    def load_begins(self, prepare: Step) -> Step:
        """Returns what comes first when a checkpoint is loaded."""

        @functools.wraps(prepare)
        def begun(session: Any, models: Any, optimizer: Any) -> Any:
            result = prepare(session, models, optimizer)
            self._loads = session
            session.feature("window").window.use.restart()
            return result

        return begun

    def save_begins(self, settle: Step) -> Step:
        """Returns what comes first when a checkpoint is taken."""

        @functools.wraps(settle)
        def begun(session: Any) -> Any:
            session.feature("window").window.use.restart()
            return settle(session)

        return begun

    def save_ends(self, copies: Step) -> Step:
        """Returns what comes last when a checkpoint is taken; what the window held meanwhile is put into ``found``."""

        @functools.wraps(copies)
        def ended(session: Any, parameters: Any) -> Any:
            found = copies(session, parameters)
            self.found["saving"] = session.feature("window").window.use.as_json()
            return found

        return ended

    def metered(self, step: Step, positional: Any, keywords: Any) -> Any:
        from megatron_het.device.memory import CpuMemoryMeter

        session = positional[0]
        offload = session.feature("activation_offload")
        if offload is not None:
            offload.offload.pool.reset_peak()
        with CpuMemoryMeter() as everything, CpuMemoryMeter() as activations:
            everything.add(_state(session))
            with (
                _window_overlooked(activations),
                _resizes_shown(),
                everything.region("iteration") as whole,
                activations.region("iteration") as part,
            ):
                result = step(*positional, **keywords)
        self.found["total_bytes"] = whole.peak_bytes
        self.found["activation_bytes"] = part.peak_bytes
        host = offload.offload.pool.peak_bytes if offload is not None else 0
        self.found["host_activation_bytes"] = host
        return result


def _state(session: Any) -> Iterator[torch.Tensor]:
    """Parameters, gradients and optimizer state of a rank, open or closed."""
    from megatron.core.utils import get_model_config

    from megatron_het.report.run_report import optimizer_tensors
    from megatron_het.runtime.feature import optimizer_of

    yield from optimizer_tensors(optimizer_of(get_model_config(session._models[0])))
    for chunk in session.feature("window").window._chunks:
        yield from _tensors(chunk)


def _tensors(chunk: Any) -> Iterator[torch.Tensor]:
    for buffer in chunk.ddp.buffers:
        yield from (buffer.param_data, buffer.grad_data)
    for bucket in chunk.buckets:
        yield bucket.shard
        if bucket.gradient is not None:
            yield bucket.gradient


@contextlib.contextmanager
def _window_overlooked(activations: Any) -> Iterator[None]:
    """While it is open, a meter overlooks what the window allocates."""
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
def _resizes_shown() -> Iterator[None]:
    """While it is open, all meters see at once what the window resizes."""
    from megatron_het.features.window.chunk import ChunkWindow, HostCopy

    def looking(tensors: Callable[..., Iterable[torch.Tensor]]) -> Callable[[Any], Any]:
        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def run(self: Any, *positional: Any, **keywords: Any) -> Any:
                result = method(self, *positional, **keywords)
                for tensor in tensors(self, *positional):
                    tensor.detach()  # an operator, by which meters see the size
                return result

            return run

        return wrap

    with contextlib.ExitStack() as undo:
        for name in _RESIZING:
            undo.enter_context(_replaced(ChunkWindow, name, looking(lambda chunk, *_: _tensors(chunk))))
        for name in ("fetch", "store"):
            undo.enter_context(_replaced(HostCopy, name, looking(lambda _copy, tensor: [tensor])))
        yield


@contextlib.contextmanager
def _replaced(owner: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
