"""Time and memory of one layer on one kind of GPU: from a profile, or from the catalog."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from tools.planner.catalog import Gpu
from tools.planner.errors import PlannerError
from tools.planner.model import Model
from tools.planner.profile_schema import LayerKind, LayerTiming, Profile
from tools.planner.runtime import MEGATRON_HET, Runtime

KINDS: tuple[LayerKind, ...] = ("embedding", "layer", "head")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer at one operating point, on one rank.

    Attributes:
        forward_s, backward_s: Seconds per microbatch; backward includes recomputation.
        parameters: Parameters of the rank.
        activation_bytes: Kept from forward to backward, per microbatch in flight.
        workspace_bytes: Temporary memory beyond that.
    """

    forward_s: float
    backward_s: float
    parameters: int
    activation_bytes: float
    workspace_bytes: float


class LayerCosts(Protocol):
    """Where the cost model gets the figures of single layers."""

    uncertainty: float
    """Expected relative error of times (one sigma), for reports."""

    def tp_sizes(self, gpu: str) -> tuple[int, ...]:
        """TP sizes for which there are figures."""

    def max_batch(self, gpu: str, tp: int) -> int:
        """Largest micro batch with figures."""

    def cost(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str) -> LayerCost:
        """Figures of one layer."""

    def update_s(self, gpu: str, parameters: float) -> float:
        """Optimizer step over so many parameters on one rank."""

    def sliced_share(self, gpu: str, batch: int, tp: int, recompute: str) -> float:
        """Kept activations of a layer under SlimPipe, as a share of the others': its attention keeps no matrices."""


def activation_bytes(model: Model, kind: LayerKind, batch: int, tp: int, recompute: str, fused: bool) -> float:
    """Bytes kept from forward to backward by one layer and microbatch on one rank.

    After Korthikanti et al. (2022), section 4, written out for gated MLPs and grouped-query attention:
    inputs of both norms and of the matrix products, queries, keys, values, the attention matrix where
    it is materialised (softmax output; no attention dropout), and the MLP's intermediate results.
    """
    e, s, h = model.element_bytes, model.seq_length, model.hidden_size
    tokens = float(batch * s)
    split = tp if model.sequence_parallel else 1
    if kind == "embedding":
        return tokens * (e * h / split + 8)
    if kind == "head":
        rows = model.vocab_size / tp
        return tokens * (2 * e * h / split + rows * (e + 4))
    if recompute == "full":
        return tokens * e * h / split
    whole = 4 * e * h + (0 if model.gated else 2 * h)
    mlp = (3 if model.gated else 2) * model.ffn_hidden_size * e
    attention = (2 * h + 2 * model.kv_size) * e
    matrix = 0.0
    if not fused and recompute == "none":
        matrix = model.num_attention_heads * s * e
    return tokens * (whole / split + (attention + mlp + matrix) / tp)


def attention_matrix_bytes(model: Model, batch: int, tp: int) -> float:
    """One attention matrix of all heads of a rank."""
    return model.num_attention_heads / tp * float(model.seq_length) ** 2 * batch * model.element_bytes


