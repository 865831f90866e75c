"""Time and memory of one layer at one operating point, and the constants of the training software behind them."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from ..inputs.catalog import Gpu
from ..inputs.model import Model
from ..inputs.profile_schema import LayerKind

# Seconds of single kernels on one GPU, from datasheet figures and a few constants of the training software.
#
# ``docs/costs.md`` has the source of every term, and how well it fits published runs.


MEMORY_SHARE = 0.9  # share of the datasheet's memory bandwidth that streaming kernels reach

EXCHANGE_LATENCY_S = 20e-6

DIAGONAL_TOKENS = 64
"""Causal attention computes whole blocks on its diagonal: half a block of 128 keys too many per query."""

FULL_HEAD = 128
MEMORY_EFFICIENT = 0.44  # rate of PyTorch's memory-efficient kernel over FlashAttention 2's, measured on an H200
NARROW_HEAD = 0.5  # time of a block's exponentials relative to its products, for heads of half of ``FULL_HEAD``

INPUT_BYTES = {"fp4": 0.5, "fp8": 1.0}


@dataclass(frozen=True, slots=True)
class Kernels:
    """Efficiency constants of one training system's kernels, the same for all GPUs and models."""

    gemm: float = 0.97  # rate of matrix products, as a share of the rate in the catalog
    attention: float = 1.0  # rate of attention in a fused kernel, as a share of the rate in the catalog
    # attention runs in the kernels of the GPU's own generation (cuDNN, FlashAttention-3); else in those of
    # FlashAttention-2, which use a third of a Hopper GPU
    newest_attention: bool = True
    backward_attention: float = 1.15  # time of attention's backward per FLOP, as a multiple of the forward's
    # memory traffic of each weight in a pass, where the backward adds to its gradient: 8 in fp32 inside the product, 12
    # by a kernel of its own, and as many as an element has where nothing is added
    gradient_bytes: float = 8.0
    # memory traffic of norms, residual connections, activation functions and casts, as a multiple of what perfectly
    # fused kernels move
    elementwise: float = 2.1
    logits_bytes: float = 16.0  # memory traffic of the loss per logit, forward and backward together
    quantize_bytes: float = 4.0  # memory traffic per input element of an fp8 or fp4 product (amax, cast, transpose)
    # the same in the products of experts, each of which pads and casts a part of its own
    expert_quantize_bytes: float = 12.0
    launches: float = 60.0  # kernels that the host launches for a forward of one layer
    expert_launches: float = 150.0  # additional launches for a layer with experts
    # wait of one pass of a layer with experts that drops no tokens, in launches: the host must know how many tokens
    # each expert got before it can start the products
    dropless_launches: float = 415.0
    expert_gemm: float = 0.65  # rate of the experts' products, as a share of ``gemm``: groups of unequal size
    dispatch: float = 24.0  # memory traffic of sorting tokens by expert and back, in elements per routed element


