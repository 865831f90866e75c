"""The families of ``examples/models`` as small models: what their scripts print, as flags of cases."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

from benchmarks.runner import words
from megatron_het.families.gpt import LATENT_SPEC
from megatron_het.plan import ModelShape

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "models"
MODELS = tuple(sorted(file.stem for file in FOLDER.glob("*.sh")))
"""Names of the scripts, which are keys of families too."""
_UNTIED = "--untie-embeddings-and-output-weights"


@functools.cache
def printed(name: str, size: str) -> tuple[str, ...]:
    """The words that a script prints.

    Args:
        name: One of ``MODELS``.
        size: ``full`` or ``small``.
    """
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
