"""Activation offload as a feature of a rank."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_het.device import Platform
from megatron_het.device.memory import HostPool
from megatron_het.lowering.ranks import RankOp
from megatron_het.runtime import feature
from megatron_het.runtime.executor import copies_of
from megatron_het.schedule.ir import Kind

# Activations on the host between their forward and their backward (SlimPipe, section 6.5).
#
# Autograd's saved-tensor hooks see the tensors that the layers of a FORWARD save for its backward.  At
# ACT_OFFLOAD a given share of their bytes is copied to the host, beginning with the tensors that were
# saved first, which the backward needs last.  At ACT_FETCH, ahead of the BACKWARD, they are copied back.  On
# CUDA both directions have a stream of their own.  Parameters, cached keys and values, and tensors
# smaller than a few KiB stay on the device.  The program decides when the operations run.

_SMALLEST_BYTES = 4096


@dataclass(slots=True, eq=False)
class _Block:
    """One storage that a forward saved, however many tensors share it.

    ``in_place``: the storage has another holder, too (the input of a FORWARD, which gets a gradient),
    so it is resized to zero and filled again instead of being freed.
    """

    storage: torch.UntypedStorage | None
    device: torch.device
    in_place: bool = False
    host: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor: a view of a block."""

    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Forward:
    """The blocks that one FORWARD saved, in order; keyed by storage while it runs."""

    blocks: list[_Block] = field(default_factory=list)
    known: dict[int, _Block] = field(default_factory=dict)


