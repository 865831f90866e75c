"""One ministage's parameters and gradients: sharded when closed, gathered while it is open.

Built on the buffers of Megatron's DDP.  A buffer's storage is freed and allocated again under its
views, so modules, autograd and optimizer keep their tensors.  While a ministage is closed, only
the rank's shard of every bucket stays in memory.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.device.memory import uncounted
from megatron_het.device.simulated import is_simulated
from megatron_het.features.window.shards import Pending, layer_of, num_layers_of, parts_of
from megatron_het.runtime.executor import drop_copies

# Resources of the parameter window: bytes, collectives, and host copies of shards.


class Streams:
    """One CUDA stream per device and purpose, created lazily."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def of(self, device: torch.device, purpose: str) -> torch.cuda.Stream | None:
        """The stream for a purpose; None on the CPU."""
        if device.type != "cuda":
            return None
        key = device, purpose
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)
        return self._streams[key]


@dataclass
class WindowUse:
    """Bytes held by a rank's window, by kind, and the collectives that it ran.

    Kinds: ``parameter`` (gathered parameters of open ministages), ``shard`` (parameter shards on the
    device), ``gradient`` (gradients before reduction), ``gradient_shard`` (reduced, waiting for the update), and
    ``optimizer`` (its state on the device, when it is offloaded between updates).
    """

    gathers: int = 0
    reductions: int = 0
    held_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_total_bytes: int = 0
    streams: Streams = field(default_factory=Streams)  # the CUDA streams of this window
    ends_when_waited_for: bool = False  # whether reductions count as unfinished until something waits for them

    def add(self, kind: str, count: int) -> None:
        """Account for ``count`` more (or, negative, fewer) bytes of a kind."""
        self.held_bytes[kind] = self.held_bytes.get(kind, 0) + count
        self.peak_bytes[kind] = max(self.peak_bytes.get(kind, 0), self.held_bytes[kind])
        self.peak_total_bytes = max(self.peak_total_bytes, sum(self.held_bytes.values()))

    def restart(self) -> None:
        """Count collectives and peaks from here on."""
        self.gathers = self.reductions = 0
        self.peak_bytes = dict(self.held_bytes)
        self.peak_total_bytes = sum(self.held_bytes.values())

    def as_json(self) -> dict[str, int]:
        """Figures since the last restart."""
        return {
            "gathers": self.gathers,
            "reductions": self.reductions,
            "peak_bytes": self.peak_total_bytes,
            **{f"peak_{kind}_bytes": count for kind, count in sorted(self.peak_bytes.items())},
        }


