"""A wait for a host that has vanished ends when its own process cuts the connection; others stay."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_het.elastic.links import Links, Severing

LONG_S, SOON_S = 600.0, 100.0
"""A wait that nothing ends, and one that was ended; on a busy machine importing torch alone takes a minute."""
PEER = """
import sys, time
import torch.distributed as dist
from datetime import timedelta
from megatron_het.elastic.links import Links
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=600))
links = Links(dist.PrefixStore("here", store), 1, 2, 600.0)
links.gather(1)
print("met", flush=True)
time.sleep(600)
"""


def test_a_wait_for_a_host_that_has_vanished_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    severing = Severing("127.0.0.1", store.port)
    command = [sys.executable, "-c", textwrap.dedent(PEER), str(store.port)]
    errors: list[Exception] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer, severing.during("0/lost"):
        try:
            links = Links(dist.PrefixStore("here", store), 0, 2, LONG_S)
            links.gather(0)
            assert peer.stdout is not None and peer.stdout.readline() == b"met\n"
            os.kill(peer.pid, signal.SIGSTOP)  # closes nothing

            def wait() -> None:
                try:
                    links.swap([], [(1, torch.zeros(4))])
                except RuntimeError as error:
                    errors.append(error)

            waiting = threading.Thread(target=wait, daemon=True)
            waiting.start()
            waiting.join(0.5)
            assert waiting.is_alive()
            assert severing.cut("1/lost") == 0, "of other connections"
            start_s = time.monotonic()
            assert severing.cut("0/lost") > 0
            while waiting.is_alive() and time.monotonic() - start_s < SOON_S:
                severing.cut("0/lost")  # as a worker does, in case the wait has begun only now
                waiting.join(0.1)
            assert not waiting.is_alive() and errors and time.monotonic() - start_s < SOON_S
            store.set("still", "there")
        finally:
            peer.kill()
    assert severing.cut("0/lost") == 0, "the session is over"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_older_connections_pythons_own_and_the_controllers_stay():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as controller:
        port = controller.getsockname()[1]
        severing = Severing("localhost", port)
        older = foreign(server.getsockname()[1])
        with severing.during("0/lost"):
            mine = foreign(server.getsockname()[1])
            told = foreign(port)
            with socket.create_connection(server.getsockname()) as python:
                severing.cut("0/lost")
                assert [is_open(number) for number in (older, mine, told, python.fileno())] == [True, False, True, True]
        for number in (older, mine, told):
            os.close(number)


def foreign(port: int) -> int:
    """A connection that is no object of Python's."""
    return socket.create_connection(("127.0.0.1", port)).detach()


def is_open(number: int) -> bool:
    try:
        return os.write(number, b"x") == 1
    except BrokenPipeError:
        return False


class OnTheDevice:
    """A group whose kernels are gone once all groups are told to end them."""

    def __init__(self, all_told: threading.Barrier, backend: str = "nccl") -> None:
        self._all_told, self._backend = all_told, backend
        self.aborts = 0

    def _get_backend(self, device: torch.device) -> OnTheDevice:
        assert device.type == "cuda"
        return self

    def name(self) -> str:
        return self._backend

    def abort(self) -> None:
        self.aborts += 1
        self._all_told.wait(SOON_S)


def test_communicators_are_aborted_together_and_once(monkeypatch: pytest.MonkeyPatch):
    """Of each other's kernels they wait for the end: one after the other they would wait for ever."""
    both = threading.Barrier(2)
    groups = [OnTheDevice(both), OnTheDevice(both), OnTheDevice(both, "gloo")]
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    severing = Severing("127.0.0.1", 1)
    with severing.during("0/lost"):
        assert not severing.has_aborted()
        severing.cut("1/lost")
        assert not severing.has_aborted() and [group.aborts for group in groups] == [0, 0, 0]
        for _ in range(2):
            severing.cut("0/lost")
            assert severing.has_aborted() and [group.aborts for group in groups] == [1, 1, 0]
    with severing.during("1/lost"):
        assert not severing.has_aborted(), "of the session before"
        del groups[:2]
        monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
        severing.cut("1/lost")
        assert not severing.has_aborted(), "what gloo has delivered is right"
