"""Three steps of a fixed tiny model on one device, whose losses are stored here.

Nothing is drawn and nothing is asked of Megatron: a device, a driver or a library that computes wrongly shows on
whatever rank has it, also where all kinds of devices of the job are wrong in the same way.
"""

from __future__ import annotations

import math
from typing import Any

LOSSES = (2.988096077980702, 1.921796714504176, 1.542753363577767)
"""In double precision."""
_TOKENS, _HIDDEN, _STEP = 48, 32, 0.1
_SCALE = 2.5  # of the weights: large enough that what the model computes decides the loss


def losses(device: Any, dtype: Any) -> list[float]:
    """Losses of causal attention and an MLP, computed in ``dtype``, with plain gradient descent in at least fp32.

    Args:
        device: A torch device.
        dtype: Of the matrix products.
    """
    import torch

    kept = torch.promote_types(dtype, torch.float32)

    def fixed(rows: int, columns: int, turn: float) -> torch.Tensor:
        """Numbers that look random, the same on all devices: made on the host in double precision."""
        return torch.sin(turn * torch.arange(1, rows * columns + 1, dtype=torch.float64) ** 1.3).reshape(rows, columns)

    inputs, target = (fixed(_TOKENS, _HIDDEN, turn).to(device, kept) for turn in (0.7, 1.9))
    shapes = ((_HIDDEN, 3 * _HIDDEN), (_HIDDEN, 2 * _HIDDEN), (2 * _HIDDEN, _HIDDEN))
    weights = [
        (fixed(rows, columns, 0.3 + i) * _SCALE / math.sqrt(rows)).to(device, kept).requires_grad_()
        for i, (rows, columns) in enumerate(shapes)
    ]
    future = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=device).triu(1)
    found = []
    for _ in LOSSES:
        qkv, up, down = (weight.to(dtype) for weight in weights)
        query, key, value = (inputs.to(dtype) @ qkv).chunk(3, dim=1)
        scores = (query @ key.T / math.sqrt(_HIDDEN)).to(kept).masked_fill(future, -math.inf)
        attended = scores.softmax(dim=1).to(dtype) @ value
        out = torch.nn.functional.silu(attended @ up) @ down
        loss = (out.to(kept) - target).square().mean()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(_STEP * gradient)
        found.append(loss.item())
    return found
