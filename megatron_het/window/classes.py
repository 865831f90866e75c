"""Gradients of a ministage summed over replicas that cut weights otherwise, from the shards that they keep.

Replicas of one TP and EP size share parameters, gradients and state; those of other sizes have a copy of their own,
which they share.  Once a ministage's gradients are reduced to shards inside every class, leaders add up the classes'
sums layer by layer (``gradients/resharding.py``), so that one layer's gradients are whole at a time.
"""

from __future__ import annotations

import torch

from megatron_het.gradients.parameters import ShardedParameter
from megatron_het.gradients.resharding import ShardExchange
from megatron_het.window.chunk import Bucket, ChunkWindow


def sum_over_classes(exchange: ShardExchange, chunk: ChunkWindow) -> None:
    """Make a ministage's gradient shards those of the sum over all classes of its stage.  Collective.

    Args:
        exchange: Between the classes.
        chunk: The ministage; its reductions are finished.
    """
    names = {parameter: name for name, parameter in chunk.ddp.module.named_parameters()}
    for bucket in chunk.buckets:
        if bucket.gradient is None:
            continue
        # The bucket with this rank's part alone: parts add up to the class's sum.
        whole = bucket.gradient.new_zeros(bucket.source.grad_data.numel())
        chunk.parts.own(whole).copy_(bucket.gradient)
        exchange.sum_parts(_parameters(exchange, bucket, whole, names))
        bucket.gradient.copy_(chunk.parts.own(whole))


def _parameters(
    exchange: ShardExchange, bucket: Bucket, whole: torch.Tensor, names: dict[torch.nn.Parameter, str]
) -> list[ShardedParameter]:
    """The parameters of a bucket, with views of their gradients in ``whole``."""
    views = {
        parameter: whole[start:end].view(parameter.shape)
        for parameter, (start, end) in bucket.source.param_to_index.items()
    }
    named = ((names[parameter], parameter) for parameter in bucket.source.params_list)
    # What TP ranks have summands of was added up before the reduction.
    return exchange.described(named, views.__getitem__)
