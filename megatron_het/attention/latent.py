"""Multi-latent attention in slices: the cache holds compressed keys and values (latents).

A token has one latent vector for the keys and values of all heads, and one rotary part of the keys (DeepSeek-V2,
section 2.1).  The cache holds both, ``[tokens, b, 1, rank + rotary]``.  Attention works on one cached chunk at a time:
its keys and values are expanded from the latents.  Their gradients become gradients of the latents and of the up
projection's weight.  So expanded keys and values exist for one chunk of one layer only.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_het.attention.kv_cache import KVCache, Run
from megatron_het.attention.places import take_blocks


@dataclass(frozen=True)
class Widths:
    """Numbers of heads and of channels, per head and of the cached latents."""

    heads: int  # of this TP rank
    rank: int  # of the latent vector
    rotary: int  # of the keys' rotary part, which all heads share
    plain: int  # of a key without its rotary part
    value: int  # of a value

    @property
    def head(self) -> int:
        """Returns the channels per head in kernel calls: queries, keys and values are padded with zeros to it."""
        return max(self.plain + self.rotary, self.value)


class Expansion:
    """Expands latents to keys and values by the weight of the up projection.

    Args:
        weight: Returns ``[heads * (plain + value), rank]``; called at every use.
    """

    def __init__(self, widths: Widths, weight: Callable[[], Tensor]) -> None:
        self.widths = widths
        self._weight = weight
        self._weight_gradient: Tensor | None = None

    @torch.no_grad()
    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[tokens, b, heads, width]`` of latents ``[tokens, b, 1, rank + rotary]``."""
        w = self.widths
        both = latents[:, :, 0, : w.rank] @ self._weight().t()
        both = both.view(*both.shape[:2], w.heads, w.plain + w.value)
        keys, values = (both.new_zeros((*both.shape[:3], w.head)) for _ in range(2))
        keys[..., : w.plain] = both[..., : w.plain]
        keys[..., w.plain : w.plain + w.rotary] = latents[..., w.rank :]
        values[..., : w.value] = both[..., w.plain :]
        return keys, values

    @torch.no_grad()
    def project(self, latents: Tensor, grad_keys: Tensor, grad_values: Tensor) -> Tensor:
        """Gradient of the latents; the gradient of the weight is accumulated in this object.

        Args:
            latents: As for :meth:`expand`.

        Returns:
            ``[tokens, b, 1, rank + rotary]``, in at least fp32.
        """
        w, weight = self.widths, self._weight()
        wide = torch.promote_types(latents.dtype, torch.float32)
        both = torch.cat((grad_keys[..., : w.plain], grad_values[..., : w.value]), dim=-1).flatten(2).to(weight.dtype)
        part = (both.flatten(0, 1).t() @ latents[:, :, 0, : w.rank].flatten(0, 1)).to(wide)
        self._weight_gradient = part if self._weight_gradient is None else self._weight_gradient.add_(part)
        rotary = grad_keys[..., w.plain : w.plain + w.rotary].to(wide).sum(2)
        return torch.cat(((both @ weight).to(wide), rotary), dim=-1).unsqueeze(2)

    def take_weight_gradient(self, like: Tensor) -> Tensor:
        """Returns the weight's gradient since the last call."""
        found, self._weight_gradient = self._weight_gradient, None
        return torch.zeros_like(like) if found is None else found.to(like.dtype)


class _Weighted(torch.autograd.Function):
    """Identity of the latents, whose backward gives the weight the gradient that the attention has accumulated."""

    @staticmethod
    def forward(ctx: Any, latents: Tensor, weight: Tensor, expansion: Expansion) -> Tensor:
        ctx.expansion = expansion
        ctx.save_for_backward(weight)
        return latents.view_as(latents)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad, ctx.expansion.take_weight_gradient(weight), None


@dataclass(frozen=True, slots=True)
class _Expanded(Run):
    """Keys and values of a chunk, and the latents that they were made from."""

    packed: Run | None = None


class _Chunks(Sequence[Run]):
    """Runs that are expanded one at a time, at every iteration over them."""

    def __init__(self, packed: list[Run], expand: Callable[[Run], Run]) -> None:
        self._packed, self._expand = packed, expand

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: Any) -> Any:
        return self._expand(self._packed[index])

    def __iter__(self) -> Iterator[Run]:
        return map(self._expand, self._packed)


