"""A race detector for CUDA streams, on the CPU: conflicting accesses of a storage must be ordered by events.

CUDA runs the work of different streams in any order unless events order it.  A missing wait shows on a GPU only with
unlucky timing.  Here streams have vector clocks: every operator is an access by the current stream, and waits and
events join clocks.  Two accesses of a storage, at least one of them a write, that no wait orders raise an error at
once.  Memory that is freed while another stream may still use it needs ``record_stream``, as with the caching
allocator.

Use: ``with stream_order() as order:`` around code for a CUDA device.  ``torch.cuda.Stream``,
``Event``, ``stream`` and ``current_stream`` are replaced inside; tensors are on the CPU with real values, or
fake ones on a simulated device.
"""

import contextlib
import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]  # stream number -> number of its accesses that are known to have happened
HOST = -1  # the host's stream number: every access of a stream comes after the host's work so far


class StreamOrderError(RuntimeError):
    """Two conflicting accesses of a storage are not ordered."""


def line_of(frame: FrameType) -> str:
    """Position of a frame, ``file:line``, without the folders above the package."""
    parts = Path(frame.f_code.co_filename).parts
    start = max((i for i, part in enumerate(parts) if part in ("megatron_het", "megatron")), default=len(parts) - 1)
    return f"{'/'.join(parts[start:])}:{frame.f_lineno}"


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


@dataclass(slots=True, eq=False)
class _Access:
    """An access to the bytes ``lo`` to ``hi`` of a storage."""

    stream: int
    count: int
    label: str
    writes: bool
    lo: int
    hi: int


@dataclass(slots=True)
class _History:
    """A storage's accesses with which later ones may conflict, and the stream that allocates its memory."""

    accesses: list[_Access] = field(default_factory=list)
    home: int = 0
    recorded: set[int] = field(default_factory=set)


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Offsets in the storage of a tensor's first byte and of the end of its last one."""
    if tensor.numel() == 0:
        return 0, 0
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


class StreamOrder:
    """The clocks of all streams, and the histories of all storages.

    Args:
        ignored: A line of code whose waits are ignored, to test that the error is found.
    """

    def __init__(self, ignored: str = "") -> None:
        self._numbers = itertools.count()
        self._clocks: dict[int, Clock] = {}
        self._names: dict[int, str] = {HOST: "the host"}
        self._host: Clock = {HOST: 0}
        self._histories: dict[int, _History] = {}
        self._debts: dict[int, list[_Access]] = defaultdict(list)
        """Accesses of freed memory, by the stream whose next allocation may reuse it."""
        self._ignored = ignored
        self.waits: set[str] = set()  # lines of code (``file:line``) in which a stream or the host waited
        self.waits_of_host: set[str] = set()  # those in which the host waited
        self.current = [self.new_stream("the computing stream")]

    def new_stream(self, name: str = "") -> int:
        """Add a stream; returns its number."""
        number = next(self._numbers)
        self._clocks[number] = {}
        self._names[number] = name or f"stream {number}"
        return number

    def streams(self) -> list[int]:
        """The numbers of all streams."""
        return list(self._clocks)

    def clock(self, stream: int) -> Clock:
        """Returns the clock of a stream's next work: the accesses that are known to have happened before it."""
        return dict(self._clocks[stream])

    def order(self, stream: int | None, clock: Clock, beyond: tuple[str, ...] = ()) -> None:
        """Order later work of a stream (None: of the host, and so of all streams) after a clock.

        Args:
            beyond: Parts of paths; callers in such files are skipped when the waiting line is determined.
        """
        frame = sys._getframe(2)  # the caller of the replaced function
        while any(part in frame.f_code.co_filename for part in beyond) and frame.f_back is not None:
            frame = frame.f_back
        line = line_of(frame)
        self.waits.add(line)
        if stream is None:
            self.waits_of_host.add(line)
        if line != self._ignored:
            self.order_quietly(stream, clock)

    def order_quietly(self, stream: int | None, clock: Clock) -> None:
        """Like :meth:`order` for waits inside libraries: the waiting line is not recorded and cannot be ignored."""
        _join(self._host if stream is None else self._clocks[stream], clock)

    def access(self, tensor: torch.Tensor, label: str, *, writes: bool) -> None:
        """Record that the current stream reads or writes a tensor; an unknown storage that is written is new memory.

        Raises:
            StreamOrderError: An earlier conflicting access is not ordered before; for new memory, an access to freed
                memory that it may reuse.
        """
        stream = self.current[-1]
        clock = self._host if stream == HOST else self._clocks[stream]
        _join(clock, self._host)
        storage = tensor.untyped_storage()
        history = self._histories.get(storage._cdata)
        if history is None:
            history = self._histories[storage._cdata] = _History(home=stream)
            weakref.finalize(storage, self._died, storage._cdata).atexit = False
            if writes:
                for before in self._debts.pop(stream, ()):
                    self._check(before, clock, stream, "memory that was freed and is given out again")
        lo, hi = _bytes_of(tensor)
        for before in history.accesses:
            if (writes or before.writes) and before.lo < hi and lo < before.hi:
                self._check(before, clock, stream, label)
        clock[stream] = clock.get(stream, 0) + 1
        history.accesses = [
            a
            for a in history.accesses
            if not (lo <= a.lo and a.hi <= hi and (writes or (a.stream == stream and not a.writes)))
        ]
        history.accesses.append(_Access(stream, clock[stream], label, writes, lo, hi))

    def record(self, storage: Any, stream: int) -> None:
        """``record_stream``: the memory is not reused before the stream's work so far has run."""
        history = self._histories.get(storage._cdata)
        if history is not None:
            history.recorded.add(stream)

    def _died(self, key: int) -> None:
        """Remove a storage; other streams' accesses to its memory must be ordered before the memory is reused."""
        history = self._histories.pop(key, None)
        if history is not None and history.home != HOST:  # host memory is reused only after its copies
            others = [a for a in history.accesses if a.stream not in {history.home, HOST} | history.recorded]
            self._debts[history.home] += others

    def free(self, storage: Any) -> None:
        """Free a storage: the next allocation on its home stream may reuse its memory."""
        self._died(storage._cdata)

    def _check(self, before: _Access, clock: Clock, stream: int, label: str) -> None:
        if before.stream != stream and clock.get(before.stream, 0) < before.count:
            raise StreamOrderError(
                f"{label} on {self._names[stream]} is not ordered after {before.label} on "
                f"{self._names[before.stream]}: an event wait or record_stream is missing"
            )


