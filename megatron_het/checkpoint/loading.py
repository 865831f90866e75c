"""Loading a checkpoint under a plan."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from megatron_het.checkpoint.random_state import RANDOM_STATE_KEY, restore_random_state
from megatron_het.plan import Plan, topology_hash


class LoadHook:
    """Builds the replacement of ``megatron.training.training.load_checkpoint``.

    Upstream decides by comparing *this rank's* TP size with the one in the checkpoint, which under
    a plan differs from rank to rank: all ranks get to see the TP size of the first replica.
    """

    def __init__(self, plan: Plan) -> None:
        self._shown_tp = plan.stages[0].replicas[0].tp
        self._topology = topology_hash(plan)

    def wrap(self, original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
        """The function that Megatron calls instead of ``original``."""

        @functools.wraps(original)
        def load_checkpoint(*positional: Any, **keywords: Any) -> tuple[int, int]:
            from megatron.training import get_args

            args = get_args()
            wants_random_state = not (args.no_load_rng or args.finetune)
            with _set(args, tensor_model_parallel_size=self._shown_tp, no_load_rng=True):
                iteration, flops = original(*positional, **keywords)
            if iteration and wants_random_state:
                self._load_random_state(loaded_path(args, iteration))
            return iteration, flops

        return load_checkpoint

    def _load_random_state(self, path: str) -> None:
        from megatron.core import dist_checkpointing
        from megatron.training.utils import print_rank_0

        saved = dist_checkpointing.load_common_state_dict(path).get("args")
        if getattr(saved, "het_topology", None) != self._topology:
            print_rank_0("random-number states are not loaded: the checkpoint has another topology")
            return
        keys = dist_checkpointing.serialization.load_sharded_metadata(path)
        if any(key.split("/")[0] == RANDOM_STATE_KEY for key in keys):
            restore_random_state(path)


def loaded_path(args: Any, iteration: int) -> str:
    """The folder of the checkpoint that Megatron has just loaded.

    It prefers the non-persistent one, unless a persistent one is newer.

    Args:
        args: Megatron's arguments.
        iteration: Of the loaded checkpoint.
    """
    from megatron.training import checkpointing

    if args.non_persistent_ckpt_type == "global":
        folder = args.non_persistent_global_ckpt_dir or os.path.join(
            args.load, checkpointing._NON_PERSISTENT_CKPT_SUBDIR
        )
        if checkpointing.checkpoint_exists(folder):
            tracker = checkpointing.get_checkpoint_tracker_filename(folder)
            if checkpointing.read_metadata(tracker)[0] == iteration:
                return checkpointing.get_checkpoint_name(folder, iteration, return_base_dir=True)
    return checkpointing.get_load_checkpoint_path_by_args(args)


@contextlib.contextmanager
def _set(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes for the duration of a block."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
