"""Models that others describe: a Hugging Face ``config.json`` and the arguments in a Megatron checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_het import untrusted
from megatron_het.untrusted.pickled import Inert, read_pickled

from .errors import PlannerError, from_file_error

Config = Mapping[str, Any]
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def is_config(document: Any) -> bool:
    """Whether a document is a Hugging Face ``config.json``."""
    return isinstance(document, dict) and ("model_type" in document or "architectures" in document)


def from_config(config: Config, file: str) -> dict[str, Any]:
    """Our model document from a Hugging Face ``config.json``; batch and sequence length are not in it.

    Raises:
        PlannerError: An architecture that is not known here, or a key that is missing.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise PlannerError(
            file,
            "model_type",
            kind,
            "unknown architecture",
            f"Known: {', '.join(sorted(_ARCHITECTURES))}; write a model file for others (docs/planner.md)",
        )
    heads, hidden = _need(config, "num_attention_heads", file), _need(config, "hidden_size", file)
    document: dict[str, Any] = {
        "name": _name(config, file),
        "num_layers": _need(config, "num_hidden_layers", file),
        "hidden_size": hidden,
        "ffn_hidden_size": _need(config, "intermediate_size", file),
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "vocab_size": _need(config, "vocab_size", file),
        "precision": _PRECISIONS.get(str(config.get("torch_dtype") or config.get("dtype")), "bf16"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "distributed_optimizer": True,
    }
    width = config.get("head_dim")
    if width and width * heads != hidden:
        document["head_size"] = width
    document |= _window(config)
    return document | _ARCHITECTURES[kind](config, file)


def _name(config: Config, file: str) -> str:
    """The name of the model, or of the folder that holds the file."""
    given = str(config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    text = given or Path(file).resolve().parent.name or "model"
    return "".join(c for c in text if c.isprintable())[:100] or "model"


def _need(config: Config, key: str, file: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlannerError(file, key, value, "a whole number is required")
    return value


def _window(config: Config) -> dict[str, Any]:
    """A sliding window, where some layers have one."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return {}
    if isinstance(kinds, list) and kinds:
        share = sum(kind == "sliding_attention" for kind in kinds) / len(kinds)
    else:
        share = 1.0
    return {"attention_window": window, "windowed_layers": share} if share else {}


def _dense(config: Config, file: str) -> dict[str, Any]:
    return {}


def _mixtral(config: Config, file: str) -> dict[str, Any]:
    return {
        "experts": {
            "count": _need(config, "num_local_experts", file),
            "top_k": _need(config, "num_experts_per_tok", file),
            "ffn_hidden_size": _need(config, "intermediate_size", file),
        }
    }


def _qwen_experts(config: Config, file: str) -> dict[str, Any]:
    layers, step = _need(config, "num_hidden_layers", file), config.get("decoder_sparse_step") or 1
    only = set(config.get("mlp_only_layers") or ())
    dense = [layer for layer in range(min(layers, 10_000)) if layer in only or (layer + 1) % step != 0]
    return {
        "experts": {
            "count": _need(config, "num_experts", file),
            "top_k": _need(config, "num_experts_per_tok", file),
            "ffn_hidden_size": _need(config, "moe_intermediate_size", file),
            "shared_ffn_hidden_size": config.get("shared_expert_intermediate_size") or 0,
            "dense_layers": len(dense),
            "dense_first": _are_first(dense),
        }
    }


def _are_first(layers: list[int]) -> bool:
    return layers == list(range(len(layers)))


def _deepseek(config: Config, file: str) -> dict[str, Any]:
    width = _need(config, "moe_intermediate_size", file)
    return {
        "mtp_num_layers": config.get("num_nextn_predict_layers") or 0,
        "num_query_groups": _need(config, "num_attention_heads", file),
        "experts": {
            "count": _need(config, "n_routed_experts", file),
            "top_k": _need(config, "num_experts_per_tok", file),
            "ffn_hidden_size": width,
            "shared_ffn_hidden_size": (config.get("n_shared_experts") or 0) * width,
            "dense_layers": config.get("first_k_dense_replace") or 0,
        },
        "latent": {
            "query_rank": _need(config, "q_lora_rank", file),
            "key_value_rank": _need(config, "kv_lora_rank", file),
            "nope_size": _need(config, "qk_nope_head_dim", file),
            "rope_size": _need(config, "qk_rope_head_dim", file),
            "value_size": _need(config, "v_head_dim", file),
        },
    }


_ARCHITECTURES: dict[str, Callable[[Config, str], dict[str, Any]]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _dense,
    "qwen3": _dense,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_experts,
    "qwen3_moe": _qwen_experts,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


def checkpoint_arguments(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """The arguments of the run that wrote a Megatron checkpoint, and the file that holds them.

    Args:
        path: The folder of all checkpoints, of one iteration, or the file ``common.pt``.

    Raises:
        PlannerError: No checkpoint in the folder, or one without arguments.
    """
    given = Path(path)
    file = given if given.suffix == ".pt" else _common_file(given)
    try:
        value = read_pickled(file)
    except untrusted.FileError as error:
        raise from_file_error(error) from None
    found = value.get("args") if isinstance(value, dict) else None
    if not isinstance(found, Inert) or not found.state:
        raise PlannerError(str(file), "args", None, "this checkpoint does not hold the arguments of its run")
    return {str(name): plain for name, plain in found.state.items()}, str(file)


def _common_file(folder: Path) -> Path:
    tracker = folder / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        try:
            word = untrusted.read_text(tracker, 100).strip()
        except untrusted.FileError as error:
            raise from_file_error(error) from None
        if word != "release" and not (word.isascii() and word.isdigit()):
            raise PlannerError(str(tracker), "(file)", word[:50], "expected the number of an iteration, or 'release'")
        folder /= word if word == "release" else f"iter_{int(word):07}"
    if not (folder / "common.pt").is_file():
        raise PlannerError(
            str(folder),
            "(folder)",
            None,
            "neither a Megatron checkpoint (common.pt) nor a Hugging Face model (config.json)",
            "Name a folder that --save wrote with --ckpt-format torch_dist, or a model file",
        )
    return folder / "common.pt"


def from_arguments(arguments: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Our model document from the arguments of a Megatron run."""

    def number(name: str, default: int | None = None) -> Any:
        value = arguments.get(name)
        return default if value is None else value

    def switched(name: str) -> bool:
        return arguments.get(name) is True

    document: dict[str, Any] = {
        "name": Path(file).resolve().parent.name or "checkpoint",
        "num_query_groups": number("num_query_groups") if switched("group_query_attention") else None,
        "vocab_size": number("padded_vocab_size", number("vocab_size")),
        "precision": "bf16" if switched("bf16") else "fp16" if switched("fp16") else "fp32",
        "gated": switched("swiglu"),
        "biases": switched("add_bias_linear"),
        "tied_embeddings": not switched("untie_embeddings_and_output_weights"),
        "distributed_optimizer": switched("use_distributed_optimizer"),
        # Megatron clears it where TP is 1, and with experts TP needs it.
        "sequence_parallel": switched("sequence_parallel") or bool(arguments.get("num_experts")),
    }
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length"):
        document[name] = number(name)
    document["global_batch_size"] = number("global_batch_size")
    document["mtp_num_layers"] = number("mtp_num_layers", 0)
    if arguments.get("position_embedding_type") == "learned_absolute":
        document["learned_positions"] = number("max_position_embeddings")
    document |= _parts(arguments, number, document)
    return {key: value for key, value in document.items() if value is not None}


def _parts(arguments: Mapping[str, Any], number: Callable[..., Any], document: Config) -> dict[str, Any]:
    """Experts, latent attention and wide heads."""
    found: dict[str, Any] = {}
    width, heads = arguments.get("kv_channels"), document["num_attention_heads"]
    latent = arguments.get("multi_latent_attention") is True
    if isinstance(width, int) and isinstance(heads, int) and not latent and width * heads != document["hidden_size"]:
        found["head_size"] = width
    if arguments.get("num_experts"):
        pattern = arguments.get("moe_layer_freq")
        if isinstance(pattern, int) and isinstance(document["num_layers"], int) and pattern > 0:
            pattern = [int(layer % pattern == 0) for layer in range(min(document["num_layers"], 10_000))]
        dense = [i for i, sparse in enumerate(pattern) if not sparse] if isinstance(pattern, list) else []
        found["experts"] = {
            "count": arguments["num_experts"],
            "top_k": number("moe_router_topk", 2),
            "ffn_hidden_size": number("moe_ffn_hidden_size", document["ffn_hidden_size"]),
            "shared_ffn_hidden_size": number("moe_shared_expert_intermediate_size", 0),
            "dense_layers": len(dense),
            "dense_first": _are_first(dense),
        }
    window, period = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if isinstance(window, list | tuple) and window:
        found["attention_window"] = window[0] + 1
        if isinstance(period, list) and period:
            found["windowed_layers"] = sum(map(bool, period)) / len(period)
        else:
            found["windowed_layers"] = 1 - 1 / period if period else 1.0
    if latent:
        found["latent"] = {
            "query_rank": number("q_lora_rank"),
            "key_value_rank": number("kv_lora_rank"),
            "nope_size": number("qk_head_dim"),
            "rope_size": number("qk_pos_emb_head_dim"),
            "value_size": number("v_head_dim"),
        }
    return found
