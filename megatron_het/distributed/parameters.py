"""What the exchange between classes of replicas knows about the parameters of a rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from megatron_het.lowering.ranks import ExpertName, expert_name, held_experts
from megatron_het.plan import Cut

_HEAD_NORMS = ("q_layernorm", "k_layernorm")  # as upstream knows them in finalize_model_grads


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """Holds what the exchange needs to know about a parameter on this rank.

    Attributes:
        name: For messages.
        tensor: The local tensor (a gradient or a weight), modified in place; without rows along ``dim`` where it
            belongs to an expert of other ranks.
        dim: Partition dimension, or -1 when every TP rank holds the whole parameter.
        stride: See ``shards.segments``.
        full: Size of the whole parameter along ``dim``; 0 without a partition dimension.
        partial: Every TP rank holds one summand of the gradient (norms under sequence
            parallelism, norms of queries and keys); only the sum over the TP group means something.
        expert: The number in its layer of the expert that it belongs to; None for all other parameters.
        experts: Of that layer.
    """

    name: str
    tensor: torch.Tensor
    dim: int
    stride: int
    full: int = 0
    partial: bool = False
    expert: int | None = None
    experts: int = 0

    @property
    def row_elements(self) -> int:
        """Elements for each unit of size along ``dim``."""
        return math.prod(size for dim, size in enumerate(self.tensor.shape) if dim != self.dim)

    @property
    def full_bytes(self) -> int:
        """Of the whole parameter."""
        size = self.row_elements * self.full if self.dim >= 0 else self.tensor.numel()
        return size * self.tensor.element_size()


def sharded_parameters(
    named: Iterator[tuple[str, torch.nn.Parameter]],
    select: Callable[[torch.nn.Parameter], torch.Tensor],
    cut: Cut,
    sequence_parallel: bool,
    qk_layernorm: bool,
) -> list[ShardedParameter]:
    """Describe parameters by the attributes that Megatron's layers set on them.

    Args:
        named: Names and parameters, in the model's order (equal on all classes).
        select: The tensor to exchange, e.g. the main gradient.
        cut: Of this rank's replica.
        sequence_parallel: Whether norms hold partial gradients on this rank.
        qk_layernorm: Whether queries and keys are normalised: one weight for all heads, whose gradient each TP rank
            has of its own heads.
    """
    found = []
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        partitioned = getattr(parameter, "tensor_model_parallel", False)
        partial = sequence_parallel and getattr(parameter, "sequence_parallel", False)
        partial = partial or (qk_layernorm and any(norm in name for norm in _HEAD_NORMS))
        tensor = select(parameter)
        dim = int(getattr(parameter, "partition_dim", -1)) if partitioned else -1
        ranks = cut.tp if expert_name(name) is None else cut.expert_tp
        found.append(
            ShardedParameter(
                name,
                tensor,
                dim,
                getattr(parameter, "partition_stride", 1) if partitioned else 1,
                tensor.shape[dim] * ranks if dim >= 0 else 0,
                partial and not partitioned,
            )
        )
    return found


def with_all_experts(found: list[ShardedParameter], cut: Cut, tp_rank: int) -> list[ShardedParameter]:
    """The parameters with those of experts that other ranks of the replica hold, in one order for all classes.

    Args:
        found: Of this rank, in the model's order.
        cut: Of this rank's replica.
        tp_rank: Of this rank.

    Returns:
        The same, with the parameters of every layer's experts by their numbers in the layer; a parameter of an expert
        that this rank does not hold has no rows.
    """
    complete: list[ShardedParameter] = []
    for layer, run in itertools.groupby(found, key=_layer_of_experts):
        parameters = list(run)
        complete += parameters if layer is None else _all_experts(parameters, cut, tp_rank)
    return complete


def _layer_of_experts(parameter: ShardedParameter) -> str | None:
    """Returns what the names of all parameters of a layer's experts begin with; None for other parameters."""
    name = expert_name(parameter.name)
    return None if name is None else name.before.rpartition(".experts.")[0]


def _all_experts(run: list[ShardedParameter], cut: Cut, tp_rank: int) -> list[ShardedParameter]:
    """The parameters of all experts of a layer, from those of this rank's experts."""
    by_name: dict[tuple[str, str], dict[int, tuple[ExpertName, ShardedParameter]]] = {}
    for parameter in run:
        name = expert_name(parameter.name)
        assert name is not None
        by_name.setdefault((name.before, name.after), {})[name.expert] = name, parameter
    experts = cut.ep * len(next(iter(by_name.values())))
    first = held_experts(experts, cut, tp_rank).start
    return [
        _of_expert(of_rank, expert, expert - first, experts)
        for expert in range(experts)
        for of_rank in by_name.values()
    ]


def _of_expert(
    of_rank: dict[int, tuple[ExpertName, ShardedParameter]], expert: int, local: int, experts: int
) -> ShardedParameter:
    """One parameter of one expert, by this rank's ones of the same kind."""
    name, like = next(iter(of_rank.values()))
    tensor = of_rank[local][1].tensor if local in of_rank else _without_rows(like)
    return replace(like, name=name.of(expert), tensor=tensor, expert=expert, experts=experts)


def _without_rows(like: ShardedParameter) -> torch.Tensor:
    shape = list(like.tensor.shape)
    shape[like.dim] = 0
    return like.tensor.new_empty(shape)


def is_tied_copy(parameter: torch.Tensor) -> bool:
    """Whether Megatron holds these weights twice, in the first and in the last chunk of the model."""
    return bool(getattr(parameter, "shared_embedding", False))


class CopiesCheck:
    """Compares the gradients of the copies of tied weights on this rank, at the first update.

    Copies with different gradients would be different weights from then on, and nothing else would fail.

    Args:
        copies: On this rank: two where both ends of the model are on its stage.
    """

    def __init__(self, copies: int) -> None:
        self._left = copies if copies > 1 else 0
        self._first: tuple[int, torch.Tensor] | None = None

    def see(self, start: int, gradient: torch.Tensor) -> None:
        """Compare a copy with the one before; nothing once all have been seen.

        Args:
            start: Where this rank's part begins in the whole parameter.
            gradient: The summed gradient of this rank's part, flat.

        Raises:
            RuntimeError: The copies have different gradients.
        """
        if not self._left:
            return
        self._left -= 1
        if self._first is None:
            self._first = start, gradient.clone()
            return
        begin, first = self._first
        low, high = max(begin, start), min(begin + first.numel(), start + gradient.numel())
        a, b = first[low - begin : high - begin], gradient[low - start : high - start]
        different = int(((a != b) & ~(a.isnan() & b.isnan())).sum())
        if different:
            raise RuntimeError(
                f"the copies of the tied embedding on this rank have different gradients at the first update, in "
                f"{different} of {high - low} elements, so they would become different weights. This is an error of "
                "megatron_het: please report it with the plan and the command line"
            )
        if not self._left:
            self._first = None
