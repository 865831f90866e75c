"""The store of a job without a controller: rank 0 starts it, and every rank finds it by the launcher's variables.

The store is a separate process beside rank 0, so that it does not delay the training.  Its address follows from
``MASTER_ADDR`` and ``MASTER_PORT``, or is given as ``MEGATRON_HET_STORE``.  Its token is derived from a secret
(``MEGATRON_HET_TOKEN`` or a file), and is valid for one start of one job.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import select
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_het.safe_io import FileError, check_target, read_text, shown
from megatron_het.store.server import (
    HEAD_BYTES,
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    REFUSED,
    VERDICT_BYTES,
    Channel,
    Documents,
    Handshake,
    StoreError,
    StoreServer,
    TokenError,
    hello,
)

# The store's client: one connection per thread, opened again after it is lost; every wait is bounded.


ANSWER_S = 20.0  # longest wait for an answer over an open connection
_SHORTEST_S = 0.05
_RETRY_S = 0.1
_CONNECT_S = 2.0

Address = tuple[str, int]


class Store(Documents):
    """Client of a store in another process.  Thread-safe; each thread has its own connection.

    Args:
        addresses: Returns possible addresses of the store, the likeliest first; called before every connection.
        patience_s: Time for retries of a request before :class:`StoreError`.
        tls: Context with the certificate authority of the server, if connections are encrypted.
        others_nearby: Whether other jobs' stores may be at these addresses, so that a refused token is tried again.
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
            TokenError: No store has accepted this token yet.
            StoreError: The store does not answer, or refuses the request.
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

    def _connected(self, left_s: float) -> "_Connection":
        found: _Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._local.connection = self._connect(left_s)
            self._has_met = True
        return found

    def _connect(self, left_s: float) -> "_Connection":
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
    """A connection after the handshake with the token.  Its socket is closed when the object is deleted."""

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
            OSError, EOFError: The connection is lost or timed out; it is closed.
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


PLACE, TOKEN, TOKEN_FILE = "MEGATRON_HET_STORE", "MEGATRON_HET_TOKEN", "MEGATRON_HET_TOKEN_FILE"
TOKEN_BYTES, LONGEST_TOKEN = 16, 1024
IDENTITY = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that identify one start of a job, equal on all ranks."""
_PORTS = 8  # ports after ``MASTER_PORT`` that are tried: another program may have the first ones
_STARTED_S, _LOOK_S = 30.0, 0.5
_LOOPBACK = ("localhost", "127.", "::1")

_GIVEN: list[Documents] = []  # the store of a job with a controller
_STARTED: dict[str, subprocess.Popen[str]] = {}  # the store's process, by its request (JSON)


def use_store(store: Documents) -> None:
    """Set the store of this process's job to an open one, as in an elastic job."""
    _GIVEN[:] = [store]


def job_store(rank: int, timeout_s: float, patience_s: float = 20.0) -> Documents:
    """Returns the job's store; rank 0 starts it.

    Args:
        timeout_s: Bound on the wait for the store.
        patience_s: Time for retries of later requests.

    Raises:
        StoreError: The store cannot be started, does not answer in time, or ranks have different tokens.
    """
    if _GIVEN:
        return _GIVEN[0]
    if rank == 0:
        _start()
    return peer_store(timeout_s, patience_s)


def peer_store(timeout_s: float, patience_s: float = 20.0) -> Store:
    """Returns the store that rank 0 has started.

    Raises:
        StoreError: The store does not answer in time, or ranks have different tokens.
    """
    where = places()
    store = Store(lambda: where, job_token(), patience_s, others_nearby=True)
    try:
        store.ask("has", "-", patience_s=timeout_s)
    except StoreError as error:
        raise StoreError(f"the store of rank 0 cannot be reached: {error}. Give all nodes the same {TOKEN}") from None
    return store


def strangers(store: Documents) -> str:
    """Returns a hint about connections with a wrong token, for the error about a missing rank; empty if none."""
    found = store.ask("strangers")
    if not found["refused"]:
        return ""
    return f"; {found['refused']} connections came with another token, the last from {found['last']}: see {TOKEN}"