class HostCopy:
    """A tensor's copy in host memory (pinned for a CUDA tensor, and copied on a stream of its own).

    Args:
        tensor: The tensor; its storage is freed by ``store`` and allocated again by ``fetch``.
    """

    def __init__(self, tensor: torch.Tensor, streams: Streams) -> None:
        pinned = tensor.is_cuda or is_simulated()
        with uncounted():
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        self._stream = streams.of(tensor.device, "copy")
        self._fetched: torch.cuda.Event | None = None
        self._is_ordered = True
        """Whether the stream that computes has waited for the last copy to the host."""

    @torch.no_grad()
    def store(self, tensor: torch.Tensor, *, free: bool = True) -> None:
        """Copy to the host; ``free`` the tensor on the device, or let it be changed at once."""
        if self._stream is None:
            self._host.copy_(tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._host.copy_(tensor, non_blocking=True)
            if free:
                tensor.record_stream(self._stream)  # not handed out before the copy has read it
            else:
                torch.cuda.current_stream().wait_stream(self._stream)
        self._is_ordered = self._stream is None or not free
        if free:
            memory = tensor.untyped_storage()
            assert memory.size() == tensor.nbytes, "memory that other tensors share cannot be freed for one of them"
            memory.resize_(0)

    @torch.no_grad()
    def fetch(self, tensor: torch.Tensor) -> None:
        """Allocate the tensor on the device and start the copy; ``wait`` before use."""
        tensor.untyped_storage().resize_(tensor.nbytes)
        if self._stream is None:
            tensor.copy_(self._host)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            tensor.copy_(self._host, non_blocking=True)
            self._fetched = torch.cuda.Event()
            self._fetched.record(self._stream)

    @torch.no_grad()
    def restore(self, tensor: torch.Tensor) -> None:
        """Copy back into a tensor that is on the device, after a ``store`` that has not freed it."""
        assert self._is_ordered, "the copy to the host may still run"
        tensor.copy_(self._host, non_blocking=True)

    def read(self, device: torch.device) -> torch.Tensor:
        """The last stored contents as a tensor on ``device``; call ``fetch`` and ``wait`` first if it was freed."""
        assert self._is_ordered, "the copy to the host may still run"
        return self._host.to(device, non_blocking=True)

    def wait(self) -> None:
        """Order the current stream after the last ``fetch``."""
        if self._fetched is not None:
            torch.cuda.current_stream().wait_event(self._fetched)
            self._fetched = None
            self._is_ordered = True  # one stream makes all copies


class SideStream:
    """A second CUDA stream, on which the next ministage is opened while the compute stream runs.

    On the CPU it does nothing.  Tensors are allocated and freed in the order of the compute
    stream: entering orders the side stream after the work queued on the compute stream so far,
    and ``join`` orders the compute stream after the side stream.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._stream = streams.of(device, "open")

    def following(self) -> contextlib.AbstractContextManager[Any]:
        """A context whose work is queued on the side stream."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event after the work queued on the side stream so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self) -> None:
        """Order the compute stream after the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def uses(self, tensor: torch.Tensor) -> None:
        """Protect a tensor that may be freed while the side stream still reads it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


_ATTRIBUTE = "het_window"


@dataclass
class Bucket:
    """A bucket of Megatron's buffers, which is one layer of the ministage."""

    source: Any  # Megatron's bucket, with ``param_data`` and ``grad_data``
    layer: int  # index of the layer within the ministage
    shard: torch.Tensor  # this rank's part of the parameters; for a resident ministage a view of the buffer
    gradient: torch.Tensor | None = None  # this rank's part of the reduced gradients, from the reduction to the update
    host: HostCopy | None = None  # the shard's place in host memory, with offload
    gathering: Pending | torch.cuda.Event | None = None
    reducing: Pending | None = None
    is_reduced: bool = False  # the whole gradients have been given to a reduction


@dataclass(eq=False)
class ChunkWindow:
    """The window over one model chunk.

    Args:
        ddp: The chunk in Megatron's DDP, with layered buffers.
        offload: Keep shards in host memory while the chunk is closed.
        use: Where bytes and collectives are counted.
        of_experts: Whether to take the experts whose copies are on other ranks than those of all other weights, alone.
    """

    ddp: Any
    offload: bool
    use: WindowUse
    of_experts: bool = False
    buckets: list[Bucket] = field(default_factory=list)
    is_open: bool = False
    has_gradients: bool = False
    _hooks: list[Any] = field(default_factory=list)
    _is_loading: bool = False

    def __post_init__(self) -> None:
        ddp, of_experts = self.ddp, self.of_experts
        self.group: dist.ProcessGroup = ddp.intra_expt_dp_group if of_experts else ddp.intra_dp_cp_group
        # none in a ministage without such weights
        self.buffers: list[Any] = ddp.expert_parallel_buffers if of_experts else ddp.buffers
        buffers, self.parts = self.buffers, parts_of(self.buffers, self.group)
        self.side = SideStream(buffers[0].param_data.device if buffers else torch.device("cpu"), self.use.streams)
        # A rank that is alone in its group owns every bucket entirely: without offload there is
        # nothing to free.
        self.is_resident = self.group.size() == 1 and not self.offload
        names = {p: name for name, p in self.ddp.module.named_parameters()}
        count = num_layers_of(self.ddp.module)
        for buffer in self.buffers:
            for source in buffer.buckets:
                layer = layer_of(names[source.params_list[0]], count)
                self.buckets.append(Bucket(source, layer, self.parts.own(source.param_data)))
            buffer.reset = lambda: None  # the original would write to freed memory; gradients are zeroed when allocated
            setattr(buffer, _ATTRIBUTE, self)
        self.buckets.sort(key=lambda bucket: bucket.layer)
        self._wait_before_use()
        self._open_while_loading()
        for bucket in self.buckets:
            if not self.is_resident:
                bucket.shard = bucket.shard.clone()
                self.use.add("shard", bucket.shard.nbytes)
            if self.offload:
                bucket.host = HostCopy(bucket.shard, self.use.streams)
        self.is_open = True
        self.use.add("parameter", self._bytes("param_data"))
        self.use.add("gradient", self._bytes("grad_data"))
        self.has_gradients = True

    # -- parameters ----------------------------------------------------------------------------

    def fetch(self) -> None:
        """Bring the shards to the device, if they are in host memory."""
        for bucket in self.buckets:
            if bucket.host is not None and bucket.shard.untyped_storage().size() == 0:
                bucket.host.fetch(bucket.shard)
                self.use.add("shard", bucket.shard.nbytes)

    def store(self) -> None:
        """Bring the shards to host memory and free them on the device."""
        for bucket in self.buckets:
            if bucket.host is not None and bucket.shard.untyped_storage().size():
                bucket.host.store(bucket.shard)
                self.use.add("shard", -bucket.shard.nbytes)

    def open(self) -> None:
        """Allocate the full parameters; ``gather`` fills them."""
        if self.is_open:
            return
        self.is_open = True
        if not self.is_resident:
            for buffer in self.buffers:
                _allocate(buffer.param_data)
        self.use.add("parameter", self._bytes("param_data"))

    @torch.no_grad()
    def gather(self, start: int, stop: int) -> None:
        """Start the all-gather of layers ``[start, stop)``; -1 stands for all."""
        with self.side.following():
            for bucket in self._selected(start, stop):
                if bucket.host is not None:
                    bucket.host.wait()
                if self.group.size() > 1:
                    self.use.gathers += 1
                    bucket.gathering = self.parts.gather(bucket.source.param_data, bucket.shard)
                    continue
                if not self.is_resident:
                    bucket.source.param_data.copy_(bucket.shard)
                bucket.gathering = self.side.mark()

    def wait(self) -> None:
        """Wait for all gathers that were started."""
        _wait_gathers(self.buckets)

    def close(self) -> None:
        """Free the full parameters; the shards stay."""
        if not self.is_open:
            return
        self.wait()
        self.is_open = False
        self.use.add("parameter", -self._bytes("param_data"))
        if not self.is_resident:
            drop_copies(self.ddp.module)  # they would outlive the weights
            for buffer in self.buffers:
                buffer.param_data.untyped_storage().resize_(0)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Full parameters inside the block, in which only this rank's parts have their contents."""
        if self.is_open:
            yield
            return
        self._show_own()
        yield
        self.close()
        self.store()

    @torch.no_grad()
    def _show_own(self) -> None:
        """Open the chunk with the contents of this rank's parts only."""
        self.fetch()
        self.open()
        for bucket in self.buckets:
            if bucket.host is not None:
                bucket.host.wait()
            if not self.is_resident:
                self.parts.own(bucket.source.param_data).copy_(bucket.shard)

    @torch.no_grad()
    def take_shards(self) -> None:
        """Copy this rank's parts of the open parameters into the shards, after a state was loaded."""
        if not self.is_open or self.is_resident:
            return
        for bucket in self.buckets:
            if not bucket.shard.untyped_storage().size():
                _allocate(bucket.shard)
                self.use.add("shard", bucket.shard.nbytes)
            bucket.shard.copy_(self.parts.own(bucket.source.param_data))

    # -- gradients -----------------------------------------------------------------------------

    def open_gradients(self) -> None:
        """Allocate zeroed gradients for the backward of this chunk."""
        if self.has_gradients:
            return
        self.has_gradients = True
        for buffer in self.buffers:
            _allocate(buffer.grad_data)
            buffer.grad_data.zero_()
        self.use.add("gradient", self._bytes("grad_data"))

    @torch.no_grad()
    def reduce(self, start: int, stop: int) -> None:
        """Start the reduce-scatter of the gradients of layers ``[start, stop)``; -1 stands for all."""
        for bucket in self._selected(start, stop):
            bucket.is_reduced = True
            if self.group.size() > 1:
                self.use.reductions += 1
                bucket.reducing = self.parts.reduce(bucket.source.grad_data)

    def has_reduced(self, start: int, stop: int) -> bool:
        """Whether a reduction of layers ``[start, stop)`` has been started and ``keep_gradient_shards`` not called."""
        return any(bucket.is_reduced for bucket in self._selected(start, stop))

    def is_reducing(self) -> bool:
        """Whether a reduction has been started and is not finished."""
        under_way = (b.reducing for b in self.buckets if b.reducing is not None)
        return any(self.use.ends_when_waited_for or not reducing.is_completed() for reducing in under_way)

    def keep_gradient_shards(self) -> None:
        """Finish the reductions, add to this rank's shards and free the full gradients."""
        for bucket in self.buckets:
            if bucket.reducing is not None:
                bucket.reducing.wait()
                bucket.reducing = None
            bucket.is_reduced = False
            reduced = self.parts.own(bucket.source.grad_data)
            if bucket.gradient is not None:  # of the passes before this one
                bucket.gradient += reduced
                continue
            bucket.gradient = reduced.clone()
            self.use.add("gradient_shard", bucket.gradient.nbytes)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the full gradients."""
        if not self.has_gradients:
            return
        self.has_gradients = False
        self.use.add("gradient", -self._bytes("grad_data"))
        for buffer in self.buffers:
            buffer.grad_data.untyped_storage().resize_(0)

    def drop_gradient_shards(self) -> None:
        """Free the gradient shards after an update or a skipped update."""
        for bucket in self.buckets:
            if bucket.gradient is not None:
                self.use.add("gradient_shard", -bucket.gradient.nbytes)
                bucket.gradient = None

    # -- life ----------------------------------------------------------------------------------

    def dispose(self) -> None:
        """Give the chunk back to Megatron without contents: buffers, shards and host memory are freed.

        The tensors stay, with empty storages; read the parameters before, if they are needed.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for bucket in self.buckets:
            if bucket.reducing is not None:
                bucket.reducing.wait()
                bucket.reducing = None
        self.close()
        self.drop_gradients()
        self.drop_gradient_shards()
        for buffer in self.buffers:
            buffer.param_data.untyped_storage().resize_(0)
            del buffer.reset  # the class's own method again
            delattr(buffer, _ATTRIBUTE)
        for bucket in self.buckets:
            if not self.is_resident and bucket.shard.untyped_storage().size():
                self.use.add("shard", -bucket.shard.nbytes)
                bucket.shard.untyped_storage().resize_(0)
            bucket.host = None

    # -- helpers -------------------------------------------------------------------------------

    def _selected(self, start: int, stop: int) -> list[Bucket]:
        return [b for b in self.buckets if start < 0 or start <= b.layer < stop]

    def _bytes(self, name: str) -> int:
        return sum(getattr(buffer, name).nbytes for buffer in self.buffers)

    def _wait_before_use(self) -> None:
        """Install hooks by which every module waits for its own bucket only, so that compute starts early."""
        owner = {p: bucket for bucket in self.buckets for p in bucket.source.params_list}
        for module in self.ddp.module.modules():
            mine = {id(b): b for p in module.parameters(recurse=False) if (b := owner.get(p))}
            if mine:
                self._hooks.append(
                    module.register_forward_pre_hook(functools.partial(_wait_gathers, list(mine.values())))
                )

    def _open_while_loading(self) -> None:
        """Install hooks that open the module for its ``load_state_dict`` and take this rank's parts afterwards."""
        module = self.ddp.module
        while hasattr(module, "module"):  # of 16 bits
            module = module.module

        def begin(*_unused: Any) -> None:
            self._is_loading = not self.is_open
            if self._is_loading:
                self._show_own()

        def end(*_unused: Any) -> None:
            if self._is_loading:
                self._is_loading = False
                self.take_shards()
                self.close()
                self.store()

        self._hooks.append(module.register_load_state_dict_pre_hook(begin))
        self._hooks.append(module.register_load_state_dict_post_hook(end))


def window_of(buffer: Any) -> ChunkWindow | None:
    """The window over one of Megatron's buffers, if there is one."""
    return getattr(buffer, _ATTRIBUTE, None)


def _wait_gathers(buckets: Iterable[Bucket], *_unused: Any) -> None:
    """Wait for the started gathers of some buckets; the forward pre-hook of modules."""
    for bucket in buckets:
        if bucket.gathering is not None:
            bucket.gathering.wait()
            bucket.gathering = None


def _allocate(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.nbytes)


# The distributed optimizer over ministages that are closed already.
#
# Upstream copies the main parameters of all chunks out of their full parameters at once.  Here a chunk
# is open only while its own are copied, so that a stage need not fit into the device's memory.  Buffers
# without a window are left to upstream.


def chunk_by_chunk(original: type) -> type:
    """The distributed optimizer that builds its main parameters chunk by chunk."""

    class ChunkwiseDistributedOptimizer(original):
        """``DistributedOptimizer`` whose constructor opens one ministage at a time."""

        def _build_model_and_main_param_groups(
            self,
            gbuf_ranges: list[Any],
            param_gbuf_map: dict[Any, Any],
            opt_group_ranges: list[dict[str, Any]],
            config: Any,
        ) -> tuple[list[list[Any]], ...]:
            build = super()._build_model_and_main_param_groups
            windows = [window_of(buffer) for buffer in self.buffers]
            if not any(windows):
                return build(gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
            # Upstream's groups list parameters in the order of the buffers, hence of the chunks.
            merged: list[list[list[Any]]] = []
            optimized: list[list[Any]] = [[] for _ in opt_group_ranges]
            for window in dict.fromkeys(windows):
                part: list[dict[str, Any]] = [
                    {
                        "params": [p for p in group["params"] if windows[param_gbuf_map[p][0]] is window],
                        "orig_group": {},
                    }
                    for group in opt_group_ranges
                ]
                with contextlib.nullcontext() if window is None else window.lent():
                    found = build(gbuf_ranges, param_gbuf_map, part, config)
                merged = merged or [[[] for _ in opt_group_ranges] for _ in found]
                for kinds, groups in zip(merged, found, strict=True):
                    for members, more in zip(kinds, groups, strict=True):
                        members.extend(more)
                for members, group in zip(optimized, part, strict=True):
                    members.extend(group["orig_group"]["params"])
            for group, members in zip(opt_group_ranges, optimized, strict=True):
                group["orig_group"]["params"] = members
            return tuple(merged)

    ChunkwiseDistributedOptimizer.__qualname__ = original.__qualname__
    return ChunkwiseDistributedOptimizer
