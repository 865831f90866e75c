"""Attacks on a job's port without the token: ``python -m benchmarks.control_plane --json OUT``.

Two jobs are attacked.  One has a controller and two workers that only send heartbeats.  The other has no controller:
two ranks use the store of rank 0, as the doctor, automatic batches and the watch do.  A client that
knows the address but not the token tries every operation on every key, without a greeting and after a wrong one,
torch's own protocol, random bytes, truncated messages, and floods of connections and of bytes.  It also replays
a recorded connection of a worker, whole and in parts, and repeats, changes and drops frames on a live
connection.

Keys: ``attempts`` by kind; ``ended``: jobs that ended by it; ``changed``: documents that were written, changed or
deleted by it; ``stored_bytes``: by which the store has grown; ``answered``: operations whose answer the client got;
``refused``: connections that the store has refused and counted; ``workers_missed``: heartbeats that did
not get in within a second during the floods.  ``ended``, ``changed``, ``answered`` and ``workers_missed`` must be 0.
"""

import contextlib
import json
import os
import pickle
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.machine import command_line, scratch, write_report
from megatron_het.doctor.participant import Heart
from megatron_het.elastic.controller import Controller
from megatron_het.elastic.job import Board, ServedBoard
from megatron_het.elastic.members import Bounds
from megatron_het.elastic.pool import GivenPlans
from megatron_het.features.watch import monitor as watch
from megatron_het.plan import ModelShape, Plan, Replica, Stage, TrainingShape
from megatron_het.store import Store, StoreError, free_port, server
from megatron_het.store.job import TOKEN as TOKEN_VARIABLE
from megatron_het.store.job import Exchange, ExchangeError, job_store, job_token, places

TOKEN, WRONG = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"
OPERATIONS = ("get", "has", "set", "add", "push", "swap", "drop", "wait")
KEYS = ["over", "latest", "status", "inbox", "inbox/1", "processes", "padded_vocab_size", "beat/1", "kill/1", "gone/1"]
KEYS += ["refused/1", "check/1", "0/generation", "0/wanted", "0/stop", "0/lost", "0/knows/1", "never"]
_SOON_S, _START_S = 1.0, 60.0


class Job:
    """A controller with workers that only send heartbeats."""

    def __init__(self, folder: Path) -> None:
        self.board = ServedBoard("127.0.0.1", 0, TOKEN)
        self.port = self.board.port
        stages = tuple(Stage((1,), (Replica((rank,), (0,)),)) for rank in range(2))
        plan = Plan(ModelShape(2, 32, 4, 2, 32, ffn_hidden_size=64), TrainingShape(1, 1), stages)
        self.controller = Controller(self.board, GivenPlans([plan]), folder / "state.json", 2, Bounds(), lambda _: None)
        self.members = [Board("127.0.0.1", self.board.port, TOKEN, patience_s=_SOON_S) for _ in range(2)]
        self.missed = self._beats = 0
        self._is_over = False
        for number, member in enumerate(self.members, 1):
            member.post({"type": "ready", **_about(number)})
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while self.board.get("latest") is None:
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._is_over:
            if self.controller._step():
                return
            time.sleep(0.02)

    def live(self) -> None:
        """Send one heartbeat of every worker."""
        self._beats += 1
        try:
            Board("127.0.0.1", self.board.port, TOKEN, patience_s=_SOON_S).has("over")  # one that comes now
        except StoreError:
            self.missed += 1
        for number, member in enumerate(self.members, 1):
            try:
                member.put(f"beat/{number}", {"beats": self._beats, "iteration": 0, "ended": None, **_about(number)})
            except StoreError:
                self.missed += 1

    def documents(self) -> dict[str, Any]:
        """All documents except those that the job itself changes."""
        kept = {key: self.board.ask("get", key)[0] for key in self.board.keys("")}
        return {key: text for key, text in kept.items() if key != "status" and not key.startswith("beat/")}

    def has_ended(self) -> bool:
        """Whether the controller has stopped, or begun to end or change the job."""
        return not self._thread.is_alive() or len(self.controller.history) != 1

    @property
    def stored_bytes(self) -> int:
        """Size of all documents."""
        return self.board.stored_bytes

    @property
    def refused(self) -> int:
        """Connections without the token."""
        return self.board.strangers.refused

    def member(self, port: int, patience_s: float = _SOON_S) -> Store:
        """A worker that finds the controller elsewhere."""
        return Board("127.0.0.1", port, TOKEN, patience_s=patience_s)

    def close(self) -> None:
        """Stop the job."""
        self._is_over = True
        self._thread.join()
        self.board.close()


