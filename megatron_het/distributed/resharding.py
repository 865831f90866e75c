"""Copying weights and summing gradients between replicas that divide weights in different ways (TP and EP sizes).

Inside a class of replicas Megatron's own reduction is enough.  Across classes, and between the first and
the last stage for tied embeddings, shards are divided differently.  So the *leaders* (first member of
each class at each TP rank) exchange the intersections of their shards and add them in one fixed
order.  Every class therefore holds the same bits afterwards.

The exchange runs before Megatron's own reduction inside a class: it puts the total on the leader
and zeros on the other members, so that the reduction that follows (all-reduce or reduce-scatter,
depending on the optimizer) distributes the total unchanged.  If Megatron has reduced inside the class already,
during backward passes (``--overlap-grad-reduce``), the exchange runs afterwards: the leader gathers the members' parts
of the class's sum, and broadcasts the total.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.lowering.ranks import (
    ExpertName,
    Overlap,
    Segment,
    Stride,
    expert_name,
    expert_segments,
    held_experts,
    overlaps,
    segments,
    stride_of,
)
from megatron_het.plan import Cut

# Description of a rank's parameters for the exchange between classes of replicas.

_HEAD_NORMS = ("q_layernorm", "k_layernorm")  # names by which upstream's finalize_model_grads finds them


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """Local tensor and layout of a parameter on this rank, as the exchange needs them."""

    name: str
    # the local tensor (a gradient or a weight), modified in place; it has no rows along ``dim`` if it belongs to an
    # expert of other ranks
    tensor: torch.Tensor
    dim: int  # partition dimension, or -1 when every TP rank holds the whole parameter
    stride: Stride  # see ``lowering.ranks.segments``
    full: int = 0  # size of the whole parameter along ``dim``; 0 without a partition dimension
    # whether every TP rank holds one summand of the gradient (norms under sequence parallelism, norms of queries and
    # keys), so that only the sum over the TP group is the gradient
    partial: bool = False
    expert: int | None = None  # the expert's number in its layer; None if the parameter belongs to no single expert
    experts: int = 0

    @property
    def row_elements(self) -> int:
        """Number of elements per row along ``dim``."""
        return math.prod(size for dim, size in enumerate(self.tensor.shape) if dim != self.dim)

    @property
    def full_bytes(self) -> int:
        """Returns the size of the whole parameter in bytes."""
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
        sequence_parallel: Whether norms hold partial gradients on this rank.
        qk_layernorm: Whether queries and keys are normalised: one weight for all heads, and each TP rank has the
            gradient from its own heads only.
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
                stride_of(parameter) if partitioned else 1,
                tensor.shape[dim] * ranks if dim >= 0 else 0,
                partial and not partitioned,
            )
        )
    return found


def with_all_experts(found: list[ShardedParameter], cut: Cut, tp_rank: int) -> list[ShardedParameter]:
    """Adds the parameters of experts that other ranks of the replica hold, in one order for all classes.

    Args:
        found: Parameters of this rank, in the model's order.

    Returns:
        The parameters, with those of all experts of a layer ordered by the experts' numbers in the layer; a parameter
        of an expert that this rank does not hold has no rows.
    """
    complete: list[ShardedParameter] = []
    for layer, run in itertools.groupby(found, key=_layer_of_experts):
        parameters = list(run)
        complete += parameters if layer is None else _all_experts(parameters, cut, tp_rank)
    return complete


def _layer_of_experts(parameter: ShardedParameter) -> str | None:
    """Returns the common prefix of the parameter names of a layer's experts; None for other parameters."""
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
    found = []
    for expert, of_rank in itertools.product(range(experts), by_name.values()):
        name, like = next(iter(of_rank.values()))
        own = of_rank.get(expert - first)
        tensor = torch.empty_like(like.tensor.narrow(like.dim, 0, 0)) if own is None else own[1].tensor
        found.append(replace(like, name=name.of(expert), tensor=tensor, expert=expert, experts=experts))
    return found


