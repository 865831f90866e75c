"""Streams and events on the CPU that check order: every access of a storage must come after those it conflicts with.

CUDA runs the work of different streams at any time, in any order, unless an event says otherwise.  A missing wait
is seen on a GPU only when the timing is unlucky.  Here streams are names with vector clocks: every operator is an
access of the current stream, waits and events join clocks, and two accesses of one storage, at least one of them
a write, that no wait has put in order are an error at once.  A storage that is freed while another stream may still
use it needs ``record_stream``, as the caching allocator wants it.

Use: ``with stream_order() as order:`` around code that believes to be on a CUDA device.  ``torch.cuda.Stream``,
``Event``, ``stream`` and ``current_stream`` are stand-ins inside; tensors stay on the CPU and hold real values.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]
"""Stream number -> how many of its accesses are known to have happened."""


class StreamOrderError(RuntimeError):
    """Two accesses of one storage that nothing has put in order."""


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


@dataclass(slots=True)
class _Access:
    stream: int
    count: int
    label: str


@dataclass(slots=True)
class _History:
    """Of a storage: its last write, and the last read of every stream since then."""

    write: _Access | None = None
    reads: dict[int, _Access] = field(default_factory=dict)
    home: int = 0
    recorded: set[int] = field(default_factory=set)


class StreamOrder:
    """The clocks of all streams, and the histories of all storages.

    Args:
        ignored: The line of code whose waits are left out, to see that it is noticed.

    Attributes:
        waits: The lines that have waited, ``file:line``: they order streams, or the host.
    """

    def __init__(self, ignored: str = "") -> None:
        self._numbers = itertools.count()
        self._clocks: dict[int, Clock] = {}
        self._names: dict[int, str] = {}
        self._host: Clock = {}
        self._histories: dict[int, _History] = {}
        self._kept: list[Any] = []  # storages stay, so that addresses name one each
        self._ignored = ignored
        self.waits: set[str] = set()
        self.current = [self.new_stream("the computing stream")]

    def new_stream(self, name: str = "") -> int:
        """A number for a stream."""
        number = next(self._numbers)
        self._clocks[number] = {}
        self._names[number] = name or f"stream {number}"
        return number

    def clock(self, stream: int) -> Clock:
        """What a stream's next work knows to have happened."""
        return dict(self._clocks[stream])

    def order(self, stream: int | None, clock: Clock) -> None:
        """Work of a stream (None: of the host, and of all streams from here on) comes after a clock."""
        frame = sys._getframe(2)  # who called the stand-in
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.waits.add(line)
        if line != self._ignored:
            _join(self._host if stream is None else self._clocks[stream], clock)

    def access(self, storage: Any, label: str, *, writes: bool) -> None:
        """The current stream reads or writes a storage.

        Raises:
            StreamOrderError: An earlier access that conflicts is not known to have happened.
        """
        stream = self.current[-1]
        clock = self._clocks[stream]
        _join(clock, self._host)
        history = self._histories.get(storage._cdata)
        if history is None:
            history = self._histories[storage._cdata] = _History(home=stream)
            self._kept.append(storage)
        conflicts = [history.write] if history.write is not None else []
        if writes:
            conflicts += history.reads.values()
        for before in conflicts:
            self._check(before, clock, stream, label)
        clock[stream] = clock.get(stream, 0) + 1
        now = _Access(stream, clock[stream], label)
        if writes:
            history.write = now
            history.reads.clear()
        else:
            history.reads[stream] = now

    def record(self, storage: Any, stream: int) -> None:
        """``record_stream``: the memory is not given away before the stream's work so far has run."""
        history = self._histories.setdefault(storage._cdata, _History(home=self.current[-1]))
        history.recorded.add(stream)

    def free(self, storage: Any) -> None:
        """The storage gives its memory back: who allocates on its home stream next may write there at once.

        Raises:
            StreamOrderError: Another stream may still use it.
        """
        history = self._histories.pop(storage._cdata, None)
        if history is None:
            return
        clock = dict(self._clocks[history.home])
        _join(clock, self._host)
        for before in [*filter(None, [history.write]), *history.reads.values()]:
            if before.stream not in history.recorded:
                self._check(before, clock, history.home, "freeing the memory")

    def _check(self, before: _Access, clock: Clock, stream: int, label: str) -> None:
        if before.stream != stream and clock.get(before.stream, 0) < before.count:
            raise StreamOrderError(
                f"{label} on {self._names[stream]} is not ordered after {before.label} on "
                f"{self._names[before.stream]}: an event wait or record_stream is missing"
            )


class _Watch(TorchDispatchMode):
    """Turns operators into accesses."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::record_stream":
            self._order.record(args[0].untyped_storage(), args[1].number)
            return None
        given = [(a, v) for a, v in zip(func._schema.arguments, args)]
        written = [v for a, v in given if a.alias_info is not None and a.alias_info.is_write]
        out = {id(t) for t in tree_leaves([written, kwargs.get("out")]) if isinstance(t, torch.Tensor)}
        before = {t.untyped_storage()._cdata for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor)}
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and name not in ("aten::set_", "aten::detach", "aten::alias"):
            for tensor in tree_leaves([args, kwargs]):
                if isinstance(tensor, torch.Tensor):
                    self._order.access(tensor.untyped_storage(), name, writes=id(tensor) in out)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before:
                self._order.access(tensor.untyped_storage(), f"{name} (new memory)", writes=True)
        return result


def _stand_ins(order: StreamOrder) -> tuple[Any, Any]:
    """The classes ``Event`` and ``Stream`` whose objects speak to ``order``."""

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._clock: Clock = {}

        def record(self, stream: Any = None) -> None:
            self._clock = order.clock(order.current[-1] if stream is None else stream.number)

        def query(self) -> bool:
            return False  # as late as it can be

        def synchronize(self) -> None:
            order.order(None, self._clock)

    class Stream:
        def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
            self.number = order.new_stream() if number is None else number

        def wait_stream(self, other: Stream) -> None:
            order.order(self.number, order.clock(other.number))

        def wait_event(self, event: Event) -> None:
            order.order(self.number, event._clock)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            order.order(None, order.clock(self.number))

    return Event, Stream


@contextlib.contextmanager
def stream_order(ignored: str = "") -> Iterator[StreamOrder]:
    """Stand-ins for CUDA's streams and events, for the duration of a block.

    Args:
        ignored: The line of code whose waits are left out, as ``StreamOrder.waits`` names it.
    """
    order = StreamOrder(ignored)

    Event, Stream = _stand_ins(order)

    @contextlib.contextmanager
    def stream(one: Any) -> Iterator[None]:
        order.current.append(one.number)
        try:
            yield
        finally:
            order.current.pop()

    def record_stream(tensor: torch.Tensor, one: Any) -> None:
        order.record(tensor.untyped_storage(), one.number)

    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if size == 0:
            order.free(storage)
        result = resize(storage, size)
        if size:
            order.access(storage, "resize_ (new memory)", writes=True)
        return result

    with (
        mock.patch.object(torch.cuda, "Stream", Stream),
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "stream", stream),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: Stream(number=order.current[-1])),
        mock.patch.object(torch.Tensor, "record_stream", record_stream),
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        _Watch(order),
    ):
        yield order
