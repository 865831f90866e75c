"""The intermediate representation of a pipeline schedule: operations, shapes, programs.

A :class:`Program` holds, for every device, the ordered list of operations that the device issues in one
training iteration.  A *device* is one replica of one pipeline stage (a tensor-parallel group of ranks),
numbered stage-major.  The model is cut into *chunks*: stage ``s`` holds ``len(layers[s])`` of them, and
``placement`` says in which order a microbatch visits them.

Nothing in here knows about tensors, ranks or time.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What an operation does.  The text forms are in :data:`MNEMONICS`."""

    FORWARD = 0
    BACKWARD = 1
    """Gradients of inputs and weights together."""
    BACKWARD_INPUT = 2
    """Gradient of the chunk's input only (zero-bubble schedules)."""
    BACKWARD_WEIGHT = 3
    """Gradients of the chunk's weights only."""
    SEND_FORWARD = 4
    """Activations of ``chunk`` leave for ``peer_chunk`` on ``peer``."""
    RECV_FORWARD = 5
    """Activations for ``chunk`` arrive from ``peer_chunk`` on ``peer``."""
    SEND_BACKWARD = 6
    """The gradient of the input of ``chunk`` leaves for ``peer_chunk`` on ``peer``."""
    RECV_BACKWARD = 7
    """The gradient of the output of ``chunk`` arrives from ``peer_chunk`` on ``peer``."""
    KV_SEND = 8
    """Keys and values ``[start, stop)`` (exchange units) leave for ``peer``, ahead of their use."""
    KV_RECV = 9
    ATTEND_GIVE = 10
    """The query of the following FORWARD is handed to ``peer``, to attend to units ``[start, stop)``."""
    ATTEND_HELP = 11
    """Attention of ``peer``'s query over the units ``[start, stop)`` of ``peer``'s keys and values."""
    ATTEND_MERGE = 12
    """The partial outputs given away are merged; the FORWARD before it is complete only now."""
    ATTEND_GIVE_BACKWARD = 13
    ATTEND_HELP_BACKWARD = 14
    ATTEND_MERGE_BACKWARD = 15
    VOCAB_FORWARD = 16
    """This device's part of the output layer and of the cross entropy."""
    VOCAB_BACKWARD = 17
    PARAM_PREFETCH = 18
    """Parameter shards of ``chunk`` come from the host."""
    PARAM_GATHER = 19
    """All-gather of the parameters of layers ``[start, stop)`` of ``chunk``."""
    PARAM_RELEASE = 20
    """The gathered parameters are dropped; the shards stay."""
    PARAM_OFFLOAD = 21
    """Parameter shards go to the host."""
    GRAD_REDUCE = 22
    """Reduce-scatter of the gradients of layers ``[start, stop)`` of ``chunk``."""
    OPTIMIZER_STEP = 23
    ACT_OFFLOAD = 24
    """Activations of a FORWARD go to the host."""
    ACT_FETCH = 25
    """They come back ahead of the BACKWARD."""
    KV_SEND_BACKWARD = 26
    """As KV_SEND, for the attention's backward pass (when the peer did not keep them)."""
    KV_RECV_BACKWARD = 27
    EMBED_FORWARD = 28
    """This device's part of the word embeddings of a slice; on the first stage: the tokens leave."""
    EMBED_BACKWARD = 29
    """Gradient of this device's part; on the first stage: the gradient of the embeddings leaves."""


MNEMONICS: dict[Kind, str] = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.SEND_FORWARD: "SF",
    Kind.RECV_FORWARD: "RF",
    Kind.SEND_BACKWARD: "SB",
    Kind.RECV_BACKWARD: "RB",
    Kind.KV_SEND: "KS",
    Kind.KV_RECV: "KR",
    Kind.ATTEND_GIVE: "AG",
    Kind.ATTEND_HELP: "AH",
    Kind.ATTEND_MERGE: "AM",
    Kind.ATTEND_GIVE_BACKWARD: "AGB",
    Kind.ATTEND_HELP_BACKWARD: "AHB",
    Kind.ATTEND_MERGE_BACKWARD: "AMB",
    Kind.VOCAB_FORWARD: "VF",
    Kind.VOCAB_BACKWARD: "VB",
    Kind.PARAM_PREFETCH: "PP",
    Kind.PARAM_GATHER: "PG",
    Kind.PARAM_RELEASE: "PR",
    Kind.PARAM_OFFLOAD: "PO",
    Kind.GRAD_REDUCE: "GR",
    Kind.OPTIMIZER_STEP: "OS",
    Kind.ACT_OFFLOAD: "AO",
    Kind.ACT_FETCH: "AF",
    Kind.KV_SEND_BACKWARD: "KSB",
    Kind.KV_RECV_BACKWARD: "KRB",
    Kind.EMBED_FORWARD: "EF",
    Kind.EMBED_BACKWARD: "EB",
}

COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
"""The kinds whose order a generator decides and every pass keeps."""
_ENDS = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.KV_SEND: Kind.KV_RECV,
    Kind.KV_SEND_BACKWARD: Kind.KV_RECV_BACKWARD,
}
SENDS = frozenset(_ENDS)
RECEIVES = frozenset(_ENDS.values())
TRANSFERS = SENDS | RECEIVES
EXCHANGE = frozenset(
    {
        Kind.KV_SEND, Kind.KV_RECV, Kind.ATTEND_GIVE, Kind.ATTEND_HELP, Kind.ATTEND_MERGE,
        Kind.KV_SEND_BACKWARD, Kind.KV_RECV_BACKWARD,
        Kind.ATTEND_GIVE_BACKWARD, Kind.ATTEND_HELP_BACKWARD, Kind.ATTEND_MERGE_BACKWARD,
    }
)  # fmt: skip
"""The kinds of the attention context exchange."""
PARTNER: dict[Kind, Kind] = _ENDS | {receive: send for send, receive in _ENDS.items()}
"""The kind at the other end of a transfer."""


class Op(NamedTuple):
    """One operation of one device.

    ``microbatch``, ``slice`` and ``chunk`` always name the *local* compute operation that the operation
    is, feeds or follows: a SEND_FORWARD carries the output of the local FORWARD with the same three
    fields, a RECV_FORWARD brings the input of the local FORWARD with the same three fields, a
    SEND_BACKWARD carries the result of the local BACKWARD, a RECV_BACKWARD feeds it.  ``peer`` is the
    device at the other end and ``peer_chunk`` the chunk there, so the partner of a transfer is
    ``Op(PARTNER[kind], microbatch, slice, peer_chunk, this device, chunk, ...)`` on ``peer``.

    Attributes:
        kind: what is done.
        microbatch: global index of the microbatch, -1 where it means nothing.
        slice: index of the slice of the sequence (0 in schedules without slices).
        chunk: index of the model chunk on this device.
        peer: index of the other device, -1 where there is none.
        peer_chunk: chunk on the peer, -1 where there is none.
        start, stop: half-open range of layers within the chunk (parameter operations) or of exchange
            units of the sequence (attention exchange); -1 where it means nothing.
    """

    kind: Kind
    microbatch: int = -1
    slice: int = 0
    chunk: int = 0
    peer: int = -1
    peer_chunk: int = -1
    start: int = -1
    stop: int = -1

    def partner(self, device: int) -> tuple[int, "Op"]:
        """The other end of this transfer, which sits on ``device``: (its device, its operation)."""
        return self.peer, Op(
            PARTNER[self.kind], self.microbatch, self.slice, self.peer_chunk, device, self.chunk, self.start, self.stop
        )

    def __str__(self) -> str:
        from megatron_het.schedule.text import format_op

        return format_op(self)


class Device(NamedTuple):
    """One replica of one pipeline stage."""

    stage: int
    replica: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.replica}"


