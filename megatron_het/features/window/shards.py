"""How the buckets of a ministage are divided over the replicas, and the collectives of each division.

Equal parts are Megatron's own division, with the collectives for them.  Unequal parts (``state_share``
of the plan's replicas) are gathered by a broadcast, and reduced by a reduce, from or to every owner: on
NCCL as the grouped operations that the list forms of all-gather and reduce-scatter make of unequal
tensors, elsewhere one after the other.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers, shard_buffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training.models.gpt import GPTModelBuilder

from megatron_het.distributed import Axis
from megatron_het.plan.placement import cuts
from megatron_het.runtime.building import ChunkedBuilder, PlacedHybridModelBuilder

# Building the chunks of a parameter window: a stage is never in memory as a whole.


# The layout of a windowed chunk's buffers: one bucket per transformer layer.
#
# Megatron shards every bucket over the data-parallel group, so a layer can be gathered, and its
# gradients reduced, by itself only if it is a bucket of its own.

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LATER = re.compile(r"(?:^|\.)mtp\.")  # layers for multi-token prediction come after those of the chunk


def layer_of(name: str, num_layers: int) -> int:
    """The layer of a chunk whose bucket holds a parameter.

    Embeddings are in the bucket of the first layer; the final norm, layers for multi-token prediction and the output
    layer are in that of the last one, so that a chunk of L layers has L buckets.
    """
    found = _number(name)
    if found is not None:
        return found
    return 0 if "embedding" in name or num_layers == 0 else num_layers - 1


def num_layers_of(chunk: torch.nn.Module) -> int:
    """Transformer layers of a chunk, from the names of its parameters."""
    found = (_number(name) for name, _ in chunk.named_parameters())
    return max((number + 1 for number in found if number is not None), default=0)


def _number(name: str) -> int | None:
    """Index of the chunk's layer that has a parameter; None for a parameter outside the layers."""
    found = None if _LATER.search(name) else _LAYER.search(name)
    return int(found.group(1)) if found else None


def layered_layout(
    chunk: torch.nn.Module, groups: ProcessGroupCollection, ddp_config: DistributedDataParallelConfig
) -> FullParamLayout:
    """Buffers of a chunk with a bucket per layer, the last layer first (the order of the backward).

    Args:
        chunk: The model chunk, not wrapped yet.
        groups: With the data-parallel group, and that of experts.
    """
    count = num_layers_of(chunk)
    layer = {p: layer_of(name, count) for name, p in chunk.named_parameters() if p.requires_grad}
    layouts = {}
    for key, (params, indices) in group_params_for_buffers(list(layer), ddp_config.grad_reduce_in_fp32).items():
        shards = (groups.intra_expt_dp if key.is_expert_parallel else groups.intra_dp_cp).size()
        index_map: dict[torch.nn.Parameter, tuple[int, int, int]] = {}
        buckets: list[tuple[int, int]] = []
        unpadded: list[int] = []
        base = 0
        for wanted in sorted({layer[p] for p in params}, reverse=True):
            part = DistributedOptimizer._compute_per_buffer_param_layout(
                [p for p in params if layer[p] == wanted], None, shards, ddp_config
            )
            for parameter, (start, end, bucket) in part.param_index_map.items():
                index_map[parameter] = (base + start, base + end, len(buckets) + bucket)
            # One bucket, or two: upstream puts a copy of tied embeddings into a bucket of its own.
            buckets += [(base + start, base + end) for start, end in part.bucket_indices]
            unpadded += part.per_bucket_numel_unpadded
            base = buckets[-1][1]
        layouts[key] = PerBufferParamLayout(
            param_index_map=index_map,
            bucket_indices=buckets,
            per_bucket_numel_unpadded=unpadded,
            param_indices=indices,
            num_optimizer_shards=shards,
        )
    return FullParamLayout(layouts=layouts)


