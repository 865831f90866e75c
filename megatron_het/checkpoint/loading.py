"""Loading a checkpoint under a plan."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_het.checkpoint.choice import (
    CheckpointError,
    agreed_problems,
    check_optimizer_state,
    choose,
    repair_tracker,
)
from megatron_het.checkpoint.state_dict import RANDOM_STATE_KEY, as_own_optimizers, restore_random_state
from megatron_het.checkpoint.translation import Translation, translated, translation_for
from megatron_het.plan import Plan, topology_hash

_SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What Megatron tells groups of parameters apart by, though another learning rate may be asked for on resuming."""
_KIND = ("wd_mult", "pre_wd_mult", "lr_mult", "pre_lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")
"""What else it tells them apart by."""
NOTHING_TO_LOAD = ""
"""Megatron's ``--load`` where its loading is called and there is no checkpoint to load."""


class LoadHook:
    """Builds the replacement of ``megatron.training.training.load_checkpoint``.

    Upstream decides by comparing *this rank's* TP size with the one in the checkpoint, which under
    a plan differs from rank to rank: all ranks get to see the TP size of the first replica.

    Args:
        plan: The plan.
        restore: Called first with model, optimizer and scheduler; where it returns something, that is it.
        prepare: Called with model and optimizer before a checkpoint is loaded into them.
    """

    def __init__(
        self, plan: Plan, restore: Callable[..., tuple[int, float] | None], prepare: Callable[..., None]
    ) -> None:
        self._restore, self._prepare = restore, prepare
        self._shown_tp = plan.stages[0].replicas[0].tp
        self._topology = topology_hash(plan)

    def wrap(self, original: Callable[..., tuple[int, float]]) -> Callable[..., tuple[int, float]]:
        """The function that Megatron calls instead of ``original``."""

        @functools.wraps(original)
        def load_checkpoint(*positional: Any, **keywords: Any) -> tuple[int, float]:
            from megatron.training import get_args

            args = get_args()
            if keywords.get("load_arg", "load") == "load":
                restored = self._restore(*positional[:3])
                if args.load == NOTHING_TO_LOAD:
                    args.load, restored = None, restored or (0, 0)
                if restored is not None:
                    return restored
            wants_random_state = not (args.no_load_rng or args.finetune)
            shown: dict[str, Any] = {"tensor_model_parallel_size": self._shown_tp, "no_load_rng": True}
            folder: Path | None = None
            translation: Translation | None = None
            if args.load and keywords.get("load_arg", "load") == "load":
                folder, translation, chosen = whole_checkpoint(args)
                shown |= chosen
            if positional:  # in any other way it is called for a model that is not the one that trains
                self._prepare(*positional[:2])
            optimizer = positional[1] if len(positional) > 1 else None
            with (
                _set(args, **shown),
                _with_matched_groups(optimizer, args),
                _with_own_form(optimizer),
                _without_absent_moments(optimizer, folder),
                translated(args, translation),
            ):
                iteration, flops = original(*positional, **keywords)
                path = loaded_path(args, iteration) if iteration and wants_random_state else None
            if path is not None:
                self._load_random_state(path)
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


def whole_checkpoint(args: Any) -> tuple[Path | None, Translation | None, dict[str, Any]]:
    """Returns what Megatron's arguments must be for it to load the newest checkpoint that is whole; collective.

    Args:
        args: Megatron's arguments.

    Returns:
        Its folder, None where the choice is Megatron's; how it is read where it is of the other family of models;
        attributes to set while it loads.

    Raises:
        SystemExit: There is none, or its optimizer state does not fit; the first rank says why.
    """
    from megatron.training.utils import print_rank_0

    try:
        choice = choose(args, agreed_problems)
        for note in choice.notes:
            print_rank_0(f"het: {note}")
        if choice.candidate is None:
            return None, None, {}
        if choice.notes:
            print_rank_0(f"het: loading {choice.candidate.folder} instead")
        check_optimizer_state(args, choice.candidate.folder)
        translation = translation_for(args, choice.candidate.folder)
        if choice.tracker_is_broken and dist.get_rank() == 0:
            repair_tracker(Path(args.load), choice.candidate)
    except CheckpointError as error:
        if dist.get_rank() == 0:
            sys.stderr.write(f"megatron_het: {error}\n")
            sys.stderr.flush()
        raise SystemExit(2) from None
    dist.barrier()
    if not choice.candidate.persistent:
        return choice.candidate.folder, translation, {}
    return (
        choice.candidate.folder,
        translation,
        {"ckpt_step": choice.candidate.iteration, "non_persistent_ckpt_type": None},
    )


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
def _with_matched_groups(optimizer: Any, args: Any) -> Iterator[None]:
    """Let groups of parameters be found in a checkpoint that was trained with other learning rates."""
    keeps = bool(getattr(args, "use_checkpoint_opt_param_scheduler", False))
    if optimizer is None or not (keeps or getattr(args, "override_opt_param_scheduler", False)):
        yield
        return

    def load_state_dict(load: Callable[[Any], None], state_dict: Any) -> None:
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        current = [group for part in parts for group in part.optimizer.param_groups]  # made anew until now
        match_groups(current, list(_saved_groups(state_dict)), keep_saved=keeps)
        load(state_dict)

    with _loading_by(optimizer, load_state_dict):
        yield


