"""Figures that cluster file and profile promise for the ranks of a plan: the measure of the doctor.

The planner writes them (``emit --doctor``), or makes them when the doctor is given the files themselves, because
reading a cluster file needs more than ranks have.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from megatron_het.plan import PlanError
from megatron_het.safe_io import FileError, read_json, write_json

FORMAT, VERSION = "megatron_het.expectations", 1
MAX_ENTRIES = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkExpectation:
    """The connection between two ranks, either direction; ``source`` is where the figures are from."""

    first: int
    second: int
    latency_s: float
    bytes_per_s: float
    source: str = "cluster file"


@dataclass(frozen=True, slots=True)
class LayerExpectation:
    """One transformer layer on one kind of device, without tensor parallelism.

    ``forward_s`` and ``backward_s`` are of ``micro_batch_size`` sequences of ``tokens`` tokens.
    """

    kind: str
    micro_batch_size: int
    tokens: int
    recompute: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class LayerModel:
    """Dimensions of the layer that the profile measured."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    seq_length: int
    precision: str


@dataclass(frozen=True, slots=True)
class Expectations:
    """Everything that is compared; empty where nothing is promised."""

    plan_hash: str = ""
    links: tuple[LinkExpectation, ...] = ()
    layers: tuple[LayerExpectation, ...] = ()
    model: LayerModel | None = None

    def link(self, first: int, second: int) -> LinkExpectation | None:
        """Returns what is promised of a pair of ranks, in either order."""
        return next((k for k in self.links if {k.first, k.second} == {first, second}), None)

    def layer(self, kind: str) -> LayerExpectation | None:
        """Returns what is promised of a kind of device."""
        return next((k for k in self.layers if k.kind == kind), None)

    def to_json(self) -> dict[str, Any]:
        """With format and version first."""
        body = asdict(self)
        lists = {name: list(body[name]) for name in ("links", "layers")}
        return {"format": FORMAT, "version": VERSION, **body, **lists}


def save_expectations(expectations: Expectations, path: str | os.PathLike[str]) -> None:
    """Write the file; see ``safe_io.write_json`` for the errors."""
    write_json(path, expectations.to_json())


def load_expectations(path: str | os.PathLike[str]) -> Expectations:
    """Read the file.

    Raises:
        PlanError: Missing, not such a file, an unknown or missing key, a wrong type, a number that cannot be.
    """
    try:
        document = read_json(path)
    except FileError as error:
        raise PlanError("--expect", error.path, error.problem, error.hint) from None
    return from_json(document)


def from_json(document: Any) -> Expectations:
    """Expectations of parsed JSON; see ``load_expectations`` for the errors."""
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise PlanError("--expect", found, f"no {FORMAT} of version {VERSION}", "Write it with emit --doctor")
    body = {key: value for key, value in document.items() if key not in ("format", "version")}
    model = body.pop("model", None)
    links, layers = body.pop("links", []), body.pop("layers", [])
    text = body.pop("plan_hash", "")
    if body or not isinstance(text, str):
        raise PlanError("--expect", next(iter(body), "plan_hash"), "unknown key or wrong type")
    return Expectations(
        text,
        tuple(_entry(LinkExpectation, entry, f"links[{i}]") for i, entry in enumerate(_list(links, "links"))),
        tuple(_entry(LayerExpectation, entry, f"layers[{i}]") for i, entry in enumerate(_list(layers, "layers"))),
        None if model is None else _entry(LayerModel, model, "model"),
    )


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        raise PlanError(f"--expect: {where}", type(value).__name__, f"a list of at most {MAX_ENTRIES} is needed")
    return value


def _entry(kind: Any, value: Any, where: str) -> Any:
    """One dataclass of numbers and names from a JSON object."""
    where = f"--expect: {where}"
    if not isinstance(value, dict):
        raise PlanError(where, value, "expected an object")
    known = kind.__dataclass_fields__
    if unknown := value.keys() - known.keys():
        raise PlanError(where, sorted(unknown)[0], "unknown key")
    for name, entry in value.items():
        wanted: Any = {"int": int, "float": (int, float), "str": str}[known[name].type]
        is_number = known[name].type != "str"
        if not isinstance(entry, wanted) or isinstance(entry, bool):
            raise PlanError(f"{where}.{name}", entry, f"expected {known[name].type}")
        if is_number and not (math.isfinite(entry) and entry >= 0):
            raise PlanError(f"{where}.{name}", entry, "must be a finite number that is not negative")
        if name == "bytes_per_s" and entry == 0:
            raise PlanError(f"{where}.{name}", entry, "must be positive")
    try:
        return kind(**value)
    except TypeError:
        raise PlanError(where, sorted(value), "a key is missing", f"It needs {', '.join(known)}") from None
