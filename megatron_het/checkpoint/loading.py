"""Loading a checkpoint under a plan, and under the other family of models."""

import contextlib
import copy
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_het.checkpoint.choice import (
    CheckpointError,
    agreed_problems,
    check_optimizer_state,
    choose,
    common_state,
    repair_tracker,
)
from megatron_het.checkpoint.state_dict import RANDOM_STATE_KEY, as_own_optimizers, parts_of, restore_random_state
from megatron_het.distributed.groups import replaced
from megatron_het.plan import Plan, topology_hash
from megatron_het.plan.schema import EXPERTS, LATENT_ATTENTION, LATER, MLP, RECURRENT, WITH_ATTENTION, layers_of

# Checkpoints of a GPTModel for the equal HybridModel, and the other way round, while they are loaded.
#
# A layer of a GPTModel is two layers of a hybrid model, attention and the MLP or experts after it; they are paired by
# their order.  The checkpoint is not changed: the run requests its own tensors under their names in the checkpoint.
# Some checkpoints of a GPTModel stack the tensors of all layers in one, others have a tensor for each layer.
# Megatron's own translation handles the former only, for layers of Transformer Engine and in one direction.

_LAYER = re.compile(r"(.*\bdecoder\.layers\.)(?:(\d+)\.)?(.*)", re.DOTALL)
_OF_ATTENTION = ("input_layernorm", "self_attention")
# A norm is saved as part of the module after it, if the model has a fused layer for both or is saved as if it had.
_FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
_UPSTREAM = "_maybe_setup_gpt_to_hybrid_load"  # Megatron's own translation of some checkpoints (0.19.2 and later)
_NORMS = {"hybrid": "decoder.final_norm.", "gpt": "decoder.final_layernorm."}


@dataclass(frozen=True, slots=True)
class Translation:
    """Maps names of this run's tensors to those in a checkpoint of the other model family."""

    attention: dict[int, int]  # the checkpoint's layer for each of this run's layers with attention
    rest: dict[int, int]  # the same for each layer with an MLP or experts
    norms: tuple[str, str]  # name of the model's final norm in this run, and in the checkpoint
    stacked: int  # number of layers that the checkpoint stacks in one tensor; 0 if each has its own
    layers: int
    saved: frozenset[str]  # all names in it

    def of_state(self, state: Any) -> Any:
        """Returns a state dict with the names of the checkpoint."""
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace

        return dict_list_map_outplace(self._load_entry, state)

    def _load_entry(self, entry: Any) -> Any:
        """Returns an entry of this run's state under its name and place in the checkpoint."""
        from megatron.core.dist_checkpointing import mapping

        if self._is_new(entry):
            return mapping.LocalNonpersistentObject(entry.data)
        if isinstance(entry, mapping.ShardedTensorFactory):
            made = copy.copy(entry)
            made.build_fn = lambda *positional: self.of_state(entry.build_fn(*positional))
            return made
        if not isinstance(entry, mapping.ShardedObject | mapping.ShardedTensor):
            return entry
        if self.norms[0] in entry.key:
            return replace(entry, key=entry.key.replace(*self.norms))
        found = _LAYER.fullmatch(entry.key)
        if found is None:
            return entry
        before, number, name = found.groups()
        own = 0 if number is not None else 1  # the dimension of layers, if this run stacks them in one tensor
        saved = self._saved_layer(name, int(number or entry.global_offset[0]))
        key = self._saved_key(before if self.stacked else f"{before}{saved}.", name)
        first = ((self.stacked,), (saved,), (self.stacked,)) if self.stacked else ((), (), ())
        if isinstance(entry, mapping.ShardedObject):
            if not any(one.startswith(f"{key}/") for one in self.saved):
                return mapping.LocalNonpersistentObject(entry.data)
            return replace(entry, key=key, global_shape=first[0] or (1,), global_offset=first[1] or (0,))
        return replace(
            entry,
            key=key,
            global_shape=first[0] + entry.global_shape[own:],
            global_offset=first[1] + entry.global_offset[own:],
            axis_fragmentations=first[2] + tuple(entry.axis_fragmentations or ())[own:],
            prepend_axis_num=entry.prepend_axis_num - own + len(first[0]),
        )

    def _saved_layer(self, name: str, mine: int) -> int:
        """Returns which layer of the checkpoint has the parameter ``name`` of this run's layer ``mine``."""
        return (self.attention if name.startswith(_OF_ATTENTION) else self.rest)[mine]

    def _saved_key(self, prefix: str, name: str) -> str:
        """Returns the key of a layer's parameter in the checkpoint, where norms may have their alternative names."""
        return next((prefix + one for one in _spellings(name) if prefix + one in self.saved), prefix + name)

    def _is_new(self, entry: Any) -> bool:
        """Whether an entry is empty, or of a layer that a GPTModel does not have, so that it is not loaded."""
        key = getattr(entry, "key", None)
        if not isinstance(key, str):
            return False
        found = _LAYER.fullmatch(key)
        if found is None:
            return key.endswith("output_layer._extra_state")
        return found[2] is not None and int(found[2]) not in (self.attention | self.rest)


