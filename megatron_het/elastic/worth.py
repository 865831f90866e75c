"""Whether a change to a better plan pays: what it saves in the iterations that are left, against what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_het.elastic.standing import last_iteration, measured_s
from megatron_het.plan import Plan

CHANGE_S = 10.0
"""What a change is taken to cost before one was seen."""


def change_s(history: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that a change takes: those of the last one, from its reason to the first iteration after it."""
    for entry in reversed(history):
        steps = [told["times"]["first_step"] for told in entry.get("opened", {}).values()]
        if entry["generation"] > 0 and steps:  # the controller's own clock does not jump
            return float(entry["took_s"]) if "took_s" in entry else max(0.0, float(max(steps) - entry["seen"]))
    return CHANGE_S


def against(plan: Plan, present: Plan, history: Sequence[Mapping[str, Any]], reached: int, now_s: float) -> str:
    """Why a change to a better plan does not pay any more.

    Args:
        plan: The better plan.
        present: The plan that runs.
        history: Of the controller.
        reached: Iterations that are done.
        now_s: Wall clock, in seconds.

    Returns:
        Empty where the change pays, and where nobody can say: without predictions in both plans, as in a list that is
        the user's own order, or before the first iteration.
    """
    last = last_iteration(history)
    if plan.predicted is None or present.predicted is None or last is None:
        return ""
    gain = 1.0 - plan.predicted.iteration_s / present.predicted.iteration_s
    left, cost_s = max(0, last - reached), change_s(history)
    saved_s = gain * left * (measured_s(history[-1], reached, now_s) or present.predicted.iteration_s)
    if gain <= 0 or saved_s > cost_s:  # a list may prefer a plan for a reason of its own
        return ""
    return (
        f"iterations would be {100 * gain:.1f} % shorter, which saves {saved_s:.1f} s in the {left} that are left; "
        f"a change takes {cost_s:.1f} s"
    )
