"""A stage-local ``megatron.core.parallel_state``.

Large parts of Megatron (samplers, layer layout, DDP, optimizer, checkpoints, random seeds) read
the module's globals, so on every rank they are set to the values *of its own stage*:

- tensor axis: the replica; data axis: the replicas that divide weights in the same way; pipeline axis: an Axis.
- "model parallel" and "optimizer instance" groups are the WORLD, so that gradient norm, inf checks
  and success flags are global without further code.
- the data-parallel *size* for the microbatch calculator is 1: the plan routes microbatches, and every rank
  counts all of them.
- if the experts of a layer are divided over a replica's ranks, their data axis is that of all other weights.
- axes of size one (weight rematerialisation, experts that are not divided) get a group of one rank, and so does
  the context axis: outside of attention, ranks that share sequences behave like data-parallel ranks.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_het.distributed.groups import PlanGroups, replaced
from megatron_het.plan import Cut, Placement

# A position along a parallel axis that has no communicator.


@dataclass(frozen=True)
class Axis:
    """Replaces a process group of which Megatron reads only rank and size.

    The pipeline axis of a heterogeneous plan is an Axis: stages have different numbers of ranks,
    so there is no group with one rank per stage, and a stray collective on the axis fails at once
    instead of hanging.
    """

    position: int  # position of this rank's first chunk
    length: int  # number of positions
    # positions of every chunk of this rank, if they differ or other ranks have more chunks; empty if all chunks have
    # one position
    by_chunk: tuple[int, ...] = ()

    def of_chunk(self, chunk: int) -> "Axis":
        """The axis with the position of one chunk of this rank."""
        return Axis(self.by_chunk[chunk], self.length, self.by_chunk) if self.by_chunk else self

    def rank(self) -> int:
        """This rank's position."""
        return self.position

    def size(self) -> int:
        """Number of positions."""
        return self.length

    @contextlib.contextmanager
    def known_to_torch(self) -> Iterator[None]:
        """Make ``torch.distributed.get_rank`` return this rank's position on the axis for the duration of the block.

        Megatron's hybrid models call it instead of the group's own method.
        """
        import torch.distributed as dist

        ranks: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks
        ranks[self] = {dist.get_rank(): self.position}
        try:
            yield
        finally:
            del ranks[self]


