"""All schedules side by side, on one model and one number of devices."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from megatron_het.features import FEATURES
from megatron_het.lowering.programs import assemble
from megatron_het.plan import ScheduleSpec
from megatron_het.schedule.cost import Costs, Memory, PerChunk
from megatron_het.schedule.ir import Program, Shape
from megatron_het.schedule.kinds import Direction, Fields, Role
from megatron_het.schedule.paths import placement_of
from megatron_het.schedule.simulate import Result, simulate


@dataclass(frozen=True, slots=True)
class Setting:
    """Holds what is compared.

    Attributes:
        stages, microbatches: of the pipeline.
        slices, chunks: for the schedules that have them.
        attention_share: share of causal attention in the forward time of the transformer layers.
        output_share: share of the output layer in the forward time of the whole model.
        layers_per_chunk: transformer layers, for the volume of the attention exchange.

    Raises:
        ValueError: a share outside 0 to 1, or a count below 1.
    """

    stages: int
    microbatches: int
    slices: int
    chunks: int = 1
    attention_share: float = 0.0
    output_share: float = 0.0
    layers_per_chunk: int = 1

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches", "slices", "chunks", "layers_per_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not 0 <= self.attention_share <= 1:
            raise ValueError(f"attention_share = {self.attention_share}: must be between 0 and 1")
        if not 0 <= self.output_share < 1:
            raise ValueError(f"output_share = {self.output_share}: must be at least 0 and below 1")

    def shape(self, slices: int, chunks: int, placement: str = "loop") -> Shape:
        """A homogeneous pipeline."""
        return Shape.uniform(
            self.stages,
            self.microbatches,
            slices=slices,
            chunks=chunks,
            layers_per_chunk=self.layers_per_chunk,
            placement=placement,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule.

    Attributes:
        schedule: its name; SlimPipe's variants are ``slimpipe`` (exchange in half slices, vocabulary split),
            ``slimpipe-helping`` (idle devices help) and ``slimpipe-plain`` (no exchange, vocabulary split).
        bubble_fraction: (makespan - ideal) / ideal.
        activation_fraction: peak activations of the worst device, over one microbatch's in the whole model.
        communication_volume: in and out of the busiest device, per microbatch, in hidden states of one
            microbatch.
        makespan: in forward times of one microbatch through the whole model.
        reason: why the schedule cannot run here; the numbers are 0 then.
    """

    schedule: str
    bubble_fraction: float = 0.0
    activation_fraction: float = 0.0
    communication_volume: float = 0.0
    makespan: float = 0.0
    reason: str = ""


def compare(setting: Setting, only: Collection[str] = ()) -> list[Row]:
    """All schedules, or those named in ``only``, in order of appearance in the literature."""
    return [_row(setting, name, make) for name, make in _candidates(setting) if not only or name in only]


def _candidates(s: Setting) -> Iterator[tuple[str, Callable[[], Program]]]:
    def plain(name: str, slices: int = 1, chunks: int = 1) -> Callable[[], Program]:
        return lambda: assemble(s.shape(slices, chunks, placement_of(name)), name)

    def slim(**parameters: bool) -> Callable[[], Program]:
        spec = ScheduleSpec("slimpipe", {**parameters, "vocabulary": s.output_share > 0})
        features = [(f, options) for f in FEATURES if (options := f.read(spec)) is not None]
        return lambda: assemble(s.shape(s.slices, s.chunks), spec.name, features)

    yield "gpipe", plain("gpipe")
    yield "1f1b", plain("1f1b")
    yield "interleaved", plain("interleaved", chunks=s.chunks)
    yield "terapipe", plain("terapipe", slices=s.slices)
    yield "seq1f1b", plain("seq1f1b", slices=s.slices)
    yield "zb-h1", plain("zb-h1")
    yield "zb-v", plain("zb-v", chunks=2)
    yield "v-half", plain("v-half", chunks=2)
    yield "ministage", plain("ministage", chunks=s.chunks)
    yield "slimpipe-plain", slim()
    yield "slimpipe", slim(context_exchange=True)
    yield "slimpipe-helping", slim(context_exchange=True, exchange_idle=True)


