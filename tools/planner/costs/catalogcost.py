"""Time and memory of one layer without a profile: kernels of the catalog's GPUs (see ``docs/costs.md``)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..errors import PlannerError
from ..inputs.catalog import Gpu
from ..inputs.model import Model
from ..inputs.profile_schema import LayerKind
from .layer import (
    ALONE,
    DIAGONAL_TOKENS,
    GRANULARITIES,
    INPUT_BYTES,
    MEGATRON_HET,
    MEMORY_EFFICIENT,
    Counted,
    LayerCost,
    Product,
    Runtime,
    Spread,
    Uncertainty,
    activation_bytes,
    attention_matrix_bytes,
    attention_s,
    backward_bytes,
    backward_product_s,
    catalog_uncertainty,
    exchange_s,
    mean_of_layers,
    memory_s,
    most_tp,
    pool_size,
    product_s,
)

# Work of one rank in a forward of one layer: matrix products, attention, element-wise memory traffic.


SCAN_WIDTH = 128  # the recurrence of a chunk is products of about this size


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A forward of one layer and microbatch on one rank."""

    products: tuple[Product, ...]  # matrix products of the layer
    attention_flops: float  # of fused attention, masked blocks skipped
    score_width: float  # width of a query, which decides how much of the matrix units attention uses
    elements: float  # elements that perfectly fused norms, residual connections and activation functions move
    experts: tuple[Product, ...] = ()  # products of the routed experts
    routed_elements: float = 0.0  # elements of the tokens that this rank sends to experts, once each; 0 without experts


def layer_work(
    model: Model, tokens: float, tp: int, ep: int, experts: bool, expert_tp: int = 1, heads: float = 1.0
) -> LayerWork:
    """One layer.

    Args:
        tokens: Tokens of one rank before division by TP (with CP: its part of the sequences).
        ep: Parts over which the experts are divided.
        expert_tp: Ranks that cut one expert.
        heads: Factor on ``tokens`` in the scan of a recurrent layer, whose heads context-parallel ranks divide evenly.
    """
    h, split = model.hidden_size, tp if model.sequence_parallel else 1
    products = list(_attention_products(model, tokens, tp, heads))
    elements = tokens * (6.0 * model.norms * h / split + 2.0 * (model.attention_size + 2 * model.kv_size) / tp)
    if model.recurrent is not None:
        moved = model.recurrent.projected + model.recurrent.convolved + model.recurrent.inner
        elements += 2.0 * heads * tokens * moved / tp
    keys = model.mean_keys(DIAGONAL_TOKENS)
    score = model.head_dim if model.latent is None else model.latent.nope_size + model.latent.rope_size
    routed = 0.0
    grouped: tuple[Product, ...] = ()
    x = model.experts if experts else None
    if x is None and model.ffn_hidden_size:
        mlp, more = _mlp(model, tokens, model.ffn_hidden_size / tp)
        products, elements = products + mlp, elements + more
    elif x is not None:
        # Ranks of a TP group send their parts of the sequence; ranks that divide an expert get all of its tokens.
        routed = tokens * h / tp
        met = tokens / tp * ep * expert_tp
        mlp, more = _mlp(model, met * x.top_k / x.count, x.ffn_hidden_size / expert_tp, x.count / ep)
        grouped, elements = tuple(mlp), elements + more
        if x.shared_ffn_hidden_size:
            mlp, more = _mlp(model, tokens, x.shared_ffn_hidden_size / tp)
            products, elements = products + mlp, elements + more
    flops = 2.0 * tokens * keys * model.score_size / tp
    return LayerWork(tuple(products), flops, score, elements, grouped, routed)


