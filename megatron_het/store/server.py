"""The store's server, an event loop on a thread of the process that keeps the documents, and what goes over the wire.

Resources of unauthenticated connections are bounded: their number, and the seconds and bytes of each.
If there are more, the oldest is closed, so that members of the job can connect during a flood.

A connection begins with a handshake in which both ends prove that they have the token.  The server sends a nonce,
the client answers with one of its own and a digest over both with the token, and the server
answers in the same way.  Each frame then has a digest, with a key of this connection and direction, over its number and
contents.  So frames cannot be repeated, dropped, reordered or changed unnoticed.  Without TLS they are not secret.
"""

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_WAIT_S, _LONGEST_WAIT_S = 1.0, 20.0


class Documents:
    """Documents by key: texts, and JSON values in them.  Subclasses answer requests."""

    _prefix = ""

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        """Returns the answer to a request: the name of an operation and its arguments, with whole keys.

        Args:
            request: Name of an operation, and its arguments.
            patience_s: How long the request is tried again; None for the store's own patience.
            tries_again: Whether a lost connection is made again in that time.
        """
        raise NotImplementedError

    def under(self, prefix: str) -> "Documents":
        """Returns the part of this store whose keys begin with a prefix."""
        return _Part(self, f"{self._prefix}{prefix}/")

    def put(self, key: str, document: Any, *, patience_s: float | None = None) -> None:
        """Write a document."""
        self.write(key, json.dumps(document), patience_s=patience_s)

    def get(self, key: str, *, patience_s: float | None = None) -> Any:
        """Read a document; None if there is none."""
        return self.read(key, patience_s=patience_s)[0]

    def read(self, *keys: str, patience_s: float | None = None) -> list[Any]:
        """Read some documents at once; None for those that are not there."""
        texts = self.texts(*keys, patience_s=patience_s)
        return [None if text is None else json.loads(text) for text in texts]

    def write(self, key: str, text: str, *, patience_s: float | None = None, tries_again: bool = True) -> None:
        """Write a text."""
        self.ask("set", self._prefix + key, text, patience_s=patience_s, tries_again=tries_again)

    def texts(self, *keys: str, patience_s: float | None = None, tries_again: bool = True) -> list[str | None]:
        """Read some texts at once; None for those that are not there."""
        return list(self.ask("get", *self._keys(keys), patience_s=patience_s, tries_again=tries_again)) if keys else []

    def has(self, *keys: str, patience_s: float | None = None) -> bool:
        """Whether all documents are there."""
        return bool(self.ask("has", *self._keys(keys), patience_s=patience_s))

    def wait(
        self, keys: Sequence[str], unless: Sequence[str], timeout_s: float, *, patience_s: float | None = _WAIT_S
    ) -> str:
        """Wait until all ``keys`` exist (``there``), one of ``unless`` exists (``lost``), or time is up (``late``)."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            part_s = min(left_s, _LONGEST_WAIT_S)
            found = self.ask("wait", self._keys(keys), self._keys(unless), part_s, patience_s=patience_s)
            if found != "late" or left_s <= part_s:
                return str(found)

    def count(self, key: str, number: int = 1, *, patience_s: float | None = None) -> int:
        """Add to a count that begins at 0; returns the sum."""
        return int(self.ask("add", self._prefix + key, number, patience_s=patience_s))

    def swap(self, key: str, expected: str, desired: str) -> str:
        """Replace ``expected`` (empty: no document) by ``desired`` if it is the text now; returns the text after it."""
        return str(self.ask("swap", self._prefix + key, expected, desired))

    def drop(self, *keys: str) -> bool:
        """Delete documents; returns whether one existed."""
        return bool(self.ask("drop", *self._keys(keys)))

    def post(self, document: Any, *, patience_s: float | None = None) -> None:
        """Add a document to the inbox of the process that keeps the store."""
        self.ask("push", self._prefix + "inbox", json.dumps(document), patience_s=patience_s)

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]


class _Part(Documents):
    """Documents of a store whose keys begin alike."""

    def __init__(self, whole: Documents, prefix: str) -> None:
        self._whole, self._prefix = whole, prefix

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        return self._whole.ask(*request, patience_s=patience_s, tries_again=tries_again)


MAGIC = b"het-store 1\n"
NONCE_BYTES = DIGEST_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = NONCE_BYTES + DIGEST_BYTES
VERDICT_BYTES = 1 + DIGEST_BYTES
REFUSED = b"-" + bytes(DIGEST_BYTES)
HEAD_BYTES = 4 + DIGEST_BYTES
MAX_FRAME_BYTES = 64 * 2**20


class StoreError(RuntimeError):
    """The store does not answer, or its answer is not authentic."""


class TokenError(StoreError):
    """The store belongs to another job: it does not accept this token."""


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns the TLS context of a server with a certificate.

    Raises:
        OSError: The files cannot be read, or do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def client_tls(authority: Path) -> ssl.SSLContext:
    """Returns the TLS context of a client that trusts an authority, or one self-signed certificate.

    Raises:
        OSError: The file cannot be read, or holds no certificate.
    """
    return ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(authority))


def hello() -> bytes:
    """Returns the server's first message, a nonce."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


