"""Fields of published models' ``config.json``, written by hand for tests: shapes and architecture only."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _llama(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocabulary: int, **more: Any) -> Config:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": 128000,
        "pretraining_tp": 1,
        **more,
    }


def _llama3(factor: float) -> Config:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _qwen(kind: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, **more: Any) -> Config:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": 151936,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": None if kind.startswith("qwen3") else 32768,
        "use_sliding_window": False,
        "max_window_layers": layers,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
        **more,
    }


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, groups: int, **more: Any) -> Config:
    return _qwen("qwen3", layers, hidden, ffn, heads, groups, head_dim=128, attention_bias=False, **more)


def _qwen3_moe(layers: int, hidden: int, ffn: int, heads: int, width: int) -> Config:
    return _qwen(
        "qwen3_moe",
        layers,
        hidden,
        ffn,
        heads,
        4,
        head_dim=128,
        attention_bias=False,
        rope_scaling=None,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=width,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        output_router_logits=False,
        router_aux_loss_coef=0.001,
    )


def _mistral(
    hidden: int, heads: int, layers: int, ffn: int, vocabulary: int, window: int | None, **more: Any
) -> Config:
    return {
        "model_type": "mistral",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        **more,
    }


def _mixtral(layers: int, hidden: int, ffn: int, heads: int, vocabulary: int) -> Config:
    return _mistral(hidden, heads, layers, ffn, vocabulary, None) | {
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
        "attention_dropout": 0.0,
    }


def _deepseek(kind: str, layers: int, hidden: int, ffn: int, heads: int, experts: int, **more: Any) -> Config:
    return {
        "model_type": kind,
        "architectures": ["DeepseekForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": experts,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 163840,
        "vocab_size": 102400,
        "torch_dtype": "bfloat16",
        "pretraining_tp": 1,
        "ep_size": 1,
        **more,
    }


_V3 = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "hidden_act": "silu",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "num_experts_per_tok": 4,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "output_router_logits": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}


def _gpt2(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": 1024,
        "n_ctx": 1024,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "summary_type": "cls_index",
    }


def _neox(layers: int, hidden: int, heads: int, vocabulary: int, **more: Any) -> Config:
    return {
        "model_type": "gpt_neox",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "hidden_act": "gelu",
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        **more,
    }


def _phi3(hidden: int, ffn: int, layers: int, heads: int, groups: int, vocabulary: int, **more: Any) -> Config:
    return {
        "model_type": "phi3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        **more,
    }


def _gemma(kind: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, **more: Any) -> Config:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 256,
        "vocab_size": 256000,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        **more,
    }


def _glm(kind: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, **more: Any) -> Config:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 128,
        "vocab_size": 151552,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        **more,
    }


_GLM_MOE = {
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rope_scaling": None,
}


def _llama4(layers: int, experts: int, **more: Any) -> Config:
    text = {
        "model_type": "llama4_text",
        "num_hidden_layers": layers,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 202048,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "no_rope_layers": [],
        "num_experts_per_tok": 1,
        "num_local_experts": experts,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        **more,
    }
    return {
        "model_type": "llama4",
        "text_config": text,
        "vision_config": {"hidden_size": 1408},
        "torch_dtype": "bfloat16",
    }


def _nemotron(pattern: str, hidden: int, ffn: int, heads: int, groups: int, mamba_heads: int, **more: Any) -> Config:
    return {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 128,
        "vocab_size": 131072,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 128,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": False,
        "rescale_prenorm_residual": True,
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")],
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "num_logits_to_keep": 1,
        "use_mamba_kernels": True,
        "torch_dtype": "bfloat16",
        **more,
    }


_OLD_LLAMA = {"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
FILES: dict[str, Config] = {
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 32000, **_OLD_LLAMA),
    "llama-2-70b": _llama(80, 8192, 28672, 64, 8, 32000, **_OLD_LLAMA),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128256, rope_scaling=_llama3(8.0)),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, 8, 128256, rope_scaling=_llama3(8.0)),
    "llama-3.1-405b": _llama(126, 16384, 53248, 128, 8, 128256, rope_scaling=_llama3(8.0)),
    "llama-3.2-1b": _llama(
        16, 2048, 8192, 32, 8, 128256, rope_scaling=_llama3(32.0), head_dim=64, tie_word_embeddings=True
    ),
    "llama-3.2-3b": _llama(
        28, 3072, 8192, 24, 8, 128256, rope_scaling=_llama3(32.0), head_dim=128, tie_word_embeddings=True
    ),
    "llama-linear": _llama(32, 4096, 11008, 32, 32, 32016, rope_scaling={"type": "linear", "factor": 4.0}),
    "llama-new-style": {
        key: value
        for key, value in _llama(32, 4096, 14336, 32, 8, 128256).items()
        if key not in ("rope_theta", "rope_scaling")
    }
    | {"rope_parameters": {**_llama3(8.0), "rope_theta": 500000.0}, "dtype": "bfloat16"},
    "llama-4-maverick": _llama4(48, 128, use_qk_norm=False, interleave_moe_layer_step=2, rope_scaling=None),
    "llama-4-scout": _llama4(
        48, 16, use_qk_norm=True, interleave_moe_layer_step=1, rope_scaling={**_llama3(16.0), "high_freq_factor": 1.0}
    ),
    "qwen-2.5-0.5b": _qwen("qwen2", 24, 896, 4864, 14, 2, tie_word_embeddings=True),
    "qwen-2.5-7b": _qwen("qwen2", 28, 3584, 18944, 28, 4, vocab_size=152064),
    "qwen-2.5-72b": _qwen("qwen2", 80, 8192, 29568, 64, 8, vocab_size=152064, rms_norm_eps=1e-5),
    "qwen-2.5-7b-yarn": _qwen(
        "qwen2",
        28,
        3584,
        18944,
        28,
        4,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "qwen-2-57b-a14b": _qwen(
        "qwen2_moe",
        28,
        3584,
        18944,
        28,
        4,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 6144, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 12288, 64, 1536),
    "mistral-7b-v0.1": _mistral(4096, 32, 32, 14336, 32000, 4096, rope_theta=10000.0),
    "mistral-7b-v0.3": _mistral(4096, 32, 32, 14336, 32768, None),
    "mistral-nemo-12b": _mistral(5120, 32, 40, 14336, 131072, None, head_dim=128),
    "mistral-small-24b": _mistral(5120, 32, 40, 32768, 131072, None, head_dim=128, rope_theta=1e8),
    "mixtral-8x7b": _mixtral(32, 4096, 14336, 32, 32000),
    "mixtral-8x22b": _mixtral(56, 6144, 16384, 48, 32768),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2",
        27,
        2048,
        10944,
        16,
        64,
        q_lora_rank=None,
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
    ),
    "deepseek-v2": _deepseek(
        "deepseek_v2",
        60,
        5120,
        12288,
        128,
        160,
        q_lora_rank=1536,
        topk_method="group_limited_greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=16.0,
        n_group=8,
        topk_group=3,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
    ),
    "deepseek-v3": _deepseek(
        "deepseek_v3",
        61,
        7168,
        18432,
        128,
        256,
        **(_V3 | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}),
        quantization_config={"quant_method": "fp8"},
    ),
    "moonlight-16b-a3b": _deepseek(
        "deepseek_v3",
        27,
        2048,
        11264,
        16,
        64,
        **(
            _V3
            | {"q_lora_rank": None, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408}
            | {"num_nextn_predict_layers": 0, "vocab_size": 163840, "rope_scaling": None, "rope_theta": 50000.0}
        ),
        routed_scaling_factor=2.446,
    ),
    "gpt-oss-20b": {
        **_GPT_OSS,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gpt-oss-120b": {
        **_GPT_OSS,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "pythia-6.9b": _neox(32, 4096, 32, 50432),
    "neox-sequential": _neox(36, 2816, 22, 32000, use_parallel_residual=False, rotary_pct=1.0),
    "phi-3-mini-4k": _phi3(3072, 8192, 32, 32, 32, 32064, sliding_window=2047),
    "phi-3-mini-128k": _phi3(
        3072,
        8192,
        32,
        32,
        32,
        32064,
        sliding_window=262144,
        rope_scaling={"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.03] * 48},
    ),
    "phi-4": _phi3(5120, 17920, 40, 40, 10, 100352, rope_theta=250000, max_position_embeddings=16384),
    "gemma-2-9b": _gemma(
        "gemma2", 42, 3584, 14336, 16, 8, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    ),
    "gemma-3-12b": {
        "model_type": "gemma3",
        "text_config": _gemma(
            "gemma3_text",
            48,
            3840,
            15360,
            16,
            8,
            sliding_window=1024,
            sliding_window_pattern=6,
            rope_theta=1000000,
            rope_local_base_freq=10000,
            rope_scaling={"factor": 8.0, "rope_type": "linear"},
        ),
        "vision_config": {"hidden_size": 1152},
    },
    "olmo-2-7b": _llama(32, 4096, 11008, 32, 32, 100352, rms_norm_eps=1e-6) | {"model_type": "olmo2"},
    "glm-4-9b": _glm("glm", 40, 4096, 13696, 32, 2, rms_norm_eps=1.5625e-07),
    "glm-4-32b-0414": _glm("glm4", 61, 6144, 23040, 48, 2),
    "glm-4.5-air": _glm(
        "glm4_moe",
        46,
        4096,
        10944,
        96,
        8,
        **_GLM_MOE,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "glm-4.5": _glm(
        "glm4_moe",
        92,
        5120,
        12288,
        96,
        8,
        **(_GLM_MOE | {"n_routed_experts": 160}),
        moe_intermediate_size=1536,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "nemotron-h-8b": _nemotron(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 21504, 32, 8, 128, sliding_window=None
    ),
    "nemotron-3-nano-30b-a3b": _nemotron(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        2688,
        1856,
        32,
        2,
        64,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        norm_eps=1e-5,
        partial_rotary_factor=1.0,
        rope_theta=10000,
    ),
    "nemotron-with-later-tokens": {
        **{key: value for key, value in _nemotron("", 4096, 21504, 32, 8, 128).items() if "pattern" not in key},
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
        "num_nextn_predict_layers": 2,
        "mtp_layers_block_type": ["attention", "mlp"],
    },
    "qwen3-next-80b-a3b": _qwen(
        "qwen3_next",
        48,
        2048,
        5120,
        16,
        2,
        head_dim=256,
        rope_theta=10000000.0,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
    ),
}
for _name in ("mlp_bias",):
    FILES["olmo-2-7b"].pop(_name)
"""Files by what people call the model."""