class Meeting:
    """Two ranks of a job without a controller: the doctor's hearts, values of automatic batches, samples of the watch.

    Args:
        folder: Not used: nothing of it is written.
    """

    def __init__(self, folder: Path) -> None:
        self._environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), TOKEN_VARIABLE: TOKEN}
        with mock.patch.dict(os.environ, self._environment):
            self.stores = [job_store(rank, _START_S, _SOON_S) for rank in range(2)]
            self.port = next(port for host, port in places() if _is_store(host, port))
            self._exchanges = [Exchange(rank, 2, _START_S) for rank in range(2)]
        self._hearts = [Heart(store.under("doctor"), rank) for rank, store in enumerate(self.stores)]
        self._boards = [watch.Board(store) for store in self.stores]
        self.missed = self._turn = 0
        self._is_broken = False
        self.live()

    def live(self) -> None:
        """Run one exchange and one sample of the ranks, and count missing or wrong values."""
        self._turn += 1
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(lambda rank: self._exchanges[rank].gather("values", [self._turn, rank]), range(2)))
        for rank, board in enumerate(self._boards):
            board.post("sample", rank, str(self._turn))
        self._is_broken |= any([rank for _, rank in values] != [0, 1] for values in said)
        self.missed += self._boards[1].read("sample", [0, 1]) != [str(self._turn)] * 2

    def documents(self) -> dict[str, Any]:
        """Texts of the documents that no rank changes at the moment."""
        keys = ["auto-batch/values/0", "auto-batch/values/1", "auto-batch/failed", "doctor/verdict", *KEYS]
        keys += [f"het/watch/sample/{rank}/0" for rank in range(2)]
        return dict(zip(keys, self.stores[0].texts(*keys), strict=True))

    def has_ended(self) -> bool:
        """Whether the ranks do not find each other any more, or hear of a failure."""
        try:
            for exchange in self._exchanges:
                exchange.check()
            self.live()
        except (ExchangeError, StoreError):
            return True
        return self._is_broken

    @property
    def stored_bytes(self) -> int:
        """Size of all documents."""
        return int(self.stores[0].ask("stored"))

    @property
    def refused(self) -> int:
        """Connections without the token."""
        return int(self.stores[0].ask("strangers")["refused"])

    def member(self, port: int, patience_s: float = _SOON_S) -> Store:
        """A rank that finds the store elsewhere."""
        with mock.patch.dict(os.environ, self._environment):
            token = job_token()
        return Store(lambda: [("127.0.0.1", port)], token, patience_s)

    def close(self) -> None:
        """Stop the job."""
        for heart in self._hearts:
            heart.stop()


def _is_store(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), _SOON_S) as one:
        return one.recv(server.HELLO_BYTES).startswith(server.MAGIC)
    return False


def _about(number: int) -> dict[str, Any]:
    return {"process": number, "node": f"n{number}", "device": "", "signature": "s", "identity": str(number)}


