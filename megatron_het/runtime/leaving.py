"""How a rank leaves after its last iteration: what it has logged is written, and no peer loses a connection."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def flush_logs() -> None:
    """Write what Megatron's TensorBoard writer still holds.

    Its thread ends with the process, whatever waits in its queue, and the events since its last write, two minutes
    ago at most, are lost with it.
    """
    module = sys.modules.get("megatron.training.global_vars")
    writer = module._GLOBAL_TENSORBOARD_WRITER if module is not None else None
    if writer is not None:
        writer.flush()


@contextmanager
def leaving_together(over_gloo: bool) -> Iterator[None]:
    """Around a training without a plan: after a good end, ranks that compute on CPUs leave with no group left.

    Gloo's threads abort a process that still has a connection to a peer that has ended.  NCCL has no such threads,
    and Megatron's own end is kept there.  The wait for the other ranks ends with ``--distributed-timeout-minutes``.

    Args:
        over_gloo: Whether the groups of this process are gloo's.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code in (None, 0):  # a planned stop, e.g. --exit-interval
            _leave(over_gloo)
        raise
    _leave(over_gloo)


def _leave(over_gloo: bool) -> None:
    with contextlib.suppress(OSError):  # a full disk loses the log, not the training
        flush_logs()
    if over_gloo and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
