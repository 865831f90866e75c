"""The softmax offset of a head, also called its sink: the score of a further key, whose value is zero."""

from __future__ import annotations

import torch


def add_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with the sinks among the keys.

    Args:
        out: ``[s, b, heads, d]``, of all other keys.
        lse: ``[b, heads, s]``, likewise.
        sink: ``heads`` scores.

    Returns:
        Output, in a wide type, and log-sum-exp.
    """
    score = sink.detach().to(lse.dtype).view(1, -1, 1)
    weight = torch.sigmoid(lse - score).permute(2, 0, 1).unsqueeze(-1)
    wide = torch.promote_types(out.dtype, torch.float32)
    return out.to(wide) * weight.to(wide), torch.logaddexp(lse, score.expand_as(lse))


def sink_gradient(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Gradient of the sinks, from the output and log-sum-exp with them and the gradient of that output."""
    wide = torch.promote_types(out.dtype, torch.float32)
    score = sink.detach().to(lse.dtype).view(1, -1, 1)
    share = torch.exp(score - lse).permute(2, 0, 1).to(wide)
    gradient = -(share * (grad.to(wide) * out.to(wide)).sum(dim=-1)).sum(dim=(0, 1))
    return gradient.to(sink.dtype).view_as(sink)
