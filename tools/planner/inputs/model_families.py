"""Families of Hugging Face's models: properties of each ``model_type``, and the reader of a ``config.json``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_het.plan.schema import (
    ATTENTION,
    CHUNK,
    GATED_DELTA_NET,
    LATER,
    MAMBA,
    MLP,
    layers_of,
    problem_of,
    sizes_of,
)
from megatron_het.plan.schema import EXPERTS as SPARSE

from ..errors import PlannerError
from .catalog import data
from .model_parts import FlagValue

Config = Mapping[str, Any]
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one ``model_type``; ``data/families.yaml`` explains the fields."""

    title: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[Literal["experts", "latent", "later_tokens"], ...] = ()
    biases: Literal["qkv", "qkvo", "all"] = "qkvo"
    layer_norm: bool = False
    gated: bool = True
    names: Mapping[str, str] = field(default_factory=dict)


_DATA = data("families.yaml")
FAMILIES = {kind: Family(**body) for kind, body in _DATA["families"].items()}
SAME_AS: Mapping[str, str] = _DATA["same_as"]
"""Other values of ``model_type``, each with the family that it belongs to."""
INSIDE: Mapping[str, str] = _DATA["inside"]
"""Multimodal models with a text model in ``text_config``, and the ``model_type`` of that text model."""
# Each layer is an attention or a delta net, then an MLP.
ALTERNATING = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
HYBRID = ALTERNATING | {"nemotron_h"}  # models with layers of several kinds
NOT_OF_THE_MODEL = frozenset(_DATA["not_of_the_model"])
SHAPES_ONLY = frozenset(_DATA["shapes_only"])

ONLY_WHEN: dict[str, tuple[Any, str]] = {name: tuple(row) for name, row in _DATA["only_when"].items()}
"""Fields without a flag in Megatron: the value with which they have no effect, and the reason."""
READ_TOGETHER: Mapping[str, Mapping[str, Any]] = _DATA["rules"]
"""Fields by the function of ``model_configs`` that reads them, and the resulting fields or flags."""


@dataclass(slots=True, eq=False)
class Reading:
    """State of reading a ``config.json``."""

    config: Config
    kind: str  # ``model_type`` of the file
    file: str
    seq_length: int | None = None  # sequence length of the training, if known
    document: dict[str, Any] = field(default_factory=dict)  # fields of a model file found so far
    flags: dict[str, FlagValue] = field(default_factory=dict)  # Megatron's flags found so far
    lost: dict[str, str] = field(default_factory=dict)  # fields that Megatron cannot express, with the reasons
    used: set[str] = field(default_factory=set)  # fields that were read
    notes: list[str] = field(default_factory=list)  # small differences that remain

    @property
    def family(self) -> Family:
        """Returns the properties of this ``model_type``."""
        return FAMILIES[self.kind]

    def key(self, name: str) -> str:
        """The name of a field in this file: the family's own name if the file has it."""
        other = self.family.names.get(name)
        return other if other is not None and other in self.config else name

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or the family's default if the file lacks it."""
        key = self.key(name)
        self.used.add(key)
        return self.config[key] if key in self.config else self.family.defaults.get(name, default)

    def whole(self, name: str, default: int | None = None) -> int:
        """A field that must be a whole number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlannerError(self.file, self.key(name), value, "a whole number is required")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A field that must be a finite number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PlannerError(self.file, self.key(name), value, "a number is required")
        return value

    def sizes(self, part: str) -> dict[str, int]:
        """Sizes of a part of the model, e.g. ``mamba``."""
        return {size: self.whole(name) for size, name in _DATA["sizes"][part].items()}

    def lose(self, name: str, value: Any, reason: str) -> None:
        """Note a field that Megatron cannot express."""
        self.lost[self.key(name) if name in self.family.names else name] = (
            f"{value!r}: {reason}" if value is not None else reason
        )

    @property
    def layers(self) -> int:
        """Number of layers, at most ``_MOST_LAYERS`` to bound lists of layers."""
        return min(self.whole("num_hidden_layers"), _MOST_LAYERS)


def dense_layers(r: Reading) -> list[int]:
    """Numbers of the layers without experts."""
    first, freq = r.get("first_k_dense_replace") or 0, r.get("moe_layer_freq") or 1
    only, step = set(r.get("mlp_only_layers") or ()), r.get("decoder_sparse_step") or 1
    last = r.get("moe_layer_end_index", -1)
    between = range(first, last + 1 if last >= 0 else r.layers)
    if listed := r.get("mlp_layer_types"):
        return [layer for layer, kind in enumerate(listed) if kind == "dense"]
    if sparse := r.get("moe_layers"):
        return [layer for layer in range(r.layers) if layer not in sparse]
    return [
        layer
        for layer in range(r.layers)
        if layer not in between or layer % freq != 0 or layer in only or (layer + 1) % step != 0
    ]


_SYMBOLS: dict[str, str] = _DATA["symbols"]
"""Kinds of Nemotron's layers, by their names in older and newer files."""


