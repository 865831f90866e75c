"""Operations in a communicator's queue, and the error for operations that NCCL would not run."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes


class OrderError(RuntimeError):
    """Operations that NCCL would not run, or would run wrongly; the message names them."""


@dataclass(slots=True, eq=False)
class Item:
    """One entry of a communicator's queue: a collective, a transfer, or a batch of transfers."""

    communicator: str  # name of the queue
    what: str  # operation and peer, for messages
    inputs: tuple[torch.Tensor, ...]  # tensors that the operation reads
    outputs: tuple[torch.Tensor, ...] = ()  # tensors that the operation writes
    number: int = -1  # position in the launch order of this rank
    waited: bool = False  # whether the compute stream is ordered after this operation
    after: tuple[Item, ...] = ()  # operations that must end before this one starts
    posted_s: float = field(default_factory=time.monotonic)
    started: bool = False
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)
    contents: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the operation has ended without an error, and the compute stream is ordered after it."""
        return self.waited and self.done.is_set() and self.error is None

    def remember(self) -> None:
        """Store checksums of the inputs."""
        with _disable_current_modes():
            self.contents = tuple(map(_digest, self.inputs))

    def check_unchanged(self) -> None:
        """Raises OrderError when an input has changed since ``remember``."""
        if self.contents and self.contents != tuple(map(_digest, self.inputs)):
            raise OrderError(
                f"{self.communicator}: a tensor of {self.what} was written to between its post and its run; "
                "wait for the operation before the tensor is used again"
            )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(tensor: torch.Tensor) -> int:
    """Checksum of a tensor's bits; without numpy, whose view would make the storage impossible to resize."""
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return int(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))
