"""Streams of a simulated device: which work runs on which stream, and whether dependent accesses are ordered.

The stand-ins of :mod:`megatron_het.dry_run.stream_order` are the streams; this module adds those of NCCL.  A
communicator has a stream of its own: an operation starts after the earlier work of its caller's stream, and
``wait`` orders the current stream after the operation.  NCCL keeps the tensors of an operation itself.
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.data
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_het.device import cpu
from megatron_het.dry_run.stream_order import StreamOrder, line_of, stream_order

# A simulated CUDA device: fake tensors are on ``cuda:0``, and operators with tensors of several devices are errors.
#
# Python code sees tensors on ``cuda:0`` and tensors on the CPU.  torch's fake tensors check every operator: two devices
# in one operator are refused, as on a GPU.  For torch's C++ code all of them are on the CPU, because its
# autograd engine would query a real device for its streams.  So a device from C++ code is ignored
# (:class:`OneDevice`), and every Python function with a device argument marks its call (:func:`named`).
#
# The replacements are not undone: the process is for one dry run.


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_EFFICIENT_BACKWARD = torch.ops.aten._efficient_attention_backward.default
"""torch 2.13 cannot run it on fake tensors: its stand-in lacks the argument ``out``."""
_PINNED: set[int] = set()  # storages of pinned memory, by address


class _Named(threading.local):
    """Whether a Python function is running that has chosen the device of its result."""

    now = False


_NAMED = _Named()


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Context in which device arguments are used as given."""
    before, _NAMED.now = _NAMED.now, True
    try:
        yield
    finally:
        _NAMED.now = before


def install() -> None:
    """Give this process a device; before Megatron is imported, and before tensors are made."""
    cpu._without_compiler()
    cpu._device_identity()
    cpu._streams_and_events()
    cpu._random_state()
    cpu._memory_queries()
    _device_of_fake_tensors()
    for name in cpu._FACTORIES:
        setattr(torch, name, _making(getattr(torch, name)))
    for name in cpu._TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _making(getattr(torch.Tensor, name), like_self=True))
    _moves()
    _loaders()


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in pinned host memory."""
    return tensor.untyped_storage()._cdata in _PINNED


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Note that a tensor's memory is pinned."""
    storage = tensor.untyped_storage()
    if storage._cdata not in _PINNED:
        _PINNED.add(storage._cdata)
        weakref.finalize(storage, _PINNED.discard, storage._cdata).atexit = False
    return tensor


def _device_of_fake_tensors() -> None:
    from torch._subclasses import fake_tensor

    def device(args: Any) -> torch.device:
        return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else CPU

    fake_tensor._DISPATCH_META_HANDLERS[torch.ops.prim.device.default] = device
    fake: Any = fake_tensor.FakeTensor
    fake.is_cuda = property(lambda self: self.fake_device.type == "cuda")
    fake.is_cpu = property(lambda self: self.fake_device.type == "cpu")
    type_of = torch.Tensor.type

    @functools.wraps(type_of)
    def cuda_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        if isinstance(result, str) and self.is_cuda and not result.startswith("torch.cuda."):
            return "torch.cuda." + result.removeprefix("torch.")
        return result

    torch.Tensor.type = cuda_type  # type: ignore[method-assign]


def _device(value: Any) -> torch.device:
    """Returns the device for a device, its name or its number."""
    device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    return CUDA if device.type == "cuda" else device


def _making(function: Callable[..., Any], like_self: bool = False) -> Callable[..., Any]:
    """Wraps a factory function so that its device is used, and its pinned memory recorded."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _device(kwargs["device"])
        elif like_self or "like" in function.__name__:
            kwargs["device"] = args[0].device
        pinned = kwargs.pop("pin_memory", False)
        with named():
            made = function(*args, **kwargs)
        return pin(made) if pinned else made

    return make


def _move(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    with named():
        return torch.ops.aten._to_copy.default(tensor, device=device, non_blocking=non_blocking)


def _moves() -> None:
    """Replace ``to``, ``type_as``, ``cuda``, ``cpu`` and ``pin_memory`` of tensors."""
    original = torch.Tensor.to

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One copy for device, dtype and layout, as torch's makes."""
        target, rest = kwargs.pop("device", None), list(args)
        if rest and isinstance(rest[0], torch.Tensor):
            target, rest[0] = rest[0].device, rest[0].dtype
        elif rest and isinstance(rest[0], str | int | torch.device) and not isinstance(rest[0], bool):
            target = rest.pop(0)
        elif rest and rest[0] is None:
            rest.pop(0)
        names = ("dtype", "non_blocking", "copy") if not rest or not isinstance(rest[0], bool) else ("non_blocking",)
        wanted = dict(zip(names, rest, strict=False)) | kwargs
        device = self.device if target is None else _device(target)
        if device == self.device and not wanted.get("copy") and wanted.get("dtype") in (None, self.dtype):
            return self
        wanted.pop("copy", None)
        with named():
            return torch.ops.aten._to_copy.default(self, device=device, **wanted)

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return _move(self, CUDA, non_blocking)

    tensor: Any = torch.Tensor
    tensor.to, tensor.cuda = to, cuda
    tensor.type_as = to  # C++ takes the device of fake tensors for the CPU; ``rms_norm`` in bf16 ends with this call
    tensor.cpu = lambda self, *_, **__: _move(self, CPU)
    tensor.pin_memory = lambda self, *_: self if is_pinned(self) else pin(self.clone())
    tensor.is_pinned = lambda self, *_: is_pinned(self)


