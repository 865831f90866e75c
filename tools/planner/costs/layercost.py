"""Time and memory of one layer on one kind of GPU from a profile; what was not measured comes from the catalog."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ..errors import PlannerError
from ..inputs.catalog import Gpu
from ..inputs.model import Model
from ..inputs.profile_schema import MEASURED_AS, DeviceProfile, LayerKind, LayerTiming, Profile
from .catalogcost import CatalogCosts
from .layer import (
    ALONE,
    GRANULARITIES,
    KINDS,
    MEGATRON_HET,
    OTHER_GPU,
    PROFILED,
    WITHOUT_TE,
    Counted,
    LayerCost,
    Runtime,
    Spread,
    Uncertainty,
    activation_bytes,
    attention_matrix_bytes,
    mean_of_layers,
    most_tp,
)

# Interpolation by cubics that rise and fall with the points: Fritsch and Carlson's, with slopes as PCHIP has them.
#
# The same as SciPy's ``PchipInterpolator``, whose import takes longer than many a search.


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at ``x``, which is between the first and the last of ``xs``."""
    steps = [b - a for a, b in zip(xs, xs[1:])]
    rises = [(b - a) / step for a, b, step in zip(ys, ys[1:], steps)]
    i = min(max(bisect_right(xs, x) - 1, 0), len(steps) - 1)
    left, right = _slope(steps, rises, i), _slope(steps, rises, i + 1)
    step, t = steps[i], (x - xs[i]) / steps[i]
    bend = (left + right - 2 * rises[i]) * step
    return ys[i] + t * (step * left + t * ((rises[i] - left) * step - bend + t * bend))


def _slope(steps: Sequence[float], rises: Sequence[float], i: int) -> float:
    """The slope at point ``i``: a harmonic mean of the neighbouring rises, 0 at an extremum."""
    if len(steps) == 1:
        return rises[0]
    if i == 0:
        return _at_an_end(steps[0], steps[1], rises[0], rises[1])
    if i == len(steps):
        return _at_an_end(steps[-1], steps[-2], rises[-1], rises[-2])
    before, after = rises[i - 1], rises[i]
    if before * after <= 0:
        return 0.0
    one, other = 2 * steps[i] + steps[i - 1], steps[i] + 2 * steps[i - 1]
    return (one + other) / (one / before + other / after)


def _at_an_end(step: float, following: float, rise: float, next_rise: float) -> float:
    """Returns the slope of the parabola through three points, limited so that the cubic stays monotone."""
    slope = ((2 * step + following) * rise - step * next_rise) / (step + following)
    if slope * rise <= 0:
        return 0.0
    return 3 * rise if rise * next_rise <= 0 and abs(slope) > 3 * abs(rise) else slope


class Kind(NamedTuple):
    """The common properties of the points of one curve over the micro batch size."""

    gpu: str
    layer: LayerKind
    tp: int
    recompute: str
    ep: int = 1
    windowed: bool = False

    @property
    def words(self) -> str:
        """A description of its differences from a plain layer."""
        dense = " without experts" if self.layer == "dense" else ""
        return dense + (" with a sliding window" if self.windowed else "")

    def repeats(self, measured: str) -> bool:
        """Whether the backward repeats a forward that was not repeated when it was measured.

        Args:
            measured: Recomputation of the points.
        """
        return self.layer in ("layer", "dense") and self.recompute == "full" != measured


class Pass(NamedTuple):
    """Seconds of one pass: of the layer, and a fixed time per pass, whatever its number of layers."""

    forward_s: float
    backward_s: float
    fixed_forward_s: float
    fixed_backward_s: float


def pass_at(points: Sequence[LayerTiming], kind: Kind, batch: int, overhead: float) -> Pass:
    """One pass of this kind.

    Args:
        points: Points of this kind, or of the same kind without recomputation; by micro batch size.
    """
    forward = _at(points, batch, lambda t: t.forward_s, overhead)
    backward = _at(points, batch, lambda t: t.backward_s, overhead)
    fixed_f = min(_at(points, batch, lambda t: t.fixed_forward_s, 0.0), forward)
    fixed_b = min(_at(points, batch, lambda t: t.fixed_backward_s, 0.0), backward)
    forward, backward = forward - fixed_f, backward - fixed_b
    if kind.repeats(points[0].recompute):
        backward, fixed_b = backward + forward, fixed_b + fixed_f
    return Pass(forward, backward, fixed_f, fixed_b)


