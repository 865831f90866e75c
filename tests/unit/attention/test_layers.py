"""Norms and activation functions that keep their input only."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_helpers import CPU, SCALE, masked_attention, relative, seen
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from megatron_het.attention import latent
from megatron_het.attention.calls import Form, Reach, blocks_of
from megatron_het.attention.kernels import CpuFlash
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.latent import Expansion, LatentCache, Widths
from megatron_het.attention.places import SliceContext
from megatron_het.attention.slice_attention import slice_attention
from megatron_het.features.thrifty_layers import runtime
from megatron_het.schedule.cutting import Starts


def run(norm: torch.nn.Module, source: torch.Tensor, grad: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """(output and gradients, bytes that autograd keeps besides source and weight)."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    source = source.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = norm(source)
    for own in (source, norm.weight):
        kept.pop(own.untyped_storage().data_ptr(), None)
    out.backward(grad)
    assert source.grad is not None
    return [out.detach(), source.grad, norm.weight.grad], sum(kept.values())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    plain = torch.nn.RMSNorm(64, eps=1e-5, dtype=dtype)
    torch.nn.init.normal_(plain.weight)
    model = torch.nn.Sequential(copy.deepcopy(plain))
    assert runtime.make_norms_thrifty([model]) == 1 and isinstance(model[0], runtime.ThriftyRMSNorm)
    assert list(model.state_dict()) == ["0.weight"]
    source, grad = torch.randn(10, 2, 64, dtype=dtype), torch.randn(10, 2, 64, dtype=dtype)
    wanted, _ = run(plain, source, grad)
    found, kept = run(model[0], source, grad)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert kept == 20 * (8 if dtype == torch.float64 else 4)  # a number per token


def test_layer_norm_keeps_its_input_only() -> None:
    """PyTorch's LayerNorm needs no replacement: its input, and two numbers per token in fp32."""
    norm = torch.nn.LayerNorm(64)
    assert runtime.make_norms_thrifty([norm]) == 0 and type(norm) is torch.nn.LayerNorm
    kept = _kept(norm)
    assert [size for size in kept if size > norm.weight.nbytes] == []
    assert sum(kept) == 2 * norm.weight.nbytes + 2 * 20 * 4


@pytest.mark.parametrize("is_fused", [False, True])
def test_gelu_keeps_its_input_only(is_fused: bool) -> None:
    """With a bias too: what comes in, or its sum with the bias, and never what comes out."""
    bias = torch.zeros(64, requires_grad=True)
    if is_fused:
        assert sum(_kept(lambda source: bias_gelu_impl(source, bias))) == bias.nbytes
    else:
        assert sum(_kept(torch.nn.functional.gelu)) == 0
        assert sum(_kept(lambda source: torch.nn.functional.gelu(source + bias))) == 20 * 64 * 4


