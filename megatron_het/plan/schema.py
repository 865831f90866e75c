"""The plan's schema, version 1: frozen dataclasses and their reading from JSON values.

Reading is strict: an unknown key, a missing key or a value of the wrong type is an
error that names the field.  Relations between fields are checked in ``validate.py``.
"""

import dataclasses
import functools
import itertools
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from megatron_het.safe_io import one_line, shown
from megatron_het.schedule.ir import Place, path_of, placement_of


class PlanError(ValueError):
    """A plan, or a plan together with the training arguments, cannot be run."""

    def __init__(self, where: str, value: object, problem: str, hint: str = "") -> None:
        self.where = where  # the field or option, e.g. ``stages[1].replicas[0].ranks``
        self.value = value  # what was found there
        self.problem = problem  # why it is wrong
        self.hint = hint
        text = f"{where} = {shown(value, 200)}: {problem}"
        if hint:
            text += f". {hint}"
        super().__init__(one_line(text))


# Inputs of a plan's prediction: seconds per device and chunk, links.  A run compares itself with them.
#
# The names are those of ``schedule.cost.Costs``.  A *device* is a replica of a stage; devices are counted through the
# stages, as in programs.

_OMITTED = {"omit_default": True}


def _row() -> tuple[float, ...]:
    """A field with one figure per chunk, left out of files where there is none."""
    found: tuple[float, ...] = field(default=(), metadata=_OMITTED)
    return found


def _figure() -> float:
    """A field with one figure, left out of files where it is 0."""
    found: float = field(default=0.0, metadata=_OMITTED)
    return found


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Seconds (and bytes) of devices that are alike, for one whole microbatch."""

    devices: tuple[int, ...]  # their numbers
    # forward_s, backward_s: of every chunk, and so all that follows but for the last five figures; see
    # ``schedule.cost.Costs``
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    attention_forward_s: tuple[float, ...] = _row()
    attention_backward_s: tuple[float, ...] = _row()
    kv_message_bytes: tuple[float, ...] = _row()
    query_message_bytes: tuple[float, ...] = _row()
    gather_s: tuple[float, ...] = _row()
    reduce_s: tuple[float, ...] = _row()
    prefetch_s: tuple[float, ...] = _row()
    offload_s: tuple[float, ...] = _row()
    act_offload_s: tuple[float, ...] = _row()
    act_fetch_s: tuple[float, ...] = _row()
    step_s: tuple[float, ...] = _row()
    vocab_forward_s: float = _figure()
    vocab_backward_s: float = _figure()
    embed_forward_s: float = _figure()
    embed_backward_s: float = _figure()
    tail_s: float = _figure()


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Directed pairs of devices with equal links: a message of n bytes takes ``latency_s + n / bytes_per_s``."""

    pairs: tuple[tuple[int, ...], ...]
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PlannedCosts:
    """The costs of a plan's operations; attributes as those of ``schedule.cost.Costs``."""

    devices: tuple[DeviceCosts, ...]
    links: tuple[LinkCosts, ...] = ()
    message_bytes: float = 0.0
    weight_share: float = 0.5
    diagonal: float = 1.0
    operation_s: float = _figure()
    post_s: float = _figure()
    host_blocks: bool = field(default=False, metadata=_OMITTED)


PER_CHUNK = tuple(f.name for f in fields(DeviceCosts) if f.name != "devices" and f.default != 0.0)
PER_DEVICE = tuple(f.name for f in fields(DeviceCosts) if f.default == 0.0)


# Layer patterns of hybrid models: one symbol per layer, as in Megatron's ``--hybrid-layer-pattern``.
#
# A pattern has the model's layers and, after ``/``, those that each layer for multi-token prediction is made of.
# Megatron also marks the boundaries of chunks (``|``); in a plan they follow from ``stages[].layers``.


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
"""Names of the kinds of layers, by symbol."""
WITH_ATTENTION = (ATTENTION, LATENT_ATTENTION)  # layers with keys and values that slices share
RECURRENT = (MAMBA, GATED_DELTA_NET)  # layers that pass a state along a sequence, from slice to slice


def layers_of(pattern: str) -> str:
    """The model's layers in a pattern, without those for multi-token prediction and without boundaries of chunks."""
    return pattern.split(LATER)[0].replace(CHUNK, "")


def later_layers(pattern: str) -> tuple[str, ...]:
    """The layers of every layer for multi-token prediction in a pattern."""
    return tuple(pattern.split(LATER)[1:])


def sizes_of(pattern: str) -> dict[str, int]:
    """Sizes of a model that its pattern determines: the numbers of its layers."""
    return {"num_layers": len(layers_of(pattern)), "mtp_num_layers": len(later_layers(pattern))}


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
    """Describe the error of a pattern, for a message; empty if it has none."""
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


