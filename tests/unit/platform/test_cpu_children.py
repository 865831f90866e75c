"""Processes that are started by others than us have this process's platform."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing
from benchmarks.probe import count_devices
from megatron_het.platform import activate
if __name__ == "__main__":
    activate()
    context = multiprocessing.get_context({method!r})
    answer = context.Queue()
    process = context.Process(target=count_devices, args=(answer,))
    process.start()
    print(answer.get(timeout=100))
    process.join(100)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_started_process_has_one_device(tmp_path, method: str):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(method=method))
    found = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=150, check=False)
    assert found.stdout == "1\n", found.stderr
