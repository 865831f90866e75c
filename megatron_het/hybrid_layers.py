"""Layers of hybrid models without Transformer Engine: ``--spec megatron_het.hybrid_layers local_stack_spec``.

Megatron's own need Transformer Engine.  These are the parts of Megatron's local GPT layers as separate layers.  Plans
select them automatically; the flag is for stock Megatron.
"""

from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_het.latent_attention import LatentAttention, LatentCoreAttention
from megatron_het.plan.schema import GATED_DELTA_NET, KINDS, MAMBA, SPARSE_ATTENTION

_LOCAL = LocalSpecProvider()
_OWN_LAYERS = {MAMBA: "mamba_layer", GATED_DELTA_NET: "gdn_layer", SPARSE_ATTENTION: "dsa_layer"}
"""Kinds of layers that a specification without Transformer Engine may lack."""


def norm(config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
    """The norm of Megatron's local layers for a configuration."""
    kind: Any = _LOCAL.layer_norm(rms_norm=config.normalization == "RMSNorm")
    return kind(config=config, hidden_size=hidden_size, eps=eps)


class LocalSelfAttention(SelfAttention):
    """Megatron's attention, with local norms of queries and keys if the configuration has such norms."""

    def __init__(self, config: Any, submodules: SelfAttentionSubmodules, *positional: Any, **keywords: Any) -> None:
        if config.qk_layernorm:
            submodules = replace(submodules, q_layernorm=norm, k_layernorm=norm)
        super().__init__(config, submodules, *positional, **keywords)


class LocalLatentAttention(LatentAttention):
    """Latent attention, with local norms if the configuration has norms."""

    def __init__(self, config: Any, submodules: MLASelfAttentionSubmodules, *positional: Any, **keywords: Any) -> None:
        if config.qk_layernorm:
            submodules = replace(submodules, q_layernorm=norm, kv_layernorm=norm)
        super().__init__(config, submodules, *positional, **keywords)


class LocalHybridStack(HybridStack):
    """Megatron's stack with a local norm at its end, which its specification cannot set."""

    def __init__(
        self, config: Any, submodules: HybridStackSubmodules, *, post_layer_norm: bool = True, **keywords: Any
    ) -> None:
        asked = sorted(set(keywords.get("layer_type_list") or ()) & set(_OWN_LAYERS))
        missing = [kind for kind in asked if getattr(submodules, _OWN_LAYERS[kind]) is IdentityOp]
        if missing:
            raise ValueError(f"{missing[0]} ({KINDS[missing[0]]}): there are no such layers without Transformer Engine")
        super().__init__(config, submodules, post_layer_norm=False, **keywords)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = norm(config, config.hidden_size, config.layernorm_epsilon)


def _attention(attention: ModuleSpec) -> ModuleSpec:
    parts = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
    )
    return ModuleSpec(module=TransformerLayer, submodules=parts)


def _rest(kind: type, mlp: Any) -> ModuleSpec:
    parts = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=get_bias_dropout_add)
    return ModuleSpec(module=kind, submodules=parts)


_causal = {"attn_mask_type": AttnMaskType.causal}
_column, _row = _LOCAL.column_parallel_linear(), _LOCAL.row_parallel_linear()

local_stack_spec = ModuleSpec(
    module=LocalHybridStack,
    submodules=HybridStackSubmodules(
        attention_layer=_attention(
            ModuleSpec(
                module=LocalSelfAttention,
                params=_causal,
                submodules=SelfAttentionSubmodules(
                    linear_qkv=_column, core_attention=_LOCAL.core_attention(), linear_proj=_row
                ),
            )
        ),
        mla_layer=_attention(
            ModuleSpec(
                module=LocalLatentAttention,
                params=_causal,
                submodules=MLASelfAttentionSubmodules(
                    linear_q_proj=_column,
                    linear_q_down_proj=_column,
                    linear_q_up_proj=_column,
                    linear_kv_down_proj=_column,
                    linear_kv_up_proj=_column,
                    core_attention=LatentCoreAttention,
                    linear_proj=_row,
                    q_layernorm=IdentityOp,
                    kv_layernorm=IdentityOp,
                ),
            )
        ),
        mlp_layer=_rest(MLPLayer, get_mlp_module_spec_for_backend(backend=_LOCAL)),
        # For any number of experts, which the configuration sets.
        moe_layer=_rest(MoETransformerLayer, get_mlp_module_spec_for_backend(backend=_LOCAL, num_experts=1)),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[
                    ModuleSpec(
                        module=MultiTokenPredictionLayer,
                        submodules=MultiTokenPredictionLayerSubmodules(
                            enorm=norm, hnorm=norm, eh_proj=_column, mtp_model_layer=None, layer_norm=norm
                        ),
                    )
                ]
            ),
        ),
    ),
)
"""Attention ``*``, latent attention ``+``, MLP ``-``, experts ``E`` and multi-token prediction ``/``."""
