"""Random values that depend on a name, a seed and the place in the whole tensor only.

A tensor is drawn in blocks of rows, each from a generator of its own, so that a rank draws the blocks that it needs
and no others.  Blocks are always drawn whole, because the last values of a short one would come out otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_het.lowering.shards import Segment

BLOCK_ROWS = 256
"""Rows of a block; a rank draws up to so many rows more than it keeps at either end of a segment."""

Draw = Callable[[torch.Tensor], object]
"""Fills a tensor with random values, e.g. ``torch.nn.init.normal_``."""


def fill(
    target: torch.Tensor,
    draw: Draw,
    name: str,
    seed: int,
    *,
    full_size: int,
    dim: int,
    segments: Sequence[Segment],
    in_blocks: bool = True,
) -> None:
    """Write a rank's part of a random tensor.

    Args:
        target: The rank's part, ``[rows, ...]``.
        draw: Fills a block or, without blocks, the whole tensor.
        name: Of the tensor in the whole model.
        seed: Of the run.
        full_size: Size of the whole tensor along ``dim``.
        dim: The dimension that is split, 0 or 1; 0 for tensors that are not.
        segments: Which part of ``dim`` this rank has.
        in_blocks: Whether every value is drawn alike, whatever the tensor's size.
    """
    shape = list(target.shape)
    shape[dim] = full_size
    with torch.no_grad():
        for first, block in _blocks(shape, draw, name, seed, dim, segments, in_blocks):
            if dim == 0:
                _copy_rows(target, block, first, segments)
            else:
                rows = min(block.shape[0], target.shape[0] - first)
                for part in segments:
                    source = block[:rows, part.full : part.full + part.length]
                    target[first : first + rows, part.local : part.local + part.length].copy_(source)


def _copy_rows(target: torch.Tensor, block: torch.Tensor, first: int, segments: Sequence[Segment]) -> None:
    for part in segments:
        low, high = max(part.full, first), min(part.full + part.length, first + block.shape[0])
        if low < high:
            start = part.local + low - part.full
            target[start : start + high - low].copy_(block[low - first : high - first])


def _blocks(
    shape: Sequence[int], draw: Draw, name: str, seed: int, dim: int, segments: Sequence[Segment], in_blocks: bool
) -> Iterator[tuple[int, torch.Tensor]]:
    """First row and values of every block that the segments touch."""
    if not in_blocks or len(shape) < 2:
        yield 0, _drawn(torch.empty(*shape), draw, f"{seed}/{name}")
        return
    for first in range(0, shape[0], BLOCK_ROWS):
        last = first + BLOCK_ROWS
        if dim != 0 or any(part.full < last and part.full + part.length > first for part in segments):
            yield first, _drawn(torch.empty(BLOCK_ROWS, *shape[1:]), draw, f"{seed}/{name}/{first}")


def _drawn(tensor: torch.Tensor, draw: Draw, key: str) -> torch.Tensor:
    """The tensor, filled on the host: devices of different kinds have generators of their own."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(int.from_bytes(digest) >> 1)
        draw(tensor)
    return tensor