class WindowBuilder(ChunkedBuilder):
    """Builds any number of chunks on layered buffers: one bucket per layer."""

    wraps_with_upstream = False

    def _builds(self, pipeline: Axis, chunks: int) -> bool:
        return True

    def _finish_all(self, chunks: Iterator[Any], finish: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Finish each chunk, which closes its window, before the next one is built.

        Hooks see one chunk at a time.
        """
        return [model for chunk in chunks for model in finish([chunk])]

    def _wrap(
        self, models: list[Any], ddp_config: DistributedDataParallelConfig, pg_collection: ProcessGroupCollection
    ) -> list[Any]:
        return [
            DistributedDataParallel(
                config=get_model_config(chunk),
                ddp_config=ddp_config,
                module=chunk,
                disable_bucketing=True,
                pg_collection=pg_collection,
                full_param_layout=layered_layout(chunk, pg_collection, ddp_config),
            )
            for chunk in models
        ]


class WindowGPTModelBuilder(WindowBuilder, GPTModelBuilder):
    """Builds the chunks of a GPTModel on layered buffers."""


class WindowHybridModelBuilder(WindowBuilder, PlacedHybridModelBuilder):
    """Builds the chunks of a HybridModel on layered buffers."""


_ATTRIBUTE = "het_state_shares"
Shares = tuple[float, ...] | None


class Pending(Protocol):
    """A collective in progress."""

    def wait(self) -> Any:
        """Block, or order the current stream, until it is done."""

    def is_completed(self) -> bool:
        """Whether it is done."""


class Parts:
    """A division of flat buckets over the ranks of a group: Megatron's, into equal parts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of this rank's part of a bucket."""
        return shard_buffer(whole, self._group.size())[self._group.rank()]

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Pending:
        """Start to fill ``whole`` from every rank's ``part``."""
        return dist.all_gather_into_tensor(whole, part, group=self._group, async_op=True)

    def reduce(self, whole: torch.Tensor) -> Pending:
        """Start to sum ``whole`` over the ranks into every rank's own part; the rest is undefined."""
        return dist.reduce_scatter_tensor(self.own(whole), whole, group=self._group, async_op=True)


class UnequalParts(Parts):
    """Parts in proportion to shares.

    Args:
        group: The ranks that share the buckets.
        shares: One per rank of the group, together 1.
    """

    def __init__(self, group: dist.ProcessGroup, shares: Sequence[float]) -> None:
        if len(shares) != group.size():
            raise ValueError(f"{len(shares)} shares for a group of {group.size()} ranks")
        super().__init__(group)
        self._shares = tuple(shares)
        self._takes_lists = dist.get_backend(group) == "nccl"
        self._ranks = dist.get_process_group_ranks(group)

    def of_all(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Views of all parts of a bucket, in the group's order."""
        edges = cuts(whole.numel(), self._shares)
        return [whole[start:stop] for start, stop in zip(edges, edges[1:])]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        return self.of_all(whole)[self._group.rank()]

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Pending:
        parts = self.of_all(whole)
        if self._takes_lists:
            return dist.all_gather(parts, part, group=self._group, async_op=True)
        parts[self._group.rank()].copy_(part)
        return _Together([dist.broadcast(p, r, group=self._group, async_op=True) for p, r in self._owned(parts)])

    def reduce(self, whole: torch.Tensor) -> Pending:
        parts = self.of_all(whole)
        if self._takes_lists:
            own = parts[self._group.rank()]
            return dist.reduce_scatter(own, parts, group=self._group, async_op=True)
        return _Together([dist.reduce(p, r, group=self._group, async_op=True) for p, r in self._owned(parts)])

    def _owned(self, parts: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """Parts that are not empty, with their owners' world ranks."""
        return [(part, rank) for part, rank in zip(parts, self._ranks, strict=True) if part.numel()]


class _Together:
    """Several collectives, handled as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all are done."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all are done."""
        return all(work.is_completed() for work in self._works)


def set_shares(chunks: list[Any], shares: Shares, of_experts: Shares) -> list[Any]:
    """Set how the buffers of wrapped chunks are divided, before the optimizer is built on them.

    Args:
        chunks: Model chunks in Megatron's DDP.
        shares: One per rank of the data-parallel group; None for equal ones.
        of_experts: The same of experts that have other replicas.

    Returns:
        The chunks, as Megatron expects it of a hook that runs after wrapping.
    """
    for chunk in chunks:
        for buffers, given in ((chunk.buffers, shares), (chunk.expert_parallel_buffers, of_experts)):
            for buffer in buffers if given is not None else ():
                setattr(buffer, _ATTRIBUTE, given)
    return chunks


def shares_of(buffer: Any) -> Shares:
    """Returns the shares of a buffer from ``set_shares``, None for equal parts."""
    return getattr(buffer, _ATTRIBUTE, None)


def parts_of(buffers: Sequence[Any], group: dist.ProcessGroup) -> Parts:
    """The division of a chunk's buffers over a group."""
    shares = shares_of(buffers[0]) if buffers else None
    return Parts(group) if shares is None else UnequalParts(group, shares)


# The distributed optimizer over buffers that are divided unequally.
#
# Upstream derives every range of parameters, gradients and state from one method, which cuts buckets
# into equal parts.  Two uses of the ranges need equal parts: the gather of the state for a checkpoint,
# and the assertion that every rank has an optimizer step to report.  Buffers
# without shares are left to upstream.

_NOBODY = "no parameter"  # a key of the inner optimizer's state that belongs to no parameter


def divided(original: type) -> type:
    """The distributed optimizer that follows the shares of its buffers."""

    class UnevenDistributedOptimizer(original):
        """``DistributedOptimizer`` with parts of unequal size."""

        _steps = 0.0

        @classmethod
        def _build_model_gbuf_range(cls, buffer: Any, bucket_index: int) -> dict[str, Any]:
            own = _own_range(buffer, bucket_index)
            if own is None:
                return super()._build_model_gbuf_range(buffer, bucket_index)
            offset = buffer.buckets[bucket_index].offset
            return {"param_map": cls._build_model_gbuf_param_range_map(buffer.param_index_map, own, offset)}

        def get_parameter_state_dp_zero(
            self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
        ) -> dict[Any, Any] | None:
            uneven = _is_divided(self)
            state = super().get_parameter_state_dp_zero(use_gloo_comm, empty_data or uneven, return_on_all_ranks)
            if uneven and not empty_data:
                for index, by_type in enumerate(self.gbuf_ranges):
                    ((key, ranges),) = by_type.items()
                    into = None if state is None else state[index][key]
                    _gather_buffer(self, self.buffers[index], ranges, into, use_gloo_comm)
            return state

        def sharded_state_dict(self, *positional: Any, **keywords: Any) -> Any:
            if _is_divided(self):
                self._steps = _agreed_steps(self)
            return super().sharded_state_dict(*positional, **keywords)

        def state_dict(self) -> dict[str, Any]:
            inner = self.optimizer
            if any(group["params"] for group in inner.param_groups):
                return super().state_dict()
            # A rank with an empty share reports the step of the others; for experts of other ranks it reports none.
            if isinstance(inner, torch.optim.Adam):  # which keeps it with every parameter
                inner.state[_NOBODY] = {"step": torch.tensor(self._steps)}  # type: ignore[index]
                try:
                    return super().state_dict()
                finally:
                    del inner.state[_NOBODY]  # type: ignore[arg-type]
            saved = super().state_dict()
            for group in saved["optimizer"]["param_groups"]:
                group["step"] = int(self._steps)
            return saved

    UnevenDistributedOptimizer.__qualname__ = original.__qualname__
    return UnevenDistributedOptimizer


def _is_divided(optimizer: Any) -> bool:
    return any(shares_of(buffer) is not None for buffer in getattr(optimizer, "buffers", ()))


def _own_range(buffer: Any, bucket_index: int) -> Any:
    """This rank's part of a bucket, in elements of the buffer; None where the parts are equal."""
    shares = shares_of(buffer)
    if shares is None:
        return None
    bucket = buffer.buckets[bucket_index]
    edges = cuts(bucket.grad_data.numel(), shares)
    rank = buffer.data_parallel_group.rank()
    return Range(bucket.offset + edges[rank], bucket.offset + edges[rank + 1])


def _gather_buffer(
    optimizer: Any, buffer: Any, ranges: list[dict[str, Any]], into: dict[str, Any] | None, gloo: bool
) -> None:
    """Collective: put every rank's state of one buffer into upstream's tensors, which have no padding."""
    group = optimizer.data_parallel_group_gloo if gloo else optimizer.data_parallel_group
    device = torch.device("cpu") if gloo else buffer.param_data.device
    shares = shares_of(buffer)
    assert shares is not None  # without shares upstream's own method runs
    parts = UnequalParts(group, shares)
    base = 0
    for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
        wholes = {
            name: torch.zeros(bucket.grad_data.numel(), dtype=torch.float32, device=device)
            for name in ("param", *optimizer.optimizer_state_keys)
        }
        for parameter, spans in bucket_ranges["param_map"].items():
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            span = spans["gbuf_local"]
            for name, whole in wholes.items():
                parts.own(whole)[span.start : span.end].copy_(tensors[name].detach())
        for name, whole in wholes.items():
            parts.gather(whole, parts.own(whole).clone()).wait()
            if into is not None:
                count = bucket.numel_unpadded
                into[name][base : base + count].copy_(whole[:count])
        base += bucket.numel_unpadded


def _agreed_steps(optimizer: Any) -> float:
    """Collective: the number of updates, from the ranks that have parameters."""
    inner = optimizer.optimizer
    counts = [float(s["step"]) for s in inner.state.values() if "step" in s]
    if any(group["params"] for group in inner.param_groups):
        counts += [float(g["step"]) for g in inner.param_groups if "step" in g]
    steps = torch.tensor(max(counts, default=0.0), device=optimizer.buffers[0].param_data.device)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=optimizer.data_parallel_group)
    return float(steps.item())
