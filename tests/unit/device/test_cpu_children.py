"""Processes that are started by others than us have this process's platform."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.elastic.notes import runs

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
SCRIPT = """
import multiprocessing
from testing.probe import count_devices
from megatron_het.device import activate
if __name__ == "__main__":
    activate()
    context = multiprocessing.get_context({method!r})
    answer = context.Queue()
    process = context.Process(target=count_devices, args=(answer,))
    process.start()
    print(answer.get(timeout=100))
    process.join(100)
"""
SERVANT = """
import multiprocessing, time
from megatron_het.device import activate
if __name__ == "__main__":
    activate()
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600.0,))
    process.start()
    print(process.pid, flush=True)
    time.sleep(600.0)
"""


def test_a_process_ends_with_the_one_that_it_serves(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SERVANT)
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, env=ENVIRONMENT) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    deadline_s = time.monotonic() + 150.0  # it imports torch first
    while runs(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_started_process_has_one_device(tmp_path, method: str):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(method=method))
    command = [sys.executable, str(file)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=ENVIRONMENT)
    assert found.stdout == "1\n", found.stderr
