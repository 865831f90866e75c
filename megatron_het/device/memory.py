"""Meters of live tensor bytes for CUDA and the CPU, and a pool of host memory for offloaded tensors.

On CUDA the meter reads torch's caching allocator.  The CPU's allocator has no such counters, so the meter watches
the storages of the tensors that operators return: views share a storage, in-place operators
add none, and a storage that autograd keeps for the backward pass is counted until it is freed.
This costs some microseconds per operator, so time and memory are measured in different runs.
"""

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_het.device import Platform


@dataclass
class Region:
    """Live bytes during one visit of a region."""

    name: str
    start_bytes: int  # live on entry
    peak_bytes: int  # peak of live bytes during the visit; final after its end
    end_bytes: int = 0  # live on exit

    @property
    def growth_bytes(self) -> int:
        """Peak minus the live bytes on entry."""
        return self.peak_bytes - self.start_bytes


class MemoryMeter(ABC):
    """Live and peak tensor bytes, by named region.  Regions nest; use as a context manager."""

    def __init__(self) -> None:
        self.peak_bytes: dict[str, int] = {}  # the highest peak of each region over all its visits, by name
        self._open: list[Region] = []

    def __enter__(self) -> "MemoryMeter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    @abstractmethod
    def live_bytes(self) -> int:
        """Bytes of live tensors."""

    @abstractmethod
    def _take_peak(self) -> int:
        """The peak since the last call; resets the peak to the current live bytes."""

    def ignoring(self) -> contextlib.AbstractContextManager[None]:
        """Context whose allocations are never counted.  Not on CUDA.

        Raises:
            NotImplementedError: The meter counts all allocations of torch's allocator.
        """
        raise NotImplementedError(f"{type(self).__name__} counts all that is allocated")

    def close(self) -> None:  # noqa: B027  a meter without hooks has nothing to undo
        """Stop measuring."""

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[Region]:
        """Context whose live bytes are measured.

        Args:
            name: Key of the peak in :attr:`peak_bytes`.

        Yields:
            The visit, complete after the ``with`` block.
        """
        self._spread_peak()
        live = self.live_bytes()
        visit = Region(name, start_bytes=live, peak_bytes=live)
        self._open.append(visit)
        try:
            yield visit
        finally:
            self._spread_peak()
            self._open.remove(visit)
            visit.end_bytes = self.live_bytes()
            self.peak_bytes[name] = max(visit.peak_bytes, self.peak_bytes.get(name, 0))

    def _spread_peak(self) -> None:
        """Update all open regions with the peak since the last boundary of a region."""
        peak = self._take_peak()
        for visit in self._open:
            visit.peak_bytes = max(visit.peak_bytes, peak)


class CudaMemoryMeter(MemoryMeter):
    """Bytes that torch's caching allocator has given to tensors."""

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def _take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


# Operators that wrap memory allocated outside of the dispatcher, as torch.tensor() does.
_WRAPPING = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}


class CpuMemoryMeter(MemoryMeter):
    """Bytes of the storages that operators have allocated since the meter was made.

    Storages that existed before, and memory from other sources (``from_numpy``, shared
    memory), are not counted unless passed to :meth:`add`.

    Args:
        limit_bytes: Live bytes beyond which an operator raises torch.OutOfMemoryError; 0 for no limit.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        super().__init__()
        self.storages = LimitedStorages(limit_bytes) if limit_bytes else Storages()
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(watched(self.storages))
        self._hooks.enter_context(StorageWatch(self.storages))

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of tensors that existed before, such as parameters."""
        for tensor in tensors:
            self.storages.adopt(tensor)

    def ignoring(self) -> contextlib.AbstractContextManager[None]:
        return self.storages.ignoring()

    def live_bytes(self) -> int:
        return self.storages.live_bytes

    def _take_peak(self) -> int:
        peak, self.storages.peak_bytes = self.storages.peak_bytes, self.storages.live_bytes
        return peak

    def close(self) -> None:
        self._hooks.close()


