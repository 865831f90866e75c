"""Checkpoints that cannot be written: one ``OSError``, and not a crash later on.

When the write of a checkpoint's object fails, the error's traceback holds a view of an ``io.BytesIO``, and the error is
left to the garbage collector.  CPython (3.12.1) ends by SIGSEGV when it collects both together.  torch's zip writer, in
turn, puts an error of its own in the place of the system's.  So whoever writes does not see a failure here: what comes
after the first one is dropped, and it is raised when the object is complete.
"""

from __future__ import annotations

import functools
from typing import Any

_NOTED: list[OSError] = []


class _Guarded:
    """The stream of one object: its first failed write is kept, and raised by :meth:`close`."""

    def __init__(self, stream: Any, name: str | None) -> None:
        self._stream, self._name = stream, name
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        """All of it, as far as the caller knows."""
        if self._failure is None:
            try:
                return int(self._stream.write(data))
            except OSError as failure:
                self._keep(failure)
        with memoryview(data) as view:
            return view.nbytes

    def flush(self) -> None:
        """Writes out what the stream holds back."""
        self._unless_failed(self._stream.flush)

    def close(self) -> None:
        """The object is complete.

        Raises:
            OSError: A write failed.
        """
        self._unless_failed(self._stream.close)
        if self._failure is not None:
            raise self._failure

    def _unless_failed(self, act: Any) -> None:
        if self._failure is None:
            try:
                act()
            except OSError as failure:
                self._keep(failure)

    def _keep(self, failure: OSError) -> None:
        # Another object: the traceback of the first one holds what was to be written.
        self._failure = OSError(failure.errno, failure.strerror, self._name)
        _NOTED.append(self._failure)


def guard() -> None:
    """Guard the streams of checkpoints from now on; a second call does nothing."""
    from torch.distributed.checkpoint import filesystem

    kind = filesystem._StorageWriterTransforms
    original = kind.transform_save_stream
    if getattr(original, "is_guarded", False):
        return

    @functools.wraps(original)
    def transform_save_stream(self: Any, write_item: Any, raw_stream: Any) -> tuple[Any, list[str]]:
        stream, descriptors = original(self, write_item, raw_stream)
        name = getattr(raw_stream, "name", None)
        return _Guarded(stream, name if isinstance(name, str) else None), descriptors

    transform_save_stream.is_guarded = True  # type: ignore[attr-defined]
    kind.transform_save_stream = transform_save_stream  # type: ignore[method-assign]


def forget() -> None:
    """A new checkpoint begins."""
    _NOTED.clear()


def noted() -> str:
    """The first write that failed since then, in words; empty if there was none."""
    return str(_NOTED[0]) if _NOTED else ""