def _loaders() -> None:
    """Record the batches of data loaders with ``pin_memory`` as pinned."""
    loader: Any = torch.utils.data.DataLoader
    original = loader.__iter__

    def pinned(self: Any) -> Iterator[Any]:
        for batch in original(self):
            if self.pin_memory:
                for leaf in tree_leaves(batch):
                    if isinstance(leaf, torch.Tensor):
                        pin(leaf)
            yield batch

    loader.__iter__ = pinned


class OneDevice(TorchDispatchMode):
    """Puts results of C++ code on the device of its arguments; use inside of a ``FakeTensorMode``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _EFFICIENT_BACKWARD:
            return (*(torch.empty_like(t) for t in args[1:4]), torch.empty((), device=args[1].device))
        device = kwargs.get("device")
        if device is not None and not _NAMED.now:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            kwargs = {**kwargs, "device": given[0].device if given else CUDA}
        return func(*args, **kwargs)


# Waits of the host for the device: each of them leaves a gap in the device's queue of work.
#
# A value that is read (``item()``), a shape that depends on values (``nonzero()``), a copy between device and host that
# is not asynchronous, or whose host side is not pinned, ``synchronize()`` of the device, of a stream or of an event,
# and a barrier.  They are counted by the line of code and by the operation of the program in which they happen.


_ATEN = torch.ops.aten
_VALUES = {_ATEN._local_scalar_dense: "value read", _ATEN.equal: "values compared"}
_SHAPES = {
    _ATEN.nonzero,
    _ATEN.masked_select,
    _ATEN._unique2,
    _ATEN.unique_dim,
    _ATEN.unique_consecutive,
    _ATEN.repeat_interleave,
    _ATEN.bincount,
}
_PASSED_OVER = ("/torch/", "contextlib.py", "functools.py", "/megatron_het/dry_run/")


class HostWaits:
    """Counts since the last :meth:`restart`."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = defaultdict(int)
        self.during = ""
        """Kind of the operation of the program that runs, empty between them."""

    def restart(self) -> None:
        """Count from zero."""
        self._counts.clear()

    def add(self, what: str) -> None:
        """Count one wait at the caller's line of code."""
        self._counts[what, _caller(), self.during] += 1

    def as_json(self) -> list[dict[str, Any]]:
        """One entry per sort, line and kind of operation, in a fixed order."""
        return [
            {"what": what, "where": where, "during": during, "calls": calls}
            for (what, where, during), calls in sorted(self._counts.items())
        ]


