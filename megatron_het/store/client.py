"""The store's client: one connection per thread, made again when it is lost; every wait is bounded."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_het.store.documents import Documents
from megatron_het.store.wire import (
    HEAD_BYTES,
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    REFUSED,
    VERDICT_BYTES,
    Channel,
    Handshake,
    StoreError,
    TokenError,
    hello,
)

ANSWER_S = 20.0
"""Longest wait for an answer over a connection that stands."""
_SHORTEST_S = 0.05
_RETRY_S = 0.1
_CONNECT_S = 2.0

Address = tuple[str, int]


class Store(Documents):
    """A store in another process.  Any thread may ask; each has a connection of its own.

    Args:
        addresses: Says where the store may be now, the likeliest place first; asked before every connection.
        token: Of the job.
        patience_s: How long a request is tried again before :class:`StoreError`.
        tls: With the authority of the server's certificate, where connections are encrypted.
        others_nearby: Whether stores of other jobs may be at these addresses, so that a refusal there says little.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[Address]],
        token: str,
        patience_s: float,
        tls: ssl.SSLContext | None = None,
        *,
        others_nearby: bool = False,
    ) -> None:
        self._addresses, self._token, self._patience_s, self._tls = addresses, token.encode(), patience_s, tls
        self._waits_for_its_own = others_nearby
        self._local = threading.local()
        self._has_met = False

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        """See :meth:`Documents.ask`.

        Raises:
            TokenError: The store has never taken this token.
            StoreError: It does not answer, or refuses the request.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        bound_s = float(request[3]) if request[0] == "wait" else 0.0
        deadline_s = time.monotonic() + patience_s + bound_s
        while True:
            left_s = max(_SHORTEST_S, deadline_s - time.monotonic())
            error: Exception
            try:
                return self._connected(left_s).ask(request, min(ANSWER_S, left_s) + bound_s)
            except TokenError:
                self._local.connection = None
                is_over = not tries_again or time.monotonic() >= deadline_s
                if not self._has_met and (is_over or not self._waits_for_its_own):
                    raise
                error = StoreError("somebody else listens there")
            except (OSError, EOFError) as failure:
                self._local.connection, error = None, failure
            if not tries_again or time.monotonic() >= deadline_s:
                where = " or ".join(f"{host}:{port}" for host, port in self._addresses())
                raise StoreError(f"{where} does not answer: {error or type(error).__name__}") from None
            time.sleep(min(_RETRY_S, left_s))

    def close(self) -> None:
        """Close this thread's connection."""
        self._local.connection = None

    def _connected(self, left_s: float) -> _Connection:
        found: _Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._local.connection = self._connect(left_s)
            self._has_met = True
        return found

    def _connect(self, left_s: float) -> _Connection:
        addresses = list(self._addresses())
        failures: list[Exception] = []
        for address in addresses:
            try:
                return _Connection(address, self._token, min(_CONNECT_S, left_s), self._tls)
            except TokenError as failure:
                failures.insert(0, failure)
            except (OSError, EOFError) as failure:
                failures.append(failure)
        raise failures[0] if failures else OSError("nobody knows where it is")


class _Connection:
    """One connection that has proved the token.  Its socket is closed with it."""

    def __init__(self, address: Address, token: bytes, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._socket = socket.create_connection(address, timeout=timeout_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=address[0])
            said = self._read(HELLO_BYTES, deadline_s)
            if not said.startswith(MAGIC):
                raise EOFError("another program listens there")
            handshake = Handshake(token, said[-NONCE_BYTES:], hello()[-NONCE_BYTES:])
            self._socket.sendall(handshake.proof())
            verdict = self._read(VERDICT_BYTES, deadline_s)
            if verdict == REFUSED:
                raise TokenError(f"the store at {address[0]}:{address[1]} refuses this token: it is another job's")
            if verdict != handshake.verdict():
                raise TokenError(f"who listens at {address[0]}:{address[1]} does not know this token")
        except BaseException:
            self._socket.close()
            raise
        self._requests, self._answers = handshake.channels()

    def ask(self, request: Sequence[Any], timeout_s: float) -> Any:
        """The answer to a request.

        Raises:
            OSError, EOFError: The connection is lost, or nothing came in time; it cannot be used any more.
            StoreError: The store refuses the request.
        """
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(self._requests.frame(json.dumps(request).encode()))
            deadline_s = time.monotonic() + timeout_s
            head = self._read(HEAD_BYTES, deadline_s)
            contents = self._read(Channel.length(head), deadline_s)
            self._answers.check(head, contents)
        except BaseException as failure:
            self._socket.close()
            if isinstance(failure, StoreError):
                raise EOFError(str(failure)) from None
            raise
        answer = json.loads(contents)
        if "error" in answer:
            raise StoreError(f"the store refuses a request: {answer['error']}")
        return answer["answer"]

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()

    def _read(self, length: int, deadline_s: float) -> bytes:
        found = bytearray()
        while len(found) < length:
            self._socket.settimeout(max(_SHORTEST_S, deadline_s - time.monotonic()))
            part = self._socket.recv(min(length - len(found), 1 << 20))
            if not part:
                raise EOFError("the connection was closed")
            found += part
        return bytes(found)
