"""Pictures of simulated programs: Chrome traces, text, and with matplotlib SVG, PNG or PDF."""

import colorsys
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_het.safe_io import write_bytes
from megatron_het.schedule.ir import SENDS, Kind, Op
from megatron_het.schedule.memory import CATEGORIES, Event, trace_event, trace_name
from megatron_het.schedule.simulate import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from megatron_het.features import FEATURES
from megatron_het.lowering.programs import assemble
from megatron_het.plan import ScheduleSpec
from megatron_het.schedule.cost import Costs, Memory, PerChunk
from megatron_het.schedule.ir import Program, Shape, placement_of
from megatron_het.schedule.kinds import RULES, STREAM_IDS, Role
from megatron_het.schedule.simulate import simulate

# All schedules side by side, on one model and one number of devices.


@dataclass(frozen=True, slots=True)
class Setting:
    """Holds what is compared.

    Attributes:
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
    """Figures of one schedule."""

    # name; SlimPipe's variants are ``slimpipe`` (exchange in half slices, vocabulary split), ``slimpipe-helping``
    # (idle devices help) and ``slimpipe-plain`` (no exchange, vocabulary split)
    schedule: str
    bubble_fraction: float = 0.0  # (makespan - ideal) / ideal
    activation_fraction: float = 0.0  # peak activations of the worst device, over one microbatch's in the whole model
    # in and out of the busiest device, per microbatch, in hidden states of one microbatch
    communication_volume: float = 0.0
    makespan: float = 0.0  # in forward times of one microbatch through the whole model
    reason: str = ""  # why the schedule cannot run here; the numbers are 0 then


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
    slices = program.shape.slices
    # One microbatch's forward: so long that times are whole numbers when attention is everything, and sums are exact.
    unit = float(len(program.shape.path) * slices * (slices + 1) * max(program.attention_units, 1))
    result = simulate(program, model_costs(program, unit, setting.attention_share, setting.output_share))
    return Row(
        name,
        result.bubble_fraction,
        max(use.peak_of("activations") for use in result.memory),
        communication_volume(result),
        result.makespan_s / unit,
    )


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
    """Activations, gradients and what features move through the busiest device, per microbatch."""
    program = result.program
    shape = program.shape
    total = [0.0] * len(program.ops)
    for d, ops in enumerate(program.ops):
        for op in ops:
            if op.kind.role is Role.TRANSFER:
                total[d] += 1.0
            for rules in RULES:
                total[d] += rules.volume(program, d, op)
    return max(total) / shape.slices / shape.microbatches


# Timelines as Chrome traces, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.
#
# The simulator's predictions and a run's measurements use the same format, so they can be laid over each
# other: give the two different ``process`` names and merge their ``traceEvents``.


def trace_events(
    events: Iterable[Event], device_names: list[str], *, process: str = "device"
) -> list[dict[str, object]]:
    """Trace events with integer process (device) and thread (stream) ids; times in microseconds.

    Args:
        events: what happened; empty ones (start = end) are left out unless they are computations.
        device_names: one per device.
        process: prefix of the process names, e.g. ``"predicted"`` or ``"measured"``.
    """
    out: list[dict[str, object]] = []
    used: set[tuple[int, str]] = set()
    for event in events:
        if event.end_s <= event.start_s and event.stream != "compute":
            continue
        used.add((event.device, event.stream))
        op = event.op
        drawn = trace_event(str(op), event.device, STREAM_IDS[event.stream], event.start_s, event.end_s)
        numbers = {name: value for name, value in op._asdict().items() if name != "kind" and value >= 0}
        out.append(drawn | {"cat": op.kind.name.lower(), "args": {"kind": op.kind.name, **numbers}})
    for device, name in enumerate(device_names):
        out.append(trace_name("process_name", device, 0, name=f"{process} {name}"))
        out.append(trace_name("process_sort_index", device, 0, sort_index=device))
        for stream, tid in STREAM_IDS.items():
            if (device, stream) in used:
                out.append(trace_name("thread_name", device, tid, name=stream))
    return out


def chrome_trace(result: Result, *, process: str = "device") -> dict[str, object]:
    """The trace of a simulation: all streams, arrows for transfers, memory counters."""
    names = [str(device) for device in result.program.devices]
    events = trace_events(result.events(), names, process=process)
    graph = result.graph
    for i, op in enumerate(graph.ops):
        j = graph.other_end[i]
        if op.kind in SENDS and j >= 0 and result.end_s[i] > result.start_s[i]:
            for phase, node, stream in (("s", i, "send"), ("f", j, "receive")):
                event = {
                    "name": "transfer",
                    "cat": "transfer",
                    "ph": phase,
                    "id": i,
                    "pid": graph.device[node],
                    "tid": STREAM_IDS[stream],
                    "ts": result.start_s[node] * 1e6,
                }
                events.append(event | ({"bp": "e"} if phase == "f" else {}))
    for device, use in enumerate(result.memory):
        if use.peak_bytes:
            events += [
                {"name": "memory", "ph": "C", "pid": device, "tid": 0, "ts": time * 1e6, "args": {"bytes": held}}
                for time, held in use.curve()
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


PICTURES = (".svg", ".png", ".pdf")
_DRAWN = ("compute", "collective", "host_to_device", "device_to_host")


def text_picture(result: Result, *, width: int = 120) -> str:
    """One line per device, one character per step of time.

    A computation shows its letter, then its microbatch (and slice, when sequences are sliced), as far as
    there is room; ``.`` is idle time, ``=`` the rest of a computation.
    """
    span = result.makespan_s or 1.0
    names = [str(device) for device in result.program.devices]
    margin = max(map(len, names))
    rows = [["."] * width for _ in names]
    sliced = result.program.shape.slices > 1
    for event in result.events():
        if event.stream != "compute" or event.end_s <= event.start_s:
            continue
        first = min(round(event.start_s / span * width), width - 1)
        last = max(round(event.end_s / span * width), first + 1)
        label = label_of(event.op, sliced)
        if last - first < len(label):
            label = label[: last - first]
        rows[event.device][first:last] = list(label.ljust(last - first, "="))
    lines = [f"{name:>{margin}} |{''.join(row[:width])}|" for name, row in zip(names, rows)]
    lines.append(f"{'':>{margin}}  0{f'{span:.4g} s':>{width - 1}}")
    return "\n".join(lines)


def label_of(op: Op, sliced: bool) -> str:
    """Short name of an operation: letter, microbatch, slice."""
    if op.microbatch < 0:
        return f"{op.kind.mnemonic}{op.chunk}"
    return f"{op.kind.mnemonic}{op.microbatch}" + (f".{op.slice}" if sliced else "")


def color_of(op: Op, chunks: int, microbatches: int) -> tuple[float, float, float]:
    """Hue by microbatch; later chunks lighter, backwards darker than forwards, weight gradients and help greyish."""
    if op.microbatch < 0:
        return (0.55, 0.55, 0.55)
    hue = (op.microbatch * 0.61803398875) % 1.0 if microbatches > 12 else op.microbatch / max(microbatches, 1)
    step = op.chunk / max(chunks - 1, 1) if chunks > 1 else 0.0
    light, lighter, saturation = op.kind.colour
    return colorsys.hls_to_rgb(hue, light + lighter * step, saturation)


def draw(result: Result, path: str | Path, *, title: str | None = None, width_in: float = 14.0) -> None:
    """Writes a picture: the timeline of all devices and, below, memory over time.

    Args:
        result: a simulation.
        path: ends in .svg, .png or .pdf.
        title: above the picture; by default the schedule and its bubble.

    Raises:
        ValueError: another file name ending.
        ImportError: matplotlib is not installed; the message says how to get it.
    """
    path, pyplot = _picture_file(path), _pyplot()
    devices = len(result.program.ops)
    with_memory = any(use.peak_bytes for use in result.memory)
    heights = [0.42 * devices + 0.6] + ([2.2] if with_memory else [])
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=(width_in, sum(heights) + 1.0), height_ratios=heights, sharex=True, squeeze=False
    )
    try:
        _draw_timeline(axes[0][0], result, width_in)
        if with_memory:
            _draw_memory(axes[1][0], result)
        axes[-1][0].set_xlabel("time (s)")
        text = f"{result.program.name}: bubble {result.bubble_fraction:.1%}, {result.makespan_s:.4g} s"
        axes[0][0].set_title(title or text)
        figure.tight_layout()
        image = io.BytesIO()
        figure.savefig(image, dpi=120, format=path.suffix[1:])
        write_bytes(path, image.getvalue())
    finally:
        pyplot.close(figure)


def draw_timelines(results: Mapping[str, Result], path: str | Path, *, width_in: float = 12.0) -> None:
    """Writes several timelines under each other on one time axis.

    Args:
        results: simulations by the title that stands above each.
        path: as of :func:`draw`, which says what is raised.
    """
    path, pyplot = _picture_file(path), _pyplot()
    heights = [0.42 * len(result.program.ops) + 0.4 for result in results.values()]
    longest = max(result.makespan_s for result in results.values())
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=(width_in, sum(heights) + 1.2), height_ratios=heights, sharex=True, squeeze=False
    )
    try:
        for (title, result), (row,) in zip(results.items(), axes, strict=True):
            _draw_timeline(row, result, width_in * result.makespan_s / longest)
            row.set_title(title, loc="left", fontsize=11)
        axes[-1][0].set(xlim=(0, longest), xlabel="time (s)")
        figure.tight_layout()
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    finally:
        pyplot.close(figure)


def _picture_file(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in PICTURES:
        raise ValueError(f"picture = {path}: the name must end in {', '.join(PICTURES)}")
    return path


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    return pyplot


def _draw_timeline(axes: "Axes", result: Result, width_in: float) -> None:
    from matplotlib.collections import PolyCollection

    shape = result.program.shape
    chunks, sliced = max(len(c) for c in shape.layers), shape.slices > 1
    boxes, colors = [], []
    span = result.makespan_s or 1.0
    for event in result.events():
        if event.stream not in _DRAWN or event.end_s <= event.start_s:
            continue
        # Compute fills the row; other streams are thin lines below it.
        low, high = (event.device + at for at in ((-0.4, 0.28) if event.stream == "compute" else (0.3, 0.42)))
        boxes.append([(event.start_s, low), (event.end_s, low), (event.end_s, high), (event.start_s, high)])
        color = color_of(event.op, chunks, shape.microbatches)
        colors.append(color)
        inches = (event.end_s - event.start_s) / span * width_in * 0.9
        label = label_of(event.op, sliced)[1 if event.op.kind in (Kind.FORWARD, Kind.BACKWARD) else 0 :]
        if event.stream == "compute" and inches > 0.075 * len(label):
            dark = 0.3 * color[0] + 0.6 * color[1] + 0.1 * color[2] < 0.5
            axes.text(
                (event.start_s + event.end_s) / 2,
                (low + high) / 2,
                label,
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
                clip_on=True,
            )
    axes.add_collection(PolyCollection(boxes, facecolors=colors, edgecolors="white", linewidths=0.3))
    axes.set_xlim(0, span)
    axes.set_ylim(len(result.program.ops) - 0.45, -0.55)
    axes.set_yticks(range(len(result.program.ops)), [str(d) for d in result.program.devices])
    axes.set_ylabel("device")
    axes.set_facecolor("#f2f2f2")


def _draw_memory(axes: "Axes", result: Result) -> None:
    """Memory of every device; the worst one's categories at its peak in the title."""
    worst = max(range(len(result.memory)), key=lambda d: result.memory[d].peak_bytes)
    scale, unit = _scale(result.memory[worst].peak_bytes)
    colors = [colorsys.hls_to_rgb(0.6, 0.3 + 0.5 * d / max(len(result.memory), 1), 0.6) for d in range(64)]
    for d, use in enumerate(result.memory):
        curve = [*use.curve(), (result.makespan_s, use.curve()[-1][1])]
        times, held = zip(*curve)
        axes.step(
            times,
            [h / scale for h in held],
            where="post",
            color=colors[d % 64],
            lw=2.0 if d == worst else 0.9,
            label=f"device {result.program.devices[d]}" if len(result.memory) <= 8 or d == worst else None,
        )
    peak = result.memory[worst]
    parts = [f"{name} {peak.at_peak_bytes[name] / scale:.3g}" for name in CATEGORIES if peak.at_peak_bytes[name]]
    axes.plot([peak.peak_at_s], [peak.peak_bytes / scale], "v", color="#c0392b")
    axes.set_title(
        f"peak {peak.peak_bytes / scale:.3g}{unit} on device {result.program.devices[worst]} at "
        f"{peak.peak_at_s:.4g} s: {', '.join(parts)}",
        fontsize=9,
    )
    axes.set_ylabel(f"memory{unit and f' ({unit.strip()})'}")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, ncol=4, loc="best")


def _scale(largest: float) -> tuple[float, str]:
    for exponent, unit in ((3, " GiB"), (2, " MiB"), (1, " KiB")):
        if largest >= 4 * 1024**exponent:
            return 1024.0**exponent, unit
    return 1.0, ""
