"""Calls that wait for each other, in threads of one process."""

import threading
from collections.abc import Callable

SOON_S = 100.0


def at_once(*calls: Callable[[], object]) -> list[bool]:
    """Make the calls in threads; returns of each whether it has not ended after SOON_S."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    return [thread.is_alive() for thread in threads]
