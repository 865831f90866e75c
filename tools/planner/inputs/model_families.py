"""Families of Hugging Face's models: what all of a ``model_type`` have, what Megatron lacks, and how a file is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_het.plan.schema import (
    ATTENTION,
    CHUNK,
    GATED_DELTA_NET,
    LATER,
    MAMBA,
    MLP,
    layers_of,
    problem_of,
    sizes_of,
)
from megatron_het.plan.schema import EXPERTS as SPARSE

from ..errors import PlannerError
from .model_parts import FlagValue

Config = Mapping[str, Any]
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one ``model_type``.

    Attributes:
        title: What people call them.
        defaults: Values of fields that a file leaves out, as ``transformers`` takes them.
        flags: Megatron's flags that all of them have.
        lost: What no flag of Megatron says, by the field (or the part) that it is, with the reason.
        biases: Linear layers that ``attention_bias`` gives biases to; ``all``: of the whole model.
        layer_norm: Whether norms are LayerNorm instead of RMSNorm.
        names: Fields that others call otherwise, by the others' name.
    """

    title: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    biases: Literal["qkv", "qkvo", "all"] = "qkvo"
    layer_norm: bool = False
    names: Mapping[str, str] = field(default_factory=dict)


NONE = "Megatron's GPTModel has none"
_SANDWICH = "norms after attention and MLP: Megatron's GPTModel has them before only"
_WIDE_NORM = "norms of queries and keys over all heads together: Megatron norms every head of its own"
_GEMMA = {
    "(embedding)": "embeddings are multiplied with the root of hidden_size",
    "(norms)": "norms multiply with 1 + weight in fp32, which Megatron's RMSNorm does with Transformer Engine only",
}
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}
_LATENT: dict[str, FlagValue] = {"qk-layernorm": True}
_OF_DEEPSEEK = {"rms_norm_eps": 1e-6}
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2 and 3.x, and what has its form", {"rms_norm_eps": 1e-6}),
    "llama4_text": Family(
        "Llama 4 (text)",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000,
            "use_qk_norm": True,
            "head_dim": 128,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "num_experts_per_tok": 1,
        },
        {"rotary-interleaved": True, "moe-router-score-function": "sigmoid", "moe-apply-probs-on-input": True},
    ),
    "mistral": Family("Mistral", {"rms_norm_eps": 1e-6, "sliding_window": 4096}),
    "mixtral": Family("Mixtral", {"rms_norm_eps": 1e-5, "rope_theta": 1000000, "router_aux_loss_coef": 0.001}),
    "qwen2": Family(
        "Qwen 2 and 2.5", {"rms_norm_eps": 1e-6, "use_sliding_window": False}, {"add-qkv-bias": True}, biases="qkv"
    ),
    "qwen2_moe": Family(
        "Qwen 1.5 and 2 MoE",
        {
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        {"moe-shared-expert-gate": True},
        biases="qkv",
        names={"attention_bias": "qkv_bias"},
    ),
    "qwen3": Family(
        "Qwen3", {"rms_norm_eps": 1e-6, "use_sliding_window": False, "head_dim": 128}, {"qk-layernorm": True}
    ),
    "qwen3_moe": Family(
        "Qwen3 MoE",
        {"rms_norm_eps": 1e-6, "use_sliding_window": False, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        {"qk-layernorm": True},
    ),
    "deepseek_v2": Family(
        "DeepSeek-V2, V2-Lite",
        _OF_DEEPSEEK | {"norm_topk_prob": False, "topk_method": "greedy", "n_shared_experts": 2},
        _LATENT,
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3, R1, Moonlight, Kimi K2",
        _OF_DEEPSEEK
        | {
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
        },
        _LATENT | {"moe-router-enable-expert-bias": True},
    ),
    "gpt_oss": Family(
        "gpt-oss",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000,
            "attention_bias": True,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "swiglu_limit": 7.0,
            "sliding_window": 128,
            "head_dim": 64,
            "router_aux_loss_coef": 0.001,
            "num_experts_per_tok": 4,
        },
        {"quick-geglu": True, "glu-linear-offset": 1.0, "no-bias-gelu-fusion": True, "softmax-type": "learnable"},
        biases="all",
    ),
    "gpt2": Family(
        "GPT-2",
        {
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "hidden_act": "gelu_new",
            "attention_dropout": 0.1,
            "hidden_dropout": 0.1,
            "embd_pdrop": 0.1,
        },
        biases="all",
        layer_norm=True,
        names={
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "layer_norm_eps": "layer_norm_epsilon",
            "attention_dropout": "attn_pdrop",
            "hidden_dropout": "resid_pdrop",
        },
    ),
    "gpt_neox": Family(
        "GPT-NeoX, Pythia",
        {
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "hidden_act": "gelu",
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
        biases="all",
        layer_norm=True,
        names={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    ),
    "phi3": Family("Phi-3, Phi-4", {"rms_norm_eps": 1e-5, "embd_pdrop": 0.0}, names={"hidden_dropout": "resid_pdrop"}),
    "gemma": Family("Gemma", _GEMMA_DEFAULTS | {"hidden_act": "gelu_pytorch_tanh"}, lost=_GEMMA),
    "gemma2": Family(
        "Gemma 2",
        _GEMMA_DEFAULTS
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        lost=_GEMMA | {"(layer)": _SANDWICH},
        names={"hidden_act": "hidden_activation"},
    ),
    "gemma3_text": Family(
        "Gemma 3 (text)",
        _GEMMA_DEFAULTS
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "sliding_window_pattern": 6,
        },
        {"qk-layernorm": True},
        lost=_GEMMA | {"(layer)": _SANDWICH},
        names={"hidden_act": "hidden_activation"},
    ),
    "olmo2": Family(
        "OLMo 2",
        {"rms_norm_eps": 1e-5},
        lost={"(layer)": "norms after attention and MLP, none before: " + NONE, "(queries)": _WIDE_NORM},
    ),
    "olmoe": Family(
        "OLMoE",
        {"rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
        lost={"(queries)": _WIDE_NORM},
    ),
    "glm": Family(
        "GLM-4 (9B)",
        {"rms_norm_eps": 1.5625e-07, "attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128},
        {"rotary-interleaved": True},
        biases="qkv",
    ),
    "glm4": Family(
        "GLM-4-0414",
        {"rms_norm_eps": 1.5625e-07, "attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128},
        {"rotary-interleaved": True},
        lost={"(layer)": _SANDWICH},
        biases="qkv",
    ),
    "glm4_moe": Family(
        "GLM-4.5, GLM-4.6",
        {
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "scoring_func": "sigmoid",
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
        },
        {"moe-router-enable-expert-bias": True},
        biases="qkv",
    ),
}
FAMILIES["nemotron_h"] = Family(
    "Nemotron-H, Nemotron Nano 2, Nemotron 3",
    {
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "head_dim": 128,
        "num_key_value_heads": 8,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "shared_expert_intermediate_size": 7688,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "mtp_layers_block_type": ("full_attention", "moe"),
    },
    {"position-embedding-type": "none"},
    names={
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "mlp_hidden_act",
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    },
)
FAMILIES["qwen3_next"] = Family(
    "Qwen3-Next, Qwen3-Coder-Next",
    {
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
    {"qk-layernorm": True, "attention-output-gate": True, "apply-layernorm-1p": True, "moe-shared-expert-gate": True},
)
FAMILIES["mistral3_text"] = FAMILIES["ministral"] = FAMILIES["mistral"]
INSIDE = {"llama4": "llama4_text", "gemma3": "gemma3_text", "mistral3": "mistral"}
"""Models of text and pictures, whose text model is in ``text_config``."""
HYBRID = {"nemotron_h", "qwen3_next"}  # models whose layers are of several kinds
EXPERTS = HYBRID | {"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe"}
NOT_OF_THE_MODEL = frozenset(
    # Of files, tokens, generation, other tasks, how weights are stored, and of numerics that change no result.
    """_attn_implementation _name_or_path add_cross_attention architectures attn_implementation auto_map
    bad_words_ids
    begin_suppress_tokens bos_token_id boi_token_index cache_implementation chunk_size_feed_forward classifier_dropout
    decoder_start_token_id dtype eos_token_id eoi_token_index ep_size
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initial_context_length
    experts_per_token image_token_index is_decoder is_encoder_decoder label2id
    model_type num_labels n_ctx output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
    quantization_config reorder_and_upcast_attn return_dict sep_token_id summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tf_legacy_loss tokenizer_class torch_dtype
    torchscript transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache vision_config
    multimodal_projector_bias vision_feature_layer spatial_merge_size projector_hidden_act mm_tokens_per_image
    bos_token eos_token max_length num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype chunk_size expand
    rescale_prenorm_residual moe_shared_expert_overlap""".split()  # noqa: SIM905
)
SHAPES_ONLY = ("max_position_embeddings", "original_max_position_embeddings", "num_key_value_heads", "qk_head_dim")


ONLY_WHEN: dict[str, tuple[Any, str]] = {
    "use_parallel_residual": (False, "attention and MLP beside each other: " + NONE),
    "final_logit_softcapping": (None, "soft capping of logits: " + NONE),
    "attn_logit_softcapping": (None, "soft capping of scores: " + NONE),
    "use_bidirectional_attention": (False, "attention to later tokens: " + NONE),
    "scale_attn_weights": (True, "attention without a scale: " + NONE),
    "scale_attn_by_inverse_layer_idx": (False, "a scale of attention by layer: " + NONE),
    "clip_qkv": (None, "clipping of queries, keys and values: " + NONE),
    "embedding_multiplier": (1.0, "a factor of embeddings: " + NONE),
    "logits_scaling": (1.0, "a factor of logits: " + NONE),
    "residual_multiplier": (1.0, "a factor of residuals: " + NONE),
    "attention_multiplier": (None, "a scale of attention: no flag says it"),
    "layer_norm_elementwise_affine": (True, "norms without weights: " + NONE),
    "use_bias": (False, "biases in Mamba layers: Megatron's have none"),
    "mamba_proj_bias": (False, "biases in Mamba layers: Megatron's have none"),
    "use_conv_bias": (True, "convolutions of Mamba layers without biases: Megatron's have them"),
    "conv_kernel": (4, "another length of convolutions in Mamba layers: Megatron has 4"),
    "mamba_hidden_act": ("silu", "another activation in Mamba layers: Megatron has silu"),
    "residual_in_fp32": (False, "residuals in fp32 are training, which --fp32-residual-connection says"),
    "moe_latent_size": (None, "experts of a narrower width than the model are not priced"),
    "linear_conv_kernel_dim": (4, "another length of convolutions in gated delta nets is not priced"),
    "time_step_min": (0.001, "where steps begin: Megatron has 0.001 to 0.1"),
    "time_step_max": (0.1, "where steps begin: Megatron has 0.001 to 0.1"),
    "time_step_floor": (1e-4, "where steps begin: Megatron has 0.0001 at least"),
}
"""Fields that Megatron has no flag for, and the value under which they change nothing."""


@dataclass(slots=True, eq=False)
class Reading:
    """A config.json that is being read."""

    config: Config
    kind: str  # its ``model_type``
    file: str
    seq_length: int | None = None  # of the training, where it is known
    document: dict[str, Any] = field(default_factory=dict)  # fields of a model file found so far
    flags: dict[str, FlagValue] = field(default_factory=dict)  # Megatron's flags found so far
    lost: dict[str, str] = field(default_factory=dict)  # what no flag says, with the reason
    used: set[str] = field(default_factory=set)  # fields that were read
    notes: list[str] = field(default_factory=list)  # small differences that stay

    @property
    def family(self) -> Family:
        """Returns what all models of this kind have."""
        return FAMILIES[self.kind]

    def key(self, name: str) -> str:
        """The name that the file uses for a field."""
        other = self.family.names.get(name)
        return other if other is not None and other in self.config else name

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, of the family where the file has none."""
        key = self.key(name)
        self.used.add(key)
        return self.config[key] if key in self.config else self.family.defaults.get(name, default)

    def whole(self, name: str, default: int | None = None) -> int:
        """A field that must be a whole number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlannerError(self.file, self.key(name), value, "a whole number is required")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A field that must be a finite number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PlannerError(self.file, self.key(name), value, "a number is required")
        return value

    def lose(self, name: str, value: Any, reason: str) -> None:
        """Note that no flag says a field."""
        self.lost[self.key(name) if name in self.family.names else name] = (
            f"{value!r}: {reason}" if value is not None else reason
        )

    @property
    def layers(self) -> int:
        """Layers of the model, within what is worth a list."""
        return min(self.whole("num_hidden_layers"), _MOST_LAYERS)


def dense_layers(r: Reading) -> list[int]:
    """Numbers of the layers without experts."""
    if r.kind == "llama4_text":
        step, given = r.whole("interleave_moe_layer_step"), r.get("moe_layers")
        sparse = set(given) if given else {n for n in range(r.layers) if (n + 1) % step == 0}
        return [layer for layer in range(r.layers) if layer not in sparse]
    first, freq = r.get("first_k_dense_replace") or 0, r.get("moe_layer_freq") or 1
    only, step = set(r.get("mlp_only_layers") or ()), r.get("decoder_sparse_step") or 1
    return [
        layer
        for layer in range(r.layers)
        if layer < first or layer % freq != 0 or layer in only or (layer + 1) % step != 0
    ]


_SYMBOLS = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": SPARSE,
}
"""Kinds of Nemotron's layers, by their names in older and newer files."""


def _listed(r: Reading, text: str, names: str) -> str:
    """Layers of Nemotron by symbol, from a field with symbols or from one with names."""
    written, listed = r.get(text), r.get(names) or ()
    found = written if written is not None else "".join(_SYMBOLS.get(name, "?") for name in listed)
    if not isinstance(found, str) or CHUNK in found or LATER in found or (found and problem_of(found)):
        given, value = (text, written) if written is not None else (names, list(listed)[:10])
        raise PlannerError(r.file, given, value, f"layers are some of {', '.join(_SYMBOLS)}, or of M * - E")
    return found


def pattern_of(r: Reading) -> str:
    """The layers of a hybrid model by symbol; empty for other models."""
    if r.kind == "nemotron_h":
        names = "layer_types" if "layer_types" in r.config else "layers_block_type"
        layers = _listed(r, "hybrid_override_pattern", names)
        count = r.get("num_nextn_predict_layers") or 0
        return layers + count * (LATER + _listed(r, "mtp_hybrid_override_pattern", "mtp_layers_block_type"))
    if r.kind == "qwen3_next":
        step, kinds, dense = r.whole("full_attention_interval"), r.get("layer_types"), set(dense_layers(r))
        kinds = kinds or ["full_attention" if (n + 1) % step == 0 else "linear_attention" for n in range(r.layers)]
        mixers = {"full_attention": ATTENTION, "linear_attention": GATED_DELTA_NET}
        return "".join(mixers[kind] + (MLP if n in dense else SPARSE) for n, kind in enumerate(kinds))
    return ""


def read_kinds_of_layers(r: Reading) -> None:
    """A hybrid model's pattern, and the sizes of its recurrent layers."""
    pattern = pattern_of(r)
    if not pattern:
        if r.kind in HYBRID:
            raise PlannerError(r.file, "layers_block_type", None, "the file says no layers")
        return
    layers = len(layers_of(pattern))
    listed = layers // 2 if r.kind == "qwen3_next" else layers  # whose layers are two of Megatron's
    if r.whole("num_hidden_layers", listed) != listed:
        raise PlannerError(r.file, "num_hidden_layers", r.whole("num_hidden_layers"), f"{listed} layers are listed")
    r.document |= {"pattern": pattern} | sizes_of(pattern)
    if MAMBA in pattern:
        r.document["mamba"] = {
            "heads": r.whole("mamba_num_heads"),
            "head_size": r.whole("mamba_head_dim"),
            "groups": r.whole("n_groups"),
            "state_size": r.whole("ssm_state_size"),
        }
    if GATED_DELTA_NET in pattern:
        r.document["delta_net"] = {
            "key_heads": r.whole("linear_num_key_heads"),
            "value_heads": r.whole("linear_num_value_heads"),
            "key_size": r.whole("linear_key_head_dim"),
            "value_size": r.whole("linear_value_head_dim"),
        }
