"""Memory that operations use, until the compute stream is ordered after them."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from testing.nccl_order.items import Item

_CLEAN_EVERY = 256


@dataclass(frozen=True, slots=True)
class Use:
    """A range of memory that an operation reads or writes."""

    item: Item  # the operation
    storage: StorageWeakRef  # weak, so that the memory can be freed
    # low, high: range of bytes in the storage
    low: int
    high: int
    fills: bool  # whether the operation writes the range


def _piece(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """A tensor's storage and range of bytes; None if it has no CPU memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return None
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    last = int(sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())))
    return tensor.untyped_storage(), low, low + (last + 1) * size


class Uses:
    """The memory of the operations after which the compute stream is not yet ordered."""

    def __init__(self) -> None:
        self._found: dict[int, list[Use]] = defaultdict(list)
        self._added = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, item: Item, tensors: Iterable[torch.Tensor], fills: bool) -> None:
        """Add the memory of an operation's tensors."""
        for tensor in tensors:
            piece = _piece(tensor)
            if piece is not None:
                storage, low, high = piece
                self._found[storage._cdata].append(Use(item, StorageWeakRef(storage), low, high, fills))
        self._added += 1
        if self._added % _CLEAN_EVERY == 0:
            self._keep(lambda use: not use.storage.expired() and not use.item.is_over)

    def conflicts(self, tensor: torch.Tensor, writes: bool) -> list[Use]:
        """Uses of a tensor's memory that conflict with a read or write of it."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return []
        found = self._found.get(tensor.untyped_storage()._cdata)
        piece = _piece(tensor) if found else None
        if found is None or piece is None:
            return []
        _, low, high = piece
        return [u for u in found if u.low < high and low < u.high and (writes or u.fills)]

    def of_storage(self, storage: torch.UntypedStorage) -> list[Use]:
        """Uses of any part of a storage."""
        return list(self._found.get(storage._cdata, ()))

    def drop(self, item: Item) -> None:
        """Remove the memory of an operation after which the compute stream is ordered."""
        self._keep(lambda use: use.item is not item)

    def _keep(self, wanted: Callable[[Use], bool]) -> None:
        for key in list(self._found):
            kept = [use for use in self._found[key] if wanted(use)]
            if kept:
                self._found[key] = kept
            else:
                del self._found[key]