class ActivationOffload(feature.RuntimeFeature):
    """Moves the saved tensors of training's forwards between device and host; evaluation saves none.

    Args:
        ratio: Share of the bytes of each offloaded FORWARD to move, above 0 and at most 1.
    """

    def __init__(self, ratio: float, platform: Platform) -> None:
        self._ratio = ratio
        self.pool = HostPool(platform)
        self._forwards: dict[tuple[int, int, int], _Forward] = {}
        self._to_host = torch.cuda.Stream() if platform.is_cuda else None
        self._to_device = torch.cuda.Stream() if platform.is_cuda else None
        self._returning: list[tuple[torch.cuda.Event, torch.Tensor]] = []
        self._models: tuple[torch.nn.Module, ...] = ()
        self._staying: set[int] = set()

    def handlers(self) -> Mapping[Kind, feature.Handler]:
        return {
            Kind.ACT_OFFLOAD: lambda op, call, state: self.store(op),
            Kind.ACT_FETCH: lambda op, call, state: self.fetch(op),
        }

    def begin(self, call: feature.Call, state: feature.Iteration) -> None:
        if not call.forward_only:
            self.start(call.models)

    def around_forward(self, forward: feature.ForwardPass, call: feature.Call) -> feature.Around:
        return contextlib.nullcontext() if call.forward_only else self.saving(forward.op, forward.source)

    def around_backward(
        self, backward: feature.BackwardPass, call: feature.Call, state: feature.Iteration
    ) -> feature.Around:
        self.release(backward.op)
        return contextlib.nullcontext()

    def finish(self, call: feature.Call, state: feature.Iteration) -> None:
        if not call.forward_only:
            self.check_empty()

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        """Returns the peak of activations' bytes on the host."""
        return {"host_memory": {"activation_peak_bytes": self.pool.peak_bytes}}

    def start(self, models: Sequence[torch.nn.Module]) -> None:
        """Start an iteration: note the storages of parameters, which are never offloaded.

        A parameter window resizes them, but they stay the same storages.
        """
        self._models = tuple(models)
        self._staying = {p.untyped_storage()._cdata for model in models for p in model.parameters()}

    @contextlib.contextmanager
    def saving(self, op: RankOp, source: torch.Tensor | None) -> Iterator[None]:
        """Context around a FORWARD that records its saved tensors; ``source`` is its input, None on the first stage."""
        forward = self._forwards[op.key] = _Forward()
        if source is not None:
            self._add_source(op, source, forward)

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Saved:
            return self._pack(tensor, forward)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
        forward.known.clear()

    def release(self, op: RankOp) -> None:
        """Before a BACKWARD: drop the references to its FORWARD's saved tensors.

        From here on only autograd's graph holds them, and frees them layer by layer.
        """
        blocks = self._forwards.pop(op.key).blocks
        if any(block.host is not None for block in blocks):
            raise RuntimeError(f"{op.label}: its activations are still on the host")
        blocks.clear()  # the graph's hooks hold the list

    def check_empty(self) -> None:
        """Raise if saved tensors are left at the end of an iteration."""
        self._reclaim(wait=True)
        if self._forwards or self.pool.used_bytes:
            raise RuntimeError(f"activations left at the end of the step: {sorted(self._forwards)}")

    def close(self) -> None:
        """Free all memory, including the host's."""
        self._reclaim(wait=True)
        self._forwards.clear()
        self._models, self._staying = (), set()
        self.pool.clear()

    # -- saved tensors ---------------------------------------------------------------------------

    def _add_source(self, op: RankOp, source: torch.Tensor, forward: _Forward) -> None:
        """Add the input as the first block: a backward with recomputation starts from it."""
        storage = source.untyped_storage()
        if storage.nbytes() < _SMALLEST_BYTES:
            return
        microbatch, piece, chunk = op.key
        before = self._forwards.get((microbatch, piece, chunk - 1))
        if before is not None and any(
            b.storage is not None and b.storage._cdata == storage._cdata for b in before.blocks
        ):
            return  # a handover on this device: the chunk before has saved it, too
        forward.blocks.append(_Block(storage, source.device, in_place=True))
        forward.known[storage._cdata] = forward.blocks[0]

    def _pack(self, tensor: torch.Tensor, forward: _Forward) -> torch.Tensor | _Saved:
        storage = tensor.untyped_storage()
        # A quantised weight of Transformer Engine has no storage of its own, but the layer's copy has.
        stays = isinstance(tensor, torch.nn.Parameter) or hasattr(tensor, "update_usage")
        stays = stays or storage._cdata in self._staying
        if stays or storage.nbytes() < _SMALLEST_BYTES or tensor.layout != torch.strided:
            return tensor
        # Recorded storages are kept alive by their blocks, so addresses are unique.
        block = forward.known.get(storage._cdata)
        if block is None:
            block = forward.known[storage._cdata] = _Block(storage, tensor.device)
            forward.blocks.append(block)
        return _Saved(block, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def store(self, op: RankOp) -> None:
        """ACT_OFFLOAD: copy a forward's share to the host and free it on the device."""
        self._reclaim(wait=False)
        weights = {c.untyped_storage()._cdata for model in self._models for c in copies_of(model)}
        blocks = [b for b in self._forwards[op.key].blocks if b.storage is not None and b.storage.nbytes()]
        blocks = [b for b in blocks if b.storage is not None and b.storage._cdata not in weights]
        left = self._ratio * sum(b.storage.nbytes() for b in blocks if b.storage is not None)
        for block in blocks:
            assert block.storage is not None
            size = block.storage.nbytes()
            if size <= left:
                left -= size
                self._copy_out(block, block.storage)

    def _copy_out(self, block: _Block, storage: torch.UntypedStorage) -> None:
        block.host = self.pool.take(storage.nbytes())
        source = _bytes(storage, block.device)
        if self._to_host is None:
            block.host.copy_(source)
        else:
            self._to_host.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._to_host):
                block.host.copy_(source, non_blocking=True)
            source.record_stream(self._to_host)  # the allocator reuses the memory only after the copy
        if block.in_place:
            storage.resize_(0)
        else:
            block.storage = None

    def fetch(self, op: RankOp) -> None:
        """ACT_FETCH: copy a forward's tensors on the host back to the device."""
        self._reclaim(wait=False)
        for block in self._forwards[op.key].blocks:
            if block.host is None:
                continue
            target = self._room(block, block.host.nbytes)
            if self._to_device is None or self._to_host is None:
                target.copy_(block.host)
                self.pool.give_back(block.host)
            else:
                self._to_device.wait_stream(self._to_host)
                self._to_device.wait_stream(torch.cuda.current_stream())  # earlier users of the memory
                with torch.cuda.stream(self._to_device):
                    target.copy_(block.host, non_blocking=True)
                target.record_stream(self._to_device)
                block.arrived = torch.cuda.Event()
                block.arrived.record(self._to_device)
                self._returning.append((block.arrived, block.host))
            block.host = None

    def _room(self, block: _Block, size: int) -> torch.Tensor:
        """Allocates memory on the device for a block that is fetched."""
        if block.in_place:
            assert block.storage is not None
            block.storage.resize_(size)
            return _bytes(block.storage, block.device)
        target = torch.empty(size, dtype=torch.uint8, device=block.device)
        block.storage = target.untyped_storage()
        return target

    def _reclaim(self, *, wait: bool) -> None:
        """Return host blocks whose copies have finished to the pool (CUDA)."""
        while self._returning and (wait or self._returning[0][0].query()):
            event, host = self._returning.pop(0)
            event.synchronize()
            self.pool.give_back(host)


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    block = saved.block
    if block.host is not None or block.storage is None:
        raise RuntimeError("a backward needs activations that are on the host: the fetch is missing")
    if block.arrived is not None:
        torch.cuda.current_stream().wait_event(block.arrived)
    empty = torch.empty(0, dtype=saved.dtype, device=block.device)
    return empty.set_(block.storage, saved.offset, saved.size, saved.stride)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """All of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def open_feature(context: feature.OpenContext) -> feature.RuntimeFeature:
    """This rank's part of the feature."""
    return ActivationOffload(float(context.options.ratio), context.platform)
