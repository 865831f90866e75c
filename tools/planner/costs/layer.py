"""Time and memory of one layer at one operating point: the interface between cost models and the planner."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from ..inputs.model import Model
from ..inputs.profile_schema import LayerKind
from .runtime import INPUT_BYTES

# How far predictions were off on published runs of each kind, with whole families left out: what reports print.
#
# ``python -m benchmarks.planner_accuracy`` measures these figures (``benchmarks/results/planner_accuracy.json``).


class Uncertainty(NamedTuple):
    """Relative error that four of five predictions of a kind stay within.

    Attributes:
        error: The error.
        runs: How many measured runs it was found on, each predicted with constants that its family has no part in.
        of: What those runs were.
    """

    error: float
    runs: int
    of: str

    def __str__(self) -> str:
        return f"+-{100 * self.error:.0f} %, from {self.runs} {self.of}"


PROFILED = Uncertainty(0.05, 14, "runs with a profile")
"""From a profile of the same model and GPUs."""
DENSE = Uncertainty(0.06, 88, "runs of dense models")
"""Catalog, dense models."""
EXPERTS = Uncertainty(0.27, 26, "runs with experts")
"""Catalog, mixture of experts."""
OTHER_GPU = Uncertainty(0.25, 11, "sets of layer times")
"""Catalog, GPUs or precisions of which no runs are published, and layers without Transformer Engine."""
COMPARED_GPUS = frozenset({"A100-40", "A100-80", "H100-SXM", "H200", "B200", "GB200", "GB300"})
"""GPUs with published runs, and their variants with another memory."""


def catalog_uncertainty(model: Model, gpus: Collection[str], fitted: bool = True) -> Uncertainty:
    """Relative error of times that was seen for plans of this kind.

    Args:
        gpus: Kinds in use.
        fitted: Whether the runtime's kernels are those of published runs.
    """
    found = DENSE if model.experts is None else EXPERTS
    if not fitted or model.precision not in ("bf16", "fp16") or not COMPARED_GPUS.issuperset(gpus):
        found = max(found, OTHER_GPU)
    return found


KINDS: tuple[LayerKind, ...] = ("embedding", "layer", "head")


class Spread(NamedTuple):
    """How a layer is divided over ranks besides TP, and what those ranks are joined by.

    Attributes:
        cp: Context-parallel size.
        ep: Expert-parallel size: parts over which the experts of a layer are divided.
        expert_tp: Ranks that cut one expert; 0 for the rest of the TP group (TP size over ``ep``).
        domain: GPUs of a node (or NVLink domain).
        network_bytes_per_s: Of one GPU to the network.
        intra_node_bytes_per_s: Of one GPU to its node, None for the catalog's figure.
        slices: Passes that a sequence is cut into; costs are of all of them.
        kinds: Of a hybrid model: the layers that a figure is the mean of, counted by kind; empty: all of the model.
    """

    cp: int = 1
    ep: int = 1
    expert_tp: int = 0
    domain: int = 8
    network_bytes_per_s: float = 12.5e9
    intra_node_bytes_per_s: float | None = None
    slices: int = 1
    kinds: tuple[tuple[str, int], ...] = ()

    def expert_parts(self, tp: int) -> int:
        """Ranks that cut one expert, where a replica has ``tp`` of them."""
        return self.expert_tp or max(1, tp // self.ep)


ALONE = Spread()


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer at one operating point, on one rank.

    Attributes:
        forward_s, backward_s: Seconds per microbatch; backward includes recomputation.
        parameters: Parameters of the rank.
        activation_bytes: Kept from forward to backward, per microbatch in flight.
        workspace_bytes: Temporary memory beyond that.
        attention_forward_s, attention_backward_s: The part of the times that grows with the keys before a token.
        fixed_forward_s, fixed_backward_s: What a pass through any number of such layers takes besides.
    """

    forward_s: float
    backward_s: float
    parameters: int
    activation_bytes: float
    workspace_bytes: float
    attention_forward_s: float = 0.0
    attention_backward_s: float = 0.0
    fixed_forward_s: float = 0.0
    fixed_backward_s: float = 0.0


def mean_of_layers(layers: Sequence[tuple[float, LayerCost]]) -> LayerCost:
    """Returns the mean of several kinds of layers by share; temporary memory is that of the largest."""
    total = sum(share for share, _ in layers)

    def mean(name: str) -> float:
        return sum(share * getattr(cost, name) for share, cost in layers) / total

    names = [item.name for item in fields(LayerCost) if item.name not in ("parameters", "workspace_bytes")]
    return LayerCost(
        parameters=round(mean("parameters")),
        workspace_bytes=max(cost.workspace_bytes for _, cost in layers),
        **{name: mean(name) for name in names},
    )


def most_tp(model: Model) -> int:
    """Largest TP size that Megatron trains a model with: with experts it has biases under TP 1 only."""
    return 1 if model.experts is not None and model.biases else 1024


class LayerCosts(Protocol):
    """Where the cost model gets the figures of single layers."""

    def uncertainty_of(self, gpus: Collection[str]) -> Uncertainty:
        """Expected relative error of times, for reports.

        Args:
            gpus: Kinds in use.
        """

    def tp_sizes(self, gpu: str) -> tuple[int, ...]:
        """TP sizes for which there are figures."""

    def max_batch(self, gpu: str, tp: int) -> int:
        """Largest micro batch with figures."""

    def cost(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str, spread: Spread = ALONE) -> LayerCost:
        """Figures of one layer."""

    def alone_share(self, gpu: str, batch: int, tp: int) -> float:
        """Time of a pass while other devices of the machine wait, over its time while all are busy."""

    def update_s(self, gpu: str, parameters: float) -> float:
        """Optimizer step over so many parameters on one rank."""

    def sliced_share(
        self, gpu: str, batch: int, tp: int, recompute: str, kinds: tuple[tuple[str, int], ...] = ()
    ) -> float:
        """Kept activations of a layer under SlimPipe, as a share of the others': its attention keeps no matrices."""


