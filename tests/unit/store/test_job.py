"""The store of a job without a controller: who finds it, who does not, and when it ends."""

import contextlib
import random
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_het.store import Store, StoreError, StoreServer, TokenError, job
from tests.unit.elastic.notes import runs, until

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def _launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job, "_GIVEN", [])
    for name in (job.PLACE, job.TOKEN, job.TOKEN_FILE, *job.IDENTITY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(_port_before_free_ones()))


def _port_before_free_ones() -> int:
    """Below the ports that the kernel gives to connections of other programs."""
    for port in random.sample(range(20000, 30000, 10), 100):
        with contextlib.ExitStack() as probes:
            try:
                for i in range(9):
                    probes.enter_context(socket.create_server(("", port + i)))
            except OSError:
                continue
            return port
    raise AssertionError("no nine ports in a row are free")


def test_ranks_find_the_store_of_rank_0_and_strangers_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = job.job_store(0, 20.0), job.job_store(1, 20.0)
    first.put("a", {"b": 1})
    assert second.wait(["a"], [], 5.0) == "there" and second.get("a") == {"b": 1}
    secret = tmp_path / "megatron_het" / "token"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600, "nobody else may read it"
    assert job.strangers(first) == ""
    monkeypatch.setenv(job.TOKEN, SECRET)
    with pytest.raises(StoreError, match=r"refuses this token.*MEGATRON_HET_TOKEN"):
        job.job_store(1, 0.5)
    assert "came with another token, the last from 127.0.0.1" in job.strangers(first)


def test_every_start_of_a_job_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(job.TOKEN, SECRET)
    one = job.job_token()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert one != job.job_token() and SECRET not in one


def test_a_port_that_others_have_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job's store refuses the token, and this job's own store is found behind it."""
    monkeypatch.setenv(job.TOKEN, SECRET)
    other = StoreServer("127.0.0.1", job.places()[0][1], "another job's token")
    other.start()
    with socket.create_server(("127.0.0.1", job.places()[1][1])):  # says nothing
        mine = job.job_store(0, 30.0)
        mine.put("a", 1)
    assert other.keys("") == []
    other.close()


def test_the_store_ends_with_its_job() -> None:
    code = "from megatron_het.store import job; job.job_store(0, 20.0).put('a', 1)"
    code += "; [print(one.pid) for one in job._STARTED.values()]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    until(lambda: not runs(int(done.stdout.split()[-1])))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (job.PLACE, "nowhere", "MEGATRON_HET_STORE = 'nowhere' is no HOST:PORT"),
        ("MASTER_PORT", "no port", "MASTER_PORT = 'no port' is no port"),
        (job.TOKEN, "short", "shorter than 16"),
        (job.TOKEN_FILE, "/nowhere/token", "/nowhere/token"),
    ],
)
def test_what_makes_no_sense_is_said(name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=said):
        job.job_store(0, 1.0)


def test_a_name_may_lead_to_another_interface_on_its_own_host() -> None:
    assert [job.listening(host) for host in ("127.0.0.1", "localhost", "::1", "node1")] == [
        "127.0.0.1",
        "localhost",
        "::1",
        "",
    ]
    server = StoreServer("", 0, SECRET)
    server.start()
    for host in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])):
        assert Store(lambda host=host: [(host, server.port)], SECRET, 5.0).has("a") is False
    with pytest.raises(TokenError):
        Store(lambda: [("127.0.0.1", server.port)], "another token 12", 5.0).has("a")
    server.close()
