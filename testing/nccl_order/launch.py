"""Simulated device of a rank: launch order, limit of running operations, and reports of deadlocks."""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from testing.nccl_order.items import Item, OrderError
from testing.nccl_order.memory import Use, Uses

HOST_WAIT_ADVICE = "nothing may be under way then whose other end depends on this rank"
_POLL_S = 0.02
_OTHERS_S = 3.0  # bound on the wait for the other ranks' states before a stall is reported


@dataclass(frozen=True, slots=True)
class Options:
    """Rules of the simulated device."""

    stall_s: float = 20.0  # an operation that has not ended this long after its post counts as a deadlock
    resident: int = 16  # most operations on the device at once
    # whether operations of all communicators start in the order of launch (``CUDA_DEVICE_MAX_CONNECTIONS=1``)
    one_queue: bool = True
    check_changes: bool = True  # whether tensors that change between post and run are refused
    # whether the host waits for all launched operations at the first launch of a kernel, and at the other calls that
    # make the host wait on a GPU (:meth:`Device.host_wait`)
    host_waits: bool = True

    def __post_init__(self) -> None:
        if not self.stall_s > 0:
            raise ValueError(f"stall_s = {self.stall_s}: must be above 0 seconds")
        if self.resident < 1:
            raise ValueError(f"resident = {self.resident}: at least one operation must fit on the device")