def _kept(run: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Bytes of each tensor that autograd keeps besides the input."""
    source, kept = torch.randn(10, 2, 64).requires_grad_(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run(source)
    kept.pop(source.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    return list(kept.values())


# Linear layers without communication: the sums of Megatron's, and only where there is none.

LAYERS = "megatron.core.tensor_parallel.layers"
LIGHT = {ColumnParallelLinear: runtime.LightColumnLinear, RowParallelLinear: runtime.LightRowLinear}


def layer(kind: type[torch.nn.Module], **changed: Any) -> Any:
    """One of Megatron's layers as it is on a TP group of one rank, without the groups that making one takes."""
    torch.manual_seed(3)
    module: Any = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    module.bias = torch.nn.Parameter(torch.randn(6, dtype=torch.float64))
    module.config = SimpleNamespace(_cpu_offloading_context=None, defer_embedding_wgrad_compute=False)
    module.tp_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    off = "allreduce_dgrad disable_grad_reduce explicit_expert_comm gather_output gradient_accumulation_fusion "
    off += "sequence_parallel skip_bias_add use_inference_optimized_all_gather"
    sizes = {"gtp_remat_size": 1, "input_is_parallel": True, "output_size_per_partition": 6, "input_size": 4}
    plain = {**dict.fromkeys(off.split(), False), **sizes}
    for name, value in (plain | changed).items():
        setattr(module, name, value)
    return module


def model(module: torch.nn.Module) -> Any:
    return SimpleNamespace(decoder=torch.nn.Sequential(module))


def passed(module: Any) -> list[torch.Tensor | None]:
    """Output, the bias that is left to add, and gradients."""
    source = torch.randn(5, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out, bias = module(source)
    out.sin().sum().backward()
    return [out.detach(), bias, source.grad, module.weight.grad, module.bias.grad]


@pytest.mark.parametrize("kind", LIGHT)
@pytest.mark.parametrize("skips", [False, True])
def test_equals_megatron(kind: type[torch.nn.Module], skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("copy_to", "reduce_from"):  # nothing, on one rank; they ask a group of torch.distributed
        monkeypatch.setattr(f"{LAYERS}.{name}_tensor_model_parallel_region", lambda tensor, **_: tensor)
    monkeypatch.setattr(f"{LAYERS}.get_tensor_model_parallel_group_if_none", lambda group, **_: group)
    wanted, module = passed(layer(kind, skip_bias_add=skips)), layer(kind, skip_bias_add=skips)
    names = list(module.state_dict())
    assert runtime.lighten_linear_layers([model(module)]) == 1 and type(module) is LIGHT[kind]
    assert list(module.state_dict()) == names
    for a, b in zip(passed(module), wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", LIGHT)
@pytest.mark.parametrize(
    "changed",
    [
        {"tp_group": SimpleNamespace(size=lambda: 2)},
        {"sequence_parallel": True},
        {"explicit_expert_comm": True},
        {"gradient_accumulation_fusion": True},
        {"gtp_remat_size": 2},
        {"_forward_impl": lambda **_: None},
        {"weight": None},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_left_alone(kind: type[torch.nn.Module], changed: dict[str, Any]) -> None:
    module = layer(kind, **changed)
    assert runtime.lighten_linear_layers([model(module)]) == 0 and type(module) is kind


def test_a_weight_from_elsewhere_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LAYERS}.copy_to_tensor_model_parallel_region", lambda tensor, **_: tensor)
    module, other = layer(ColumnParallelLinear), torch.zeros(6, 4, dtype=torch.float64)
    runtime.lighten_linear_layers([model(module)])
    out, _ = module(torch.ones(1, 1, 4, dtype=torch.float64), weight=other.requires_grad_())
    torch.testing.assert_close(out[0, 0], module.bias)


@pytest.mark.parametrize("kind", LIGHT)
def test_a_split_backward_that_is_later_is_kept(kind: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("copy_to", "reduce_from"):
        monkeypatch.setattr(f"{LAYERS}.{name}_tensor_model_parallel_region", lambda tensor, **_: tensor)
    module = layer(kind)
    runtime.lighten_linear_layers([model(module)])
    module._forward_impl = lambda input, weight, bias, **_: input.new_full((*input.shape[:2], 6), 7.0)
    out, _ = module(torch.ones(1, 1, 4, dtype=torch.float64))
    assert (out - (0 if kind is ColumnParallelLinear else module.bias) == 7).all()


# Documents, sliding windows and softmax offsets: slices against attention written out with a mask.

_TOKENS = 24
_DOCUMENTS: dict[str, tuple[Starts, ...] | None] = {
    "one document": None,
    "alike": ((0, 5, 6, 17), (0, 5, 6, 17)),
    "of its own": ((0, 1, 11, 12, 20), (0, 23)),
    "ends with a slice": ((0, 6, 12), (0, 18)),
}


@pytest.mark.parametrize("tokens", [24, 12, 6, 4, 1])
@pytest.mark.parametrize("window", [None, 0, 1, 2, 5, 7, 11, 12, 23, 100])
@pytest.mark.parametrize("starts", [(0,), (0, 5, 6, 17), (0, 12), (0, 1, 2, 3, 23), (0, 4, 8, 20)])
def test_blocks_are_what_is_seen(tokens: int, window: int | None, starts: Starts) -> None:
    """Every pair that is seen is in one block, no other pair is in any, and squares keep to one slice."""
    count = torch.zeros(_TOKENS, _TOKENS, dtype=torch.int)
    for first in range(0, _TOKENS, tokens):
        opened: set[int] = set()
        keys = tuple((k, k + tokens) for k in range(0, _TOKENS, tokens))
        for block in blocks_of((first, first + tokens), keys, starts, window):
            (a, b), (c, d) = block.rows, block.keys
            part = torch.ones(b - a, d - c, dtype=torch.int)
            if block.form is not Form.FULL:
                assert b - a == d - c and c // tokens == (d - 1) // tokens
                part = part.tril() if block.form is Form.CAUSAL else part.triu()
            count[a:b, c:d] += part
            if block.form is Form.CAUSAL:
                opened |= set(range(a, b))
            assert set(range(a, b)) <= opened and first <= a < b <= first + tokens and c < d
    assert torch.equal(count, seen(starts, window, _TOKENS).int())


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("documents", list(_DOCUMENTS))
@pytest.mark.parametrize("slices", [1, 4, 12])
def test_equals_attention_with_a_mask(slices: int, documents: str, window: int | None, sink: bool) -> None:
    torch.manual_seed(slices)
    reach = Reach(_DOCUMENTS[documents], window)
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_() if sink else None
    cache, runs = KVCache(2 * slices), []
    for microbatch in range(2):
        whole = [torch.randn(_TOKENS, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4)]
        leaves = [[p.clone().requires_grad_() for p in t.chunk(slices)] for t in whole[:3]]
        outs = [
            slice_attention(
                *(leaf[i] for leaf in leaves),
                SliceContext(cache=cache, kernel=CPU, microbatch=microbatch, index=i, scale=SCALE, reach=reach),
                sinks,
            )
            for i in range(slices)
        ]
        runs.append((whole, leaves, outs))
    found, wanted = [], []
    for whole, leaves, outs in runs:
        for out, grad in reversed(list(zip(outs, whole[3].chunk(slices), strict=True))):
            out.backward(grad)
        found += [torch.cat(outs).detach(), *(torch.cat([p.grad for p in leaf]) for leaf in leaves)]
    if sinks is not None:
        found.append(sinks.grad.clone())
        sinks.grad = None
    for whole, _, _ in runs:
        inputs = [t.clone().requires_grad_() for t in whole[:3]]
        out = masked_attention(*inputs, reach, sinks)
        out.backward(whole[3])
        wanted += [out.detach(), *(t.grad for t in inputs)]
    if sinks is not None:
        wanted.append(sinks.grad)
    assert [relative(f, w) for f, w in zip(found, wanted, strict=True)] == pytest.approx([0] * len(found), abs=1e-13)
    cache.check_empty()


def test_no_gradients_are_kept_for_what_no_later_slice_reaches() -> None:
    """Documents that end with their slice leave nothing in the cache but keys and values."""
    tensors = [torch.randn(6, 1, 2, 16) for _ in range(4)]

    def held(reach: Reach) -> int:
        cache = KVCache(4)
        slabs = 2
        outs = [
            slice_attention(
                *(t.clone().requires_grad_() for t in tensors[:3]),
                SliceContext(cache=cache, kernel=CPU, microbatch=0, index=i, scale=SCALE, reach=reach),
            )
            for i in range(4)
        ]
        outs[3].backward(tensors[3])
        return len(cache.tensors()) - slabs

    assert held(Reach()) == 2 * 3
    assert held(Reach(((0, 6, 12, 18),))) == 0
    assert held(Reach(((0, 9, 12),))) == 2  # the third slice, of which the document of the fourth is
    assert held(Reach(None, 6)) == 2


def test_a_window_that_covers_everything_is_none() -> None:
    assert blocks_of((6, 12), ((0, 6), (6, 12)), (0,), 100) == blocks_of((6, 12), ((0, 6), (6, 12)), (0,))


# Slices of multi-latent attention, of which compressed keys and values are cached, equal attention to whole ones.


SLICES, TOKENS, BATCH = 4, 6, 2
LATENT_SCALE = 0.3


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
def test_slices_equal_the_whole(value: int, starts: tuple[tuple[int, ...], ...] | None, window: int | None) -> None:
    torch.manual_seed(5)
    w = Widths(heads=3, rank=7, rotary=4, plain=5, value=value)
    query = torch.randn(SLICES * TOKENS, BATCH, w.heads, w.plain + w.rotary, dtype=torch.float64, requires_grad=True)
    latents = torch.randn(SLICES * TOKENS, BATCH, 1, w.rank + w.rotary, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(w.heads * (w.plain + value), w.rank, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(SLICES * TOKENS, BATCH, w.heads, value, dtype=torch.float64)
    given = query, latents, weight

    keys, values = expanded(latents, weight, w)
    heads_first = (t.permute(1, 2, 0, 3) for t in (query, keys, values))
    whole = scaled_dot_product_attention(*heads_first, attn_mask=mask_of(starts, window), scale=LATENT_SCALE)
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
                cache=cache, kernel=CpuFlash(), microbatch=0, index=i, scale=LATENT_SCALE, reach=Reach(starts, window)
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
