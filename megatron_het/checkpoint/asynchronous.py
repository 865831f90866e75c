"""``--async-save`` under a plan: the state is copied to host memory at once, and a process writes it meanwhile.

Megatron hands that process the tensors that are trained, which it copies itself.  Under a parameter window they are
freed when the next iteration begins, and on a CPU, whose memory both processes share, it would copy nothing.  So what
is handed over here are copies.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import multiprocessing.connection
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from megatron_het.plan import PlanError

_LOOK_S = 0.5
_WATCHING: list[threading.Thread] = []


def check(args: Any) -> None:
    """Compare Megatron's parsed arguments with what asynchronous saving needs.

    Raises:
        PlanError: Megatron would switch it off without an error, or fail at the first save.
    """
    if not getattr(args, "async_save", False):
        return
    if not args.use_persistent_ckpt_worker:
        raise PlanError(
            "--async-save", True, "Megatron switches it off without this flag", "Add --use-persistent-ckpt-worker"
        )
    if args.async_strategy == "nvrx" and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise PlanError(
            "--async-strategy", "nvrx", "nvidia-resiliency-ext is not installed", "Give --async-strategy mcore"
        )


def staged(state: dict[str, Any], copies: Sequence[Any] = ()) -> dict[str, Any]:
    """A state dict for saving with copies of all its tensors in host memory.

    Args:
        state: Of ``generate_state_dict``.
        copies: Tensors in it that are such copies already.
    """
    import torch
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    known = set(map(id, copies))

    def copied(value: Any) -> Any:
        if id(getattr(value, "data", None)) in known and not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and isinstance(value.data, torch.Tensor):
            entry = copy.copy(value)
            entry.data = value.data.detach().to("cpu", copy=True)
            return entry
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    found: dict[str, Any] = dict_list_map_outplace(copied, state)
    return found


def finish() -> None:
    """Wait for the saves that are under way.  Collective; bounded by the groups' timeout once a rank has gone."""
    from megatron.training.async_utils import maybe_finalize_async_save

    maybe_finalize_async_save(blocking=True)


def is_under_way() -> bool:
    """Whether a checkpoint is being written while the training goes on."""
    module: Any = sys.modules.get("megatron.training.async_utils")
    return module is not None and not module.is_empty_async_queue()


def abandon() -> None:
    """Forget the saves that are under way: their session has ended, and with it the groups in which ranks agree.

    A checkpoint counts when the tracker names it, which is written last.  So one that nobody finishes is no harm.
    """
    module: Any = sys.modules.get("megatron.training.async_utils")
    queue = None if module is None else module._async_calls_queue
    if module is None or queue is None:
        return
    module._async_calls_queue = None  # the next one counts its saves from 0, as that of a newcomer does
    caller = type(queue)._persistent_caller
    if caller is not None and (queue.get_num_unfinalized_calls() or _has_died(type(caller))):
        type(queue)._persistent_caller = None
        caller.close(abort=True)


def watch() -> None:
    """Have the death of the process that writes noticed from now on; a second call does nothing.

    Megatron waits for that process without a bound.  Once it has died, whatever is waited for is said to be done.  The
    results of the save are missing then, which is an error on all ranks.
    """
    if not _WATCHING:
        _WATCHING.append(threading.Thread(target=_look, daemon=True))
        _WATCHING[0].start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_S)
        module: Any = sys.modules.get("megatron.core.dist_checkpointing.strategies.async_utils")
        if module is not None and _has_died(module.PersistentAsyncCaller):
            release(module.PersistentAsyncCaller)


def _has_died(caller: Any) -> bool:
    process = caller._persistent_process
    return process is not None and bool(multiprocessing.connection.wait([process.sentinel], timeout=0.0))


def release(caller: Any) -> None:
    """End all waits for a process that writes no more.

    Args:
        caller: Megatron's ``PersistentAsyncCaller``.
    """
    for queue in (caller._persistent_preload_q, caller._persistent_queue):
        with contextlib.suppress(ValueError):  # all is done
            while queue is not None:
                queue.task_done()
    if caller._persistent_comp_q is not None and caller._persistent_comp_q.empty():
        caller._persistent_comp_q.put(-1)
