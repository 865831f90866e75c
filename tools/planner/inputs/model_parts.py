"""Parts of the model file beyond a plain decoder layer: documents, flags, experts, latent attention, hybrid layers."""

import difflib
import functools
import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from megatron_het.features import FEATURES
from megatron_het.plan.placement import Blocks, part_tokens, placed_documents, token_blocks
from megatron_het.plan.schema import (
    CHUNK,
    EXPERTS,
    GATED_DELTA_NET,
    KINDS,
    LATENT_ATTENTION,
    MAMBA,
    SPARSE_ATTENTION,
    problem_of,
    sizes_of,
)
from megatron_het.safe_io import read_text
from megatron_het.safe_io.reading import shown
from megatron_het.schedule.cutting import Cutting, Starts, documents_in

from ..errors import PlannerError, file_errors
from .catalog import Strict, data

# Lengths of the documents in packed sequences, and the attention work that remains with them.
#
# A model file or ``--document-lengths`` gives a mean (for an exponential distribution) or a sample of lengths.
# Sequences are filled with documents of drawn lengths like in Megatron's datasets: one after the other, and a
# document that does not fit continues in the next sequence.


Lengths = int | tuple[int, ...]  # a mean, or a sample
_SEED, _SEQUENCES, _MOST_DOCUMENTS = 0, 64, 50_000
_MOST_PAIRS = 4_000  # bound on the pairs of ranks that are counted, over all slices and sequences
MOST_LENGTHS, LONGEST = 100_000, 1 << 40


def read_lengths(given: str) -> Lengths:
    """Reads ``--document-lengths``: a mean, or a file of lengths (spaces, lines, commas); raises PlannerError."""
    hint = "Give a mean, or a file with the lengths of some documents in tokens"
    with file_errors(hint):
        text = given if given.isdecimal() else read_text(given)
    try:
        found = tuple(int(word) for word in text.strip().strip("[]").replace(",", " ").split())
        if problem := lengths_problem(found):
            raise ValueError(problem)
    except ValueError as error:
        raise PlannerError("--document-lengths", given, None, str(error), hint) from None
    return found[0] if given.isdecimal() else found


def lengths_problem(lengths: Lengths) -> str:
    """Returns the text of an error in the lengths; "" if there is none."""
    sample = (lengths,) if isinstance(lengths, int) else lengths
    if not 1 <= len(sample) <= MOST_LENGTHS:
        return f"{len(sample)} lengths of documents, where there must be 1 to {MOST_LENGTHS}"
    wrong = next((length for length in sample if not 1 <= length <= LONGEST), None)
    return "" if wrong is None else f"a document of {shown(wrong)} tokens, where there must be 1 to {LONGEST}"


@functools.lru_cache(maxsize=8)
def drawn(lengths: Lengths, seq_length: int) -> tuple[Starts, ...]:
    """First tokens of the documents in some drawn sequences; equal in every call."""
    rng = random.Random(_SEED)
    mean = lengths if isinstance(lengths, int) else sum(lengths) / len(lengths)
    count = max(1, min(_SEQUENCES, int(_MOST_DOCUMENTS * mean / seq_length)))
    found: list[Starts] = []
    at, starts = 0, [0]
    while len(found) < count:
        # Token 0 counts as a start, also if a document continues from the sequence before.
        at += max(1, round(rng.expovariate(1 / lengths)) if isinstance(lengths, int) else rng.choice(lengths))
        while at >= seq_length:
            found.append(tuple(starts))
            at, starts = at - seq_length, [0]
        if at:
            starts.append(at)
    return tuple(found[:count])


def shares_left(lengths: Lengths, seq_length: int, window: int | None, windowed_layers: float) -> list[float]:
    """Attention pairs (query, visible key) with documents over those without, by drawn sequence, mean over layers.

    Args:
        window: Keys that a query sees in layers with a sliding window, including its own; None without such layers.
        windowed_layers: Share of layers with the window.
    """
    share = 0.0 if window is None else windowed_layers
    cutting = Cutting(seq_length, 1, window_tokens=None if window is None else window - 1, window_share=share)
    whole = cutting.keys((0,), seq_length)
    return [cutting.keys(starts, seq_length) / whole for starts in drawn(lengths, seq_length)]


