"""Checks of the host's operators against the stream order.

The host simulates the compute stream.  An operation's tensors may be touched only after ``wait``, even if the
operation has already ended, because on a GPU that is a matter of timing.  After ``wait`` the host continues, and blocks
when it touches a tensor that the operation still uses, where the compute stream would block.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from testing.nccl_order.launch import Device


class ComputeStream(TorchDispatchMode):
    """Dispatch mode that passes the tensors of every operator to the device's checks."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._launched: set[tuple[Any, tuple[Any, ...]]] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing is compiled here, and torch's own check takes longer than the rest."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`TorchDispatchMode`."""
        kwargs = kwargs or {}
        writes = _writes(func)
        if writes:
            self._note_launch(func, (*args, *kwargs.values()))
        if writes and self._device.uses:
            given: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
            for place, value in given:
                for entry in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(entry, torch.Tensor):
                        self._device.touch(entry, writes[place], func)
        return func(*args, **kwargs)

    def _note_launch(self, func: Any, values: tuple[Any, ...]) -> None:
        """Wait like a host on CUDA: at the first launch of a kernel, an allocation of a new size, a read of a value.

        An operator's kernel depends on types and shapes; new shapes need new memory, too.
        """
        if func is torch.ops.aten._local_scalar_dense.default:
            self._device.wait_for_compute()
        launch = func, _signature(values)
        if launch not in self._launched:
            self._launched.add(launch)
            self._device.host_wait(f"first launch of {func} with {launch[1]}")


def _signature(values: Iterable[Any]) -> tuple[Any, ...]:
    """Types and shapes of the tensors, and lists of sizes, in an operator's arguments."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append((str(value.dtype).removeprefix("torch."), *value.shape))
        elif isinstance(value, list | tuple):
            found += _signature(value) if any(isinstance(entry, torch.Tensor) for entry in value) else [tuple(value)]
    return tuple(found)


@functools.cache
def _writes(func: Any) -> dict[int | str, bool]:
    """Whether an operator writes an argument, by position and by name; empty if it accesses no memory."""
    found: dict[int | str, bool] = {}
    if func.namespace in ("c10d", "profiler") or func.is_view:
        return found
    for place, argument in enumerate(func._schema.arguments):
        found[place] = found[argument.name] = argument.alias_info is not None and argument.alias_info.is_write
    return found


def watch_memory(device: Device) -> None:
    """Check this thread's operators from now on, and ``numpy``, ``tolist`` and ``resize_``, which are not operators."""
    ComputeStream(device).__enter__()

    def before(owner: Any, name: str, check: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            check(self, *arguments)
            return original(self, *arguments, **keywords)

        setattr(owner, name, call)

    for name in ("numpy", "tolist"):
        before(torch.Tensor, name, lambda tensor, *_: device.touch(tensor, False, "a read of the host"))
    sizes: set[int] = set()

    def resized(storage: torch.UntypedStorage, size_bytes: int) -> None:
        if size_bytes and size_bytes not in sizes:
            sizes.add(size_bytes)
            device.host_wait(f"first allocation of {size_bytes} bytes")
        device.touch_storage(storage)

    before(torch.UntypedStorage, "resize_", resized)
