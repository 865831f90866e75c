"""The tokens after the next one, for passes that run parts of sequences.

Megatron moves the tokens of a pass one place to the left, so that the last place has none.  Over a slice, or a
context-parallel rank's part, that would be one token missing at the end of every part.  Here whole sequences are moved,
before they are cut: the rank that reads has all tokens of them, and tells its TP group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_WHOLE = ("tokens", "position_ids", "labels")


@dataclass(frozen=True, slots=True)
class LaterTokens:
    """Holds what the layers of a pass read and predict; the first index is the layer.

    Attributes:
        tokens, positions: ``[layers, b, s]``: what each layer embeds.
        labels: ``[layers, b, s]``: what it predicts.
        masks: ``[layers, b, s]``: 1 where a prediction counts.
        counts: ``[1 + layers]``: tokens of the whole microbatch that count for the model's loss, then for each layer's.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    masks: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Any], layers: int, *, are_packed: bool) -> LaterTokens:
        """Those of whole sequences.

        Args:
            batch: ``tokens``, ``position_ids``, ``labels`` and ``loss_mask``, all ``[b, s]``.
            layers: Tokens after the next one that are predicted.
            are_packed: Whether a document ends where the next position is 0, and with it what is predicted of it; else
                predictions go on into the next document.
        """
        begins = batch["position_ids"] == 0 if are_packed else torch.zeros_like(batch["tokens"], dtype=torch.bool)
        ends = begins.roll(-1, dims=1)
        ends[:, -1] = True
        whole, mask = torch.stack([batch[name] for name in _WHOLE]), batch["loss_mask"].float()
        moved, masks = [], [mask]
        for _ in range(layers):
            whole, mask = (tensor.roll(-1, dims=-1).masked_fill(ends, 0) for tensor in (whole, mask))
            moved.append(whole)
            masks.append(mask)
        tokens, positions, labels = torch.stack(moved, dim=1)
        return cls(tokens, positions, labels, torch.stack(masks[1:]), torch.stack([mask.sum() for mask in masks]))

    def part(self, take: Callable[[torch.Tensor], torch.Tensor]) -> LaterTokens:
        """Those of a part of the sequences.

        Args:
            take: Gives the part's tokens of a tensor whose last dimension is that of whole sequences.
        """
        tokens, positions, labels, masks = map(take, (self.tokens, self.positions, self.labels, self.masks))
        return LaterTokens(tokens, positions, labels, masks, self.counts)


def told(
    own: LaterTokens | None, shape: tuple[int, int, int], group: dist.ProcessGroup, device: torch.device
) -> LaterTokens:
    """Returns what the first rank of a TP group knows.  Collective.

    Args:
        own: On the first rank.
        shape: ``[layers, b, s]``.
        group: The TP group.
        device: What this rank computes on.
    """
    if group.size() == 1:
        assert own is not None
        return own
    if own is None:
        whole = torch.empty((len(_WHOLE), *shape), dtype=torch.int64, device=device)
        weights = torch.empty(shape[0] * shape[1] * shape[2] + 1 + shape[0], device=device)
    else:
        whole = torch.stack((own.tokens, own.positions, own.labels))
        weights = torch.cat((own.masks.flatten(), own.counts))
    source = dist.get_global_rank(group, 0)
    dist.broadcast(whole, source, group=group)
    dist.broadcast(weights, source, group=group)
    masks, counts = weights.split((weights.numel() - 1 - shape[0], 1 + shape[0]))
    tokens, positions, labels = whole
    return LaterTokens(tokens, positions, labels, masks.view(shape), counts)