class Shared(NamedTuple):
    """Traffic between context-parallel ranks, and imbalance of their attention."""

    sent: float  # mean share of a rank's queries that are sent to another rank, because they see its keys
    most: float = 1.0  # largest attention of a rank over the mean, both summed over slices
    whole: bool = False  # whether documents are placed on one rank if they fit


@functools.lru_cache(maxsize=256)
def shared(
    lengths: Lengths | None,
    seq_length: int,
    cp: int,
    slices: int,
    window: int | None = None,
    keys_per_token: float | None = None,
) -> Shared:
    """Counts the queries that ranks send, and the imbalance of their attention.

    Args:
        lengths: Lengths of documents; None if a sequence is one document.
        slices: Number of equally long slices of a sequence.
        window: Keys that a query sees, including its own; None for all of its document.
        keys_per_token: See :func:`placed_documents`, for whole documents; None: fixed blocks of a slice per rank.
    """
    tokens = max(seq_length // slices // (2 * cp), 1) * 2 * cp
    blocks = token_blocks((1,) * cp, tokens)
    count, length = max(1, _MOST_PAIRS // (slices * cp * cp)), slices * tokens
    drawn_ones = ((0,),) if lengths is None else drawn(lengths, seq_length)[:count]
    sent, most, whole = 0, 0.0, 0.0
    for sequence in drawn_ones:
        starts = tuple(start for start in sequence if start < length)
        begins = frozenset(starts)
        pieces = [documents_in((first, first + tokens), starts) for first in range(0, length, tokens)]
        held: dict[int, tuple[int, int]] = {}  # tokens of the current document by rank, and the end of the last ones
        for index, documents in enumerate(pieces):
            placed: Sequence[Blocks] = blocks
            if keys_per_token is not None:
                counted = [(lo - index * tokens, hi - index * tokens) for lo, hi in documents]
                placed = placed_documents(counted, [part_tokens(own) for own in blocks], keys_per_token)
            attention = [0.0] * cp
            spans = sorted((a + index * tokens, b + index * tokens, r) for r, own in enumerate(placed) for a, b in own)
            for first, end, owner in spans:
                for lo, hi in documents_in((first, end), starts):
                    held = {} if lo in begins else held
                    attention[owner] += (hi - lo) * (hi - lo + 1) / 2
                    for holder, (keys, last) in held.items():
                        rows = hi - lo if window is None else max(min(hi, last + window - 1) - lo, 0)
                        sent += rows * (holder != owner)
                        attention[holder] += rows * keys
                    held[owner] = held.get(owner, (0, 0))[0] + hi - lo, hi
            most += max(attention)
            whole += sum(attention) / cp
    share = sent / (len(drawn_ones) * length * (cp - 1))
    return Shared(share, 1.0 if lengths is None or window is not None else most / whole, keys_per_token is not None)


_SIZES_OF = {MAMBA: "mamba", GATED_DELTA_NET: "delta_net", EXPERTS: "experts", LATENT_ATTENTION: "latent"}
CONVOLUTION = 4  # kernel size of the convolution in a recurrent layer, in tokens
MAMBA_CHUNK, DELTA_CHUNK = 128, 64  # tokens of a chunk in the kernels of recurrent layers

FlagValue = bool | int | float | str  # value of a flag of Megatron; True for a flag without a value

_FLAGS = data("model_flags.yaml")
MODEL_FLAGS: dict[str, tuple[str, Any]] = dict(
    sorted(
        {
            **{f: (_FLAGS["arguments"].get(f, f.replace("-", "_")), value) for f, value in _FLAGS["defaults"].items()},
            **{flag: known for feature in FEATURES for flag, known in feature.training_flags.items()},
        }.items()
    )
)
"""Megatron's model flags for which a model file has no other field: argument and its default."""

TRAINING_FLAGS = frozenset((*_FLAGS["training"], *(flag for feature in FEATURES for flag in feature.training_flags)))
"""Those of them that do not change the model's function of its weights; the user may override them."""
MANAGED_FLAGS = (*_FLAGS["managed"], *(flag.removeprefix("--") for feature in FEATURES for flag in feature.sets))
"""Megatron's flags that the plan, the model file or the scripts set, so that users may not."""
PART_ARGUMENTS: dict[str, dict[str, tuple[str, Any]]] = _FLAGS["parts"]
"""Megatron's argument and its default for each size, by part of the model."""


def flag_words(flags: Mapping[str, FlagValue]) -> list[str]:
    """Flags and their values as words of a command line."""
    words = []
    for name, value in flags.items():
        if value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def pattern_text(layers: Sequence[int]) -> str:
    """A list of 0 and 1 by layer in the form of Megatron's flags: ``[1]*2+[0]*3``."""
    return "+".join(f"[{value}]*{len(list(run))}" for value, run in groupby(map(int, layers)))


def are_first(layers: Sequence[int]) -> bool:
    """Whether the layer numbers are 0, 1, 2 and so on."""
    return list(layers) == list(range(len(layers)))


def check_flags(flags: Mapping[str, FlagValue]) -> None:
    """Raise a ValueError for an unknown model flag, one with a field of its own, or a malformed value."""
    for name, value in flags.items():
        if name not in MODEL_FLAGS:
            near = difflib.get_close_matches(name, MODEL_FLAGS, n=1)
            raise ValueError(
                f"flags.{name} is no flag of a model that a field stands for"
                + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(MODEL_FLAGS)}")
            )
        switch = isinstance(MODEL_FLAGS[name][1], bool) or name.startswith("no-yarn")
        if switch != isinstance(value, bool):
            raise ValueError(
                f"flags.{name} = {value!r}: " + ("true or false is" if switch else "a value is") + " wanted"
            )
        if isinstance(value, str) and not (value.isprintable() and value.isascii() and " " not in value and value):
            raise ValueError(f"flags.{name} = {value!r} is not one word")


class Experts(Strict):
    """Mixture-of-experts layers."""

    count: int = Field(ge=2)  # experts of a layer
    top_k: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)  # width of one expert
    shared_ffn_hidden_size: int = Field(default=0, ge=0)  # width of the shared expert, 0 without one
    # number of layers with an ordinary MLP (of the model's ``ffn_hidden_size``) instead of experts
    dense_layers: int = Field(default=0, ge=0)
    # whether the dense layers are the first of the model; else ``flags`` has ``moe-layer-freq``
    dense_first: bool = True
    # whether no token is dropped; else each expert has a fixed capacity, for which the planner only estimates costs:
    # the dropped tokens depend on the TP size
    dropless: bool = True

    @property
    def dense_at_start(self) -> int:
        """Number of dense layers at the start of the model."""
        return self.dense_layers if self.dense_first else 0

    @property
    def runs(self) -> bool:
        """Whether plans can be trained: without dropped tokens, and with all dense layers at the start."""
        return self.dropless and (self.dense_first or not self.dense_layers)

    @model_validator(mode="after")
    def _consistent(self) -> "Experts":
        if self.top_k > self.count:
            raise ValueError(f"top_k = {self.top_k} is more than count = {self.count}")
        return self


