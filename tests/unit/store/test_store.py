"""The store that asks for the token: what members get, and what others do not."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import control_plane
from megatron_het.elastic.links import Links
from megatron_het.store import (
    Store,
    StoreError,
    StoreServer,
    TokenError,
    client_tls,
    free_port,
    job,
    server,
    server_tls,
)
from megatron_het.store.torch_store import LostError, TorchStore

TOKEN, LONG_S, SOON_S = "0123456789abcdef", 600.0, 100.0


@pytest.fixture
def store() -> Iterator[StoreServer]:
    served = StoreServer("127.0.0.1", 0, TOKEN)
    served.start()
    yield served
    served.close()


def client(store: StoreServer, token: str = TOKEN, patience_s: float = LONG_S) -> Store:
    return Store(lambda: [("127.0.0.1", store.port)], token, patience_s)


def test_members_share_documents(store: StoreServer) -> None:
    first, second = client(store), client(store)
    first.ask("set", "a", "1")
    assert second.ask("get", "a", "b") == ["1", None]
    assert (first.ask("add", "n", 2), second.ask("add", "n", 1)) == (2, 3)
    assert first.ask("push", "inbox", "x") == 1 and second.ask("get", "inbox/1") == ["x"]
    assert second.ask("swap", "a", "0", "2") == "1" and second.ask("swap", "a", "1", "2") == "2"
    first.ask("drop", "a", "n", "inbox", "inbox/1")
    assert store.keys("") == [] and store.stored_bytes == 0


def test_a_wait_ends_when_the_document_comes(store: StoreServer) -> None:
    threading.Timer(0.05, store.ask, ("set", "b", "1")).start()
    assert client(store).ask("wait", ["b"], ["lost"], LONG_S) == "there"
    threading.Timer(0.05, lambda: client(store).ask("set", "lost", "1")).start()
    assert client(store).ask("wait", ["never"], ["lost"], LONG_S) == "lost"
    assert client(store).ask("wait", ["never"], [], 0.01) == "late"


@pytest.mark.parametrize(
    "request_",
    [["get", ["a"]], ["set", "a", 1], ["set", "k" * 2000, "1"], ["nothing"], ["add", "a", "x"], ["wait", "a", 1, 0.1]],
)
def test_a_request_that_makes_no_sense_is_refused(store: StoreServer, request_: list[object]) -> None:
    member = client(store)
    with pytest.raises(StoreError, match="refuses a request"):
        member.ask(*request_)
    assert member.ask("get", "a") == [None]


def test_the_store_is_bounded(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STORED_BYTES", 100)
    member = client(store)
    member.ask("set", "a", "x" * 90)
    with pytest.raises(StoreError, match="full"):
        member.ask("set", "b", "x" * 90)
    member.ask("set", "a", "y" * 90)


def test_another_token_is_told_at_once(store: StoreServer) -> None:
    with pytest.raises(TokenError, match="refuses this token"):
        client(store, "another token 123").ask("get", "a")
    deadline_s = time.monotonic() + LONG_S
    while not store.strangers.refused:  # counted a moment after it was told
        assert time.monotonic() < deadline_s
    assert store.strangers.to_json() == {"refused": 1, "last": "127.0.0.1"}


def test_a_server_without_the_token_is_not_believed() -> None:
    """It says that the proof is right, and cannot say why."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def impostor() -> None:
            one, _ = listening.accept()
            with one:
                one.sendall(server.hello())
                one.recv(server.PROOF_BYTES)
                one.sendall(b"+" + bytes(server.DIGEST_BYTES))

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        member = Store(lambda: [listening.getsockname()], TOKEN, 1.0)
        with pytest.raises(TokenError, match="does not know this token"):
            member.ask("get", "a")
        thread.join()


def test_a_store_that_moves_is_found_again() -> None:
    places = []
    for _ in range(2):
        served = StoreServer("127.0.0.1", 0, TOKEN)
        served.start()
        places.append(served)
    where = [places[0].port]
    member = Store(lambda: [("127.0.0.1", port) for port in where], TOKEN, LONG_S)
    places[0].ask("set", "a", "first")
    places[1].ask("set", "a", "second")
    assert member.ask("get", "a") == ["first"]
    places[0].close()
    where.append(places[1].port)
    assert member.ask("get", "a") == ["second"]
    places[1].close()


