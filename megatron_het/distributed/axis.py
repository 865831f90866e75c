"""A position along a parallel axis that has no communicator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Axis:
    """Stands where Megatron expects a process group but only asks for rank and size.

    The pipeline axis of a heterogeneous plan is an Axis: stages have different numbers of ranks,
    so there is no group with one rank per stage, and a stray collective on the axis fails at once
    instead of hanging.

    Attributes:
        position: Of this rank, that of its first chunk.
        length: Number of positions.
        by_chunk: Of every chunk of this rank, where they differ or other ranks have more chunks; empty where all
            chunks have one position.
    """

    position: int
    length: int
    by_chunk: tuple[int, ...] = ()

    def of_chunk(self, chunk: int) -> Axis:
        """The axis as one chunk of this rank sees it."""
        return Axis(self.by_chunk[chunk], self.length, self.by_chunk) if self.by_chunk else self

    def rank(self) -> int:
        """This rank's position."""
        return self.position

    def size(self) -> int:
        """Number of positions."""
        return self.length

    @contextlib.contextmanager
    def known_to_torch(self) -> Iterator[None]:
        """Let ``torch.distributed.get_rank`` say this rank's position for as long as the block lasts.

        Megatron's hybrid models ask it, and not the group.
        """
        import torch.distributed as dist

        ranks: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks
        ranks[self] = {dist.get_rank(): self.position}
        try:
            yield
        finally:
            del ranks[self]