_CHECK_S = 0.05
_MEETING_S = 300.0  # largest timeout of a group of measuring processes
_MEASURED = "auto-batch"
_FAILED = "failed"


class ExchangeError(RuntimeError):
    """The store cannot be reached, a rank failed, or a value did not arrive in time."""


class Exchange:
    """Exchange of named values between all ranks before ``torch.distributed`` is initialised; waits are bounded.

    Args:
        timeout_s: Bound on every wait.

    Raises:
        ExchangeError: The store cannot be reached.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._store: Documents | None = None
        if world_size > 1:
            try:
                self._store = job_store(rank, timeout_s).under(_MEASURED)
            except StoreError as error:
                raise ExchangeError(str(error)) from error
        self._checked_s = 0.0

    def meeting(self, name: str) -> dict[str, Any] | None:
        """Prefix and timeout for a process group of the ranks' child processes; None for a single rank."""
        if self._store is None:
            return None
        return {"prefix": f"{_MEASURED}/{name}", "timeout_s": min(self._timeout_s, _MEETING_S)}

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks under a name, by rank."""
        if self._store is None:
            return [value]
        self._store.put(f"{name}/{self._rank}", value)
        return self._come({f"{name}/{rank}": f"rank {rank}" for rank in range(self._world_size)})

    def decided(self, name: str, value: Any) -> Any:
        """Rank 0's value, on all ranks; ``value`` is ignored on the others."""
        if self._store is None:
            return json.loads(json.dumps(value))
        if self._rank == 0:
            self._store.put(f"{name}/decided", value)
        return self._come({f"{name}/decided": "rank 0"})[0]

    def fail(self, problem: str) -> None:
        """Report a failure of this rank, which ends the waits of the others."""
        if self._store is not None:
            self._store.put(_FAILED, f"rank {self._rank}: {problem}")

    def check(self) -> None:
        """Check for failed ranks, at most every 50 ms.

        Raises:
            ExchangeError: A rank has failed; the text has rank and reason.
        """
        now_s = time.monotonic()
        if self._store is None or now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        problem = self._store.get(_FAILED)
        if problem is not None:
            raise ExchangeError(problem)

    def _come(self, keys: dict[str, str]) -> list[Any]:
        """Wait for keys and return their values; ``keys`` maps each key to the name of its writer."""
        assert self._store is not None
        found = self._store.wait(list(keys), [_FAILED], self._timeout_s, patience_s=None)
        if found == "lost":
            raise ExchangeError(self._store.get(_FAILED))
        if found == "late":
            key = next(key for key in keys if not self._store.has(key))
            who = f"nothing came from {keys[key]} within {self._timeout_s:.0f} s ({key})"
            raise ExchangeError(who + strangers(self._store))
        return self._store.read(*keys)


def end_all(exchange: Exchange | None, flag: str, rank: int, error: Exception) -> NoReturn:
    """Report a failed measurement to the other ranks, print the error and exit with code 2.

    Args:
        exchange: Exchange with the other ranks; None if it could not be opened.
        flag: Flag that the measurement is for.
    """
    with contextlib.suppress(StoreError):  # the store may have ended
        if exchange is not None:
            exchange.fail(next(iter(str(error).splitlines()), type(error).__name__))
    sys.stderr.write(f"megatron_het: {flag}: rank {rank}: {error}\n")
    time.sleep(1.0)  # the store ends with rank 0: give the others time to read the reason
    raise SystemExit(2) from None


def places() -> list[Address]:
    """Returns possible addresses of the store, the likeliest first; raises StoreError if a variable is malformed."""
    if given := os.environ.get(PLACE):
        place = address(given)
        if place is None:
            raise StoreError(f"{PLACE} = {shown(given, 80)} is no HOST:PORT")
        return [place]
    host, text = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise StoreError(f"MASTER_PORT = {shown(text, 80)} is no port")
    port = int(text)
    step = 1 if port + _PORTS < 65536 else -1
    return [(host, port + step * i) for i in range(1, _PORTS + 1)]


