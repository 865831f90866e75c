"""Rank 0's side of the doctor: who is here, one check after the other, and the verdict.

Every wait is bounded.  A rank that does not answer is lost from then on: checks that need all ranks are not run
after that and say so, the others go on with the ranks that are left.
"""

from __future__ import annotations

import functools
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_het.doctor.check import Check, Finding, Names, Status
from megatron_het.doctor.participant import POLL_S, Keys
from megatron_het.safe_io import one_line
from megatron_het.store import Documents
from megatron_het.store.job import strangers

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
            lines += _row(finding)
        if len(rows) > _MOST_ROWS:
            lines.append(f"{name:11} {'':8} ... and {len(rows) - _MOST_ROWS} more rows; --json has all of them")
    lines += ["-" * _WIDTH, f"verdict: {verdict(findings)} ({elapsed_s:.0f} s)"]
    return "\n".join(lines)


def _row(finding: Finding) -> list[str]:
    text = f"{finding.where}: {finding.what}" + (f". {finding.hint}" if finding.hint else "")
    wrapped = textwrap.wrap(one_line(text, 600), _WIDTH - 21, break_long_words=True) or [""]
    head = f"{finding.check:11} {finding.status:8} {wrapped[0]}"
    return [head, *(" " * 21 + line for line in wrapped[1:])]


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
    """Which ranks have shown no sign of life for how long."""

    def __init__(self, store: Documents, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._seen: dict[int, tuple[int | None, float]] = {}

    def silent(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Returns ranks whose heart has not beaten for so long; the first call only listens."""
        now, found = self._clock(), []
        beats = self._store.read(*map(Keys.beat, ranks))
        for rank, beat in zip(ranks, beats, strict=True):
            before = self._seen.get(rank)
            if before is None or before[0] != beat:
                self._seen[rank] = (beat, now)
            elif now - before[1] > seconds:
                found.append(rank)
        return found


class Coordinator:
    """The order of events.

    Args:
        store: Of the meeting.
        checks: All checks.
        world_size: Number of ranks.
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
        """Wait for all ranks, at most ``arrive_s``; what each said of itself."""
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
        """Returns what some ranks have said, as far as they have."""
        asked = sorted(ranks)
        said = self._store.read(*map(key, asked))
        return {rank: document for rank, document in zip(asked, said, strict=True) if document is not None}

    def run(self, names: Names) -> list[Finding]:
        """All checks; who is lost is among the findings."""
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
        """Answers by rank, as far as they come."""
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
        """Findings of a check; what failed on a rank comes first, and equal failures are one row."""
        found: list[Finding] = []
        errors: dict[str, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            if "error" in answer:
                errors.setdefault(answer["error"], []).append(rank)
        for text, ranks in errors.items():
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
        """Tell the verdict, and keep the store until everybody has read it."""
        self._store.put(Keys.VERDICT, code)
        deadline_s = time.monotonic() + 3.0
        others = [Keys.bye(rank) for rank in range(1, self._world_size) if rank not in self.lost]
        while others and time.monotonic() < deadline_s and not self._store.has(*others):
            time.sleep(POLL_S)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when the job may start."""
    return int(any(f.status in (Status.FAULT, Status.NOT_RUN) for f in findings))
