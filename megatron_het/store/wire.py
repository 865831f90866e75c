"""What goes over a connection: a handshake in which both ends prove that they know the token, then signed frames.

The server sends a number that it has never sent before, the client answers with one of its own and a digest over both
with the token, and the server answers likewise.  Each frame then carries a digest with a key of this connection and
direction over its number and contents.  So nobody can repeat, drop, reorder or change what was sent, on this or on
another connection.  Contents are not secret without TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
import struct
from pathlib import Path

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