def job_token() -> str:
    """Returns the token of this start of this job.

    Raises:
        StoreError: The secret, from which the token is derived, cannot be read.
    """
    start = json.dumps([os.environ.get(name, "") for name in IDENTITY])
    return hmac.digest(_secret().encode(), start.encode(), hashlib.sha256).hex()


def token_of_file(file: Path, *, create: bool) -> str:
    """Returns the token in a file.

    Args:
        create: Whether to create a missing file, readable only by its owner.

    Raises:
        FileError: The file cannot be read or written.
        ValueError: The file's text is not a token.
    """
    if create and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        check_target(file)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".token-")  # readable only by its owner
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(secrets.token_hex(TOKEN_BYTES) + "\n")
        try:
            os.link(name, file)  # atomic: readers find a complete file, and the first of two writers wins
        except FileExistsError:
            pass
        finally:
            os.unlink(name)
    return checked_token(read_text(file).strip(), str(file))


def checked_token(token: str, where: str) -> str:
    """Returns ``token``; raises ValueError if it is too long, too short or not printable."""
    if len(token) > LONGEST_TOKEN or not token.isprintable():
        raise ValueError(f"{where} holds no token of at most {LONGEST_TOKEN} letters; let the program write one")
    if len(token) < TOKEN_BYTES:
        raise ValueError(f"the token in {where} is shorter than {TOKEN_BYTES} characters; let the program write one")
    return token


def address(text: str) -> Address | None:
    """Host and port of ``HOST:PORT``; None if the text has another form."""
    host, _, port = text.strip().rpartition(":")
    if not host or not host.isprintable() or not port.isascii() or not port.isdigit() or len(port) > 5:
        return None
    return (host, int(port)) if 0 < int(port) < 65536 else None


def _secret() -> str:
    try:
        if token := os.environ.get(TOKEN):
            return checked_token(token, TOKEN)
        if file := os.environ.get(TOKEN_FILE):
            return token_of_file(Path(file), create=False)
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return token_of_file(folder / "megatron_het" / "token", create=True)
    except (FileError, OSError, RuntimeError, ValueError) as error:
        raise StoreError(f"{error}. Give all ranks one {TOKEN} of {TOKEN_BYTES} letters or more") from None


def _start() -> None:
    """Start the store's process unless this process has done so; the store ends with this process."""
    where = places()
    ports, token = [port for _, port in where], job_token()
    request = json.dumps({"host": listening(where[0][0]), "ports": ports, "token": token, "parent": os.getpid()})
    if request in _STARTED and _STARTED[request].poll() is None:
        return
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request + "\n")  # not as an argument: all users can read command lines
    process.stdin.flush()
    watchdog = threading.Timer(_STARTED_S, process.kill)
    watchdog.start()
    said = process.stdout.readline().strip()
    watchdog.cancel()
    if said != "open":
        process.kill()
        raise StoreError(f"the store cannot be opened: {said or 'its process has ended'}. See {PLACE}")
    _STARTED[request] = process


def listening(host: str) -> str:
    """Returns the interface on which rank 0 listens: ``host`` if that is a loopback address, else empty for all.

    The name of a host may resolve to another address on the host itself than on others.
    """
    return host if host.startswith(_LOOPBACK) else ""


def _serve(request: dict[str, Any]) -> int:
    """Run the store until the process that started it has ended; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ports, server, error = request["ports"], None, ""
    for port in ports:
        try:
            server = StoreServer(request["host"], port, request["token"])
            break
        except OSError as failure:
            error = str(failure)
    if server is None:
        sys.stdout.write(f"no port of {ports[0]} to {ports[-1]} can be listened on: {error}\n")
        return 1
    server.start()
    sys.stdout.write("open\n")
    sys.stdout.flush()
    # Both conditions, because the pipe stays open while another child of that process has it, too.
    while os.getppid() == request["parent"] and not select.select([0], [], [], _LOOK_S)[0]:
        pass
    return 0


if __name__ == "__main__":
    code = _serve(json.loads(sys.stdin.readline()))
    sys.stdout.flush()
    os._exit(code)
