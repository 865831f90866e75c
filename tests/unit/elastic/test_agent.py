"""What a worker has started ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_het.elastic.agent import end_all

SOON_S = 20.0
WORKER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_worker_has_started_ends_with_it(is_killed: bool):
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        assert runs(child)
        if is_killed:
            worker.send_signal(signal.SIGKILL)
            worker.wait(SOON_S)
        end_all(worker)
        worker.wait(SOON_S)
    deadline_s = time.monotonic() + SOON_S
    while runs(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    end_all(worker)  # nothing is there any more


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
