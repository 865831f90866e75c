"""Time and memory of one layer on one kind of GPU from a profile; what was not measured comes from the catalog."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache

from .catalog import Gpu
from .catalogcost import CatalogCosts
from .errors import PlannerError
from .layer import ALONE, KINDS, LayerCost, LayerCosts, Spread, activation_bytes, attention_matrix_bytes
from .model import Model
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
        self.points: dict[tuple[str, str, int, str], list[LayerTiming]] = {}
        for device in profile.devices:
            for t in device.timings:
                if t.slice_tokens == model.seq_length and t.context_tokens == 0:
                    self.points.setdefault((device.kind, t.layer, t.tp, t.recompute), []).append(t)
        for points in self.points.values():
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
        return tuple(sorted({tp for kind, layer, tp, _ in self.points if kind == gpu and layer == "layer"}))

    def max_batch(self, gpu: str, tp: int) -> int:
        """Twice the largest measured micro batch (times beyond it are extrapolated)."""
        found = [
            p[-1].micro_batch_size for (k, layer, t, _), p in self.points.items() if (k, layer, t) == (gpu, "layer", tp)
        ]
        return 2 * max(found, default=0)

    def sliced_share(self, gpu: str, batch: int, tp: int, recompute: str) -> float:
        """As in the catalog's model."""
        return self.analytic.sliced_share(gpu, batch, tp, recompute)

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
        found = self._alone(gpu, kind, batch, tp, recompute)
        if kind != "layer" and spread.cp == 1:
            return found
        theirs = self.analytic.cost(gpu, kind, batch, tp, recompute)
        if spread.cp > 1 or spread.ep > 1:
            found = _divided(found, theirs, self.analytic.cost(gpu, kind, batch, tp, recompute, spread))
        whole = theirs.forward_s + theirs.backward_s
        share = (found.forward_s + found.backward_s) / whole if whole else 0.0
        return replace(
            found,
            attention_forward_s=min(share * theirs.attention_forward_s, found.forward_s),
            attention_backward_s=min(share * theirs.attention_backward_s, found.backward_s),
        )

    def _alone(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str) -> LayerCost:
        """As profiled: neither context nor expert parallelism."""
        points = self.points.get((gpu, kind, tp, recompute)) or self.points.get((gpu, kind, tp, "none"))
        model = self.model
        if not points:
            return self._scaled(gpu, kind, batch, tp, recompute)
        forward = _at(points, batch, lambda t: t.forward_s, self.runtime.profile_overhead_s)
        backward = _at(points, batch, lambda t: t.backward_s, self.runtime.profile_overhead_s)
        own = points[0].recompute == recompute
        if kind == "layer" and not own and recompute == "full":
            backward += forward
        kept = points[0].activation_bytes / points[0].micro_batch_size * batch
        extra = max(t.workspace_bytes / t.micro_batch_size for t in points) * batch
        fused = self.analytic.fused(gpu)
        if not extra and not fused:
            extra = self.runtime.attention_copies * attention_matrix_bytes(model, batch, tp)
        if kind == "layer" and not own and recompute == "full":
            extra += kept
            kept = activation_bytes(model, kind, batch, tp, "full", fused)
        return LayerCost(forward, backward, points[0].parameters, kept, extra)

    def _scaled(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str) -> LayerCost:
        """A layer kind that was not measured: the catalog's figure, scaled by how the transformer layer compares."""
        if kind == "layer":
            raise PlannerError(
                self.file,
                f"devices.{gpu}",
                f"tp = {tp}",
                "no transformer layer was measured",
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


def _divided(measured: LayerCost, whole: LayerCost, part: LayerCost) -> LayerCost:
    """A measured layer under context or expert parallelism: scaled as the catalog's figures are."""
    return LayerCost(
        measured.forward_s * part.forward_s / whole.forward_s,
        measured.backward_s * part.backward_s / whole.backward_s,
        round(measured.parameters * part.parameters / whole.parameters),
        measured.activation_bytes * part.activation_bytes / whole.activation_bytes,
        measured.workspace_bytes * part.workspace_bytes / whole.workspace_bytes
        if whole.workspace_bytes
        else measured.workspace_bytes,
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
        from scipy.interpolate import PchipInterpolator

        found = float(PchipInterpolator(sizes, times)(batch))
    if not overhead:
        return found
    best = batch * min(t / n for t, n in zip(times, sizes) if n >= min(batch, sizes[-1]))
    return found - min(overhead, found) * max(0.0, 1 - best / found) if found else 0.0
