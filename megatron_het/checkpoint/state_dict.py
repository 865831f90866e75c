"""Changes that a plan makes to Megatron's ``torch_dist`` state dict.

- Layers are keyed one by one (``non_homogeneous_layers``), because a stacked key needs one local
  shape for all layers and stages may have different TP.  The flag is stored in the checkpoint, so
  that any reader, stock Megatron included, uses the same keys.
- Of several classes of replicas of a stage the first one writes; the model's first chunk writes tied embeddings.
- Random-number states are saved per world rank under a key of their own, and only loaded under the
  same topology.  The checkpoint has none under Megatron's key, which stands for a grid of (pipeline,
  tensor) ranks that a plan does not have.
"""

import contextlib
import copy
import functools
import multiprocessing.connection
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_het.distributed import PlanGroups
from megatron_het.plan import topology_hash
from megatron_het.plan.schema import CHUNK

# Random-number states, one per world rank, saved beside the model.

RANDOM_STATE_KEY = "het_random_state"


def random_state_object(load: bool = False) -> Any:
    """This rank's states as a ShardedObject keyed by world rank; with ``load``, a template without data."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject(
        RANDOM_STATE_KEY, None if load else collect(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0
    )


def collect() -> dict[str, Any]:
    """The states of all random generators of training, as tensors even if CUDA graphs use the generators."""
    from megatron.core import tensor_parallel

    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {name: tensor_parallel.convert_cuda_rng_state(state) for name, state in tracked.items()},
    }


def restore_random_state(checkpoint_path: str) -> None:
    """Load and set this rank's states; the checkpoint must come from the same topology."""
    from megatron.core import dist_checkpointing

    template = {RANDOM_STATE_KEY: random_state_object(load=True)}
    restore(dist_checkpointing.load(template, checkpoint_path)[RANDOM_STATE_KEY])


def restore(state: dict[str, Any]) -> None:
    """Set what :func:`collect` returned."""
    from megatron.core import tensor_parallel

    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tracker, convert = tensor_parallel.get_cuda_rng_tracker(), tensor_parallel.convert_cuda_rng_state
    of_graphs = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states({name: convert(own, to_graphable=of_graphs) for name, own in state["tracker"].items()})


_OUTPUT_STATE = "output_layer._extra_state"
Copies = Callable[[Sequence[Tensor]], Mapping[Tensor, Tensor]]


