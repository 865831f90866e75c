"""The runtime patches to Megatron; see :mod:`megatron_het.megatron_patches.registry` for how to add one."""

from megatron_het.megatron_patches.registry import (
    UPSTREAM_VERSION,
    Patch,
    PatchError,
    all_patches,
    changed_sources,
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
    "changed_sources",
    "install",
    "installed",
    "moved",
    "source_hash",
    "uninstall",
    "watch",
]
