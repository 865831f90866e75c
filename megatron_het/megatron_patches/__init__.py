"""The runtime patches to Megatron: ``registry.py`` says what a patch is and how to add one.

``patches.py`` has all patches, ``torch_checkpoints.py`` guards torch's reading and writing of checkpoints, and
``releases.py`` says what is known of each release of Megatron and torch.
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
