"""Architectures of the small models: the flags that determine parameters and their use."""

import functools
import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

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


_DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_ALL: dict[str, str] = {name: text for group, own in _DATA.items() if group != "repeated" for name, text in own.items()}


def _expanded(text: str) -> tuple[str, ...]:
    """Returns the words of a text, with the flags in place of the names that they have there."""
    given = ((_expanded(_ALL[word[1:]]) if word.startswith("@") else (word,)) for word in words(text))
    return tuple(itertools.chain.from_iterable(given))


def _families(*groups: str) -> dict[str, tuple[str, ...]]:
    return {name: _expanded(text) for group in groups for name, text in _DATA[group].items()}


FAMILIES = _families("dense")
ATTENTION_FAMILIES = _families("attention")
EXPERT_FAMILIES = _families("experts")
RECURRENT_FAMILIES = _families("recurrent")
HYBRID_FAMILIES = _families("hybrid", "recurrent")
RECURRENT_HEADS = 2  # what heads share in recurrent layers, of keys or groups; TP divides them
WIDE = "wide"
ALL_FAMILIES = _families("wide", "dense", "attention", "experts", "counted", "later", "hybrid", "recurrent")


def has_latent_attention(family: str) -> bool:
    """Whether queries of a hybrid family share no keys in groups, but latents."""
    return str(_DATA["repeated"].get(family, [""])[0]).startswith("+")


def hybrid_pattern(family: str, layers: int) -> str:
    """The pattern of a hybrid family with so many layers; empty for other families."""
    if family not in HYBRID_FAMILIES:
        return ""
    unit, later = _DATA["repeated"][family]
    return (unit * layers)[:layers] + later
