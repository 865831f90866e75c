"""A real Slurm on the loopback interface for the duration of a test: one slurmctld, several slurmd.

Needs Debian's packages slurmctld, slurmd and slurm-client.  Nothing is installed, no system service
is touched, everything lives in one folder, and only processes started here are ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fault_processes import descendants
from megatron_het.store import free_port

_DAEMONS = ("slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "sinfo", "scancel")
_ACTIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED"}

_TURN_S = 1200.0  # far more than a file's tests of Slurm take

_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
"""Slurm believes in GPUs only where it finds device files."""

_CONFIGURATION = """\
ClusterName=loop
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# A job that is queued again waits for so long; by default 120 s.
AuthInfo=cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={base}/state
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdSpoolDir={base}/spool/%n
SlurmdPidFile={base}/run/slurmd.%n.pid
SlurmdLogFile={base}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
# Only the backfill scheduler starts heterogeneous jobs; by default it looks every 30 s.
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=2,bf_hetjob_immediate,bf_hetjob_prio=min,sched_min_interval=0
SlurmdParameters=config_overrides
Licenses=tool:4
ReturnToService=2
KillWait={kill_wait}
CompleteWait=0
MinJobAge=600
SlurmctldTimeout=60
SlurmdTimeout=60
InactiveLimit=0
Waittime=0
"""


def missing() -> str:
    """Why Slurm cannot be started here; empty when it can."""
    absent = [name for name in _DAEMONS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurmctld slurmd slurm-client)"
    if not _loopback_name() and os.geteuid() != 0:
        return f"host name {socket.gethostname()} is not a loopback name, and renaming a namespace needs root"
    return ""


def _loopback_name() -> bool:
    """Whether this host's name resolves to 127.x: the daemons bind to what it resolves to."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return False


@dataclass(frozen=True)
class Job:
    """A finished job."""

    job_id: str  # Slurm's number
    state: str  # ``COMPLETED``, ``FAILED``, ...; ``TIMEOUT_OF_TEST`` when it was still active
    output: str  # what its output file holds


