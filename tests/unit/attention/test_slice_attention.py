"""Slice attention against full causal attention, and the rules of the key-value cache."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_helpers import CPU, SCALE, Sliced, inputs
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer.mlp import MLP

from megatron_het.attention import kernel_choice, kernels
from megatron_het.attention.calls import Reach, Sum
from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import KERNELS, CpuFlash, CudnnFlash, Kernel, Setting
from megatron_het.attention.kv_cache import CacheError, KVCache
from megatron_het.attention.places import Rotations, SliceContext
from megatron_het.attention.slice_attention import slice_attention
from megatron_het.device import Platform
from megatron_het.device.memory import memory_meter
from megatron_het.runtime.building import RecomputingMLP, recompute_first_layers, recompute_up_projections


def live_chunks(cache: KVCache) -> int:
    return sum(len(sequence.chunks) for sequence in cache._sequences.values())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_exact(n: int, heads: int, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    tensors = inputs(n, heads, groups, dtype)
    cache = KVCache(n)
    run = Sliced(cache, tensors, n)
    for i in range(n):
        run.forward(i)
    assert live_chunks(cache) == n
    for i in reversed(range(n)):
        run.backward(i)
    assert max(run.errors(tensors)) < tolerance
    assert live_chunks(cache) == 0
    cache.check_empty()


def test_two_gradients_are_rounded_once_and_three_are_added_up_in_fp32() -> None:
    first, second = (torch.randn(99).bfloat16() for _ in range(2))
    (total := Sum(first)).add(first)
    total.add(second)
    assert torch.equal(total.rounded, (first.float() + second.float()).bfloat16())
    total.add(second)
    assert torch.equal(total.total, first.float() + second.float() + second.float())


def test_many_slices_do_not_round_more_often() -> None:
    """The gradients of the first keys are a sum over all slices: in bf16 each addition would round it."""
    n = 64
    tensors = inputs(n, 4, 1, torch.bfloat16)
    run = Sliced(KVCache(n), tensors, n)
    for i in range(n):
        run.forward(i)
    for i in reversed(range(n)):
        run.backward(i)
    assert max(run.errors(tensors)) < 4.5e-3  # added up in bf16: 6.0e-3


@pytest.mark.parametrize("ahead", [0, 1, 2, 5, 6])
def test_interleaved_microbatches(ahead: int) -> None:
    """The order of a pipeline stage: warm-up, then one forward and one backward, then the rest."""
    n, count = 4, 3
    every = [[t + m for t in inputs(n, 4, 2, torch.float64, batch=1)] for m in range(count)]
    cache = KVCache(n + ahead)
    runs = [Sliced(cache, tensors, n, m) for m, tensors in enumerate(every)]
    forwards = [(m, i) for m in range(count) for i in range(n)]
    backwards = [(m, i) for m in range(count) for i in reversed(range(n))]
    warmup = n - 1 + ahead
    order = [("F", *f) for f in forwards[:warmup]]
    for f, b in zip(forwards[warmup:], backwards, strict=False):
        order += [("F", *f), ("B", *b)]
    order += [("B", *b) for b in backwards[len(forwards) - warmup :]]
    peak = 0
    for kind, m, i in order:
        runs[m].forward(i) if kind == "F" else runs[m].backward(i)
        peak = max(peak, live_chunks(cache))
    assert peak == n + ahead
    cache.check_empty()
    pool = cache.pool_bytes
    assert pool == 2 * (n + ahead) * 8 * 1 * 2 * 16 * 8  # fixed: keys and values, groups not expanded
    for run, tensors in zip(runs, every, strict=True):
        assert max(run.errors(tensors)) < 1e-13


def test_out_of_order() -> None:
    run = Sliced(KVCache(3), inputs(3, 4, 2, torch.float32), 3)
    run.forward(0)
    with pytest.raises(CacheError, match="slice 2 after 1 cached"):
        run.forward(2)
    for i in (1, 2):
        run.forward(i)
    with pytest.raises(CacheError, match="backward of microbatch 0 slice 1 while 3 slices"):
        run.backward(1)
    run.backward(2)
    with pytest.raises(CacheError, match="slice 0 while 2 slices"):
        run.backward(0)


def test_pool_is_fixed_and_checked() -> None:
    cache = KVCache(2)
    run = Sliced(cache, inputs(3, 4, 2, torch.float32), 3)
    run.forward(0)
    size = cache.pool_bytes
    run.forward(1)
    assert cache.pool_bytes == size == 2 * 2 * 8 * 2 * 2 * 16 * 4
    with pytest.raises(CacheError, match="microbatch 0 slice 2: all 16 rows"):
        run.forward(2)
    with pytest.raises(CacheError, match="left at the end"):
        cache.check_empty()
    cache.drop(0)
    cache.check_empty()


def test_prefix_is_mostly_one_run() -> None:
    """Two microbatches that overlap as in 1F1B: one view each, nothing concatenated."""
    cache = KVCache(6)
    kv = torch.zeros(8, 1, 2, 16)
    for i in range(4):
        cache.append(0, i, kv, kv)
    cache.append(1, 0, kv, kv)
    for i in (3, 2, 1):
        cache.release(0, i)
        cache.append(1, 4 - i, kv, kv)
    assert [run.slices for run in cache.prefix(1, 4)] == [(3, 2, 1, 0)]
    keys = cache.prefix(1, 4)[0].keys
    assert keys.shape[0] == 32 and keys.untyped_storage().nbytes() == cache.pool_bytes // 2


def test_every_iteration_attends_in_the_same_order() -> None:
    """Else sums round differently after a resumption: the cache of a new process begins like that of any iteration."""
    cache = KVCache(4)
    orders = []
    for _ in range(3):
        piece = torch.zeros(2, 1, 1, 8)
        for index in range(4):
            cache.append(0, index, piece, piece)
        orders.append([run.slices for run in cache.prefix(0, 3)])
        for index in reversed(range(4)):
            cache.release(0, index)
    assert orders == [[(0, 1, 2)]] * 3


def test_query_view_does_not_pin_the_projection() -> None:
    fused = torch.randn(8, 1, 2, 48, requires_grad=True)
    q, k, v = fused.split(16, dim=-1)
    out = slice_attention(q, k, v, SliceContext(cache=KVCache(1), kernel=CPU, microbatch=0, index=0, scale=SCALE))
    for tensor in out.grad_fn.saved_tensors:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_kernel_table(kernel: Kernel) -> None:
    half = Setting("cuda", torch.bfloat16, 128, (9, 0))
    reasons = {
        "cpu-flash": "runs on the CPU only",
        "te-fused": "Transformer Engine is not installed",
        "cuda-flash-3": "FlashAttention 3 is not installed",
    }
    assert kernel.refuses(half) == reasons.get(kernel.name) and kernel.summary


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (Setting("cpu", torch.float64, 16), "cpu-flash"),
        (Setting("cuda", torch.bfloat16, 128, (10, 0)), "te-fused"),
        (Setting("cuda", torch.bfloat16, 128, (9, 0)), "te-fused"),
        (Setting("cuda", torch.bfloat16, 128, (8, 0)), "cuda-flash"),
        (Setting("cuda", torch.float32, 128, (9, 0)), "cuda-efficient"),
        (Setting("cuda", torch.float16, 128, (7, 0)), "cuda-efficient"),
    ],
)
def test_choice_by_device(setting: Setting, name: str, gpu: dict[str, Any]) -> None:
    assert choose_kernel(setting).name == name
    assert not gpu["timed"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A device with all libraries; what their trials end with, and how long each kernel takes."""
    found: dict[str, Any] = {"failed": {}, "ms": {}, "timed": [], "added": []}
    monkeypatch.setattr(kernels, "_missing", lambda *_: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(kernel_choice, "_computes", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernel_choice, "fused_addition", lambda *given: found["added"].append(given[1:]))
    monkeypatch.setattr(kernel_choice, "_failed", lambda kernel, setting: found["failed"].get(kernel.name))

    def took_ms(kernel: Kernel, setting: Setting) -> float:
        found["timed"].append(kernel.name)
        return float(found["ms"].get(kernel.name, 9.0))

    monkeypatch.setattr(kernel_choice, "_took_ms", took_ms)
    kernel_choice._chosen.cache_clear()
    yield found
    kernel_choice._chosen.cache_clear()


def test_a_kernel_that_fails_its_trial_is_passed_over(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hopper = Setting("cuda", torch.bfloat16, 128, (9, 0))
    gpu["failed"] = {"te-fused": "is 0.4 off in a trial", "cuda-flash-3": "failed in a trial: TypeError"}
    assert choose_kernel(hopper).name == "cudnn"
    assert "attention kernel te-fused is passed over: it is 0.4 off in a trial" in caplog.text
    assert choose_kernel(hopper, ("cuda-flash-3", "cuda-flash")).name == "cuda-flash"
    with pytest.raises(ValueError, match="te-fused head dimension 100"):
        choose_kernel(Setting("cuda", torch.bfloat16, 100, (9, 0)))
    with pytest.raises(ValueError, match="te-fused is 0.4 off in a trial"):
        choose_kernel(hopper, ("te-fused",))
    assert not gpu["timed"]
    assert (torch.float32, torch.bfloat16) in gpu["added"], "it is launched before training too"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ValueError, match=r"te-fused needs compute capability 9.0.*cudnn is not deterministic"):
        choose_kernel(Setting("cuda", torch.bfloat16, 128, (8, 0)), ("te-fused", "cudnn"))


def test_other_devices_are_timed_and_say_so(gpu: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    ada = Setting("cuda", torch.bfloat16, 128, (8, 9))
    gpu["ms"] = {"cudnn": 2.0, "cuda-flash": 2.05}
    assert choose_kernel(ada).name == "cuda-flash", "within a twentieth the order counts"
    assert len(gpu["timed"]) == 4 and "cudnn 2.00 ms" in caplog.text and "--attention-backend" in caplog.text
    kernel_choice._chosen.cache_clear()
    gpu["ms"] = {"cudnn": 1.0, "cuda-flash": 2.0}
    assert choose_kernel(ada).name == "cudnn"
    assert choose_kernel(ada, ("cuda-flash-3", "cuda-flash")).name == "cuda-flash"


class _TopLeft(CpuFlash):
    """A kernel that aligns a mask wrongly."""

    def takes_prefix(self, queries: int, keys: int) -> bool:
        return True


class _Binary(CpuFlash):
    """A kernel with logarithms of base 2."""

    def forward(self, *given: Any) -> Any:
        out, lse = super().forward(*given)
        return out, lse / math.log(2)


def test_a_trial_sees_what_is_wrong() -> None:
    setting = Setting("cpu", torch.float32, 16)
    assert kernel_choice._failed(CpuFlash(), setting) is None
    assert "off in a trial" in str(kernel_choice._failed(_TopLeft(), setting))
    assert "off in a trial" in str(kernel_choice._failed(_Binary(), setting))
    assert "failed in a trial" in str(kernel_choice._failed(CudnnFlash(), setting))


def test_no_kernel_says_why() -> None:
    with pytest.raises(ValueError, match="cuda-flash has no torch.float64; cuda-efficient has no torch.float64"):
        choose_kernel(Setting("cuda", torch.float64, 64, (9, 0)))
    with pytest.raises(ValueError, match="unknown"):
        choose_kernel(Setting("cpu", torch.float32, 64), ("magic",))


def test_microbatches_of_different_size_share_a_pool() -> None:
    n = 3
    small, large = (inputs(n, 4, 2, torch.float64, batch=b) for b in (1, 2))
    cache = KVCache(2 * n, batch=2)
    runs = [Sliced(cache, tensors, n, m) for m, tensors in enumerate((small, large))]
    for i in range(n):
        for run in runs:
            run.forward(i)
    for i in reversed(range(n)):
        for run in runs:
            run.backward(i)
    assert max(max(run.errors(t)) for run, t in zip(runs, (small, large), strict=True)) < 1e-13
    cache.check_empty()
    with pytest.raises(CacheError, match="for a pool of"):
        Sliced(cache, inputs(n, 4, 2, torch.float64, batch=3), n).forward(0)


# Positions that attention applies itself equal Megatron's, with their gradients.

SLICES = 3


def rotations(interleaved: bool, dtype: torch.dtype, factor: float = 1.0) -> Rotations:
    return Rotations(SimpleNamespace(params_dtype=dtype, rotary_interleaved=interleaved), factor)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [16, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_equals_megatron(interleaved: bool, channels: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    table, grad = torch.randn(12, 1, 1, channels, dtype=torch.float64), torch.randn(5, 2, 3, 16, dtype=dtype)
    fused = torch.randn(5, 2, 3, 20, dtype=dtype, requires_grad=True)
    source = fused[..., 2:18]  # a view, as those of the fused projection are
    wanted = _apply_rotary_pos_emb_bshd(source, table[4:9], rotary_interleaved=interleaved, mscale=1.5)
    wanted.backward(grad)
    rotation = rotations(interleaved, dtype, 1.5).part(table, ((4, 9),))
    with torch.no_grad():
        found, back = rotation.turn(source), rotation.turn_back(grad)
    assert found.is_contiguous() and found.dtype == dtype
    torch.testing.assert_close(found, wanted.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(back, fused.grad[..., 2:18], rtol=tolerance, atol=tolerance)


def test_cosines_are_made_once_per_table() -> None:
    made, table = rotations(False, torch.float32), torch.randn(6, 1, 1, 8)
    first, again, other = (made.part(t, ((1, 3),)) for t in (table, table, table.clone()))
    assert first.cos.data_ptr() == again.cos.data_ptr() != other.cos.data_ptr()
    assert made.part(torch.randn(6, 2, 1, 8), ((1, 3),)) is None  # angles of each sequence


def run(tensors: list[torch.Tensor], table: torch.Tensor, inside: bool, reach: Reach) -> list[torch.Tensor]:
    """Gradients of queries, keys and values with positions applied before attention or by it."""
    made, cache, outs = rotations(False, torch.float64), KVCache(SLICES), []
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    for index in range(SLICES):
        rows = slice(8 * index, 8 * index + 8)
        query, key, value = (t[rows] for t in leaves)
        rotation = made.part(table, ((rows.start, rows.stop),))
        if not inside:
            query, key = (_apply_rotary_pos_emb_bshd(t, table[rows]) for t in (query, key))
        place: dict[str, Any] = {"cache": cache, "kernel": CPU, "microbatch": 0, "index": index, "scale": SCALE}
        outs.append(
            slice_attention(
                query, key, value, SliceContext(reach=reach, rotation=rotation if inside else None, **place)
            )
        )
    for out, grad in reversed(list(zip(outs, tensors[3].chunk(SLICES), strict=True))):
        out.backward(grad, retain_graph=True)
    cache.check_empty()
    return [torch.cat(outs).detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("reach", [Reach(), Reach(window_tokens=9, length=24)], ids=["all", "window"])
def test_attention_rotates(reach: Reach) -> None:
    tensors, table = inputs(SLICES, 4, 2, torch.float64), torch.randn(24, 1, 1, 16, dtype=torch.float64)
    for found, wanted in zip(run(tensors, table, True, reach), run(tensors, table, False, reach), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


# An MLP that runs its first half again gives the same gradients and keeps its input only.


HIDDEN, FFN, TOKENS = 16, 64, 32


class _Linear(torch.nn.Linear):
    """Answers as Megatron's do, and counts."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        self.calls += 1
        return super().forward(hidden), None


def _mlp() -> MLP:
    torch.manual_seed(0)
    mlp = MLP.__new__(MLP)
    torch.nn.Module.__init__(mlp)
    mlp.config = SimpleNamespace(  # type: ignore[assignment]
        use_te_activation_func=False,
        bias_activation_fusion=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
        fp8=None,
    )
    mlp.linear_fc1 = _Linear(HIDDEN, 2 * FFN, bias=False)
    mlp.linear_fc2 = _Linear(FFN, HIDDEN, bias=False)
    return mlp


def _model() -> SimpleNamespace:
    layer = SimpleNamespace(recompute_mlp=True, mlp=_mlp())
    return SimpleNamespace(decoder=SimpleNamespace(layers=[layer]))


def _run(mlp: MLP) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Output, gradients, and bytes that are kept in between."""
    source = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with memory_meter(Platform("cpu")) as meter:
        before = meter.live_bytes()
        output = mlp(source.sin(), padding_mask=None)[0]
        kept = meter.live_bytes() - before
        output.square().sum().backward()
    gradients = [source.grad, *(p.grad for p in mlp.parameters())]
    return output.detach(), [g for g in gradients if g is not None], kept


def test_same_gradients_fewer_bytes() -> None:
    plain_output, plain_gradients, plain_kept = _run(_mlp())
    model = _model()
    assert recompute_up_projections([model]) == 1
    layer = model.decoder.layers[0]
    assert type(layer.mlp) is RecomputingMLP
    assert not layer.recompute_mlp, "or Megatron would run the whole MLP again"
    output, gradients, kept = _run(layer.mlp)
    assert torch.equal(output, plain_output)
    assert len(gradients) == 3
    for found, expected in zip(gradients, plain_gradients, strict=True):
        assert torch.equal(found, expected)
    assert (layer.mlp.linear_fc1.calls, layer.mlp.linear_fc2.calls) == (2, 1)
    row = TOKENS * 4
    assert kept == 2 * HIDDEN * row, "the MLP's input and its output"
    assert plain_kept >= kept + 3 * FFN * row


def test_without_gradients_nothing_is_kept() -> None:
    model = _model()
    recompute_up_projections([model])
    mlp = model.decoder.layers[0].mlp
    with torch.no_grad():
        mlp(torch.randn(TOKENS, 1, HIDDEN))
    assert mlp.linear_fc1.calls == 1


@pytest.mark.parametrize("given", [{}, {"fp8": "hybrid"}, {"gradient_accumulation_fusion": True}])
def test_other_layers_stay(given: dict[str, Any]) -> None:
    """In fp8 Megatron's own recomputation enters the recipe again, which a second run in a backward has left."""
    model = _model()
    layer = model.decoder.layers[0]
    vars(layer.mlp.config).update(given)
    layer.recompute_mlp = bool(given)
    assert recompute_up_projections([model], "gradient_accumulation_fusion" in given) == 0
    assert type(model.decoder.layers[0].mlp) is MLP


def test_only_the_first_layers_of_a_chunk_run_again() -> None:
    models = [_model() for _ in range(3)]
    for i, model in enumerate(models):
        model.vp_stage = i
        model.decoder.config = SimpleNamespace(recompute_granularity="full", recompute_method="uniform")
    recompute_first_layers(reversed(models), (0, 2, 1))
    names = "recompute_granularity", "recompute_method", "recompute_num_layers"
    found = [tuple(getattr(model.decoder.config, name) for name in names) for model in models]
    assert found == [(None, "block", 0), ("full", "block", 2), ("full", "block", 1)]