DEFAULT_KERNELS = Kernels()


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product ``[m, k] x [k, n]`` of one rank, ``count`` times (experts of one rank)."""

    m: float
    n: float
    k: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """FLOPs of all ``count`` products."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def elements(self) -> float:
        """Least elements read and written."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.count


def product_s(gpu: Gpu, kernels: Kernels, product: Product, precision: str, element_bytes: float) -> float:
    """One matrix product: its FLOPs at the rate of large products, plus the traffic of its operands.

    The two add up because the first tiles are read before anything is computed and the last are written
    after it, and because a product that shares its GPU with nothing else hides neither.  So narrow products
    and products of few tokens are slower, by the ratio of a GPU's FLOP rate to its memory bandwidth.
    """
    rate = gpu.peak(precision) * gpu.efficiency * kernels.gemm
    moved = product.elements * element_bytes
    if precision in INPUT_BYTES:
        written = product.m * product.n * product.count
        moved = (product.elements - written) * INPUT_BYTES[precision] + 2.0 * written
        moved += kernels.quantize_bytes * product.m * product.k * product.count
    return product.flops / rate + memory_s(gpu, moved)


def backward_product_s(gpu: Gpu, kernels: Kernels, product: Product, precision: str, element_bytes: float) -> float:
    """Both products of a backward: the gradient of the input, and that of the weight, which is accumulated."""
    added = max(0.0, kernels.gradient_bytes - element_bytes) * product.k * product.n * product.count
    return 2 * product_s(gpu, kernels, product, precision, element_bytes) + memory_s(gpu, added)


def memory_s(gpu: Gpu, moved: float) -> float:
    """Seconds to move ``moved`` bytes through device memory."""
    return moved / (gpu.memory_bytes_per_s * MEMORY_SHARE)


def attention_s(gpu: Gpu, kernels: Kernels, flops: float, head_size: float, precision: str) -> tuple[float, float]:
    """(forward, backward) of fused attention whose forward has ``flops``; the backward has 2.5 times as many.

    Heads narrower than 64 use part of the matrix units.  Narrow heads need as many exponentials as wide ones, and newer
    GPUs compute exponentials hardly faster than older ones: there exponentials are the bottleneck.
    """
    share = gpu.attention_efficiency if kernels.newest_attention else gpu.flash_efficiency
    rate = gpu.peak(precision) * share * kernels.attention * min(1.0, head_size / 64.0)
    forward = flops / rate
    if kernels.newest_attention and gpu.has_newer_attention:
        forward *= 1 + NARROW_HEAD * max(0.0, FULL_HEAD / max(head_size, 64.0) - 1)
    return forward, 2.5 * kernels.backward_attention * forward


def exchange_s(gpu: Gpu, token_bytes: float, top_k: int, ranks: int, domain: int, network_bytes_per_s: float) -> float:
    """Seconds of an all-to-all of tokens to ``top_k`` experts each, spread evenly over ``ranks`` ranks.

    A token crosses the network once per node that holds any of its experts, and is copied to its experts
    inside the node (as DeepEP does).

    Args:
        token_bytes: Bytes of all tokens of one rank, each counted once.
        domain: Ranks of the group that share a node (NVLink domain).
        network_bytes_per_s: Bandwidth of one GPU to the network.
    """
    if ranks <= 1:
        return 0.0
    domain = max(1, min(domain, ranks))
    nodes = ranks / domain
    inside = token_bytes * top_k * (domain - 1) / domain / gpu.collective_rate
    reached = nodes * (1 - (1 - 1 / nodes) ** top_k)
    outside = token_bytes * reached * (nodes - 1) / nodes / (network_bytes_per_s * MEMORY_SHARE)
    return max(inside, outside) + EXCHANGE_LATENCY_S


@dataclass(frozen=True, slots=True)
class Runtime:
    """Physical terms of a training system: overlap, host time, copies and its kernels' constants."""

    name: str = "megatron_het"  # for reports
    # A stage sends the next activations only when the gradients before them have come, as DeepSpeed's schedule orders
    # them: both transfers over a boundary stand between two microbatches of the later stage, while what a stage sends
    # does not hold it up.  Else transfers overlap with compute, as in this project's executor.
    transfers_in_turn: bool = False
    # a boundary tensor crosses the network once, split over the TP ranks, and is put together by an all-gather inside
    # the receiving node; else every receiving TP rank gets all of it
    split_transfers: bool = False
    # as with ``split_transfers``, but one rank of the TP group sends it all, at what one GPU alone reaches over the
    # network
    leader_transfers: bool = False
    transfer_latency_s: float = 50e-6  # fixed cost of one transfer: launch, rendezvous, synchronisation
    operation_s: float = 0.0  # fixed host time of one forward or backward of a stage (framework, Python)
    # Host time that timing one layer added to each measured pass.  It shows only where the host was the bottleneck, so
    # it is taken off for the share of a pass in which the device waits for the host, going by the device's best rate.
    profile_overhead_s: float = 0.0
    # what one rank's all-reduce over the network reaches besides the wire (copies into buckets, reduction, staging);
    # the two rates add up in series
    collective_bytes_per_s: float = float("inf")
    # parameter-sized fp32 buffers beside parameters, gradients and Adam's two moments (flattened all-reduce buckets,
    # temporaries of the optimizer)
    extra_parameter_copies: float = 0.0
    update_copies: float = 0.0  # fp32 numbers per parameter of a rank's state, beside it while the optimizer runs
    # attention matrices (all heads of one layer, one microbatch) alive at the peak besides those kept for the backward,
    # nothing with a fused attention kernel: Megatron's buffer, and four of the mask's backward, when one kept is gone
    attention_copies: float = 4.0
    # the process posts transfers only when the compute before them is done (CPU); else it is far ahead (CUDA streams)
    host_blocks: bool = False
    # gloo cannot tell that a send is done, so that what was sent stays until the end of the iteration (not in sliced
    # schedules, which bound the number of sends under way)
    keeps_sent: bool = False
    reserved_bytes: float | None = None  # context, communicators and libraries of one rank; None = the catalog's figure
    # what the training system holds besides (buffers of its own, what its allocator cannot reuse)
    framework_bytes: float = 0.0
    kernels: Kernels = DEFAULT_KERNELS  # efficiency constants of its kernels
    fused: bool = True  # attention of whole sequences runs in a fused kernel where the GPU has one
    tp_overlap: float = 0.0  # share of the collectives of TP that overlaps with products
    # where MLPs run again their second projections do, too: Megatron's own recomputation
    again_whole: bool = False
    exchange_overlap: float = 0.0  # share of the all-to-alls of experts that overlaps with compute
    # share of ZeRO-2's and ZeRO-3's gathers and reductions that may run beside the compute of the same pass; the rest
    # comes on top of it
    gather_overlap: float = 1.0
    # share of the gradient reduction after the last backward, and of the gather of parameters, that runs beside compute
    sync_overlap: float = 0.0
    # context-parallel ranks send queries and outputs to each other, as plans do (SlimPipe, section 5); else keys and
    # values go round a ring
    commuted: bool = False
    iteration_s: float = 0.0  # host time of an iteration besides its passes (data, logging, scheduling)


