"""The doctor's table, verdict and JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from megatron_het.doctor.check import Finding, Status
from megatron_het.safe_io import one_line

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
