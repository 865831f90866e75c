"""What is done with the documents of a store, wherever they are kept."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

_WAIT_S, _LONGEST_WAIT_S = 1.0, 20.0


class Documents:
    """Documents by key: texts, and JSON values in them.  Subclasses answer requests."""

    _prefix = ""

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        """Returns the answer to a request: the name of an operation and its arguments, with whole keys.

        Args:
            request: Name of an operation, and its arguments.
            patience_s: How long the request is tried again; None for the store's own patience.
            tries_again: Whether a lost connection is made again in that time.
        """
        raise NotImplementedError

    def under(self, prefix: str) -> Documents:
        """Returns the part of this store whose keys begin with a prefix."""
        return _Part(self, f"{self._prefix}{prefix}/")

    def put(self, key: str, document: Any, *, patience_s: float | None = None) -> None:
        """Write a document."""
        self.write(key, json.dumps(document), patience_s=patience_s)

    def get(self, key: str, *, patience_s: float | None = None) -> Any:
        """Read a document; None if there is none."""
        return self.read(key, patience_s=patience_s)[0]

    def read(self, *keys: str, patience_s: float | None = None) -> list[Any]:
        """Read some documents at once; None for those that are not there."""
        texts = self.texts(*keys, patience_s=patience_s)
        return [None if text is None else json.loads(text) for text in texts]

    def write(self, key: str, text: str, *, patience_s: float | None = None, tries_again: bool = True) -> None:
        """Write a text."""
        self.ask("set", self._prefix + key, text, patience_s=patience_s, tries_again=tries_again)

    def texts(self, *keys: str, patience_s: float | None = None, tries_again: bool = True) -> list[str | None]:
        """Read some texts at once; None for those that are not there."""
        return list(self.ask("get", *self._keys(keys), patience_s=patience_s, tries_again=tries_again)) if keys else []

    def has(self, *keys: str, patience_s: float | None = None) -> bool:
        """Whether all documents are there."""
        return bool(self.ask("has", *self._keys(keys), patience_s=patience_s))

    def wait(
        self, keys: Sequence[str], unless: Sequence[str], timeout_s: float, *, patience_s: float | None = _WAIT_S
    ) -> str:
        """Wait until all keys are there (``there``), one of some others is (``lost``), or for so long (``late``)."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            part_s = min(left_s, _LONGEST_WAIT_S)
            found = self.ask("wait", self._keys(keys), self._keys(unless), part_s, patience_s=patience_s)
            if found != "late" or left_s <= part_s:
                return str(found)

    def count(self, key: str, number: int = 1, *, patience_s: float | None = None) -> int:
        """Add to a count that begins at 0; returns the sum."""
        return int(self.ask("add", self._prefix + key, number, patience_s=patience_s))

    def swap(self, key: str, expected: str, desired: str) -> str:
        """Write a text where another one is, or none where that one is empty; returns what is there now."""
        return str(self.ask("swap", self._prefix + key, expected, desired))

    def drop(self, *keys: str) -> bool:
        """Delete documents; says whether there was one."""
        return bool(self.ask("drop", *self._keys(keys)))

    def post(self, document: Any, *, patience_s: float | None = None) -> None:
        """Add a document to the inbox of the process that keeps the store."""
        self.ask("push", self._prefix + "inbox", json.dumps(document), patience_s=patience_s)

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]


class _Part(Documents):
    """Documents of a store whose keys begin alike."""

    def __init__(self, whole: Documents, prefix: str) -> None:
        self._whole, self._prefix = whole, prefix

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        return self._whole.ask(*request, patience_s=patience_s, tries_again=tries_again)
