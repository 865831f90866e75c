"""Files of checkpoints as torch writes and reads them: failed writes end in one error, pickles call nothing.

When the write of a checkpoint's object fails, the error's traceback holds a view of an ``io.BytesIO``, and the error is
left to the garbage collector.  CPython (3.12.1) ends by SIGSEGV when it collects both together.  torch's zip writer, in
turn, puts an error of its own in the place of the system's.  So whoever writes does not see a failure here: what comes
after the first one is dropped, and it is raised when the object is complete.

The description of a checkpoint (``.metadata``) is a pickle, which may name any function of any module, and call it.
What torch writes names the records of its own format, data types and sizes; whatever else a file names is refused
before it is imported.
"""

import dataclasses
import enum
import functools
import pickle
from typing import Any

_NOTED: list[OSError] = []


class _GuardedStream:
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
        """The object is complete; raises OSError if a write failed."""
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


def guard_writes() -> None:
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
        return _GuardedStream(stream, name if isinstance(name, str) else None), descriptors

    transform_save_stream.is_guarded = True  # type: ignore[attr-defined]
    kind.transform_save_stream = transform_save_stream  # type: ignore[method-assign]


def forget_failed_writes() -> None:
    """A new checkpoint begins."""
    _NOTED.clear()


def failed_write() -> str:
    """The first write that failed since then, in words; empty if there was none."""
    return str(_NOTED[0]) if _NOTED else ""


_MODULES = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem"))
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")),
    *(("builtins", name) for name in ("set", "frozenset", "list", "dict", "tuple")),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The object that a pickle names; raises UnpicklingError if it is no part of the format."""
        import torch

        if module == "pathlib._local":  # what Python 3.13 calls it
            module = "pathlib"
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if "." not in name and module in (*_MODULES, "torch"):
            found = super().find_class(module, name)
            if module == "torch" and isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                return found
            is_record = dataclasses.is_dataclass(found) or (isinstance(found, type) and issubclass(found, enum.Enum))
            if module != "torch" and isinstance(found, type) and is_record and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(
            f"it names {f'{module}.{name}'[:200]!r}, which is no part of a checkpoint's description; give "
            "--het-trust-checkpoint if you trust who wrote it"
        )


class _GuardedPickle:
    """The module ``pickle`` as torch's reader sees it."""

    trusts = False

    def load(self, file: Any) -> Any:
        """The object in a file, without strides: torch 2.15 has them, and ``torch.empty`` in Megatron knows none."""
        found = pickle.load(file) if self.trusts else _Reader(file).load()
        for entry in getattr(found, "state_dict_metadata", {}).values():
            vars(getattr(entry, "properties", entry)).pop("strides", None)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


_GUARDED = _GuardedPickle()


def guard_reads(*, trusts: bool | None = None) -> None:
    """Guard torch's reading of descriptions in this process, or admit any class; None for as it is."""
    from torch.distributed.checkpoint import filesystem

    filesystem.pickle = _GUARDED  # type: ignore[assignment]
    _GUARDED.trusts = _GUARDED.trusts if trusts is None else trusts