def _caller() -> str:
    """The innermost line of code outside of torch and the dry run."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _PASSED_OVER) and not name.startswith("<"):
            return line_of(frame)
        frame = frame.f_back
    return "torch"


class HostWatch(TorchDispatchMode):
    """Counts operators for which the host waits; use inside of a ``FakeTensorMode`` on ``cuda`` tensors.

    Args:
        waits: Counts the waits.
        waited: Called when the host has waited for the current stream.
    """

    def __init__(self, waits: HostWaits, waited: Callable[[], None]) -> None:
        super().__init__()
        self._waits, self._waited = waits, waited

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        what = self._why(func, args, kwargs)
        if not what:
            return func(*args, **kwargs)
        self._waits.add(what)
        result = func(*args, **kwargs)
        self._waited()
        return result

    def _why(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        packet = func.overloadpacket
        if func.namespace == "c10d":
            return "barrier" if packet.__name__ == "barrier" else ""
        if packet is _ATEN._to_copy:
            return _copy(args[0], kwargs.get("device") or args[0].device, bool(kwargs.get("non_blocking")), None)
        if packet is _ATEN.copy_:
            non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            return _copy(args[1], args[0].device, non_blocking, args[0])
        on_device = any(leaf.is_cuda for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if not on_device:
            return ""
        if packet in (_ATEN.index, _ATEN.index_put_, _ATEN.index_put):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            fills = packet is not _ATEN.index and args[2].numel() == 1  # torch makes it a masked fill
            return "shape from values" if masks and not fills else ""
        return "shape from values" if packet in _SHAPES else _VALUES.get(packet, "")


def _copy(source: torch.Tensor, device: torch.device, non_blocking: bool, target: torch.Tensor | None) -> str:
    """Why the host waits for a copy; empty if it does not."""
    if source.device.type == device.type:
        return ""
    if not non_blocking:
        return f"copy from {source.device.type} to {device.type}"
    host = source if source.device.type == "cpu" else target
    if host is None or not is_pinned(host):
        return f"copy from {source.device.type} to {device.type} of memory that is not pinned"
    return ""


_READ_ONLY = {"send"}


class _Work(dist.Work):
    """An operation on a communicator's stream; ``clock`` is the stream's clock at its end."""

    def __init__(self, order: StreamOrder, clock: dict[int, int]) -> None:
        super().__init__()
        self._order, self._clock = order, clock

    def wait(self, timeout: Any = None) -> bool:
        """The current stream continues after the operation; the host does not wait."""
        self._order.order(self._order.current[-1], self._clock, beyond=("torch/", "dry_run/"))
        return True

    def is_completed(self) -> bool:
        """Returns False: an operation ends as late as possible."""
        return False


class Communicators(TorchDispatchMode):
    """Runs operations of ``torch.distributed`` on streams of their communicators."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order
        self._streams: dict[tuple[str, int], int] = {}
        self._works: list[_Work] = []

    def restart(self) -> None:
        """Drop the handles of operations that have ended."""
        self._works.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "c10d" or func._schema.name == "c10d::barrier":
            return result
        name = func._schema.name.removeprefix("c10d::")
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        tensors = [[t for t in tree_leaves(a) if isinstance(t, torch.Tensor)] for a in args]
        lists = [found for found in tensors if found]
        written = [] if name in _READ_ONLY else lists[0]
        read = lists[0] if name in _READ_ONLY else [t for found in lists[1:] for t in found]
        if not all(t.is_cuda for t in (*written, *read)):
            return result  # of a group on the CPU
        if named.get("asyncOp") is False:
            self._access(name, read, written)
            return result
        stream = self._stream(name, named)
        self._order.order_quietly(stream, self._order.clock(self._order.current[-1]))
        self._order.current.append(stream)
        try:
            self._access(name, read, written)
        finally:
            self._order.current.pop()
        for tensor in (*read, *written):
            self._order.record(tensor.untyped_storage(), stream)
        work = _Work(self._order, self._order.clock(stream))
        self._works.append(work)
        return (result[0], work.boxed()) if isinstance(result, tuple) else work.boxed()

    def _stream(self, name: str, named: dict[str, Any]) -> int:
        """The stream of an operation: each group has one per pair for transfers, and one for collectives."""
        group = dist.ProcessGroup.unbox(named["process_group"]).group_name
        peer = int(named.get("dst", named.get("src", -1))) if name in ("send", "recv_") else -1
        if (group, peer) not in self._streams:
            what = "collectives" if peer < 0 else f"transfers with member {peer}"
            self._streams[group, peer] = self._order.new_stream(f"the stream of {what} of group {group}")
        return self._streams[group, peer]

    def _access(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        for tensor in read:
            self._order.access(tensor, name, writes=False)
        for tensor in written:
            self._order.access(tensor, name, writes=True)


@contextlib.contextmanager
def device_streams(waits: HostWaits, ignored: str = "") -> Iterator[tuple[StreamOrder, Communicators]]:
    """Streams that check order, for fake tensors on a CUDA device.

    Args:
        waits: Counts every wait of the host for a stream, an event or the device.
        ignored: See :func:`stream_order`.
    """

    def waited(what: str) -> None:
        waits.add(f"wait for {what}")

    with stream_order(ignored, on_host_wait=waited, device="cuda") as order:
        communicators = Communicators(order)
        watch = HostWatch(waits, lambda: order.order_quietly(None, order.clock(order.current[-1])))

        def synchronize(*_: Any) -> None:
            waited("the device")
            for stream in order.streams():
                order.order_quietly(None, order.clock(stream))

        with communicators, watch, mock.patch.object(torch.cuda, "synchronize", synchronize):
            yield order, communicators