def _spellings(name: str) -> Iterator[str]:
    """Yields a parameter's name within its layer, and for a norm the alternative name."""
    yield name
    for pair in _FUSED:
        for one, other in (pair, pair[::-1]):
            if name.startswith(one):
                yield other + name.removeprefix(one)


def translation_for(args: Any, folder: Path) -> Translation | None:
    """Returns the translation for loading a checkpoint; None if it is of this run's model family.

    Raises:
        CheckpointError: The checkpoint is of the other family, but not of an equivalent model.
    """
    from megatron.core import dist_checkpointing

    if not (folder / "metadata.json").exists():
        return None
    saved = dist_checkpointing.serialization.load_sharded_metadata(str(folder))
    pattern: str | None = getattr(args, "hybrid_layer_pattern", None)
    mine, other = ("hybrid", "gpt") if pattern is not None else ("gpt", "hybrid")
    if not any(key.startswith(_NORMS[other]) for key in saved):
        return None
    if pattern is None:
        pattern = getattr(common_state(folder).get("args"), "hybrid_layer_pattern", None) or ""
    layers, stacked = _layers_in(saved)
    attention, rest = _paired(pattern, folder, RECURRENT if mine == "hybrid" else ())
    count = layers if mine == "hybrid" else args.num_layers
    if len(attention) != count:
        raise CheckpointError(
            f"--load: {folder} has {layers} layers of a {'GPTModel' if mine == 'hybrid' else 'HybridModel'}, and the "
            f"pattern {pattern} has {len(attention)} times attention and what follows it; the model here has "
            f"{args.num_layers} layers. Load it into the equal model"
        )
    if mine == "gpt":
        attention, rest = ({at: layer for layer, at in pairs.items()} for pairs in (attention, rest))
    return Translation(attention, rest, (_NORMS[mine], _NORMS[other]), stacked, layers, frozenset(saved))


def _layers_in(saved: Mapping[str, Any]) -> tuple[int, int]:
    """Number of layers in a checkpoint, and how many of them it stacks in one tensor."""
    numbers, stacked = set(), 0
    for key, entry in saved.items():
        found = _LAYER.fullmatch(key)
        if found is None or key.startswith("optimizer") or "_extra_state" in key:
            continue
        if found[2] is None:
            stacked = int(entry.global_shape[0])
        else:
            numbers.add(int(found[2]))
    return stacked or len(numbers), stacked