def activation_bytes(
    model: Model,
    kind: LayerKind,
    batch: int,
    tp: int,
    recompute: str,
    fused: bool,
    cp: int = 1,
    sliced: bool = False,
    expert_tp: int = 0,
) -> float:
    """Bytes kept from forward to backward by one layer and microbatch on one rank.

    After Korthikanti et al. (2022), section 4, written out for gated MLPs and grouped-query attention:
    inputs of both norms and of the matrix products, queries, keys, values, the attention matrix where
    it is materialised (softmax output; no attention dropout), and the MLP's intermediate results.

    Args:
        expert_tp: Ranks that cut one expert, 0 for all of the TP group.
    """
    e, s, h = model.element_bytes, model.seq_length, model.hidden_size
    tokens = batch * s / cp
    split = tp if model.sequence_parallel else 1
    if kind == "embedding":
        return tokens * 8  # token ids; the output is the input of the first layer
    if kind == "head":
        rows = model.vocab_size / tp
        return tokens * (2 * e * h / split + rows * 4)  # the softmax in fp32
    if recompute == "full":
        # Keys and values stay in their pool, and the last slice's backward gives all of them gradients in fp32.
        pool = pool_size(model, tp) * (e + 4) if sliced else 0.0
        return tokens * (e * h / split + pool)
    whole: float = 2 * model.norms * e * h + (0 if model.gated or not model.ffn_hidden_size else 2 * h)
    width, x = float(model.ffn_hidden_size), model.experts
    routed = 0.0
    if x is not None:  # the ranks that cut an expert's weights gather its inputs, sort them, and keep them whole
        share = 1 - min(1.0, x.dense_layers / model.num_layers)
        width += share * (x.top_k * x.ffn_hidden_size + x.shared_ffn_hidden_size - width)
        routed = share * x.top_k * h * e * (expert_tp or tp) / tp
    mlp = (3 if model.gated else 2) * width * e
    if model.recurrent is not None:  # inputs of the convolution and the recurrence, the gate, and the gated norm's
        mlp += (model.recurrent.projected + model.recurrent.convolved + 2 * model.recurrent.inner) * e
    # The attention's output and its inputs.  Values are views of the fused projection, which therefore stays whole
    # beside the rotated queries and keys.  Slices copy keys and values into their pool instead.
    attention: float = (2 * model.attention_size + 2 * model.kv_size) * e
    if model.latent is not None:
        attention = model.latent.kept(model.num_attention_heads, sliced) * e
        whole += 2 * (model.latent.query_rank + model.latent.compressed) * e  # before and after their norms
        routed += pool_size(model, tp) * e if sliced else 0.0
    elif not sliced and not model.learned_positions:
        attention += (model.attention_size + model.kv_size) * e
    saved = 2 - INPUT_BYTES.get(model.linear_precision, 2.0)
    if saved:  # inputs of linear layers are kept in fp8 or fp4
        whole, mlp, attention = (
            whole - model.norms * h * saved,
            mlp - width * saved,
            attention - model.attention_size * saved,
        )
    matrix = 0.0
    if not fused and recompute == "none":
        matrix = model.num_attention_heads * s * e
    return tokens * (whole / split + routed + (attention + mlp + matrix) / tp)


def pool_size(model: Model, tp: int) -> float:
    """Numbers per token that slices cache on one rank; compressed keys and values are of all heads."""
    return 2 * model.kv_size / tp if model.latent is None else model.latent.compressed


def backward_bytes(model: Model, batch: int, tp: int, cp: int = 1, expert_tp: int = 0) -> float:
    """Returns what the backward of a layer holds at once beside what the forward has kept.

    Most is held in the MLP: the gradients of its first projection's outputs, or, where the sequence is divided, the
    gathered gradient of its second projection's outputs and that of its inputs.  Megatron gathers the inputs of
    projections into one buffer, which stays.  Experts' outputs (and their gradients) are there twice while they are
    sorted, besides what each TP rank sends and gets.
    """
    width, routed, h = float(model.ffn_hidden_size), 0.0, model.hidden_size
    if model.experts is not None:
        x = model.experts
        share = 1 - min(1.0, x.dense_layers / model.num_layers)
        width += share * (x.top_k * x.ffn_hidden_size + x.shared_ffn_hidden_size - width)
        routed = share * x.top_k * h
    if model.recurrent is not None:
        width = float(model.recurrent.projected)
    inner = width / tp
    most = (2 if model.gated else 1) * inner + h
    if model.sequence_parallel and tp > 1:
        most = max(most - h, inner + h) + h / tp + h
        most = max(most, 2 * routed * ((expert_tp or tp) / tp + 1 / tp) + h)
    return batch * model.seq_length / cp * model.element_bytes * most


def attention_matrix_bytes(model: Model, batch: int, tp: int, cp: int = 1) -> float:
    """One attention matrix of all heads of a rank."""
    return model.num_attention_heads / tp * float(model.seq_length) ** 2 / cp * batch * model.element_bytes
