"""What the host computes with: the rule of streams.

The host plays the compute stream.  An operation's tensors may be touched again only after ``wait``, whether the
operation has ended by then or not: on a GPU that is luck.  After ``wait`` the host goes on, and stops where it touches
what the operation still uses, which is where the compute stream would stand still.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_het.platform.nccl_order.launch import Device


class ComputeStream(TorchDispatchMode):
    """Everything that the host computes, operator by operator.

    Args:
        device: Of this process.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch's wrapper would cost more than the rest."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`TorchDispatchMode`."""
        kwargs = kwargs or {}
        writes = _writes(func)
        if writes and self._device.uses:
            given: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
            for place, value in given:
                for entry in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(entry, torch.Tensor):
                        self._device.touch(entry, writes[place], func)
        return func(*args, **kwargs)


@functools.cache
def _writes(func: Any) -> dict[int | str, bool]:
    """By place and by name of an argument: whether the operator writes to it; empty where it touches no memory."""
    found: dict[int | str, bool] = {}
    if func.namespace == "c10d" or func.is_view:
        return found
    for place, argument in enumerate(func._schema.arguments):
        found[place] = found[argument.name] = argument.alias_info is not None and argument.alias_info.is_write
    return found


def watch_memory(device: Device) -> None:
    """Watch this thread's operators, and what reads or frees memory without one, from now on."""
    ComputeStream(device).__enter__()

    def before(owner: Any, name: str, check: Callable[[Any], None]) -> None:
        original = getattr(owner, name)

        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            check(self)
            return original(self, *arguments, **keywords)

        setattr(owner, name, call)

    for name in ("numpy", "tolist"):
        before(torch.Tensor, name, lambda tensor: device.touch(tensor, False, "a read of the host"))
    before(torch.UntypedStorage, "resize_", device.touch_storage)
