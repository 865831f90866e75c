"""Plain values of a file that ``torch.save`` wrote; nothing that is in the file is run, and PyTorch is not needed."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import Any

from megatron_het.safe_io.reading import MAX_BYTES, FileError, check_regular, one_line


class Inert:
    """Stands for every object of a pickle that is not a number, text, list, tuple, set or dictionary.

    Attributes:
        arguments: What its class would have been called with.
        state: What would have been its attributes, where the pickle holds them.
    """

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments = arguments
        self.state: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.arguments, self.state = (), state if isinstance(state, dict) else {}

    def __call__(self, *arguments: Any, **_: Any) -> Inert:
        return Inert(*arguments)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Items of a list of a class of its own are dropped."""

    def extend(self, values: Any) -> None:
        """See :meth:`append`."""

    def add(self, value: Any) -> None:
        """See :meth:`append`."""


class _Reader(pickle.Unpickler):
    """Finds no class but :class:`Inert`, so that a pickle can call nothing."""

    def find_class(self, module: str, name: str) -> Any:
        return Inert

    def persistent_load(self, pid: Any) -> Any:
        """Tensors lie in other files of the archive and are not read."""
        return None


def read_pickled(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> Any:
    """The value in the archive; objects of classes are :class:`Inert`.

    Raises:
        FileError: No such file, not a regular file, not an archive of ``torch.save``, too large, damaged.
    """
    try:
        check_regular(path, os.stat(path).st_mode)
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
            if len(names) != 1:
                raise FileError(path, "", "not a file of torch.save: it holds no data.pkl")
            with archive.open(names[0]) as member:
                data = member.read(limit + 1)
    except FileNotFoundError:
        raise FileError(path, "", "no such file") from None
    except FileError:
        raise
    except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise FileError(path, "", f"cannot be read: {one_line(str(error), 200)}") from None
    if len(data) > limit:
        raise FileError(path, "data.pkl", f"larger than {limit >> 10} KiB, the most that is read")
    try:
        return _Reader(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise FileError(path, "data.pkl", f"damaged: {one_line(str(error), 200)}") from None
