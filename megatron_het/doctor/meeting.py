"""The store that the ranks meet at, and the keys under which they speak."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

BEAT_S = 1.0
_LAST_WORDS_S = 12.0  # for rank 0 to find out who has died, and to say so
POLL_S = 0.05


class MeetingError(RuntimeError):
    """The store cannot be reached, or nothing came in time."""


def connect(rank: int, timeout_s: float) -> Any:
    """The store at ``MASTER_ADDR:MASTER_PORT``; rank 0 opens it unless torchrun keeps one.

    It does not wait for other ranks: whoever is missing is named later.

    Raises:
        MeetingError: It cannot be opened or reached in time.
    """
    import torch.distributed as dist

    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            port,
            None,
            is_master=rank == 0 and not kept_by_launcher,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise MeetingError(f"the store at {address}:{port} cannot be reached: {error}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"het-doctor/{attempt}", store)


def is_ending() -> bool:
    """Whether the launcher wants this process to end, as it does when a rank has died (the signal is blocked)."""
    return signal.SIGTERM in signal.sigpending()


class Keys:
    """Names of what is in the store."""

    BRIEF, VERDICT = "brief", "verdict"

    @staticmethod
    def here(rank: int) -> str:
        """A rank has come."""
        return f"here/{rank}"

    @staticmethod
    def beat(rank: int) -> str:
        """A number that grows as long as a rank lives."""
        return f"beat/{rank}"

    @staticmethod
    def go(index: int) -> str:
        """A check may start."""
        return f"go/{index}"

    @staticmethod
    def answer(index: int, rank: int) -> str:
        """Returns what a rank measured."""
        return f"answer/{index}/{rank}"

    @staticmethod
    def bye(rank: int) -> str:
        """A rank has read the verdict."""
        return f"bye/{rank}"


def tell(store: Any, key: str, value: Any) -> None:
    """Put a JSON value into the store."""
    store.set(key, json.dumps(value))


def hear(store: Any, key: str, timeout_s: float) -> Any:
    """The JSON value of a key.

    Raises:
        MeetingError: It did not come in time, or the store has gone.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        while not store.check([key]):
            if is_ending():
                deadline_s = min(deadline_s, time.monotonic() + _LAST_WORDS_S)  # from the first look on
            if time.monotonic() > deadline_s:
                raise MeetingError(f"nothing heard for {timeout_s:.0f} s: rank 0 hangs or is cut off")
            time.sleep(POLL_S)
        return json.loads(store.get(key))
    except RuntimeError as error:
        if isinstance(error, MeetingError):
            raise
        raise MeetingError(f"the store does not answer: rank 0 has probably stopped ({error})") from error


class Heart:
    """A thread that shows that this process lives, whatever its main thread waits for."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._key, self._stopped = store.clone(), Keys.beat(rank), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No beat after this."""
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_S)

    def _beat(self) -> None:
        count = 0
        with contextlib.suppress(RuntimeError):  # the store has gone: so has rank 0
            while not self._stopped.wait(BEAT_S if count else 0.0):
                count += 1
                self._store.set(self._key, str(count))