class Handshake:
    """The digests of one connection, by the numbers of both ends."""

    def __init__(self, token: bytes, server: bytes, client: bytes) -> None:
        self._token, self._both = token, server + client
        self.client = client

    def proof(self) -> bytes:
        """Returns the client's answer."""
        return self.client + self._digest(b"client")

    def is_proved(self, proof: bytes) -> bool:
        """Whether the client's answer was made with the token."""
        return hmac.compare_digest(self.proof(), proof)

    def verdict(self) -> bytes:
        """Returns the server's answer to a client that has the token."""
        return b"+" + self._digest(b"server")

    def channels(self) -> "tuple[Channel, Channel]":
        """The signing channels of the client's and of the server's frames."""
        return Channel(self._digest(b"requests")), Channel(self._digest(b"answers"))

    def _digest(self, purpose: bytes) -> bytes:
        return hmac.digest(self._token, purpose + b"\0" + self._both, hashlib.sha256)


class Channel:
    """Frames in one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def frame(self, contents: bytes) -> bytes:
        """The next frame."""
        if len(contents) > MAX_FRAME_BYTES:
            raise ValueError(f"{len(contents)} bytes are more than the {MAX_FRAME_BYTES} of a frame")
        return struct.pack(">I", len(contents)) + self._sign(contents) + contents

    @staticmethod
    def length(head: bytes) -> int:
        """Bytes of the contents that follow a head; raises StoreError for more than a frame may have."""
        (length,) = struct.unpack_from(">I", head)
        if length > MAX_FRAME_BYTES:
            raise StoreError(f"a frame of {length} bytes")
        return int(length)

    def check(self, head: bytes, contents: bytes) -> None:
        """Refuse contents that are not the other end's next frame; raises StoreError."""
        if not hmac.compare_digest(self._sign(contents), head[4:]):
            raise StoreError("a frame without this connection's signature")

    def _sign(self, contents: bytes) -> bytes:
        signer = hmac.new(self._key, struct.pack(">Q", self._number), hashlib.sha256)
        signer.update(contents)
        self._number += 1
        return signer.digest()


MAX_STRANGERS = 64
HANDSHAKE_S = 5.0
MAX_KEY_BYTES = 1024
MAX_STORED_BYTES = 2**30
MAX_KEYS = 2**20
_BACKLOG = 1024
_PAUSE_S = 0.1
_MAX_WAIT_S = 60.0
# Below Linux's range of ephemeral ports, so that no outgoing connection takes a port before it is used.
_FREE_PORTS = range(20000, 32000)
_SPREAD = 7417  # processes with neighbouring numbers begin far from each other
_asked = itertools.count()


