"""Packed documents and kinds of attention under every schedule: the plans of the dense cases with other models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cases import Case
from benchmarks.families import ATTENTION_FAMILIES
from benchmarks.runner import words

_PACKED_FAMILIES = ("llama", "gpt", "qk-norm", "softmax-offset", "off-by-one")
# How documents are told apart: flags of the run and its reference, and of the run alone.  Stock Megatron in one
# process has no attention by the dataset's documents; every document ends with its token, so both are the same.
DOCUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "by token": (words("--reset-attention-mask"), ()),
    "by token, with positions": (words("--reset-attention-mask --reset-position-ids"), ()),
    "by dataset": (words("--reset-attention-mask --reset-position-ids"), words("--dataloader-inter-document-masking")),
    "positions alone": (words("--reset-position-ids"), ()),
}


def packed[C: Case](case: C, documents: str, family: str) -> C:
    """The case with packed documents."""
    extra, own = DOCUMENTS[documents]
    chosen = {**case.chosen, "family": family, "documents": documents}
    return replace(case, family=family, extra=(*case.extra, *extra), own=(*case.own, *own), chosen=chosen)


def with_documents(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases with documents of long-tailed lengths in every sequence.

    Args:
        cases: Of a dense model; those in fp32 count.
        seed: Of the choice.
    """
    rng, found = random.Random(seed), []
    ways = [*DOCUMENTS, "by dataset", "by token, with positions"]
    for case in cases:
        if case.plan.training.precision == "fp32":
            found.append(packed(case, rng.choice(ways), rng.choice(_PACKED_FAMILIES)))
    return found


def with_attention(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases with a kind of attention each; in fp32 alone."""
    rng, found = random.Random(seed), []
    for case in cases:
        if case.plan.training.precision != "fp32":
            continue
        family = rng.choice(list(ATTENTION_FAMILIES))
        chosen: dict[str, Any] = {**case.chosen, "family": family}
        found.append(replace(case, family=family, chosen=chosen))
    return found
