"""Hybrid models' patterns of layers: one symbol for each, as Megatron's ``--hybrid-layer-pattern`` writes them.

A pattern has the model's layers and, after ``/``, those that each layer for multi-token prediction is made of.
Megatron also writes where chunks begin (``|``); in a plan ``stages[].layers`` says that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

MAMBA, GATED_DELTA_NET, SPARSE_ATTENTION = "M", "G", "D"
ATTENTION, LATENT_ATTENTION, MLP, EXPERTS = "*", "+", "-", "E"
CHUNK, LATER = "|", "/"
KINDS = {
    MAMBA: "Mamba",
    GATED_DELTA_NET: "gated delta net",
    SPARSE_ATTENTION: "sparse attention",
    ATTENTION: "attention",
    LATENT_ATTENTION: "latent attention",
    MLP: "MLP",
    EXPERTS: "experts",
}
"""What the symbols stand for."""
WITH_ATTENTION = (ATTENTION, LATENT_ATTENTION)
"""Layers with keys and values that slices share."""
RECURRENT = (MAMBA, GATED_DELTA_NET)
"""Layers that pass a state along a sequence, which slices of it hand on."""


def layers_of(pattern: str) -> str:
    """The model's layers in a pattern, without those for multi-token prediction and without boundaries of chunks."""
    return pattern.split(LATER)[0].replace(CHUNK, "")


def later_layers(pattern: str) -> tuple[str, ...]:
    """The layers of every layer for multi-token prediction in a pattern."""
    return tuple(pattern.split(LATER)[1:])


def without_chunks(pattern: str) -> str:
    """A pattern without boundaries of chunks."""
    return pattern.replace(CHUNK, "")


def with_chunks(pattern: str, layers: Iterable[int]) -> str:
    """A pattern with the boundaries of chunks.

    Args:
        pattern: Its own boundaries are dropped.
        layers: Of every chunk, in Megatron's order.
    """
    main, ends = layers_of(pattern), list(itertools.accumulate(layers, initial=0))
    chunks = CHUNK.join(main[first:end] for first, end in itertools.pairwise(ends))
    return LATER.join((chunks, *later_layers(pattern)))


def problem_of(pattern: str) -> str:
    """Says what is wrong with a pattern, for a message; empty if nothing is."""
    main, later = layers_of(pattern), later_layers(pattern)
    for symbol in main + "".join(later):
        if symbol not in KINDS:
            known = ", ".join(f"{known} {name}" for known, name in KINDS.items())
            return f"{symbol!r} is no kind of layer; known are {known}"
    if not main:
        return "it has no layers before the first /"
    if len(set(later)) > 1:
        return "all layers for multi-token prediction must be made of the same layers"
    if "" in later:
        return "a layer for multi-token prediction needs a layer"
    found = set(main + "".join(later))
    if ATTENTION in found and found & {LATENT_ATTENTION, SPARSE_ATTENTION}:
        return "a model has either attention * or latent attention + and D"
    return ""