class CopiesCheck:
    """Compares the gradients of the copies of tied weights on this rank, at the first update.

    Copies with different gradients would become different weights, and no other check would notice.

    Args:
        copies: Number of copies on this rank: two if its stage has both ends of the model.
    """

    def __init__(self, copies: int) -> None:
        self._left = copies if copies > 1 else 0
        self._first: tuple[int, torch.Tensor] | None = None

    def see(self, start: int, gradient: torch.Tensor) -> None:
        """Compare a copy with the one before; does nothing after the last copy.

        Args:
            start: First element of this rank's part in the whole parameter.
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


_BUCKET_BYTES = 64 * 2**20  # bounds the extra memory of the exchange


@dataclass(frozen=True, slots=True)
class ReplicaClass:
    """Replicas that divide weights in the same way: ``leaders[t]`` is the world rank of the leader at TP rank t."""

    cut: Cut
    leaders: tuple[int, ...]


@dataclass(eq=False)
class ShardExchange:
    """Exchange between the leaders of several classes."""

    classes: Sequence[ReplicaClass]  # all classes in the order in which contributions are added
    mine: int  # index of this rank's class
    tp_rank: int
    class_group: dist.ProcessGroup  # data-parallel group inside the class (this rank's)
    tp_group: dist.ProcessGroup
    leaders_group: dist.ProcessGroup | None  # group of all leaders; None on other ranks

    def __post_init__(self) -> None:
        self._is_leader = self.leaders_group is not None and self.class_group.rank() == 0

    def described(
        self,
        named: Iterator[tuple[str, torch.nn.Parameter]],
        select: Callable[[torch.nn.Parameter], torch.Tensor],
        config: Any = None,
    ) -> list[ShardedParameter]:
        """Describes this rank's parameters for an exchange.

        Args:
            named: Names and parameters, in the model's order.
            select: The tensor to exchange, e.g. the main gradient.
            config: The model's configuration, to find partial gradients; None if they were summed over TP already.
        """
        cut = self.classes[self.mine].cut
        partial = (False, False) if config is None else (config.sequence_parallel, config.qk_layernorm)
        return with_all_experts(sharded_parameters(named, select, cut, *partial), cut, self.tp_rank)

    def sum_gradients(self, parameters: Sequence[ShardedParameter]) -> None:
        """Replace local gradients so that reducing them inside each class gives the global sum."""
        for bucket in _buckets(parameters):
            partial = [p.tensor for p in bucket if p.partial]
            if partial and self.tp_group.size() > 1:
                _in_one_message(partial, lambda flat: dist.all_reduce(flat, group=self.tp_group))
            self._reduce_to_leader(bucket)
            if self._is_leader:
                self._sum_over_classes(bucket)
            for parameter in bucket:  # the total stays on one rank only
                if not self._is_leader or (parameter.partial and self.tp_rank > 0):
                    parameter.tensor.zero_()

    def gather_reduced(self, parameters: Sequence[ShardedParameter], held: Sequence[tuple[int, int]]) -> None:
        """Gather gradients that were reduced inside the class, but not exchanged, on the class's leader.

        Args:
            parameters: The gradients.
            held: For each, the elements ``[start, stop)`` of the flat gradient in which this rank has the class's sum.
                The members' intervals are disjoint and complete; the other elements of a gradient are overwritten.
        """
        if self.class_group.size() == 1:
            return
        for parameter, (start, stop) in zip(parameters, held, strict=True):
            flat = parameter.tensor.view(-1)
            flat[:start].zero_()
            flat[stop:].zero_()
        for bucket in _buckets(parameters):
            self._reduce_to_leader(bucket)

    def sum_parts(self, parameters: Sequence[ShardedParameter]) -> None:
        """Replace the members' summands of the class's sum by the sum over classes, on all members."""
        if self.class_group.size() > 1:
            for bucket in _buckets(parameters):
                self._reduce_to_leader(bucket)
        self.sum_reduced(parameters)

    def sum_reduced(self, parameters: Sequence[ShardedParameter]) -> None:
        """Replace the class's sum, which only the leaders need to have, by the sum over classes, on all members."""
        for bucket in _buckets(parameters):
            if self._is_leader:
                self._sum_over_classes(bucket)
            if self.class_group.size() > 1:
                self._broadcast_in_class(bucket)

    def copy_weights(self, parameters: Sequence[ShardedParameter]) -> None:
        """Overwrite the weights of every class with those of the first one."""
        for bucket in _buckets(parameters):
            if self._is_leader:
                received = self._swap(bucket, senders=[0])
                if self.mine != 0:
                    for parameter, total in zip(bucket, received[0], strict=True):
                        parameter.tensor.copy_(total)
            if self.mine != 0 and self.class_group.size() > 1:
                self._broadcast_in_class(bucket)

    # -- inside a class ----------------------------------------------------------------------

    def _reduce_to_leader(self, bucket: Sequence[ShardedParameter]) -> None:
        if self.class_group.size() > 1:
            leader = dist.get_global_rank(self.class_group, 0)
            _in_one_message([p.tensor for p in bucket], lambda flat: dist.reduce(flat, leader, group=self.class_group))

    def _broadcast_in_class(self, bucket: Sequence[ShardedParameter]) -> None:
        leader = dist.get_global_rank(self.class_group, 0)
        _in_one_message([p.tensor for p in bucket], lambda flat: dist.broadcast(flat, leader, group=self.class_group))

    # -- across classes ----------------------------------------------------------------------

    def _sum_over_classes(self, bucket: Sequence[ShardedParameter]) -> None:
        parts = self._swap(bucket, senders=range(len(self.classes)))
        parts[self.mine] = [p.tensor.clone() for p in bucket]
        for i, parameter in enumerate(bucket):
            total = parts[0][i]
            for c in range(1, len(self.classes)):
                total = total + parts[c][i]
            parameter.tensor.copy_(total)

    def _swap(self, bucket: Sequence[ShardedParameter], senders: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        """Exchange shards between classes; returns the values of each other sender class, in this rank's shapes."""
        outgoing, incoming = [], []
        for c, cls in enumerate(self.classes):
            for t, peer in enumerate(cls.leaders):
                if c == self.mine:
                    continue
                if self.mine in senders:
                    flat = self._pack(bucket, cls.cut, t)
                    if flat.numel():
                        outgoing.append((peer, flat))
                if c in senders:
                    layout = self._layout(bucket, cls.cut, t)
                    size = sum(_size(p, overlap) for p, overlap in layout)
                    if size:
                        buffer = bucket[0].tensor.new_empty(size)
                        incoming.append((peer, buffer, c, layout))
        self._run(outgoing, incoming)
        result = {c: [torch.zeros_like(p.tensor) for p in bucket] for c in senders if c != self.mine}
        index = {id(p): i for i, p in enumerate(bucket)}
        for _, buffer, c, layout in incoming:
            offset = 0
            for parameter, overlap in layout:
                size = _size(parameter, overlap)
                piece = buffer[offset : offset + size]
                target = _rows(parameter, result[c][index[id(parameter)]], overlap, "mine")
                target.copy_(piece.view(target.shape))
                offset += size
        return result

    def _run(self, outgoing: list, incoming: list) -> None:
        operations = [
            dist.P2POp(dist.irecv, buffer, peer, group=self.leaders_group) for peer, buffer, _, _ in incoming
        ] + [dist.P2POp(dist.isend, flat, peer, group=self.leaders_group) for peer, flat in outgoing]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def _layout(
        self, bucket: Sequence[ShardedParameter], cut: Cut, tp_rank: int
    ) -> list[tuple[ShardedParameter, Overlap | None]]:
        """Returns the rows that rank ``tp_rank`` of another class sends here; ``mine`` are local rows of this rank.

        A parameter that is not partitioned is sent whole, by the peer at this TP rank modulo the peer's TP.
        """
        layout: list[tuple[ShardedParameter, Overlap | None]] = []
        my_cut = self.classes[self.mine].cut
        for parameter in bucket:
            if parameter.dim < 0:
                if tp_rank == self.tp_rank % cut.tp:
                    layout.append((parameter, None))
                continue
            mine = _segments(parameter, my_cut, self.tp_rank)
            theirs = _segments(parameter, cut, tp_rank)
            layout.extend((parameter, overlap) for overlap in overlaps(mine, theirs))
        return layout

    def _pack(self, bucket: Sequence[ShardedParameter], cut: Cut, tp_rank: int) -> torch.Tensor:
        """The flat message for rank ``tp_rank`` of another class, in the order that the receiver expects."""
        my_cut, parts = self.classes[self.mine].cut, []
        for parameter in bucket:
            if parameter.dim < 0:
                if self.tp_rank == tp_rank % my_cut.tp:
                    parts.append(parameter.tensor.reshape(-1))
                continue
            theirs = _segments(parameter, cut, tp_rank)
            mine = _segments(parameter, my_cut, self.tp_rank)
            shared = overlaps(theirs, mine)
            parts += [_rows(parameter, parameter.tensor, overlap, "theirs").reshape(-1) for overlap in shared]
        return torch.cat(parts) if parts else bucket[0].tensor.new_empty(0)


def _segments(parameter: ShardedParameter, cut: Cut, tp_rank: int) -> list[Segment]:
    """Returns the segments of a parameter that a rank of a class holds."""
    if parameter.expert is None:
        return segments(parameter.full, cut.tp, tp_rank, parameter.stride)
    return expert_segments(parameter.full, cut, tp_rank, parameter.stride, parameter.expert, parameter.experts)


def _buckets(parameters: Sequence[ShardedParameter]) -> Iterator[list[ShardedParameter]]:
    """Yields buckets of parameters, or parts of one, of one dtype; *full* sizes bound them, equally on all ranks."""
    bucket: list[ShardedParameter] = []
    size = 0
    for parameter in itertools.chain.from_iterable(map(_parts, parameters)):
        other_dtype = bucket and parameter.tensor.dtype != bucket[0].tensor.dtype
        if bucket and (other_dtype or size + parameter.full_bytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.full_bytes
    if bucket:
        yield bucket


def _parts(parameter: ShardedParameter) -> Sequence[ShardedParameter]:
    """The parameter, or its parts if it is larger than a bucket, as an embedding table is."""
    whole = [dim for dim in range(parameter.tensor.dim()) if dim != parameter.dim]  # dimensions that no rank divides
    if parameter.full_bytes <= _BUCKET_BYTES or not whole:
        return (parameter,)
    dim = max(whole, key=parameter.tensor.size)
    length = max(1, parameter.tensor.size(dim) * _BUCKET_BYTES // parameter.full_bytes)
    return [replace(parameter, tensor=part) for part in parameter.tensor.split(length, dim)]


def _rows(parameter: ShardedParameter, tensor: torch.Tensor, overlap: Overlap | None, side: str) -> torch.Tensor:
    if overlap is None:
        return tensor
    return tensor.narrow(parameter.dim, getattr(overlap, side), overlap.length)


def _size(parameter: ShardedParameter, overlap: Overlap | None) -> int:
    if overlap is None:
        return parameter.tensor.numel()
    return parameter.row_elements * overlap.length


def _in_one_message(tensors: Sequence[torch.Tensor], operation: Callable[[torch.Tensor], object]) -> None:
    """Run a collective on the concatenation of the tensors and write the result back.

    Ranks of one group hold the same experts, so either all of them have elements to send or none has.
    """
    flat = torch.cat([t.reshape(-1) for t in tensors])
    if not flat.numel():
        return
    operation(flat)
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