class SlurmCluster:
    """Context manager: start, submit, stop.

    Args:
        base: Folder for configuration, state and logs.
        features: Nodes, each with its feature, e.g. ``["big", "small", "small"]``.
        cpus: Processors that every node claims to have.
        gpus: GPUs that every node claims to have, as Slurm writes them (``gpu:a100:2``), at most four; none when empty.
        kill_wait_s: Between Slurm's SIGTERM and its SIGKILL.
    """

    def __init__(
        self, base: Path, features: Sequence[str], cpus: int = 4, gpus: Sequence[str] = (), kill_wait_s: int = 2
    ) -> None:
        self.base, self.features, self.cpus, self.kill_wait_s = base, list(features), cpus, kill_wait_s
        self.gpus = list(gpus) or [""] * len(self.features)
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._only_one = contextlib.ExitStack()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.base / "etc" / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        self._only_one.enter_context(_turn())
        try:
            self._configure()
            self._spawn("slurmctld", "-D", "-c", "-f", self.environment["SLURM_CONF"])
            for name in self._names:
                (self.base / "spool" / name).mkdir()
                self._spawn("slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"])
            self._wait_until_idle(60.0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if self._processes:
            self._run("scancel", "--user", _user(), check=False)
            end = time.monotonic() + 20.0
            while time.monotonic() < end and self._run("squeue", "--noheader", check=False).stdout.strip():
                time.sleep(0.2)
        # slurmds first: each tells the controller that it leaves.
        for _, process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for _, process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._only_one.close()

    def run(self, script: Path, variables: Mapping[str, str], timeout_s: float) -> Job:
        return self.wait(script, self.submit(script, variables), timeout_s)

    def submit(self, script: Path, variables: Mapping[str, str]) -> str:
        done = self._run("sbatch", "--parsable", str(script), variables=variables)
        return done.stdout.strip().split(";")[0]

    def wait(self, script: Path, job_id: str, timeout_s: float) -> Job:
        state = self._wait_for_job(job_id, timeout_s)
        found = re.search(r"#SBATCH --output=(\S+)", script.read_text(encoding="utf-8"))
        name = re.search(r"#SBATCH --job-name=(\S+)", script.read_text(encoding="utf-8"))
        assert found and name
        path = Path(found[1].replace("%j", job_id).replace("%x", name[1]))
        return Job(job_id, state, path.read_text(errors="replace") if path.is_file() else "")

    def control(self, *words: str) -> str:
        return self._run("scontrol", *words).stdout

    def cancel(self, job_id: str) -> None:
        self._run("scancel", job_id)

    def take_down(self, index: int) -> None:
        """A node fails: its slurmd, its steps and all that they have started are killed, and Slurm is told."""
        name, daemon = self._names[index], self._processes[1 + index][1]
        doomed = {daemon.pid, *descendants(daemon.pid), *self._steps_of(name)}
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()
        self.control("update", f"NodeName={name}", "State=DOWN", "Reason=test")

    def bring_back(self, index: int) -> None:
        """Start a node's slurmd again, and wait until Slurm uses it."""
        name = self._names[index]
        self._spawn("slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"])
        self._processes[1 + index] = self._processes.pop()
        deadline_s = time.monotonic() + 30.0
        while "State=IDLE" not in self.control("show", "node", name):
            assert time.monotonic() < deadline_s, self.control("show", "node", name)
            time.sleep(0.2)

    def _steps_of(self, name: str) -> set[int]:
        """Processes of a node's steps: the tasks, and the slurmstepd that each of them was started by."""
        found: set[int] = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"SLURMD_NODENAME={name}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                    found.add(int(folder.name))
                    if Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd":
                        found.add(int(parent))
        return found

    def test_only(self, script: Path) -> str:
        """What ``sbatch --test-only`` says."""
        return self._run("sbatch", "--test-only", str(script)).stderr

    @property
    def _names(self) -> list[str]:
        """Node names that `scontrol show hostnames` prints and that resolve without any set-up."""
        return [f"127.0.0.{11 + i}" for i in range(len(self.features))]

    def _configure(self) -> None:
        for folder in ("etc", "log", "run", "state", "spool"):
            (self.base / folder).mkdir(parents=True)
        ports = [free_port() for _ in range(1 + len(self.features))]
        text = _CONFIGURATION.format(port=ports[0], user=_user(), base=self.base, kill_wait=self.kill_wait_s)
        text += "GresTypes=gpu\n" if any(self.gpus) else ""
        rows = [
            f"NodeName={name} Name=gpu Type={gpu.split(':')[1]} File={','.join(_FILES[: int(gpu.split(':')[2])])}\n"
            for name, gpu in zip(self._names, self.gpus, strict=True)
            if gpu
        ]
        (self.base / "etc" / "gres.conf").write_text("".join(rows), encoding="utf-8")
        for name, port, feature, gpu in zip(self._names, ports[1:], self.features, self.gpus, strict=True):
            gres = f"Gres={gpu} " if gpu else ""
            text += (
                f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname=localhost Port={port} "
                f"CPUs={self.cpus} RealMemory=2000 Feature={feature} {gres}State=UNKNOWN\n"
            )
        text += f"PartitionName=all Nodes={','.join(self._names)} Default=YES MaxTime=60 State=UP\n"
        (self.base / "etc" / "slurm.conf").write_text(text, encoding="utf-8")
        version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
        # slurmd loads a cgroup plugin even when no cgroups are used; 'disabled' exists from 23.02 on.
        old = re.search(r"\b2[0-2]\.", version) is not None
        (self.base / "etc" / "cgroup.conf").write_text(
            f"CgroupPlugin={'cgroup/v1' if old else 'disabled'}\n", encoding="utf-8"
        )
        (self.base / "etc" / "plugstack.conf").touch()

    def _spawn(self, *command: str) -> None:
        words = list(command)
        if not _loopback_name():
            # A host-name namespace of its own, so that nothing listens beyond the loopback interface.
            rename = 'echo localhost >/proc/sys/kernel/hostname; exec "$@"'
            words = ["unshare", "-u", "sh", "-c", rename, "sh", *words]
        name = f"{command[0]}-{len(self._processes)}"
        with (self.base / "log" / f"{name}.out").open("wb") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(words, **streams, env=self.environment, start_new_session=True)
        self._processes.append((name, process))

    def _run(
        self, *command: str, check: bool = True, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        environment = self.environment | dict(variables or {})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}{done.stdout}")
        return done

    def _wait_until_idle(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for name, process in self._processes:
                if process.poll() is not None:
                    log = (self.base / "log" / f"{name}.out").read_text(errors="replace")
                    raise AssertionError(f"{name} ended with {process.returncode}:\n{log[-2000:]}")
            idle = self._run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", check=False)
            if len(set(idle.stdout.split())) == len(self.features):
                return
            time.sleep(0.2)
        raise AssertionError(f"Slurm was not idle after {timeout_s} s")

    def _wait_for_job(self, job_id: str, timeout_s: float) -> str:
        end = time.monotonic() + timeout_s
        states: set[str] = set()
        while time.monotonic() < end:
            done = self._run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T", check=False)
            states = set(done.stdout.split())
            if states and not states & _ACTIVE:
                return states.pop() if len(states) == 1 else "+".join(sorted(states))
            time.sleep(0.3)
        self._run("scancel", job_id, check=False)
        return "TIMEOUT_OF_TEST"


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Wait until no other process of this user has a cluster: node names, by which steps are found, are the same."""
    path = Path(tempfile.gettempdir()) / f"slurm-of-tests-{os.geteuid()}.lock"
    with path.open("w") as file:
        deadline_s = time.monotonic() + _TURN_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{path}: another cluster has not ended for {_TURN_S:g} s") from None
                time.sleep(0.2)
        yield


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
