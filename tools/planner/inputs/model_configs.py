"""Conversion of Hugging Face's ``config.json`` to fields of a model file and flags of Megatron.

``RULES`` and ``FAMILIES`` list all known fields; ``python -m benchmarks.configs`` makes the tables of docs/models.md.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.plan.schema import EXPERTS as SPARSE
from megatron_het.plan.schema import layers_of

from ..errors import PlannerError
from .files import comment
from .model_families import (
    FAMILIES,
    HYBRID,
    INSIDE,
    NOT_OF_THE_MODEL,
    ONLY_WHEN,
    READ_TOGETHER,
    SAME_AS,
    SHAPES_ONLY,
    Config,
    Reading,
    dense_layers,
    pattern_of,
    read_kinds_of_layers,
)
from .model_parts import are_first, pattern_text

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SOFT_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class Rule:
    """Fields that one function reads."""

    keys: tuple[str, ...]  # names of the fields in most families
    becomes: str  # resulting fields or flags, for the documentation
    read: Callable[[Reading], None]


def from_config(config: Config, file: str, seq_length: int | None = None) -> dict[str, Any]:
    """The contents of a model file, without batch and sequence length, from a Hugging Face ``config.json``.

    Args:
        seq_length: Sequence length of the training; some fields have no effect below a certain length.

    Raises:
        PlannerError: An unknown architecture, a missing key, or a value of a wrong type.
    """
    kind = config.get("model_type")
    inside = config.get("text_config")
    if isinstance(inside, dict) and kind in INSIDE:
        outer = {key: config[key] for key in ("torch_dtype", "dtype", "tie_word_embeddings") if key in config}
        config, kind = {**outer, **inside}, inside.get("model_type") or INSIDE[str(kind)]
    kind = SAME_AS.get(str(kind), kind)
    if not isinstance(kind, str) or kind not in FAMILIES:
        near = difflib.get_close_matches(str(kind or ""), {*FAMILIES, *SAME_AS, *INSIDE}, cutoff=0.5)
        hint = f"Near: {', '.join(near)}. " if near else ""
        hint += "All known ones are in docs/models.md; write a model file for others (docs/planner.md)"
        raise PlannerError(file, "model_type", kind, "unknown architecture", hint)
    reading = Reading(config, kind, file, seq_length)
    reading.flags |= reading.family.flags
    reading.lost |= reading.family.lost
    for rule in RULES:
        _apply(rule, reading)
    reading.document["name"] = _name(config, file)
    # Usual defaults, which do not change results.
    reading.document |= {"distributed_optimizer": True, "sequence_parallel": True}
    unread = sorted(set(config) - reading.used - NOT_OF_THE_MODEL - SHAPES_ONLY)
    found = {
        "flags": reading.flags,
        "lost": reading.lost,
        "unread": [*(comment(f"{key} = {config[key]!r}")[:200] for key in unread), *reading.notes],
    }
    return reading.document | {key: value for key, value in found.items() if value}


def _apply(rule: Rule, reading: Reading) -> None:
    """Apply a rule; raises PlannerError for a value of an unexpected type."""
    try:
        rule.read(reading)
    except PlannerError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        given = [key for key in map(reading.key, rule.keys) if key in reading.config]
        problem = f"one of these has a value of another type than these files have: {error}"
        raise PlannerError(reading.file, ", ".join(given), None, problem) from None


def _name(config: Config, file: str) -> str:
    """The model's name in the file, or else the name of the file's folder."""
    given = str(config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    text = given or Path(file).resolve().parent.name or "model"
    return "".join(c for c in text if c.isprintable())[:100] or "model"


def _sizes(r: Reading) -> None:
    hidden, heads = r.whole("hidden_size"), r.whole("num_attention_heads")
    latent = _latent_attention(r)
    r.document |= {
        "num_layers": r.whole("num_hidden_layers", len(layers_of(pattern_of(r))) or None),
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden
        if r.kind == "gpt2" and not r.get("intermediate_size")
        else r.whole("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": heads if latent else r.get("num_key_value_heads") or heads,
        "vocab_size": r.whole("vocab_size"),
    }
    width = r.get("head_dim")
    if width and not latent and width * heads != hidden:
        r.document["head_size"] = r.whole("head_dim")
    if latent and heads > 0 and hidden % heads:  # Megatron wants a width of heads, though these have others
        r.document["head_size"] = r.whole("qk_nope_head_dim") + r.whole("qk_rope_head_dim")


def _kind_of_weights(r: Reading) -> None:
    r.document["precision"] = _PRECISIONS.get(str(r.get("torch_dtype") or r.get("dtype")), "bf16")
    r.document["tied_embeddings"] = bool(r.get("tie_word_embeddings", False))


def _activation(r: Reading) -> None:
    kind = r.get("hidden_act", "silu")
    gated = r.family.gated and kind != "relu2"
    r.document["gated"] = gated
    if r.kind == "gpt_oss":
        if kind != "silu":
            r.lose("hidden_act", kind, "models of this kind have the quick GeLU that silu stands for here")
        r.flags["activation-func-clamp-value"] = float(r.number("swiglu_limit"))
        if r.get("swiglu_alpha", 1.702) != 1.702:
            r.lose("swiglu_alpha", r.get("swiglu_alpha"), "Megatron's quick GeLU has 1.702")
    elif gated and kind != "silu":
        r.lose("hidden_act", kind, "Megatron has gated MLPs with silu (--swiglu) and quick GeLU only")
    elif not gated and kind == "relu2":
        r.flags["squared-relu"] = True
    elif not gated and kind == "gelu":
        r.flags["no-bias-gelu-fusion"] = True  # the fused kernel computes the tanh approximation
    elif not gated and kind not in _SOFT_GELU:
        r.lose("hidden_act", kind, "Megatron has gelu, its tanh approximation and relu2 for MLPs without a gate")


def _norms(r: Reading) -> None:
    r.flags["normalization"] = "LayerNorm" if r.family.layer_norm else "RMSNorm"
    name = "layer_norm_eps" if r.family.layer_norm else "rms_norm_eps"
    r.flags["norm-epsilon"] = float(r.number(name, 1e-6))
    r.used |= {"norm_eps"} if r.kind == "nemotron_h" else set()  # another name of it, in older files
    if _latent_attention(r) and r.flags["norm-epsilon"] != 1e-6:
        said = "norms of what is compressed have epsilon 1e-6 there, and Megatron has one epsilon for all norms"
        r.notes.append(said)
    use = r.get("use_qk_norm", False)
    if use and r.kind != "llama4_text":
        r.flags["qk-layernorm"] = True
    elif use:
        if 0 in _rotated(r):
            r.lose("use_qk_norm", True, "Megatron norms queries and keys in layers without positions too")
        else:
            r.flags["qk-l2-norm"] = True


def _biases(r: Reading) -> None:
    given, mlp = bool(r.get("attention_bias", False)), bool(r.get("mlp_bias", False))
    kind, reason = r.family.biases, "Megatron gives biases to all linear layers, or to queries, keys and values"
    r.document["biases"] = kind == "all" or (kind == "qkvo" and given and mlp)
    if r.document["biases"] and not given:
        r.lose("attention_bias", False, reason)
    elif kind == "qkv" and given:
        r.flags["add-qkv-bias"] = True
    elif kind == "qkvo" and given and not mlp:
        only = "Megatron gives the projection after attention a bias with all linear layers only"
        r.lose("attention_bias", True, only)
    if mlp and not r.document["biases"]:
        r.lose("mlp_bias", True, reason)


def _positions(r: Reading) -> None:
    if r.kind == "gpt2":
        r.document["learned_positions"] = r.whole("max_position_embeddings", 1024)
        return
    if r.kind == "nemotron_h":  # attention without position embeddings
        r.used |= {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
        return
    scaling = dict(r.get("rope_parameters") or r.get("rope_scaling") or {})
    r.used.add("rope_scaling")
    if scaling and all(isinstance(part, dict) for part in scaling.values()):  # one dictionary per kind of layer
        parts = list(scaling.values())
        if any(part != parts[0] for part in parts):
            r.lose("rope_parameters", None, "layers with and without a window have different rotary positions")
        scaling = dict(scaling.get("full_attention") or parts[0])
    if r.kind == "gemma3_text" and r.get("rope_local_base_freq") != r.get("rope_theta"):
        r.lose("rope_local_base_freq", r.get("rope_local_base_freq"), "layers with a window have another rotary base")
    base = r.number("rope_theta", 10000)
    base = scaling.pop("rope_theta", None) or base
    share = scaling.pop("partial_rotary_factor", None) or r.get("partial_rotary_factor", 1.0)
    if base != int(base):
        r.lose("rope_theta", base, "--rotary-base is a whole number")
    r.flags["rotary-base"] = int(base)
    if share != 1:
        r.flags["rotary-percent"] = float(share)
    if not r.get("rope_interleave", True):
        r.lose("rope_interleave", False, "Megatron's latent attention has interleaved rotary positions")
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    _SCALINGS.get(kind, _unknown_scaling)(r, kind, scaling)


def _latent_attention(r: Reading) -> bool:
    return "latent" in r.family.parts


def _unscaled(r: Reading, kind: str, scaling: dict[str, Any]) -> None:
    if _latent_attention(r):
        r.flags["rope-type"] = "rope"


def _linear(r: Reading, kind: str, scaling: dict[str, Any]) -> None:
    factor = scaling.get("factor")
    if _latent_attention(r) or not isinstance(factor, int | float) or factor != int(factor):
        return _unknown_scaling(r, kind, scaling)
    if factor != 1:
        r.flags["rotary-seq-len-interpolation-factor"] = int(factor)
    return None


def _llama3(r: Reading, kind: str, scaling: dict[str, Any]) -> None:
    fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    for name, value in fixed.items():
        if scaling.get(name) != value:
            r.lose(f"rope_scaling.{name}", scaling.get(name), f"Megatron has {value}")
    if _latent_attention(r):
        return _unknown_scaling(r, kind, scaling)
    r.flags["use-rope-scaling"] = True
    r.flags["rope-scaling-factor"] = float(scaling.get("factor") or 8)
    return None


def _yarn(r: Reading, kind: str, scaling: dict[str, Any]) -> None:
    fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    length = scaling.get("original_max_position_embeddings") or r.config.get("max_position_embeddings") or 4096
    factor = scaling.get("factor") or r.config.get("max_position_embeddings", length) / length
    first, second = scaling.get("mscale"), scaling.get("mscale_all_dim")
    rounded = scaling.get("truncate", True)
    if _latent_attention(r):
        r.flags["rope-type"] = "yarn"
        fixed = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096, "truncate": True}
        found = {"beta_fast": fast, "beta_slow": slow, "original_max_position_embeddings": length, "truncate": rounded}
        for name, value in fixed.items():
            if found[name] != value:
                reason = f"no flag says it for latent attention: Megatron has {value}"
                r.lose(f"rope_scaling.{name}", found[name], reason)
    else:
        r.flags |= {
            "position-embedding-type": "yarn",
            "yarn-original-max-position-embeddings": int(length),
            "yarn-beta-fast": float(fast),
            "yarn-beta-slow": float(slow),
        }
        if not rounded:
            r.flags["no-yarn-correction-range-round-to-int"] = True
        if r.flags.get("rotary-percent", 1.0) != 1:
            r.lose("partial_rotary_factor", r.flags["rotary-percent"], "Megatron's yarn turns whole heads")
    r.flags["rotary-scaling-factor"] = float(factor)
    beta = scaling.get("llama_4_scaling_beta")
    if beta and (r.seq_length is None or r.seq_length > length):
        reason = f"a factor of queries that grows with the position; sequences up to {length} are the same"
        r.lose("rope_scaling.llama_4_scaling_beta", beta, reason)
    if first and second:
        r.flags |= {"mscale": float(first), "mscale-all-dim": float(second)}
    elif second:
        r.lose("rope_scaling.mscale_all_dim", second, "without mscale Megatron scales cosines otherwise")
    usual = _mscale(factor, first) / _mscale(factor, second) if first and second else _mscale(factor, 1.0)
    given = scaling.get("attention_factor")
    if given is not None and not math.isclose(given, usual, rel_tol=1e-6):
        r.lose("rope_scaling.attention_factor", given, f"Megatron computes it: {usual:g}")


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _unknown_scaling(r: Reading, kind: str, scaling: dict[str, Any]) -> None:
    whole = r.config.get("max_position_embeddings")
    if kind == "dynamic" and r.seq_length is not None and isinstance(whole, int) and r.seq_length <= whole:
        return _unscaled(r, kind, scaling)  # dynamic scaling has no effect up to that length
    r.lose("rope_scaling", kind, "Megatron has rotary positions unscaled, linear (whole factors), llama3 and yarn")
    return None


_SCALINGS: dict[str, Callable[[Reading, str, dict[str, Any]], None]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _rotated(r: Reading) -> list[int]:
    """1 for each layer with rotary positions, 0 for the others, of a model that has both."""
    given, step = r.get("no_rope_layers"), r.whole("no_rope_layer_interval")
    return list(given) if given else [int((layer + 1) % step != 0) for layer in range(r.layers)]


def _layers_without_positions(r: Reading) -> None:
    if "no_rope_layer_interval" not in r.family.defaults:
        return
    without = [1 - int(bool(rotated)) for rotated in _rotated(r)]
    if any(without):
        r.flags["no-rope-freq"] = pattern_text(without)
    if r.kind != "llama4_text":
        return
    chunk, floor = r.whole("attention_chunk_size"), r.whole("floor_scale")
    r.used.add("attn_scale")
    if r.seq_length is None or r.seq_length > chunk:
        reason = f"Megatron has no attention by chunks; sequences up to {chunk} are the same"
        r.lose("attention_chunk_size", chunk, reason)
    if r.get("attn_temperature_tuning") and any(without) and (r.seq_length is None or r.seq_length >= floor):
        reason = f"Megatron has none; sequences below floor_scale = {floor} are the same"
        r.lose("attn_temperature_tuning", True, reason)
    r.used.add("layer_types")


def _window(r: Reading) -> None:
    """Read the sliding window and the layers that have one."""
    window, kinds = r.get("sliding_window"), r.get("layer_types")
    used, first, step = r.get("use_sliding_window", True), r.get("max_window_layers"), r.get("sliding_window_pattern")
    step = r.get("_sliding_window_pattern") or step
    if not window or used is False or r.kind == "llama4_text":
        return
    if isinstance(kinds, list) and kinds:
        windowed = [int(kind == "sliding_attention") for kind in kinds]
    elif isinstance(first, int):
        windowed = [int(layer >= first) for layer in range(r.layers)]
    elif isinstance(step, int) and step > 0:
        windowed = [int((layer + 1) % step != 0) for layer in range(r.layers)]
    else:
        windowed = [1] * r.layers
    if not any(windowed):
        return
    share = sum(windowed) / len(windowed)
    r.document |= {"attention_window": r.whole("sliding_window"), "windowed_layers": share}
    period = round(1 / (1 - share)) if share < 1 else 0
    if any(bool(given) != (period == 0 or (layer + 1) % period != 0) for layer, given in enumerate(windowed)):
        r.flags["window-attn-skip-freq"] = pattern_text(windowed)


def _experts(r: Reading) -> None:
    if "experts" not in r.family.parts or (r.kind in HYBRID and SPARSE not in pattern_of(r)):
        return
    count, width = r.whole("num_experts"), r.whole("moe_intermediate_size")
    number = r.get("n_shared_experts") or 0
    shared = r.get("shared_expert_intermediate_size") or number * width
    dense = [] if r.kind in HYBRID else dense_layers(r)
    if dense and len(dense) == r.layers:
        return
    r.document["experts"] = {
        "count": count,
        "top_k": r.whole("num_experts_per_tok", 2 if r.kind == "mixtral" else None),
        "ffn_hidden_size": width,
        "shared_ffn_hidden_size": shared,
        "dense_layers": len(dense),
        "dense_first": are_first(dense),
    }
    if not are_first(dense):
        r.flags["moe-layer-freq"] = pattern_text([int(layer not in dense) for layer in range(r.layers)])


def _routing(r: Reading) -> None:
    if "experts" not in r.document:
        return
    top_k, scores = r.document["experts"]["top_k"], r.get("scoring_func")
    normed, method = r.get("norm_topk_prob", True), r.get("topk_method")
    usual = r.family.defaults.get("scoring_func", "softmax")
    if scores not in (None, usual):
        r.lose("scoring_func", scores, f"models of this kind have {usual}")
    if method not in (None, "greedy", "noaux_tc" if usual == "sigmoid" else "group_limited_greedy"):
        r.lose("topk_method", method, "not known")
    if usual == "sigmoid":
        r.flags["moe-router-score-function"] = "sigmoid"
        if not normed and top_k > 1:
            r.lose("norm_topk_prob", False, "with sigmoid scores Megatron divides by their sum")
    elif r.kind != "llama4_text" and (not normed or top_k == 1):
        r.flags["moe-router-pre-softmax"] = True
    groups, chosen = r.get("n_group") or 1, r.get("topk_group") or 1
    if groups > 1 and method != "greedy":
        best = 2 if r.kind != "deepseek_v2" else 1
        if top_k // chosen != best:
            how = "the best expert" if best == 1 else "the two best experts"
            r.lose("topk_method", method, f"groups are chosen by {how}; Megatron takes the best {top_k // chosen}")
        r.flags |= {"moe-router-num-groups": groups, "moe-router-group-topk": chosen}
    scale = r.get("routed_scaling_factor") or 1.0
    if scale != 1:
        r.flags["moe-router-topk-scaling-factor"] = float(scale)
    if r.kind == "nemotron_h":
        r.flags["moe-router-enable-expert-bias"] = True
    if usual == "sigmoid" or r.kind == "deepseek_v2":
        r.flags["moe-router-dtype"] = "fp32"
    if r.get("router_jitter_noise"):
        r.flags["moe-input-jitter-eps"] = float(r.number("router_jitter_noise"))
    weight = r.get("router_aux_loss_coef", r.get("aux_loss_alpha")) or 0.0
    r.used.add("aux_loss_alpha")
    if weight and r.kind != "llama4_text":
        kind = "seq_aux_loss" if r.get("seq_aux", False) else "aux_loss"
        r.flags |= {"moe-router-load-balancing-type": kind, "moe-aux-loss-coeff": float(weight)}
    else:
        r.get("seq_aux")


def _latent(r: Reading) -> None:
    if not _latent_attention(r):
        return
    r.document["latent"] = {"query_rank": r.get("q_lora_rank") or 0} | r.sizes("latent")


def _later_tokens(r: Reading) -> None:
    if "later_tokens" not in r.family.parts:
        return
    count = r.get("num_nextn_predict_layers") or 0
    r.document["mtp_num_layers"] = count
    if count and r.flags.get("position-embedding-type", "rope") != "rope":
        r.lose("num_nextn_predict_layers", count, "Megatron's layers know rotary positions without yarn only")


def _start(r: Reading) -> None:
    if r.config.get("initializer_range") is not None:
        r.flags["init-method-std"] = float(r.number("initializer_range"))
    r.used.add("initializer_range")


def _dropout(r: Reading) -> None:
    attention, hidden = r.number("attention_dropout", 0.0), r.number("hidden_dropout", 0.0)
    embedding = r.number("embd_pdrop", hidden)
    if attention:
        r.flags["attention-dropout"] = float(attention)
    if hidden:
        r.flags["hidden-dropout"] = float(hidden)
    if embedding != hidden:
        r.lose("embd_pdrop", embedding, f"Megatron drops of embeddings what it drops elsewhere: {hidden:g}")


def _only_when(r: Reading) -> None:
    limit = r.get("time_step_limit")
    if limit is not None and list(limit) not in ([0.0, math.inf], [0.0, "Infinity"]):
        r.lose("time_step_limit", list(limit), "bounds of steps in Mamba layers: no flag says them")
    for name, (nothing, reason) in ONLY_WHEN.items():
        value = None if name in r.used else r.get(name)  # some families give the name another meaning
        if value is not None and value != nothing:
            r.lose(name, value, reason)
    scale = r.get("query_pre_attn_scalar")
    if scale is not None:
        width = r.get("head_dim") or r.whole("hidden_size") // r.whole("num_attention_heads")
        if scale != width:
            reason = f"no flag says the scale of attention, which is by head_dim = {width}"
            r.lose("query_pre_attn_scalar", scale, reason)


_READERS = {
    reader.__name__.lstrip("_"): reader
    for reader in (
        _sizes,
        read_kinds_of_layers,
        _kind_of_weights,
        _activation,
        _norms,
        _biases,
        _positions,
        _layers_without_positions,
        _window,
        _latent,
        _experts,
        _routing,
        _later_tokens,
        _start,
        _dropout,
    )
}
RULES = (
    *(Rule(tuple(row["keys"]), row["becomes"], _READERS[name]) for name, row in READ_TOGETHER.items()),
    Rule(
        (*ONLY_WHEN, "query_pre_attn_scalar", "time_step_limit"),
        "refused where they change anything: no flag says them",
        _only_when,
    ),
)
