"""Python's collector of reference cycles, out of the way of a search."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No look for reference cycles in this block.

    A search makes many small objects, keeps most of them, and ties next to none into cycles.  Looking through all of
    them again and again takes a quarter of its time.  The same goes for making and writing a plan of many ranks.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # what has been made counts as old at once, so that nothing is looked through now
            gc.enable()
            gc.unfreeze()
