"""Where the host waits for the device: every such place is a gap in what the device is given to do.

A value that is read (``item()``), a shape that depends on values (``nonzero()``), a copy between device and host that
is not asynchronous, or whose host side is not pinned, ``synchronize()`` of the device, of a stream or of an event, and
a barrier.  They are counted by the line of code and by the operation of the program in which they happen.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_het.dry_run.fake_cuda import is_pinned
from megatron_het.dry_run.stream_order import line_of

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
_PASSED_OVER = ("/torch/", "contextlib.py", "functools.py", "/megatron_het/dry_run/", "/platform/stream_order.py")


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
        """Count one wait of whoever called."""
        self._counts[what, _caller(), self.during] += 1

    def as_json(self) -> list[dict[str, Any]]:
        """One entry per sort, line and kind of operation, in a fixed order."""
        return [
            {"what": what, "where": where, "during": during, "calls": calls}
            for (what, where, during), calls in sorted(self._counts.items())
        ]


def _caller() -> str:
    """The innermost line that is neither torch's nor of the dry run."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _PASSED_OVER) and not name.startswith("<"):
            return line_of(frame)
        frame = frame.f_back
    return "torch"


class HostWatch(TorchDispatchMode):
    """Tells of operators for which the host waits; use inside of a ``FakeTensorMode`` on ``cuda`` tensors.

    Args:
        waits: Whom to tell.
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
    """Why the host waits for a copy; empty where it does not."""
    if source.device.type == device.type:
        return ""
    if not non_blocking:
        return f"copy from {source.device.type} to {device.type}"
    host = source if source.device.type == "cpu" else target
    if host is None or not is_pinned(host):
        return f"copy from {source.device.type} to {device.type} of memory that is not pinned"
    return ""