class _Watch(TorchDispatchMode):
    """Dispatch mode that records the accesses of every operator."""

    def __init__(self, order: StreamOrder, device: str | None) -> None:
        super().__init__()
        self._order, self._device = order, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "prim"):
            return func(*args, **kwargs)
        if self._device is not None and not self._on_device(args, kwargs):
            self._order.current.append(HOST)
            try:
                return self._run(func, args, kwargs)
            finally:
                self._order.current.pop()
        return self._run(func, args, kwargs)

    def _on_device(self, args: Any, kwargs: Any) -> bool:
        """Whether an operator has a tensor on the device, or creates one there."""
        if kwargs.get("device") is not None and kwargs["device"].type == self._device:
            return True
        leaves = tree_leaves((args, kwargs))
        return any(leaf.device.type == self._device for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
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
                    self._order.access(tensor, name, writes=id(tensor) in out)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before:
                self._order.access(tensor, f"{name} (new memory)", writes=True)
        return result


def _stand_ins(order: StreamOrder, waited: Callable[[str], None]) -> tuple[Any, Any]:
    """Returns replacements of ``Event`` and ``Stream`` that update ``order``."""

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._clock: Clock = {}

        def record(self, stream: Any = None) -> None:
            self._clock = order.clock(order.current[-1] if stream is None else stream.number)

        def query(self) -> bool:
            return False  # as late as it can be

        def wait(self, stream: Any = None) -> None:
            order.order(order.current[-1] if stream is None else stream.number, self._clock)

        def synchronize(self) -> None:
            waited("an event")
            order.order(None, self._clock)

    class Stream:
        def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
            self.number = order.new_stream() if number is None else number

        def wait_stream(self, other: "Stream") -> None:
            order.order(self.number, order.clock(other.number))

        def wait_event(self, event: Event) -> None:
            order.order(self.number, event._clock)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            waited("a stream")
            order.order(None, order.clock(self.number))

        def query(self) -> bool:
            return False  # as late as it can be

        def __enter__(self) -> "Stream":
            order.current.append(self.number)
            return self

        def __exit__(self, *_: Any) -> None:
            order.current.pop()

    return Event, Stream


@contextlib.contextmanager
def stream_order(
    ignored: str = "", on_host_wait: Callable[[str], None] = lambda _: None, device: str | None = None
) -> Iterator[StreamOrder]:
    """Replaces CUDA's streams and events for the duration of a block.

    Args:
        ignored: A line of code whose waits are ignored, in the form of ``StreamOrder.waits``.
        on_host_wait: Called with the cause when the host waits for an event or a stream.
        device: Device type of the streams; operators without tensors there run on the host.  None: every operator
            runs on a stream.
    """
    order = StreamOrder(ignored)

    Event, Stream = _stand_ins(order, on_host_wait)

    @contextlib.contextmanager
    def stream(one: Any) -> Iterator[None]:
        order.current.append(order.current[-1] if one is None else one.number)
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
        if size and (device is None or storage.device.type != "cpu"):
            order.access(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), "resize_", writes=True)
        return result

    with (
        mock.patch.object(torch.cuda, "Stream", Stream),
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "stream", stream),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: Stream(number=order.current[-1])),
        mock.patch.object(torch.Tensor, "record_stream", record_stream),
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        mock.patch.object(torch.cuda, "default_stream", lambda *_: Stream(number=0)),
        _Watch(order, device),
    ):
        yield order
