"""A store of ``torch.distributed`` whose keys are in a job's own store: groups of processes meet there."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_het.store.server import Documents


class LostError(RuntimeError):
    """A process of a meeting is lost, so that the meeting cannot complete."""


class TorchStore(dist.Store):
    """See the module.

    The creation of a group waits for keys of all its members.  A member that has died never writes them, so waits
    end as soon as it is known to be lost.  Code that passes this to torch has to keep a reference, too: torch holds
    only the C++ part, which needs this object.

    Args:
        store: Holds keys and values.
        timeout_s: Bound on waits without a timeout of their own.
        name: Prefix of all keys.
        lost: Key of the store, without the prefix, that exists once a process of the meeting is lost.
    """

    def __init__(self, store: Documents, timeout_s: float, *, name: str = "", lost: str | None = None) -> None:
        super().__init__()
        self._store, self._lost = store, lost
        self._name = f"{name}/" if name else ""
        self._timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: Any) -> None:
        self._store.write(self._name + key, _text(value))

    def get(self, key: str) -> bytes:
        """The value, once it is there; raises as :meth:`wait` does."""
        (found,) = self._store.texts(self._name + key)
        if found is None:
            self.wait([key])
            (found,) = self._store.texts(self._name + key)
        if found is None:
            raise RuntimeError(f"{key} has been deleted")
        return found.encode("latin-1")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [text.encode("latin-1") for text in self._store.texts(*self._own(keys)) if text is not None]

    def add(self, key: str, value: int) -> int:
        return self._store.count(self._name + key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.has(*self._own(keys))

    def deleteKey(self, key: str) -> bool:
        return self._store.drop(self._name + key)

    delete_key = deleteKey

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._store.swap(self._name + key, _text(expected), _text(desired)).encode("latin-1")

    def clone(self) -> "TorchStore":
        """This store: every thread has a connection of its own already."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there.

        Raises:
            LostError: A process that belongs to the meeting is lost.
            RuntimeError: They did not come in time, or the store does not answer.
        """
        bound_s = (timeout or self._timeout).total_seconds()
        unless = [] if self._lost is None else [self._lost]
        found = self._store.wait(self._own(keys), unless, bound_s, patience_s=None)
        if found == "lost":
            raise LostError(f"nobody waits for {', '.join(keys)} any more: a process of this generation is lost")
        if found == "late":
            raise RuntimeError(f"{', '.join(keys)} did not come within {bound_s:g} s")

    def _own(self, keys: Sequence[str]) -> list[str]:
        return [self._name + key for key in keys]


def _text(value: Any) -> str:
    """Any bytes as a text of the same length."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")
