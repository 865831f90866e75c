"""The store's server: an event loop on a thread of the process that keeps the documents.

What a stranger can make it keep is bounded: so many connections that have proved nothing, each for so many seconds and
bytes.  When there are more, the oldest has to go, so that those who know the token get in during a flood.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import ssl
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from megatron_het.store.wire import (
    HEAD_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    Channel,
    Documents,
    Handshake,
    StoreError,
    hello,
)

MAX_STRANGERS = 64
HANDSHAKE_S = 5.0
MAX_KEY_BYTES = 1024
MAX_STORED_BYTES = 2**30
MAX_KEYS = 2**20
_BACKLOG = 1024
_PAUSE_S = 0.1
_MAX_WAIT_S = 60.0
# Below the range from which Linux takes the local ends of connections: no connection takes a port away in between.
_FREE_PORTS = range(20000, 32000)
_SPREAD = 7417  # processes with neighbouring numbers begin far from each other
_asked = itertools.count()


def free_port() -> int:
    """A port of this machine on which nobody listens, for a process that is started next; another one at each call.

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
    """Connections that came without the token.

    Attributes:
        refused: How many there were.
        last: Address of the last one.
    """

    refused: int = 0
    last: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self)


class StoreServer(Documents):
    """Documents by key, for this process and for connections that know a token.

    Args:
        host: Address to listen on, and no other interface; empty for all of them.
        port: To listen on; 0 for a free one.
        token: Of the job.
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
            pass  # whoever it was is gone, says nothing, or makes no sense
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
        """Until all keys are there, one of some others is, or the time is over."""
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
        """Wakes those who wait for a key."""
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
