"""What the parameter window uses: bytes, collectives, and the shards' place in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class WindowUse:
    """Bytes held by a rank's window, by kind, and the collectives that it ran.

    Kinds: ``parameter`` (whole parameters of open ministages), ``shard`` (parameter shards on the
    device), ``gradient`` (whole gradients), ``gradient_shard`` (reduced, waiting for the update).
    """

    gathers: int = 0
    reductions: int = 0
    held_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_total_bytes: int = 0

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
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._on_cuda = tensor.is_cuda
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=self._on_cuda)
        self._stream = _copy_stream(tensor.device) if self._on_cuda else None
        self._fetched: torch.cuda.Event | None = None

    def store(self, tensor: torch.Tensor) -> None:
        """Copy to the host and free the tensor on the device."""
        if self._stream is None:
            self._host.copy_(tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)  # not handed out again before the copy has read it
        tensor.untyped_storage().resize_(0)

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

    def wait(self) -> None:
        """Order the current stream after the last ``fetch``."""
        if self._fetched is not None:
            torch.cuda.current_stream().wait_event(self._fetched)
            self._fetched = None


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for all copies between host and device."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]
