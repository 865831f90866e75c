"""A rank that is slower than the others, for jobs of tests."""

from examples.llama.pinned import slow_down


def slow_one(*, rank: int, slow: int) -> None:
    """Stop a rank's process three quarters of the time (a ``Job.setup``)."""
    if rank == slow:
        slow_down(0.03, 0.01)
