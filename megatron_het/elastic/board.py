"""The board: JSON documents in the controller's store, the only thing that processes of a job share.

Who does not know the job's token gets no connection (:mod:`megatron_het.store`), so that whatever is here was written
by a member of the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_het.safe_io import FileError, read_text, shown
from megatron_het.store import StoreClient, StoreError, StoreServer, client_tls, server_tls

_CALL_S, _WAIT_S = 20.0, 1.0
_LONGEST_ADDRESS = 300


class Board:
    """Access to the board, for all threads of a process.

    Args:
        host: Of the controller.
        port: Of its store.
        token: Shared by everybody in the job.
        patience_s: How long a request is tried again before :class:`StoreError`.
        address_file: Where the controller writes its address; read again before every connection.
        tls_ca: File with the authority of the controller's certificate, where connections are encrypted.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        *,
        patience_s: float = _CALL_S,
        address_file: Path | None = None,
        tls_ca: Path | None = None,
    ) -> None:
        self._where = f"--controller {host}:{port}"
        tls = None if tls_ca is None else _loaded(lambda: client_tls(tls_ca), "--tls-ca")
        self._client = StoreClient(lambda: _addresses(host, port, address_file), token, patience_s, tls)

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        """Answer of the store to a request.

        Raises:
            TokenError: The controller there has another token.
            StoreError: Nobody answers.
        """
        return self._client.ask(request, patience_s=patience_s, tries_again=tries_again)

    def put(self, key: str, document: Any, *, patience_s: float | None = None) -> None:
        """Write a document."""
        self.ask("set", key, json.dumps(document), patience_s=patience_s)

    def get(self, key: str, *, patience_s: float | None = None) -> Any:
        """Read a document; None if there is none."""
        return self.read(key, patience_s=patience_s)[0]

    def read(self, *keys: str, patience_s: float | None = None) -> list[Any]:
        """Read some documents at once; None for those that are not there."""
        texts = self.ask("get", *keys, patience_s=patience_s)
        return [None if text is None else json.loads(text) for text in texts]

    def has(self, *keys: str) -> bool:
        """Whether all documents are there."""
        return bool(self.ask("has", *keys))

    def wait(self, keys: Sequence[str], unless: Sequence[str], timeout_s: float) -> str:
        """Wait until all keys are there (``there``), one of some others is (``lost``), or for so long (``late``)."""
        return str(self.ask("wait", list(keys), list(unless), timeout_s, patience_s=_WAIT_S))

    def count(self, key: str, *, patience_s: float | None = None) -> int:
        """Take the next number of a count, from 1."""
        return int(self.ask("add", key, 1, patience_s=patience_s))

    def drop(self, *keys: str) -> None:
        """Delete documents."""
        self.ask("drop", *keys)

    def post(self, document: Any, *, patience_s: float | None = None) -> None:
        """Tell the controller something."""
        self.ask("push", "inbox", json.dumps(document), patience_s=patience_s)


class ServedBoard(Board):
    """The board in the process that keeps it.

    Args:
        host: To listen on.
        port: To listen on.
        token: Of the job.
        certificate, key: Files, where connections are encrypted.

    Raises:
        StoreError: It cannot listen there.
    """

    def __init__(
        self, host: str, port: int, token: str, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        tls = None
        if certificate is not None:
            tls = _loaded(lambda: server_tls(certificate, key or certificate), "--tls-cert")
        try:
            self._server = StoreServer(host, port, token, tls)
        except OSError as error:
            raise StoreError(
                f"--controller {host}:{port} cannot be listened on: {error}. Does a controller run there? Otherwise "
                "take another port"
            ) from None
        self.port = self._server.port

    def open(self) -> None:
        """Answer others from now on."""
        self._server.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        """See :meth:`Board.ask`; answered in this process."""
        return self._server.ask(request)

    def keys(self, prefix: str) -> list[str]:
        """Keys that begin so."""
        return self._server.keys(prefix)

    def start_count(self, key: str, least: int) -> None:
        """Let a count go on after a number, unless it is further already."""
        present = int(self.ask("get", key)[0] or 0)
        if present < least:
            self.ask("add", key, least - present)

    def strangers(self) -> dict[str, Any]:
        """How many connections came without the token, and from where the last one."""
        return self._server.strangers.to_json()

    @property
    def stored_bytes(self) -> int:
        """Size of all documents."""
        return self._server.stored_bytes


def address(text: str) -> tuple[str, int] | None:
    """Host and port of ``HOST:PORT``; None where the text is something else."""
    host, _, port = text.strip().rpartition(":")
    if not host or not host.isprintable() or not port.isascii() or not port.isdigit() or len(port) > 5:
        return None
    return (host, int(port)) if 0 < int(port) < 65536 else None


def _addresses(host: str, port: int, file: Path | None) -> list[tuple[str, int]]:
    """Where the controller may be: what its file says, then what the command line says."""
    found = None
    if file is not None:
        try:
            found = address(read_text(file, _LONGEST_ADDRESS))
        except FileError:
            found = None
    return list(dict.fromkeys(place for place in (found, (host, port)) if place is not None))


def _loaded(load: Callable[[], Any], option: str) -> Any:
    try:
        return load()
    except OSError as error:
        raise StoreError(f"{option}: {shown(str(error))}. Give PEM files, readable here") from None
