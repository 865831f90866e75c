"""Architectures of the small models: the flags that determine parameters and their use."""

import functools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

from megatron_het.families import LATENT_SPEC
from megatron_het.plan import ModelShape
from testing.runner import words

# The families of ``examples/models`` as small models: what their scripts print, as flags of cases.


FOLDER = Path(__file__).resolve().parent.parent / "examples" / "models"
MODELS = tuple(sorted(file.stem for file in FOLDER.glob("*.sh")))
"""Names of the scripts, which are keys of families too."""
_UNTIED = "--untie-embeddings-and-output-weights"


@functools.cache
def printed(name: str, size: str) -> tuple[str, ...]:
    """Returns the words that a script prints."""
    command = ["bash", str(FOLDER / f"{name}.sh"), size]
    return words(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


def small_flags(name: str, layers: int) -> tuple[str, ...]:
    """Flags of a small model with another number of layers; whether embeddings are tied is the case's choice."""
    found = [word for word in printed(name, "small") if word != _UNTIED]
    if "--multi-latent-attention" in found:
        found += ["--spec", *LATENT_SPEC]  # stock Megatron has no such attention on a CPU
    # Dense layers come first, and layers of experts are the rest.
    return tuple(re.sub(r"\+\[1\]\*\d+$", f"+[1]*{layers - 1}", word) for word in found)


def has_experts(name: str) -> bool:
    """Whether the family has layers of experts."""
    return "--num-experts" in printed(name, "small")


def with_shape(name: str, shape: ModelShape) -> ModelShape:
    """A plan's model with the small model's sizes, its layers and ties kept."""
    flags = printed(name, "small")

    def value(flag: str) -> int:
        return int(flags[flags.index(flag) + 1])

    heads = value("--num-attention-heads")
    groups = value("--num-query-groups") if "--num-query-groups" in flags else heads
    ffn = value("--ffn-hidden-size")
    return replace(
        shape,
        hidden_size=value("--hidden-size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        seq_length=value("--seq-length"),
        ffn_hidden_size=ffn,
    )


_LLAMA = words("--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear")
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": _LLAMA,
    "gpt": words("--normalization LayerNorm --position-embedding-type learned_absolute"),
    "qkv-bias": (*_LLAMA, "--add-qkv-bias"),
    "squared-relu": words(
        "--normalization LayerNorm --squared-relu --position-embedding-type rope --disable-bias-linear"
    ),
    "layernorm-1p": words(
        "--normalization LayerNorm --apply-layernorm-1p --squared-relu --position-embedding-type rope "
        "--rotary-percent 0.5 --disable-bias-linear"
    ),
    "kv-channels": (*_LLAMA, "--kv-channels", "16"),
    "output-gate": (*_LLAMA, "--attention-output-gate"),
    "qk-norm": (*_LLAMA, "--qk-layernorm"),
    "mup": (*_LLAMA, "--use-mup", "--mup-base-hidden-size", "32"),
    "softmax-offset": (*_LLAMA, "--softmax-type", "learnable"),
    "sliding-window": (*_LLAMA, *words("--window-size 8,0 --window-attn-skip-freq 2")),
}
# Kinds of attention, by what limits or offsets the softmax.
ATTENTION_FAMILIES: dict[str, tuple[str, ...]] = {
    "softmax-offset": FAMILIES["softmax-offset"],
    "off-by-one": (*_LLAMA, "--softmax-type", "off-by-one"),
    "sliding-window": FAMILIES["sliding-window"],
    "mistral": (*_LLAMA, *words("--window-size 12,0")),
    "gpt-oss": (*_LLAMA, *words("--softmax-type learnable --window-size 5,0 --window-attn-skip-freq 2 --add-qkv-bias")),
}
_MOE = (*_LLAMA, *words("--num-experts 4 --moe-token-dispatcher-type alltoall"))
# Layers of experts, by how tokens are routed and the experts balanced; {rest} is the number of layers but the first.
EXPERT_FAMILIES: dict[str, tuple[str, ...]] = {
    "mixtral": (
        *_MOE,
        *words("--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"),
    ),
    "sequence-balance": (
        *_MOE,
        *words(
            "--moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 "
            "--moe-z-loss-coeff 1e-3 --moe-router-pre-softmax"
        ),
    ),
    "deepseek": (
        *_MOE,
        *words(
            "--moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--moe-router-load-balancing-type none --moe-shared-expert-intermediate-size 64 --moe-ffn-hidden-size 48 "
            "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 1.5 "
            "--moe-layer-freq [0]+[1]*{rest} --moe-z-loss-coeff 1e-3"
        ),
    ),
    "global-balance": (
        *_MOE,
        *words("--moe-router-topk 2 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2"),
    ),
    "capacity": (
        *_MOE,
        *words(
            "--moe-router-topk 1 --moe-router-pre-softmax --moe-expert-capacity-factor 1.0 "
            "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-layer-freq 2"
        ),
    ),
    "qwen3-moe": (
        *_MOE,
        *words(
            "--qk-layernorm --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
            "--moe-router-dtype fp32"
        ),
    ),
}
# Every token goes to every expert: what a rank holds does not depend on values.
COUNTED_FAMILIES: dict[str, tuple[str, ...]] = {
    "every-expert": (
        *_MOE,
        *words(
            "--moe-router-topk 4 --moe-router-load-balancing-type none --moe-shared-expert-intermediate-size 64 "
            "--moe-ffn-hidden-size 48 --moe-layer-freq [0]+[1]*{rest}"
        ),
    )
}
# Tokens after the next one are predicted too.
LATER_FAMILIES: dict[str, tuple[str, ...]] = {
    "later-tokens": (*_LLAMA, *words("--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3")),
    "later-tokens-repeated": (
        *_LLAMA,
        *words("--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 --mtp-use-repeated-layer"),
    ),
    "later-tokens-experts": (*EXPERT_FAMILIES["deepseek"], *words("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3")),
}
_LATENT = words(
    "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --q-lora-rank 24 --qk-layernorm"
)
_HYBRID = (*_LLAMA, *words("--hybrid-layer-pattern {pattern} --spec megatron_het.hybrid_layers local_stack_spec"))
_RECURRENT = (*_LLAMA, *words("--hybrid-layer-pattern {pattern} --spec testing.recurrent_layers stack_spec"))
_HYBRID_EXPERTS = words(
    "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-ffn-hidden-size 48 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
)
# Hybrid models: one kind of layer for each symbol of a pattern.
HYBRID_FAMILIES: dict[str, tuple[str, ...]] = {
    "hybrid": _HYBRID,
    "hybrid-norms": (*_HYBRID, "--qk-layernorm", "--add-qkv-bias"),
    "hybrid-experts": (*_HYBRID, *_HYBRID_EXPERTS),
    "hybrid-latent": (*_HYBRID, *_LATENT),
    "hybrid-latent-experts": (*_HYBRID, *_LATENT, *_HYBRID_EXPERTS),
    "hybrid-later": (*_HYBRID, *words("--mtp-loss-scaling-factor 0.3")),
}
RECURRENT_HEADS = 2  # what heads share in recurrent layers, of keys or groups; TP divides them
# Layers that pass a state along the sequence, on the CPU by plain stand-ins for their kernels.
RECURRENT_FAMILIES: dict[str, tuple[str, ...]] = {
    "hybrid-delta": (
        *_RECURRENT,
        *words(
            f"--linear-num-key-heads {RECURRENT_HEADS} --linear-num-value-heads 4 --linear-key-head-dim 8 "
            "--linear-value-head-dim 8"
        ),
    ),
    "hybrid-mamba": (
        *_RECURRENT,
        *words(f"--mamba-num-heads 4 --mamba-head-dim 16 --mamba-num-groups {RECURRENT_HEADS} --mamba-state-dim 8"),
    ),
}
RECURRENT_FAMILIES["hybrid-mamba-experts"] = (*RECURRENT_FAMILIES["hybrid-mamba"], *_HYBRID_EXPERTS)
HYBRID_FAMILIES |= RECURRENT_FAMILIES
_REPEATED = {
    "hybrid": ("*-", ""),
    "hybrid-norms": ("*-", ""),
    "hybrid-experts": ("*E*-", ""),
    "hybrid-latent": ("+-", ""),
    "hybrid-latent-experts": ("+E+-", ""),
    "hybrid-later": ("*-", "/*-"),
    "hybrid-delta": ("G-*-", ""),
    "hybrid-mamba": ("M-*-", ""),
    "hybrid-mamba-experts": ("ME*E", ""),
}
"""The layers that a pattern repeats, and those for multi-token prediction."""


def has_latent_attention(family: str) -> bool:
    """Whether queries of a hybrid family share no keys in groups, but latents."""
    return _REPEATED.get(family, ("", ""))[0].startswith("+")


def hybrid_pattern(family: str, layers: int) -> str:
    """The pattern of a hybrid family with so many layers; empty for other families."""
    if family not in HYBRID_FAMILIES:
        return ""
    unit, later = _REPEATED[family]
    return (unit * layers)[:layers] + later


# Products in fp8 want multiples of 16 in every dimension, in blocks of 128, of a slice and on a TP rank too.
WIDE = "wide"
_WIDE = {
    WIDE: (*_LLAMA, *words("--hidden-size 256 --ffn-hidden-size 512 --seq-length 512 --max-position-embeddings 512"))
}
ALL_FAMILIES = (
    _WIDE | FAMILIES | ATTENTION_FAMILIES | EXPERT_FAMILIES | COUNTED_FAMILIES | LATER_FAMILIES | HYBRID_FAMILIES
)
