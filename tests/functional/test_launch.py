"""The launcher of the functional tests: no rank outlives it, and failures are shown."""

import os
import subprocess
import sys
import time

import pytest

from tests.functional.launch import REPOSITORY, LaunchError, launch
from tests.unit.elastic.notes import runs, until

_HANG = "import time; time.sleep(600)"


def _python(code: str) -> list[str]:
    return ["-c", f"import os, sys; rank = int(os.environ['RANK'])\n{code}"]


def test_ranks_see_their_environment_and_leave_their_logs(tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME OMP_NUM_THREADS EXTRA"
    code = f"print(*(os.environ[name] for name in '{names}'.split()))"
    done = launch(2, _python(code), tmp_path, environment={"EXTRA": "more"})
    assert done.returncodes == (0, 0)
    assert [done.log(rank).strip() for rank in range(2)] == [
        f"{rank} {rank} 2 127.0.0.1 lo 1 more" for rank in range(2)
    ]


def test_failing_rank_ends_the_others_and_shows_its_log(tmp_path):
    code = f"if rank == 1: sys.exit('the reason')\n{_HANG}"
    with pytest.raises(LaunchError, match=r"(?s)rank 1 failed first.*the reason"):
        launch(3, _python(code), tmp_path, timeout_s=60, grace_s=0.2)


def test_exit_codes_without_check(tmp_path):
    code = f"if rank == 0: sys.exit(3)\n{_HANG}"
    done = launch(2, _python(code), tmp_path, timeout_s=60, grace_s=0.2, check=False)
    assert done.returncodes == (3, -9)


def test_timeout_kills_all_ranks_and_their_children(tmp_path):
    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "{_HANG}"])
print(os.getpid(), child.pid, flush=True)
{_HANG}
"""
    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] still ran after 10 s"):
        launch(2, _python(code), tmp_path, timeout_s=10)
    pids = [int(word) for rank in range(2) for word in (tmp_path / f"rank-{rank}.log").read_text().split()]
    assert len(pids) == 4
    until(lambda: not any(map(runs, pids)))


LAUNCHER = """
import pathlib, sys
from tests.functional.launch import launch
code = "from tests.functional.test_launch import say_and_wait; say_and_wait()"
launch(2, ["-c", code], pathlib.Path(sys.argv[1]))
"""
SERVER = """
import signal, sys
from testing import rank_server
rank_server._take_device = lambda: None
job = {"world_size": 2, "log_dir": sys.argv[1], "environment": {}, "argv": (), "setup": None, "timeout_s": 600}
rank = rank_server.Server()._start({**job, "entry": "tests.functional.test_launch:say_and_wait"})
if rank is not None:
    rank.run()
signal.pause()
"""


def say_and_wait():
    print(os.getpid(), flush=True)
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's help, as Linux gives it")
@pytest.mark.parametrize("code", [LAUNCHER, SERVER])
def test_ranks_die_with_a_process_that_is_killed(code, tmp_path):
    """They lead sessions of their own: what kills the group of their parent, as ``timeout`` does, leaves them."""
    parent = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=REPOSITORY)
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    try:
        until(lambda: parent.poll() is None and all(log.exists() and log.read_text().endswith("\n") for log in logs))
    finally:
        parent.kill()
        parent.wait()
    pids = [int(log.read_text()) for log in logs]
    until(lambda: not any(map(runs, pids)))