class LatentCache(KVCache):
    """Cache of one layer's latents, by microbatch and slice, from which attention reads expanded keys and values.

    Args:
        slots: See :class:`KVCache`.
        batch: See :class:`KVCache`.
    """

    expands = True

    def __init__(self, slots: int, batch: int | None, expansion: Expansion) -> None:
        super().__init__(slots, batch)
        self._expansion = expansion

    def shown(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._expansion.expand(key)

    def of_appended(self, key: Tensor, grad_keys: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor]:
        gradient = self._expansion.project(key, grad_keys, grad_values)
        return gradient, gradient[..., :0]

    def runs(self, microbatch: int, start: int, stop: int) -> Sequence[Run]:
        """See :class:`KVCache`; one chunk each."""
        return _Chunks([run for _, run in self._by_chunk(microbatch, start, stop)], self._expand)

    def add_gradient(
        self, microbatch: int, run: Run, grad_keys: Tensor, grad_values: Tensor, sequences: slice | None = None
    ) -> None:
        packed = self._packed(run)
        gradients = self.of_appended(packed.keys[:, sequences or slice(None)], grad_keys, grad_values)
        super().add_gradient(microbatch, packed, *gradients, sequences)

    def _expand(self, run: Run) -> Run:
        return _Expanded(*self._expansion.expand(run.keys), run.parts, run)

    @staticmethod
    def _packed(run: Run) -> Run:
        return run.packed if isinstance(run, _Expanded) and run.packed is not None else run


def widths_of(attention: Any) -> Widths:
    """Reads the widths of Megatron's ``MultiLatentAttention``."""
    config = attention.config
    return Widths(
        attention.num_attention_heads_per_partition,
        config.kv_lora_rank,
        config.qk_pos_emb_head_dim,
        config.qk_head_dim,
        config.v_head_dim,
    )


def attend_by_latents(attention: Any) -> Expansion:
    """Make an attention pass latents to its core in place of keys and values; returns their expansion.

    Args:
        attention: A ``MultiLatentAttention`` of Megatron; changed for good.
    """
    widths, linear = widths_of(attention), attention.linear_kv_up_proj
    expansion = Expansion(widths, lambda: linear.weight)
    # The module itself is still called, so that hooks on its forward run, such as gathers of parameters.
    linear.forward = functools.partial(_carry_weight, linear, expansion, attention.config)
    attention.get_query_key_value_tensors = functools.partial(_queries_and_latents, attention, widths)
    return expansion


def _carry_weight(linear: Any, expansion: Expansion, config: Any, latents: Tensor) -> tuple[Tensor, None]:
    """Replacement of the up projection's forward: latents after its norm, if any, with the weight in the backward."""
    scale = getattr(linear, "layer_norm_weight", None)
    if scale is not None:  # Transformer Engine's layer is norm and projection in one
        if config.layernorm_zero_centered_gamma:
            scale = scale + 1
        if config.normalization == "RMSNorm":
            latents = torch.nn.functional.rms_norm(latents, scale.shape, scale, config.layernorm_epsilon)
        else:
            shift = linear.layer_norm_bias
            latents = torch.nn.functional.layer_norm(latents, scale.shape, scale, shift, config.layernorm_epsilon)
    return _Weighted.apply(latents, linear.weight, expansion), None


def _queries_and_latents(
    attention: Any,
    widths: Widths,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    position_ids: Tensor | None = None,
    packed_seq_params: Any = None,
    **_unused: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Replacement of ``get_query_key_value_tensors``.

    Args:
        attention: The layer's attention.
        hidden_states: ``[s, b, hidden]``, a part of s under sequence parallelism.
        key_value_states: Ignored: self-attention.
        position_ids: Ignored, as Megatron does.
        packed_seq_params: The ``SliceParams`` of the slice that runs.

    Returns:
        Queries ``[s, b, heads, width]``, latents ``[s, b, 1, rank + rotary]``, an empty tensor in place of values, and
        the inputs of the projections of queries and latents.
    """
    config, group, w = attention.config, attention.tp_group, widths
    queries, both = attention._qkv_down_projection(hidden_states)
    compressed, shared = torch.split(both, [w.rank, w.rotary], dim=-1)
    latents = attention.kv_layernorm(compressed)
    if group.size() > 1 and config.sequence_parallel:
        latents = gather_from_sequence_parallel_region(latents, group=group)
        shared = gather_from_sequence_parallel_region(shared, group=group)
    elif group.size() > 1:
        latents = copy_to_tensor_model_parallel_region(latents, group=group)
    latents, _ = attention.linear_kv_up_proj(latents)
    if config.q_lora_rank is None:
        query, _ = attention.linear_q_proj(queries)
    else:
        queries = attention.q_layernorm(queries)
        query, _ = attention.linear_q_up_proj(queries)
    query = query.view(*query.shape[:2], w.heads, w.plain + w.rotary)
    rotate = _rotation(attention, packed_seq_params)
    query = torch.cat((query[..., : w.plain], rotate(query[..., w.plain :])), dim=-1)
    query = torch.nn.functional.pad(query, (0, w.head - query.shape[-1]))
    key = torch.cat((latents.unsqueeze(2), rotate(shared.unsqueeze(2))), dim=-1)
    return query, key, key[..., :0], queries, latents


def _rotation(attention: Any, params: Any) -> Callable[[Tensor], Tensor]:
    """Rotates ``[s, b, heads, rotary]`` of the slice that runs."""
    # packed_seq=True returns the table of the whole sequence, not a context-parallel rank's part.
    table, mscale = attention.rotary_pos_emb(params.max_seqlen_q, packed_seq=True), 1.0
    if isinstance(table, tuple):
        table, mscale = table
    table = take_blocks(table, params.blocks, dim=0)
    return functools.partial(
        apply_rotary_pos_emb,
        freqs=table,
        config=attention.config,
        mscale=mscale,
        cp_group=attention.pg_collection.cp,
        mla_rotary_interleaved=True,
    )