def without_sequences(points: Sequence[LayerTiming], kind: Kind) -> Pass:
    """Returns the time of a pass without sequences, extrapolated from the two smallest micro batches; 0 without."""
    if len(points) < 2:
        return Pass(0.0, 0.0, 0.0, 0.0)
    a, b = points[0].micro_batch_size, points[1].micro_batch_size
    small, large = (pass_at(points, kind, batch, 0.0) for batch in (a, b))
    forward, backward, *_ = (max(0.0, (b * x - a * y) / (b - a)) for x, y in zip(small, large))
    return Pass(forward, backward, 0.0, 0.0)


def _at(points: Sequence[LayerTiming], batch: int, value: Callable[[LayerTiming], float], overhead: float) -> float:
    """A time at one micro batch size; see ``Runtime.profile_overhead_s`` for ``overhead``."""
    sizes = [t.micro_batch_size for t in points]
    times = [value(t) for t in points]
    if batch in sizes:
        found = times[sizes.index(batch)]
    elif batch > sizes[-1] or len(points) == 1:
        found = times[-1] * batch / sizes[-1]
    elif batch < sizes[0]:
        found = times[0]
    else:
        found = interpolated(sizes, times, batch)
    if not overhead:
        return found
    best = batch * min(t / n for t, n in zip(times, sizes) if n >= min(batch, sizes[-1]))
    return found - min(overhead, found) * max(0.0, 1 - best / found) if found else 0.0


Points = Mapping[Kind, Sequence[LayerTiming]]


