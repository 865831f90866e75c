"""How long the documents of a packed sequence are, and what that leaves of attention.

A model file, or ``--document-lengths``, says it as a mean, for lengths that fall off exponentially, or as a sample of
lengths.  Sequences are filled with documents drawn from it, as Megatron's datasets fill them: one after the other, and
a document that does not fit goes on in the next sequence.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from megatron_het.features.context_exchange import exchange_units
from megatron_het.features.slices import cutting_of, has_even_slices, is_sliced
from megatron_het.plan import Plan
from megatron_het.schedule.cutting import Cutting, SlicePart, Starts
from megatron_het.untrusted import FileError, read_text
from megatron_het.untrusted.errors import shown

from .errors import PlannerError, from_file_error

if TYPE_CHECKING:
    from .model import Model

Lengths = int | tuple[int, ...]
"""A mean, or a sample."""
_SEED, _SEQUENCES, _MOST_DOCUMENTS = 0, 64, 50_000
MOST_LENGTHS, LONGEST = 100_000, 1 << 40


def read_lengths(given: str) -> Lengths:
    """What ``--document-lengths`` says: a number, or a file of numbers between spaces, lines or commas.

    Raises:
        PlannerError: It is neither.
    """
    hint = "Give a mean, or a file with the lengths of some documents in tokens"
    try:
        words = [given] if given.isdecimal() else read_text(given).strip().strip("[]").replace(",", " ").split()
        found = tuple(int(word) for word in words)
        if problem := lengths_problem(found):
            raise ValueError(problem)
    except FileError as error:
        raise from_file_error(error, hint) from None
    except ValueError as error:
        raise PlannerError("--document-lengths", given, None, str(error), hint) from None
    return found[0] if given.isdecimal() else found


def lengths_problem(lengths: Lengths) -> str:
    """What is wrong with lengths; "" if nothing is."""
    sample = (lengths,) if isinstance(lengths, int) else lengths
    if not 1 <= len(sample) <= MOST_LENGTHS:
        return f"{len(sample)} lengths of documents, where there must be 1 to {MOST_LENGTHS}"
    wrong = next((length for length in sample if not 1 <= length <= LONGEST), None)
    return "" if wrong is None else f"a document of {shown(wrong)} tokens, where there must be 1 to {LONGEST}"


@functools.lru_cache(maxsize=8)
def drawn(lengths: Lengths, seq_length: int) -> tuple[Starts, ...]:
    """Where the documents of some sequences begin; the same ones in every call."""
    rng = random.Random(_SEED)
    mean = lengths if isinstance(lengths, int) else sum(lengths) / len(lengths)
    count = max(1, min(_SEQUENCES, int(_MOST_DOCUMENTS * mean / seq_length)))
    found: list[Starts] = []
    at, starts = 0, [0]
    while len(found) < count:
        # The first sequence begins within a document, as all later ones do.
        at += max(1, round(rng.expovariate(1 / lengths)) if isinstance(lengths, int) else rng.choice(lengths))
        while at >= seq_length:
            found.append(tuple(starts))
            at, starts = at - seq_length, [0]
        if at:
            starts.append(at)
    return tuple(found[:count])


def attention_share(model: Model) -> float:
    """Pairs of a query and a key that it sees, in the mean of sequences and layers, over those of whole sequences."""
    if model.document_lengths is None:
        return 1.0
    cutting = _seen(model, Cutting(model.seq_length, 1))
    sequences = drawn(model.document_lengths, model.seq_length)
    pairs = sum(cutting.keys(starts, model.seq_length) for starts in sequences)
    return pairs / len(sequences) / cutting.keys((0,), model.seq_length)


def slice_parts(model: Model, plan: Plan) -> tuple[tuple[SlicePart, ...], ...]:
    """What the slices of a plan have of every microbatch, as ranks cut them; empty where they see all before them.

    Args:
        model: Its documents.
        plan: Says how sequences are cut, and what devices attend to for each other.
    """
    plain = cutting_of(plan)
    if not is_sliced(plan) or (model.document_lengths is None and plain.is_even and has_even_slices(plan)):
        return ()
    cutting, units = _seen(model, cutting_of(plan, _arguments(model))), exchange_units(plan)
    found, at = [], 0
    for microbatch in range(plan.training.num_microbatches):
        size = plan.training.sequences(microbatch)
        found.append(_parts(cutting, units, model.document_lengths, at, size))
        at += size
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _parts(cutting: Cutting, units: int, lengths: Lengths | None, at: int, size: int) -> tuple[SlicePart, ...]:
    """Of one microbatch, which has ``size`` sequences from the ``at``-th on."""
    if lengths is None:
        return cutting.parts(None, units)
    sequences = drawn(lengths, cutting.length)
    return cutting.parts([sequences[(at + i) % len(sequences)] for i in range(size)], units)


def _seen(model: Model, cutting: Cutting) -> Cutting:
    """The cutting with the model's windows."""
    if model.attention_window is None:
        return cutting
    return replace(cutting, window_tokens=model.attention_window - 1, window_share=model.windowed_layers)


def _arguments(model: Model) -> SimpleNamespace:
    """What of Megatron's arguments decides how long slices of equal work are."""
    x = model.experts
    return SimpleNamespace(
        hidden_size=model.hidden_size,
        kv_channels=model.head_dim,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.groups,
        num_layers=model.num_layers,
        group_query_attention=True,
        swiglu=model.gated,
        ffn_hidden_size=model.ffn_hidden_size,
        num_experts=x.count if x else None,
        moe_router_topk=x.top_k if x else 0,
        moe_ffn_hidden_size=x.ffn_hidden_size if x else None,
        moe_shared_expert_intermediate_size=x.shared_ffn_hidden_size if x else None,
    )