class Storages:
    """The known storages until they are freed, of real and of fake tensors; a fake storage has a size, too."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.ignores_new = False
        self.device_type = "cpu"
        """Device type of the tensors that are counted."""
        self._counted_bytes: dict[int, int | None] = {}

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Context whose new storages are not counted."""
        before, self.ignores_new = self.ignores_new, True
        try:
            yield
        finally:
            self.ignores_new = before

    def see(self, tensor: torch.Tensor, *, new: bool) -> None:
        """Note a tensor that is an argument or a result of an operator.

        Args:
            tensor: The tensor; one without storage on the device is ignored.
            new: Whether a storage that is not known yet was just allocated.  If not, the storage is foreign:
                known, but not counted.
        """
        if tensor.layout != torch.strided or tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._counted_bytes:
            self._counted_bytes[key] = None
            weakref.finalize(storage, self.forget, key).atexit = False
            if new and not self.ignores_new:
                self._count(key, storage.nbytes())
        elif self._counted_bytes[key] is not None:
            # Counted again, because the storage may have been resized.
            self._count(key, storage.nbytes())

    def adopt(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, even a foreign one."""
        self.see(tensor, new=True)
        storage = tensor.untyped_storage()
        if storage._cdata in self._counted_bytes:
            self._count(storage._cdata, storage.nbytes())

    def _count(self, key: int, size_bytes: int) -> None:
        before = self._counted_bytes[key] or 0
        self.live_bytes += size_bytes - before
        self._counted_bytes[key] = size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if size_bytes != before:
            self.changed(key, before, size_bytes)

    def forget(self, key: int) -> None:
        """Remove a freed storage."""
        before = self._counted_bytes.pop(key) or 0
        self.live_bytes -= before
        if before:
            self.changed(key, before, 0)

    def changed(self, key: int, before_bytes: int, after_bytes: int) -> None:
        """Hook for subclasses: a counted storage was added, resized or freed.

        Args:
            key: Key of the storage until it is freed.
            before_bytes, after_bytes: Size of the storage; 0 before it was added and after it was freed.
        """

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage that was resized without an operator."""
        if self._counted_bytes.get(storage._cdata) is not None:
            self._count(storage._cdata, storage.nbytes())


class LimitedStorages(Storages):
    """Storages with a limit on their live bytes."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def changed(self, key: int, before_bytes: int, after_bytes: int) -> None:
        """See :class:`Storages`; raises torch.OutOfMemoryError if a growth exceeds the limit."""
        if after_bytes > before_bytes and self.live_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"{self.live_bytes} bytes live, {after_bytes - before_bytes} of them new, and the limit is "
                f"{self._limit_bytes}"
            )


@contextlib.contextmanager
def limited_memory(platform: Platform, limit_bytes: int) -> Iterator[None]:
    """Context in which an allocation beyond a limit fails with :class:`torch.OutOfMemoryError`.

    Args:
        limit_bytes: Limit on the tensors that are made inside, on CUDA on torch's allocator.  0 for no limit.
    """
    if platform.is_cuda:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total) if limit_bytes else 1.0)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    with CpuMemoryMeter(limit_bytes):
        yield


# The storages of all open meters of this process.
_WATCHED: list[Storages] = []


@contextlib.contextmanager
def watched(storages: Storages) -> Iterator[None]:
    """Context in which storages follow ``UntypedStorage.resize_``, which is not an operator, and :func:`uncounted`."""
    storage_type: Any = torch.UntypedStorage
    original = storage_type.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = original(self, size)
        storages.resized(self)
        return result

    storage_type.resize_ = resize_
    _WATCHED.append(storages)
    try:
        yield
    finally:
        _WATCHED.remove(storages)
        storage_type.resize_ = original


class StorageWatch(TorchDispatchMode):
    """Dispatch mode that passes the inputs and outputs of every operator to :meth:`Storages.see`."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Inputs first, so that the result of an in-place operator or a view is not taken for new.
        if func not in _WRAPPING:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._storages.see(leaf, new=False)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._storages.see(leaf, new=True)
        return result


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Context whose new tensors CPU meters do not count: host memory, where CPU memory stands for a device's."""
    with contextlib.ExitStack() as stack:
        for storages in _WATCHED:
            stack.enter_context(storages.ignoring())
        yield


def memory_meter(platform: Platform) -> MemoryMeter:
    """A new meter for a platform, which measures until it is closed."""
    return CudaMemoryMeter() if platform.is_cuda else CpuMemoryMeter()


# Host memory for offloaded tensors: pinned on CUDA, and reused, so that it is pinned only once.
#
# On the CPU the memory meter counts tensors as device memory, except these blocks.


class HostPool:
    """Pool of host memory blocks, reused by size."""

    def __init__(self, platform: Platform) -> None:
        self._pinned = platform.has_nccl
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.used_bytes = 0  # bytes of blocks in use
        self.peak_bytes = 0  # peak of ``used_bytes`` since :meth:`reset_peak`

    def take(self, size_bytes: int) -> torch.Tensor:
        """A block of ``size_bytes`` (uint8) with undefined contents."""
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self._free[size_bytes]:
            return self._free[size_bytes].pop()
        with uncounted():
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, block: torch.Tensor) -> None:
        """Return a block that is no longer used."""
        self.used_bytes -= block.nbytes
        self._free[block.nbytes].append(block)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes in use."""
        self.peak_bytes = self.used_bytes

    def clear(self) -> None:
        """Free the blocks that are not in use."""
        self._free.clear()
