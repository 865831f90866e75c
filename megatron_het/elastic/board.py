"""The board: signed JSON documents in the controller's ``TCPStore``, the only thing that processes of a job share.

Who does not know the job's token can neither find the keys nor write a document that is believed: keys begin with a
digest of the token, and every document carries a digest of key, contents and token.  Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

_CALL_S = 20.0
_RETRY_S = 0.1
_DIGEST = 64
MAX_DOCUMENT = 64 * 2**20

Answer = TypeVar("Answer")


class BoardError(RuntimeError):
    """The controller does not answer, or a document is not the job's."""


class Board:
    """One connection to the board.  One thread uses it at a time.

    Args:
        host: Of the controller.
        port: Of its store.
        token: Shared by everybody in the job.
        patience_s: How long a lost connection is tried again before :class:`BoardError`.
        serve: Whether this process keeps the store.

    Raises:
        BoardError: Nobody listens there, or somebody else does.
    """

    def __init__(self, host: str, port: int, token: str, *, patience_s: float = _CALL_S, serve: bool = False) -> None:
        self._host, self._port, self._token = host, port, token.encode()
        self._patience_s, self._serve = patience_s, serve
        self._prefix = f"het/{hashlib.sha256(b'keys' + self._token).hexdigest()[:24]}"
        self._raw: Any = None
        self.store: Any = self._connect(time.monotonic() + patience_s)

    def _connect(self, deadline_s: float) -> Any:
        while True:
            try:
                left_s = max(1.0, deadline_s - time.monotonic())
                # By default the store would listen on every interface, whatever the host is.
                listening = socket.create_server((self._host, self._port)).detach() if self._serve else None
                self._raw = dist.TCPStore(
                    self._host,
                    self._port,
                    is_master=self._serve,
                    timeout=timedelta(seconds=left_s),
                    wait_for_workers=False,
                    master_listen_fd=listening,
                )
                self._raw.set_timeout(timedelta(seconds=_CALL_S))
                return dist.PrefixStore(self._prefix, self._raw)
            except (RuntimeError, OSError) as error:
                if self._serve or time.monotonic() > deadline_s:
                    raise BoardError(self._trouble(str(error).splitlines()[0])) from None
                time.sleep(_RETRY_S)

    def _trouble(self, error: str) -> str:
        where = f"--controller {self._host}:{self._port}"
        if self._serve:
            return f"{where} cannot be listened on: {error}. Does a controller run there? Otherwise take another port"
        return f"{where} does not answer: {error}. Start the controller first, with the same --controller"

    def put(self, key: str, document: Any) -> None:
        """Write a document."""
        text = json.dumps(document)
        self._call(lambda: self.store.set(key, self._digest(key, text) + text))

    def get(self, key: str) -> Any:
        """Read a document; None if there is none.

        Raises:
            BoardError: It was not written by somebody who knows the token.
        """
        if not self.has(key):
            return None
        signed = self._call(lambda: self.store.get(key)).decode(errors="replace")
        text = signed[_DIGEST:]
        if len(signed) > MAX_DOCUMENT or not hmac.compare_digest(self._digest(key, text), signed[:_DIGEST]):
            raise BoardError(f"the document {key!r} at {self._host}:{self._port} was not written with this job's token")
        return json.loads(text)

    def has(self, *keys: str) -> bool:
        """Whether all documents are there."""
        return bool(self._call(lambda: self.store.check(list(keys))))

    def count(self, key: str) -> int:
        """The next number of a count, from 1."""
        return int(self._call(lambda: self.store.add(key, 1)))

    def start_count(self, key: str, last: int) -> None:
        """Let a count that nobody has begun go on after a number."""
        self._call(lambda: self.store.add(key, last))

    def drop(self, key: str) -> None:
        """Delete a document."""
        self._call(lambda: self.store.delete_key(key))

    def post(self, document: Any) -> None:
        """Tell the controller something."""
        self.put(f"inbox/{self.count('inbox')}", document)

    def _digest(self, key: str, text: str) -> str:
        return hmac.new(self._token, f"{key}\n{text}".encode(), hashlib.sha256).hexdigest()

    def _call(self, operation: Callable[[], Answer]) -> Answer:
        """An operation, again over a new connection where the old one is lost."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return operation()
            except RuntimeError as error:
                if self._serve or time.monotonic() > deadline_s:
                    raise BoardError(f"{self._host}:{self._port} does not answer any more: {error}") from None
                self.store = self._connect(deadline_s)
