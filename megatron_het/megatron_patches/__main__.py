"""Lists the runtime patches and what features lean on; compares sources with the installed Megatron.

``--patches`` prints the folder of the git patches for a Megatron-LM checkout instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import megatron_het


def patch_folder() -> Path:
    """Where the git patches are: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: Neither folder exists.
    """
    package = Path(megatron_het.__file__).resolve().parent
    places = (package / "patches", package.parent / "patches")
    for place in places:
        if any(place.glob("*.patch")):
            return place
    raise FileNotFoundError(f"no git patches in {' or '.join(map(str, places))}: install megatron-het again")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print patches and what features lean on; returns 1 when installed upstream source differs from a hash."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_het.megatron_patches",
        description="The runtime patches to Megatron, each with its reason.",
    )
    parser.add_argument(
        "--patches", action="store_true", help="print the folder of the git patches for a Megatron-LM checkout"
    )
    if parser.parse_args(arguments).patches:
        print(patch_folder())
        return 0
    from megatron_het import device as platform
    from megatron_het import megatron_patches as upstream
    from megatron_het.features import FEATURES

    platform.activate()
    status = 0
    for patch in upstream.all_patches().values():
        print(f"{patch.name}  [{patch.group}, megatron-core {patch.version}]")
        print(f"  rebinds {patch.target}\n  {patch.reason}")
        status |= _compare(patch.sources)
    for feature in FEATURES:
        if feature.upstream_names:
            print(f"{feature.name}  [feature, megatron-core {upstream.UPSTREAM_VERSION}]")
            status |= _compare(feature.upstream_names)
    return status | _compare_torch()


def _compare_torch() -> bool:
    """Print the private names of torch that are leaned on; returns whether one is different."""
    import torch

    from megatron_het.megatron_patches.torch_names import TORCH_NAMES, TORCH_VERSIONS, differences

    print(f"torch  [{torch.__version__}; read in {TORCH_VERSIONS[0]} to {TORCH_VERSIONS[1]}]")
    for one in TORCH_NAMES:
        different = differences([one])
        print(f"  {one.name}: {'CHANGED, ' + different[0] if different else 'as expected'}\n    {one.reason}")
    return bool(differences())


def _compare(sources: Mapping[str, str]) -> bool:
    """Print how the sources are; returns whether one is different."""
    from megatron_het import megatron_patches as upstream

    changed = upstream.moved(sources)
    for dotted in sources:
        note = f"CHANGED, now {changed[dotted]}" if dotted in changed else "as expected"
        print(f"  {dotted}: {note}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
