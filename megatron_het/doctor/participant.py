"""A rank's side of the doctor: it runs checks on request of rank 0 and always reports a result.

If a check exceeds its time limit, a thread reports it, with the line of code at which the rank hangs.  The rank
then takes no further part, and exits after the verdict.
"""

import contextlib
import functools
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_het.doctor.check import Check, Finding, Names, Seat, Status, ranks_by
from megatron_het.safe_io import one_line
from megatron_het.store import Documents, StoreError
from megatron_het.store.job import job_store, strangers

# The store at which the ranks meet, and the keys of their messages.

BEAT_S = 1.0
_LAST_WORDS_S = 12.0  # for rank 0 to find and report the rank that has died
POLL_S, _LISTEN_S = 0.05, 0.5


class MeetingError(RuntimeError):
    """The store cannot be reached, or nothing came in time."""


def connect(rank: int, timeout_s: float) -> Documents:
    """Connects to the job's store, which rank 0 starts.

    This does not wait for other ranks: missing ranks are reported later.

    Raises:
        MeetingError: The store cannot be opened or reached in time.
    """
    try:
        return job_store(rank, timeout_s).under("doctor")
    except StoreError as error:
        raise MeetingError(str(error)) from error


def is_ending() -> bool:
    """Whether the launcher wants this process to end, as it does when a rank has died (the signal is blocked)."""
    return signal.SIGTERM in signal.sigpending()


class Keys:
    """Keys of the store, by the numbers of ranks and checks."""

    BRIEF, VERDICT = "brief", "verdict"
    here, beat, bye = "here/{}".format, "beat/{}".format, "bye/{}".format
    go, answer = "go/{}".format, "answer/{}/{}".format


