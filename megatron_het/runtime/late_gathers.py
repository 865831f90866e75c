"""``--overlap-param-gather``: when updated parameters travel between the replicas of a stage.

Megatron begins a bucket's all-gather in the first forward that needs it, which then waits for it.  Its replicas run the
same program, so all of them get there.  Under a plan they do not: the first forward of one replica may depend on a
forward of another one (in a V, or where a stage before holds few microbatches), which would wait for the first one's
part.  So all gathers of an iteration begin before its first operation, in one order on all ranks.
"""

from __future__ import annotations

from megatron_het.runtime.feature import Call


def begin_gathers(call: Call) -> None:
    """Begin the all-gathers of all chunks, if the iteration has any.

    Megatron says so by ``config.param_sync_func``, which it has where ``align_param_gather`` is set
    (``config.apply_after_validation``), and takes away while parameters need no gather: in the first iteration
    and in evaluations.
    """
    starts = call.config.param_sync_func
    if starts is None or call.forward_only:
        return
    for start in starts if isinstance(starts, list) else [starts]:
        start()
