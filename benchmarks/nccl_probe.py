"""Runs inside rank processes: groups with NCCL's order, before anything else is set up."""

from __future__ import annotations

import importlib
from typing import Any

from testing import nccl_order


def simulate(*, rank: int, options: dict[str, Any], then: list[Any] | None = None) -> None:
    """Install the simulated backend, then call another setup function.

    Args:
        rank: This rank.
        options: Fields of ``nccl_order.Options``.
        then: ``module:function`` and keyword arguments of the other setup function.
    """
    nccl_order.install(nccl_order.Options(**{"stall_s": 60.0, **options}))
    if then is not None:
        name, keywords = then
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)(rank=rank, **keywords)
