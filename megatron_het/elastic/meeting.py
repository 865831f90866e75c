"""Where the processes of a generation meet: a store whose waits end as soon as one of them is known to be lost.

Who makes a group waits for keys of all its members.  A member that has died never writes them, so that the others
would wait until the timeout, and end together with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_POLL_S = 0.002
_LONGEST_POLL_S = 0.05
_SHARE = 0.15
"""A poll comes after this share of the time that was waited so far: most waits are short, and the others are few."""


class LostError(RuntimeError):
    """A process of the generation is lost, so that nobody can meet any more."""


class MeetingStore(dist.Store):
    """A store over another one.

    Whoever hands it to torch keeps it as well: torch holds the part in C++ only, which cannot do without this one.

    Args:
        store: Where keys and values are.
        name: What its keys begin with.
        lost: Key that is there once a process of the generation is lost.
        timeout_s: Bound on a wait that names none, in seconds.
    """

    def __init__(self, store: Any, name: str, lost: str, timeout_s: float) -> None:
        super().__init__()
        self._store, self._whole, self._lost = dist.PrefixStore(name, store), store, lost
        self._timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: Any) -> None:
        """See :class:`torch.distributed.Store`."""
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        """The value, once it is there; raises as :meth:`wait` does."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """See :class:`torch.distributed.Store`."""
        return int(self._store.add(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`torch.distributed.Store`."""
        return bool(self._store.check(list(keys)))

    def deleteKey(self, key: str) -> bool:
        """See :class:`torch.distributed.Store`."""
        return bool(self._store.delete_key(key))

    delete_key = deleteKey

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        """See :class:`torch.distributed.Store`."""
        return self._store.compare_set(key, expected, desired)

    def set_timeout(self, timeout: timedelta) -> None:
        """See :class:`torch.distributed.Store`."""
        self._timeout = timeout

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there.

        Raises:
            LostError: A process of the generation is lost.
            RuntimeError: They did not come in time, or the store does not answer.
        """
        bound = (timeout or self._timeout).total_seconds()
        start_s = time.monotonic()
        while not self._store.check(list(keys)):
            if self._whole.check([self._lost]):
                raise LostError(f"nobody waits for {', '.join(keys)} any more: a process of this generation is lost")
            waited_s = time.monotonic() - start_s
            if waited_s > bound:
                raise RuntimeError(f"{', '.join(keys)} did not come within {bound:g} s")
            time.sleep(min(max(_POLL_S, _SHARE * waited_s), _LONGEST_POLL_S))
