"""A rank's side of the doctor: measure when told so, answer, and never stay silent.

A check that takes longer than its limit is reported by a thread, with the place where the rank hangs.  The rank
takes no further part then, and ends when the verdict is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from megatron_het.doctor.check import Check, Seat
from megatron_het.store import Documents, StoreError
from megatron_het.store.job import job_store

# The store that the ranks meet at, and the keys under which they speak.


BEAT_S = 1.0
_LAST_WORDS_S = 12.0  # for rank 0 to find out who has died, and to say so
POLL_S, _LISTEN_S = 0.05, 0.5


class MeetingError(RuntimeError):
    """The store cannot be reached, or nothing came in time."""


def connect(rank: int, timeout_s: float) -> Documents:
    """The job's store, which rank 0 starts.

    It does not wait for other ranks: whoever is missing is named later.

    Raises:
        MeetingError: It cannot be opened or reached in time.
    """
    try:
        return job_store(rank, timeout_s).under("doctor")
    except StoreError as error:
        raise MeetingError(str(error)) from error


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


def hear(store: Documents, key: str, timeout_s: float) -> Any:
    """The JSON value of a key.

    Raises:
        MeetingError: It did not come in time, or the store has gone.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        while store.wait([key], [], min(_LISTEN_S, max(0.0, deadline_s - time.monotonic()))) != "there":
            if is_ending():
                deadline_s = min(deadline_s, time.monotonic() + _LAST_WORDS_S)  # from the first look on
            if time.monotonic() >= deadline_s:
                raise MeetingError(f"nothing heard for {timeout_s:.0f} s: rank 0 hangs or is cut off")
        return store.get(key)
    except StoreError as error:
        raise MeetingError(f"the store does not answer: rank 0 has probably stopped ({error})") from error


class Heart:
    """A thread that shows that this process lives, whatever its main thread waits for."""

    def __init__(self, store: Documents, rank: int) -> None:
        self._store, self._key, self._stopped = store, Keys.beat(rank), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No beat after this."""
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_S)

    def _beat(self) -> None:
        count = 0
        with contextlib.suppress(StoreError):  # it has gone: so has rank 0
            while not self._stopped.wait(BEAT_S if count else 0.0):
                count += 1
                self._store.put(self._key, count)


SLACK_S = 30.0
"""How much longer than a check's limit a rank waits for rank 0."""


class Participant:
    """One rank.

    Args:
        store: Of the meeting.
        seat: Makes what a check is given, by the check's number.
        checks: All checks, the same on every rank.
        rank: This rank.
        leave: Ends a process whose main thread hangs; ``os._exit`` but for tests.
    """

    def __init__(
        self,
        store: Documents,
        seat: Callable[[int], Seat],
        checks: Sequence[Check],
        rank: int,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._store, self._seat, self._checks, self._rank = store, seat, checks, rank
        self._leave = leave
        self._main = 0

    def run(self, limit_s: float) -> int:
        """All checks; returns the exit code that rank 0 decided on.

        Args:
            limit_s: Bound on everything.

        Raises:
            MeetingError: Rank 0 has gone.
        """
        started_s = time.monotonic()
        for index, check in enumerate(self._checks):
            left_s = max(0.0, limit_s - (time.monotonic() - started_s)) + SLACK_S
            go = hear(self._store, Keys.go(index), left_s)
            if self._rank not in go["ranks"]:
                if go["ranks"]:
                    return self._verdict(left_s)  # taken for lost
                continue
            answer = self._measure(index, check, go["limit_s"])
            if not self._store.has(Keys.answer(index, self._rank)):  # the watchdog may have been first
                self._store.put(Keys.answer(index, self._rank), answer)
        return self._verdict(SLACK_S)

    def _verdict(self, timeout_s: float) -> int:
        code = int(hear(self._store, Keys.VERDICT, timeout_s))
        self._store.put(Keys.bye(self._rank), True)
        return code

    def _measure(self, index: int, check: Check, limit_s: float) -> dict[str, Any]:
        """The check, watched; an exception is an answer as well."""
        self._main = threading.get_ident()
        watchdog = threading.Timer(limit_s, self._report_hang, (index, limit_s))
        watchdog.daemon = True
        watchdog.start()
        try:
            return {"data": check.measure(self._seat(index))}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: the other checks go on
            return {"error": _in_words(error)}
        finally:
            watchdog.cancel()

    def _report_hang(self, index: int, limit_s: float) -> None:
        """On the watchdog's thread: say where the main thread is, and end the process after the verdict."""
        frame = sys._current_frames().get(self._main)
        place = _place(frame) if frame is not None else "an unknown place"
        text = f"slow or stuck: not done after {limit_s:.0f} s, in {place}"
        with contextlib.suppress(MeetingError, RuntimeError):
            self._store.put(Keys.answer(index, self._rank), {"error": text, "lost": True})
            hear(self._store, Keys.VERDICT, 10 * SLACK_S)
            self._store.put(Keys.bye(self._rank), True)
            time.sleep(2.0)  # a main thread that came back leaves by itself
        self._leave(1)


def _place(frame: FrameType) -> str:
    """The innermost lines of a stack, outermost last."""
    lines = [f"{os.path.basename(s.filename)}:{s.lineno} {s.name}" for s in traceback.extract_stack(frame)]
    return " < ".join(reversed(lines[-4:]))


def _in_words(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    notes = " ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text} {notes}".strip()[:2000]