def hear(store: Documents, key: str, timeout_s: float) -> Any:
    """The JSON value of a key; raises MeetingError if it did not come in time, or the store has gone."""
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
    """A thread that sends heartbeats of this process, independently of its main thread."""

    def __init__(self, store: Documents, rank: int) -> None:
        self._store, self._key, self._stopped = store, Keys.beat(rank), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeats."""
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_S)

    def _beat(self) -> None:
        count = 0
        with contextlib.suppress(StoreError):  # it has gone: so has rank 0
            while not self._stopped.wait(BEAT_S if count else 0.0):
                count += 1
                self._store.put(self._key, count)


SLACK_S = 30.0  # additional time beyond a check's limit that a rank waits for rank 0


@dataclass(eq=False)
class Participant:
    """One rank of the doctor."""

    store: Documents
    seat: Callable[[int], Seat]  # makes the inputs of a check, by the check's number
    checks: Sequence[Check]  # all checks, the same on every rank
    rank: int
    leave: Callable[[int], None] = os._exit  # ends a process whose main thread hangs; ``os._exit`` but for tests

    def __post_init__(self) -> None:
        self._main = 0

    def run(self, limit_s: float) -> int:
        """Run all checks; returns the exit code from rank 0.

        Args:
            limit_s: Bound on all checks together.

        Raises:
            MeetingError: Rank 0 is lost.
        """
        started_s = time.monotonic()
        for index, check in enumerate(self.checks):
            left_s = max(0.0, limit_s - (time.monotonic() - started_s)) + SLACK_S
            go = hear(self.store, Keys.go(index), left_s)
            if self.rank not in go["ranks"]:
                if go["ranks"]:
                    return self._verdict(left_s)  # rank 0 counts this rank as lost
                continue
            answer = self._measure(index, check, go["limit_s"])
            if not self.store.has(Keys.answer(index, self.rank)):  # the watchdog may have been first
                self.store.put(Keys.answer(index, self.rank), answer)
        return self._verdict(SLACK_S)

    def _verdict(self, timeout_s: float) -> int:
        code = int(hear(self.store, Keys.VERDICT, timeout_s))
        self.store.put(Keys.bye(self.rank), True)
        return code

    def _measure(self, index: int, check: Check, limit_s: float) -> dict[str, Any]:
        """Run a check under a watchdog; an exception is returned as an answer, too."""
        self._main = threading.get_ident()
        watchdog = threading.Timer(limit_s, self._report_hang, (index, limit_s))
        watchdog.daemon = True
        watchdog.start()
        try:
            return {"data": check.measure(self.seat(index))}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: the other checks go on
            return {"error": _in_words(error)}
        finally:
            watchdog.cancel()

    def _report_hang(self, index: int, limit_s: float) -> None:
        """Runs on the watchdog's thread: report the main thread's position, and end the process after the verdict."""
        frame = sys._current_frames().get(self._main)
        stack = traceback.extract_stack(frame)[:-5:-1] if frame is not None else ()  # the innermost lines first
        lines = [f"{os.path.basename(s.filename)}:{s.lineno} {s.name}" for s in stack]
        place = " < ".join(lines) or "an unknown place"
        text = f"slow or stuck: not done after {limit_s:.0f} s, in {place}"
        with contextlib.suppress(MeetingError, RuntimeError):
            self.store.put(Keys.answer(index, self.rank), {"error": text, "lost": True})
            hear(self.store, Keys.VERDICT, 10 * SLACK_S)
            self.store.put(Keys.bye(self.rank), True)
            time.sleep(2.0)  # a main thread that came back leaves by itself
        self.leave(1)


def _in_words(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    notes = " ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text} {notes}".strip()[:2000]


# Rank 0's side of the doctor: arrival of ranks, one check after the other, and the verdict.
#
# Every wait is bounded.  A rank that does not answer counts as lost from then on.  Later checks that need all ranks are
# reported as not run; the others go on with the remaining ranks.


# The doctor's table, verdict and JSON.

_WIDTH = 80
_MOST_ROWS = 12


def verdict(findings: Sequence[Finding]) -> str:
    """One sentence."""
    count = {status: sum(f.status is status for f in findings) for status in Status}
    warnings = f", {count[Status.WARNING]} warning(s)" if count[Status.WARNING] else ""
    if count[Status.FAULT] or count[Status.NOT_RUN]:
        skipped = f", {count[Status.NOT_RUN]} check(s) not run" if count[Status.NOT_RUN] else ""
        return f"NOT FIT: {count[Status.FAULT]} fault(s){warnings}{skipped}"
    return f"fit{warnings}"


def table(findings: Sequence[Finding], elapsed_s: float) -> str:
    """All rows, one check after the other, and the verdict as the last line."""
    lines = [f"{'check':11} {'':8} what was found", "-" * _WIDTH]
    for name in dict.fromkeys(f.check for f in findings):
        rows = [f for f in findings if f.check == name]
        # Sorting is stable: faults first, each kind in the order of the check.
        rows.sort(key=lambda f: (Status.FAULT, Status.NOT_RUN, Status.WARNING, Status.OK).index(f.status))
        for finding in rows[:_MOST_ROWS]:
            text = f"{finding.where}: {finding.what}" + (f". {finding.hint}" if finding.hint else "")
            wrapped = textwrap.wrap(one_line(text, 600), _WIDTH - 21, break_long_words=True) or [""]
            lines.append(f"{finding.check:11} {finding.status:8} {wrapped[0]}")
            lines += [" " * 21 + line for line in wrapped[1:]]
        if len(rows) > _MOST_ROWS:
            lines.append(f"{name:11} {'':8} ... and {len(rows) - _MOST_ROWS} more rows; --json has all of them")
    lines += ["-" * _WIDTH, f"verdict: {verdict(findings)} ({elapsed_s:.0f} s)"]
    return "\n".join(lines)


def to_json(findings: Sequence[Finding], code: int, elapsed_s: float, figures: dict[str, Any]) -> dict[str, Any]:
    """The report for programs."""
    return {
        "verdict": verdict(findings),
        "exit_code": code,
        "elapsed_s": elapsed_s,
        "findings": [finding.to_json() for finding in findings],
        "figures": figures,
    }


_SILENT_S, _SILENT_AT_END_S = 20.0, 4.0
_GRACE_S = 5.0
_LEAST_S = 5.0  # with less time left no check is begun


class Pulse:
    """Detects ranks without heartbeats."""

    def __init__(self, store: Documents) -> None:
        self._store = store
        self._seen: dict[int, tuple[int | None, float]] = {}

    def silent(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Returns ranks without a heartbeat for ``seconds``; the first call only starts the clock."""
        now, found = time.monotonic(), []
        beats = self._store.read(*map(Keys.beat, ranks))
        for rank, beat in zip(ranks, beats, strict=True):
            before = self._seen.get(rank)
            if before is None or before[0] != beat:
                self._seen[rank] = (beat, now)
            elif now - before[1] > seconds:
                found.append(rank)
        return found


