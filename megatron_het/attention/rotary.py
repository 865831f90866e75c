"""Rotary positions of a slice, applied by the node of its attention.

Megatron makes cosines and sines anew for the queries and the keys of every layer, and autograd follows ten small
operations for each of them.  A slice pays that once per layer, however short it is.  Here the cosines and sines of the
whole sequence are made once; a slice takes views of them, and a rotation is undone in the backward by three operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_het.families import family_of_model
from megatron_het.plan.parts import Blocks

# The tokens of some blocks of a sequence.


def take_blocks(tensor: torch.Tensor, blocks: Blocks, dim: int) -> torch.Tensor:
    """The tokens of some blocks; a view if there is only one."""
    parts = [tensor.narrow(dim, first, end - first) for first, end in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def held_before(blocks: Blocks, token: int) -> int:
    """How many tokens of some blocks come before a token."""
    return sum(min(max(token - first, 0), end - first) for first, end in blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosines and sines of some tokens.

    Attributes:
        cos: ``[s, 1, 1, r]`` in the type of queries and keys, of which the first ``r`` channels are rotated.
        sin: The same of the sines.
        interleaved: Whether neighbouring channels are a pair; otherwise a pair is half of ``r`` apart.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def turn(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rotate ``[s, b, heads, d]`` by its positions; a new tensor."""
        sines = self._halves(self.sin)
        return self._turned(tensor, (sines[0], -1.0), (sines[1], 1.0))

    def turn_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of what was rotated, of that of the result; a new tensor."""
        sines = self._halves(self.sin)
        return self._turned(gradient, (sines[1], 1.0), (sines[0], -1.0))

    def _turned(
        self, tensor: torch.Tensor, first: tuple[torch.Tensor, float], second: tuple[torch.Tensor, float]
    ) -> torch.Tensor:
        """``tensor * cos``, to each half of which the other one is added, times a sine and a factor."""
        width = self.cos.shape[-1]
        if width == tensor.shape[-1]:
            out = turned = tensor * self.cos
        else:
            out = tensor.clone(memory_format=torch.contiguous_format)
            tensor, turned = tensor[..., :width], out[..., :width]
            turned.mul_(self.cos)
        halves = zip(self._halves(turned), reversed(self._halves(tensor)), (first, second), strict=True)
        for half, other, (sine, factor) in halves:
            half.addcmul_(other, sine, value=factor)
        return out

    def _halves(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second channel of every pair."""
        if self.interleaved:
            return tensor[..., ::2], tensor[..., 1::2]
        first, second = tensor.chunk(2, dim=-1)
        return first, second


class Rotations:
    """The rotations of slices, out of the table of angles that a model gives to its layers.

    Args:
        config: Megatron's, of the model.
        factor: What cosines and sines are multiplied with (YaRN).
    """

    def __init__(self, config: Any, factor: float = 1.0) -> None:
        self._config = config
        self._factor = factor
        self._table: torch.Tensor | None = None
        self._whole: Rotation | None = None

    @classmethod
    def of(cls, model: Any) -> Rotations | None:
        """Those of a chunk whose core attention is slice attention; None where its layers rotate themselves."""
        config, layers = model.config, family_of_model(model).attention_layers(model)
        if config.apply_rope_fusion or config.multi_latent_attention or not layers:
            return None
        return cls(config, float(layers[0].layer.self_attention._yarn_concentration_factor))

    def part(self, table: torch.Tensor, blocks: Blocks) -> Rotation | None:
        """The rotation of the tokens of a slice.

        Args:
            table: Angles ``[length, 1, 1, r]`` of the sequence; Megatron keeps and repeats one tensor.
            blocks: Tokens of the slice.

        Returns:
            None where sequences have angles of their own, which their layers then see to.
        """
        if table.dim() != 4 or table.shape[1:3] != (1, 1):
            return None
        if self._whole is None or table is not self._table:
            cos, sin = ((of(table) * self._factor).to(self._config.params_dtype) for of in (torch.cos, torch.sin))
            self._table, self._whole = table, Rotation(cos, sin, self._config.rotary_interleaved)
        whole = self._whole
        cos, sin = take_blocks(whole.cos, blocks, dim=0), take_blocks(whole.sin, blocks, dim=0)
        return Rotation(cos, sin, whole.interleaved)
