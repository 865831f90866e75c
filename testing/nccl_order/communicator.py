"""A communicator: a queue of operations, with a group of gloo that moves the data."""

import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from testing.nccl_order.items import Item, OrderError
from testing.nccl_order.launch import Device

_CLOSE_S = 5.0  # bound on the end of a queue after a failure; then its daemon thread is left running
_HEADER, _DATA, _READY = 1, 2, 3  # tags of the three messages of a transfer; NCCL itself knows no tags


@dataclass(frozen=True, slots=True)
class Transfer:
    """One send or receive of a queue entry."""

    kind: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int


class Communicator:
    """A queue of operations among fixed members.

    Connecting blocks until all members connect, as with NCCL.

    Args:
        name: Name in messages, equal on all members.
        device: This rank's device.
        store: Store for connecting; ``name`` is the prefix of its keys.
        ranks: World ranks of the members, in order.
        rank: This member's index in ``ranks``.
        timeout: Bound on connecting and on every operation.

    Raises:
        OrderError: The members did not all connect in time.
    """

    def __init__(
        self, name: str, device: Device, store: Store, ranks: Sequence[int], rank: int, timeout: timedelta
    ) -> None:
        self.name, self._device, self._ranks, self._rank = name, device, tuple(ranks), rank
        bound = min(timeout, timedelta(seconds=device.options.stall_s))
        try:
            backend = ProcessGroupGloo(PrefixStore(name, store), rank, len(ranks), bound)
        except RuntimeError as error:
            raise OrderError(
                f"{name}: not all of ranks {list(ranks)} connected within {bound.total_seconds():g} s: {error}"
            ) from error
        # gloo's timeout is longer, so that the device reports a stall first.
        backend.set_timeout(max(timeout, timedelta(seconds=2 * device.options.stall_s + _CLOSE_S)))
        self.data = dist.ProcessGroup(PrefixStore(name, store), rank, len(ranks))
        self.data._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self._timeout = timeout
        self._posted = 0
        self._queue: queue.SimpleQueue[tuple[Item, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"communicator {name}", daemon=True)
        self._thread.start()

    def collective(
        self,
        method: str,
        size: int,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        run: Callable[[Any], Any],
    ) -> Item:
        """Queue a collective.

        Args:
            method: Name of the collective.
            size: Number of elements, which must be equal on all members; -1 if members may differ.
            inputs: Tensors that the collective reads.
            outputs: Tensors that the collective writes.
            run: Starts the collective on the group of gloo, its argument; returns the work.
        """
        sequence = self._posted
        item = Item(self.name, f"{method} number {sequence}", inputs, outputs)
        signature = zlib.crc32(method.encode()), size, sequence

        def execute() -> None:
            self._agree(item, signature)
            item.check_unchanged()
            run(self.data).wait(self._timeout)

        return self._post(item, execute)

    def transfers(self, batch: Sequence[Transfer]) -> Item:
        """Queue sends and receives that start together."""
        what = " + ".join(f"{t.kind} {'to' if t.kind == 'send' else 'from'} rank {self._ranks[t.peer]}" for t in batch)
        inputs = tuple(t.tensor for t in batch if t.kind == "send")
        outputs = tuple(t.tensor for t in batch if t.kind == "recv")
        item = Item(self.name, what, inputs, outputs)

        def execute() -> None:
            self._transfer(item, batch)

        return self._post(item, execute)

    def close(self) -> None:
        """End the queue's thread after the posted operations, then the connections of gloo."""
        self._queue.put(None)
        deadline = time.monotonic() + max(_CLOSE_S, self._device.options.stall_s)
        while self._thread.is_alive() and self._device.failure is None and time.monotonic() < deadline:
            self._thread.join(0.1)
        if self._device.failure is not None:
            self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self.data.shutdown()
            del self.data  # ends its threads, which would abort the process at its end

    def abort(self) -> None:
        """End the queue without waiting; a transfer that waits for its peer stays in its daemon thread."""
        self._queue.put(None)

    def _post(self, item: Item, execute: Callable[[], None]) -> Item:
        self._posted += 1
        self._device.launch(item)
        self._queue.put((item, execute))
        return item

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            item, execute = entry
            error: Exception | None = None
            try:
                self._device.begin(item)
                # Autograd is on in a new thread, and would record the copies into results.
                with torch.no_grad():
                    execute()
            except Exception as failure:  # raised by the waits for the item
                error = failure
            self._device.end(item, error)

    def _agree(self, item: Item, signature: tuple[int, int, int]) -> None:
        """Check that all members are in the same collective; raises OrderError on every member if not."""
        mine = torch.tensor(signature)
        found = [torch.empty_like(mine) for _ in self._ranks]
        self.data.allgather([found], [mine]).wait(self._timeout)
        wrong = [self._ranks[i] for i, other in enumerate(found) if not torch.equal(other, mine)]
        if wrong:
            raise OrderError(
                f"{self.name}: {item.what} on rank {self._ranks[self._rank]}, but ranks {wrong} are in another "
                "collective, or in one of another size; NCCL would mix their data or hang"
            )

    def _transfer(self, item: Item, batch: Sequence[Transfer]) -> None:
        """Moves the data once both ends run: the sender waits for the receiver's ready message."""
        kept: list[tuple[Any, torch.Tensor]] = []  # gloo cancels messages whose handles are deleted
        waiting: list[tuple[Any, Transfer, torch.Tensor]] = []
        for transfer in batch:
            size = torch.tensor([transfer.tensor.numel() * transfer.tensor.element_size()])
            ready = torch.ones(1, dtype=torch.uint8)
            if transfer.kind == "send":
                kept.append((self.data.send([size], transfer.peer, _HEADER), size))
                waiting.append((self.data.recv([ready], transfer.peer, _READY), transfer, ready))
            else:
                kept.append((self.data.send([ready], transfer.peer, _READY), ready))
                header = torch.empty_like(size)
                waiting.append((self.data.recv([header], transfer.peer, _HEADER), transfer, header))
        for handle, transfer, message in waiting:
            handle.wait(self._timeout)
            tensor = transfer.tensor
            if transfer.kind == "send":
                item.check_unchanged()
                whole = tensor.contiguous()
                kept.append((self.data.send([whole], transfer.peer, _DATA), whole))
                continue
            expected = tensor.numel() * tensor.element_size()
            if int(message) != expected:
                raise OrderError(f"{self.name}: {item.what}: {int(message)} bytes arrive where {expected} are expected")
            kept.append((self.data.recv([tensor], transfer.peer, _DATA), tensor))
        for handle, _ in kept:
            handle.wait(self._timeout)