class Latent(Strict):
    """Multi-head latent attention (DeepSeek-V2, section 2.1)."""

    # query_rank, key_value_rank: widths of the compressed queries (0: not compressed), and of the compressed
    # keys and values
    query_rank: int = Field(ge=0)
    key_value_rank: int = Field(ge=1)
    # nope_size, rope_size, value_size: per head, width of queries and keys without and with rotary positions, and of
    # values
    nope_size: int = Field(ge=1)
    rope_size: int = Field(ge=1)
    value_size: int = Field(ge=1)

    @property
    def compressed(self) -> int:
        """Width per token of the compressed keys and values, with the rotary part of the keys."""
        return self.key_value_rank + self.rope_size

    def query_products(self, hidden_size: int, heads: float) -> tuple[tuple[float, float], ...]:
        """Shapes ``(outputs, inputs)`` of the query projections."""
        width = heads * (self.nope_size + self.rope_size)
        if not self.query_rank:
            return ((width, hidden_size),)
        return (self.query_rank, hidden_size), (width, self.query_rank)

    def kept(self, heads: int, sliced: bool, again: bool = False) -> int:
        """Elements per token that attention keeps for backward, all heads: output and, unless recomputed, inputs."""
        inputs = heads * (self.nope_size + self.rope_size)
        return heads * self.value_size + (0 if again else inputs + (0 if sliced else inputs + heads * self.value_size))


