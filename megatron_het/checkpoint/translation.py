"""Checkpoints of a GPTModel for the equal HybridModel, and the other way round, while they are loaded.

A layer of a GPTModel is two of a hybrid model, attention and what follows it, which are paired by the order in which
they come.  Nothing in the checkpoint changes: the run asks for its own tensors by the names that the checkpoint has for
them.  Some checkpoints of a GPTModel have the tensors of all layers in one, others one tensor for each layer: Megatron
knows the former only, for layers of Transformer Engine and in one direction.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_het.checkpoint.choice import CheckpointError
from megatron_het.plan.schema import EXPERTS, LATENT_ATTENTION, LATER, MLP, RECURRENT, WITH_ATTENTION, layers_of

_LAYER = re.compile(r"(.*\bdecoder\.layers\.)(?:(\d+)\.)?(.*)", re.DOTALL)
_OF_ATTENTION = ("input_layernorm", "self_attention")
# Norms are saved as parts of what follows them, where a model has a kernel for both or is saved as if it had.
_FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
_UPSTREAM = "_maybe_setup_gpt_to_hybrid_load"
"""Megatron's own translation, of some of them (0.19.2 and later)."""
_NORMS = {"hybrid": "decoder.final_norm.", "gpt": "decoder.final_layernorm."}


@dataclass(frozen=True, slots=True)
class Translation:
    """How tensors of this run are called in a checkpoint of the other family.

    Attributes:
        attention: The checkpoint's layer for each of this run's layers that has attention.
        rest: The same for each that has an MLP or experts.
        norms: The end of the model in this run, and in the checkpoint.
        stacked: How many layers the checkpoint has in one tensor; 0 where each has its own.
        layers: Of the checkpoint.
        saved: All names in it.
    """

    attention: dict[int, int]
    rest: dict[int, int]
    norms: tuple[str, str]
    stacked: int
    layers: int
    saved: frozenset[str]

    def of_state(self, state: Any) -> Any:
        """A state dict that asks for what is in the checkpoint."""
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace

        return dict_list_map_outplace(self._of_entry, state)

    def _of_entry(self, entry: Any) -> Any:
        from megatron.core.dist_checkpointing.mapping import (
            LocalNonpersistentObject,
            ShardedObject,
            ShardedTensor,
            ShardedTensorFactory,
        )

        if self._is_new(entry):
            return LocalNonpersistentObject(entry.data)
        if isinstance(entry, ShardedTensorFactory):
            build = entry.build_fn
            made = copy.copy(entry)
            made.build_fn = lambda *positional: self.of_state(build(*positional))
            return made
        if not isinstance(entry, ShardedObject | ShardedTensor):
            return entry
        if self.norms[0] in entry.key:
            return replace(entry, key=entry.key.replace(*self.norms))
        found = _LAYER.fullmatch(entry.key)
        if found is None:
            return entry
        before, number, name = found.groups()
        mine = entry.global_offset[0] if number is None else int(number)
        saved = (self.attention if name.startswith(_OF_ATTENTION) else self.rest)[mine]
        prefix = before if self.stacked else f"{before}{saved}."
        key = next((prefix + one for one in _spellings(name) if prefix + one in self.saved), prefix + name)
        if isinstance(entry, ShardedObject):
            if not any(one.startswith(f"{key}/") for one in self.saved):
                return LocalNonpersistentObject(entry.data)
            place = ((self.stacked,), (saved,)) if self.stacked else ((1,), (0,))
            return replace(entry, key=key, global_shape=place[0], global_offset=place[1])
        own = 0 if number is not None else 1  # the dimension of layers, where this run has them in one tensor
        first = ((self.stacked,), (saved,), (self.stacked,)) if self.stacked else ((), (), ())
        return replace(
            entry,
            key=key,
            global_shape=first[0] + entry.global_shape[own:],
            global_offset=first[1] + entry.global_offset[own:],
            axis_fragmentations=first[2] + tuple(entry.axis_fragmentations or ())[own:],
            prepend_axis_num=entry.prepend_axis_num - own + len(first[0]),
        )

    def _is_new(self, entry: Any) -> bool:
        """Whether a tensor is of a layer that a GPTModel has not, and begins anew, or an empty object."""
        key = getattr(entry, "key", None)
        if not isinstance(key, str):
            return False
        found = _LAYER.fullmatch(key)
        if found is None:
            return key.endswith("output_layer._extra_state")
        return found[2] is not None and int(found[2]) not in (self.attention | self.rest)


def _spellings(name: str) -> Iterator[str]:
    """A parameter's name in its layer, and the other one if it is of a norm."""
    yield name
    for pair in _FUSED:
        for one, other in (pair, pair[::-1]):
            if name.startswith(one):
                yield other + name.removeprefix(one)


def translation_for(args: Any, folder: Path) -> Translation | None:
    """Returns the translation that a checkpoint needs to be loaded; None where it is of this run's family.

    Args:
        args: Megatron's arguments.
        folder: Of one iteration.

    Raises:
        CheckpointError: It is of the other family, and not of the equal model.
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
        common = dist_checkpointing.load_common_state_dict(str(folder)).get("args")
        pattern = getattr(common, "hybrid_layer_pattern", None) or ""
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
    """Layers of a checkpoint, and how many of them it has in one tensor."""
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
    """The GPTModel's layer of every layer of attention in a pattern, and of every layer of the rest.

    Args:
        pattern: Of the hybrid model.
        folder: Of the checkpoint, for messages.
        new: Layers that may have none.
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
    """Load a checkpoint of the other family as one of this run's; None for one of this family."""
    from megatron.training import checkpointing
    from megatron.training.utils import print_rank_0

    if translation is None:
        yield
        return
    print_rank_0("het: the checkpoint is of a model of the other family; its layers are paired with those of this one")
    module: Any = checkpointing
    build, layers = module.generate_state_dict, args.num_layers

    def generate_state_dict(*positional: Any, **keywords: Any) -> Any:
        return translation.of_state(build(*positional, **keywords))

    own = getattr(module, _UPSTREAM, None)
    module.generate_state_dict = generate_state_dict
    if own is not None:
        setattr(module, _UPSTREAM, lambda *_: (None, False))
    args.num_layers = translation.layers  # which Megatron compares
    try:
        yield
    finally:
        module.generate_state_dict, args.num_layers = build, layers
        if own is not None:
            setattr(module, _UPSTREAM, own)