class Coordinator:
    """Runs the checks on rank 0.

    Args:
        limit_s: Bound on everything; checks that would exceed it are not run.
        is_ending: Whether the launcher wants this process to end, as it does when a rank has died.
    """

    def __init__(
        self,
        store: Documents,
        checks: Sequence[Check],
        world_size: int,
        limit_s: float,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store, self._checks, self._world_size = store, checks, world_size
        self._deadline_s = time.monotonic() + limit_s
        self._is_ending = is_ending
        self._pulse = Pulse(store)
        self.lost: dict[int, str] = {}
        self.findings: list[Finding] = []
        self.figures: dict[str, dict[str, Any]] = {}

    def meet(self, arrive_s: float) -> dict[int, Any]:
        """Wait for all ranks, at most ``arrive_s``; returns the description that each has sent."""
        deadline_s = time.monotonic() + arrive_s
        found: dict[int, Any] = {}
        missing = set(range(self._world_size))
        while missing and time.monotonic() < deadline_s and not self._is_ending():
            found |= self._there(missing, Keys.here)
            missing -= found.keys()
            time.sleep(POLL_S)
        hint = strangers(self._store) if missing else ""
        for rank in sorted(missing):
            self.lost[rank] = f"did not start within {arrive_s:.0f} s{hint}"
        return found

    def _there(self, ranks: Iterable[int], key: Callable[[int], str]) -> dict[int, Any]:
        """Returns the messages of those of some ranks that have sent one."""
        asked = sorted(ranks)
        said = self._store.read(*map(key, asked))
        return {rank: document for rank, document in zip(asked, said, strict=True) if document is not None}

    def run(self, names: Names) -> list[Finding]:
        """Run all checks; lost ranks are among the findings."""
        self.findings += [
            Finding("ranks", Status.FAULT, names.of([rank]), why, "Look at its log; is the node reachable?")
            for rank, why in self.lost.items()
        ]
        for index, check in enumerate(self._checks):
            reason = self._obstacle(check, names)
            ranks = [] if reason else [rank for rank in range(self._world_size) if rank not in self.lost]
            limit_s = max(_LEAST_S, min(check.limit_s, self._deadline_s - time.monotonic()))
            self._store.put(Keys.go(index), {"ranks": ranks, "limit_s": limit_s})
            if reason:
                self.findings.append(Finding(check.name, Status.NOT_RUN, "all ranks", reason))
                continue
            answers = self._collect(index, check, ranks, limit_s)
            self.findings += self._judge(check, answers, names)
        return self.findings

    def _obstacle(self, check: Check, names: Names) -> str:
        """Why a check cannot run now; empty when it can."""
        if self._is_ending():
            return "the launcher has ended the job"
        if time.monotonic() + _LEAST_S > self._deadline_s:
            return "no time is left (--limit-s)"
        if check.needs_all and self.lost:
            return f"it needs all ranks, and {names.of(self.lost)} gave no answer"
        return ""

    def _collect(self, index: int, check: Check, ranks: Sequence[int], limit_s: float) -> dict[int, dict[str, Any]]:
        """Returns answers by rank, without ranks that do not answer."""
        deadline_s = time.monotonic() + limit_s + _GRACE_S
        answers: dict[int, dict[str, Any]] = {}
        missing, next_pulse_s = set(ranks), time.monotonic()
        while missing and time.monotonic() < deadline_s:
            for rank, answer in self._there(missing, functools.partial(Keys.answer, index)).items():
                answers[rank] = answer
                missing.discard(rank)
                if answer.get("lost"):
                    self.lost[rank] = answer["error"]
            if time.monotonic() >= next_pulse_s:
                next_pulse_s = time.monotonic() + 1.0
                silence_s = _SILENT_AT_END_S if self._is_ending() else _SILENT_S
                for rank in self._pulse.silent(sorted(missing), silence_s):
                    missing.discard(rank)
                    self._lose(rank, check, answers, f"has died: no sign of life for {silence_s:.0f} s")
            time.sleep(POLL_S)
        for rank in missing:
            self._lose(rank, check, answers, f"no answer within {limit_s:.0f} s")
        return answers

    def _lose(self, rank: int, check: Check, answers: dict[int, dict[str, Any]], why: str) -> None:
        self.lost[rank] = f"{why}, in the check '{check.name}'"
        answers[rank] = {"error": why}

    def _judge(self, check: Check, answers: Mapping[int, dict[str, Any]], names: Names) -> list[Finding]:
        """Returns the findings of a check: failures of ranks first, with equal ones in one row."""
        found: list[Finding] = []
        errors = {rank: [answer["error"]] for rank, answer in sorted(answers.items()) if "error" in answer}
        for text, ranks in ranks_by(errors).items():
            hint = "Look at its log" if any(rank in self.lost for rank in ranks) else ""
            found.append(Finding(check.name, Status.FAULT, names.of(ranks), text, hint))
        data = {rank: answer["data"] for rank, answer in sorted(answers.items()) if "data" in answer}
        self.figures[check.name] = {str(rank): value for rank, value in data.items()}
        try:
            return found + (check.judge(data, names) if data else [])
        except Exception:  # a mistake in one judgement must not hide the other checks
            text = "the answers cannot be judged: " + traceback.format_exc(limit=-1).splitlines()[-1]
            return [*found, Finding(check.name, Status.FAULT, "rank 0", text, "Please report this")]

    def close(self, code: int) -> None:
        """Send the verdict, and keep the store until all ranks have read it."""
        self._store.put(Keys.VERDICT, code)
        deadline_s = time.monotonic() + 3.0
        others = [Keys.bye(rank) for rank in range(1, self._world_size) if rank not in self.lost]
        while others and time.monotonic() < deadline_s and not self._store.has(*others):
            time.sleep(POLL_S)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when the job may start."""
    return int(any(f.status in (Status.FAULT, Status.NOT_RUN) for f in findings))