def _row(setting: Setting, name: str, make: Callable[[], Program]) -> Row:
    try:
        program = make()
    except ValueError as error:
        return Row(name, reason=str(error))
    costs, unit = setting_costs(setting, program)
    result = simulate(program, costs)
    return Row(
        name,
        result.bubble_fraction,
        max(use.peak_of("activations") for use in result.memory),
        communication_volume(result),
        result.makespan_s / unit,
    )


def setting_costs(setting: Setting, program: Program) -> tuple[Costs, float]:
    """The cost model of a setting, and the length of one microbatch's forward through the model in it.

    Times are scaled so that they are whole numbers when attention is everything; sums and the bubble are
    then exact.
    """
    slices = program.shape.slices
    unit = float(len(program.shape.path) * slices * (slices + 1) * max(program.attention_units, 1))
    return model_costs(program, unit, setting.attention_share, setting.output_share), unit


def model_costs(
    program: Program,
    unit: float,
    attention_share: float = 0.0,
    output_share: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> Costs:
    """Costs of a model of equal layers and an output layer.

    Args:
        program: gives the layers per chunk; with VOCAB_* operations the output layer is split evenly over
            the stages.
        unit: forward of one microbatch through the whole model on devices of speed 1; backward takes twice
            as long.  Activations of one microbatch in the whole model are 1 byte.
        attention_share: share of causal attention in the layers' forward.
        output_share: share of the output layer in the model's forward.
        speeds: relative speed per device.
    """
    shape = program.shape
    speeds = speeds or [1.0] * len(shape.devices)
    total = sum(sum(chunks) for chunks in shape.layers)

    def table(whole: float, head: float = 0.0, timed: bool = True) -> PerChunk:
        rows = []
        for device, speed in zip(shape.devices, speeds):
            weights = shape.layers[device.stage]
            row = [whole * w / total if total else whole / len(shape.path) for w in weights]
            if device.stage == shape.path[-1][0]:
                row[shape.path[-1][1]] += head
            rows.append(tuple(value / speed if timed else value for value in row))
        return tuple(rows)

    layers, head = unit * (1 - output_share), unit * output_share
    attention, linear = layers * attention_share, layers * (1 - attention_share)
    own_head = 0.0 if program.splits_output else head
    part = tuple(head / shape.stages / speed for speed in speeds) if program.splits_output else ()
    return Costs(
        forward_s=table(linear, own_head),
        backward_s=table(2 * linear, 2 * own_head),
        attention_forward_s=table(attention),
        attention_backward_s=table(2 * attention),
        vocab_forward_s=part,
        vocab_backward_s=tuple(2 * t for t in part),
        memory=Memory(activation_bytes=table(1.0, timed=False)),
    )


def communication_volume(result: Result) -> float:
    """Activations, gradients and exchanged context through the busiest device, per microbatch.

    A pass over one slice given away moves, per layer, query and output (2) and 2 tensors per slice of keys
    and values in the forward (SlimPipe, section 4.2.3), and twice that in the backward (query, output,
    its gradient and the query's; keys, values and their gradients).
    """
    program = result.program
    shape = program.shape
    total = [0.0] * len(program.ops)
    for d, ops in enumerate(program.ops):
        for op in ops:
            kind = op.kind
            if kind.role is Role.TRANSFER:
                total[d] += 1.0
            elif kind.role in (Role.GIVE, Role.HELP, Role.KEYS):
                owner = op.peer if kind.fields is Fields.UNITS_OF_PEER else d
                layers = shape.layers[shape.devices[owner].stage][op.peer_chunk]
                tensors = 2.0 * (op.stop - op.start) / program.attention_units if kind.role is Role.KEYS else 2.0
                total[d] += layers * tensors * (2 if kind.direction is Direction.BACKWARD else 1)
    return max(total) / shape.slices / shape.microbatches
