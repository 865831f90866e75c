"""Processes that are started by others than us have this process's platform, and end with it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.elastic.notes import runs, until

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
SCRIPT = """
import multiprocessing, socket, sys, threading, time
import torch
from megatron_het.device import activate, guard_forks
def serve(answer):
    answer.put(torch.cuda.device_count())
    time.sleep(600.0)
def start(method):
    context = multiprocessing.get_context(method)
    answer = context.Queue()
    process = context.Process(target=serve, args=(answer,))
    process.start()
    print(process.pid, answer.get(timeout=100.0), flush=True)
if __name__ == "__main__":
    method, where, port = sys.argv[1:]
    if where == "cuda":
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 1
    activate()
    peer = socket.create_connection(("127.0.0.1", int(port)))
    guard_forks()
    thread = threading.Thread(target=start, args=(method,))
    thread.run() if where != "thread" else (thread.start(), thread.join())
    time.sleep(600.0)
"""
WAYS = [("spawn", "cpu"), ("forkserver", "cpu"), ("spawn", "cuda"), ("fork", "cpu"), ("fork", "thread")]


@pytest.mark.parametrize(("method", "where"), WAYS)
def test_a_process_ends_with_the_one_that_it_serves_whose_peers_notice_the_death(tmp_path, method: str, where: str):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, str(file), method, where, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as parent:
            child, devices = map(int, parent.stdout.readline().split())
            parent.kill()
        peer, _ = server.accept()
    assert devices == 1 or where == "cuda"  # the script has made the device up
    with peer:
        peer.settimeout(20.0)
        assert not peer.recv(1)
    if where == "thread":  # the kernel would kill the process when the thread ends
        os.kill(child, signal.SIGKILL)
    until(lambda: not runs(child))
