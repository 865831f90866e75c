"""Stand-ins for attention libraries that need a GPU: exact arithmetic with the same signatures.

:func:`stand_ins` are the modules that ``megatron_het.attention.kernels`` looks for.  :func:`observe` is the ``setup``
of a job (``testing.runner``) whose slices use Transformer Engine's calls.  The stand-ins check layouts
and types as the libraries do.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]
CALLS: dict[str, int] = {}  # how often every function was called


def attend(tensors: Sequence[torch.Tensor], sides: tuple[int, int], scale: float) -> Tensors:
    """Output ``[b, h, s, d]`` and log-sum-exp ``[b, h, s]``.

    Args:
        tensors: Queries ``[b, h, s, d]``, keys and values ``[b, groups, keys, d]``.
        sides: Window of keys before and after a query's own; -1 for all.  Queries have the last positions of the keys.
        scale: Factor of the scores.
    """
    q, k, v = tensors
    scores = _scores(q, k, sides, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ _repeated(v, q), lse


def attend_backward(
    tensors: Sequence[torch.Tensor], lse: torch.Tensor, sides: tuple[int, int], scale: float
) -> Tensors:
    """Gradients of q, k, v, from the whole softmax's output and log-sum-exp.

    Args:
        tensors: Gradient of the output, queries, keys, values, and the output.
        lse: ``[b, h, s]``.
        sides: As of :func:`attend`.
        scale: Factor of the scores.
    """
    grad, q, k, v, out = tensors
    shape = k.shape[1], q.shape[1] // k.shape[1]
    weights = (_scores(q, k, sides, scale) - lse.unsqueeze(-1)).exp()
    inner = weights * (grad @ _repeated(v, q).mT - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = (t.unflatten(1, shape).sum(2) for t in (inner.mT @ q, weights.mT @ grad))
    return inner @ _repeated(k, q), dk, dv


def _repeated(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def _scores(q: torch.Tensor, k: torch.Tensor, sides: tuple[int, int], scale: float) -> torch.Tensor:
    (left, right), queries, keys = sides, q.shape[2], k.shape[2]
    apart = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if right >= 0:
        hidden |= apart > right
    if left >= 0:
        hidden |= apart < -left
    return (q @ _repeated(k, q).mT * scale).masked_fill(hidden, -math.inf)


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.permute(1, 2, 0, 3) for t in tensors]


def _tokens_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.permute(2, 0, 1, 3).contiguous() for t in tensors]


class TransformerEngine(ModuleType):
    """``transformer_engine.pytorch.cpp_extensions.fused_attn`` of Transformer Engine 2.15 and later.

    Its functions have more parameters; a call with one of those is an error here, because it would be ignored.
    """

    TORCH_DType = {"kBFloat16": torch.bfloat16, "kFloat32": torch.float32, "kFloat64": torch.float64}  # noqa: RUF012
    FusedAttnBackend = {"F16_arbitrary_seqlen": 1, "No_Backend": -1}  # noqa: RUF012

    @staticmethod
    def fused_attn_fwd(
        is_training: bool,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fake_dtype: torch.dtype,
        fused_attention_backend: Any,
        *,
        attn_scale: float,
        qkv_layout: str,
        attn_mask_type: str,
        window_size: tuple[int, int] = (-1, -1),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output, and log-sum-exp ``[b, h, s, 1]`` with the state of dropout."""
        CALLS["te forward"] = CALLS.get("te forward", 0) + 1
        assert is_training and fake_dtype is q.dtype
        lengths = max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv
        _check((q, k, v), lengths, fused_attention_backend, qkv_layout, attn_mask_type, window_size)
        out, lse = attend(_heads_first(q, k, v), window_size, attn_scale)
        return _tokens_first(out)[0], [lse.unsqueeze(-1), torch.zeros(2, dtype=torch.int64)]

    @staticmethod
    def fused_attn_bwd(
        max_seqlen_q: int,
        max_seqlen_kv: int,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        d_o: torch.Tensor,
        fake_dtype: torch.dtype,
        aux_ctx_tensors: list[torch.Tensor],
        fused_attention_backend: Any,
        *,
        attn_scale: float,
        qkv_layout: str,
        attn_mask_type: str,
        dqkv_layout: str = "sbh3d",
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> list[torch.Tensor]:
        """Gradients of q, k and v."""
        CALLS["te backward"] = CALLS.get("te backward", 0) + 1
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        assert dqkv_layout == qkv_layout and fake_dtype is q.dtype
        lengths = max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv
        _check((q, k, v, o, d_o), lengths, fused_attention_backend, qkv_layout, attn_mask_type, window_size)
        lse, seed = aux_ctx_tensors
        assert lse.shape == (q.shape[1], q.shape[2], q.shape[0], 1) and lse.is_contiguous() and seed.shape == (2,)
        given = _heads_first(d_o, q, k, v, o)
        return _tokens_first(*attend_backward(given, lse.squeeze(-1), window_size, attn_scale))


class TransformerEngine214(TransformerEngine):
    """Transformer Engine's module up to release 2.14, whose backward takes a data type in place of a layout."""

    @staticmethod
    def fused_attn_bwd(  # type: ignore[override]
        *positional: Any, fake_dtype: torch.dtype, dqkv_dtype: str, qkv_layout: str, **keywords: Any
    ) -> list[torch.Tensor]:
        """Gradients of q, k and v."""
        assert TransformerEngine.TORCH_DType[dqkv_dtype] is fake_dtype and "dqkv_layout" not in keywords
        keywords |= {"fake_dtype": fake_dtype, "qkv_layout": qkv_layout, "dqkv_layout": qkv_layout}
        return TransformerEngine.fused_attn_bwd(*positional, **keywords)


def _check(
    tensors: Tensors,
    lengths: tuple[int, int, torch.Tensor, torch.Tensor],
    backend: Any,
    layout: str,
    mask: str,
    window: tuple[int, int],
) -> None:
    """Check the requirements of cuDNN's kernels for a call."""
    q, k, *_ = tensors
    queries, keys, cu_q, cu_k = lengths
    assert layout == "sbhd_sbhd_sbhd" and all(t.is_contiguous() for t in tensors) and backend == 1
    assert (queries, keys) == (q.shape[0], k.shape[0])
    for cumulative, tokens in ((cu_q, queries), (cu_k, keys)):
        assert cumulative.dtype == torch.int32
        assert cumulative.tolist() == [tokens * i for i in range(q.shape[1] + 1)]
    assert mask in ("no_mask", "causal", "causal_bottom_right")
    assert window[1] == (-1 if mask == "no_mask" else 0) and (window[0] == -1 or mask != "no_mask")
    assert mask != "causal" or queries == keys, "aligned top-left"


class FlashAttention3(ModuleType):
    """``flash_attn_interface`` of FlashAttention 3."""

    @staticmethod
    def _flash_attn_forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        CALLS["flash 3 forward"] = CALLS.get("flash 3 forward", 0) + 1
        assert causal == (window_size_right == 0)
        out, lse = attend([t.transpose(1, 2) for t in (q, k, v)], (window_size_left, window_size_right), softmax_scale)
        return out.transpose(1, 2).contiguous(), lse, None, None

    @staticmethod
    def _flash_attn_backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        *,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        softmax_scale: float,
        is_causal: bool,
        window_size_left: int,
        window_size_right: int,
        deterministic: bool = False,
    ) -> None:
        CALLS["flash 3 backward"] = CALLS.get("flash 3 backward", 0) + 1
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        assert is_causal == (window_size_right == 0) and all(t.is_contiguous() for t in (dq, dk, dv, softmax_lse))
        tensors = [t.transpose(1, 2) for t in (dout, q, k, v, out)]
        found = attend_backward(tensors, softmax_lse, (window_size_left, window_size_right), softmax_scale)
        for target, part in zip((dq, dk, dv), found, strict=True):
            target.copy_(part.transpose(1, 2))