_CLASS_GROUPS = (
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
)
_CLASS_GLOO_GROUPS = (
    "_DATA_PARALLEL_GROUP_GLOO",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
)
_REPLICA_GROUPS = ("_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
_EXPERT_GROUPS = (
    "_EXPERT_MODEL_PARALLEL_GROUP",
    "_EXPERT_TENSOR_PARALLEL_GROUP",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
)
_EXPERTS_CLASS_GROUPS = (
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
)
_EXPERTS_CLASS_GLOO_GROUPS = ("_EXPERT_DATA_PARALLEL_GROUP_GLOO", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO")
_WORLD_GROUPS = (
    "_MODEL_PARALLEL_GROUP",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
)
_STAGE_GROUPS = ("_TENSOR_AND_DATA_PARALLEL_GROUP", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
_SELF_GROUPS = ("_CONTEXT_PARALLEL_GROUP", "_GTP_WEIGHT_REMAT_GROUP", "_EXPERT_GTP_WEIGHT_REMAT_GROUP")
# Globals that keep their value from the import (None or empty), because their axis is not used.
_UNSET = (
    "_EMBEDDING_GROUP",
    "_EMBEDDING_GLOBAL_RANKS",
    "_POSITION_EMBEDDING_GROUP",
    "_POSITION_EMBEDDING_GLOBAL_RANKS",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_EXPERT_MODEL_PARALLEL_RANK",
    "_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE",
    "_MPU_EXPERT_TENSOR_PARALLEL_RANK",
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    "_MPU_DATA_PARALLEL_RANK",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
    "_HYBRID_DP_CP_GROUPS",
)
_RANKS_AND_SIZES = (
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
    "_MODEL_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS",
    "_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
    "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
    "_EXPERT_MODEL_PARALLEL_RANKS",
    "_PIPELINE_MODEL_PARALLEL_GROUP",
    "_PIPELINE_GLOBAL_RANKS",
    "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
    "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_DATA_PARALLEL_WORLD_SIZE",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
)
# Every global of the module that this file handles.  A test compares this set with the module
# itself, so that a new global in a new release of Megatron is noticed.
KNOWN_STATE = frozenset(
    (
        *_CLASS_GROUPS,
        *_CLASS_GLOO_GROUPS,
        *_REPLICA_GROUPS,
        *_EXPERT_GROUPS,
        *_EXPERTS_CLASS_GROUPS,
        *_EXPERTS_CLASS_GLOO_GROUPS,
        *_WORLD_GROUPS,
        *_STAGE_GROUPS,
        *_SELF_GROUPS,
        *_UNSET,
        *_RANKS_AND_SIZES,
        "_GLOBAL_MEMORY_BUFFER",
    )
)


def stage_state(groups: PlanGroups) -> dict[str, Any]:
    """Returns name -> value of every global that is set for this rank."""
    placement: Placement = groups.placement
    where = placement.locate(groups.rank)
    replica = placement.replica(where.stage, where.replica)
    class_ranks = placement.class_ranks(where.stage, replica.cut, where.tp_rank)
    me, world = [groups.rank], list(range(placement.world_size))
    positions = placement.positions(where.stage)
    chunks = placement.plan.most_chunks
    by_chunk = positions if len(set(positions)) > 1 or len(positions) < chunks else ()
    state: dict[str, Any] = {
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": list(replica.tp_group(where.cp_rank)),
        "_MODEL_PARALLEL_GLOBAL_RANKS": world,
        "_DATA_PARALLEL_GLOBAL_RANKS": class_ranks,
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": class_ranks,
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": me,
        "_GTP_WEIGHT_REMAT_GLOBAL_RANKS": me,
        "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS": me,
        "_EXPERT_MODEL_PARALLEL_RANKS": _expert_model_parallel_ranks(placement, groups.rank),
        "_PIPELINE_MODEL_PARALLEL_GROUP": Axis(where.stage, placement.num_stages, by_chunk),
        "_PIPELINE_GLOBAL_RANKS": [placement.replica(s, 0).ranks[0] for s in range(placement.num_stages)],
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": where.stage,
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": placement.num_stages,
        "_MPU_DATA_PARALLEL_WORLD_SIZE": 1,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": 0 if chunks > 1 else None,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": chunks if chunks > 1 else None,
    }
    for names, group in (
        (_CLASS_GROUPS, groups["class"]),
        (_CLASS_GLOO_GROUPS, groups.class_gloo),
        (_EXPERTS_CLASS_GROUPS, groups.experts_class),
        (_EXPERTS_CLASS_GLOO_GROUPS, groups.experts_class_gloo or groups.class_gloo),
        (_REPLICA_GROUPS, groups["tp"]),
        (_WORLD_GROUPS, groups.world),
        (_STAGE_GROUPS, groups["stage"]),
        (_SELF_GROUPS, groups["self"]),
    ):
        state.update(dict.fromkeys(names, group))
    state.update(zip(_EXPERT_GROUPS, _expert_groups(groups, replica.cut), strict=True))
    return state


def _expert_model_parallel_ranks(placement: Placement, rank: int) -> list[int]:
    where, position = placement.locate(rank), placement.expert_rank(rank)
    cut = placement.replica(where.stage, where.replica).cut
    group = next(g for g in placement.expert_groups(where.stage, cut) if rank in g)
    return list(group[position % cut.expert_tp :: cut.expert_tp])


def _expert_groups(groups: PlanGroups, cut: Cut) -> tuple[Any, Any, Any]:
    """Groups of the ranks that together have all experts, of those with parts of the same experts, and of both."""
    if cut.ep == 1 and cut.divides_alike:
        return groups["self"], groups["tp"], groups["tp"]
    parts = groups["expert-tp"] if cut.expert_tp > 1 else groups["self"]
    return groups["ep"] if cut.ep > 1 else groups["self"], parts, groups.get("experts") or groups["tp"]


def install_stage_state(groups: PlanGroups, module: ModuleType | None = None) -> None:
    """Set the globals of ``megatron.core.parallel_state`` (a stand-in in tests) for this rank."""
    module = module or _parallel_state()
    for name, value in stage_state(groups).items():
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} has no {name}: another release of Megatron?")
        setattr(module, name, value)
    if getattr(module, "_GLOBAL_MEMORY_BUFFER", None) is None:
        module._set_global_memory_buffer()


def remove_stage_state(module: ModuleType | None = None) -> None:
    """Set every global that ``install_stage_state`` sets back to None."""
    module = module or _parallel_state()
    for name in KNOWN_STATE - set(_UNSET):
        setattr(module, name, None)


def as_only_reader(module: ModuleType | None = None) -> contextlib.AbstractContextManager[None]:
    """Set the data-parallel rank to 0 while a data loader is built.

    With the data-parallel size 1 under a plan, the loader yields every microbatch on every
    replica; the plan's routing selects those that a replica uses.
    """
    return replaced(module or _parallel_state(), _MPU_DATA_PARALLEL_RANK=0)


def at_chunk(chunk: int | None, module: ModuleType | None = None) -> contextlib.AbstractContextManager[None]:
    """Set the pipeline position to that of a chunk while functions run that read the position of the rank.

    Megatron's functions decide by it which rows of a batch a rank needs, and which layers it has.  In V schedules,
    and if stages have different numbers of chunks, the chunks of one rank have different positions.

    Args:
        chunk: A chunk of this rank; None if there is only one.
        module: ``megatron.core.parallel_state`` (a stand-in in tests).
    """
    state: Any = module or _parallel_state()
    axis = state._PIPELINE_MODEL_PARALLEL_GROUP
    if chunk is None or not isinstance(axis, Axis) or not axis.by_chunk:
        return contextlib.nullcontext()
    return _at(axis.of_chunk(chunk), state)


def between_the_ends(module: ModuleType | None = None) -> contextlib.AbstractContextManager[None]:
    """Set the last pipeline position: in every chunk but the last one it is neither end of the model."""
    state: Any = module or _parallel_state()
    axis: Axis = state._PIPELINE_MODEL_PARALLEL_GROUP
    return _at(Axis(axis.length - 1, axis.length), state)


def _at(shown: Axis, state: Any) -> contextlib.AbstractContextManager[None]:
    return replaced(state, _PIPELINE_MODEL_PARALLEL_GROUP=shown, _MPU_PIPELINE_MODEL_PARALLEL_RANK=shown.position)


def _parallel_state() -> ModuleType:
    from megatron.core import parallel_state

    return parallel_state