def deferred_bytes(model: Model, tokens: float, tp: int, ep: int, expert_tp: int, whole: bool) -> tuple[float, float]:
    """Bytes kept for deferred weight gradients (inputs and output gradients of linear layers): (layer, head).

    Args:
        whole: Whether gathered inputs are kept, as in Transformer Engine; otherwise a rank's part of the sequence.
    """
    x, h = model.experts, model.hidden_size
    split = tp if model.sequence_parallel and not whole else 1

    def of(products: Sequence[Product]) -> float:
        return sum(p.count * p.m * (p.n + p.k / (split if p.k == h else 1)) for p in products) * model.element_bytes

    share, found = 1 - min(1.0, x.dense_layers / model.num_layers) if x is not None else 0.0, 0.0
    for part, experts in ((share, True), (1 - share, False)):
        work = layer_work(model, tokens, tp, ep, experts, expert_tp)
        products = work.products if model.recurrent is None else work.products[::2]  # without the scan
        found += part * (of(products) + of(work.experts))
    return found, of([Product(tokens, model.vocab_size / tp, h)])


def _sharing_rate(gpu: Gpu, tp: int, spread: Spread) -> float:
    """Bytes per second between context-parallel ranks."""
    if spread.between_bytes_per_s is not None:
        return spread.between_bytes_per_s
    return gpu.collective_rate if tp * spread.cp <= spread.domain else spread.network_bytes_per_s


def _attention_products(model: Model, tokens: float, tp: int, scanned: float) -> list[Product]:
    h, x = model.hidden_size, model.latent
    r = model.recurrent
    if r is not None:
        scan = Product(scanned * tokens, r.scan_flops / (2 * SCAN_WIDTH) / tp, SCAN_WIDTH)
        return [Product(tokens, r.projected / tp, h), scan, Product(tokens, h, r.inner / tp)]
    if not model.num_attention_heads:
        return []
    if x is None:
        return [
            Product(tokens, (model.query_size + 2 * model.kv_size) / tp, h),
            Product(tokens, h, model.attention_size / tp),
        ]
    heads = model.num_attention_heads / tp
    return [
        *(Product(tokens, rows, columns) for rows, columns in x.query_products(h, heads)),
        Product(tokens, x.key_value_rank + x.rope_size, h),
        Product(tokens, heads * (x.nope_size + x.value_size), x.key_value_rank),
        Product(tokens, h, heads * x.value_size),
    ]


def _mlp(model: Model, tokens: float, width: float, count: float = 1.0) -> tuple[list[Product], float]:
    """(products, elements moved by the activation function) of one MLP, ``count`` times."""
    h = model.hidden_size
    wide = width * (2 if model.gated else 1)
    return [Product(tokens, wide, h, count), Product(tokens, h, width, count)], tokens * (wide + width) * count


ADAM_BYTES = 28.0  # Adam reads parameters, gradients and two moments, and writes all but the gradients, in fp32

SUM_BYTES = 12.0  # adding two fp32 numbers reads both and writes one