class Mamba(Strict):
    """Mamba-2 layers (``M`` in a pattern)."""

    # heads, head_size: heads of a layer and their width
    heads: int = Field(ge=1)
    head_size: int = Field(default=64, ge=1)
    groups: int = Field(default=8, ge=1)  # groups of heads with the same B and C (input and output matrices)
    state_size: int = Field(default=128, ge=1)  # state elements per channel of a head

    @property
    def all_heads(self) -> int:
        """Number of heads, which the ranks of a replica divide."""
        return self.heads

    @property
    def travels(self) -> int:
        """Elements per token in the all-to-alls of context parallelism: inputs and outputs of the recurrence."""
        return self.projected + self.inner

    @property
    def inner(self) -> int:
        """Input width of the output projection."""
        return self.heads * self.head_size

    @property
    def state_numbers(self) -> int:
        """Elements of the recurrent state of a sequence."""
        return self.inner * self.state_size

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def projected(self) -> int:
        """Outputs of the input projection."""
        return self.inner + self.convolved + self.heads

    @property
    def small_parameters(self) -> int:
        """Parameters other than the projections: convolution, values per head, gated norm."""
        return self.convolved * (CONVOLUTION + 1) + 3 * self.heads + self.inner

    @property
    def scan_flops(self) -> float:
        """FLOPs per token of the chunked recurrence: within its chunk, and from and to the state."""
        within = MAMBA_CHUNK * (self.groups * self.state_size + self.inner)
        return 2.0 * (within + 2 * self.state_size * self.inner)

    def divides(self, tp: int) -> bool:
        """Whether TP ranks can have equal numbers of heads."""
        return self.heads % tp == 0 and self.groups % tp == 0


class DeltaNet(Strict):
    """Gated delta net layers (``G`` in a pattern)."""

    # key_heads, value_heads: heads of queries and keys, and of values
    key_heads: int = Field(ge=1)
    value_heads: int = Field(ge=1)
    # key_size, value_size: widths of a head
    key_size: int = Field(default=128, ge=1)
    value_size: int = Field(default=128, ge=1)

    @property
    def all_heads(self) -> int:
        """Number of heads, which the ranks of a replica divide."""
        return self.value_heads

    @property
    def travels(self) -> int:
        """Elements per token in the all-to-alls of context parallelism: inputs without the gate, and outputs."""
        return self.projected

    @property
    def inner(self) -> int:
        """Input width of the output projection."""
        return self.value_heads * self.value_size

    @property
    def state_numbers(self) -> int:
        """Elements of the recurrent state of a sequence."""
        return self.inner * self.key_size

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_size + self.inner

    @property
    def projected(self) -> int:
        """Outputs of the input projection."""
        return self.convolved + self.inner + 2 * self.value_heads

    @property
    def small_parameters(self) -> int:
        """Parameters other than the projections: convolution, values per head, gated norm."""
        return self.convolved * CONVOLUTION + 2 * self.value_heads + self.value_size

    @property
    def scan_flops(self) -> float:
        """FLOPs per token of the chunked delta rule: within its chunk, and from and to the state."""
        within = DELTA_CHUNK * (3 * self.key_size + 2 * self.value_size)
        return 2.0 * self.value_heads * (within + 3 * self.key_size * self.value_size)

    def divides(self, tp: int) -> bool:
        """Whether TP ranks can have equal numbers of heads."""
        return self.key_heads % tp == 0 and self.value_heads % tp == 0

    @model_validator(mode="after")
    def _consistent(self) -> "DeltaNet":
        if self.value_heads % self.key_heads:
            raise ValueError(f"key_heads = {self.key_heads} does not divide value_heads = {self.value_heads}")
        return self