def free_port() -> int:
    """A free port of this machine for a process that is about to start; another one at each call.

    Raises:
        StoreError: There is none.
    """
    for _ in _FREE_PORTS:
        port = _FREE_PORTS[(os.getpid() * _SPREAD + next(_asked)) % len(_FREE_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    raise StoreError(f"every port from {_FREE_PORTS.start} to {_FREE_PORTS.stop - 1} is taken")


@dataclass
class Strangers:
    """Count of connections without the token."""

    refused: int = 0
    last: str = ""  # address of the last one

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self)


class StoreServer(Documents):
    """Documents by key, for this process and for connections that know a token.

    Args:
        host: Address to listen on, and no other interface; empty for all of them.
        port: To listen on; 0 for a free one.
        tls: With the server's certificate, where connections are encrypted.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, host: str, port: int, token: str, tls: ssl.SSLContext | None = None) -> None:
        self._token, self._tls = token.encode(), tls
        everywhere = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere or ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=everywhere)
        self._listening.setblocking(False)
        self.host, self.port = host, int(self._listening.getsockname()[1])
        self.strangers = Strangers()
        self._lock = threading.Lock()
        self._documents: dict[str, str] = {}
        self._bytes = 0
        self._waiting: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._unproved: dict[asyncio.Task[None], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)

    def start(self) -> None:
        """Answer from now on; until then connections wait."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections; further calls do nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._listening.close()

    @property
    def stored_bytes(self) -> int:
        """Size of all keys and documents."""
        return self._bytes

    def keys(self, prefix: str) -> list[str]:
        """Keys that begin so."""
        with self._lock:
            return [key for key in self._documents if key.startswith(prefix)]

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        """Returns the answer of this process; any thread may ask.

        Raises:
            StoreError: The request makes no sense, or there is no room.
        """
        if request[:1] == ("wait",):
            return asyncio.run_coroutine_threadsafe(self._answer(list(request)), self._loop).result()
        try:
            operation, *arguments = request
            act = _OPERATIONS[operation]
        except (KeyError, TypeError, ValueError):
            raise StoreError("an unknown request") from None
        with self._lock:
            try:
                answer, changed = act(self, *arguments)
            except (TypeError, ValueError) as error:
                raise StoreError(f"a request that makes no sense: {error}") from None
        if changed is not None:
            self._wake(changed)
        return answer

    # -- operations, each with its answer and the key that it has written -------------------------

    def _get(self, *keys: str) -> tuple[list[str | None], None]:
        return [self._documents.get(key) for key in keys], None

    def _has(self, *keys: str) -> tuple[bool, None]:
        return all(key in self._documents for key in keys), None

    def _set(self, key: str, value: str) -> tuple[None, str]:
        self._write(key, value)
        return None, key

    def _add(self, key: str, number: int) -> tuple[int, str]:
        value = int(self._documents.get(key, "0")) + int(number)
        self._write(key, str(value))
        return value, key

    def _push(self, key: str, value: str) -> tuple[int, str]:
        number, _ = self._add(key, 1)
        self._write(f"{key}/{number}", value)
        return number, f"{key}/{number}"

    def _swap(self, key: str, expected: str, desired: str) -> tuple[str, str | None]:
        present = self._documents.get(key)
        if present != expected and not (present is None and not expected):
            return expected if present is None else present, None
        self._write(key, desired)
        return desired, key

    def _drop(self, *keys: str) -> tuple[bool, None]:
        found = [key for key in keys if key in self._documents]
        for key in found:
            self._bytes -= len(key) + len(self._documents.pop(key))
        return bool(found), None

    def _strangers(self) -> tuple[dict[str, Any], None]:
        return self.strangers.to_json(), None

    def _stored(self) -> tuple[int, None]:
        return self._bytes, None

    def _write(self, key: str, value: str) -> None:
        if not isinstance(key, str) or not isinstance(value, str) or not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError("a key is a text of at most 1 KiB, and a document is a text")
        before = self._documents.get(key)
        grown = len(value) - len(before) if before is not None else len(key) + len(value)
        if self._bytes + grown > MAX_STORED_BYTES or (before is None and len(self._documents) >= MAX_KEYS):
            raise ValueError(f"the store is full: {len(self._documents)} documents of {self._bytes} bytes")
        self._documents[key] = value
        self._bytes += grown

    # -- the loop ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        for task in (accepting, *self._tasks):
            task.cancel()
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(asyncio.gather(accepting, *self._tasks, return_exceptions=True))
        self._loop.close()

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._listening)
            except OSError:  # no descriptor is free, or the other end has gone already
                await asyncio.sleep(_PAUSE_S)
                continue
            task = self._loop.create_task(self._meet(connection, str(address[0]).removeprefix("::ffff:")))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._unproved[task] = None
            while len(self._unproved) > MAX_STRANGERS:
                oldest = next(iter(self._unproved))
                del self._unproved[oldest]
                oldest.cancel()

    async def _meet(self, connection: socket.socket, address: str) -> None:
        """Serve one connection, from the handshake to its end."""
        task = asyncio.current_task()
        assert task is not None
        writer: asyncio.StreamWriter | None = None
        knows = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                reader, writer = await self._streams(connection)
                handshake = await self._shake(reader, writer)
            if handshake is not None:
                knows = True
                self._unproved.pop(task, None)
                await self._talk(reader, writer, *handshake.channels())
        except (OSError, EOFError, TimeoutError, StoreError, asyncio.CancelledError):
            pass  # the client is gone, silent or invalid
        finally:
            self._unproved.pop(task, None)
            if not knows:
                self.strangers = Strangers(self.strangers.refused + 1, address)
            if writer is None:
                connection.close()
            else:
                writer.transport.abort()

    async def _streams(self, connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        more = {} if self._tls is None else {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE_S}
        transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection, **more)  # type: ignore[arg-type]
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _shake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Handshake | None:
        said = hello()
        writer.write(said)
        proof = await reader.readexactly(PROOF_BYTES)
        handshake = Handshake(self._token, said[-NONCE_BYTES:], proof[:NONCE_BYTES])
        knows = handshake.is_proved(proof)
        writer.write(handshake.verdict() if knows else REFUSED)
        await writer.drain()
        return handshake if knows else None

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: Channel, answers: Channel
    ) -> None:
        while True:
            head = await reader.readexactly(HEAD_BYTES)
            contents = await reader.readexactly(Channel.length(head))
            requests.check(head, contents)
            try:
                answer = {"answer": await self._answer(json.loads(contents))}
            except (StoreError, ValueError, RecursionError) as error:
                answer = {"error": str(error)[:1000]}
            writer.write(answers.frame(json.dumps(answer).encode()))
            await writer.drain()

    async def _answer(self, request: Any) -> Any:
        if isinstance(request, list) and len(request) == 4 and request[0] == "wait":
            return await self._wait(*request[1:])
        return self.ask(*request) if isinstance(request, list) else self.ask(request)

    async def _wait(self, keys: Any, unless: Any, timeout_s: Any) -> str:
        """Wait until all keys exist, one of some others exists, or the time is over."""
        if not (isinstance(keys, list) and isinstance(unless, list) and isinstance(timeout_s, int | float)):
            raise StoreError("a wait that makes no sense")
        deadline_s = self._loop.time() + min(float(timeout_s), _MAX_WAIT_S)
        while True:
            with self._lock:
                missing = [key for key in keys if key not in self._documents]
                is_lost = any(key in self._documents for key in unless)
            if not missing or is_lost:
                return "lost" if missing else "there"
            future: asyncio.Future[None] = self._loop.create_future()
            watched = (missing[0], *unless)
            for key in watched:
                self._waiting[key].add(future)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await future
            except TimeoutError:
                return "late"
            finally:
                for key in watched:
                    self._waiting[key].discard(future)
                    if not self._waiting[key]:
                        del self._waiting[key]

    def _wake(self, key: str) -> None:
        """Wake the requests that wait for a key."""
        if threading.current_thread() is self._thread:
            self._resume(key)
        elif self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._resume, key)

    def _resume(self, key: str) -> None:
        for future in self._waiting.get(key, ()):
            if not future.done():
                future.set_result(None)


_OPERATIONS: dict[str, Any] = {
    "get": StoreServer._get,
    "has": StoreServer._has,
    "set": StoreServer._set,
    "add": StoreServer._add,
    "push": StoreServer._push,
    "swap": StoreServer._swap,
    "drop": StoreServer._drop,
    "strangers": StoreServer._strangers,
    "stored": StoreServer._stored,
}