class SlicePrices:
    """Times of slices from one profile.

    Args:
        slices: Measured points of each kind, by tokens of each sequence in a pass.
    """

    def __init__(
        self, points: Points, slices: Mapping[Kind, Mapping[int, Sequence[LayerTiming]]], length: int, overhead: float
    ) -> None:
        self._points, self._slices, self._length, self._overhead = points, slices, length, overhead

    def more(self, kind: Kind, batch: int, slices: int, attention: tuple[float, float]) -> tuple[Pass, bool]:
        """Returns the time of all slices beyond that of the whole sequence (at least 0), and whether it was measured.

        Slices shorter than the measured ones take no less time each, after the first slice.

        Args:
            attention: Seconds of a whole sequence's attention, forward and backward, to all earlier keys.
        """
        points = self._points.get(kind) or self._points.get(kind._replace(recompute="none"))
        if not points:
            return Pass(0.0, 0.0, 0.0, 0.0), False
        whole = pass_at(points, kind, batch, self._overhead)
        cut = self._slices.get(kind) or self._slices.get(kind._replace(recompute="none")) or {}
        exact = cut.get(self._length // slices) if self._length % slices == 0 else None
        if exact:
            return self._measured(exact, kind, batch, slices, whole, attention), True
        each = without_sequences(points, kind)
        found = Pass(*[(slices - 1) * s for s in (*each[:2], *whole[2:])])
        longer = [tokens for tokens in cut if tokens * slices > self._length > tokens]
        if longer:
            parts = self._length // min(longer)
            known = self._measured(cut[min(longer)], kind, batch, parts, whole, attention)
            found = Pass(*[max(a, b * (slices - 1) / (parts - 1)) for a, b in zip(found, known)])
        return found, False

    def _measured(
        self,
        points: Sequence[LayerTiming],
        kind: Kind,
        batch: int,
        slices: int,
        whole: Pass,
        attention: tuple[float, float],
    ) -> Pass:
        """Besides attention to earlier slices, which is the whole sequence's: a slice by itself has its own keys."""
        one = pass_at(points, kind, batch, self._overhead)
        # A window hides most of what is in earlier slices, so that those by themselves attend to as much.
        missing = (0.0, 0.0) if kind.windowed else tuple(a - a / slices for a in attention)
        times = [slices * mine - w + m for mine, w, m in zip(one[:2], whole[:2], missing)]
        return Pass(*[max(0.0, t) for t in (*times, *(slices * f - w for f, w in zip(one[2:], whole[2:])))])


__all__ = ["KINDS", "CatalogCosts", "LayerCost", "LayerCosts", "MeasuredCosts", "activation_bytes"]


class MeasuredCosts:
    """Times from a profile, interpolated over the micro batch size (monotone cubic, Poplar's curves)."""

    def __init__(
        self,
        model: Model,
        profile: Profile,
        gpu: Callable[[str], Gpu],
        runtime: Runtime = MEGATRON_HET,
        file: str = "profile",
    ) -> None:
        model.check_profile(profile.model, file)
        self.model, self.profile, self.runtime, self.file = model, profile, runtime, file
        self.gpu, self.analytic = gpu, CatalogCosts(model, gpu, runtime)
        self._of_transformer_engine = CatalogCosts(model, gpu, MEGATRON_HET)
        # The profile measures whole sequences without documents.
        plain = model.model_copy(update={"document_lengths": None})
        self._whole = self.analytic if model.document_lengths is None else CatalogCosts(plain, gpu, runtime)
        self.points: dict[Kind, list[LayerTiming]] = {}
        slices: dict[Kind, dict[int, list[LayerTiming]]] = {}
        for device in profile.devices:
            for t in (self._as_run(device, t) for t in device.timings if t.context_tokens == 0):
                kind = Kind(device.kind, t.layer, t.tp, t.recompute, t.ep, t.windowed)
                if t.slice_tokens == model.seq_length:
                    self.points.setdefault(kind, []).append(t)
                else:
                    slices.setdefault(kind, {}).setdefault(t.slice_tokens, []).append(t)
        for points in (*self.points.values(), *(of for lengths in slices.values() for of in lengths.values())):
            points.sort(key=lambda t: t.micro_batch_size)
        self.slices = SlicePrices(self.points, slices, model.seq_length, runtime.profile_overhead_s)
        self._main: LayerKind = MEASURED_AS[model.kinds[0][0]] if model.kinds else "layer"
        self.cost = cache(self.cost)  # type: ignore[method-assign]
        self._update_rate = cache(self._update_per_parameter)

    def uncertainty_of(self, gpus: Collection[str], sliced: bool) -> Uncertainty:
        """Returns the error of predictions from profiles, found with whole families of published runs left out."""
        scaled = any(self._has_other_layers(device) for device in self.profile.devices if device.kind in gpus)
        return OTHER_GPU if scaled else PROFILED

    def _has_other_layers(self, device: DeviceProfile) -> bool:
        """Whether layers of Transformer Engine were measured, and a plan runs Megatron's own."""
        has_them = device.transformer_engine and self.gpu(device.kind).has_transformer_engine
        return has_them and self.runtime == WITHOUT_TE

    def _as_run(self, device: DeviceProfile, t: LayerTiming) -> LayerTiming:
        """Returns the figures of the layers that plans run, from those that were measured and the catalog's ratio."""
        if not self._has_other_layers(device):
            return t
        layer: LayerKind = t.layer if t.layer in ("embedding", "head") else "layer"
        kinds = tuple((symbol, 1) for symbol, _ in self.model.kinds if MEASURED_AS[symbol] == t.layer)
        spread = Spread(ep=t.ep, slices=max(1, self.model.seq_length // t.slice_tokens), kinds=kinds)
        at = device.kind, layer, t.micro_batch_size, t.tp, t.recompute, spread
        measured, run = self._of_transformer_engine.cost(*at), self.analytic.cost(*at)
        names = ("forward_s", "backward_s", "activation_bytes", "workspace_bytes")
        found = {name: getattr(t, name) * getattr(run, name) / (getattr(measured, name) or 1.0) for name in names}
        return replace(t, **found)

    def tp_sizes(self, gpu: str) -> tuple[int, ...]:
        """TP sizes with a measured layer."""
        if self.profile.device(gpu) is None:
            problem = f"nothing was measured on {gpu}"
            hint = f"Profile a node with {gpu}, or plan without --profile"
            raise PlannerError(self.file, "devices", [d.kind for d in self.profile.devices], problem, hint)
        most = most_tp(self.analytic.model)
        return tuple(sorted({k.tp for k in self.points if k.gpu == gpu and k.layer == self._main and k.tp <= most}))

    def max_batch(self, gpu: str, tp: int) -> int:
        """Twice the largest measured micro batch (times beyond it are extrapolated)."""
        found = [p[-1].micro_batch_size for k, p in self.points.items() if k[:3] == (gpu, self._main, tp)]
        return 2 * max(found, default=0)

    def sliced_share(self, gpu: str, batch: int, tp: int, recompute: str, kinds: Counted = ()) -> float:
        """Returns the ratio from the catalog's model."""
        return self.analytic.sliced_share(gpu, batch, tp, recompute, kinds)

    def alone_share(self, gpu: str, batch: int, tp: int) -> float:
        """Time of a pass while the other devices of the machine wait, over its time while all are busy."""
        points = self.points.get(Kind(gpu, self._main, tp, "none"), [])
        measured = [t for t in points if t.alone_s]
        if not measured:
            return 1.0
        nearest = min(measured, key=lambda t: abs(t.micro_batch_size - batch))
        return min(1.0, nearest.alone_s / (nearest.forward_s + nearest.backward_s))

    def update_s(self, gpu: str, parameters: float) -> float:
        """Seconds of an optimizer step, from measured steps if there are any, otherwise from memory bandwidth."""
        return parameters * self._update_rate(gpu)

    def _update_per_parameter(self, gpu: str) -> float:
        device = self.profile.device(gpu)
        measured = [t.update_s / t.parameters for t in device.timings if t.update_s and t.parameters] if device else []
        fused = self.analytic.update_s(gpu, 1.0)
        return max(fused, min(measured)) if measured and self.runtime.profile_overhead_s == 0 else fused

    def cost(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str, spread: Spread = ALONE) -> LayerCost:
        """Figures of one layer, remembered."""
        # As profiled, or scaled from the division that was profiled.
        ep = spread.ep if kind == "layer" and self._is_measured(gpu, tp, spread) else 1
        found = self._alone(gpu, kind, batch, tp, recompute, ep, of=spread.kinds)
        if kind != "layer" and spread.cp == spread.slices == 1:
            return found
        slices, spread = spread.slices, spread._replace(slices=1)
        theirs = self._whole.cost(gpu, kind, batch, tp, recompute, spread._replace(cp=1, ep=ep, expert_tp=tp // ep))
        if spread.cp > 1 or spread.ep != ep:
            found = _divided(found, theirs, self._whole.cost(gpu, kind, batch, tp, recompute, spread))
        whole = theirs.forward_s + theirs.backward_s
        share = (found.forward_s + found.backward_s) / whole if whole else 0.0
        forward = min(share * theirs.attention_forward_s, found.forward_s)
        backward = min(share * theirs.attention_backward_s, found.backward_s)
        left = self.model.attention_share
        found = replace(
            found,
            forward_s=found.forward_s - (1 - left) * forward,
            backward_s=found.backward_s - (1 - left) * backward,
            attention_forward_s=left * forward,
            attention_backward_s=left * backward,
        )
        if slices == 1:
            return found
        key = Kind(gpu, kind, tp, recompute, ep if kind == "layer" else spread.ep)
        return self._sliced(found, key, batch, spread, slices, (forward, backward), share=share)

    def _sliced(
        self,
        found: LayerCost,
        key: Kind,
        batch: int,
        spread: Spread,
        slices: int,
        attention: tuple[float, float],
        share: float,
    ) -> LayerCost:
        """All slices of a sequence, from the whole sequence; with the same attention they never take less time.

        On GPUs, slices that were not measured take the catalog's time if that is longer: operands that every pass
        reads, and kernels that the host cannot launch sooner.

        Args:
            attention: Seconds of attention to all earlier keys, whatever their documents, forward and backward.
            share: Ratio of measured to catalog time.
        """
        kinds = self._kinds(key, spread.kinds)
        parts = [(of, *self.slices.more(kind, batch, slices, attention)) for of, kind in kinds]
        total = sum(of for of, *_ in parts)
        more = Pass(*[sum(of * extra[i] for of, extra, _ in parts) / total for i in range(4)])
        # What was measured is of layers as they were measured, not of their parts.
        exact = spread.cp == 1 and spread.ep == key.ep and all(measured for *_, measured in parts)
        at = key.gpu, key.layer, batch, key.tp, key.recompute
        whole, cut = (self._whole.cost(*at, spread._replace(slices=n)) for n in (1, slices))
        is_processor, is_fused = self.gpu(key.gpu).is_processor, self.analytic.fused(key.gpu)
        spared = [0.0, 0.0]
        if not is_fused and is_processor:  # attention to all keys was measured; slices leave out most that are masked
            spared = [(slices - 1) / (2 * slices) * a for a in attention]
        elif not is_fused and spread.cp == 1:  # attention that keeps its matrices was measured, which slices do not run
            theirs = cut.attention_forward_s, cut.attention_backward_s
            spared = [max(0.0, a - share * b) for a, b in zip(attention, theirs)]
        if not exact and not is_processor:
            forward = max(more.forward_s, share * (cut.forward_s - whole.forward_s) + spared[0])
            backward = max(more.backward_s, share * (cut.backward_s - whole.backward_s) + spared[1])
            more = more._replace(forward_s=forward, backward_s=backward)
        extra_s = [more.forward_s - spared[0], more.backward_s - spared[1]]
        if is_processor:
            extra_s, spared = [max(0.0, s) for s in extra_s], [0.0, 0.0]
        return replace(
            found,
            forward_s=found.forward_s + extra_s[0],
            backward_s=found.backward_s + extra_s[1],
            attention_forward_s=found.attention_forward_s - spared[0],
            attention_backward_s=found.attention_backward_s - spared[1],
            fixed_forward_s=found.fixed_forward_s + more.fixed_forward_s,
            fixed_backward_s=found.fixed_backward_s + more.fixed_backward_s,
        )

    def _is_measured(self, gpu: str, tp: int, spread: Spread) -> bool:
        """Whether experts were measured with this division."""
        inside = spread.ep > 1 and spread.ep * spread.expert_parts(tp) == tp
        return inside and any(
            k.gpu == gpu and k.layer in ("layer", "experts") and (k.tp, k.ep) == (tp, spread.ep) for k in self.points
        )

    def _alone(
        self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str, ep: int = 1, of: Counted = ()
    ) -> LayerCost:
        """Returns profiled costs without context parallelism: the mean of layers of several kinds.

        Args:
            of: Layers of a hybrid model, counted by kind; empty: all of the model.
        """
        kinds = self._kinds(Kind(gpu, kind, tp, recompute, ep), of)
        layers = [(share, self._layer_cost(key, batch)) for share, key in kinds]
        found = layers[0][1] if len(layers) == 1 else mean_of_layers(layers)
        if kind != "layer" or recompute in GRANULARITIES:
            return found
        # Measured without recomputation: the catalog gives the recomputed work and the remaining activations.
        spread = Spread(ep=ep, expert_tp=tp // ep, kinds=of)
        plain, again = (self._whole.cost(gpu, kind, batch, tp, r, spread) for r in ("none", recompute))
        kept = found.activation_bytes * again.activation_bytes / plain.activation_bytes
        more = found.forward_s / plain.forward_s * (again.backward_s - plain.backward_s)
        extra = found.workspace_bytes + found.activation_bytes - kept
        return replace(found, backward_s=found.backward_s + more, activation_bytes=kept, workspace_bytes=extra)

    def _kinds(self, key: Kind, of: Counted = ()) -> list[tuple[float, Kind]]:
        """(share, kind) of the layers that the mean layer represents: with and without experts and windows."""
        if key.layer != "layer":
            return [(1.0, key._replace(ep=1))]
        if self.model.kinds:
            counted = [(float(count), MEASURED_AS[kind]) for kind, count in of or self.model.kinds]
            return [(n, key._replace(layer=layer, ep=key.ep if layer == "experts" else 1)) for n, layer in counted]
        x, model = self.model.experts, self.model
        share = 1 - min(1.0, x.dense_layers / model.num_layers) if x is not None else 1.0
        windowed = model.windowed_layers if model.attention_window is not None else 0.0
        kinds: tuple[tuple[LayerKind, int, float], ...] = (("layer", key.ep, share), ("dense", 1, 1 - share))
        return [
            (of_kind * of_window, key._replace(layer=name, ep=parts, windowed=window))
            for name, parts, of_kind in kinds
            for window, of_window in ((True, windowed), (False, 1 - windowed))
            if of_kind * of_window > 0
        ]

    def _layer_cost(self, key: Kind, batch: int) -> LayerCost:
        points = self.points.get(key) or self.points.get(key._replace(recompute="none"))
        gpu, _, tp, _ = key[:4]
        model = self.model
        if not points:
            return self._scaled(key, batch)
        forward, backward, fixed_f, fixed_b = pass_at(points, key, batch, self.runtime.profile_overhead_s)
        kept = points[0].activation_bytes / points[0].micro_batch_size * batch
        extra = max(t.workspace_bytes / t.micro_batch_size for t in points) * batch
        fused = self.analytic.fused(gpu)
        if not extra and not fused:
            extra = self.runtime.attention_copies * attention_matrix_bytes(model, batch, tp)
        if key.repeats(points[0].recompute):
            extra += kept
            kept = activation_bytes(model, "layer", batch, tp, "full", fused)
        parameters = points[0].parameters
        return LayerCost(forward, backward, parameters, kept, extra, fixed_forward_s=fixed_f, fixed_backward_s=fixed_b)

    def _scaled(self, key: Kind, batch: int) -> LayerCost:
        """Cost of a layer kind that was not measured: the catalog's, scaled by the ratio of the transformer layer."""
        gpu, kind, tp, recompute = key[:4]
        if kind != "embedding" and kind != "head":
            problem = f"no transformer layer was measured{key.words}"
            hint = f"Measured TP sizes: {self.tp_sizes(gpu)}"
            raise PlannerError(self.file, f"devices.{gpu}", f"tp = {tp}", problem, hint)
        guess = self.analytic.cost(gpu, kind, batch, tp, recompute)
        layer, theirs = (
            self._alone(gpu, "layer", batch, tp, "none"),
            self.analytic.cost(gpu, "layer", batch, tp, "none"),
        )
        ratio = (layer.forward_s + layer.backward_s) / (theirs.forward_s + theirs.backward_s)
        return replace(guess, forward_s=guess.forward_s * ratio, backward_s=guess.backward_s * ratio)


def _divided(measured: LayerCost, whole: LayerCost, part: LayerCost) -> LayerCost:
    """A measured layer under context or expert parallelism: scaled as the catalog's figures are."""

    def ratio(name: str) -> float:
        return getattr(part, name) / getattr(whole, name) if getattr(whole, name) else 1.0

    names = ("forward_s", "backward_s", "activation_bytes", "workspace_bytes")
    fixed = {f"fixed_{name}": getattr(measured, f"fixed_{name}") * ratio(name) for name in names[:2]}
    found = {name: getattr(measured, name) * ratio(name) for name in names} | fixed
    return LayerCost(parameters=round(measured.parameters * part.parameters / whole.parameters), **found)


LayerCosts = CatalogCosts | MeasuredCosts
"""Sources of the figures of single layers."""


def costs_of(
    model: Model, gpu: Callable[[str], Gpu], runtime: Runtime, profile: Profile | None, file: str
) -> LayerCosts:
    """Returns the catalog's costs, or those of a profile."""
    return CatalogCosts(model, gpu, runtime) if profile is None else MeasuredCosts(model, profile, gpu, runtime, file)