def stand_ins() -> dict[str, ModuleType]:
    """Returns the stand-ins by the module names that the kernels import."""
    from megatron_het.attention.kernels import TransformerEngineFused

    found = ((TransformerEngineFused.module, TransformerEngine), ("flash_attn_interface", FlashAttention3))
    return {name: stand_in(name) for name, stand_in in found}


def observe(*, rank: int, out: str, **options: Any) -> None:
    """Run ``testing.probe.observe`` with slices that use Transformer Engine's calls (a ``Job.setup``).

    ``joined-<rank>`` in the folder says that a slice and those before it were one call of the forward.
    """
    from megatron_het.attention import core
    from megatron_het.attention.kernels import KERNELS, Kernel, Setting, TransformerEngineFused
    from megatron_het.features.context_exchange import exchange
    from testing import probe

    def chosen(setting: Setting, names: object = ()) -> Kernel:
        return next(kernel for kernel in KERNELS if isinstance(kernel, TransformerEngineFused))

    sys.modules.update(stand_ins())
    TransformerEngineFused.granule_tokens = 1  # slices of tests are short
    core.choose_kernel = exchange.choose_kernel = chosen
    forward = TransformerEngine.fused_attn_fwd

    def noted(*positional: Any, **keywords: Any) -> Any:
        if keywords["attn_mask_type"] == "causal_bottom_right":
            Path(out, f"joined-{rank}").touch()
        return forward(*positional, **keywords)

    TransformerEngine.fused_attn_fwd = staticmethod(noted)  # type: ignore[method-assign]
    probe.observe(rank=rank, out=out, **options)
