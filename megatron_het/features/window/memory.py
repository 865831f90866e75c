"""What the parameter window uses: bytes, collectives, and the shards' place in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megatron_het.device.memory import uncounted
from megatron_het.device.simulated import is_simulated


class Streams:
    """One CUDA stream per device and purpose, made when it is first asked for."""

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

    Kinds: ``parameter`` (whole parameters of open ministages), ``shard`` (parameter shards on the
    device), ``gradient`` (whole gradients), ``gradient_shard`` (reduced, waiting for the update), and
    ``optimizer`` (its state on the device, when it is offloaded between updates).

    Attributes:
        streams: The CUDA streams of this window; they go with it.
    """

    gathers: int = 0
    reductions: int = 0
    held_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_total_bytes: int = 0
    streams: Streams = field(default_factory=Streams)

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
    """A tensor's place in host memory (pinned, for a CUDA tensor, and copied on an own stream).

    Args:
        tensor: The tensor; its storage is freed by ``store`` and allocated again by ``fetch``.
        streams: Of the window.
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
        """A copy of what was stored last, on a device; after ``fetch`` and ``wait``, where the tensor was freed."""
        assert self._is_ordered, "the copy to the host may still run"
        return self._host.to(device, non_blocking=True)

    def wait(self) -> None:
        """Order the current stream after the last ``fetch``."""
        if self._fetched is not None:
            torch.cuda.current_stream().wait_event(self._fetched)
            self._fetched = None
            self._is_ordered = True  # one stream makes all copies


class SideStream:
    """A stream beside the one that computes, on which the next ministage is opened.

    On the CPU it does nothing.  Tensors are allocated and freed in the order of the computing
    stream: entering orders the side stream after what the computing stream has been given so far,
    and ``join`` orders the computing stream after the side stream.

    Args:
        device: Where the tensors are.
        streams: Of the window.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._stream = streams.of(device, "open")

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """What runs inside is queued on the side stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event behind what the side stream has been given so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self) -> None:
        """Order the computing stream after the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def uses(self, tensor: torch.Tensor) -> None:
        """A tensor that may be let go of while the side stream still reads it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