PLACEMENTS = ("loop", "v")


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything a schedule is a function of.

    Attributes:
        layers: ``layers[stage][chunk]``, the number of transformer layers.
        route: ``route[stage][microbatch]``, the replica of the stage that runs the microbatch.
        replicas: number of replicas of each stage.
        slices: slices per sequence.
        placement: ``"loop"``: chunk 0 of all stages, then chunk 1 of all stages that have one, ...;
            ``"v"``: the same with every other sweep going backwards (ZB-V, V-Half).

    Raises:
        ValueError: naming the field, its value and what it should be.
    """

    layers: tuple[tuple[int, ...], ...]
    route: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...]
    slices: int = 1
    placement: str = "loop"
    path: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    """(stage, chunk) in the order in which a microbatch visits them."""
    positions: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)
    first_device: tuple[int, ...] = field(init=False, repr=False, compare=False)
    devices: tuple[Device, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        chunks = max(len(c) for c in self.layers)
        path: list[tuple[int, int]] = []
        for chunk in range(chunks):
            sweep = [(s, chunk) for s in range(len(self.layers)) if chunk < len(self.layers[s])]
            path += reversed(sweep) if self.placement == "v" and chunk % 2 else sweep
        first, total = [], 0
        for count in self.replicas:
            first.append(total)
            total += count
        put = object.__setattr__
        put(self, "path", tuple(path))
        put(self, "positions", {place: i for i, place in enumerate(path)})
        put(self, "first_device", tuple(first))
        put(self, "devices", tuple(Device(s, r) for s, n in enumerate(self.replicas) for r in range(n)))

    def _check(self) -> None:
        stages = len(self.layers)
        if stages == 0:
            raise ValueError("layers: there must be at least one stage")
        for s, chunks in enumerate(self.layers):
            if not chunks or min(chunks) < 0:
                raise ValueError(f"layers[{s}] = {chunks}: every stage needs a chunk, and no chunk negative layers")
        for name, value in (("route", self.route), ("replicas", self.replicas)):
            if len(value) != stages:
                raise ValueError(f"{name} has {len(value)} entries for {stages} stages")
        if self.slices < 1:
            raise ValueError(f"slices = {self.slices}: must be at least 1")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement = {self.placement!r}: must be one of {', '.join(PLACEMENTS)}")
        count = len(self.route[0])
        if count == 0:
            raise ValueError("route: there must be at least one microbatch")
        for s, (row, replicas) in enumerate(zip(self.route, self.replicas)):
            if replicas < 1:
                raise ValueError(f"replicas[{s}] = {replicas}: must be at least 1")
            if len(row) != count:
                raise ValueError(f"route[{s}] has {len(row)} microbatches, route[0] has {count}")
            for microbatch, replica in enumerate(row):
                if not 0 <= replica < replicas:
                    raise ValueError(f"route[{s}][{microbatch}] = {replica}: stage {s} has {replicas} replica(s)")

    @classmethod
    def uniform(
        cls,
        stages: int,
        microbatches: int,
        *,
        slices: int = 1,
        chunks: int = 1,
        layers_per_chunk: int = 1,
        placement: str = "loop",
    ) -> "Shape":
        """A homogeneous pipeline: one replica per stage, equal chunks."""
        return cls(
            layers=((layers_per_chunk,) * chunks,) * stages,
            route=((0,) * microbatches,) * stages,
            replicas=(1,) * stages,
            slices=slices,
            placement=placement,
        )

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.layers)

    @property
    def microbatches(self) -> int:
        """Number of microbatches per iteration, over all replicas."""
        return len(self.route[0])

    def device(self, stage: int, replica: int) -> int:
        """Index of a device."""
        if not (0 <= stage < len(self.replicas) and 0 <= replica < self.replicas[stage]):
            raise ValueError(f"there is no replica {replica} of stage {stage} (replicas per stage: {self.replicas})")
        return self.first_device[stage] + replica

    def runner(self, stage: int, microbatch: int) -> int:
        """Index of the device that runs ``microbatch`` in ``stage``."""
        return self.first_device[stage] + self.route[stage][microbatch]

    def pipelines(self) -> list[tuple[int, ...]] | None:
        """Devices by stage of each pipeline with microbatches, when each microbatch stays in one; else None."""
        if any(row != self.route[0] for row in self.route):
            return None
        return [tuple(first + r for first in self.first_device) for r in sorted(set(self.route[0]))]

    def microbatches_of(self, device: int) -> tuple[int, ...]:
        """Microbatches of a device, ascending."""
        stage, replica = self.devices[device]
        return tuple(m for m, r in enumerate(self.route[stage]) if r == replica)

    def previous(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """(stage, chunk) that feeds this one, None for the first of the model."""
        i = self.positions[stage, chunk]
        return self.path[i - 1] if i else None

    def next(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """(stage, chunk) fed by this one, None for the last of the model."""
        i = self.positions[stage, chunk] + 1
        return self.path[i] if i < len(self.path) else None


@dataclass(frozen=True, slots=True)
class Program:
    """What every device does in one iteration.

    Attributes:
        name: name of the schedule.
        shape: what it was generated for.
        ops: one tuple of operations per device.
        forward_only: an evaluation program: no backward operation is expected.
        vocabulary: the output layer is split over the devices of a microbatch (VOCAB_* operations).
        exchange_units: units per slice of the attention context exchange, 0 without exchange.
    """

    name: str
    shape: Shape
    ops: tuple[tuple[Op, ...], ...]
    forward_only: bool = False
    vocabulary: bool = False
    exchange_units: int = 0

    def __post_init__(self) -> None:
        if len(self.ops) != len(self.shape.devices):
            raise ValueError(f"{len(self.ops)} operation lists for {len(self.shape.devices)} devices")

    @property
    def embedding(self) -> bool:
        """Whether the word embeddings are split over the devices of a microbatch (EMBED_* operations)."""
        return any(op[0] == Kind.EMBED_FORWARD for ops in self.ops for op in ops)

    @property
    def devices(self) -> tuple[Device, ...]:
        """(stage, replica) of every device, in the order of ``ops``."""
        return self.shape.devices

    def for_device(self, stage: int, replica: int) -> tuple[Op, ...]:
        """The operations of one device."""
        return self.ops[self.shape.device(stage, replica)]

    def compute(self, device: int) -> tuple[Op, ...]:
        """The device's forward and backward operations, in order."""
        return tuple(op for op in self.ops[device] if op.kind in COMPUTE)

    def __str__(self) -> str:
        from megatron_het.schedule.text import dumps

        return dumps(self)
