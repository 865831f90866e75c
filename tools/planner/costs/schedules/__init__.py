"""The schedules that the planner searches, prices and writes: a module each, and its instance in ``SCHEDULES``."""

from ..candidate import Candidate
from .base import Schedule
from .ministage import Ministage
from .pipelines import Interleaved, OneFOneB, SlimPipe


class _Other(Schedule):
    """A schedule that the search does not try: plans that ask for it are timed as if it were 1F1B."""

    has_order = False


PLAIN, MINISTAGES = OneFOneB(), Ministage()  # what the search begins with; and what shards parameters
SCHEDULES: dict[str, Schedule] = {s.name: s for s in (PLAIN, Interleaved(), MINISTAGES, SlimPipe())}
"""All of them, in the order in which they are tried."""
STOCK = tuple(s.name for s in SCHEDULES.values() if s.is_stock)  # those that Megatron-LM has
_OTHER = _Other()


def schedule_of(candidate: Candidate) -> Schedule:
    """Returns what the planner knows of a candidate's schedule."""
    return SCHEDULES.get(candidate.schedule, _OTHER)


def is_ordered(candidate: Candidate) -> bool:
    """Whether ``order`` decides anything: not in plain pipelines, nor where the schedule's order is fixed."""
    plain = all(sum(g.count for g in s.groups) == 1 for s in candidate.block().stages)
    return not plain and len(candidate.stages) > 1 and schedule_of(candidate).has_order
