"""Which Megatron a process is about to import, without importing it; no torch."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from megatron_het.safe_io import FileError, read_text


class PatchError(RuntimeError):
    """A patch cannot be installed or taken out; the message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class Megatron:
    """A Megatron-LM checkout or an installed megatron-core.

    Attributes:
        folder: What holds its ``megatron`` folder.
        version: Of megatron-core, e.g. ``0.19.2``.
    """

    folder: Path
    version: str

    def __str__(self) -> str:
        return f"megatron-core {self.version} in {self.folder}"


def find() -> Megatron:
    """The Megatron that ``import megatron.core`` would take.

    Raises:
        PatchError: There is none, or none that says its version.
    """
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError("there is no megatron-core: install it, or start a script of a Megatron-LM checkout")
    core = Path(next(iter(spec.submodule_search_locations)))
    file = core / "package_info.py"
    try:
        numbers = _constants(read_text(file))
        version = ".".join(str(numbers[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    except (FileError, SyntaxError, KeyError) as error:
        raise PatchError(f"{file} does not say which megatron-core this is ({error})") from None
    return Megatron(core.parent.parent, version)


def _constants(source: str) -> dict[str, object]:
    """Module-level ``NAME = constant``."""
    found: dict[str, object] = {}
    for node in ast.parse(source).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            found[node.targets[0].id] = node.value.value
    return found
