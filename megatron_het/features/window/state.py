"""Optimizer state of a ministage: in host memory between updates, and backed up before one.

Both handle the tensors of the inner optimizer: main parameters and their state
(Adam's two moments; the count of steps is a number and is not moved).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_het.distributed.resharding import ShardExchange
from megatron_het.features.window.chunk import Bucket, ChunkWindow, HostCopy, Streams, WindowUse

# Gradients summed beyond the replicas that share shards: over other classes of replicas, and over tied embeddings.
#
# Replicas with equal TP and EP (a class) divide parameters, gradients and state; every class has a copy of its own.
# Once a ministage's gradients are reduced to shards inside every class, leaders add up the classes'
# sums layer by layer (``distributed/resharding.py``), so that only one layer's gradients are gathered at a time.  With
# tied embeddings the first and the last ministage of the model have a copy each, on one stage or on two, whose
# gradients are added up once both are reduced.


class StageSums:
    """Gradient sums of this rank's stage beyond the replicas of one class.

    Args:
        classes: Exchange between replicas of different TP or EP in the stage; None where there is one class.
        ends: Exchange between the stages that hold copies of tied embeddings; None on others.
    """

    def __init__(self, classes: ShardExchange | None = None, ends: ShardExchange | None = None) -> None:
        self._classes, self._ends = classes, ends

    def over_classes(self, chunk: ChunkWindow) -> None:
        """Replace a reduced ministage's gradient shards by the sum over all classes of its stage.  Collective."""
        if self._classes is None:
            return
        tied = self._tied(chunk)  # the sum over both ends holds for all classes
        for bucket in chunk.buckets:
            _sum(self._classes, chunk, bucket, [p for p in bucket.source.params_list if p is not tied])

    def over_ends(self, chunks: Sequence[ChunkWindow]) -> None:
        """Replace the gradient shards of tied embeddings by the sum over all copies.  Collective.

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
    """The gradients of a bucket, zero outside this rank's part: the ranks' tensors add up to the class's sum."""
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


class Entry:
    """A main parameter and its place ``[start, stop)`` in the shard of its bucket."""

    __slots__ = ("bucket", "group", "in_shard", "main", "start", "stop")

    def __init__(self, main: torch.Tensor, bucket: Bucket, start: int, stop: int, group: int, in_shard: bool) -> None:
        self.main, self.bucket, self.start, self.stop = main, bucket, start, stop
        self.group, self.in_shard = group, in_shard

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """The parameter's part of a shard (of parameters or gradients)."""
        return shard[self.start : self.stop]


class OffloadedState:
    """The optimizer's tensors of one ministage, which are in host memory between updates.

    Args:
        entries: The ministage's main parameters.  Views of the shards are moved with the shards.
        use: Where bytes are counted, under ``optimizer``.
    """

    def __init__(self, entries: Sequence[Entry], inner: torch.optim.Optimizer, use: WindowUse) -> None:
        self._entries, self._inner, self._use = entries, inner, use
        self._hosts: dict[torch.Tensor, HostCopy] = {}
        self._held_bytes = 0

    def fetch(self) -> None:
        """Bring the state to the device; ``wait`` before use."""
        for tensor in self._tensors():
            if tensor.numel() and tensor.untyped_storage().size() == 0:
                self._hosts[tensor].fetch(tensor)
        self._count(self._bytes())

    def wait(self) -> None:
        """Order the current stream after ``fetch``."""
        for host in self._hosts.values():
            host.wait()

    def store(self) -> None:
        """Bring the state, including what an update has created, to the host."""
        self._count(self._bytes())
        # State that was removed, because its first update was undone, is not copied back.
        present = set(self._tensors())
        self._hosts = {tensor: host for tensor, host in self._hosts.items() if tensor in present}
        for tensor in self._tensors():
            if tensor.untyped_storage().size():
                if tensor not in self._hosts:
                    self._hosts[tensor] = HostCopy(tensor, self._use.streams)
                self._hosts[tensor].store(tensor)
        self._count(0)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for entry in self._entries:
            if not entry.in_shard:
                yield entry.main
            yield from moments(self._inner, entry.main)

    def _bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _count(self, held_bytes: int) -> None:
        self._use.add("optimizer", held_bytes - self._held_bytes)
        self._held_bytes = held_bytes