PLAN_FORMAT = "megatron_het.plan"
PLAN_VERSION = 1
MODEL_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "mtp_num_layers")
"""Sizes of a model that have the same names among Megatron's arguments."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The model a plan was made for.  A run with another model is refused.

    ``ffn_hidden_size`` and ``vocab_size`` may be None.  The first is compared with the run's arguments
    when given; the second never, because tokenizers and padding decide it.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    seq_length: int
    ffn_hidden_size: int | None = None
    vocab_size: int | None = None
    tied_embeddings: bool = False
    mtp_num_layers: int = field(default=0, metadata={"omit_default": True})
    """Layers for multi-token prediction, which come with the last chunk; ``num_layers`` does not count them."""
    head_size: int | None = field(default=None, metadata={"omit_default": True})
    """Width of a head where it is not ``hidden_size / num_attention_heads``; compared with the run's when given."""
    pattern: str = field(default="", metadata={"omit_default": True})
    """The kinds of a hybrid model's layers, as ``plan/schema.py`` reads them; empty for layers of one kind."""

    @property
    def layout_end(self) -> str:
        """The end of Megatron's layout string: layers for multi-token prediction, and the output layer."""
        return "m" * self.mtp_num_layers + "L"

    def check_later_layers(self) -> None:
        """Raise a PlanError unless there are 0 to ``num_layers`` layers for multi-token prediction."""
        if not 0 <= self.mtp_num_layers <= self.num_layers:
            raise PlanError("model.mtp_num_layers", self.mtp_num_layers, f"must be 0 to {self.num_layers}")

    @property
    def embeds_twice(self) -> bool:
        """Whether the last chunk holds the embedding's weights, too: as output layer, or for multi-token prediction."""
        return self.tied_embeddings or self.mtp_num_layers > 0


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """Batch and numerics.  ``global_batch_size`` is in sequences and never changes between plans.

    ``micro_batch_sizes`` are the sequences of every microbatch id where they differ (Poplar, section 3.2): large
    passes for large devices, small ones for small devices, and remainders, so that any global batch size can be
    run.  ``micro_batch_size`` is then the largest of them.
    """

    micro_batch_size: int
    global_batch_size: int
    precision: str = "fp32"
    sequence_parallel: bool = False
    recompute: str = "none"
    distributed_optimizer: bool = False
    micro_batch_sizes: tuple[int, ...] = field(default=(), metadata={"omit_default": True})

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration over all replicas."""
        return len(self.micro_batch_sizes) or self.global_batch_size // self.micro_batch_size

    def sequences(self, microbatch: int) -> int:
        """Sequences of a microbatch."""
        return self.micro_batch_sizes[microbatch] if self.micro_batch_sizes else self.micro_batch_size

    @property
    def reading_unit(self) -> int:
        """Sequences per read of the data loader: every microbatch is one or several reads."""
        return 1 if self.micro_batch_sizes else self.micro_batch_size

    @property
    def batches_of_microbatches(self) -> tuple[int, ...]:
        """Returns the number of reads (:attr:`reading_unit`) that make each microbatch."""
        return self.micro_batch_sizes or (1,) * self.num_microbatches


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """A schedule by name, with the generator's parameters (numbers, strings, booleans, lists of whole numbers)."""

    name: str = "1f1b"
    parameters: dict[str, Any] = field(default_factory=dict)


