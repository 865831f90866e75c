"""Multi-latent attention that Megatron's own layers do not have: ``--spec megatron_het.latent_attention layer_spec``.

It is for models without Transformer Engine, and for those whose queries are not compressed (DeepSeek-V2-Lite,
Moonlight).  Without compressed queries, ``--qk-layernorm`` ends in an error in Megatron's local layers, and gives
queries a norm of their own in those of Transformer Engine, which these models do not have.

Megatron's own attention computes it, after the width of values is set apart from that of keys.  Under tensor
parallelism Megatron's local layers do not sum the gradient of the keys' rotary part over the ranks, whose heads all
use it; here it is summed.  Without sequence parallelism Megatron sums the gradient of the queries' norm, although every
rank has all of it; here each has its part.  Plans select these layers automatically; the flag is for stock Megatron.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.utils import divide
from megatron.training.models.gpt import default_layer_spec


class LatentCoreAttention(DotProductAttention):
    """Megatron's attention with a width of values.

    Args:
        k_channels: Width of a head's queries and keys; the caller passes the scale for it.
        v_channels: Width of a head's values.  Without both widths it behaves like the base class.
        **options: Options of the base class.
    """

    def __init__(
        self, config: Any, *, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(config=config, **options)
        if k_channels is None or v_channels is None:
            return  # Megatron builds one for any attention first
        self.hidden_size_per_attention_head = k_channels
        self.hidden_size_per_partition = divide(v_channels * config.num_attention_heads, self.tp_group.size())


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention over column-parallel down projections."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        ranks = self.tp_group.size()
        # Megatron finds this norm by its name, and sums its gradient over TP ranks as for a norm of every head.
        if self.config.qk_layernorm and ranks > 1 and not self.config.sequence_parallel:
            scaled = _ScaledGradient.apply
            self.q_layernorm.register_forward_pre_hook(lambda _, args: (scaled(args[0], float(ranks)), *args[1:]))
            self.q_layernorm.register_forward_hook(lambda _, _args, out: scaled(out, 1 / ranks))

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        """Norms and projections; queries that are not compressed have no norm."""
        if self.config.q_lora_rank is not None or not self.config.qk_layernorm:
            return super()._resolve_qk_norm_config(submodules)
        resolver = QKNormConfigResolver(self.config, submodules)
        resolver.has_q_lora = True  # keys and values get norms as with compressed queries
        found: dict[str, Any] = dict(resolver.resolve())
        queries = submodules.linear_q_proj or resolver.linear_impl
        return found | {"linear_q_proj": queries, "linear_q_up_proj": IdentityOp, "q_layernorm": IdentityOp}

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed queries, and compressed keys and values with the keys' rotary part, whole in the last dimension.

        The results have the form of a layer without tensor parallelism: [s, b, ...], or a part of s
        under sequence parallelism, whose gather sums gradients over the ranks.
        """
        queries, keys = super()._qkv_down_projection(hidden_states)
        rotary = self.config.qk_pos_emb_head_dim
        whole = self.config.kv_lora_rank + rotary
        if keys.size(-1) == whole:
            return queries, keys
        keys = gather_from_tensor_model_parallel_region(keys, group=self.tp_group)
        if self.config.sequence_parallel:
            return queries, scatter_to_sequence_parallel_region(keys, group=self.tp_group)
        compressed, shared = torch.split(keys, [whole - rotary, rotary], dim=-1)
        shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
        return queries, torch.cat([compressed, shared], dim=-1)


class _ScaledGradient(torch.autograd.Function):
    """Identity whose backward multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's layers for a model with multi-latent attention, with this module's attention.

    Args:
        config: Megatron's ``GPTModelConfig``.
        vp_stage: Chunk of the stage.
    """
    spec = without_transformer_engine(default_layer_spec(config, vp_stage))
    if config.transformer.q_lora_rank is None:
        for attention in _attentions(spec):
            attention.module = LatentAttention
    return spec


def without_transformer_engine(spec: Any) -> Any:
    """Megatron's layers, in which local ones have this module's attention."""
    for attention in _attentions(spec):
        if attention.submodules.core_attention is DotProductAttention:
            attention.submodules.core_attention = LatentCoreAttention
            attention.module = LatentAttention
    return spec


def _attentions(spec: Any) -> list[Any]:
    layers = spec.layer_specs if hasattr(spec, "layer_specs") else [spec]
    return [layer.submodules.self_attention for layer in layers]
