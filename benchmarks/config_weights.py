"""Weights of a Hugging Face model under the names and in the layout of Megatron's GPTModel on one rank, for tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

_LAYER = re.compile(r"(?:model|transformer|gpt_neox)\.(?:layers|h)\.(\d+)\.(.+)")
_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "transformer.wte.weight": "embedding.word_embeddings.weight",
    "transformer.wpe.weight": "embedding.position_embeddings.weight",
    "gpt_neox.embed_in.weight": "embedding.word_embeddings.weight",
    "model.norm.": "decoder.final_layernorm.",
    "transformer.ln_f.": "decoder.final_layernorm.",
    "gpt_neox.final_layer_norm.": "decoder.final_layernorm.",
    "lm_head.weight": "output_layer.weight",
}
_INSIDE = {
    "input_layernorm.": "input_layernorm.",
    "ln_1.": "input_layernorm.",
    "post_attention_layernorm.": "pre_mlp_layernorm.",
    "ln_2.": "pre_mlp_layernorm.",
    "self_attn.o_proj.": "self_attention.linear_proj.",
    "attention.dense.": "self_attention.linear_proj.",
    "attn.c_proj.": "self_attention.linear_proj.",
    "attention.query_key_value.": "self_attention.linear_qkv.",
    "self_attn.q_norm.": "self_attention.q_layernorm.",
    "self_attn.k_norm.": "self_attention.k_layernorm.",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
    "self_attn.q_a_proj.": "self_attention.linear_q_down_proj.",
    "self_attn.q_a_layernorm.": "self_attention.q_layernorm.",
    "self_attn.q_b_proj.": "self_attention.linear_q_up_proj.",
    "self_attn.kv_a_proj_with_mqa.": "self_attention.linear_kv_down_proj.",
    "self_attn.kv_a_layernorm.": "self_attention.kv_layernorm.",
    "self_attn.kv_b_proj.": "self_attention.linear_kv_up_proj.",
    "mlp.gate_up_proj.": "mlp.linear_fc1.",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.c_fc.": "mlp.linear_fc1.",
    "mlp.down_proj.": "mlp.linear_fc2.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
    "mlp.c_proj.": "mlp.linear_fc2.",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.gate.": "mlp.router.",
    "mlp.router.": "mlp.router.",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.down_proj.": "mlp.shared_experts.linear_fc2.",
}


def megatron_weights(state: Mapping[str, torch.Tensor], kind: str, config: Any) -> dict[str, torch.Tensor]:
    """All weights of a model.

    Args:
        state: Of ``transformers``.
        kind: Its ``model_type``.
        config: Its configuration.
    """
    found: dict[str, torch.Tensor] = {}
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in state.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), {})[_usual(match[2])] = value
        else:
            found[_renamed(name, _OUTSIDE)] = value
    for layer, parts in layers.items():
        for name, value in _layer(parts, kind, config).items():
            found[f"decoder.layers.{layer}.{name}"] = value
    return found


def _usual(name: str) -> str:
    """A name of a layer's weight, as most families have it."""
    name = name.replace("feed_forward.", "mlp.").replace("mlp.shared_expert.", "mlp.shared_experts.")
    return name.replace("self_attn.qkv_proj.", "attn.c_attn.")


def _renamed(name: str, names: Mapping[str, str]) -> str:
    old = next(old for old in names if name.startswith(old))
    return names[old] + name[len(old) :]


def _layer(parts: dict[str, torch.Tensor], kind: str, config: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    is_latent = "self_attn.kv_a_proj_with_mqa.weight" in parts
    for name, given in parts.items():
        value = given.T if kind == "gpt2" and given.dim() == 2 else given
        if name.startswith("attn.c_attn."):
            found[f"self_attention.linear_qkv.{name.rsplit('.', 1)[1]}"] = _by_group(value, config)
        elif is_latent and name == "self_attn.q_proj.weight":
            found["self_attention.linear_q_proj.weight"] = value
        elif name.startswith("self_attn.q_proj."):
            end = name.rsplit(".", 1)[1]
            whole = torch.cat([parts[f"self_attn.{part}_proj.{end}"] for part in "qkv"])
            found[f"self_attention.linear_qkv.{end}"] = _by_group(whole, config)
        elif name.startswith(("self_attn.k_proj.", "self_attn.v_proj.")) or ".up_proj." in name:
            continue  # with the one before
        elif ".gate_proj." in name:
            whole = torch.cat([value, parts[name.replace("gate_proj", "up_proj")]])
            found[name.replace("gate_proj", "linear_fc1")] = whole
        elif name.startswith("mlp.experts."):
            found |= _experts(name, value, kind)
        else:
            found[_renamed(name, _INSIDE)] = value
    return found


def _by_group(whole: torch.Tensor, config: Any) -> torch.Tensor:
    """Queries, keys and values of one group of heads after the other."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    width = whole.shape[0] // (heads + 2 * groups)
    parts = whole.split([heads * width, groups * width, groups * width])
    by_group = [part.reshape(groups, -1, *whole.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).reshape(whole.shape)


def _experts(name: str, value: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """The experts of a layer one by one; ``value`` is of all of them."""
    layer, end = ("linear_fc1", "gate_up_proj") if "gate_up_proj" in name else ("linear_fc2", "down_proj")
    suffix = "bias" if name.endswith("_bias") else "weight"
    found = {}
    for expert, given in enumerate(value):
        own = given.T if kind in ("gpt_oss", "llama4_text") and given.dim() == 2 else given
        if kind == "gpt_oss" and end == "gate_up_proj":  # gate and up take turns
            own = torch.cat([own[::2], own[1::2]])
        found[f"mlp.experts.local_experts.{expert}.{layer}.{suffix}"] = own
    return found
