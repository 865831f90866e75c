"""Where the processes of a generation meet: a store whose waits end as soon as one of them is known to be lost.

Who makes a group waits for keys of all its members.  A member that has died never writes them, so that the others
would wait until the timeout, and end together with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_het.elastic.board import Board
from megatron_het.store import StoreError

_GLANCE_S = 0.25
_AWAY = 20
"""After a question without an answer nothing is asked for so many times as long as that took: 5 % are lost at most."""
_GLANCED_AT = "het/watch/"
_POLL_S = 0.002
_LONGEST_POLL_S = 0.05
_SHARE = 0.15
"""A poll comes after this share of the time that was waited so far: most waits are short, and the others are few."""


class LostError(RuntimeError):
    """A process of the generation is lost, so that nobody can meet any more."""


class _DroppedError(StoreError):
    """Nobody has answered soon, and it does not matter."""


class BoardStore(dist.Store):
    """A store of ``torch.distributed`` whose keys are on the job's board.

    What the watch writes after every iteration must not hold up the training: the answer comes soon, or the sample is
    dropped, and nothing is asked for a while.

    Args:
        board: The board.
    """

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board
        self._away_until_s = 0.0

    def set(self, key: str, value: Any) -> None:
        """See :class:`torch.distributed.Store`."""
        with contextlib.suppress(_DroppedError):
            self._ask(key, "set", key, _text(value))

    def get(self, key: str) -> bytes:
        """The value; raises where there is none."""
        found = self.find(key)
        if found is None:
            raise RuntimeError(f"there is no {key}")
        return found

    def find(self, key: str) -> bytes | None:
        """The value; None where there is none."""
        (found,) = self._ask(key, "get", key)
        return None if found is None else bytes(found.encode("latin-1"))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See :class:`torch.distributed.Store`."""
        return [text.encode("latin-1") for text in self._ask(keys[0], "get", *keys)]

    def add(self, key: str, value: int) -> int:
        """See :class:`torch.distributed.Store`."""
        return int(self._ask(key, "add", key, value))

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`torch.distributed.Store`."""
        try:
            return bool(self._ask(keys[0], "has", *keys))
        except _DroppedError:
            return False

    def deleteKey(self, key: str) -> bool:
        """See :class:`torch.distributed.Store`."""
        return bool(self._ask(key, "drop", key))

    delete_key = deleteKey

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """See :class:`torch.distributed.Store`."""
        return str(self._ask(key, "swap", key, _text(expected), _text(desired))).encode("latin-1")

    def _ask(self, key: str, *request: Any) -> Any:
        if _GLANCED_AT not in key:
            return self._board.ask(*request)
        start_s = time.monotonic()
        if start_s < self._away_until_s:
            raise _DroppedError("the controller is away")
        try:
            return self._board.ask(*request, patience_s=_GLANCE_S, tries_again=False)
        except StoreError as error:
            now_s = time.monotonic()
            self._away_until_s = now_s + _AWAY * (now_s - start_s)
            raise _DroppedError(str(error)) from None


def _text(value: Any) -> str:
    """Any bytes as a text of the same length."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


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
        self._store, self._name, self._lost = store, name, lost
        self._timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: Any) -> None:
        """See :class:`torch.distributed.Store`."""
        self._store.set(self._own(key), value)

    def get(self, key: str) -> Any:
        """The value, once it is there; raises as :meth:`wait` does."""
        if isinstance(self._store, BoardStore) and (found := self._store.find(self._own(key))) is not None:
            return found  # one question in place of two: a world of many ranks asks for each of them
        self.wait([key])
        return self._store.get(self._own(key))

    def add(self, key: str, value: int) -> int:
        """See :class:`torch.distributed.Store`."""
        return int(self._store.add(self._own(key), value))

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`torch.distributed.Store`."""
        return bool(self._store.check([self._own(key) for key in keys]))

    def deleteKey(self, key: str) -> bool:
        """See :class:`torch.distributed.Store`."""
        return bool(self._store.delete_key(self._own(key)))

    delete_key = deleteKey

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        """See :class:`torch.distributed.Store`."""
        return self._store.compare_set(self._own(key), expected, desired)

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
        while not self.check(keys):
            if self._store.check([self._lost]):
                raise LostError(f"nobody waits for {', '.join(keys)} any more: a process of this generation is lost")
            waited_s = time.monotonic() - start_s
            if waited_s > bound:
                raise RuntimeError(f"{', '.join(keys)} did not come within {bound:g} s")
            time.sleep(min(max(_POLL_S, _SHARE * waited_s), _LONGEST_POLL_S))

    def _own(self, key: str) -> str:
        return f"{self._name}/{key}"
