"""Frames of a connection: a handshake in which both ends prove that they know the token, then signed frames.

The server sends a number that it has never sent before, the client answers with one of its own and a digest over both
with the token, and the server answers likewise.  Each frame then carries a digest with a key of this connection and
direction over its number and contents.  So nobody can repeat, drop, reorder or change what was sent, on this or on
another connection.  Contents are not secret without TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import ssl
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What is done with the documents of a store, wherever they are kept.


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

    def under(self, prefix: str) -> Documents:
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
        """Wait until all keys are there (``there``), one of some others is (``lost``), or for so long (``late``)."""
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
        """Write a text where another one is, or none where that one is empty; returns what is there now."""
        return str(self.ask("swap", self._prefix + key, expected, desired))

    def drop(self, *keys: str) -> bool:
        """Delete documents; says whether there was one."""
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
    """The store does not answer, or what it says is not the job's."""


class TokenError(StoreError):
    """The store is another job's: it does not take this token."""


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """How a server with a certificate encrypts.

    Raises:
        OSError: The files cannot be read, or do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def client_tls(authority: Path) -> ssl.SSLContext:
    """How a client encrypts that believes an authority, or one self-signed certificate.

    Raises:
        OSError: The file cannot be read, or holds no certificate.
    """
    return ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(authority))


def hello() -> bytes:
    """Returns what the server says first."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


class Handshake:
    """The digests of one connection.

    Args:
        token: Of the job.
        server, client: The numbers of both ends.
    """

    def __init__(self, token: bytes, server: bytes, client: bytes) -> None:
        self._token, self._both = token, server + client
        self.client = client

    def proof(self) -> bytes:
        """Returns what the client answers."""
        return self.client + self._digest(b"client")

    def is_proved(self, proof: bytes) -> bool:
        """Whether the client's answer was made with the token."""
        return hmac.compare_digest(self.proof(), proof)

    def verdict(self) -> bytes:
        """Returns what the server answers to a client that knows the token."""
        return b"+" + self._digest(b"server")

    def channels(self) -> tuple[Channel, Channel]:
        """Signatures of what the client sends, and of what the server sends."""
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
        """Bytes of the contents that follow a head.

        Raises:
            StoreError: More than a frame may have.
        """
        (length,) = struct.unpack_from(">I", head)
        if length > MAX_FRAME_BYTES:
            raise StoreError(f"a frame of {length} bytes")
        return int(length)

    def check(self, head: bytes, contents: bytes) -> None:
        """Refuse contents that are not the other end's next ones.

        Raises:
            StoreError: They are not.
        """
        if not hmac.compare_digest(self._sign(contents), head[4:]):
            raise StoreError("a frame without this connection's signature")

    def _sign(self, contents: bytes) -> bytes:
        signer = hmac.new(self._key, struct.pack(">Q", self._number), hashlib.sha256)
        signer.update(contents)
        self._number += 1
        return signer.digest()
