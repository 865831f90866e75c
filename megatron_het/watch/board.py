"""How samples reach the rank that compares them: over the store that the ranks met at.

Nobody waits.  A rank overwrites its own few places in turn, so that the store does not grow, and the reader takes
an iteration when everybody has written it.
"""

from __future__ import annotations

from typing import Any

PLACES = 8
"""Iterations that are kept of every rank."""


class Board:
    """Places in a store.

    Args:
        store: Of ``torch.distributed``: ``set``, ``get``, ``check``.
        prefix: Of all keys.
    """

    def __init__(self, store: Any, prefix: str = "het/watch") -> None:
        self._store, self._prefix = store, prefix

    def post(self, name: str, rank: int, text: str, place: int = 0) -> None:
        """Write what a rank says under a name; what was there is gone."""
        self._store.set(self._key(name, rank, place), text)

    def read(self, name: str, ranks: list[int], place: int = 0) -> list[bytes] | None:
        """Returns what all of the ranks have said under a name; None if somebody has said nothing yet."""
        keys = [self._key(name, rank, place) for rank in ranks]
        if not keys:
            return []
        if not self._store.check(keys):
            return None
        many = getattr(self._store, "multi_get", None)
        if many is None or len(keys) == 1:
            return [self._store.get(key) for key in keys]
        return list(many(keys))

    def _key(self, name: str, rank: int, place: int) -> str:
        return f"{self._prefix}/{name}/{rank}/{place}"