def _paired(pattern: str, folder: Path, new: Sequence[str]) -> tuple[dict[int, int], dict[int, int]]:
    """The GPTModel's layer for every attention layer of a pattern, and for every layer with an MLP or experts.

    Args:
        folder: Folder of the checkpoint, for messages.
        new: Symbols of layers that need no counterpart.
    """
    layers = layers_of(pattern)
    attention = [at for at, symbol in enumerate(layers) if symbol in WITH_ATTENTION]
    rest = [at for at, symbol in enumerate(layers) if symbol in (MLP, EXPERTS)]
    others = sorted({symbol for symbol in layers if symbol not in (*WITH_ATTENTION, MLP, EXPERTS, *new)})
    reason = ""
    if LATER in pattern:
        reason = "layers for multi-token prediction have other names in both families"
    elif LATENT_ATTENTION in pattern:
        reason = "the norms of latent attention are elsewhere in a GPTModel"
    elif others:
        reason = f"a GPTModel has no layers {' '.join(others)}"
    elif len(attention) != len(rest):
        reason = f"it has {len(attention)} layers of attention and {len(rest)} of MLP or experts"
    elif not new and attention != list(range(0, len(layers), 2)):
        reason = "a GPTModel has attention and what follows it in turn"
    if reason:
        raise CheckpointError(f"--load: {folder} is of the other family of models than pattern {pattern!r}: {reason}")
    return ({at: i for i, at in enumerate(attention)}, {at: i for i, at in enumerate(rest)})


@contextlib.contextmanager
def translated(args: Any, translation: Translation | None) -> Iterator[None]:
    """Context in which a checkpoint of the other family is loaded like one of this run's; None changes nothing."""
    from megatron.training import checkpointing
    from megatron.training.utils import print_rank_0

    if translation is None:
        yield
        return
    print_rank_0("het: the checkpoint is of a model of the other family; its layers are paired with those of this one")
    build = checkpointing.generate_state_dict

    def generate_state_dict(*positional: Any, **keywords: Any) -> Any:
        return translation.of_state(build(*positional, **keywords))

    own: dict[str, Any] = {"generate_state_dict": generate_state_dict}
    if hasattr(checkpointing, _UPSTREAM):
        own[_UPSTREAM] = lambda *_: (None, False)
    with replaced(checkpointing, **own), replaced(args, num_layers=translation.layers):  # compared by Megatron
        yield


SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Keys by which Megatron matches parameter groups, although a resumed run may have another learning rate."""
KIND = ("wd_mult", "pre_wd_mult", "lr_mult", "pre_lr_mult", "is_expert_parallel", "default_config", "optimizer")
"""Other keys for matching groups; ``default_config`` is False for ``--decoupled-lr`` and for learning rates of muP."""
NOTHING_TO_LOAD = ""  # value of Megatron's ``--load`` if its loading is called without a checkpoint


class LoadHook:
    """Builds the replacement of ``megatron.training.training.load_checkpoint``.

    Upstream compares *this rank's* TP size with the one in the checkpoint.  Under a plan TP sizes differ
    from rank to rank, so all ranks are shown the TP size of the first replica.

    Args:
        restore: Called first with model, optimizer and scheduler; a result other than None replaces the loading.
        prepare: Called with model and optimizer before a checkpoint is loaded into them.
    """

    def __init__(
        self, plan: Plan, restore: Callable[..., tuple[int, float] | None], prepare: Callable[..., None]
    ) -> None:
        self._restore, self._prepare = restore, prepare
        self._shown_tp = plan.stages[0].replicas[0].tp
        self._topology = topology_hash(plan)
        self._divisor = plan.loss_divisor

    def wrap(self, original: Callable[..., tuple[int, float]]) -> Callable[..., tuple[int, float]]:
        """The function that Megatron calls instead of ``original``."""

        @functools.wraps(original)
        def load_checkpoint(*positional: Any, **keywords: Any) -> tuple[int, float]:
            from megatron.training import get_args
            from megatron.training.utils import print_rank_0

            args, is_own = get_args(), keywords.get("load_arg", "load") == "load"
            if is_own:
                restored = self._restore(*positional[:3])
                if args.load == NOTHING_TO_LOAD:
                    args.load, restored = None, restored or (0, 0)
                if restored is not None:
                    return restored
            shown: dict[str, Any] = {"tensor_model_parallel_size": self._shown_tp, "no_load_rng": True}
            shown["no_save_optim"] = False  # Megatron would not load the moments, and train on with those in memory
            folder, translation, chosen = whole_checkpoint(args) if args.load and is_own else (None, None, {})
            shown |= chosen
            if positional:  # calls in any other form are for a model that is not trained
                self._prepare(*positional[:2])
            optimizer = positional[1] if len(positional) > 1 else None
            with (
                replaced(args, **shown),
                _with_matched_groups(optimizer, args),
                _with_own_form(optimizer),
                _without_absent_moments(optimizer, folder),
                translated(args, translation),
            ):
                iteration, flops = original(*positional, **keywords)
            saved = common_state(folder).get("args") if folder is not None else None
            before, now = (getattr(one, "padded_vocab_size", None) for one in (saved, args))
            if None not in (before, now) and before != now:
                print_rank_0(
                    f"het: the vocabulary had {before} rows, {now} change the loss: add --padded-vocab-size {before}"
                )
            if iteration and folder is not None and not args.finetune:
                if not args.no_load_optim:
                    take_loss_scale(optimizer, saved, self._divisor)
                if not args.no_load_rng:
                    self._load_random_state(str(folder), getattr(saved, "het_topology", None))
            return iteration, flops

        return load_checkpoint

    def _load_random_state(self, path: str, topology: str | None) -> None:
        from megatron.core import dist_checkpointing
        from megatron.training.utils import print_rank_0

        if topology != self._topology:
            print_rank_0("random-number states are not loaded: the checkpoint has another topology")
            return
        keys = dist_checkpointing.serialization.load_sharded_metadata(path)
        if any(key.split("/")[0] == RANDOM_STATE_KEY for key in keys):
            restore_random_state(path)


def _refuse(why: object) -> NoReturn:
    if dist.get_rank() == 0:
        sys.stderr.write(f"megatron_het: {why}\n")
    raise SystemExit(2) from None


def take_loss_scale(optimizer: Any, saved: Any, divisor: int) -> None:
    """Adapt a stock checkpoint's fp16 loss scale: stock scales sums of losses, a plan losses divided by ``divisor``."""
    scales_sums = getattr(saved, "fp16", False) and getattr(saved, "calculate_per_token_loss", False)
    if hasattr(saved, "het_topology") or not scales_sums or saved.loss_scale:  # constant scales are not saved
        return
    for part in parts_of(optimizer):
        if scaler := getattr(part, "grad_scaler", None):
            scaler.load_state_dict(scaler.state_dict() | {"scale": scaler.scale * divisor})