class Device:
    """Launch order, running and open operations of this process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._state = threading.Condition()
        self._launched = 0
        self._next = 0
        """Number of the first launch that has not started."""
        self._started_early: set[int] = set()
        self._running = 0
        self._open: dict[int, Item] = {}
        self._ahead: dict[int, Item] = {}
        """Open operations after which the compute stream is ordered."""
        self.uses = Uses()
        self.failure: Exception | None = None
        self.told = False
        """Whether the failure has been raised on the host."""
        self.store: Any = None
        """The default store, over which ranks exchange their states after a stall."""
        self._watchdog: threading.Thread | None = None
        self._host_waits: str | None = None
        """Reason of a host wait that is not a wait for one operation."""

    def launch(self, item: Item) -> None:
        """Append an item to the launch order.

        The item starts after all operations for which the compute stream waits.

        Raises:
            OrderError: Another operation of this rank has failed, the groups were aborted, or another communicator
                uses one of the tensors and has not been waited for.
        """
        arriving = self._check_posted(item)
        if self.options.check_changes and not arriving:
            item.remember()
        with self._state:
            if self.failure is not None:
                self.told = True
                raise OrderError(f"{item.communicator}: {item.what} cannot start any more: {self.failure}")
            self._ahead = {n: other for n, other in self._ahead.items() if not other.done.is_set()}
            item.after = tuple(self._ahead.values())
            if self._watchdog is None:
                self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._watchdog.start()
            item.number = self._launched
            self._launched += 1
            self._open[item.number] = item
        self.uses.add(item, item.inputs, False)
        self.uses.add(item, item.outputs, True)

    def _check_posted(self, item: Item) -> bool:
        """Whether an open operation uses the item's tensors; raises OrderError if the item is not ordered after it."""
        arriving = False
        for tensors, writes in ((item.inputs, False), (item.outputs, True)):
            for use in (use for tensor in tensors for use in self.uses.conflicts(tensor, writes)):
                if not use.item.waited and use.item.communicator != item.communicator:
                    raise self._unordered(use, f"{item.what} of {item.communicator}")
                arriving = arriving or not use.item.done.is_set()
        return arriving

    def touch(self, tensor: torch.Tensor, writes: bool, who: object) -> None:
        """Read or write a tensor on the compute stream: block until the operations that use it have ended.

        Raises:
            OrderError: An operation uses the tensor and has not been waited for.
        """
        found = self.uses.conflicts(tensor, writes)
        if found:
            self._order(found, who)

    def touch_storage(self, storage: torch.UntypedStorage) -> None:
        """Resize a storage on the compute stream; see :meth:`touch`."""
        self._order(self.uses.of_storage(storage), "a change of its memory's size")

    def _order(self, uses: list[Use], who: object) -> None:
        for use in uses:
            if not use.item.waited:
                raise self._unordered(use, who)
            self.await_end(use.item)
            self.uses.drop(use.item)

    def _unordered(self, use: Use, who: object) -> OrderError:
        verb = "fills" if use.fills else "reads"
        self.told = True
        return OrderError(
            f"{use.item.communicator}: {who} is not ordered after {use.item.what}, which {verb} the same tensor; "
            "wait for the operation before the tensor is used again"
        )

    def order_after(self, item: Item) -> None:
        """Order the compute stream after an item without blocking the host.

        Raises:
            OrderError: An operation of this rank has failed already.
        """
        with self._state:
            item.waited = True
            if not item.done.is_set():
                self._ahead[item.number] = item
            error = item.error or self.failure
            if error is not None:
                self.told = True
                raise OrderError(str(error)) from error

    def synchronize(self) -> None:
        """Wait for all launched operations, like ``torch.cuda.synchronize``.

        Raises:
            OrderError: An operation failed, or there is a deadlock.
        """
        with self._state:
            items = [self._open[n] for n in sorted(self._open)]
        for item in items:
            self.await_end(item)
        self.raise_untold()

    def host_wait(self, why: str) -> None:
        """Block the host until all launched operations have ended, as CUDA does at some calls.

        The operations do not count as waited for, because it depends on timing whether a GPU makes the host wait here.

        Raises:
            OrderError: An operation failed, or cannot end while this host waits.
        """
        if not self.options.host_waits:
            return
        with self._state:
            items = [self._open[n] for n in sorted(self._open)]
        self._host_waits = f"{why}, where the host waits for the device: {HOST_WAIT_ADVICE}"
        for item in items:
            self._await(item, self.options.stall_s)
        self._host_waits = None

    def wait_for_compute(self) -> None:
        """Block the host until the compute stream's work has ended, as a read of a value does.

        Raises:
            OrderError: See :meth:`host_wait`.
        """
        with self._state:
            items = list(self._ahead.values())
        for item in items if self.options.host_waits else ():
            self.await_end(item)

    def raise_untold(self) -> None:
        """Raise the failure if no call has raised it yet."""
        with self._state:
            if self.failure is None or self.told:
                return
            self.told = True
            raise OrderError(str(self.failure)) from self.failure

    def begin(self, item: Item) -> None:
        """Wait until the device can start an item, and start it.

        Raises:
            OrderError: Another operation of this rank has failed.
        """
        with self._state:
            while self.failure is None and not self._can_start(item):
                self._state.wait(_POLL_S)
            if self.failure is not None:
                raise OrderError(f"{item.communicator}: {item.what} does not run after an earlier failure")
            item.started = True
            self._running += 1
            self._started_early.add(item.number)
            while self._next in self._started_early:
                self._started_early.remove(self._next)
                self._next += 1
            self._state.notify_all()

    def _can_start(self, item: Item) -> bool:
        if self._running >= self.options.resident or not all(other.done.is_set() for other in item.after):
            return False
        return not self.options.one_queue or item.number == self._next

    def end(self, item: Item, error: Exception | None) -> None:
        """Record the end of an item; after an error no operation starts any more, as after NCCL's abort."""
        with self._state:
            self._running -= item.started
            self._open.pop(item.number, None)
            if error is not None and self.failure is None:
                self.failure = error
            item.error = item.error or error
            item.inputs = item.outputs = ()
            item.after = ()
            item.done.set()
            self._state.notify_all()

    def abort(self, why: str) -> None:
        """End all open operations with an error, which their waits raise at once; no operation starts any more."""
        with self._state:
            self.failure = self.failure or OrderError(why)
            for item in self._open.values():
                item.error = item.error or self.failure
                item.done.set()
            self._open.clear()
            self._state.notify_all()

    def _watch(self) -> None:
        """Run the watchdog: print an error and abort if an operation does not end for which no caller waits."""
        limit = 1.5 * self.options.stall_s  # longer than in a wait, which reports first
        while self.failure is None:
            time.sleep(min(1.0, self.options.stall_s / 4))
            with self._state:
                oldest = min(self._open.values(), key=lambda item: item.posted_s, default=None)
            if oldest is not None and time.monotonic() - oldest.posted_s > limit:
                error = self._stalled(oldest, limit)
                sys.stderr.write(f"watchdog: {error}\n")
                self.abort(str(error))

    def await_end(self, item: Item, timeout_s: float | None = None) -> None:
        """Block the host until an item has ended; all later work is ordered after the item.

        Raises:
            OrderError: The item failed, or has not ended after ``timeout_s`` or ``stall_s``.
        """
        self._await(item, min(self.options.stall_s, timeout_s or self.options.stall_s))
        item.waited = True

    def _await(self, item: Item, limit_s: float) -> None:
        while not item.done.wait(_POLL_S):
            if time.monotonic() - item.posted_s > limit_s:
                raise self._stalled(item, limit_s)
        if item.error is not None:
            self.told = True
            raise OrderError(str(item.error)) from item.error

    def _stalled(self, item: Item, limit_s: float) -> OrderError:
        """Returns the error of a deadlock, with the states of all ranks that report in time."""
        waits = self._host_waits or f"{item.communicator}: {item.what}"
        mine = {"waits": waits, "open": self.describe()}
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        states = {rank: mine}
        if self.store is not None:
            self.store.set(f"nccl_order/stall/{rank}", json.dumps(mine))
            deadline = time.monotonic() + _OTHERS_S
            missing = [r for r in range(world) if r != rank]
            while missing and time.monotonic() < deadline:
                for other in [r for r in missing if self.store.check([f"nccl_order/stall/{r}"])]:
                    states[other] = json.loads(self.store.get(f"nccl_order/stall/{other}"))
                    missing.remove(other)
                time.sleep(_POLL_S)
        lines = [f"no progress for {limit_s:g} s: these operations wait for each other"]
        for r in sorted(states):
            lines.append(f"  rank {r} waits for {states[r]['waits']}")
            lines += [f"    {line}" for line in states[r]["open"]]
        silent = [r for r in range(world) if r not in states]
        if silent:
            lines.append(f"  not in a wait: ranks {', '.join(map(str, silent))}")
        error = OrderError("\n".join(lines))
        with self._state:
            self.told = threading.current_thread() is not self._watchdog
            self.failure = self.failure or error
            self._state.notify_all()
        return error

    def describe(self) -> list[str]:
        """Texts of the open operations of this rank in launch order, at most eight."""
        with self._state:
            items = [self._open[n] for n in sorted(self._open)]
        lines = []
        for item in items[:8]:
            state = "on the device, waits for its other members" if item.started else "queued"
            lines.append(f"{item.communicator}: {item.what} ({state})")
        return lines + ([f"and {len(items) - 8} more"] if len(items) > 8 else [])
