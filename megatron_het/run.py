"""Run a training script of Megatron with the ``--het-*`` flags, without editing it.

``torchrun ... -m megatron_het.run pretrain_gpt.py <its flags> --het-plan plan.json``
"""

import os
import runpy
import sys


def main() -> None:
    """Install the hooks, then run the script as if it had been started directly."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.stderr.write("usage: python -m megatron_het.run SCRIPT.py [its flags] [--het-plan FILE ...]\n")
        raise SystemExit(2)
    script = sys.argv[1]
    if not os.path.isfile(script):
        sys.stderr.write(f"megatron_het.run: no such script: {script}\n")
        raise SystemExit(2)
    # First, as Python does for a script: a checkout's own megatron/ comes before an installed one.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    from megatron_het.launch.start import install
    from megatron_het.megatron_patches.releases import PatchError, find

    try:
        megatron = find()
    except PatchError as error:
        sys.stderr.write(f"megatron_het.run: {error}\n")
        raise SystemExit(2) from None
    if int(os.environ.get("RANK", "0")) == 0:
        own = str(megatron.folder) == sys.path[0]
        sys.stderr.write(f"megatron_het.run: {megatron} ({"the script's own" if own else 'not beside the script'})\n")
    sys.argv = sys.argv[1:]
    install(sys.argv)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
