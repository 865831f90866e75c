"""What a watch finds, in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

What = Literal["device", "operation", "link", "profile"]
"""A device that computes slower, one kind of operation of one device, a link, or figures of a whole kind that the plan
was made from."""


@dataclass(slots=True)
class Finding:
    """One thing that is not as planned.

    Attributes:
        what: Which sort of thing.
        name: Its name: ``rank 2``, ``rank 0 -> rank 1``, ``a100``, ``a100 -> l40s``.
        factor: How many times as long it takes as before (device, operation, link), or as planned.
        since: First iteration in which it was so; 0 for the whole run.
        found: Iteration after which it was known.
        kind: Kind of device, or kinds of both ends.
        operation: Kind of operation, "" for all.
        place: More words about where, e.g. stage, replica and host.
        ended: Iteration after which it was over; None while it lasts.
    """

    what: What
    name: str
    factor: float
    since: int
    found: int
    kind: str = ""
    operation: str = ""
    place: str = ""
    ended: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns what makes it the same finding."""
        return self.what, self.name, self.operation

    def text(self) -> str:
        """One sentence."""
        since = f" since iteration {self.since}" if self.since else " since the start"
        where = f" ({self.place})" if self.place else ""
        times = f"{self.factor:.2f} times"
        if self.what == "device":
            return f"{self.name}{where} computes slowly{since}: every operation takes {times} as long as it should"
        if self.what == "operation":
            return f"{self.name}{where}{since}: {self.operation} takes {times} as long as it should"
        if self.what == "link":
            return f"the link {self.name}{where} is slow{since}: a transfer takes {times} as long as it should"
        what = f"{self.operation} on {self.name}" if self.operation else f"every operation on {self.name}"
        return f"the plan's figures of {self.name} are wrong{since}: {what} takes {times} the planned time"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)
