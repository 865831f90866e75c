"""Time and memory of one layer on one kind of GPU from a profile; what was not measured comes from the catalog."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from .catalog import Gpu
from .catalogcost import CatalogCosts
from .errors import PlannerError
from .layer import ALONE, KINDS, LayerCost, LayerCosts, Spread, activation_bytes, attention_matrix_bytes
from .model import Model
from .monotone import interpolated
from .profile_schema import LayerKind, LayerTiming, Profile
from .runtime import MEGATRON_HET, Runtime
from .uncertainty import PROFILE_ERROR

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
        # Whole sequences are measured, whatever documents are in them.
        plain = model.model_copy(update={"document_lengths": None})
        self._whole = self.analytic if model.document_lengths is None else CatalogCosts(plain, gpu, runtime)
        self.points: dict[_Kind, list[LayerTiming]] = {}
        self.slices: dict[tuple[_Kind, int], list[LayerTiming]] = {}
        for device in profile.devices:
            for t in (t for t in device.timings if t.context_tokens == 0):
                kind = _Kind(device.kind, t.layer, t.tp, t.recompute, t.ep, t.windowed)
                if t.slice_tokens == model.seq_length:
                    self.points.setdefault(kind, []).append(t)
                else:
                    self.slices.setdefault((kind, t.slice_tokens), []).append(t)
        for points in (*self.points.values(), *self.slices.values()):
            points.sort(key=lambda t: t.micro_batch_size)
        self.cost = cache(self._cost)  # type: ignore[method-assign]
        self._update_rate = cache(self._update_per_parameter)

    def uncertainty_of(self, gpus: Collection[str], divided: bool) -> float:
        """Of predictions from profiles, with whole families of published runs left out."""
        return PROFILE_ERROR

    def tp_sizes(self, gpu: str) -> tuple[int, ...]:
        """TP sizes with a measured layer."""
        if self.profile.device(gpu) is None:
            raise PlannerError(
                self.file,
                "devices",
                [d.kind for d in self.profile.devices],
                f"nothing was measured on {gpu}",
                f"Profile a node with {gpu}, or plan without --profile",
            )
        return tuple(sorted({k.tp for k in self.points if k.gpu == gpu and k.layer == "layer"}))

    def max_batch(self, gpu: str, tp: int) -> int:
        """Twice the largest measured micro batch (times beyond it are extrapolated)."""
        found = [p[-1].micro_batch_size for k, p in self.points.items() if k[:3] == (gpu, "layer", tp)]
        return 2 * max(found, default=0)

    def sliced_share(self, gpu: str, batch: int, tp: int, recompute: str) -> float:
        """As in the catalog's model."""
        return self.analytic.sliced_share(gpu, batch, tp, recompute)

    def alone_share(self, gpu: str, batch: int, tp: int) -> float:
        """Time of a pass while the other devices of the machine wait, over its time while all are busy."""
        points = self.points.get(_Kind(gpu, "layer", tp, "none"), [])
        measured = [t for t in points if t.alone_s]
        if not measured:
            return 1.0
        nearest = min(measured, key=lambda t: abs(t.micro_batch_size - batch))
        return min(1.0, nearest.alone_s / (nearest.forward_s + nearest.backward_s))

    def update_s(self, gpu: str, parameters: float) -> float:
        """From the measured steps where there are any: memory bandwidth otherwise."""
        return parameters * self._update_rate(gpu)

    def _update_per_parameter(self, gpu: str) -> float:
        device = self.profile.device(gpu)
        measured = [t.update_s / t.parameters for t in device.timings if t.update_s and t.parameters] if device else []
        fused = self.analytic.update_s(gpu, 1.0)
        return max(fused, min(measured)) if measured and self.runtime.profile_overhead_s == 0 else fused

    def cost(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str, spread: Spread = ALONE) -> LayerCost:
        """Figures of one layer (replaced by a cached bound method)."""
        return self._cost(gpu, kind, batch, tp, recompute, spread)

    def _cost(
        self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str, spread: Spread = ALONE
    ) -> LayerCost:
        # As profiled, else scaled from how it was.
        ep = spread.ep if kind == "layer" and self._is_measured(gpu, tp, spread) else 1
        found = self._alone(gpu, kind, batch, tp, recompute, ep)
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
        return found if slices == 1 else self._sliced(found, _Kind(gpu, kind, tp, recompute, ep), batch, spread, slices)

    def _sliced(self, found: LayerCost, key: _Kind, batch: int, spread: Spread, slices: int) -> LayerCost:
        """All slices of a sequence, from the whole of it, which they never take less than.

        A slice was measured (``profile --slice-tokens``).  Or what every pass takes however small it is comes on top:
        a profile with several micro batch sizes shows what is left of a pass without sequences, and on GPUs there is
        what the catalog knows: operands that every pass reads, and kernels that the host cannot start sooner.
        """
        points = self.slices.get((key, self.model.seq_length // slices)) if spread.cp == 1 else None
        if points:
            overhead, whole = self.runtime.profile_overhead_s, found
            own = [_at(points, batch, lambda t: t.forward_s - t.fixed_forward_s, overhead)]
            own.append(_at(points, batch, lambda t: t.backward_s - t.fixed_backward_s, overhead))
            attention = whole.attention_forward_s, whole.attention_backward_s
            # A slice by itself attends to its own keys only.
            rest = [slices * mine - a / slices + a for mine, a in zip(own, attention)]
            more = [max(0.0, rest[0] - whole.forward_s), max(0.0, rest[1] - whole.backward_s)]
        else:
            more = [(slices - 1) * seconds for seconds in self._without_sequences(key)]
            if not self.gpu(key.gpu).is_processor:
                at = key.gpu, key.layer, batch, key.tp, key.recompute
                theirs = self._whole.cost(*at, spread)
                cut = self._whole.cost(*at, spread._replace(slices=slices))
                known = cut.forward_s - theirs.forward_s, cut.backward_s - theirs.backward_s
                more = [max(pair) for pair in zip(more, known)]
        return replace(
            found,
            forward_s=found.forward_s + more[0],
            backward_s=found.backward_s + more[1],
            fixed_forward_s=slices * found.fixed_forward_s,
            fixed_backward_s=slices * found.fixed_backward_s,
        )

    def _without_sequences(self, key: _Kind) -> tuple[float, float]:
        """Seconds of a forward and of a backward of no sequences, from the two smallest micro batches measured."""
        points = self.points.get(key) or self.points.get(key._replace(recompute="none")) or []
        if len(points) < 2:
            return 0.0, 0.0
        a, b = points[:2]
        span = b.micro_batch_size - a.micro_batch_size

        def left(short: float, long: float, fixed: float) -> float:
            none = (b.micro_batch_size * short - a.micro_batch_size * long) / span
            return max(0.0, none - fixed)  # what a pass takes whatever its layers are is counted on its own

        forward = left(a.forward_s, b.forward_s, a.fixed_forward_s)
        return forward, left(a.backward_s, b.backward_s, a.fixed_backward_s)

    def _is_measured(self, gpu: str, tp: int, spread: Spread) -> bool:
        """Whether experts were measured divided as they are here."""
        inside = spread.ep > 1 and spread.ep * spread.expert_parts(tp) == tp
        return inside and any(
            k.gpu == gpu and k.layer == "layer" and (k.tp, k.ep) == (tp, spread.ep) for k in self.points
        )

    def _alone(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str, ep: int = 1) -> LayerCost:
        """As profiled, without context parallelism: the mean of layers with and without experts and windows."""
        if kind != "layer":
            return self._of_kind(_Kind(gpu, kind, tp, recompute), batch)
        x, model = self.model.experts, self.model
        share = 1 - min(1.0, x.dense_layers / model.num_layers) if x is not None else 1.0
        windowed = model.windowed_layers if model.attention_window is not None else 0.0
        layers: list[tuple[float, LayerCost]] = []
        kinds: tuple[tuple[LayerKind, int, float], ...] = (("layer", ep, share), ("dense", 1, 1 - share))
        for name, parts, of_kind in kinds:
            for window, of_window in ((True, windowed), (False, 1 - windowed)):
                if of_kind * of_window > 0:
                    found = self._of_kind(_Kind(gpu, name, tp, recompute, parts, window), batch)
                    layers.append((of_kind * of_window, found))
        return layers[0][1] if len(layers) == 1 else _mean(layers)

    def _of_kind(self, key: _Kind, batch: int) -> LayerCost:
        """One kind of layer."""
        points = self.points.get(key) or self.points.get(key._replace(recompute="none"))
        gpu, kind, tp, recompute = key[:4]
        model = self.model
        if not points:
            return self._scaled(key, batch)
        forward = _at(points, batch, lambda t: t.forward_s, self.runtime.profile_overhead_s)
        backward = _at(points, batch, lambda t: t.backward_s, self.runtime.profile_overhead_s)
        fixed_f = min(_at(points, batch, lambda t: t.fixed_forward_s, 0.0), forward)
        fixed_b = min(_at(points, batch, lambda t: t.fixed_backward_s, 0.0), backward)
        forward, backward = forward - fixed_f, backward - fixed_b
        own = points[0].recompute == recompute
        full = kind in ("layer", "dense") and not own and recompute == "full"
        if full:
            backward, fixed_b = backward + forward, fixed_b + fixed_f
        kept = points[0].activation_bytes / points[0].micro_batch_size * batch
        extra = max(t.workspace_bytes / t.micro_batch_size for t in points) * batch
        fused = self.analytic.fused(gpu)
        if not extra and not fused:
            extra = self.runtime.attention_copies * attention_matrix_bytes(model, batch, tp)
        if full:
            extra += kept
            kept = activation_bytes(model, "layer", batch, tp, "full", fused)
        parameters = points[0].parameters
        return LayerCost(forward, backward, parameters, kept, extra, fixed_forward_s=fixed_f, fixed_backward_s=fixed_b)

    def _scaled(self, key: _Kind, batch: int) -> LayerCost:
        """A layer kind that was not measured: the catalog's figure, scaled by how the transformer layer compares."""
        gpu, kind, tp, recompute = key[:4]
        if kind != "embedding" and kind != "head":
            raise PlannerError(
                self.file,
                f"devices.{gpu}",
                f"tp = {tp}",
                f"no transformer layer was measured{key.words}",
                f"Measured TP sizes: {self.tp_sizes(gpu)}",
            )
        guess = self.analytic.cost(gpu, kind, batch, tp, recompute)
        layer, theirs = (
            self._alone(gpu, "layer", batch, tp, "none"),
            self.analytic.cost(gpu, "layer", batch, tp, "none"),
        )
        ratio = (layer.forward_s + layer.backward_s) / (theirs.forward_s + theirs.backward_s)
        return LayerCost(
            guess.forward_s * ratio,
            guess.backward_s * ratio,
            guess.parameters,
            guess.activation_bytes,
            guess.workspace_bytes,
        )


class _Kind(NamedTuple):
    """What the points of one curve over the micro batch size have in common."""

    gpu: str
    layer: LayerKind
    tp: int
    recompute: str
    ep: int = 1
    windowed: bool = False

    @property
    def words(self) -> str:
        """How it differs from a plain layer."""
        dense = " without experts" if self.layer == "dense" else ""
        return dense + (" with a sliding window" if self.windowed else "")


def _mean(layers: Sequence[tuple[float, LayerCost]]) -> LayerCost:
    """Of several kinds of layers by share; temporary memory is that of the largest."""
    total = sum(share for share, _ in layers)

    def mean(name: str) -> float:
        return sum(share * getattr(cost, name) for share, cost in layers) / total

    parameters, workspace = round(mean("parameters")), max(cost.workspace_bytes for _, cost in layers)
    times = {name: mean(name) for name in ("forward_s", "backward_s", "fixed_forward_s", "fixed_backward_s")}
    return LayerCost(
        parameters=parameters, activation_bytes=mean("activation_bytes"), workspace_bytes=workspace, **times
    )


def _divided(measured: LayerCost, whole: LayerCost, part: LayerCost) -> LayerCost:
    """A measured layer under context or expert parallelism: scaled as the catalog's figures are."""
    forward, backward = part.forward_s / whole.forward_s, part.backward_s / whole.backward_s
    return LayerCost(
        measured.forward_s * forward,
        measured.backward_s * backward,
        round(measured.parameters * part.parameters / whole.parameters),
        measured.activation_bytes * part.activation_bytes / whole.activation_bytes,
        measured.workspace_bytes * part.workspace_bytes / whole.workspace_bytes
        if whole.workspace_bytes
        else measured.workspace_bytes,
        fixed_forward_s=measured.fixed_forward_s * forward,
        fixed_backward_s=measured.fixed_backward_s * backward,
    )


def _at(points: list[LayerTiming], batch: int, value: Callable[[LayerTiming], float], overhead: float) -> float:
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