class CatalogCosts:
    """Times from datasheets and the constants of a runtime's kernels."""

    profile: None = None
    file = ""

    def __init__(self, model: Model, gpu: Callable[[str], Gpu], runtime: Runtime = MEGATRON_HET) -> None:
        self.model, self.gpu, self.runtime = model, gpu, runtime
        self.cost = cache(self.cost)  # type: ignore[method-assign]
        self._layer = cache(self._layer_times)
        self.of_kind = cache(self.of_kind)  # type: ignore[method-assign]

    def uncertainty_of(self, gpus: Collection[str], sliced: bool) -> Uncertainty:
        """Returns the prediction errors of published runs of such plans."""
        return catalog_uncertainty(self.model, gpus, sliced, fitted=self.runtime.fused)

    def tp_sizes(self, gpu: str) -> tuple[int, ...]:
        """Powers of two that divide heads, groups and widths."""
        m = self.model
        sizes = (m.num_attention_heads, m.groups, m.hidden_size, m.ffn_hidden_size)
        fitting = (t for t in (1, 2, 4, 8) if t <= most_tp(m) and all(n % t == 0 for n in sizes))
        return tuple(t for t in fitting if all(x is None or x.divides(t) for x in (m.mamba, m.delta_net)))

    def max_batch(self, gpu: str, tp: int) -> int:
        """Largest micro batch with figures: unlimited."""
        return 1 << 20

    def fused(self, gpu: str) -> bool:
        """Whether attention runs in a fused kernel on this GPU; FlashAttention-2 is for fp16 and bf16 only."""
        if self.model.attention == "fused" or self.model.document_lengths is not None:
            return True  # slice attention runs document by document
        half = self.model.precision in ("fp16", "bf16")
        return self.model.attention == "flash" and half and self.gpu(gpu).flash_attention_2 and self.runtime.fused

    def sliced_share(self, gpu: str, batch: int, tp: int, recompute: str, kinds: Counted = ()) -> float:
        """Ratio of the kept activations of a layer in slices (no attention matrices) to those of whole sequences."""
        sliced = whole = 0.0
        counted = kinds or self.model.kinds
        models = [(count, self.model.of_kind(kind)) for kind, count in counted] or [(1, self.model)]
        for count, model in models:
            sliced += count * activation_bytes(model, "layer", batch, tp, recompute, True, sliced=True)
            whole += count * activation_bytes(model, "layer", batch, tp, recompute, self.fused(gpu))
        return sliced / whole

    def of_kind(self, kind: str) -> "CatalogCosts":
        """Returns the costs of a model of one layer of a kind."""
        return CatalogCosts(self.model.of_kind(kind), self.gpu, self.runtime)

    def alone_share(self, gpu: str, batch: int, tp: int) -> float:
        """Time of a pass while other devices wait, relative to all being busy: 1, as GPUs do not slow each other."""
        return 1.0

    def update_s(self, gpu: str, parameters: float) -> float:
        """Seconds of a fused Adam step, which is bound by memory bandwidth."""
        return memory_s(self.gpu(gpu), ADAM_BYTES * parameters)

    def cost(self, gpu: str, kind: LayerKind, batch: int, tp: int, recompute: str, spread: Spread = ALONE) -> LayerCost:
        """Figures of one layer, remembered."""
        if kind == "layer" and self.model.kinds:
            alone, counted = spread._replace(kinds=()), spread.kinds or self.model.kinds
            return mean_of_layers(
                [(count, self.of_kind(one).cost(gpu, kind, batch, tp, recompute, alone)) for one, count in counted]
            )
        model, device, fused = self.model, self.gpu(gpu), self.fused(gpu)
        precision = model.linear_precision
        if not device.peak(model.precision) or not device.peak(precision):
            known = ", ".join(device.flops)
            raise PlannerError("model", "precision", precision, f"{gpu} does not support it", f"It supports {known}")
        if "moe_act" in recompute and (device.is_processor or not self.runtime.fused):
            problem = "Megatron runs it again with Transformer Engine only"
            raise PlannerError("model", "recompute", "moe_act", f"{gpu}: {problem}", "Leave it out")
        tokens, passes = batch * model.seq_length / spread.over, spread.slices
        reduce = passes * self._reduces_s(device, tokens / passes, tp, spread)
        if kind == "layer":
            times = self._mean_layer(gpu, batch, tp, recompute, spread)
        elif kind == "embedding":
            moved = tokens * model.hidden_size * model.element_bytes
            times = (memory_s(device, 3.0 * moved) + reduce, memory_s(device, 3.0 * moved), 0.0, 0.0)
        else:
            product = Product(tokens / passes, model.vocab_size / tp, model.hidden_size)
            figures = device, self.runtime.kernels, product, model.precision, model.element_bytes
            loss = memory_s(device, self.runtime.kernels.logits_bytes * tokens * model.vocab_size / tp)
            forward, backward = passes * product_s(*figures), passes * backward_product_s(*figures)
            times = (forward + loss / 2 + reduce, backward + loss / 2 + reduce, 0.0, 0.0)
        parts = spread.expert_parts(tp)
        matrix = attention_matrix_bytes(model, batch, tp, spread.over)
        if fused or self._is_ours(device, spread):
            matrix, fused = 0.0, fused or passes == 1  # for slices ``sliced_share`` has the ratio
        kept = activation_bytes(model, kind, batch, tp, recompute, fused, cp=spread.over, expert_tp=parts)
        rows, size = model.vocab_size / tp * model.element_bytes, model.hidden_size * model.element_bytes
        if kind == "layer":
            copies = self.runtime.attention_copies + (recompute == "selective")
            extra = backward_bytes(model, batch, tp, spread.over, expert_tp=parts, matrix=matrix, matrices=copies)
            if recompute not in ("none", "selective"):
                extra += activation_bytes(model, kind, batch, tp, "none", fused, cp=spread.over, expert_tp=parts)
                extra -= kept if recompute != "full" else 0.0
        elif kind == "head":  # logits, and later their gradients, beside the softmax in fp32
            extra = tokens * rows + max(tokens * size if model.sequence_parallel and tp > 1 else 0.0, matrix)
        else:  # the gradient of the table, before it is added to the others
            extra = rows * model.hidden_size + tokens / passes * size + matrix
        forward, backward, *attention = times
        return LayerCost(forward, backward, _parameters(model, kind, tp, spread), kept, extra, *attention)

    def _mean_layer(self, name: str, batch: int, tp: int, recompute: str, spread: Spread) -> tuple[float, ...]:
        """(forward, backward, attention in both) of the mean of layers with and without experts."""
        x = self.model.experts
        if x is None:
            return self._layer(name, batch, tp, recompute, spread, False)
        share = 1 - min(1.0, x.dense_layers / self.model.num_layers)
        pair = (self._layer(name, batch, tp, recompute, spread, e) for e in (True, False))
        return tuple(share * a + (1 - share) * b for a, b in zip(*pair))

    def _layer_times(
        self, name: str, batch: int, tp: int, recompute: str, spread: Spread, experts: bool
    ) -> tuple[float, float, float, float]:
        model, gpu, runtime = self.model, self.gpu(name), self.runtime
        kernels, precision = runtime.kernels, model.linear_precision
        passes = spread.slices
        tokens = batch * model.seq_length / spread.over / passes
        cut = tp, spread.ep, experts, spread.expert_parts(tp), spread.over / spread.cp
        whole = layer_work(model, passes * tokens, *cut)
        work = whole if passes == 1 else layer_work(model, tokens, *cut)
        rate = kernels.gemm * kernels.expert_gemm
        grouped = replace(kernels, gemm=rate, quantize_bytes=kernels.expert_quantize_bytes)
        products = [(kernels, p) for p in work.products] + [(grouped, p) for p in work.experts]
        once = sum(product_s(gpu, k, p, precision, model.element_bytes) for k, p in products)
        twice = sum(backward_product_s(gpu, k, p, precision, model.element_bytes) for k, p in products)
        element = memory_s(gpu, kernels.elementwise * work.elements * model.element_bytes)
        attention_f, attention_b, repeated = self._attention(name, whole, batch, tp, spread)
        each_f, each_b = attention_f / passes, attention_b / passes  # of a slice, in the mean
        around = model.norms / 2 * self._reduces_s(gpu, 2 * tokens, tp, spread)
        around += self._exchange_s(gpu, work, tp, spread) + self._heads_s(gpu, tokens, tp, spread)
        dropless = experts and model.experts is not None and model.experts.dropless
        waits = kernels.dropless_launches * gpu.launch_s if dropless else 0.0
        launches = kernels.launches * model.norms / 2 + (kernels.expert_launches if experts else 0.0)
        host = launches * gpu.launch_s
        forward = passes * (max(once + element + each_f, host) + around + waits)
        backward = passes * (max(twice + 2 * element + each_b, 2 * host) + around + waits)
        if recompute == "full":
            backward, attention_b = backward + forward, attention_b + attention_f
        elif recompute == "selective":
            backward, attention_b = backward + repeated, attention_b + repeated
        elif recompute not in GRANULARITIES:
            backward += passes * self._again_s(gpu, recompute, work, tokens, tp, spread)
        return forward, backward, attention_f, attention_b

    def _again_s(self, gpu: Gpu, recompute: str, work: LayerWork, tokens: float, tp: int, spread: Spread) -> float:
        """Seconds to recompute parts of a layer; in 16 bits plans do not recompute a dense MLP's second projection."""
        model, kernels, gathers, products = self.model, self.runtime.kernels, 0.0, list[Product]()
        activated = list(work.experts) if "moe_act" in recompute else []
        if "mlp" in recompute and model.ffn_hidden_size and not work.experts:
            activated = list(work.products[-2:])
            whole = self.runtime.again_whole or model.linear_precision in INPUT_BYTES
            products, gathers = (activated, 1.0) if whole else (activated[:1], 0.5 * model.sequence_parallel)
        moved = sum(up.count * up.m * (up.n + down.k) for up, down in zip(activated[:1], activated[1:]))
        if "mla_up_proj" in recompute and model.latent is not None:
            rotated = _attention_products(model, tokens, tp, tokens)[-4:-1:2]
            products, moved = products + rotated, moved + sum(2 * p.m * p.n for p in rotated)
        seconds = sum(product_s(gpu, kernels, p, model.linear_precision, model.element_bytes) for p in products)
        seconds += gathers * self._reduces_s(gpu, tokens, tp, spread)
        return seconds + memory_s(gpu, kernels.elementwise * moved * model.element_bytes)

    def _is_ours(self, gpu: Gpu, spread: Spread) -> bool:
        """Whether attention runs in the kernels of slices, which keep no attention matrices on any GPU."""
        is_cut = spread.slices > 1 or (spread.cp > 1 and self.runtime.commuted)
        return not gpu.is_processor and (is_cut or self.model.document_lengths is not None)

    def _attention(self, name: str, work: LayerWork, batch: int, tp: int, spread: Spread) -> tuple[float, float, float]:
        """(forward, backward, again under selective recomputation), with the exchange of keys and values under CP."""
        model, gpu, kernels = self.model, self.gpu(name), self.runtime.kernels
        is_ours = self._is_ours(gpu, spread)
        if is_ours or self.fused(name):
            if is_ours:
                half = model.precision in ("fp16", "bf16")
                share = 1.0 if half and gpu.flash_attention_2 else MEMORY_EFFICIENT
                if model.precision == "tf32" and "tf32" in gpu.flops:  # fp32 products by three products in tf32
                    share /= 3
                newest = kernels.newest_attention and gpu.has_newer_attention
                kernels = replace(kernels, newest_attention=newest, attention=share * kernels.attention)
            forward, backward = attention_s(gpu, kernels, work.attention_flops, work.score_width, model.precision)
            # Every slice adds to the fp32 gradients of all earlier keys and values.
            added = (spread.slices - 1) * model.mean_keys() * batch / spread.over * pool_size(model, tp)
            backward, repeated = backward + memory_s(gpu, SUM_BYTES * added), 0.0
        else:  # matrices of all keys, masked or not
            tokens = batch * model.seq_length / spread.over
            flops = 2.0 * tokens * model.seq_length * model.score_size / tp
            matrix = memory_s(gpu, attention_matrix_bytes(model, batch, tp, spread.over))
            compute = flops / (gpu.peak(model.precision) * gpu.efficiency * kernels.gemm)
            forward, backward, repeated = compute + 6 * matrix, 2 * compute + 18 * matrix, compute + 3 * matrix
        if spread.cp > 1:
            forward, backward = self._shared(gpu, forward, backward, batch, tp, spread)
        return forward, backward, repeated

    def _shared(
        self, gpu: Gpu, forward: float, backward: float, batch: int, tp: int, spread: Spread
    ) -> tuple[float, float]:
        """(forward, backward) seconds of attention under context parallelism, from those of a rank's part."""
        model = self.model
        rate = _sharing_rate(gpu, tp, spread)
        # Elements of the queries that a rank sends to the others, or that it receives from them if these are more.
        elements = (max(spread.cp, spread.over) - 1) / spread.over * batch * model.seq_length / tp
        if not self.runtime.commuted:  # while one block is used the next arrives; the backward returns gradients too
            ring = elements * 2 * model.kv_size * model.element_bytes / rate
            return max(forward, ring), max(backward, 2 * ring)
        # Queries go and partial outputs return, while a rank attends to its own keys for its own queries.  Backwards
        # send queries, outputs and gradients, and get gradients of queries in fp32.
        shared = model.shared(spread.cp, spread.slices, cut=spread.cut or batch > 1)
        forward, backward, elements = shared.most * forward, shared.most * backward, shared.sent * elements
        once = elements * model.attention_size / rate
        there, back = 2 * once * model.element_bytes, once * (3 * model.element_bytes + 4)
        return forward + max(0.0, there - forward / spread.over), backward + max(0.0, back - backward / spread.over)

    def _heads_s(self, gpu: Gpu, tokens: float, tp: int, spread: Spread) -> float:
        """Seconds to send a rank's tokens to the context-parallel ranks of a recurrent layer's heads, and back."""
        if self.model.recurrent is None or spread.cp == 1:
            return 0.0
        moved = tokens * self.model.recurrent.travels * self.model.element_bytes / tp
        return moved * (max(spread.cp, spread.over) - 1) / spread.cp / _sharing_rate(gpu, tp, spread)

    def _reduces_s(self, gpu: Gpu, tokens: float, tp: int, spread: Spread) -> float:
        """Exposed time of an all-reduce (or all-gather and reduce-scatter) of activations over a TP group."""
        if tp == 1:
            return 0.0
        moved = 2.0 * (tp - 1) / tp * tokens * self.model.hidden_size * self.model.element_bytes
        rate = gpu.collective_rate
        if spread.intra_node_bytes_per_s is not None:
            rate *= spread.intra_node_bytes_per_s / gpu.intra_node_bytes_per_s
        return (moved / rate + 40e-6) * (1 - self.runtime.tp_overlap)

    def _exchange_s(self, gpu: Gpu, work: LayerWork, tp: int, spread: Spread) -> float:
        """Seconds of tokens to experts and back: sorting, two all-to-alls, and gather and sum under expert TP.

        Half of the sorting is of sent tokens, half of received ones; each rank that divides an expert gets all.
        """
        x = self.model.experts
        if x is None or not work.routed_elements:
            return 0.0
        once = work.routed_elements * self.model.element_bytes
        parts = spread.expert_parts(tp)
        sort = memory_s(gpu, self.runtime.kernels.dispatch * once * x.top_k * (1 + parts) / 2)
        domain = max(1, spread.domain)
        across = exchange_s(gpu, once, x.top_k, spread.ep, domain, spread.network_bytes_per_s)
        gather = (parts - 1) * once * x.top_k / gpu.collective_rate if parts > 1 else 0.0
        return sort + 2 * across * (1 - self.runtime.exchange_overlap) + 2 * gather * (1 - self.runtime.tp_overlap)


def _parameters(model: Model, kind: LayerKind, tp: int, spread: Spread) -> int:
    if kind == "embedding":
        return model.embedding_parameters(tp)
    if kind == "layer":
        return model.layer_parameters(tp, spread.ep, spread.expert_parts(tp))
    return model.head_parameters(tp)