class Backup:
    """A ministage's main parameters and optimizer state as they were before an update, on the host.

    The memory on the host is allocated once and used for every update.

    Args:
        entries: The ministage's main parameters.
        inner: The optimizer that will update them.
    """

    def __init__(self, entries: Sequence[Entry], inner: torch.optim.Optimizer, streams: Streams) -> None:
        self._entries, self._inner, self._streams = entries, inner, streams
        self._hosts: dict[torch.Tensor, HostCopy] = {}
        self._numbers: list[dict[str, Any]] = []
        self.is_taken = False

    def take(self) -> None:
        """Copy everything that an update changes."""
        self._numbers = []
        for entry in self._entries:
            for tensor in (entry.main, *moments(self._inner, entry.main)):
                if tensor not in self._hosts:
                    self._hosts[tensor] = HostCopy(tensor, self._streams)
                self._hosts[tensor].store(tensor, free=False)
            state = self._inner.state.get(entry.main, {})
            self._numbers.append({k: _copy(v) for k, v in state.items() if not _is_moment(v)})
        self.is_taken = True

    def restore(self) -> None:
        """Put everything back; state that the update created is removed."""
        for entry, numbers in zip(self._entries, self._numbers, strict=True):
            self._hosts[entry.main].restore(entry.main)
            if not numbers and not any(t in self._hosts for t in moments(self._inner, entry.main)):
                self._inner.state.pop(entry.main, None)
                continue
            for tensor in moments(self._inner, entry.main):
                self._hosts[tensor].restore(tensor)
            self._inner.state[entry.main].update({k: _copy(v) for k, v in numbers.items()})
        self.is_taken = False


class UndoLog:
    """A ministage's update that may have to be undone, with the gradients that it used.

    Args:
        entries: The ministage's main parameters.
        inner: The optimizer that updates them.
        use: Where bytes of gradients on the device are counted.
    """

    def __init__(self, entries: Sequence[Entry], inner: torch.optim.Optimizer, use: WindowUse) -> None:
        self._entries, self._inner, self._use = entries, inner, use
        self._backup = Backup(entries, inner, use.streams)
        self._gradients: dict[int, HostCopy] = {}
        self._inverse_scale: torch.Tensor | None = None
        self._groups: list[dict[str, Any]] = []

    @property
    def is_open(self) -> bool:
        """Whether there is an update that has not been confirmed."""
        return self._backup.is_taken

    def begin(self, groups: Sequence[dict[str, Any]], inverse_scale: torch.Tensor | None) -> None:
        """Before the update: back up the state, and divide the gradients by the loss scale.

        Args:
            groups: The parameter groups as they are before the update.
            inverse_scale: One over the loss scale, None without one.
        """
        self._backup.take()
        self._groups = [dict(group) for group in groups]
        self._inverse_scale = None if inverse_scale is None else inverse_scale.clone()
        if inverse_scale is not None:
            for entry in self._entries:
                if entry.main.grad is not None:
                    entry.main.grad = entry.main.grad * inverse_scale

    def store_gradients(self) -> None:
        """After the update: copy the reduced gradients to the host."""
        for bucket, gradient in self._buckets():
            if id(bucket) not in self._gradients:
                self._gradients[id(bucket)] = HostCopy(gradient, self._use.streams)
            self._gradients[id(bucket)].store(gradient)
            self._use.add("gradient_shard", -gradient.nbytes)

    def fetch_gradients(self) -> None:
        """Bring the gradients back, for the global norm."""
        for bucket, gradient in self._buckets():
            if self.is_open and gradient.untyped_storage().size() == 0:
                host = self._gradients[id(bucket)]
                host.fetch(gradient)
                host.wait()
                self._use.add("gradient_shard", gradient.nbytes)

    def was_right(self) -> bool:
        """Whether the gradients, unscaled and clipped by now, are those of the update, bit for bit."""
        right = []
        used = {id(b): self._gradients[id(b)].read(gradient.device) for b, gradient in self._buckets()}
        for entry in self._entries:
            if entry.main.grad is not None:
                gradient = entry.of(used[id(entry.bucket)]).float()
                if self._inverse_scale is not None:
                    gradient = gradient * self._inverse_scale
                right.append((entry.main.grad == gradient).all())
        return not right or bool(torch.stack(right).all().item())

    def confirm(self) -> None:
        """Keep the update and drop the backup."""
        self._backup.is_taken = False

    def take_back(self) -> list[dict[str, Any]]:
        """Restore the state before the update, and return the parameter groups as they were then."""
        self._backup.restore()
        for group, before in zip(self._inner.param_groups, self._groups, strict=True):
            if not before["params"]:
                continue  # nothing of it was stepped here
            if "step" in before:  # optimizers that count steps per group
                group["step"] = before["step"]
            else:
                group.pop("step", None)
        return self._groups

    def _buckets(self) -> list[tuple[Bucket, torch.Tensor]]:
        """The buckets that have a gradient, with it."""
        found = {id(entry.bucket): entry.bucket for entry in self._entries}
        return [(bucket, bucket.gradient) for bucket in found.values() if bucket.gradient is not None]


def moments(inner: torch.optim.Optimizer, main: torch.Tensor) -> Iterator[torch.Tensor]:
    """The state tensors of a main parameter that are as large as it is."""
    yield from (v for v in inner.state.get(main, {}).values() if _is_moment(v))


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
