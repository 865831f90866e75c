"""In which order a microbatch visits the chunks of the stages."""

import functools
from collections.abc import Sequence

PLACEMENTS = ("loop", "v")
V_SHAPED = frozenset({"v-half", "zb-v"})
"""Schedules whose second chunks go back from the last stage to the first: placement ``v``."""

Place = tuple[int, int]
"""(stage, chunk)"""


def placement_of(schedule: str) -> str:
    """The placement of a schedule's chunks; ``loop`` for a schedule that nobody knows."""
    return "v" if schedule in V_SHAPED else "loop"


def path_of(chunks: Sequence[int], placement: str) -> tuple[Place, ...]:
    """(stage, chunk) in the order in which a microbatch visits them.

    Args:
        chunks: How many each stage has.
        placement: ``"loop"``: chunk 0 of all stages, then chunk 1 of all stages that have one, ...; ``"v"``: the
            same with every other sweep going backwards (ZB-V, V-Half).
    """
    path: list[Place] = []
    for chunk in range(max(chunks, default=0)):
        sweep = [(stage, chunk) for stage, count in enumerate(chunks) if chunk < count]
        path += reversed(sweep) if placement == "v" and chunk % 2 else sweep
    return tuple(path)


@functools.cache
def path_of_schedule(schedule: str, stages: int, chunks: int) -> tuple[Place, ...]:
    """The path of a schedule over stages that have equally many chunks."""
    return path_of((chunks,) * stages, placement_of(schedule))