def _listed(r: Reading, text: str, names: str) -> str:
    """Symbols of Nemotron's layers, from the field ``text`` with symbols or else from ``names``."""
    written, listed = r.get(text), r.get(names) or ()
    found = written if written is not None else "".join(_SYMBOLS.get(name, "?") for name in listed)
    if not isinstance(found, str) or CHUNK in found or LATER in found or (found and problem_of(found)):
        given, value = (text, written) if written is not None else (names, list(listed)[:10])
        raise PlannerError(r.file, given, value, f"layers are some of {', '.join(_SYMBOLS)}, or of M * - E")
    return found


def pattern_of(r: Reading) -> str:
    """Symbols of a hybrid model's layers; empty for other models."""
    if r.kind == "nemotron_h":
        names = "layer_types" if "layer_types" in r.config else "layers_block_type"
        layers = _listed(r, "hybrid_override_pattern", names)
        count = r.get("num_nextn_predict_layers") or 0
        return layers + count * (LATER + _listed(r, "mtp_hybrid_override_pattern", "mtp_layers_block_type"))
    if r.kind in ALTERNATING:
        step, kinds = r.whole("full_attention_interval"), r.get("layer_types")
        kinds = kinds or ["full_attention" if (n + 1) % step == 0 else "linear_attention" for n in range(r.layers)]
        mixers = {"full_attention": ATTENTION, "linear_attention": GATED_DELTA_NET}
        dense = set(dense_layers(r) if "experts" in r.family.parts else range(len(kinds)))
        mlps = [MLP if layer in dense else SPARSE for layer in range(len(kinds))]
        layers = "".join(mixers[kind] + mlp for kind, mlp in zip(kinds, mlps, strict=True))
        return layers + (r.get("mtp_num_hidden_layers") or 0) * (LATER + ATTENTION + mlps[-1])
    return ""


def read_kinds_of_layers(r: Reading) -> None:
    """Read a hybrid model's pattern and the sizes of its recurrent layers."""
    pattern = pattern_of(r)
    if not pattern:
        if r.kind in HYBRID:
            raise PlannerError(r.file, "layers_block_type", None, "the file says no layers")
        return
    layers = len(layers_of(pattern))
    listed = layers // 2 if r.kind in ALTERNATING else layers  # a layer there is two of Megatron's
    if r.whole("num_hidden_layers", listed) != listed:
        raise PlannerError(r.file, "num_hidden_layers", r.whole("num_hidden_layers"), f"{listed} layers are listed")
    r.document |= {"pattern": pattern} | sizes_of(pattern)
    if MAMBA in pattern:
        r.document["mamba"] = r.sizes("mamba")
    if GATED_DELTA_NET in pattern:
        r.document["delta_net"] = r.sizes("delta_net")
