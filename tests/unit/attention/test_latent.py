"""Slices of multi-latent attention, of which compressed keys and values are cached, equal attention to whole ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from megatron_het.attention import latent
from megatron_het.attention.calls import Reach
from megatron_het.attention.kernels import CpuFlash
from megatron_het.attention.latent import Expansion, LatentCache, Widths
from megatron_het.attention.places import SliceContext
from megatron_het.attention.slice_attention import slice_attention

SLICES, TOKENS, BATCH = 4, 6, 2
SCALE = 0.3


def expanded(latents: torch.Tensor, weight: torch.Tensor, w: Widths) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of whole sequences, as the layer itself makes them."""
    both = (latents[:, :, 0, : w.rank] @ weight.t()).view(*latents.shape[:2], w.heads, -1)
    rotary = latents[..., w.rank :].expand(-1, -1, w.heads, -1)
    return torch.cat((both[..., : w.plain], rotary), dim=-1), both[..., w.plain :]


def mask_of(starts: tuple[tuple[int, ...], ...] | None, window: int | None) -> torch.Tensor:
    """``[b, 1, s, s]``: who sees whom."""
    at = torch.arange(SLICES * TOKENS)
    sees = (at[:, None] >= at[None]).repeat(BATCH, 1, 1)
    if window is not None:
        sees &= at[:, None] - at[None] <= window
    for i, own in enumerate(starts or ()):
        document = (at[:, None] >= torch.tensor(own)).sum(1)
        sees[i] &= document[:, None] == document[None]
    return sees[:, None]


@pytest.mark.parametrize("value", [5, 12], ids=["narrow values", "wide values"])
@pytest.mark.parametrize(
    ("starts", "window"),
    [(None, None), (((0, 7, 15), (0,)), None), (((0, 9), (0, 9)), None), (None, 8)],
    ids=["whole", "documents", "same documents", "window"],
)
def test_slices_equal_whole_sequences(
    value: int, starts: tuple[tuple[int, ...], ...] | None, window: int | None
) -> None:
    torch.manual_seed(5)
    w = Widths(heads=3, rank=7, rotary=4, plain=5, value=value)
    query = torch.randn(SLICES * TOKENS, BATCH, w.heads, w.plain + w.rotary, dtype=torch.float64, requires_grad=True)
    latents = torch.randn(SLICES * TOKENS, BATCH, 1, w.rank + w.rotary, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(w.heads * (w.plain + value), w.rank, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(SLICES * TOKENS, BATCH, w.heads, value, dtype=torch.float64)
    given = query, latents, weight

    keys, values = expanded(latents, weight, w)
    heads_first = (t.permute(1, 2, 0, 3) for t in (query, keys, values))
    whole = scaled_dot_product_attention(*heads_first, attn_mask=mask_of(starts, window), scale=SCALE)
    whole = whole.permute(2, 0, 1, 3)
    wanted = torch.autograd.grad(whole, given, upstream)

    expansion = Expansion(w, lambda: weight)
    cache = LatentCache(SLICES, None, expansion)
    padded = torch.nn.functional.pad(query, (0, w.head - query.shape[-1]))
    outs = []
    for i in range(SLICES):
        rows = slice(i * TOKENS, (i + 1) * TOKENS)
        own = latent._Weighted.apply(latents[rows], weight, expansion)
        out = slice_attention(
            padded[rows],
            own,
            own[..., :0],
            SliceContext(
                cache=cache, kernel=CpuFlash(), microbatch=0, index=i, scale=SCALE, reach=Reach(starts, window)
            ),
        )
        outs.append(out[..., :value])
    assert torch.allclose(torch.cat(outs), whole)
    assert cache.pool_bytes == latents.nbytes

    found = [torch.zeros_like(t) for t in given]
    for i in reversed(range(SLICES)):
        rows = slice(i * TOKENS, (i + 1) * TOKENS)
        parts = torch.autograd.grad(outs[i], given, upstream[rows], retain_graph=True)
        found = [total + part for total, part in zip(found, parts, strict=True)]
    for part, other in zip(found, wanted, strict=True):
        assert torch.allclose(part, other)
    cache.check_empty()


def test_helpers_get_keys_and_values() -> None:
    """The context exchange copies tokens out, and brings gradients back, as of layers without latents."""
    torch.manual_seed(6)
    w = Widths(heads=2, rank=3, rotary=2, plain=2, value=4)
    weight = torch.randn(w.heads * (w.plain + w.value), w.rank, dtype=torch.float64, requires_grad=True)
    latents = torch.randn(2 * TOKENS, 1, 1, w.rank + w.rotary, dtype=torch.float64, requires_grad=True)
    expansion = Expansion(w, lambda: weight)
    cache = LatentCache(2, None, expansion)
    for i in range(2):
        part = latents.detach()[i * TOKENS : (i + 1) * TOKENS]
        cache.append(0, i, part, part[..., :0])
    keys, values = expanded(latents, weight, w)
    out = torch.empty(2, 8, 1, 1, w.head, dtype=torch.float64)
    cache.copy_tokens(0, 3, 11, out, slice(1, 2))
    assert torch.allclose(out[0], keys[3:11, :, 1:]) and torch.allclose(out[1], values[3:11, :, 1:])

    grad_keys, grad_values = torch.randn(2, 8, 1, w.heads, w.head, dtype=torch.float64)
    wanted = torch.autograd.grad((keys[3:11], values[3:11]), (latents, weight), (grad_keys, grad_values))
    cache.add_token_gradient(0, 3, 11, grad_keys, grad_values)
    found = []
    for i in (1, 0):
        total = cache.release(0, i)
        assert total is not None
        found.insert(0, total[0])
    assert torch.allclose(torch.cat(found), wanted[0])
    assert torch.allclose(expansion.take_weight_gradient(weight), wanted[1])
    assert not expansion.take_weight_gradient(weight).any()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", None])
def test_a_norm_inside_of_the_projection_is_kept(kind: str | None, zero_centered: bool) -> None:
    torch.manual_seed(7)
    linear: Any = SimpleNamespace(weight=torch.nn.Parameter(torch.randn(6, 4)))
    scale, shift = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    if kind:
        linear.layer_norm_weight, linear.layer_norm_bias = scale, shift
    config = SimpleNamespace(normalization=kind, layernorm_zero_centered_gamma=zero_centered, layernorm_epsilon=1e-5)
    expansion = Expansion(Widths(1, 4, 1, 3, 3), lambda: linear.weight)
    latents = torch.randn(5, 2, 4)
    found, bias = latent._carry_weight(linear, expansion, config, latents)
    gain = scale + 1 if zero_centered else scale
    wanted = {
        "RMSNorm": rms_norm(latents, (4,), gain, 1e-5),
        "LayerNorm": layer_norm(latents, (4,), gain, shift, 1e-5),
        None: latents,
    }[kind]
    assert torch.equal(found, wanted) and bias is None and found.requires_grad
