"""Conversion of the arguments in a Megatron checkpoint to fields of a model file."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_het import safe_io as untrusted
from megatron_het.plan.schema import GATED_DELTA_NET, MAMBA, MODEL_SIZES, without_chunks
from megatron_het.safe_io.reading import Inert, read_pickled

from ..errors import PlannerError, file_errors
from .model_parts import MODEL_FLAGS, PART_ARGUMENTS, FlagValue, are_first, pattern_text

Config = Mapping[str, Any]


def checkpoint_arguments(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """The arguments of the run that wrote a Megatron checkpoint, and the file from which they were read.

    Args:
        path: The folder of all checkpoints or of one iteration, or the file ``common.pt``.

    Raises:
        PlannerError: The folder has no checkpoint, or the checkpoint no arguments.
    """
    given = Path(path)
    file = given if given.suffix == ".pt" else _common_file(given)
    with file_errors():
        value = read_pickled(file)
    found = value.get("args") if isinstance(value, dict) else None
    if not isinstance(found, Inert) or not found.state:
        raise PlannerError(str(file), "args", None, "this checkpoint does not hold the arguments of its run")
    return {str(name): plain for name, plain in found.state.items()}, str(file)


def _common_file(folder: Path) -> Path:
    tracker = folder / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        with file_errors():
            word = untrusted.read_text(tracker, 100).strip()
        if word != "release" and not (word.isascii() and word.isdigit()):
            raise PlannerError(str(tracker), "(file)", word[:50], "expected the number of an iteration, or 'release'")
        folder /= word if word == "release" else f"iter_{int(word):07}"
    if not (folder / "common.pt").is_file():
        problem = "neither a Megatron checkpoint (common.pt) nor a Hugging Face model (config.json)"
        hint = "Name a folder that --save wrote with --ckpt-format torch_dist, or a model file"
        raise PlannerError(str(folder), "(folder)", None, problem, hint)
    return folder / "common.pt"


def from_arguments(arguments: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The contents of a model file from the arguments of a Megatron run."""

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
        # Megatron clears the argument if TP is 1; with experts TP requires sequence parallelism.
        "sequence_parallel": switched("sequence_parallel") or bool(arguments.get("num_experts")),
    }
    document |= {name: number(name) for name in (*MODEL_SIZES, "ffn_hidden_size", "global_batch_size")}
    if arguments.get("position_embedding_type") == "learned_absolute":
        document["learned_positions"] = number("max_position_embeddings")
    document |= _parts(arguments, number, document) | _hybrid(arguments, number)
    document["flags"] = _flags(arguments, document) or None
    return {key: value for key, value in document.items() if value is not None}


def _flags(arguments: Mapping[str, Any], document: Config) -> dict[str, FlagValue]:
    """The model's flags that differ from Megatron's defaults, and those whose default in ``emit`` differs."""
    found: dict[str, FlagValue] = {}
    for name, (argument, default) in MODEL_FLAGS.items():
        value = arguments.get(argument, default)
        if isinstance(value, list | tuple):
            numbers = all(isinstance(item, int) for item in value)
            value = pattern_text(value) if value and numbers else value[0] if len(value) == 1 else None
        if name == "no-yarn-correction-range-round-to-int":
            value = False if value is False else None
            found |= {} if value is None else {name: True}
            continue
        if value is None or value == default or not isinstance(value, bool | int | float | str):
            continue
        found[name] = True if isinstance(default, bool) or name.startswith("no-yarn") else value
    found["normalization"] = str(arguments.get("normalization") or "LayerNorm")
    for name in ("attention-dropout", "hidden-dropout"):  # the default is 0 in ``emit`` and 0.1 in Megatron
        value = arguments.get(MODEL_FLAGS[name][0], 0)
        found.pop(name, None)
        if isinstance(value, int | float) and value:
            found[name] = float(value)
    if document.get("learned_positions") or found.get("position-embedding-type") == "rope":
        found.pop("position-embedding-type", None)
    dense = document.get("experts", {})
    if not dense.get("dense_layers") or dense.get("dense_first"):
        found.pop("moe-layer-freq", None)
    if isinstance(found.get("window-attn-skip-freq"), int):
        found.pop("window-attn-skip-freq")  # the document has ``windowed_layers``
    return found


def _hybrid(arguments: Mapping[str, Any], number: Callable[..., Any]) -> dict[str, Any]:
    """Fields of a hybrid model: pattern and sizes of recurrent layers; empty for other models."""
    pattern = arguments.get("hybrid_layer_pattern")
    if not isinstance(pattern, str):
        return {}
    found: dict[str, Any] = {"pattern": without_chunks(pattern)}
    if MAMBA in pattern:
        mamba = found["mamba"] = _sizes("mamba", number)
        mamba["heads"] = mamba["heads"] or 2 * number("hidden_size") // mamba["head_size"]
    if GATED_DELTA_NET in pattern:
        found["delta_net"] = _sizes("delta_net", number)
    return found


def _sizes(part: str, number: Callable[..., Any]) -> dict[str, Any]:
    return {size: number(*argument) for size, argument in PART_ARGUMENTS[part].items()}


def _parts(arguments: Mapping[str, Any], number: Callable[..., Any], document: Config) -> dict[str, Any]:
    """Fields of experts, latent attention, sliding window and head size."""
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
            "dense_first": are_first(dense),
        }
    window, period = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if isinstance(window, list | tuple) and window:
        found["attention_window"] = window[0] + 1
        if isinstance(period, list) and period:
            found["windowed_layers"] = sum(map(bool, period)) / len(period)
        else:
            found["windowed_layers"] = 1 - 1 / period if period else 1.0
    if latent:
        found["latent"] = _sizes("latent", number)
    return found