MEGATRON = Runtime(
    name="Megatron with Transformer Engine",
    split_transfers=True,
    tp_overlap=0.45,
    again_whole=True,
    exchange_overlap=0.5,
    sync_overlap=0.8,
    gather_overlap=0.9,
)
"""Stock Megatron as NVIDIA tunes it: overlaps are switched on, loss and gradient accumulation are fused."""

MEGATRON_HET = Runtime(commuted=True, kernels=replace(DEFAULT_KERNELS, logits_bytes=52.0))
"""Megatron with the flags that ``emit`` writes: the same kernels, and Megatron's unfused loss.

Logits are converted to fp32, and nine kernels read and write them; Megatron's fused loss has two kernels.
"""

WITHOUT_TE = replace(
    MEGATRON_HET,
    name="megatron_het without Transformer Engine",
    fused=False,
    update_copies=1.0,
    kernels=replace(MEGATRON_HET.kernels, gradient_bytes=12.0, elementwise=3.0),
)
"""Megatron's own layers: attention keeps its matrices, torch's Adam all roots, RoPE has five kernels.  Not fitted."""

CPU_GLOO = Runtime(
    commuted=True,
    name="megatron_het on CPU over gloo",
    host_blocks=True,
    keeps_sent=True,
    reserved_bytes=0.0,
    transfer_latency_s=0.0,
)


def runtime_for(gpus: Iterable[Gpu]) -> Runtime:
    """The runtime that a plan over these kinds has: all ranks have the same layers, so one kind decides for all."""
    return MEGATRON_HET if all(g.is_processor or g.has_transformer_engine for g in gpus) else WITHOUT_TE


# Prediction errors on published runs of each kind, with whole families left out, which reports print.
#
# ``python -m benchmarks.planner_accuracy`` measures these figures (``benchmarks/results/planner_accuracy.json``).


class Uncertainty(NamedTuple):
    """Relative error within which four of five predictions of a kind stay."""

    error: float
    runs: int  # number of measured runs, each predicted with constants fitted without its family
    of: str  # kind of these runs

    def __str__(self) -> str:
        return f"+-{100 * self.error:.0f} %, from {self.runs} {self.of}"


PROFILED = Uncertainty(0.05, 14, "runs with a profile")  # from a profile of the same model and GPUs
DENSE = Uncertainty(0.06, 88, "runs of dense models")  # catalog, dense models
SLICED = Uncertainty(0.09, 3, "runs in slices")  # catalog, sequences in slices
EXPERTS = Uncertainty(0.27, 26, "runs with experts")  # catalog, mixture of experts
OTHER_GPU = Uncertainty(0.25, 11, "sets of layer times")
"""Catalog, GPUs, precisions or layers of which no runs are published, and layers without Transformer Engine."""
COMPARED_GPUS = frozenset({"A100-40", "A100-80", "H100-SXM", "H200", "B200", "GB200", "GB300"})
"""GPUs with published runs, and their variants with another memory."""