class StateDictHook:
    """Builds the replacement of ``megatron.training.checkpointing.generate_state_dict``.

    Args:
        copies: Returns host copies of those given parameters that are not whole on this rank; None if all are whole.
    """

    def __init__(self, groups: PlanGroups, tied_embeddings: bool, copies: Copies | None = None) -> None:
        self._copies = copies or (lambda parameters: {})
        placement = groups.placement
        where = placement.locate(groups.rank)
        self._writes = placement.replica(where.stage, where.replica).cut == placement.classes(where.stage)[0]
        has_copy = placement.first != placement.last and where.stage == placement.last[0]
        self._has_tied_copy = tied_embeddings and has_copy
        self._topology = topology_hash(placement.plan)

    def wrap(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """The function that Megatron calls instead of ``original``."""

        @functools.wraps(original)
        def generate_state_dict(
            args: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, rng_state: Any, **keywords: Any
        ) -> dict[str, Any]:
            options = keywords.get("optim_sd_kwargs") or {}
            loading = options.get("is_loading", False)
            metadata = options.get("metadata")
            if metadata is not None and not loading:
                metadata["non_homogeneous_layers"] = True
            for part in parts_of(optimizer):
                if part.optimizer is not None and part.config.optimizer == "sgd":  # Megatron saves no state for SGD
                    part.init_state_fn = _start_momentum
            if not loading and optimizer is not None and not args.no_save_optim:
                start_moments(optimizer)
            state = original(args, model, optimizer, opt_param_scheduler, None, **keywords)
            if not loading and any(isinstance(part.optimizer, torch.optim.Adam) for part in parts_of(optimizer)):
                _count_no_step(state.get("optimizer"))
            for part in state.values() if loading else ():  # older checkpoints of a split vocabulary lack it
                if isinstance(part, dict) and getattr(part.get(_OUTPUT_STATE), "data", None) is None:
                    part.pop(_OUTPUT_STATE, None)
            if "optimizer" in state:
                state["optimizer"] = as_one_optimizer(state["optimizer"])
            return self._with_copies(state, freed=True)[0] if loading else self._for_saving(state, args)

        return generate_state_dict

    def _for_saving(self, state: dict[str, Any], args: Any) -> dict[str, Any]:
        saved_args = copy.copy(args)
        vars(saved_args).update(no_save_rng=True, het_topology=self._topology)
        # A run with --use-checkpoint-args takes these from here, but chunks and stand-ins for layers from its own plan.
        saved_args.hybrid_layer_pattern = args.hybrid_layer_pattern and args.hybrid_layer_pattern.replace(CHUNK, "")
        saved_args.spec = None if vars(saved_args).pop("het_stand_in", False) else args.spec
        parts = {key: self._strip(part) for key, part in state.items() if key.startswith(("model", "optimizer"))}
        kept: dict[str, Any] = {**state, **parts, "args": saved_args}
        if not args.no_save_rng:
            kept[RANDOM_STATE_KEY] = random_state_object()
        kept, copies = self._with_copies(kept)
        if not args.async_save:
            return kept
        watch_writer()
        return staged(kept, copies)

    def _with_copies(self, state: dict[str, Any], *, freed: bool = False) -> tuple[dict[str, Any], Sequence[Tensor]]:
        """Replaces parameters that are not whole by copies; returns the state and these copies.

        This comes last, because the optimizer finds its parameters by the tensors of the model's entries.
        Loading fills the copies, from which the model is then set.

        Args:
            state: Megatron's state dict.
            freed: Replace only parameters without any memory.
        """
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
        from megatron.core.fp8_utils import is_float8tensor

        def tensor_of(value: Any) -> Tensor | None:
            is_sharded = isinstance(value, ShardedTensor | ShardedTensorFactory)
            return value.data if is_sharded and isinstance(value.data, Tensor) else None

        model = {key: part for key, part in state.items() if key.startswith("model")}
        found = [tensor for value in nested_values(model) if (tensor := tensor_of(value)) is not None]
        without = [t for t in found if t.numel() and not (is_float8tensor(t) or t.untyped_storage().size())]
        copies = self._copies(without if freed else found)
        assert all(tensor in copies for tensor in without), "a checkpoint has entries whose memory is freed"

        def replaced(value: Any) -> Any:
            if (tensor := tensor_of(value)) is None or tensor not in copies:
                return value
            entry = copy.copy(value)
            entry.data = copies[tensor]
            return entry

        return state | dict_list_map_outplace(replaced, model), list(copies.values())

    def _strip(self, part: Any) -> Any:
        """Drop sharded entries that another rank writes; unsharded ones stay."""
        if not isinstance(part, dict) or (self._writes and not self._has_tied_copy):
            return part
        from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
        from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory

        def is_dropped(value: Any) -> bool:
            if not isinstance(value, ShardedBase | ShardedTensorFactory):
                return False
            # Megatron gives the output layer's copy replica id 1, and the first chunk's, which may also be here, 0.
            return not self._writes or ("word_embeddings" in value.key and value.replica_id[0] == 1)

        return extract_matching_values(part, is_dropped)[1]


# Ranks whose experts are replicated over other ranks than the other weights have two optimizers.  Other ranks, and
# other plans, have one.  A checkpoint's common part is written by rank 0 and read by all ranks, so it has one form:
# that of the first optimizer.  The second one's tensors are in the file, too, under names of their own.

_EXPERTS = "experts"
_COMMON = ("optimizer", "state")  # parts of an optimizer's state with entries that are not tensors


def as_one_optimizer(state: Any) -> Any:
    """The state of a rank's optimizers in the form of one, with the sharded entries of the experts' one beside it."""
    if not isinstance(state, dict) or set(state) != {0, 1}:
        return state
    groups = state[1].get("param_groups") or state[1].get("optimizer", {}).get("param_groups") or ()
    if not any(group.get("is_expert_parallel") for group in groups):  # Muon's second is Adam for other weights
        return state
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensorFactory

    kinds = ShardedBase | ShardedTensorFactory | LocalNonpersistentObject  # the last: which parameters a group has
    return {**state[0], _EXPERTS: extract_matching_values(state[1], lambda value: isinstance(value, kinds))[0]}


def as_own_optimizers(state: Any, optimizers: int) -> Any:
    """Converts a loaded state to the form for a rank's optimizers.

    Args:
        state: A result of :func:`as_one_optimizer`, or stock Megatron's state with a separate optimizer of experts.
        optimizers: Number of optimizers on this rank.
    """
    if not isinstance(state, dict):
        return state
    nested = [state[i] for i in (0, 1) if i in state]  # the common part of stock Megatron's checkpoint
    first = _merged(nested[0] if nested else {}, {k: v for k, v in state.items() if k not in (_EXPERTS, 0, 1)})
    if optimizers < 2:
        return first
    return [first, _completed(state.get(_EXPERTS, {}), first)]


def _merged(common: Any, own: Any) -> Any:
    """Merges two nested states; for a leaf that both have, the second one's value is used."""
    if isinstance(common, list) and isinstance(own, list):
        return [_merged(*pair) for pair in zip(common, own, strict=True)]
    if not isinstance(common, dict) or not isinstance(own, dict):
        return own
    return {**common, **{key: _merged(common.get(key), value) for key, value in own.items()}}


def _completed(own: dict[Any, Any], like: dict[Any, Any]) -> dict[Any, Any]:
    """The state of the experts' optimizer: its own entries, completed from the other optimizer's state."""
    found = dict(own)
    for key, value in like.items():
        if key == "param_groups":
            # Megatron finds a group's settings by its keys, and its parameters by its position.
            alone = [*own.get(key, ()), *({} for _ in value)]
            found[key] = [{**group, "is_expert_parallel": True, **alone[at]} for at, group in enumerate(value)]
        elif key in _COMMON and isinstance(value, dict):
            found[key] = _completed(found.get(key, {}), value)
        elif key == "fp32_from_fp16_params":
            found.setdefault(key, [])  # not in the file if this rank has no such parameters
        elif isinstance(key, str) and key != "param_state":
            found.setdefault(key, copy.deepcopy(value))
    return found


def start_moments(optimizer: Any) -> None:
    """Create the initial state of an optimizer that has made no update yet.

    In fp16 iterations are skipped until the loss scale fits.  Megatron cannot load into an optimizer without state,
    or not even save it.
    """
    for part in parts_of(optimizer):
        inner, init_state = part.optimizer, getattr(part, "init_state_fn", None)
        if inner is None or init_state is None or any(inner.state.values()):
            continue
        init_state(inner, part.config)
        if isinstance(inner, torch.optim.Adam):  # other optimizers count steps by group
            for state in inner.state.values():
                state["step"] = torch.tensor(0.0)


def _start_momentum(optimizer: Any, config: Any = None) -> None:
    """Create SGD's momentum buffers before its first update, so that Megatron can load saved ones into them."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def parts_of(optimizer: Any) -> Sequence[Any]:
    """The optimizers that one of Megatron's consists of; none for None."""
    return [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])


