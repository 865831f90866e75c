"""A group of processes that outlives sessions: gloo without ``torch.distributed``'s one world.

State moves between the ranks of two plans, so the ranks of one plan cannot identify the members.  This group consists
of any processes that meet at a store, independently of the world that a session builds and destroys.
"""

import contextlib
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Ending blocked waits: the connections of a session are cut once one of its processes is lost.
#
# The connections of a process that dies are closed, and its peers get an error at once.  A host that vanishes
# closes nothing: its peers would wait in gloo until the timeout, and gloo has no call that wakes them.  But if
# a process shuts down its own connection, all waits on it end, at both ends.
#
# NCCL waits on the device, in kernels that check only a flag of their communicator, so communicators are aborted.  An
# aborted kernel leaves wrong data and raises no error.  So code that uses a result calls ``has_aborted`` after
# the device has computed it.

_DESCRIPTORS = Path("/proc/self/fd")
_NOT_CONNECTED = (7, 10)  # TCP_CLOSE and TCP_LISTEN of Linux's tcp_states.h
_ABORT_S, _BEFORE_CUT_S = 10.0, 3.0


def communicators() -> list[Any]:
    """Returns the NCCL backends of all groups of this process."""
    found = []
    with contextlib.suppress(RuntimeError):  # another thread creates or destroys groups; a later call finds them
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):  # it has nothing for CUDA
                found.append(group._get_backend(torch.device("cuda")))
    return [backend for backend in found if backend.name() == "nccl"]


def abort(backends: Sequence[Any], wait_s: float = _ABORT_S) -> None:
    """Abort communicators, all of them at the same time.

    The abort of one waits until its kernels have ended, which may wait for kernels of another one.

    Args:
        backends: Result of :func:`communicators`.
        wait_s: Bound on the wait for all of them.
    """

    def end(backend: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it has been destroyed meanwhile
            backend.abort()

    threads = [threading.Thread(target=end, args=(backend,), daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + wait_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))


class Severing:
    """Cuts the connections that this process has made since a session began, and aborts its communicators.

    Not cut are connections that are older than the session, those to the controller, and sockets of Python objects,
    such as those of a data source or a logger.  Without ``/proc`` nothing is cut, and waits end at their timeout.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._key: str | None = None
        self._older: set[int] = set()
        self._aborted: list[Any] = []
        self._has_aborted = False

    def has_aborted(self) -> bool:
        """Whether the session's communicators were aborted, so that later results of the device may be wrong."""
        return self._has_aborted

    @contextlib.contextmanager
    def during(self, key: str) -> Iterator[None]:
        """Context that assigns new connections to one session, whose key is for :meth:`cut`."""
        with self._lock:
            self._key, self._older = key, {_inode_of(one.fileno()) for one in sockets()}
            self._has_aborted = False
        try:
            yield
        finally:
            with self._lock:
                self._key, self._aborted = None, []

    def cut(self, key: str) -> int:
        """Shut down the connections of a session, if it is running; returns their number.  Any thread may call."""
        number = 0
        with self._lock:  # the next session's connections are not this one's
            if self._key != key:
                return 0
            waiting = [one for one in communicators() if one not in self._aborted]
            self._aborted += waiting
            self._has_aborted = bool(self._aborted)  # before it happens
            abort(waiting, _BEFORE_CUT_S)  # while NCCL has its connections; one that is being made needs the cut
            pythons = [one for one in gc.get_objects() if issubclass(type(one), socket.socket)]
            spared = self._older | {_inode_of(number) for one in pythons if (number := one.fileno()) >= 0}
            controller = {(address, self._port) for address in _addresses(self._host)}
            for one in sockets():
                if _inode_of(one.fileno()) in spared or _peer(one) in controller:
                    continue
                with contextlib.suppress(OSError):  # it is not connected, or not any more
                    one.shutdown(socket.SHUT_RDWR)
                    number += 1
        return number


def sockets() -> Iterator[socket.socket]:
    """Yields every TCP connection of this process, made or being made, with a duplicated descriptor.

    Other sockets may begin to listen a moment later, and gloo ends the process if a listening socket is shut down.
    """
    numbers = [int(entry) for entry in os.listdir(_DESCRIPTORS)] if _DESCRIPTORS.is_dir() else []
    for number in numbers:
        with contextlib.suppress(OSError):
            if not os.readlink(_DESCRIPTORS / str(number)).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(number)) as one:  # no other thread can close and reuse this descriptor
                is_stream = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                if is_stream and one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _NOT_CONNECTED:
                    yield one


def _inode_of(descriptor: int) -> int:
    with contextlib.suppress(OSError):
        return os.fstat(descriptor).st_ino
    return -1


def _peer(one: socket.socket) -> tuple[str, int] | None:
    """Address of the other end; None while it is being connected."""
    try:
        name = one.getpeername()
    except OSError:
        return None
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def _addresses(host: str) -> set[str]:
    with contextlib.suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return {host}


class Links:
    """Messages between some processes.

    Args:
        store: Store at which they meet; its keys are used for nothing else.
        rank: This process's number among them.
        timeout_s: Bound on every wait, in seconds.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._store = store  # the group holds its part in C++ only
        self._group: Any = None
        if size > 1:
            self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))

    def gather(self, document: Any) -> list[Any]:
        """A JSON document of every member, by rank.  Collective.

        Raises:
            RuntimeError: A member has gone, or the connections are closed.
        """
        if self.size == 1:
            return [document]
        group = self._opened()
        text = np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        group.allgather([lengths], [torch.tensor([len(text)])]).wait()
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = torch.from_numpy(text.copy())
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        group.allgather([texts], [padded]).wait()
        return [
            json.loads(found[: int(length)].numpy().tobytes()) for found, length in zip(texts, lengths, strict=True)
        ]

    def swap(self, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send and receive flat host tensors; the messages between two members are in one order on both.

        Args:
            outgoing: Pairs of receiver and tensor.
            incoming: Pairs of sender and tensor to fill.

        Raises:
            RuntimeError: A member has gone, or the connections are closed.
        """
        if not incoming and not outgoing:
            return
        group = self._opened()
        pending = [group.recv([tensor], peer, 0) for peer, tensor in incoming]
        pending += [group.send([tensor], peer, 0) for peer, tensor in outgoing]
        for work in pending:
            work.wait()

    def close(self) -> None:
        """Close the connections, once no operation uses them any more; further calls do nothing.  Any thread may call.

        Waits of this process go on, because gloo cannot wake them.  Members that wait for this one get an error.
        """
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def _opened(self) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError("the connections are closed")
        return group