class Stranger:
    """A client that knows only the port."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port, self._rng = port, rng
        self.attempts: Counter[str] = Counter()
        self.answered = 0

    def send(self, kind: str, data: bytes, *, greets: Callable[[bytes], bytes] = lambda _: b"") -> None:
        """Connect, greet, send, and wait briefly for an answer."""
        self.attempts[kind] += 1
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), _SOON_S) as one:
            said = one.recv(server.HELLO_BYTES)
            one.sendall(greets(said) + data)
            one.shutdown(socket.SHUT_WR)
            heard = bytearray()
            while part := one.recv(65536):
                heard += part
            self.answered += bytes(heard) not in (b"", server.REFUSED)

    def every_operation(self) -> None:
        """Every operation on every key: unsigned, and signed with another token."""
        for operation in OPERATIONS:
            for key in KEYS:
                for request in _requests(operation, key):
                    contents = json.dumps(request).encode()
                    plain = struct.pack(">I", len(contents)) + bytes(server.DIGEST_BYTES) + contents
                    self.send("without a greeting", plain)
                    self.send("after a wrong greeting", _signed(contents), greets=_wrong)
                    self.send("after a mirrored greeting", plain, greets=lambda said: said[-32:] * 2)

    def junk(self, number: int) -> None:
        """Random bytes, pickles and other protocols."""
        texts = [b"GET / HTTP/1.0\r\n\r\n", pickle.dumps({"over": 1}), b"\x16\x03\x01" + bytes(300), b"\0" * 70000]
        for text in texts:
            self.send("other protocols", text)
        for _ in range(number):
            self.send("random bytes", self._rng.randbytes(self._rng.randrange(1, 2000)))

    def half_messages(self) -> None:
        """Send every prefix of a greeting and of a request."""
        whole = bytes(server.PROOF_BYTES) + _signed(b'["get", "over"]')
        for length in range(len(whole)):
            self.send("half messages", whole[:length])

    def torch_store(self) -> None:
        """Run torch's own client against the port."""
        import torch.distributed as dist

        self.attempts["torch's protocol"] += 1
        with contextlib.suppress(RuntimeError):
            dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=timedelta(seconds=1)).set("over", "1")
            self.answered += 1

    def flood_of_connections(self, number: int, live: Callable[[], None]) -> None:
        """Open silent connections while workers send heartbeats and new ones connect."""
        held: list[socket.socket] = []
        for _ in range(number):
            self.attempts["silent connections"] += 1
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", self._port), _SOON_S))
            if len(held) % 100 == 0:
                live()
        for one in held:
            one.close()

    def flood_of_bytes(self, size: int, live: Callable[[], None]) -> None:
        """Announce a large frame and send as many bytes as the other end accepts."""
        for head in (b"", bytes(server.PROOF_BYTES) + struct.pack(">I", server.MAX_FRAME_BYTES)):
            self.attempts["floods of bytes"] += 1
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), _SOON_S) as one:
                one.sendall(head)
                for _ in range(size >> 20):
                    one.sendall(bytes(1 << 20))
            live()


def _requests(operation: str, key: str) -> list[list[Any]]:
    values: dict[str, list[list[Any]]] = {
        "get": [[key]],
        "has": [[key]],
        "drop": [[key]],
        "wait": [[[key], [], 0.1]],
        "add": [[key, 1]],
        "set": [[key, json.dumps({"error": ""})], [key, "true"]],
        "push": [[key, json.dumps({"type": "leave", "node": "n1"})]],
        "swap": [[key, "", "1"]],
    }
    return [[operation, *arguments] for arguments in values[operation]]


def _wrong(said: bytes) -> bytes:
    return server.Handshake(WRONG.encode(), said[-server.NONCE_BYTES :], server.hello()[-server.NONCE_BYTES :]).proof()


def _signed(contents: bytes) -> bytes:
    requests, _ = server.Handshake(WRONG.encode(), bytes(server.NONCE_BYTES), bytes(server.NONCE_BYTES)).channels()
    return requests.frame(contents)


class Listener:
    """A man in the middle between a worker and the controller, which records and may change the traffic.

    Args:
        port: Of the controller.
        meddle: What becomes of the bytes of one ``recv`` from the worker, by their number on this connection.
    """

    def __init__(self, port: int, meddle: Callable[[int, bytes], list[bytes]] = lambda _, data: [data]) -> None:
        self._to, self._meddle = port, meddle
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.heard: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to), _SOON_S)
                far.settimeout(None)
                threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, listens: bool) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if listens:
                    self.heard.append(data)
                for piece in self._meddle(number, data) if listens else [data]:
                    target.sendall(piece)
                number += 1
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        """Close all connections."""
        self._listening.close()


