"""No rank outlives the server of the functional tests, nor a command its time limit."""

import os
import subprocess
import sys
import time

import pytest

from testing.runner import REPOSITORY, run_in_session
from tests.unit.elastic.notes import runs, until

SERVER = """
import signal, sys
from testing import rank_server
rank_server._take_device = lambda: None
job = {"world_size": 2, "log_dir": sys.argv[1], "environment": {}, "argv": (), "setup": None, "timeout_s": 600}
rank_server.Server()._start({**job, "entry": "tests.functional.test_launch:say_and_wait"})
signal.pause()
"""


def say_and_wait():
    print(os.getpid(), flush=True)
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's help, as Linux gives it")
def test_ranks_die_with_a_server_that_is_killed(tmp_path):
    """They lead sessions of their own: what kills the group of their parent, as ``timeout`` does, leaves them."""
    parent = subprocess.Popen([sys.executable, "-c", SERVER, tmp_path], cwd=REPOSITORY)
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    try:
        until(lambda: parent.poll() is None and all(log.exists() and log.read_text().endswith("\n") for log in logs))
    finally:
        parent.kill()
        parent.wait()
    pids = [int(log.read_text()) for log in logs]
    until(lambda: not any(map(runs, pids)))


def test_a_command_that_is_late_can_end_its_ranks(tmp_path):
    """Those of torchrun lead sessions of their own, which it ends when it is told to end."""
    script = 'setsid sleep 600 & trap "kill $!; exit" TERM; echo $!; wait'
    log = tmp_path / "log.txt"
    assert run_in_session(["bash", "-c", script], log, 2.0, os.environ) is None
    until(lambda: not runs(int(log.read_text())))
