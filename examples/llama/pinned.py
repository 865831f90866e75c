"""Run a module with this rank pinned to its cores, before PyTorch is imported.

``HET_DEMO_CORES="0;1;1" torchrun --nproc-per-node 3 -m examples.llama.pinned MODULE ARGUMENTS...``
pins local rank 0 to core 0 and local ranks 1 and 2 to core 1, then runs ``python -m MODULE
ARGUMENTS...`` in the same process.  Threads that PyTorch and gloo start later inherit the pinning.
"""

from __future__ import annotations

import os
import runpy
import sys

from examples.llama.devices import PINNING_VARIABLE


def cores_of(local_rank: int, value: str) -> set[int]:
    """The cores of one local rank, from the variable's value (``;`` between ranks, ``,`` within).

    Raises:
        ValueError: The value is malformed or names no cores for this rank.
    """
    entries = value.split(";")
    if not 0 <= local_rank < len(entries):
        raise ValueError(
            f"{PINNING_VARIABLE} = {value!r} names cores for {len(entries)} local ranks, "
            f"but this is local rank {local_rank}"
        )
    try:
        cores = {int(c) for c in entries[local_rank].split(",")}
    except ValueError:
        raise ValueError(
            f"{PINNING_VARIABLE} = {value!r}: {entries[local_rank]!r} is not a list of core numbers"
        ) from None
    return cores


def pin() -> None:
    """Pin this process if the variable is set; never to cores outside of its present mask."""
    value = os.environ.get(PINNING_VARIABLE)
    if not value:
        return
    cores = cores_of(int(os.environ.get("LOCAL_RANK", "0")), value)
    outside = cores - os.sched_getaffinity(0)
    if outside:
        raise ValueError(f"{PINNING_VARIABLE} = {value!r}: core(s) {sorted(outside)} are not available here")
    os.sched_setaffinity(0, cores)


def main() -> None:
    """Pin, then become ``python -m MODULE``."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m examples.llama.pinned MODULE [ARGUMENTS...]")
    try:
        pin()
    except ValueError as error:
        sys.exit(f"error: {error}")
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
