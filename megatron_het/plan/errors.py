"""The one error type for bad plans and bad combinations of options."""

from __future__ import annotations

from megatron_het.safe_io import one_line, shown


class PlanError(ValueError):
    """A plan, or a plan together with the training arguments, cannot be run.

    Attributes:
        where: The field or option, e.g. ``stages[1].replicas[0].ranks``.
        value: What was found there.
        problem: Why it is wrong.
        hint: What to do about it.
    """

    def __init__(self, where: str, value: object, problem: str, hint: str = "") -> None:
        self.where = where
        self.value = value
        self.problem = problem
        self.hint = hint
        text = f"{where} = {shown(value, 200)}: {problem}"
        if hint:
            text += f". {hint}"
        super().__init__(one_line(text))