class CatalogCosts:
    """Times from datasheets: a roofline with an assumed efficiency.  Good to about 30 %.

    The efficiency of matrix products falls with the width that one rank works on (a product of width
    h / tp reaches width / (width + 512) of the plateau), and each layer pays a number of kernel launches.
    """

    uncertainty = 0.30
    _LAUNCHES = {"embedding": 4, "layer": 30, "head": 10}

    def __init__(self, model: Model, gpu: Callable[[str], Gpu], runtime: Runtime = MEGATRON_HET) -> None:
        self.model, self.gpu, self.runtime = model, gpu, runtime
        self.cost = cache(self._cost)  # type: ignore[method-assign]

    def tp_sizes(self, gpu: str) -> tuple[int, ...]:
        """Powers of two that divide heads, groups and widths."""
        m = self.model
        sizes = (m.num_attention_heads, m.groups, m.hidden_size, m.ffn_hidden_size)
        return tuple(t for t in (1, 2, 4, 8) if all(n % t == 0 for n in sizes))

    def max_batch(self, gpu: str, tp: int) -> int:
        """Unlimited."""
        return 1 << 20

    def fused(self, gpu: str) -> bool:
        """Whether attention runs in a fused kernel on this GPU; FlashAttention is for fp16 and bf16 only."""
        if self.model.attention == "fused":
            return True
        half = self.model.precision in ("fp16", "bf16")
        return self.model.attention == "flash" and half and self.gpu(gpu).flash_attention_2

    def sliced_share(self, gpu: str, batch: int, tp: int, recompute: str) -> float:
        """By the formula of ``activation_bytes`` with and without matrices."""
        if self.fused(gpu):
            return 1.0
        return (activation_bytes(self.model, "layer", batch, tp, recompute, True)
                / activation_bytes(self.model, "layer", batch, tp, recompute, False))

    def update_s(self, gpu: str, parameters: float) -> float:
        """Fused Adam: reads parameters, gradients and two moments, writes three of them, in fp32."""
        return 28.0 * parameters / self.gpu(gpu).memory_bytes_per_s

    def cost(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str) -> LayerCost:
        """Figures of one layer (replaced by a cached bound method)."""
        return self._cost(gpu, kind, batch, tp, recompute)

    def _cost(self, name: str, kind: LayerKind, batch: int, tp: int, recompute: str) -> LayerCost:
        model, gpu, fused = self.model, self.gpu(name), self.fused(name)
        s, h, e = model.seq_length, model.hidden_size, model.element_bytes
        peak = gpu.peak(model.precision)
        if not peak:
            raise PlannerError("model", "precision", model.precision, f"{name} does not support it",
                               f"It supports {', '.join(gpu.flops)}")
        width = h / tp
        rate = peak * gpu.efficiency * (width / (width + 512.0)) / (h / (h + 512.0))
        tokens = batch * s
        gather = 0.0
        if kind == "embedding":
            flops, moved = 0.0, tokens * h * e * 3.0
            reduces = 1
        elif kind == "layer":
            flops = batch * model.layer_flops(s, None if fused else s) / tp
            moved = tokens * h * e * 12.0 / (tp if model.sequence_parallel else 1)
            moved += 0.0 if fused else 6 * attention_matrix_bytes(model, batch, tp)
            reduces = 2
        else:
            flops = batch * model.head_flops(s) / tp
            moved = tokens * model.vocab_size / tp * 12.0
            reduces = 1
        if tp > 1:
            gather = reduces * (2 * (tp - 1) / tp * tokens * h * e / gpu.intra_node_bytes_per_s + 20e-6)
        launch = self._LAUNCHES[kind] * gpu.launch_s
        forward = max(flops / rate + moved / gpu.memory_bytes_per_s, launch) + gather
        backward = max(2 * flops / rate + 2 * moved / gpu.memory_bytes_per_s, launch) + gather
        if kind == "embedding":
            backward = moved / gpu.memory_bytes_per_s
        elif kind == "layer" and recompute == "full":
            backward += forward
        elif kind == "layer" and recompute == "selective" and not fused:
            backward += batch * 4.0 * s * s * h / tp / rate + 3 * attention_matrix_bytes(model, batch, tp) / gpu.memory_bytes_per_s
        count = _parameters(model, kind, tp)
        kept = activation_bytes(model, kind, batch, tp, recompute, fused)
        extra = 0.0 if fused or kind != "layer" else self.runtime.attention_copies * attention_matrix_bytes(model, batch, tp)
        if kind == "layer" and recompute == "full":
            extra += activation_bytes(model, kind, batch, tp, "none", fused)
        elif kind == "head":
            extra += tokens * model.vocab_size / tp * 4.0
        return LayerCost(forward, backward, count, kept, extra)


def _parameters(model: Model, kind: LayerKind, tp: int) -> int:
    if kind == "embedding":
        return model.embedding_parameters(tp)
    return model.layer_parameters(tp) if kind == "layer" else model.head_parameters(tp)


class MeasuredCosts:
    """Times from a profile, interpolated over the micro batch size (monotone cubic, Poplar's curves)."""

    uncertainty = 0.05

    def __init__(self, model: Model, profile: Profile, gpu: Callable[[str], Gpu], runtime: Runtime = MEGATRON_HET,
                 file: str = "profile") -> None:
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

    def tp_sizes(self, gpu: str) -> tuple[int, ...]:
        """TP sizes with a measured layer."""
        if self.profile.device(gpu) is None:
            raise PlannerError(self.file, "devices", [d.kind for d in self.profile.devices],
                               f"nothing was measured on {gpu}", f"Profile a node with {gpu}, or plan without --profile")
        return tuple(sorted({tp for kind, layer, tp, _ in self.points if kind == gpu and layer == "layer"}))

    def max_batch(self, gpu: str, tp: int) -> int:
        """Twice the largest measured micro batch (times beyond it are extrapolated)."""
        found = [p[-1].micro_batch_size for (k, layer, t, _), p in self.points.items() if (k, layer, t) == (gpu, "layer", tp)]
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

    def cost(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str) -> LayerCost:
        """Figures of one layer (replaced by a cached bound method)."""
        return self._cost(gpu, kind, batch, tp, recompute)

    def _cost(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str) -> LayerCost:
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
            raise PlannerError(self.file, f"devices.{gpu}", f"tp = {tp}", "no transformer layer was measured",
                               f"Measured TP sizes: {self.tp_sizes(gpu)}")
        guess = self.analytic.cost(gpu, kind, batch, tp, recompute)
        layer, theirs = self.cost(gpu, "layer", batch, tp, "none"), self.analytic.cost(gpu, "layer", batch, tp, "none")
        ratio = (layer.forward_s + layer.backward_s) / (theirs.forward_s + theirs.backward_s)
        return LayerCost(guess.forward_s * ratio, guess.backward_s * ratio, guess.parameters,
                         guess.activation_bytes, guess.workspace_bytes)


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
    best = min(t / n for t, n in zip(times, sizes) if n >= min(batch, sizes[-1]))
    return max(min(found, best * batch), found - overhead)
