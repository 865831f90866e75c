"""The description of a checkpoint (``.metadata``), which torch unpickles: only classes of its format are admitted.

A pickle may name any function of any module, and call it.  What torch writes names the records of its own format, data
types and sizes; whatever else a file names is refused before it is imported.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
from typing import Any

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
        """The object that a pickle names.

        Raises:
            UnpicklingError: It is no part of the format.
        """
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if "." not in name and module in (*_MODULES, "torch"):
            found = super().find_class(module, name)
            if module == "torch" and _is_constant(found):
                return found
            if module != "torch" and isinstance(found, type) and (_is_record(found) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(
            f"it names {f'{module}.{name}'[:200]!r}, which is no part of a checkpoint's description; give "
            "--het-trust-checkpoint if you trust who wrote it"
        )


def _is_constant(found: Any) -> bool:
    import torch

    return isinstance(found, torch.dtype | torch.layout | torch.memory_format)


def _is_record(found: type) -> bool:
    return dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)


class _Guarded:
    """The module ``pickle`` as torch's reader sees it."""

    trusts = False

    def load(self, file: Any) -> Any:
        """The object in a file."""
        return pickle.load(file) if self.trusts else _Reader(file).load()

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


_GUARDED = _Guarded()


def guard(*, trusts: bool | None = None) -> None:
    """Guard torch's reading of descriptions in this process.

    Args:
        trusts: Whether any class is admitted; None for as it is.
    """
    from torch.distributed.checkpoint import filesystem

    filesystem.pickle = _GUARDED  # type: ignore[assignment]
    _GUARDED.trusts = _GUARDED.trusts if trusts is None else trusts
