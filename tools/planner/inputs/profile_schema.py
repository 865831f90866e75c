"""Schema of ``profile.json``, which ``profile`` writes and the planner reads: dataclasses with units in their names.

Writing needs only the standard library, because it runs on compute nodes.  Reading uses
pydantic and is strict: unknown keys, missing keys, wrong types and negative numbers are errors that name
the file, the key and the value.
"""

import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from megatron_het.plan.schema import ATTENTION, EXPERTS, LATENT_ATTENTION, MLP

from ..errors import PlannerError, command, validated
from .files import read_json, text_problem, write_json

PROFILE_FORMAT = "megatron_het.profile"
PROFILE_VERSION = 1

LayerKind = Literal["embedding", "layer", "dense", "attention", "mlp", "experts", "head"]
MEASURED_AS: dict[str, LayerKind] = {
    ATTENTION: "attention",
    LATENT_ATTENTION: "attention",
    MLP: "mlp",
    EXPERTS: "experts",
}
"""Measured layer kind of a hybrid model's layers, by their symbols in a pattern."""
LinkScope = Literal["device", "node", "network"]
Operation = Literal["p2p", "all_reduce", "all_gather", "reduce_scatter"]

TIMES = ("forward_s", "backward_s", "update_s", "fixed_forward_s", "fixed_backward_s", "alone_s")
"""The measured seconds of a ``LayerTiming``."""


class _Strict:
    """A record for which pydantic refuses unknown keys."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class ProfiledExperts(_Strict):
    """The measured mixture-of-experts layers."""

    count: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    dense: bool = False  # whether the model also has layers without experts


@dataclass(frozen=True, slots=True)
class ProfiledLatent(_Strict):
    """The measured multi-head latent attention; fields as in a model file."""

    query_rank: int
    key_value_rank: int
    nope_size: int
    rope_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class ProfiledModel(_Strict):
    """The measured model; the planner refuses a profile of another model or precision.

    Tied embeddings, dropout and similar switches are not recorded, because they hardly change the times.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    seq_length: int
    precision: Literal["fp32", "tf32", "bf16", "fp16"]
    name: str = ""
    head_size: int = 0  # width of a head, 0 for ``hidden_size / num_attention_heads``
    experts: ProfiledExperts | None = None
    latent: ProfiledLatent | None = None
    window: int = 0  # keys that a query sees in layers with a sliding window, 0 without such layers
    windowed: bool = True  # whether all layers have the window
    sequence_parallel: bool = False  # whether TP groups were measured with sequence parallelism
    kinds: str = ""  # of a hybrid model: the symbols of its layers, each once


@dataclass(frozen=True, slots=True)
class LayerTiming(_Strict):
    """One measured layer kind at one operating point, on one rank of a TP group."""

    # ``embedding`` (token and position tables), ``layer`` (one transformer layer, measured once for all equal ones;
    # with experts where the model has them), ``dense`` (one without experts, of a model that has both), ``attention``,
    # ``mlp`` or ``experts`` (layers of a hybrid model) or ``head`` (final norm, output projection, loss)
    layer: LayerKind
    micro_batch_size: int  # sequences per microbatch, b
    tp: int  # tensor-parallel size; times include the TP collectives inside the node
    # tokens of each sequence in one pass; equals the sequence length unless slices (SlimPipe) were measured
    slice_tokens: int
    # forward_s, backward_s: seconds of one pass; backward includes recomputation
    forward_s: float
    backward_s: float
    update_s: float  # seconds of the optimizer step over this layer's parameters on this rank
    parameters: int  # parameters held by this rank
    activation_bytes: int  # bytes kept from forward to backward
    # bytes of the output ``[s, b, h]`` sent to the next stage (of the whole TP group, not divided by sequence
    # parallelism)
    output_bytes: int
    # tokens of the same sequence before this slice that attention also reads (0 without slices)
    context_tokens: int = 0
    recompute: Literal["none", "selective", "full"] = "none"  # Megatron's activation recompute granularity
    workspace_bytes: int = 0  # largest temporary memory in addition, during forward or backward
    # fixed_forward_s, fixed_backward_s: part of forward_s and backward_s that is spent once per pass, for any number
    # of layers; the rest is spent per layer
    fixed_forward_s: float = 0.0
    fixed_backward_s: float = 0.0
    # forward and backward while the other processes of the machine are idle; 0 if not measured
    alone_s: float = 0.0
    ep: int = 1  # expert-parallel size, over the ranks of the TP group
    windowed: bool = False  # whether the layer has the model's sliding window


@dataclass(frozen=True, slots=True)
class LargestBatch(_Strict):
    """The largest micro batch that fits into memory (Poplar, Algorithm 1)."""

    tp: int
    layers: int  # number of transformer layers of the model in the search
    micro_batch_size: int
    recompute: Literal["none", "selective", "full"] = "none"