def test_nobody_who_hangs_holds_a_member_up() -> None:
    """A stopped process still accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        member = Store(lambda: [listening.getsockname()], TOKEN, 0.05)
        with pytest.raises(StoreError, match="does not answer"):
            member.ask("get", "a")


def test_strangers_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_GIVEN", [])
    found = control_plane.measure(1, 2 * server.MAX_STRANGERS, tmp_path, with_torch=False)
    assert {key: found[key] for key in ("ended", "changed", "answered", "workers_missed")} == {
        "ended": 0,
        "changed": 0,
        "answered": 0,
        "workers_missed": 0,
    }
    assert found["stored_bytes"] < 1000
    assert found["refused"] > 500, "each is counted"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_connections_are_encrypted_where_there_is_a_certificate(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=head"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *more], check=True, capture_output=True)
    served = StoreServer("127.0.0.1", 0, TOKEN, server_tls(certificate, key))
    served.start()
    address = [("127.0.0.1", served.port)]
    member = Store(lambda: address, TOKEN, LONG_S, client_tls(certificate))
    member.ask("set", "a", "1")
    assert member.ask("get", "a") == ["1"]
    with pytest.raises(StoreError):
        Store(lambda: address, TOKEN, 0.2).ask("get", "a")
    served.close()


# Waits for processes that are known to be lost end at once.


def test_a_wait_ends_when_somebody_is_lost(store: StoreServer) -> None:
    waiting = TorchStore(store, LONG_S, name="here", lost="lost")
    waiting.set("here", b"1")
    waiting.wait(["here"])
    threading.Timer(0.1, store.put, ("lost", "b")).start()
    start_s = time.monotonic()
    with pytest.raises(LostError, match="process of this generation is lost"):
        waiting.get("never")
    assert time.monotonic() - start_s < SOON_S
    assert waiting.get("here") == b"1", "what is there is given all the same"


def test_a_wait_is_bounded(store: StoreServer) -> None:
    waiting = TorchStore(store, LONG_S, name="here", lost="lost")
    with pytest.raises(RuntimeError, match=r"never did not come within 0\.05 s"):
        waiting.wait(["never"], timedelta(seconds=0.05))


def test_connections_are_not_waited_for_when_a_member_has_died(store: StoreServer) -> None:
    errors = []

    def connect() -> None:
        try:
            Links(TorchStore(store, LONG_S, name="here", lost="lost"), 0, 2, LONG_S)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    store.put("lost", "the other member")
    thread.join(SOON_S)
    assert not thread.is_alive() and "is lost" in str(errors)


def test_a_store_over_the_jobs_own_does_what_torchs_own_does(store: StoreServer) -> None:
    own = TorchStore(Store(lambda: [("127.0.0.1", store.port)], TOKEN, LONG_S), LONG_S)
    over = dist.PrefixStore("x", own)
    for waiting in (over.clone(), dist.HashStore()):
        waiting.set("a", b"\x00\xff")
        assert waiting.get("a") == b"\x00\xff" and waiting.check(["a"]) and not waiting.check(["a", "b"])
        assert waiting.add("n", 2) == 2 and waiting.get("n") == b"2"
        assert waiting.compare_set("a", "y", "z") == b"\x00\xff" and waiting.compare_set("new", "", "z") == b"z"
        assert list(waiting.multi_get(["a", "n"])) == [b"\x00\xff", b"2"]


def test_no_connection_takes_a_free_port_before_its_process_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux takes the local ends of connections from a range that it names; a process may need seconds to listen."""
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = [free_port() for _ in range(50)]
    assert len(set(found)) == 50 and max(found) < min(first_of_kernel, 32768), "one port for two processes"
    monkeypatch.setattr(server, "_FREE_PORTS", range(found[0], found[0] + 2))
    with socket.create_server(("127.0.0.1", found[0])):
        assert {free_port() for _ in range(4)} == {found[0] + 1}
        with socket.create_server(("127.0.0.1", found[0] + 1)), pytest.raises(StoreError, match="is taken"):
            free_port()
