"""Where the documents of an iteration begin.

Megatron's datasets count positions anew with every document (``--reset-position-ids``, or documents as the dataset
knows them), so a document begins where a position is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

Starts = tuple[int, ...]


def starts_of(positions: torch.Tensor) -> tuple[Starts, ...]:
    """Where documents begin.

    Args:
        positions: ``[b, s]``, 0 at the first token of a document.

    Returns:
        Of each sequence; the first document begins at token 0, wherever in the text that is.
    """
    return tuple(tuple(sorted({0, *row.nonzero().flatten().tolist()})) for row in positions == 0)


class DocumentStarts:
    """Where the documents of the microbatches of one iteration begin.

    Args:
        keeps_positions: Whether the training script sees positions that begin anew with every document.
    """

    def __init__(self, keeps_positions: bool) -> None:
        self._keeps_positions = keeps_positions
        self._starts: dict[int, tuple[Starts, ...]] = {}
        self._begins: torch.Tensor | None = None
        self._sequences: Callable[[int], int] = lambda _: 0

    def note(self, microbatch: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """See where the documents of a batch begin.

        Args:
            microbatch: Its index.
            batch: As the dataset gave it, on the host; ``position_ids`` is ``[b, s]``.

        Returns:
            The batch with the positions that the training script asked for.

        Raises:
            ValueError: There are no positions, or not of whole sequences.
        """
        positions = batch.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            raise ValueError(
                "packed documents: a batch has no position_ids [b, s], by which documents are known; "
                f"it has {', '.join(sorted(batch))}"
            )
        self._starts[microbatch] = starts_of(positions)
        if self._keeps_positions:
            return batch
        return {**batch, "position_ids": torch.arange(positions.shape[1]).expand_as(positions).contiguous()}

    def of(self, microbatch: int) -> tuple[Starts, ...]:
        """Where the documents of each sequence of a microbatch begin."""
        if microbatch not in self._starts:
            assert self._begins is not None, "no batch was noted and none exchanged"
            begins = self._begins[microbatch, : self._sequences(microbatch)]
            self._starts[microbatch] = starts_of(1 - begins)
        return self._starts[microbatch]

    def exchange(
        self, microbatches: int, sequences: Callable[[int], int], seq_length: int, device: torch.device
    ) -> None:
        """Tell all ranks, and forget the iteration before.  Collective.

        Args:
            microbatches: Of the iteration; each has been noted on some rank.
            sequences: How many sequences a microbatch has.
            seq_length: Tokens of a sequence.
            device: What collectives of all ranks run on.
        """
        most = max(map(sequences, range(microbatches)))
        begins = torch.zeros((microbatches, most, seq_length), dtype=torch.uint8)
        for microbatch, starts in self._starts.items():
            for i, own in enumerate(starts):
                begins[microbatch, i, list(own)] = 1
        begins = begins.to(device)
        dist.all_reduce(begins, op=dist.ReduceOp.MAX)
        # Each is decoded when it is asked for: a rank needs its own microbatches only.
        self._begins, self._sequences = begins.cpu(), sequences
        self._starts.clear()

    def clear(self) -> None:
        """A new iteration begins."""
        self._starts.clear()
        self._begins = None
