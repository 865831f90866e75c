"""Generation, board and signature: data that the controller and the workers of a job share.

The board is a set of JSON documents in the controller's store.  A process without the job's token gets no connection
(:mod:`megatron_het.store`), so only members of the job can write documents.
"""

import itertools
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron_het
from megatron_het.plan import Plan, plan_hash
from megatron_het.safe_io import FileError, read_text, shown, write_json
from megatron_het.store import Store, StoreError, StoreServer, client_tls, server_tls
from megatron_het.store.job import address

CHECK_S = 60.0  # bound on checking the flags against a plan
_CALL_S = 20.0
_LONGEST_ADDRESS = 300


@dataclass(frozen=True)
class Generation:
    """Description of a generation for every process.  Processes have numbers that never change."""

    number: int  # ascending from 0
    plan: Plan
    ranks: tuple[int, ...]  # process of each rank of the plan
    holders: tuple[int, ...] = ()  # processes that may hold state of an earlier generation
    nodes: tuple[str, ...] = ()  # name of the node of each rank
    loads: bool = False  # whether the holders give the state; the first generation starts by Megatron's flags
    unsaved: tuple[int, ...] = ()  # iterations whose checkpoint could not be written, and is not tried again
    # iterations whose checkpoint could not be written into ``--save``, and is tried in ``fallback``
    elsewhere: tuple[int, ...] = ()
    fallback: str = ""  # folder for these checkpoints; empty for none

    @property
    def movers(self) -> tuple[int, ...]:
        """Processes that take part in moving the state: those of the ranks in order, then the other holders."""
        return (*self.ranks, *sorted({*self.holders}.difference(self.ranks)))

    @property
    def lost_key(self) -> str:
        """Key in the job's store that exists once a process of the generation is lost or its session has failed."""
        return f"{self.number}/lost"

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return values | {"plan": self.plan.to_json()}

    @staticmethod
    def from_json(document: dict[str, Any]) -> "Generation":
        """Returns the generation of a document of :meth:`to_json`; raises PlanError if its plan is invalid."""
        known = {"elsewhere": (), "fallback": ""} | document
        numbers = {name: tuple(map(int, known[name])) for name in ("ranks", "holders", "unsaved", "elsewhere")}
        return Generation(
            number=int(known["number"]),
            plan=Plan.from_json(known["plan"]),
            nodes=tuple(map(str, known["nodes"])),
            loads=bool(known["loads"]),
            fallback=str(known["fallback"]),
            **numbers,
        )


@dataclass(frozen=True)
class Moment:
    """A point in time: by the wall clock for display, and by the monotonic clock, which cannot jump, for waits."""

    wall_s: float = field(default_factory=time.time)  # seconds since 1970
    clock_s: float = field(default_factory=time.monotonic)  # seconds of the monotonic clock

    def ago_s(self) -> float:
        """Seconds since this moment."""
        return time.monotonic() - self.clock_s


class Board(Store):
    """Access to the board, for all threads of a process.

    Args:
        token: The job's token, shared by all its processes.
        patience_s: How long a request is retried before :class:`StoreError`.
        address_file: File with the controller's address; read again before every connection.
        tls_ca: File with the authority of the controller's certificate, if connections are encrypted.
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
        certificate, key: Files for TLS, if connections are encrypted.

    Raises:
        StoreError: It cannot listen on the address.
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
        """Raise a count to at least ``least``."""
        present = int(self.get(key) or 0)
        if present < least:
            self.count(key, least - present)


def _addresses(host: str, port: int, file: Path | None) -> list[tuple[str, int]]:
    """Possible addresses of the controller: that of its file, then that of the command line."""
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


def signature_of(flags: Sequence[str]) -> str:
    """Returns a node's signature: versions and flags in which all nodes must agree."""
    release = str(getattr(megatron_het, "__version__", ""))
    return json.dumps({"megatron_het": release, "megatron-core": version("megatron-core"), "flags": list(flags)})


def refusal(own: str, first: str) -> str:
    """Why a node cannot take part, and the remedy; empty if it can.

    Args:
        own: The node's :func:`signature_of`.
        first: The signature of the job's first node.
    """
    if own == first:
        return ""
    what = _difference(own, first)
    return f"{what}; start all nodes of a job with the same command and the same release"


def problems_under(plan: Plan, flags: Sequence[str], folder: Path) -> Callable[[], list[str]]:
    """Begin to check whether the start of the training would refuse a plan, in a process forked from this one.

    Args:
        flags: Flags of the training, without a plan.
        folder: Folder for the plan's file.

    Returns:
        A function that waits for the result in bounded time: the problems; none if the check itself failed.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            os.write(writes, json.dumps(_problems(plan, flags, folder)).encode()[:65536])
        finally:
            os._exit(0)
    os.close(writes)

    def answer() -> list[str]:
        text, deadline_s = b"", time.monotonic() + CHECK_S
        try:
            while select.select([reads], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                part = os.read(reads, 65536)
                if not part:
                    return [str(problem) for problem in json.loads(text)]
                text += part
        except ValueError:
            pass
        finally:
            os.close(reads)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return []

    return answer


class Checks:
    """Results of :func:`problems_under`, which waiting workers run for plans."""

    def __init__(self) -> None:
        self._found: dict[str, Moment | list[str]] = {}

    def note(self, message: Mapping[str, Any]) -> None:
        """Store a worker's result."""
        self._found[str(message["id"])] = [str(problem) for problem in message["problems"]]

    def problems(self, plan: Plan, ask: Callable[[dict[str, Any]], None]) -> list[str] | None:
        """Returns the problems of a plan; None until a worker has answered, an empty list if it does not in time.

        Args:
            ask: Called once, with the request for a worker.
        """
        key = plan_hash(plan)
        if key not in self._found:
            self._found[key] = Moment()
            ask({"id": key, "plan": plan.to_json()})
        found = self._found[key]
        if isinstance(found, Moment):
            return None if found.ago_s() < CHECK_S else []
        return found


def _problems(plan: Plan, flags: Sequence[str], folder: Path) -> list[str]:
    """Returns the refusals of the training's start; runs in a process of its own."""
    from megatron_het import device as platform
    from megatron_het import megatron_patches as upstream
    from megatron_het.doctor.flags import problems_of

    device = platform.activate()
    upstream.install("stock")
    file = folder / "plan-to-check.json"
    write_json(file, plan.to_json(), durable=False)
    os.environ.update(RANK="0", WORLD_SIZE=str(plan.world_size))
    missing, problems = problems_of((*flags, "--het-plan", str(file)), device)
    return [f"missing: {text}" for text in missing.values()] + problems


def _difference(own: str, first: str) -> str:
    try:
        mine, theirs = json.loads(own), json.loads(first)
        for name in ("megatron_het", "megatron-core"):
            if mine[name] != theirs[name]:
                return f"{name} is {shown(mine[name])} here and {shown(theirs[name])} on the first node"
        name = "the flags"
        for here, there in itertools.zip_longest(mine["flags"], theirs["flags"]):
            if here != there:
                return f"{name} differ: {_word(here)} here and {_word(there)} on the first node"
            name = f"the values of {shown(here)}" if here.startswith("--") else name
    except (KeyError, TypeError, ValueError):
        pass
    return "it was started by another release than the first node"


def _word(word: str | None) -> str:
    return "none" if word is None else shown(word)
