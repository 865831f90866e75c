"""The distributed optimizer's state in checkpoints, where a bucket ends with padding.

For a fully reshardable checkpoint upstream (0.19.2) puts the state of all buckets of a buffer together without their
padding, and cuts it into parameters at their offsets in the buffer, which count the padding.  So after every padded
bucket the state of a parameter is taken from a later place, and the end of the last one is zeros: a run that loads the
checkpoint goes on with other moments, without a word.  Tied embeddings are in a bucket of their own, and a padded one
comes before them as soon as a layer has a parameter of few elements, such as a softmax offset per head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def placed(original: type) -> type:
    """The distributed optimizer that finds every parameter's state where it is."""

    class PlacedDistributedOptimizer(original):
        """``DistributedOptimizer`` whose fully reshardable checkpoints are right for padded buckets."""

        def sharded_param_state_fully_reshardable(self, *positional: Any, **keywords: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for buffer in self.buffers:
                    stack.enter_context(_with_padding(buffer))
                return super().sharded_param_state_fully_reshardable(*positional, **keywords)

    PlacedDistributedOptimizer.__qualname__ = original.__qualname__
    return PlacedDistributedOptimizer


@contextlib.contextmanager
def _with_padding(buffer: Any) -> Iterator[None]:
    """While inside, count the padding between the buckets of a buffer as content; what follows the last is none."""
    *padded, _ = buffer.buckets
    sizes = [bucket.numel_unpadded for bucket in padded]
    total = buffer.numel_unpadded
    for bucket in padded:
        bucket.numel_unpadded = bucket.grad_data.numel()
    buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)
    try:
        yield
    finally:
        buffer.numel_unpadded = total
        for bucket, size in zip(padded, sizes, strict=True):
            bucket.numel_unpadded = size
