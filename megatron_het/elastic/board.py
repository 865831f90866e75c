"""The board: JSON documents in the controller's store, the only thing that processes of a job share.

Who does not know the job's token gets no connection (:mod:`megatron_het.store`), so that whatever is here was written
by a member of the job.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_het.safe_io import FileError, read_text, shown
from megatron_het.store import Store, StoreError, StoreServer, client_tls, server_tls
from megatron_het.store.job import address

_CALL_S = 20.0
_LONGEST_ADDRESS = 300


class Board(Store):
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
        tls = None if tls_ca is None else _loaded(lambda: client_tls(tls_ca), "--tls-ca")
        super().__init__(lambda: _addresses(host, port, address_file), token, patience_s, tls)


class ServedBoard(StoreServer):
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
            super().__init__(host, port, token, tls)
        except OSError as error:
            raise StoreError(
                f"--controller {host}:{port} cannot be listened on: {error}. Does a controller run there? Otherwise "
                "take another port"
            ) from None

    def start_count(self, key: str, least: int) -> None:
        """Let a count go on after a number, unless it is further already."""
        present = int(self.get(key) or 0)
        if present < least:
            self.count(key, least - present)


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
