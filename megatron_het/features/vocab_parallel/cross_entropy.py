"""Cross entropy from logits that are split over the vocabulary (SlimPipe, section 4.3.2).

Every rank reduces its part of the logits to three numbers per token: the largest logit, the sum of
the exponentials relative to it, and the target's logit where the rank has it.  Merging these of all
parts gives the loss; the log-sum-exp and the loss's gradient, two numbers per token, sent back, give
every rank the gradient of its logits.  All of it in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

STATISTICS = 3
"""Rows of a part's statistics: maximum, sum of exponentials relative to it, target logit (0 elsewhere)."""


class ShardLogits:
    """One rank's part of the logits of a slice, from forward to backward.

    Args:
        logits: ``[s, b, rows]``, detached; overwritten when they are fp32 already.
        labels: Target ids ``[s, b]``.
        first: Vocabulary id of the first row.
    """

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, first: int) -> None:
        rows = logits.shape[-1]
        self._here = (labels >= first) & (labels < first + rows)
        self._index = torch.where(self._here, labels - first, 0).unsqueeze(-1)
        wide = logits.float()
        target = wide.gather(-1, self._index).squeeze(-1) * self._here
        self._maximum = wide.amax(dim=-1)
        self._exponentials = wide.sub_(self._maximum.unsqueeze(-1)).exp_()
        self.statistics = torch.stack((self._maximum, self._exponentials.sum(dim=-1), target))

    def gradient(self, log_sum: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of this part's logits; uses them up.

        Args:
            log_sum: Log-sum-exp over the whole vocabulary, ``[s, b]``.
            grad: Gradient of the token losses, ``[s, b]``.

        Returns:
            ``[s, b, rows]`` in fp32: (softmax - one-hot) times ``grad``.
        """
        scale = (self._maximum - log_sum).exp_().mul_(grad)
        found = self._exponentials.mul_(scale.unsqueeze(-1))
        return found.scatter_add_(-1, self._index, -(grad * self._here).unsqueeze(-1))


def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Statistics of several parts together.

    Args:
        parts: Statistics ``[3, s, b]`` of disjoint parts of the vocabulary.

    Returns:
        Statistics of their union, ``[3, s, b]``.
    """
    stacked = torch.stack(tuple(parts))
    maximum = stacked[:, 0].amax(dim=0)
    total = (stacked[:, 1] * (stacked[:, 0] - maximum).exp()).sum(dim=0)
    return torch.stack((maximum, total, stacked[:, 2].sum(dim=0)))


def log_sum_exp(statistics: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp over the vocabulary that statistics ``[3, s, b]`` describe: ``[s, b]``."""
    return statistics[0] + statistics[1].log()


def token_losses(statistics: torch.Tensor) -> torch.Tensor:
    """Losses ``[s, b]`` of the tokens, from statistics of the whole vocabulary."""
    return log_sum_exp(statistics) - statistics[2]
