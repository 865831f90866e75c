"""What the controller counts of trouble: generations that fail in a row, and iterations that do not end."""

from __future__ import annotations

import time
from collections.abc import Collection

from megatron_het.elastic.generation import Generation

_MOST = 3


class JobError(RuntimeError):
    """The job cannot go on; the message says why and what to do."""


class ReplacedError(RuntimeError):
    """Another controller has taken the job over."""


class Failures:
    """Generations that failed in a row, and sessions that failed again at one place."""

    def __init__(self) -> None:
        self._in_a_row = self._repeated = 0
        self._at = -1

    def over(self) -> None:
        """A generation has done an iteration."""
        self._in_a_row = 0

    def note(self, reached: int, dead: int, errors: Collection[str]) -> None:
        """A generation has failed.

        Args:
            reached: Iterations that are done.
            dead: How many of its ranks were lost.
            errors: What the others say.

        Raises:
            JobError: It was one too many.
        """
        # What fails again at the same place, without a death, does so whatever was done in between.
        self._repeated = self._repeated + 1 if not dead and reached <= self._at else 0
        self._in_a_row, self._at = self._in_a_row + 1, max(reached, self._at)
        most = max(self._in_a_row, self._repeated)
        if most > _MOST:
            raise JobError(
                f"{most} generations failed in a row, at iteration {reached}: "
                f"{'; '.join(sorted(errors)) or 'workers died'}. The workers' logs say more"
            )


class Saves:
    """Checkpoints that could not be written.

    A checkpoint is tried once more in the folder for that, if there is one, and else left out.  The last one of a
    training is tried once more in any case.

    Args:
        fallback: Folder; empty for none.
    """

    def __init__(self, fallback: str) -> None:
        self._fallback = fallback
        self._failed: dict[int, set[int]] = {}
        self._unsaved: set[int] = set()
        self._elsewhere: set[int] = set()

    def note(self, generation: int, iteration: int, last: int | None) -> str:
        """A rank has not written its part; what to say of it, nothing where another rank has said so.

        Args:
            generation: In which it failed.
            iteration: Of the checkpoint.
            last: Of the training; None where that is not known.
        """
        generations = self._failed.setdefault(iteration, set())
        if generation in generations:
            return ""
        generations.add(generation)
        if self._fallback and iteration not in self._elsewhere:
            self._elsewhere.add(iteration)
            then = f"it is tried in {self._fallback}"
        elif iteration == last and len(generations) == 1:
            then = "it is the last one and tried again"
        else:
            self._unsaved.add(iteration)
            then = "it is left out"
        failed = sum(map(len, self._failed.values()))
        return (
            f"the checkpoint of iteration {iteration} is not written ({failed} failed save{'s' * (failed > 1)} so far)"
            f"; {then}"
        )

    def recall(self, generation: Generation) -> None:
        """What the generation that runs knows of it."""
        self._unsaved |= set(generation.unsaved)
        self._elsewhere |= set(generation.elsewhere)

    def for_generation(self) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """Returns what the next generation is told: left out, tried in the other folder, and that folder."""
        return tuple(sorted(self._unsaved)), tuple(sorted(self._elsewhere - self._unsaved)), self._fallback

    def unsaved_end(self, last: int | None) -> str:
        """Why a training that is over has not kept its last state; empty where it has, or was not to."""
        if last is None or last not in self._unsaved:
            return ""
        return (
            f"the training is over, and its last state, of iteration {last}, is not written. Make room and start it "
            "again: it goes on from the newest checkpoint"
        )


class Progress:
    """Whether iterations still end: a rank that is stuck may give signs of life all the same.

    Time counts from the first iteration of a generation, because what comes before it has bounds of its own.

    Args:
        bound_s: Longest time between two iterations.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._reached, self._moved_s = -1, float("inf")

    def begin(self) -> None:
        """A generation begins."""
        self._reached, self._moved_s = -1, float("inf")

    def opened(self) -> None:
        """It has done its first iteration."""
        self._moved_s = min(self._moved_s, time.monotonic())

    def is_stuck(self, reached: int, last: int | None) -> bool:
        """Whether the bound is over; never after the last iteration, when a run saves and evaluates.

        Args:
            reached: Iterations that are done.
            last: Of the training, None where that is not known yet.
        """
        now_s = time.monotonic()
        if reached != self._reached:
            self._reached = reached
            self._moved_s = self._moved_s if self._moved_s == float("inf") else now_s
        return now_s - self._moved_s > self._bound_s and (last is None or reached < last)