def catalog_uncertainty(model: Model, gpus: Collection[str], sliced: bool = False, fitted: bool = True) -> Uncertainty:
    """Relative error of predicted times for plans of this kind.

    Args:
        fitted: Whether the runtime's kernels are those of published runs.
    """
    found = EXPERTS if model.experts is not None else SLICED if sliced else DENSE
    has_runs = model.precision in ("bf16", "fp16") and not (model.fp4 or model.mamba or model.delta_net)
    return found if fitted and has_runs and COMPARED_GPUS.issuperset(gpus) else max(found, OTHER_GPU)


Counted = tuple[tuple[str, int], ...]  # layers by kind
KINDS: tuple[LayerKind, ...] = ("embedding", "layer", "head")


class Spread(NamedTuple):
    """Division of a layer over ranks besides TP, and the links between these ranks."""

    cp: int = 1  # context-parallel size
    ep: int = 1  # expert-parallel size: parts over which the experts of a layer are divided
    expert_tp: int = 0  # ranks that cut one expert; 0 for the rest of the TP group (TP size over ``ep``)
    domain: int = 8  # GPUs of a node (or NVLink domain)
    network_bytes_per_s: float = 12.5e9
    intra_node_bytes_per_s: float | None = None  # of one GPU to its node, None for the catalog's figure
    slices: int = 1  # passes per sequence; costs are of all of them
    # of a hybrid model: the layers that a figure is the mean of, counted by kind; empty: all of the model
    kinds: Counted = ()
    cut: bool = False  # whether documents are cut at fixed positions, even if whole documents were cheaper
    portion: float = 0.0  # the part of every sequence that the rank holds; 0 for equal parts
    # of one rank to the other context-parallel ranks, where these are of several kinds
    between_bytes_per_s: float | None = None

    @property
    def over(self) -> float:
        """Ratio of the tokens of a sequence to those of the rank: the CP size where parts are equal."""
        return 1 / self.portion if self.portion else self.cp

    def expert_parts(self, tp: int) -> int:
        """Ranks that cut one expert, where a replica has ``tp`` of them."""
        return self.expert_tp or max(1, tp // self.ep)


ALONE = Spread()


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer at one operating point, on one rank."""

    # forward_s, backward_s: seconds per microbatch; backward includes recomputation
    forward_s: float
    backward_s: float
    parameters: int
    activation_bytes: float  # kept from forward to backward, per microbatch in flight
    workspace_bytes: float  # temporary memory beyond that
    # attention_forward_s, attention_backward_s: the part of the times that grows with the keys before a token
    attention_forward_s: float = 0.0
    attention_backward_s: float = 0.0
    # fixed_forward_s, fixed_backward_s: additional time of a pass, independent of its number of such layers
    fixed_forward_s: float = 0.0
    fixed_backward_s: float = 0.0


def mean_of_layers(layers: Sequence[tuple[float, LayerCost]]) -> LayerCost:
    """Returns the mean of several kinds of layers, weighted by share; the workspace is the largest one."""
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


GRANULARITIES = ("none", "selective", "full")  # of recomputation; others name one or more parts of a layer


def activation_bytes(
    model: Model,
    kind: LayerKind,
    batch: int,
    tp: int,
    recompute: str,
    fused: bool,
    cp: float = 1,
    sliced: bool = False,
    expert_tp: int = 0,
) -> float:
    """Bytes kept from forward to backward by one layer and microbatch on one rank.

    After Korthikanti et al. (2022), section 4, written out for gated MLPs and grouped-query attention:
    inputs of both norms and of the matrix products, queries, keys, values, the attention matrix where
    it is materialised (softmax output; no attention dropout), and the MLP's intermediate results.

    Args:
        cp: Ratio of the tokens of a sequence to those of the rank.
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
    dense, met, shared, share = mlp_widths(model)
    inner = shared + met + (0.0 if "mlp" in recompute else dense)  # of these, what activation functions get is kept
    width = inner - (met if "moe_act" in recompute else 0.0)  # and of these what they give
    routed = 0.0
    if model.experts is not None:  # ranks that cut an expert's weights gather and sort its inputs, and keep them whole
        routed = share * model.experts.top_k * h * e * (expert_tp or tp) / tp
    mlp = ((2 if model.gated else 1) * inner + width) * e
    if model.recurrent is not None:  # inputs of the convolution and the recurrence, the gate, and the gated norm's
        mlp += (model.recurrent.projected + model.recurrent.convolved + 2 * model.recurrent.inner) * e
    # The attention's output and its inputs.  Values are views of the fused projection, which therefore stays whole
    # beside the rotated queries and keys.  Slices copy keys and values into their pool instead.
    attention: float = (2 * model.attention_size + 2 * model.kv_size) * e
    if model.latent is not None:
        attention = model.latent.kept(model.num_attention_heads, sliced, "mla_up_proj" in recompute) * e
        whole += 2 * (model.latent.query_rank + model.latent.compressed) * e  # before and after their norms
        routed += pool_size(model, tp) * e if sliced else 0.0
    elif not sliced and not model.learned_positions:
        attention += (model.attention_size + model.kv_size) * e
    elif (
        sliced and recompute == "selective"
    ):  # attention that runs again has its inputs, the whole projection among them
        attention += (model.attention_size + 3 * model.kv_size) * e
    saved = 2 - INPUT_BYTES.get(model.linear_precision, 2.0)
    if saved:  # inputs of linear layers are kept in fp8 or fp4
        whole, mlp, attention = (
            whole - model.norms * h * saved,
            mlp - width * saved,
            attention - model.attention_size * saved,
        )
    matrix = mask = 0.0
    if not fused and recompute != "selective" and model.num_attention_heads:
        matrix, mask = model.num_attention_heads * s * e, s / batch
        if model.latent is None and not model.learned_positions and model.kv_size < model.attention_size:
            attention = 4.0 * model.attention_size * e  # keys and values are repeated for every head
    return tokens * (whole / split + routed + mask + (attention + mlp + matrix) / tp)


def mlp_widths(model: Model) -> tuple[float, float, float, float]:
    """Returns mean widths per layer (MLPs, experts of a token, shared experts), and the share of expert layers."""
    x, dense = model.experts, float(model.ffn_hidden_size)
    if x is None:
        return dense, 0.0, 0.0, 0.0
    share = 1 - min(1.0, x.dense_layers / model.num_layers)
    return (1 - share) * dense, share * x.top_k * x.ffn_hidden_size, share * x.shared_ffn_hidden_size, share


def pool_size(model: Model, tp: int) -> float:
    """Numbers per token in the key-value cache of one rank; compressed keys and values are those of all heads."""
    return 2 * model.kv_size / tp if model.latent is None else model.latent.compressed


def backward_bytes(
    model: Model, batch: int, tp: int, cp: float = 1, expert_tp: int = 0, matrix: float = 0.0, matrices: float = 0.0
) -> float:
    """Returns the peak bytes of a layer's backward beyond the activations kept from the forward.

    The peak is in the MLP: the gradients of its first projection's outputs, or, where the sequence is divided, the
    gathered gradient of its second projection's outputs and that of its inputs.  Megatron gathers the inputs of
    projections into one buffer, which stays.  Experts' outputs (and their gradients) exist twice while they are
    sorted, besides the tokens that each TP rank sends and receives.  Without a fused kernel the peak may be in
    attention: ``matrices`` attention matrices, one of them in that buffer, after the MLP's activations are freed.
    """
    *widths, share = mlp_widths(model)
    width, h = sum(widths), model.hidden_size
    routed = share * model.experts.top_k * h if model.experts is not None else 0.0
    if model.recurrent is not None:
        width = float(model.recurrent.projected)
    inner, gathered = width / tp, h if model.sequence_parallel and tp > 1 else 0
    most = (2 if model.gated else 1) * inner + h
    if gathered:
        most = max(most - h, inner + h) + h / tp
    most = max(most, 2 * routed * ((expert_tp or tp) / tp + 1 / tp) + h - gathered)
    tokens_bytes = batch * model.seq_length / cp * model.element_bytes
    gone = (3 if model.gated else 2) * inner + (h / tp if gathered else h)
    return max(tokens_bytes * most + max(tokens_bytes * gathered, matrix), matrices * matrix - tokens_bytes * gone)


def attention_matrix_bytes(model: Model, batch: int, tp: int, cp: float = 1) -> float:
    """One attention matrix of all heads of a rank."""
    return model.num_attention_heads / tp * float(model.seq_length) ** 2 / cp * batch * model.element_bytes
