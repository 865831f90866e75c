"""What one rank computes and moves in a forward of one layer: matrix products, attention, element-wise traffic."""

from __future__ import annotations

from dataclasses import dataclass

from ..inputs.model import Model
from .kernels import DIAGONAL_TOKENS, Product

SCAN_WIDTH = 128
"""The recurrence of a chunk is products of about this size."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A forward of one layer and microbatch on one rank.

    Attributes:
        products: Matrix products of the layer.
        attention_flops: Of fused attention, masked blocks skipped.
        score_width: Width of a query, which decides how much of the matrix units attention uses.
        elements: Elements that perfectly fused norms, residual connections and activation functions move.
        experts: Products of the routed experts.
        routed_elements: Elements of the tokens that this rank sends to experts, once each; 0 without experts.
    """

    products: tuple[Product, ...]
    attention_flops: float
    score_width: float
    elements: float
    experts: tuple[Product, ...] = ()
    routed_elements: float = 0.0


def layer_work(model: Model, tokens: float, tp: int, ep: int, experts: bool, expert_tp: int = 1) -> LayerWork:
    """One layer.

    Args:
        tokens: Tokens of one rank before division by TP (with CP: its part of the sequences).
        ep: Parts over which the experts are divided.
        experts: Whether this layer has experts (of a model that does).
        expert_tp: Ranks that cut one expert.
    """
    h, split = model.hidden_size, tp if model.sequence_parallel else 1
    products = list(_attention_products(model, tokens, tp))
    elements = tokens * (6.0 * model.norms * h / split + 2.0 * (model.attention_size + 2 * model.kv_size) / tp)
    if model.recurrent is not None:
        elements += 2.0 * tokens * (model.recurrent.projected + model.recurrent.convolved + model.recurrent.inner) / tp
    keys = model.mean_keys(DIAGONAL_TOKENS)
    score = model.head_dim if model.latent is None else model.latent.nope_size + model.latent.rope_size
    routed = 0.0
    grouped: tuple[Product, ...] = ()
    x = model.experts if experts else None
    if x is None and model.ffn_hidden_size:
        mlp, more = _mlp(model, tokens, model.ffn_hidden_size / tp)
        products, elements = products + mlp, elements + more
    elif x is not None:
        # The ranks of a TP group send their parts of the sequence; those that cut an expert get its tokens whole.
        routed = tokens * h / tp
        met = tokens / tp * ep * expert_tp
        mlp, more = _mlp(model, met * x.top_k / x.count, x.ffn_hidden_size / expert_tp, x.count / ep)
        grouped, elements = tuple(mlp), elements + more
        if x.shared_ffn_hidden_size:
            mlp, more = _mlp(model, tokens, x.shared_ffn_hidden_size / tp)
            products, elements = products + mlp, elements + more
    flops = 2.0 * tokens * keys * model.score_size / tp
    return LayerWork(tuple(products), flops, score, elements, grouped, routed)


def _attention_products(model: Model, tokens: float, tp: int) -> list[Product]:
    h, x = model.hidden_size, model.latent
    r = model.recurrent
    if r is not None:
        scan = Product(tokens, r.scan_flops / (2 * SCAN_WIDTH) / tp, SCAN_WIDTH)
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