@dataclass(frozen=True, slots=True)
class DeviceProfile(_Strict):
    """Everything measured on one node of one kind."""

    kind: str  # name of the device kind, as in the cluster file's ``gpu``
    memory_bytes: int
    gpus_per_node: int  # devices in the measured node
    timings: list[LayerTiming] = field(default_factory=list)  # one entry per layer kind and operating point
    # results of the search for the largest micro batch
    largest_batches: list[LargestBatch] = field(default_factory=list)
    reserved_bytes: int = 0  # device memory used before any model exists (context, communicator buffers)
    # host_to_device_bytes_per_s, device_to_host_bytes_per_s: offload bandwidth; None without separate host memory
    # (CPU)
    host_to_device_bytes_per_s: float | None = None
    device_to_host_bytes_per_s: float | None = None
    # whether layers of Transformer Engine were measured, if the GPU runs them; otherwise Megatron's own
    transformer_engine: bool = True


@dataclass(frozen=True, slots=True)
class LinkProfile(_Strict):
    """One measured connection and operation.

    ``latency_s`` and ``bytes_per_s`` are the fit t(n) = latency_s + n / bytes_per_s, where n is
    the payload of the operation as the caller sees it (the message for p2p; the whole buffer for
    collectives).  ``samples`` are the points ``[bytes, seconds]`` the fit was made from.
    """

    # ``node`` = between devices of one node, ``network`` = between two nodes, ``device`` = inside one device
    scope: LinkScope
    # first_kind, second_kind: device kinds at both ends (equal for ``node``)
    first_kind: str
    second_kind: str
    operation: Operation  # point-to-point or collective
    participants: int  # ranks that took part (2 for p2p)
    latency_s: float
    bytes_per_s: float
    samples: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Profile(_Strict):
    """A ``profile.json``.

    ``complete`` is False in the file of an interrupted run, from which profiling resumes; by default the
    planner refuses such a file.
    """

    model: ProfiledModel
    devices: list[DeviceProfile] = field(default_factory=list)
    links: list[LinkProfile] = field(default_factory=list)
    complete: bool = True
    notes: str = ""

    def device(self, kind: str) -> DeviceProfile | None:
        """The profile of a device kind, or None."""
        return next((d for d in self.devices if d.kind == kind), None)


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile atomically: an existing file is replaced by a completely written one."""
    write_json(path, {"format": PROFILE_FORMAT, "version": PROFILE_VERSION, **asdict(profile)})


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and check a profile.

    Raises:
        PlannerError: Missing or truncated file, another format or version, an unknown or missing
            key, a wrong type, a negative or non-finite number.
    """
    return profile_from_document(read_json(path, f"Write one with '{command()} profile'"), str(path))


def profile_from_document(document: Any, file: str) -> Profile:
    """A Profile from parsed JSON; see ``load_profile`` for the errors."""
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found != PROFILE_FORMAT:
        raise PlannerError(file, "format", found, f"not a profile (expected {PROFILE_FORMAT!r})")
    if type(document.get("version")) is not int or document["version"] != PROFILE_VERSION:
        problem = f"this release reads version {PROFILE_VERSION}"
        raise PlannerError(file, "version", document.get("version"), problem, f"Run '{command()} profile' again")
    body = {k: v for k, v in document.items() if k not in ("format", "version")}
    profile: Profile = validated(Profile, body, file)
    _check_numbers(asdict(profile), file, "")
    # Kinds of devices are names: they are printed in tables and compared with those of the cluster file.
    names = [(f"devices[{i}].kind", device.kind) for i, device in enumerate(profile.devices)]
    for i, link in enumerate(profile.links):
        names += [(f"links[{i}].first_kind", link.first_kind), (f"links[{i}].second_kind", link.second_kind)]
    for key, name in [("model.name", profile.model.name), *names]:
        if problem := text_problem(name):
            raise PlannerError(file, key, name, problem)
    # One entry per device kind, and one timing per operating point; duplicates would be ambiguous.
    kinds: dict[str, int] = {}
    for d, device in enumerate(profile.devices):
        if kinds.setdefault(device.kind, d) != d:
            problem = f"devices[{kinds[device.kind]}] has the same kind"
            raise PlannerError(file, f"devices[{d}].kind", device.kind, problem, "Keep one of them")
        points: dict[tuple[object, ...], int] = {}
        for i, t in enumerate(device.timings):
            point = (t.layer, t.micro_batch_size, t.tp, t.slice_tokens, t.context_tokens, t.recompute, t.ep, t.windowed)
            if points.setdefault(point, i) != i:
                problem = f"the same layer and operating point as timings[{points[point]}]"
                raise PlannerError(file, f"devices[{d}].timings[{i}]", list(point), problem, "Keep one of them")
    return profile


_MAY_BE_ZERO = (
    "_bytes",
    "update_s",
    "fixed_forward_s",
    "fixed_backward_s",
    "alone_s",
    "latency_s",
    "context_tokens",
    "parameters",
    "layers",
    "head_size",
    "window",
    "shared_ffn_hidden_size",
)


def _check_numbers(value: Any, file: str, key: str) -> None:
    """Refuse numbers that are not finite and positive; some fields may be zero."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_numbers(item, file, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_numbers(item, file, f"{key}[{i}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        name = key.rsplit(".", 1)[-1].split("[")[0]
        zero_ok = (name.endswith(_MAY_BE_ZERO) and name != "memory_bytes") or name == "samples"
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero_ok):
            raise PlannerError(file, key, value, "must be a positive number")
