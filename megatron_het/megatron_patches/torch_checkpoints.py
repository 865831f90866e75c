"""Guards of torch's writing and reading of checkpoint files: a failed write is one error, a pickle cannot run code.

When the write of a checkpoint's object fails, the error's traceback holds a view of an ``io.BytesIO``, and the error is
left to the garbage collector.  CPython (3.12.1) ends by SIGSEGV when it collects both together.  torch's zip writer
replaces the system's error by one of its own.  The guarded stream therefore raises nothing while an object is written:
it discards the data after the first failed write, and raises that failure when the object is closed.

The description of a checkpoint (``.metadata``) is a pickle.  A pickle may name any function of any module, and call it.
A pickle from torch names only classes of torch's checkpoint format, data types, sizes and a few builtins.  Any other
name is refused before its module is imported.
"""

import dataclasses
import enum
import functools
import pickle
from typing import Any

_NOTED: list[OSError] = []


class _GuardedStream:
    """The stream of one object: keeps the first failed write, which :meth:`close` raises."""

    def __init__(self, stream: Any, name: str | None) -> None:
        self._stream, self._name = stream, name
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write the data, or discard it after a failure; returns its size in bytes in both cases."""
        if self._failure is None:
            try:
                return int(self._stream.write(data))
            except OSError as failure:
                self._keep(failure)
        with memoryview(data) as view:
            return view.nbytes

    def flush(self) -> None:
        """Flush the stream, unless a write has failed."""
        self._unless_failed(self._stream.flush)

    def close(self) -> None:
        """Close the complete object; raises OSError if a write failed."""
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
        # A new exception, because the traceback of the first one holds the data.
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
    """Discard the noted failures, before a new checkpoint."""
    _NOTED.clear()


def failed_write() -> str:
    """Text of the first failed write since :func:`forget_failed_writes`; empty if there was none."""
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
        """The object that a pickle names; raises UnpicklingError if the object is not part of the format."""
        import torch

        if module == "pathlib._local":  # the module of these classes in Python 3.13
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
    """Replacement of the module ``pickle`` in torch's reader."""

    trusts = False

    def load(self, file: Any) -> Any:
        """The object in a file, without the strides of torch 2.15: Megatron passes the fields to ``torch.empty``."""
        found = pickle.load(file) if self.trusts else _Reader(file).load()
        for entry in getattr(found, "state_dict_metadata", {}).values():
            vars(getattr(entry, "properties", entry)).pop("strides", None)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


_GUARDED = _GuardedPickle()


def guard_reads(*, trusts: bool | None = None) -> None:
    """Guard torch's reading of descriptions in this process; ``trusts`` admits any class (None: unchanged)."""
    from torch.distributed.checkpoint import filesystem

    filesystem.pickle = _GUARDED  # type: ignore[assignment]
    _GUARDED.trusts = _GUARDED.trusts if trusts is None else trusts
