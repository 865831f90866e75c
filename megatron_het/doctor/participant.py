"""A rank's side of the doctor: measure when told so, answer, and never stay silent.

A check that takes longer than its limit is reported by a thread, with the place where the rank hangs.  The rank
takes no further part then, and ends when the verdict is there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from megatron_het.doctor.check import Check, Seat
from megatron_het.doctor.meeting import Keys, MeetingError, hear, tell

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
        store: Any,
        seat: Callable[[int], Seat],
        checks: Sequence[Check],
        rank: int,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._store, self._seat, self._checks, self._rank = store, seat, checks, rank
        self._watch_store = store.clone()
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
            if not self._store.check([Keys.answer(index, self._rank)]):  # the watchdog may have been first
                tell(self._store, Keys.answer(index, self._rank), answer)
        return self._verdict(SLACK_S)

    def _verdict(self, timeout_s: float) -> int:
        code = int(hear(self._store, Keys.VERDICT, timeout_s))
        self._store.set(Keys.bye(self._rank), "bye")
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
            tell(self._watch_store, Keys.answer(index, self._rank), {"error": text, "lost": True})
            hear(self._watch_store, Keys.VERDICT, 10 * SLACK_S)
            self._watch_store.set(Keys.bye(self._rank), "bye")
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