class Cut(NamedTuple):
    """The numbers of ranks over which a replica divides its weights."""

    tp: int
    ep: int = 1  # expert-parallel size; the experts of a layer are divided over so many parts of an expert group
    # expert-tensor-parallel size; 0 where the expert group is the tensor-parallel group, or has one rank per part
    etp: int = 0

    @property
    def expert_tp(self) -> int:
        """Number of ranks that divide one expert (expert TP)."""
        return self.etp or max(1, self.tp // self.ep)

    @property
    def expert_ranks(self) -> int:
        """Ranks that together have all experts once: an expert group."""
        return self.ep * self.expert_tp

    @property
    def divides_alike(self) -> bool:
        """Whether an expert group is a tensor-parallel group, so that experts have the copies that all weights have."""
        return self.expert_ranks == self.tp

    def __str__(self) -> str:
        return (
            f"TP {self.tp}" + (f" with EP {self.ep}" if self.ep > 1 else "") + (f" and ETP {self.etp}" * bool(self.etp))
        )


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a stage: a tensor-parallel group on one kind of device inside one node.

    With context parallelism it is ``cp`` such groups, each of which holds a part of every sequence; they may be on
    different kinds of devices.
    """

    # World ranks; TP size = ``len(ranks) / cp``.  The first TP size of them are the tensor-parallel group of
    # context-parallel rank 0, in tensor-parallel order, and so on.
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]  # ids (0 .. M-1) of the microbatches this replica processes, ascending
    device: str = ""  # name of the device kind, for people and reports
    # Speed relative to the other replicas (1.0 = as fast as the fastest).  Orders the schedule; never changes a result.
    speed: float = 1.0
    zone: str = field(default="", metadata={"omit_default": True})
    """The zone of its node, where the cluster file has this kind of device in several zones; never
    changes a result."""
    node_group: int = field(default=-1, metadata={"omit_default": True})
    """Index of its node's entry in the cluster file, where several entries of a zone have this kind of device."""
    cp: int = field(default=1, metadata={"omit_default": True})  # Context-parallel size
    state_share: float = field(default=1.0, metadata={"omit_default": True})
    """How much of the stage's parameters, gradients and optimizer state this replica keeps under a
    parameter window, relative to the other replicas of the stage that cut weights alike; 0 keeps nothing."""
    ep: int = field(default=1, metadata={"omit_default": True})
    """Expert-parallel size: the experts of a layer are divided over so many parts of an expert group, which is the
    replica's tensor-parallel group or, where the size is larger, spans replicas that cut weights alike."""
    etp: int = field(default=0, metadata={"omit_default": True})
    """Expert-tensor-parallel size: how many ranks cut one expert; 0 for TP size / EP size, at least 1."""
    cp_shares: tuple[int, ...] = field(default=(), metadata={"omit_default": True})
    """Relative part of every sequence on each context-parallel rank; empty for equal parts."""
    cp_devices: tuple[str, ...] = field(default=(), metadata={"omit_default": True})
    """Name of the device kind of each context-parallel rank; none where all are ``device``."""
    recompute_layers: tuple[int, ...] = field(default=(), metadata={"omit_default": True})
    """Number of layers of each chunk, from its first, that full recomputation recomputes; empty for all layers."""

    @property
    def tp(self) -> int:
        """Tensor-parallel size of this replica."""
        return len(self.ranks) // self.cp

    @property
    def cut(self) -> Cut:
        """The numbers of ranks over which this replica divides its weights."""
        return Cut(self.tp, self.ep, 0 if self.etp == max(1, self.tp // self.ep) else self.etp)

    @property
    def shares(self) -> tuple[int, ...]:
        """Relative parts of a sequence on the context-parallel ranks."""
        return self.cp_shares or (1,) * self.cp

    @property
    def devices(self) -> tuple[str, ...]:
        """Name of the device kind of each context-parallel rank."""
        return self.cp_devices or (self.device,) * self.cp

    def device_of(self, rank: int) -> str:
        """Name of the device kind of one of the ranks."""
        return self.devices[self.ranks.index(rank) // self.tp]

    def tp_group(self, cp_rank: int = 0) -> tuple[int, ...]:
        """World ranks of the tensor-parallel group of a context-parallel rank."""
        return self.ranks[cp_rank * self.tp : (cp_rank + 1) * self.tp]

    def cp_group(self, tp_rank: int) -> tuple[int, ...]:
        """World ranks of the context-parallel group of a tensor-parallel rank."""
        return self.ranks[tp_rank :: self.tp]


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: ``layers[c]`` transformer layers in its c-th chunk (ministage)."""

    layers: tuple[int, ...]
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """The planner's prediction for one rank."""

    rank: int
    compute_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all categories."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """The planner's prediction for a run; printed beside the measured figures.

    With ``costs``, from which it was made, the run compares every operation and link while it trains.
    """

    iteration_s: float
    bubble_fraction: float
    per_rank: tuple[RankPrediction, ...] = ()
    costs: PlannedCosts | None = field(default=None, metadata={"omit_default": True})


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: stages, their replicas with ranks and microbatches, model, training and schedule."""

    model: ModelShape
    training: TrainingShape
    stages: tuple[Stage, ...]
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    predicted: Prediction | None = None
    notes: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks over all stages."""
        return sum(len(r.ranks) for s in self.stages for r in s.replicas)

    @property
    def most_cp(self) -> int:
        """The largest context-parallel size."""
        return max(r.cp for s in self.stages for r in s.replicas)

    @property
    def most_chunks(self) -> int:
        """The most chunks of a stage: Megatron's number of virtual stages."""
        return max(len(s.layers) for s in self.stages)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration."""
        return self.training.num_microbatches

    def first_microbatches(self, count: int) -> "Plan":
        """Returns the plan with its first microbatches only, all of one size; a replica may have none then."""
        stages = [
            dataclasses.replace(
                stage,
                replicas=tuple(
                    dataclasses.replace(r, microbatches=tuple(m for m in r.microbatches if m < count))
                    for r in stage.replicas
                ),
            )
            for stage in self.stages
        ]
        training = dataclasses.replace(self.training, global_batch_size=count * self.training.micro_batch_size)
        return dataclasses.replace(self, stages=tuple(stages), training=training)

    @property
    def loss_divisor(self) -> int:
        """The power of two by which losses are divided before backward passes, and gradients multiplied after them.

        About the tokens of a batch in fp16, 1 elsewhere: a sum over all tokens overflows under the loss scales that a
        mean takes.  A power of two changes no digit.
        """
        if self.training.precision != "fp16":
            return 1
        return int(2 ** round(math.log2(self.training.global_batch_size * self.model.seq_length)))

    @property
    def path(self) -> tuple[Place, ...]:
        """(stage, chunk) in the order in which a microbatch visits them; the schedule's name decides."""
        return path_of([len(stage.layers) for stage in self.stages], placement_of(self.schedule.name))

    @property
    def attention_layers(self) -> tuple[tuple[int, ...], ...]:
        """Number of attention layers of every chunk, stage by stage."""
        if not self.model.pattern:
            return tuple(stage.layers for stage in self.stages)
        layers, found, first = layers_of(self.model.pattern), [[0] * len(stage.layers) for stage in self.stages], 0
        for stage, chunk in self.path:
            count = self.stages[stage].layers[chunk]
            found[stage][chunk] = sum(layers[first : first + count].count(kind) for kind in WITH_ATTENTION)
            first += count
        return tuple(map(tuple, found))

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, with format and version first."""
        body = _plain(self)
        if body["predicted"] is None:
            del body["predicted"]
        return {"format": PLAN_FORMAT, "version": PLAN_VERSION, **body}

    @staticmethod
    def from_json(document: Any) -> "Plan":
        """Read a plan from parsed JSON.

        Raises:
            PlanError: Not a plan, an unknown version, an unknown or missing key, a wrong type.
        """
        if not isinstance(document, dict) or document.get("format") != PLAN_FORMAT:
            found = document.get("format") if isinstance(document, dict) else type(document).__name__
            hint = "Write one with 'python -m tools.planner' or by hand after docs/plan.md"
            raise PlanError("format", found, f"this file is not a plan (expected {PLAN_FORMAT!r})", hint)
        version = document.get("version")
        if type(version) is not int or version != PLAN_VERSION:
            problem = f"unknown plan version; this release reads version {PLAN_VERSION}"
            raise PlanError("version", version, problem, "Make the plan again with this release's planner")
        body = {k: v for k, v in document.items() if k not in ("format", "version")}
        return typing.cast(Plan, read_record(Plan, body, ""))


@functools.cache
def _fields_of(kind: type[Any]) -> tuple[tuple[str, bool, Any], ...]:
    """(name, whether a default value is omitted in JSON, default) of every field of a dataclass."""
    return tuple((f.name, bool(f.metadata.get("omit_default")), f.default) for f in dataclasses.fields(kind))


def _plain(value: Any) -> Any:
    """Dataclasses and tuples to dicts and lists, in field order."""
    if isinstance(value, int | float | str) or value is None:  # nearly all values of a large plan
        return value
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        found = {name: getattr(value, name) for name, _, _ in _fields_of(kind)}
        omitted = [name for name, omits, default in _fields_of(kind) if omits and found[name] == default]
        return {name: _plain(own) for name, own in found.items() if name not in omitted}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def read_record(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as a dataclass or one of its fields.

    Args:
        kind: Type to read.
        where: Place of the value in its document.

    Raises:
        PlanError: An unknown or missing key, a wrong type; it names the place.
    """
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise PlanError(where, value, "expected a list")
        item = typing.get_args(kind)[0]
        return tuple(read_record(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin in (types.UnionType, typing.Union):
        options = [o for o in typing.get_args(kind) if o is not type(None)]
        return None if value is None else read_record(options[0], value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise PlanError(where, value, "expected an object of names and values")
        return dict(value)
    return _read_scalar(kind, value, where)


def _read_scalar(kind: type, value: Any, where: str) -> Any:
    """One JSON scalar; booleans are not numbers here, and integers may stand for floats."""
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise PlanError(where, value, f"expected {kind.__name__}, found {type(value).__name__}")


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    """An object with exactly the fields of ``kind``."""
    if not isinstance(value, dict):
        raise PlanError(where or "plan", value, f"expected an object ({kind.__name__})")
    known = {f.name: f for f in dataclasses.fields(kind)}
    prefix = f"{where}." if where else ""
    for key in value:
        if key not in known:
            raise PlanError(f"{prefix}{key}", value[key], "unknown key", f"Known keys here: {', '.join(known)}")
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, spec in known.items():
        if name in value:
            arguments[name] = read_record(hints[name], value[name], f"{prefix}{name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise PlanError(f"{prefix}{name}", None, "missing", f"Every {kind.__name__} needs it")
    return kind(**arguments)
