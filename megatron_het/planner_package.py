"""The planner's package, which is an extra: rank processes do not need it."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any


def planner_package() -> str:
    """Its name: that of this checkout, or as installed.

    Raises:
        ImportError: The planner is not installed here.
    """
    import megatron_het

    checkout = Path(megatron_het.__file__).resolve().parents[1] / "tools" / "planner" / "__init__.py"
    package = "tools.planner" if checkout.is_file() else "het_planner"
    if importlib.util.find_spec(package.split(".")[0]) is None:
        raise ImportError("the planner is not installed here (pip install 'megatron-het[planner]')")
    return package


def planner(module: str) -> Any:
    """A module of the planner's package.

    Raises:
        ImportError: The planner is not installed here, or lacks one of its own needs.
    """
    return importlib.import_module(f"{planner_package()}.{module}")
