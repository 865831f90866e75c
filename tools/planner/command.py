"""How the planner is called on this machine, for usage lines and hints."""

from __future__ import annotations

import sys
from pathlib import Path


def command() -> str:
    """``het-plan`` where that was started; else the module, which works in a checkout as well."""
    return "het-plan" if Path(sys.argv[0]).stem == "het-plan" else f"python -m {__package__}"
