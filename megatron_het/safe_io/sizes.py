"""Bounds that hold everywhere: what is larger is a mistyped number, and would be a hang."""

MAX_PASSES = 500_000
"""Forward and backward passes of one iteration, over all stages: more would take minutes to lay out."""
MAX_DEVICES = 100_000
"""Devices of a cluster, and pipeline devices of a schedule."""
