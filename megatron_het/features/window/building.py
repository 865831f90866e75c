"""Building the chunks of a parameter window: never is a whole stage in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training.models.gpt import GPTModelBuilder

from megatron_het.distributed import Axis
from megatron_het.runtime.building import ChunkedBuilder, PlacedHybridModelBuilder

# The layout of a windowed chunk's buffers: one bucket per transformer layer.
#
# Megatron shards every bucket over the data-parallel group, so a layer can be gathered, and its
# gradients reduced, by itself only if it is a bucket of its own.


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LATER = re.compile(r"(?:^|\.)mtp\.")
"""Layers for multi-token prediction come after those of the chunk."""


def layer_of(name: str, num_layers: int) -> int:
    """The layer of a chunk whose bucket a parameter belongs to.

    Embeddings go with the first layer; the final norm, layers for multi-token prediction and the output layer with the
    last one, so that a chunk of L layers has L buckets.
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
    """Index of the layer of the chunk that has a parameter; None where it is beside the layers."""
    found = None if _LATER.search(name) else _LAYER.search(name)
    return int(found.group(1)) if found else None


def layered_layout(chunk: torch.nn.Module, shards: int, ddp_config: DistributedDataParallelConfig) -> FullParamLayout:
    """Buffers of a chunk with a bucket per layer, the last layer first (the order of the backward).

    Args:
        chunk: The model chunk, not wrapped yet.
        shards: Size of the data-parallel group.
        ddp_config: Of the wrapper to come.
    """
    count = num_layers_of(chunk)
    layer = {p: layer_of(name, count) for name, p in chunk.named_parameters() if p.requires_grad}
    layouts = {}
    groups = group_params_for_buffers(list(layer), ddp_config.grad_reduce_in_fp32)
    for key, (params, indices) in groups.items():
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
            # One bucket, or two: upstream gives a copy of tied embeddings one of its own.
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


def wrap_layered(
    chunks: list[torch.nn.Module], ddp_config: DistributedDataParallelConfig, pg_collection: ProcessGroupCollection
) -> list[torch.nn.Module]:
    """Wrap chunks with Megatron's DDP on layered buffers."""
    return [
        DistributedDataParallel(
            config=get_model_config(chunk),
            ddp_config=ddp_config,
            module=chunk,
            disable_bucketing=True,
            pg_collection=pg_collection,
            full_param_layout=layered_layout(chunk, pg_collection.intra_dp_cp.size(), ddp_config),
        )
        for chunk in chunks
    ]


class WindowBuilder(ChunkedBuilder):
    """Builds any number of chunks on layered buffers: one bucket per layer."""

    wraps_with_upstream = False

    def _builds(self, pipeline: Axis, chunks: int) -> bool:
        return True

    def _finish_all(self, chunks: Iterator[Any], finish: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Each chunk is finished, which closes its window, before the next one is built.

        Hooks see one chunk at a time.
        """
        return [model for chunk in chunks for model in finish([chunk])]

    def _wrap(
        self, models: list[Any], ddp_config: DistributedDataParallelConfig, pg_collection: ProcessGroupCollection
    ) -> list[Any]:
        return wrap_layered(models, ddp_config, pg_collection)


class WindowGPTModelBuilder(WindowBuilder, GPTModelBuilder):
    """Builds a GPTModel that way."""


class WindowHybridModelBuilder(WindowBuilder, PlacedHybridModelBuilder):
    """Builds a HybridModel that way."""