def _count_no_step(state: Any) -> None:
    """Add the common count of steps, which Megatron leaves out of the state of torch's Adam when it is zero."""
    if not isinstance(state, dict):
        return
    own = state.get("state")
    if isinstance(own, dict) and any("exp_avg_sq" in found for found in own.values() if isinstance(found, dict)):
        own.setdefault("common_step", torch.tensor(0.0))
    for value in state.values():
        _count_no_step(value)


# ``--async-save`` under a plan: the state is copied to host memory at once, and a process writes it during training.
#
# Megatron passes that process the trained tensors, and the process copies them.  Under a parameter window they are
# freed when the next iteration begins, and on a CPU, where both processes share the memory, nothing is copied.  So
# copies are passed here.

_LOOK_S = 0.5


def staged(state: dict[str, Any], copies: Sequence[Any] = ()) -> dict[str, Any]:
    """A state dict for saving with copies of all its tensors in host memory.

    Args:
        state: Result of ``generate_state_dict``.
        copies: Tensors in it that are already such copies.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

    known = set(map(id, copies))

    def copied(value: Any) -> Any:
        if id(getattr(value, "data", None)) in known and not isinstance(value, Tensor):
            return value
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and isinstance(value.data, Tensor):
            entry = copy.copy(value)
            tensor = value.data.detach()
            tensor = dequantize_fp8_tensor(tensor) if is_float8tensor(tensor) else tensor
            entry.data = tensor.to("cpu", copy=True)
            return entry
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    return dict(dict_list_map_outplace(copied, state))


def finish_saves() -> None:
    """Wait for the running saves.  Collective; bounded by the groups' timeout if a rank has died."""
    from megatron.training.async_utils import maybe_finalize_async_save

    maybe_finalize_async_save(blocking=True)


def is_saving() -> bool:
    """Whether a checkpoint is being written in the background."""
    module: Any = sys.modules.get("megatron.training.async_utils")
    return module is not None and not module.is_empty_async_queue()


def abandon_saves(*, ends: bool = False) -> None:
    """Drop the running saves after the end of their session, whose groups they need to complete.

    A checkpoint is valid once it is in the tracker, which is written last.  So an unfinished one does no harm.
    With ``ends`` the writing process ends in any case, because this process does.
    """
    module: Any = sys.modules.get("megatron.training.async_utils")
    queue = None if module is None else module._async_calls_queue
    if queue is None:
        return
    module._async_calls_queue = None  # the next queue counts its saves from 0, like that of a new process
    caller = type(queue)._persistent_caller
    if caller is not None and (ends or queue.get_num_unfinalized_calls() or _has_died(type(caller))):
        if (requests := getattr(caller, "_persistent_queue", None)) is not None:
            requests.cancel_join_thread()  # at its end this process would wait until the killed one has read them
        queue.close(abort=True)


@functools.cache
def watch_writer() -> None:
    """Start a thread that notices the death of the writing process; a second call does nothing.

    Megatron waits for that process without a bound.  After its death the thread marks all awaited items as done.  The
    results of the save are missing then, which is an error on all ranks.
    """
    threading.Thread(target=_look, daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_S)
        module: Any = sys.modules.get("megatron.core.dist_checkpointing.strategies.async_utils")
        if module is not None and _has_died(module.PersistentAsyncCaller):
            release_waits(module.PersistentAsyncCaller)


def _has_died(caller: Any) -> bool:
    process = caller._persistent_process
    return process is not None and bool(multiprocessing.connection.wait([process.sentinel], timeout=0.0))


def release_waits(caller: Any) -> None:
    """End all waits of Megatron's ``PersistentAsyncCaller`` for a writing process that has died."""
    for queue in (caller._persistent_preload_q, caller._persistent_queue):
        with contextlib.suppress(ValueError):  # no item is left
            while queue is not None:
                queue.task_done()
    if caller._persistent_comp_q is not None and caller._persistent_comp_q.empty():
        caller._persistent_comp_q.put(-1)
