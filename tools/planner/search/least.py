"""What a candidate takes for certain, before it is simulated."""

from __future__ import annotations

from ..costs.candidate import Candidate
from ..costs.estimate import Estimate, Estimator
from ..costs.stages import stage_tails


def least_s(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> float:
    """Seconds of an iteration of these stages at least, in any order of their operations.

    Every stage computes, after one microbatch (or its part, with chunks) has come through the earlier stages, and
    before it has gone back.  Slices differ, so that nothing is said of the first one.
    """
    before = after = least = 0.0
    tails = stage_tails(estimator, candidate, estimate)
    cut = 0.0 if candidate.slices > 1 else 1 / candidate.chunks
    rows = zip(candidate.stages, estimate.stage_busy_s, tails, strict=True)
    for s, (stage, busy_s, tail_s) in enumerate(rows):
        least = max(least, before + busy_s + max(after, tail_s))
        units = [u for g in stage.groups if (u := estimator.unit_of(candidate, g, s)) is not None]
        before += cut * stage.layers * min(u.layer_f for u in units)
        after += cut * stage.layers * min(u.layer_b for u in units)
    return least
