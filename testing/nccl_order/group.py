"""The process group: queues operations of ``torch.distributed`` in the communicator that NCCL would use."""

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_het.device.simulated import simulate
from testing.nccl_order.communicator import Communicator, Transfer
from testing.nccl_order.compute import watch_memory
from testing.nccl_order.items import Item, OrderError
from testing.nccl_order.launch import Device, Options

BACKEND = "nccl_order"

# Position of a collective's inputs in its arguments, and whether all members have equal numbers of elements.
_COLLECTIVES: dict[str, tuple[int | None, bool]] = {
    "allreduce": (0, True),
    "allreduce_coalesced": (0, True),
    "broadcast": (0, True),
    "reduce": (0, True),
    "allgather": (1, False),
    "allgather_coalesced": (1, False),
    "_allgather_base": (1, True),
    "all_gather_single": (1, True),
    "allgather_into_tensor_coalesced": (1, True),
    "all_gather_single_coalesced": (1, True),
    "gather": (1, False),
    "scatter": (1, False),
    "reduce_scatter": (1, True),
    "_reduce_scatter_base": (1, True),
    "reduce_scatter_single": (1, True),
    "reduce_scatter_tensor_coalesced": (1, True),
    "reduce_scatter_single_coalesced": (1, True),
    "alltoall": (1, False),
    "alltoall_base": (1, False),
    "all_to_all_single": (1, False),
    "barrier": (None, True),
}


