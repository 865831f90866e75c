"""The runtime patches to Megatron: ``registry.py`` says what a patch is and how to add one.

``stock.py`` and ``distributed_optimizer.py`` are what every run needs, ``plan_hooks.py`` what a plan needs, and
``releases.py`` what is known of each release of Megatron and torch.
"""

from megatron_het.megatron_patches.registry import (
    UPSTREAM_VERSION,
    Patch,
    PatchError,
    all_patches,
    install,
    installed,
    moved,
    source_hash,
    uninstall,
    watch,
)

__all__ = [
    "UPSTREAM_VERSION",
    "Patch",
    "PatchError",
    "all_patches",
    "install",
    "installed",
    "moved",
    "source_hash",
    "uninstall",
    "watch",
]
