"""Lists the patches and compares their source hashes with the installed Megatron."""

from __future__ import annotations

import sys

from megatron_het import platform, upstream


def main() -> int:
    """Print every patch; returns 1 when the installed upstream source differs from a hash."""
    platform.activate()
    status = 0
    for patch in upstream.all_patches().values():
        print(f"{patch.name}  [{patch.group}, megatron-core {patch.version}]")
        print(f"  rebinds {patch.target}\n  {patch.reason}")
        changed = upstream.changed_sources(patch)
        for dotted in patch.sources:
            note = f"CHANGED, now {changed[dotted]}" if dotted in changed else "as expected"
            print(f"  {dotted}: {note}")
        status |= bool(changed)
    return status


if __name__ == "__main__":
    sys.exit(main())