def whole_checkpoint(args: Any) -> tuple[Path | None, Translation | None, dict[str, Any]]:
    """Chooses the newest complete checkpoint, and Megatron's arguments to load it; collective.

    Returns:
        Its folder, or None to leave the choice to Megatron; the translation if it is of the other model family;
        attributes of the arguments to set while it is loaded.

    Raises:
        SystemExit: There is none, or it does not fit; the first rank prints why.
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
        check_strictness(args, choice.candidate.folder)
        translation = translation_for(args, choice.candidate.folder)
        if choice.tracker_is_broken and dist.get_rank() == 0:
            repair_tracker(Path(args.load), choice.candidate)
    except CheckpointError as error:
        _refuse(error)
    dist.barrier()
    shown = {"ckpt_step": choice.candidate.iteration, "non_persistent_ckpt_type": None}
    return choice.candidate.folder, translation, shown if choice.candidate.persistent else {}


def check_strictness(args: Any, folder: Path) -> None:
    """Refuse strict loading of a checkpoint if some of its entries depend on the layout; raises CheckpointError."""
    from megatron.core import dist_checkpointing

    if args.dist_ckpt_strictness != "raise_all":
        return
    saved = {key.split("/")[0] for key in dist_checkpointing.serialization.load_sharded_metadata(str(folder))}
    if found := sorted(saved & {RANDOM_STATE_KEY, "rng_state", "rerun_state_machine_state"}):
        raise CheckpointError(
            f"--dist-ckpt-strictness = 'raise_all': {folder} has {', '.join(found)}, which a run under a plan does not "
            "load together with the weights. Use raise_unexpected: it refuses a checkpoint that lacks what is loaded"
        )


def _with_matched_groups(optimizer: Any, args: Any) -> contextlib.AbstractContextManager[None]:
    """Context that matches parameter groups with those of a checkpoint with other learning rates."""
    keeps = bool(getattr(args, "use_checkpoint_opt_param_scheduler", False))
    if optimizer is None or not (keeps or getattr(args, "override_opt_param_scheduler", False)):
        return contextlib.nullcontext()

    def load_state_dict(load: Callable[[Any], None], state_dict: Any) -> None:
        new_groups = [group for part in parts_of(optimizer) for group in part.optimizer.param_groups]
        match_groups(new_groups, list(_saved_groups(state_dict)), keep_saved=keeps)
        load(state_dict)

    return _calling(optimizer, "load_state_dict", load_state_dict)


def _with_own_form(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Context that gives each of a rank's optimizers its part of a state saved as one optimizer's."""
    parts = parts_of(optimizer)
    is_experts = len(parts) == 2 and any(group.get("is_expert_parallel") for group in parts[1].param_groups)
    if optimizer is None or (len(parts) > 1 and not is_experts):
        return contextlib.nullcontext()
    return _calling(optimizer, "load_state_dict", lambda load, state: load(as_own_optimizers(state, len(parts))))


@contextlib.contextmanager
def _calling(optimizer: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Context that replaces an optimizer's method by a function of the original method and its arguments."""
    method, was_own = getattr(optimizer, name), name in vars(optimizer)
    setattr(optimizer, name, functools.partial(function, method))
    try:
        yield
    finally:
        delattr(optimizer, name)
        if was_own:
            setattr(optimizer, name, method)


def _without_absent_moments(optimizer: Any, folder: Path | None) -> contextlib.AbstractContextManager[None]:
    """Context that loads no moments if the checkpoint has none, because it was saved before the first update."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory

    main = "optimizer.state.fp32_param."
    if optimizer is None or folder is None or not (folder / "metadata.json").exists():
        return contextlib.nullcontext()
    keys = set(dist_checkpointing.serialization.load_sharded_metadata(str(folder)))
    has_moments = any(key.startswith("optimizer.state.") and not key.startswith(main) for key in keys)
    if has_moments or not any(key.startswith(main) for key in keys):
        return contextlib.nullcontext()

    def is_absent(value: Any) -> bool:
        is_sharded = isinstance(value, ShardedBase | ShardedTensorFactory)
        return is_sharded and value.key.startswith("optimizer.state.") and not value.key.startswith(main)

    def sharded_state_dict(ask: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        return extract_matching_values(ask(*positional, **keywords), is_absent)[1]

    return _calling(optimizer, "sharded_state_dict", sharded_state_dict)


def match_groups(current: list[dict[str, Any]], saved: list[dict[str, Any]], *, keep_saved: bool) -> None:
    """Copy the schedule between matching parameter groups that differ by it alone.

    Args:
        current: The optimizer's groups.
        saved: The groups of a checkpoint.
        keep_saved: Whether training continues with the checkpoint's schedule.
    """
    for group in saved:
        # Older releases do not write all keys of groups.
        alike = [one for one in current if all(one.get(key) == group.get(key, one.get(key)) for key in KIND)]
        if len(alike) == 1:
            source, target = (group, alike[0]) if keep_saved else (alike[0], group)
            target.update({key: source[key] for key in SCHEDULED if key in source})


def _saved_groups(state: Any) -> Iterator[dict[str, Any]]:
    """All groups of parameters in an optimizer's state."""
    if isinstance(state, dict):
        yield from state.get("param_groups", ())
        state = [value for key, value in state.items() if key != "param_groups"]
    for part in state if isinstance(state, list) else ():  # a list if experts have an optimizer of their own
        yield from _saved_groups(part)