@contextlib.contextmanager
def _with_own_form(optimizer: Any) -> Iterator[None]:
    """Give each of a rank's optimizers its part of a state that has the form of one."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    is_experts = len(parts) == 2 and any(group.get("is_expert_parallel") for group in parts[1].param_groups)
    if optimizer is None or (len(parts) > 1 and not is_experts):
        yield
        return
    with _loading_by(optimizer, lambda load, state_dict: load(as_own_optimizers(state_dict, len(parts)))):
        yield


@contextlib.contextmanager
def _loading_by(optimizer: Any, load_state_dict: Callable[[Callable[[Any], None], Any], None]) -> Iterator[None]:
    """Let an optimizer load by a function that gets its own ``load_state_dict`` and the state."""
    load, was_own = optimizer.load_state_dict, "load_state_dict" in vars(optimizer)
    optimizer.load_state_dict = functools.partial(load_state_dict, load)
    try:
        yield
    finally:
        if was_own:
            optimizer.load_state_dict = load
        else:
            del optimizer.load_state_dict


@contextlib.contextmanager
def _without_absent_moments(optimizer: Any, folder: Path | None) -> Iterator[None]:
    """Ask for no moments where a checkpoint has none, because it was saved before the first update."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory

    main = "optimizer.state.fp32_param."
    if optimizer is None or folder is None or not (folder / "metadata.json").exists():
        yield
        return
    keys = set(dist_checkpointing.serialization.load_sharded_metadata(str(folder)))
    has_moments = any(key.startswith("optimizer.state.") and not key.startswith(main) for key in keys)
    if has_moments or not any(key.startswith(main) for key in keys):
        yield
        return
    ask = optimizer.sharded_state_dict

    def is_absent(value: Any) -> bool:
        is_sharded = isinstance(value, ShardedBase | ShardedTensorFactory)
        return is_sharded and value.key.startswith("optimizer.state.") and not value.key.startswith(main)

    def sharded_state_dict(*positional: Any, **keywords: Any) -> Any:
        return extract_matching_values(ask(*positional, **keywords), is_absent, return_lists_as_dicts=False)[1]

    optimizer.sharded_state_dict = sharded_state_dict
    try:
        yield
    finally:
        del optimizer.sharded_state_dict


def match_groups(current: list[dict[str, Any]], saved: list[dict[str, Any]], *, keep_saved: bool) -> None:
    """Give groups that differ by their schedule alone one schedule.

    Args:
        current: The optimizer's groups.
        saved: Those of a checkpoint.
        keep_saved: Whether the checkpoint's schedule is the one that goes on.
    """
    for group in saved:
        alike = [found for found in current if all(found.get(key) == group.get(key) for key in _KIND)]
        if len(alike) == 1:
            source, target = (group, alike[0]) if keep_saved else (alike[0], group)
            target.update({key: source[key] for key in _SCHEDULED if key in source})


def _saved_groups(state: Any) -> Iterator[dict[str, Any]]:
    """All groups of parameters in an optimizer's state."""
    if isinstance(state, dict):
        for key, value in state.items():
            if key == "param_groups":
                yield from value
            else:
                yield from _saved_groups(value)


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