def _meddlings() -> Iterator[tuple[str, Callable[[int, bytes], list[bytes]]]]:
    """Frames repeated, changed, left out and cut; the first bytes are the greeting."""
    yield "repeated frames", lambda n, data: [data, data] if n == 2 else [data]
    yield "changed frames", lambda n, data: [data[:-1] + bytes([data[-1] ^ 1])] if n == 2 else [data]
    yield "missing frames", lambda n, data: [] if n == 1 else [data]
    yield "cut frames", lambda n, data: [data[:20]] if n == 2 else [data]
    yield "changed greetings", lambda n, data: [data[:-1] + bytes([data[-1] ^ 1])] if n == 0 else [data]


def heard(job: Job | Meeting) -> list[bytes]:
    """Returns the recorded bytes of a member that the controller accepted once; it must refuse any replay."""
    listener = Listener(job.port)
    member = job.member(listener.port)
    for _ in range(3):
        member.count("counted")
    listener.close()
    return listener.heard


def repeat_and_meddle(job: Job | Meeting, stranger: Stranger, said: list[bytes]) -> None:
    """Replay recorded traffic of a member, and change live traffic."""
    for first in range(len(said)):
        stranger.send("replays", b"".join(said[first:]))
    for kind, meddle in _meddlings():
        stranger.attempts[kind] += 1
        between = Listener(job.port, meddle)
        member = job.member(between.port, 0.0)
        with contextlib.suppress(StoreError):
            for _ in range(3):
                member.ask("has", "over", patience_s=0.3)
        between.close()


def _attack(job: Job | Meeting, seed: int, scale: int, with_torch: bool) -> dict[str, Any]:
    """Run all attacks on one job."""
    stranger = Stranger(job.port, random.Random(seed))
    job.live()
    said = heard(job)
    before, start = job.documents(), job.stored_bytes
    stranger.every_operation()
    stranger.junk(scale)
    stranger.half_messages()
    if with_torch:
        stranger.torch_store()
    changed = {key for key, text in job.documents().items() if before.get(key) != text}
    job.live()
    stranger.flood_of_connections(scale, job.live)
    stranger.flood_of_bytes(scale << 18, job.live)
    before = job.documents()
    repeat_and_meddle(job, stranger, said)
    time.sleep(0.1)
    after = job.documents()
    changed |= {key for key in before | after if before.get(key) != after.get(key)}
    return {
        "attempts": dict(stranger.attempts),
        "ended": int(job.has_ended()),
        "changed": len(changed),
        "answered": stranger.answered,
        "stored_bytes": job.stored_bytes - start,
        "refused": job.refused,
        "workers_missed": job.missed,
    }


def measure(seed: int, scale: int, folder: Path, *, with_torch: bool = True) -> dict[str, Any]:
    """Run all attacks on both jobs; returns sums, and the figures of each job.

    Args:
        seed: Of what is random.
        scale: Silent connections of the flood; other numbers follow it.
        folder: Empty.
        with_torch: Whether torch's own client tries as well; it writes much to the terminal.
    """
    found: dict[str, Any] = {"seed": seed, "most_strangers_at_once": server.MAX_STRANGERS}
    kinds: dict[str, Callable[[Path], Job | Meeting]] = {"controller": Job, "meeting": Meeting}
    for kind, make in kinds.items():
        with contextlib.closing(make(folder)) as job:
            found[kind] = _attack(job, seed, scale, with_torch)
    for key in ("ended", "changed", "answered", "stored_bytes", "refused", "workers_missed"):
        found[key] = sum(found[kind][key] for kind in kinds)
    return found


def main() -> int:
    """Command line; exit code 1 if an attack had an effect."""
    parser = command_line("benchmarks.control_plane", __doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=int, default=1000, help="connections of the flood (default 1000)")
    options = parser.parse_args()
    with scratch("control-plane-") as folder:
        found = measure(options.seed, options.scale, folder)
    write_report(options.json, found)
    return int(any(found[key] for key in ("ended", "changed", "answered", "workers_missed")))


if __name__ == "__main__":
    sys.exit(main())
