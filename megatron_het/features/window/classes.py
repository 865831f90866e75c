"""Gradients summed beyond the replicas that share shards: over other classes of replicas, and over tied embeddings.

Replicas of one TP and EP size share parameters, gradients and state; those of other sizes have a copy of their own,
which they share.  Once a ministage's gradients are reduced to shards inside every class, leaders add up the classes'
sums layer by layer (``distributed/resharding.py``), so that one layer's gradients are whole at a time.  Of tied
embeddings the first ministage of the model and the last one have a copy each, on one stage or on two, whose gradients
are added up once both are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_het.distributed.resharding import ShardExchange
from megatron_het.features.window.chunk import Bucket, ChunkWindow


class StageSums:
    """The sums that this rank's stage takes part in.

    Args:
        classes: Between replicas of different TP or EP in the stage; None where there is one class.
        ends: Between the stages that hold copies of tied embeddings; None on others.
    """

    def __init__(self, classes: ShardExchange | None = None, ends: ShardExchange | None = None) -> None:
        self._classes, self._ends = classes, ends

    def over_classes(self, chunk: ChunkWindow) -> None:
        """Make a ministage's gradient shards those of the sum over all classes of its stage.  Collective.

        Args:
            chunk: The ministage; its reductions are finished.
        """
        if self._classes is None:
            return
        tied = self._tied(chunk)  # the sum over both ends holds for all classes
        for bucket in chunk.buckets:
            _sum(self._classes, chunk, bucket, [p for p in bucket.source.params_list if p is not tied])

    def over_ends(self, chunks: Sequence[ChunkWindow]) -> None:
        """Make the gradient shards of tied embeddings those of the sum over all copies.  Collective.

        Args:
            chunks: All ministages of this rank, which has both copies where both ends of the model are on its stage;
                the reductions of those with a copy are finished.
        """
        if self._ends is None:
            return
        found = [
            (chunk, bucket, tied)
            for chunk in chunks
            if (tied := self._tied(chunk)) is not None
            for bucket in chunk.buckets
            if bucket.gradient is not None and any(p is tied for p in bucket.source.params_list)
        ]
        if not found:
            return
        wholes = [_whole(chunk, bucket) for chunk, bucket, _ in found]
        first, *others = [_view(whole, bucket, tied) for whole, (_, bucket, tied) in zip(wholes, found, strict=True)]
        for other in others:
            first += other
        # What TP ranks have summands of was added up before the reduction.
        named = iter([("tied embedding", found[0][2])])
        self._ends.sum_parts(self._ends.described(named, lambda _: first))
        for other in others:
            other.copy_(first)
        for whole, (chunk, bucket, _) in zip(wholes, found, strict=True):
            _keep(whole, chunk, bucket)

    def has_copy(self, chunk: ChunkWindow) -> bool:
        """Whether a ministage has a copy of tied weights."""
        return self._tied(chunk) is not None

    def _tied(self, chunk: ChunkWindow) -> torch.nn.Parameter | None:
        """The copy of tied weights in a ministage."""
        from megatron.core.utils import unwrap_model

        model = unwrap_model(chunk.ddp)
        if self._ends is None or not (model.pre_process or model.post_process):
            return None
        found: torch.nn.Parameter = model.shared_embedding_or_output_weight()
        return found


def _sum(exchange: ShardExchange, chunk: ChunkWindow, bucket: Bucket, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Sum the gradients of some parameters of a bucket."""
    if bucket.gradient is None:
        return
    whole = _whole(chunk, bucket)
    names = {parameter: name for name, parameter in chunk.ddp.module.named_parameters()}
    named = ((names[parameter], parameter) for parameter in parameters)
    # What TP ranks have summands of was added up before the reduction.
    exchange.sum_parts(exchange.described(named, lambda parameter: _view(whole, bucket, parameter)))
    _keep(whole, chunk, bucket)


def _whole(chunk: ChunkWindow, bucket: Bucket) -> torch.Tensor:
    """The gradients of a bucket with this rank's part alone: parts add up to the class's sum."""
    assert bucket.gradient is not None
    whole = bucket.gradient.new_zeros(bucket.source.grad_data.numel())
    chunk.parts.own(whole).copy_(bucket.gradient)
    return whole


def _view(whole: torch.Tensor, bucket: Bucket, parameter: torch.nn.Parameter) -> torch.Tensor:
    """One parameter's part of the gradients of a bucket."""
    start, end = bucket.source.param_to_index[parameter]
    return whole[start:end].view(parameter.shape)


def _keep(whole: torch.Tensor, chunk: ChunkWindow, bucket: Bucket) -> None:
    """Keep this rank's part of the gradients of a bucket."""
    assert bucket.gradient is not None
    bucket.gradient.copy_(chunk.parts.own(whole))
