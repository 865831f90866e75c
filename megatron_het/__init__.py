"""Training large language models on mixed accelerators with Megatron-LM.

A run begins in ``pretrain_gpt.py``; ``runtime/session.py`` builds a rank of a plan.  Plans are in
:mod:`megatron_het.plan`, and the order of operations on a plan's ranks in :mod:`megatron_het.schedule`.

The package extends ``megatron-core`` and ``megatron.training`` through their public hooks and a few registered patches
(:mod:`megatron_het.megatron_patches`).  No module of it is imported here: ``plan`` and ``schedule`` stay usable
without torch, and :mod:`megatron_het.device` has to be activated before ``megatron.training`` is imported.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The planner is an extra, which rank processes do not need.
INSTALL = "In a checkout of megatron_het: pip install -e '.[planner]'"


def planner_package() -> str:
    """The name of the planner's package, in this checkout or as installed.

    Raises:
        ImportError: The planner is not installed here.
    """
    checkout = Path(__file__).resolve().parents[1] / "tools" / "planner" / "__init__.py"
    package = "tools.planner" if checkout.is_file() else "het_planner"
    if importlib.util.find_spec(package.split(".")[0]) is None:
        raise ImportError(f"the planner is not installed here. {INSTALL}")
    return package


def planner(module: str) -> Any:
    """A module of the planner's package.

    Raises:
        ImportError: The planner is not installed here, or lacks one of its own needs.
    """
    return importlib.import_module(f"{planner_package()}.{module}")