class OrderedWork(dist.Work):
    """The handle of one queued operation."""

    def __init__(self, device: Device, item: Item, blocks: bool = False) -> None:
        super().__init__()
        self._device, self._item, self._blocks = device, item, blocks

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the compute stream after the operation.  With a timeout, and for a barrier, the host waits.

        Raises:
            OrderError: The operation failed, or operations wait for each other.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        if seconds > 0 or self._blocks:
            self._device.await_end(self._item, seconds if seconds > 0 else None)
        else:
            self._device.order_after(self._item)
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended; if so, the host's further work is ordered after it."""
        done = self._item.done.is_set()
        self._item.waited = self._item.waited or done
        return done

    def is_success(self) -> bool:
        """Whether the operation has ended without an error."""
        return self.is_completed() and self._item.error is None

    def synchronize(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as :meth:`wait` without a timeout, because there is one compute stream."""
        self._device.order_after(self._item)


class OrderedGroup(dist.ProcessGroup):
    """A process group with NCCL's order; its communicators are made at first use."""

    def __init__(self, store: Any, rank: int, ranks: list[int], name: str, timeout: timedelta, device: Device) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._store, self._members, self._label, self._bound = store, ranks, name, timeout
        self._device = device
        self._communicators: dict[tuple[int, int] | None, Communicator] = {}
        """Communicators by pair of members; None is the key of the whole group's."""
        self.batch: list[Transfer] | None = None  # transfers of an open batch; None outside a batch

    def getBackendName(self) -> str:
        """Returns the name of the backend for ``torch.distributed``."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name of the group in ``torch.distributed``."""
        return self._label

    def _communicator(self, pair: tuple[int, int] | None) -> Communicator:
        """The communicator of two members or of all (None); connected at its first use, where the host waits."""
        if pair not in self._communicators:
            members = range(self.size()) if pair is None else pair
            ranks = [self._members[m] for m in members]
            name = f"group {self._label}" + ("" if pair is None else f", ranks {ranks[0]} and {ranks[1]}")
            place = members.index(self.rank())
            self._communicators[pair] = Communicator(name, self._device, self._store, ranks, place, self._bound)
        return self._communicators[pair]

    def _transfer(self, kind: Literal["send", "recv"], tensors: list[torch.Tensor], peer: int) -> OrderedWork | None:
        if len(tensors) != 1:
            raise OrderError(f"group {self._label}: {kind} of {len(tensors)} tensors at once: NCCL moves one")
        if self.batch is not None:
            self.batch.append(Transfer(kind, tensors[0], peer))
            return None
        pair = (min(self.rank(), peer), max(self.rank(), peer))
        item = self._communicator(pair).transfers([Transfer(kind, tensors[0], pair.index(peer))])
        return OrderedWork(self._device, item)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> OrderedWork | None:  # type: ignore[override]
        """Queue a send to a member."""
        return self._transfer("send", tensors, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> OrderedWork | None:  # type: ignore[override]
        """Queue a receive from a member."""
        return self._transfer("recv", tensors, peer)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> OrderedWork:
        """Raises OrderError: NCCL has no such operation."""
        raise OrderError(f"group {self._label}: NCCL cannot receive from any source; name the rank")

    def end_batch(self) -> OrderedWork:
        """Queue the batch's transfers as one operation of the whole group's communicator."""
        batch, self.batch = self.batch or [], None
        return OrderedWork(self._device, self._communicator(None).transfers(batch))

    def run(self, method: str, *arguments: Any) -> OrderedWork:
        """Queue a collective: name and arguments of a method of ``ProcessGroup``."""
        where, equal = _COLLECTIVES[method]
        inputs = () if where is None else tuple(_tensors(arguments[where]))
        size = sum(t.numel() for t in inputs) if equal else -1
        special = _UNEVEN.get(method)

        def start(data: dist.ProcessGroup) -> Any:
            given = [unversioned(argument) for argument in arguments]
            if special is not None and len({tensor.numel() for tensor in given[1 - special][0]}) > 1:
                return _LISTS[method](data, self.rank(), *given)
            return getattr(data, method)(*given)

        outputs = () if where is None else tuple(_tensors(arguments[0]))
        if method == "broadcast" and arguments[1].rootRank == self.rank():
            outputs = ()  # the root only reads its tensor
        item = self._communicator(None).collective(method, size, inputs, outputs, start)
        return OrderedWork(self._device, item, blocks=method == "barrier")

    def close(self) -> None:
        """Close all communicators; raises OrderError for a failure that no wait has reported."""
        for communicator in self._communicators.values():
            communicator.close()
        self._communicators.clear()
        self._device.raise_untold()

    shutdown = close

    def abort(self) -> None:
        """End all open operations of this rank without waiting for other members, as NCCL's abort does."""
        self._device.abort(f"group {self._label} was aborted on world rank {self._members[self.rank()]}")
        for communicator in self._communicators.values():
            communicator.abort()
        self._communicators.clear()


# Collectives with lists of unequal tensors, which gloo does not support: position of this rank's single tensor.
_UNEVEN = {"allgather": 1, "reduce_scatter": 0}


def unversioned(argument: Any) -> Any:
    """Arguments with ``tensor.data`` for each tensor: writes then do not raise autograd's version counter."""
    if isinstance(argument, list):
        return [unversioned(entry) for entry in argument]
    return argument.data if isinstance(argument, torch.Tensor) else argument


class _Steps:
    """Work of a collective in several steps, which run in :meth:`wait`."""

    def __init__(self, steps: list[Callable[[], Any]]) -> None:
        self._steps = steps

    def wait(self, timeout: timedelta) -> None:
        """Run the steps in order, each within the timeout."""
        for step in self._steps:
            work = step()
            if work is not None:
                work.wait(timeout)


def _all_gather_lists(
    data: dist.ProcessGroup,
    rank: int,
    outputs: list[list[torch.Tensor]],
    inputs: list[torch.Tensor],
    _options: Any = None,
) -> _Steps:
    """An all-gather in which every member broadcasts its own part."""
    parts = outputs[0]
    parts[rank].copy_(inputs[0])
    return _Steps([functools.partial(data.broadcast, part, root) for root, part in enumerate(parts) if part.numel()])


def _reduce_scatter_lists(
    data: dist.ProcessGroup,
    rank: int,
    outputs: list[torch.Tensor],
    inputs: list[list[torch.Tensor]],
    options: Any = None,
) -> _Steps:
    """A reduce-scatter in which each part is reduced to its member."""
    sums = [part.clone() for part in inputs[0]]  # inputs must not change
    operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
    steps: list[Callable[[], Any]] = [
        functools.partial(data.reduce, part, root, operation) for root, part in enumerate(sums) if part.numel()
    ]
    return _Steps([*steps, functools.partial(_store, outputs[0], sums[rank])])


def _store(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(value)


_LISTS: dict[str, Callable[..., _Steps]] = {"allgather": _all_gather_lists, "reduce_scatter": _reduce_scatter_lists}


def _collective(method: str) -> Callable[..., OrderedWork]:
    def call(self: OrderedGroup, *arguments: Any, **keywords: Any) -> OrderedWork:
        return self.run(method, *arguments, *keywords.values())

    call.__name__ = method
    call.__doc__ = f"Queue the collective ``{method}``."
    return call


for _name in _COLLECTIVES:
    setattr(OrderedGroup, _name, _collective(_name))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


_DEVICES: list[Device] = []


def is_installed() -> bool:
    """Whether groups of the backend ``nccl`` are simulated in this process."""
    return bool(_DEVICES)


def install(options: Options | None = None) -> None:
    """Simulate the backend ``nccl`` on the CPU in this process; call it before ``torch.distributed`` is initialised.

    Raises:
        RuntimeError: ``torch.distributed`` is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError("install the simulated backend before torch.distributed starts")
    if _DEVICES:
        return
    device = Device(options or Options())
    _DEVICES.append(device)
    simulate(host_wait)
    watch_memory(device)

    def create(group: Any, _options: Any = None) -> OrderedGroup:
        ranks = list(group.global_ranks_in_group) or list(range(group.group_size))
        return OrderedGroup(group.store, group.group_rank, ranks, group.group_id, group.timeout, device)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    _rebind("init_process_group", _with_backend)
    _rebind("new_group", _with_backend)
    _rebind("batch_isend_irecv", _batched)
    dist.get_backend = _named_nccl(dist.get_backend)


def synchronize() -> None:
    """Wait for all operations of this process, like ``torch.cuda.synchronize``.

    Raises:
        OrderError: One of them failed, or there is a deadlock.
    """
    for device in _DEVICES:
        device.synchronize()


def host_wait(why: str) -> None:
    """Wait for the device where a host waits on CUDA; does nothing if no device is simulated.

    Raises:
        OrderError: An operation failed, or cannot end while this host waits.
    """
    for device in _DEVICES:
        device.host_wait(why)


def _rebind(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    replacement = wrap(getattr(distributed_c10d, name))
    for module in (dist, distributed_c10d):
        setattr(module, name, replacement)


def _with_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that creates groups, with the simulated backend in place of ``nccl``."""

    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        def named(value: Any) -> Any:
            return BACKEND if isinstance(value, str) and "nccl" in value.lower() else value

        if "backend" in keywords:
            keywords["backend"] = named(keywords["backend"])
        result = original(*map(named, arguments), **keywords)
        if original.__name__ == "init_process_group":
            _DEVICES[0].store = distributed_c10d._get_default_store()
        return result

    return call


def _batched(original: Callable[..., Any]) -> Callable[..., Any]:
    """``batch_isend_irecv`` as one operation, whose transfers start together."""

    @functools.wraps(original)
    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, OrderedGroup):
            return original(operations)
        group.batch = []  # collects the transfers that follow
        try:
            original(operations)
        finally:
            work = group.end_batch()
        return [work]

    return batch_isend_irecv


def _named_nccl(original: Callable[..., Any]) -> Callable[..., Any]:
    """``get_backend`` with the name ``nccl`` for the simulated backend, so that callers behave as on GPUs."""

    @functools.wraps(original)
    def get_backend(group: Any = None) -> str:
        name = original(group)
        return "nccl" if name == BACKEND else name

    return get_backend
