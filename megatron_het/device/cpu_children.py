"""Processes that Megatron starts compute on the CPU as well, such as the one that writes checkpoints (--async-save).

Such a process is a new interpreter.  Nothing there has called :func:`megatron_het.device.activate`, so that
Megatron's ``rank % torch.cuda.device_count()`` would divide by zero, and the training would wait for it for ever.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import threading
from collections.abc import Callable
from typing import Any


class _Activated(multiprocessing.process.BaseProcess):
    """A process that is made ready before it does anything; what makes it ready goes there with it."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._make_ready = _MAKE_READY[0]

    def run(self) -> None:
        """See :class:`multiprocessing.Process`."""
        self._make_ready()
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super().run()


def _end_with_parent() -> None:
    """A process that serves one that was killed would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


_MAKE_READY: list[Callable[[], Any]] = []
_CONTEXTS: dict[str, Any] = {
    name: multiprocessing.get_context(name)
    for name in ("spawn", "forkserver")
    if name in multiprocessing.get_all_start_methods()
}
# By a name of this module, under which the new interpreter finds them.
CpuSpawnProcess = type("CpuSpawnProcess", (_Activated, _CONTEXTS["spawn"].Process), {"__module__": __name__})
if "forkserver" in _CONTEXTS:
    CpuForkServerProcess = type(
        "CpuForkServerProcess", (_Activated, _CONTEXTS["forkserver"].Process), {"__module__": __name__}
    )


def install(make_ready: Callable[[], Any]) -> None:
    """Have all processes that get an interpreter of their own from now on made ready.

    Args:
        make_ready: What is called there first.
    """
    _MAKE_READY[:] = [make_ready]
    type(_CONTEXTS["spawn"]).Process = CpuSpawnProcess
    if "forkserver" in _CONTEXTS:
        type(_CONTEXTS["forkserver"]).Process = CpuForkServerProcess
