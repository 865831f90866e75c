"""The launcher of the functional tests: no rank outlives it, and failures are shown."""

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
    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] still ran after 5 s"):
        launch(2, _python(code), tmp_path, timeout_s=5)
    pids = [int(word) for rank in range(2) for word in (tmp_path / f"rank-{rank}.log").read_text().split()]
    assert len(pids) == 4
    until(lambda: not any(map(runs, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's help, as Linux gives it")
def test_ranks_die_with_a_killed_launcher(tmp_path):
    rank = f"import os; print(os.getpid(), flush=True); {_HANG}"
    code = (
        "from pathlib import Path; from tests.functional.launch import launch; "
        f"launch(2, ['-c', {rank!r}], Path({str(tmp_path)!r}))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    try:
        deadline_s = time.monotonic() + 60
        while not all(log.exists() and log.read_text().endswith("\n") for log in logs):
            assert launcher.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        launcher.kill()
        launcher.wait()
    pids = [int(log.read_text()) for log in logs]
    until(lambda: not any(map(runs, pids)))


SERVER = """
import os, pathlib, signal, sys, time
from testing.rank_server import Server
log = pathlib.Path(sys.argv[1]) / "rank-0.log"
server = Server()
rank = server._start({"world_size": 1, "log_dir": sys.argv[1], "environment": {}, "argv": (), "setup": None,
                      "entry": "signal:pause", "timeout_s": 600})
if rank is not None:
    rank.run()
while not log.exists():
    time.sleep(0.01)
print(*server._running[0].pids.values(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's help, as Linux gives it")
def test_ranks_end_with_a_killed_server(tmp_path):
    """``timeout`` ends the server, too, but not its ranks: these lead sessions of their own."""
    command = [sys.executable, "-c", SERVER, tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    until(lambda: not runs(int(done.stdout)))