def check_pattern(model: Any) -> None:
    """Raise a ValueError for an invalid pattern of a hybrid model, or sizes that do not match its kinds of layers."""
    if not model.pattern:
        lost = [name for name in ("mamba", "delta_net") if getattr(model, name) is not None]
        if lost:
            raise ValueError(f"{lost[0]} needs a pattern that says which layers are such")
        return
    problem = f"{CHUNK} has no place in it: plans say where chunks begin" if CHUNK in model.pattern else ""
    if problem := problem or problem_of(model.pattern):
        raise ValueError(f"pattern = {model.pattern!r}: {problem}")
    for name, count in sizes_of(model.pattern).items():
        if getattr(model, name) != count:
            raise ValueError(f"pattern = {model.pattern!r} has {count} layers, and {name} = {getattr(model, name)}")
    for symbol, name in _SIZES_OF.items():
        if (symbol in model.pattern) != (getattr(model, name) is not None):
            has = "has" if symbol in model.pattern else "has no"
            raise ValueError(f"pattern = {model.pattern!r} {has} layers {symbol} ({KINDS[symbol]}), see {name}")
    if SPARSE_ATTENTION in model.pattern:
        raise ValueError(f"pattern = {model.pattern!r}: no prices of {KINDS[SPARSE_ATTENTION]} are known")
    if model.experts is not None and model.experts.dense_layers:
        raise ValueError("experts.dense_layers: in a pattern every layer - is one")
    if model.attention_window is not None:
        raise ValueError("attention_window: no prices of layers of several kinds with a window are known")


def check_sizes(model: Any) -> None:
    """Raise a ValueError if the sizes of a model (``model.Model``) contradict each other."""
    if model.head_size is None and model.hidden_size % model.num_attention_heads:
        raise ValueError(
            f"num_attention_heads = {model.num_attention_heads} does not divide hidden_size = {model.hidden_size}"
        )
    if model.num_attention_heads % model.groups:
        raise ValueError(
            f"num_query_groups = {model.groups} does not divide num_attention_heads = {model.num_attention_heads}"
        )
    for size in model.micro_batch_sizes:
        if size < 1 or model.global_batch_size % size:
            raise ValueError(f"micro_batch_sizes: {size} does not divide global_batch_size = {model.global_batch_size}")
    if 0 < model.learned_positions < model.seq_length:
        raise ValueError(f"learned_positions = {model.learned_positions} is less than seq_length = {model.seq_length}")
    if not model.recompute:
        raise ValueError("recompute must allow at least one of none, selective, moe_act, mlp, full")
    if "moe_act" in model.recompute and model.experts is None:
        raise ValueError("recompute: moe_act is the activation function of experts, and the model has none")
    if model.fp8 and model.fp4:
        raise ValueError("fp8 = true and fp4 = true exclude each other")
    if (model.fp8 or model.fp4) and model.precision not in ("bf16", "fp16"):
        name = model.linear_precision
        raise ValueError(f"{name} = true needs precision bf16 or fp16 for the rest, not {model.precision}")
    check_flags(model.flags)
    check_pattern(model)
    if model.experts is not None and model.experts.dense_layers > model.num_layers:
        dense = model.experts.dense_layers
        raise ValueError(f"experts.dense_layers = {dense} is more than num_layers = {model.num_layers}")
    for feature in FEATURES:
        if problem := feature.model_problem(model):
            raise ValueError(problem)
