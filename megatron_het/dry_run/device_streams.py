"""Streams of a device that is not there: what runs on which, and whether every access comes after those it needs.

The stand-ins of :mod:`megatron_het.dry_run.stream_order` give the streams; this module adds those of NCCL.  A
communicator has a stream of its own: an operation starts after what its caller's stream was given before, and
``wait`` orders the stream that is current then after the operation.  NCCL keeps the tensors of an operation itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_het.dry_run.host_waits import HostWaits, HostWatch
from megatron_het.dry_run.stream_order import StreamOrder, stream_order

_READ_ONLY = {"send"}


class _Work(dist.Work):
    """An operation on a communicator's stream.

    Args:
        order: Of all streams.
        clock: What has happened when the operation has ended.
    """

    def __init__(self, order: StreamOrder, clock: dict[int, int]) -> None:
        super().__init__()
        self._order, self._clock = order, clock

    def wait(self, timeout: Any = None) -> bool:
        """The current stream continues after the operation; the host does not wait."""
        self._order.order(self._order.current[-1], self._clock, beyond=("torch/", "dry_run/"))
        return True

    def is_completed(self) -> bool:
        """As late as it can be."""
        return False


class Communicators(TorchDispatchMode):
    """Runs operations of ``torch.distributed`` on streams of their communicators.

    Args:
        order: Of all streams.
    """

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order
        self._streams: dict[tuple[str, int], int] = {}
        self._works: list[_Work] = []

    def restart(self) -> None:
        """Let go of the handles of operations that have ended."""
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
        """Transfers of a pair have a communicator of their own in each group, collectives that of the group."""
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
        waits: Told of every wait of the host for a stream, an event or the device.
        ignored: See :func:`stream_order`.
    """

    def waited(what: str) -> None:
        waits.add(f"wait for {what}")

    with stream_order(ignored, on_host_wait=waited, device="cuda") as order:
        communicators = Communicators(order)
        watch = HostWatch(waits, lambda: order.order_quietly(None, order.clock(order.current[-1])))
        with communicators, watch, mock.patch.object(torch.cuda, "synchronize", lambda *_: _synchronize(order, waited)):
            yield order, communicators


def _synchronize(order: StreamOrder, waited: Any) -> None:
    waited("the device")
    for stream in order.streams():
        order.order_quietly(None, order.clock(stream))
