"""Collectives whose parts have different sizes: layers of experts exchange as many tokens as there happen to be.

NCCL has all of them.  gloo takes split sizes as lists only, and in lists of tensors parts of one size only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_gather, _scatter, _exchange = dist.all_gather, dist.reduce_scatter, dist.all_to_all_single


def install() -> None:
    """Rebind the names of ``torch.distributed`` that Megatron's token dispatchers call."""
    dist.all_gather = _all_gather
    dist.reduce_scatter = _reduce_scatter
    dist.all_to_all_single = _all_to_all_single


def _is_for_gloo(parts: Sequence[torch.Tensor], group: Any) -> bool:
    """Whether a blocking collective has parts that the group does not take."""
    return dist.get_backend(group) == "gloo" and len({part.shape for part in parts}) > 1


def _owned(parts: Sequence[torch.Tensor], group: Any) -> list[tuple[torch.Tensor, int]]:
    """Parts that are not empty, with the world ranks that they belong to."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return [(part, rank) for part, rank in zip(parts, ranks, strict=True) if part.numel()]


@functools.wraps(_gather)
def _all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Every member broadcasts its own part."""
    if async_op or not _is_for_gloo(tensor_list, group):
        return _gather(tensor_list, tensor, group=group, async_op=async_op)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    for part, owner in _owned(tensor_list, group):
        dist.broadcast(part, owner, group=group)
    return None


@functools.wraps(_scatter)
def _reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Every member's part is reduced to the member."""
    if async_op or not _is_for_gloo(input_list, group):
        return _scatter(output, input_list, op=op, group=group, async_op=async_op)
    parts = [part.clone() for part in input_list]  # a reduction may leave anything on ranks that it is not for
    for part, owner in _owned(parts, group):
        dist.reduce(part, owner, op=op, group=group)
    output.copy_(parts[dist.get_rank(group)])
    return None


@functools.wraps(_exchange)
def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Sizes may be tensors: Megatron makes lists of those that come from a GPU, of no others."""
    return _exchange(
        output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), group=group, async_op=async_op
    )


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
