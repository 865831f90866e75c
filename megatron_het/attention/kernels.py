"""Attention kernels with an explicit backward: output and log-sum-exp out, gradients back.

All tensors are ``[s, b, heads, d]`` views, as Megatron's attention passes them; log-sum-exp is
``[b, heads, s]`` with natural logarithms in at least fp32.  In a causal call queries are the last of the keys' tokens:
the mask is aligned bottom-right.  Kernels that cannot do that get squares, for which both alignments are equal.

The backward of a kernel takes the output and the log-sum-exp of the *whole* softmax, which are those of
the merged result.  So it computes the exact contribution of the call's keys.
"""

import abc
import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]
Output = tuple[Tensor, Tensor]  # output and log-sum-exp
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries, keys and values of a call, merged output and merged log-sum-exp."""
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Setting:
    """Properties of the device and the tensors that decide whether a kernel can be used."""

    device: str  # ``cpu`` or ``cuda``
    dtype: torch.dtype  # of queries, keys and values
    head_dim: int  # channels per head
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability, (0, 0) on the CPU

    @classmethod
    def of(cls, query: Tensor) -> "Setting":
        """The setting of a query ``[s, b, heads, d]``."""
        return cls.on(query.device, query.dtype, query.shape[-1])

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> "Setting":
        """The setting on a device, for queries of ``head_dim`` channels per head."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        return cls(device.type, dtype, head_dim, capability)


class Scores(NamedTuple):
    """Mask and scale of the scores of a call."""

    causal: bool  # whether a query sees the keys up to its own only; queries are the last tokens of the keys
    scale: float
    window: int | None = None  # how many keys before its own a query of a causal call sees at most; None for all


class Kernel(abc.ABC):
    """One attention kernel."""

    name: ClassVar[str]  # for messages and benchmarks
    summary: ClassVar[str]  # what it supports, for the table in the documentation
    takes_window: ClassVar[bool] = False  # whether causal calls may have a window
    # Whether one causal backward over more keys than queries is slower than two: of the square and of the keys before.
    splits_backward: ClassVar[bool] = False
    is_extension: ClassVar[bool] = False  # whether it is no PyTorch operator, so that fake tensors cannot be passed

    @abc.abstractmethod
    def refuses(self, setting: Setting) -> str | None:
        """Returns why the kernel cannot run in a setting; None if it can."""

    def takes_prefix(self, queries: int, keys: int) -> bool:
        """Whether a causal call may have ``keys`` > ``queries``; a square is always possible."""
        return False

    @abc.abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Scores) -> Output:
        """Output ``[s, b, heads, d]`` and log-sum-exp ``[b, heads, s]``.

        Args:
            q: ``[s, b, heads, d]``.
            k: ``[keys, b, groups, d]``; ``groups`` divides ``heads``.
        """

    @abc.abstractmethod
    def backward(self, grad: Tensor, saved: Saved, call: Scores) -> Gradients:
        """Gradients of q, k, v from those of the merged output."""


def forward_backward(kernel: Kernel, qkv: Sequence[Tensor], grad: Tensor, call: Scores) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients of q, k and v, if one call has all keys."""
    q, k, v = qkv
    out, lse = kernel.forward(q, k, v, call)
    return out, lse, *kernel.backward(grad, (q, k, v, out, lse), call)


class CpuFlash(Kernel):
    """Flash attention of PyTorch on the CPU."""

    name = "cpu-flash"
    summary = "CPU; fp64, fp32, bf16, fp16; grouped queries native"

    def refuses(self, setting: Setting) -> str | None:
        return None if setting.device == "cpu" else "runs on the CPU only"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Scores) -> Output:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), 0.0, call.causal, scale=call.scale
        )
        return out.permute(2, 0, 1, 3), lse

    def backward(self, grad: Tensor, saved: Saved, call: Scores) -> Gradients:
        q, k, v, out, lse = saved
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *(t.permute(1, 2, 0, 3) for t in (grad, q, k, v, out)), lse, 0.0, call.causal, scale=call.scale
        )
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


class CudaFlash(Kernel):
    """FlashAttention 2 of PyTorch."""

    name = "cuda-flash"
    summary = "CUDA sm80+; bf16, fp16; head dim <= 256, a multiple of 8; grouped queries native; one call per slice"
    takes_window = True

    def refuses(self, setting: Setting) -> str | None:
        return _refused(setting, (8, 0), 256)

    def takes_prefix(self, queries: int, keys: int) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Scores) -> Output:
        out, lse, *_ = aten._flash_attention_forward.default(
            *(_swap(q), _swap(k), _swap(v), None, None, q.shape[0], k.shape[0], 0.0, call.causal, False),
            scale=call.scale,
            **_flash_window(call.window),
        )
        return _swap(out), lse

    def backward(self, grad: Tensor, saved: Saved, call: Scores) -> Gradients:
        q, k, v, out, lse = saved
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's state; unused
        offset = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = aten._flash_attention_backward.default(
            *(_swap(grad).contiguous(), _swap(q), _swap(k), _swap(v), _swap(out).contiguous(), lse, None, None),
            *(q.shape[0], k.shape[0], 0.0, call.causal, seed, offset),
            scale=call.scale,
            **_flash_window(call.window),
        )
        return _swap(dq), _swap(dk), _swap(dv)


class CudaFlash3(Kernel):
    """FlashAttention 3, from its own package."""

    name = "cuda-flash-3"
    summary = "CUDA sm90 with the package flash_attn_3; as cuda-flash"
    takes_window = True
    is_extension = True

    def refuses(self, setting: Setting) -> str | None:
        refused = _refused(setting, (9, 0), 256)
        if refused is None and setting.capability[0] != 9:
            return f"is for compute capability 9.0, this device has {setting.capability}"
        return refused or _missing("flash_attn_interface", "FlashAttention 3")

    def takes_prefix(self, queries: int, keys: int) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Scores) -> Output:
        out, lse, *_ = importlib.import_module("flash_attn_interface")._flash_attn_forward(
            *(_swap(q), _swap(k), _swap(v)), softmax_scale=call.scale, causal=call.causal, **self._window(call)
        )
        return _swap(out), lse

    def backward(self, grad: Tensor, saved: Saved, call: Scores) -> Gradients:
        q, k, v, out, lse = saved
        tensors = [_swap(t) for t in (grad, q, k, v, out)]
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors[1:4])
        importlib.import_module("flash_attn_interface")._flash_attn_backward(
            *(*tensors, lse.contiguous()),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=call.scale,
            is_causal=call.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._window(call),
        )
        return _swap(dq), _swap(dk), _swap(dv)

    @staticmethod
    def _window(call: Scores) -> dict[str, int]:
        left, right = _both_sides(call)
        return {"window_size_left": left, "window_size_right": right}


class CudaEfficient(Kernel):
    """Memory-efficient attention of PyTorch: for fp32 and for devices before sm80."""

    name = "cuda-efficient"
    summary = "CUDA; fp32, fp16, bf16 (sm80+); grouped queries by repeating keys and values; one call per slice"

    def refuses(self, setting: Setting) -> str | None:
        if setting.device != "cuda":
            return "runs on CUDA only"
        if setting.dtype not in (torch.float32, *_HALF):
            return f"has no {setting.dtype}"
        if setting.dtype == torch.bfloat16 and setting.capability < (8, 0):
            return f"needs compute capability 8.0 for bf16, this device has {setting.capability}"
        if setting.head_dim % 8:
            return f"head dimension {setting.head_dim} is not a multiple of 8"
        return None

    def takes_prefix(self, queries: int, keys: int) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Scores) -> Output:
        k, v = (_repeat(t, q.shape[2]) for t in (k, v))
        out, lse, *_ = aten._efficient_attention_forward.default(
            *(_swap(q), _swap(k), _swap(v), None, None, None, None, None, 0.0, self._mask(call.causal, q, k), True),
            scale=call.scale,
        )
        return _swap(out), lse[..., : q.shape[0]]  # the kernel pads to a multiple of 32

    def backward(self, grad: Tensor, saved: Saved, call: Scores) -> Gradients:
        q, k, v, out, lse = saved
        groups = k.shape[2]
        padded = torch.nn.functional.pad(lse, (0, -q.shape[0] % 32), value=math.inf).contiguous()
        unused = torch.zeros((), dtype=torch.long)
        k, v = _repeat(k, q.shape[2]), _repeat(v, q.shape[2])
        dq, dk, dv, _ = aten._efficient_attention_backward.default(
            *(_swap(grad).contiguous(), _swap(q), _swap(k), _swap(v), None, _swap(out).contiguous(), None, None),
            *(q.shape[0], k.shape[0], padded, 0.0, unused, unused, self._mask(call.causal, q, k), False),
            scale=call.scale,
        )
        return _swap(dq), _fold(_swap(dk), groups), _fold(_swap(dv), groups)

    @staticmethod
    def _mask(causal: bool, q: Tensor, k: Tensor) -> int:
        """PyTorch's number of a mask: none, causal for a square, causal aligned bottom-right."""
        return 0 if not causal else 1 if q.shape[0] == k.shape[0] else 2


class CudnnFlash(Kernel):
    """cuDNN's fused attention through PyTorch, which aligns the mask top-left."""

    name = "cudnn"
    summary = "CUDA sm80+ with cuDNN; bf16, fp16; head dim <= 128, a multiple of 8; grouped queries native"

    def refuses(self, setting: Setting) -> str | None:
        if setting.device != "cuda" or not torch.backends.cudnn.is_available():
            return "needs CUDA with cuDNN"
        if torch.are_deterministic_algorithms_enabled():  # PyTorch's own attention does not use it then, either
            return "is not deterministic"
        return _refused(setting, (8, 0), 128)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Scores) -> Output:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=call.causal, scale=call.scale
        )
        return out.permute(2, 0, 1, 3), lse.reshape(q.shape[:3])

    def backward(self, grad: Tensor, saved: Saved, call: Scores) -> Gradients:
        q, k, v, out, lse = saved
        queries, keys = q.shape[0], k.shape[0]
        seed, offset = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
            *(t.permute(1, 2, 0, 3) for t in (grad, q, k, v, out)),
            *(lse.unsqueeze(-1), seed, offset, None, None, None, queries, keys, 0.0, call.causal),
            scale=call.scale,
        )
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


class TransformerEngineFused(Kernel):
    """cuDNN's fused attention through Transformer Engine 2, with a mask aligned bottom-right."""

    name = "te-fused"
    summary = (
        "CUDA sm80+ with Transformer Engine; bf16, fp16; head dim <= 256, a multiple of 8; grouped queries native; "
        "one call per slice of a multiple of 64 tokens"
    )
    takes_window = True
    splits_backward = True  # one call is 11 to 20 % slower for 4,096 queries on an H200
    is_extension = True
    module: ClassVar[str] = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    """The module with ``fused_attn_fwd`` and ``fused_attn_bwd``."""
    granule_tokens: ClassVar[int] = 64  # cuDNN's masks aligned bottom-right need multiples of it

    def refuses(self, setting: Setting) -> str | None:
        least = (9, 0) if torch.are_deterministic_algorithms_enabled() else (8, 0)
        return _refused(setting, least, 256) or _missing("transformer_engine", "Transformer Engine")

    def takes_prefix(self, queries: int, keys: int) -> bool:
        return queries % self.granule_tokens == keys % self.granule_tokens == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Scores) -> Output:
        library = importlib.import_module(self.module)
        q, k, v = (t.contiguous() for t in (q, k, v))
        out, auxiliary, *_ = library.fused_attn_fwd(True, **self._call(library, (q, k, v), call))
        return out, auxiliary[0].squeeze(-1)

    def backward(self, grad: Tensor, saved: Saved, call: Scores) -> Gradients:
        q, k, v, out, lse = saved
        library = importlib.import_module(self.module)
        q, k, v, out, grad = (t.contiguous() for t in (q, k, v, out, grad))
        given = self._call(library, (q, k, v), call)
        if "dqkv_dtype" in _parameters(library.fused_attn_bwd):  # up to release 2.14
            given["dqkv_dtype"] = next(own for own, dtype in library.TORCH_DType.items() if dtype is q.dtype)
        else:
            given["dqkv_layout"] = given["qkv_layout"]
        dq, dk, dv, *_ = library.fused_attn_bwd(
            o=out,
            d_o=grad,
            aux_ctx_tensors=[lse.contiguous().unsqueeze(-1), _unused_seed(q.device)],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **given,
        )
        return dq, dk, dv

    @staticmethod
    def _call(library: Any, qkv: Sequence[Tensor], call: Scores) -> dict[str, Any]:
        """Arguments of both directions, by keyword, because their positions differ between releases."""
        q, k, v = qkv
        (queries, batch), keys = q.shape[:2], k.shape[0]
        square = "causal" if queries == keys else "causal_bottom_right"
        return {
            "max_seqlen_q": queries,
            "max_seqlen_kv": keys,
            "cu_seqlens_q": _cumulative(batch, queries, q.device),
            "cu_seqlens_kv": _cumulative(batch, keys, q.device),
            "q": q,
            "k": k,
            "v": v,
            "fake_dtype": q.dtype,
            "fused_attention_backend": library.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": call.scale,
            "qkv_layout": "sbhd_sbhd_sbhd",
            "attn_mask_type": square if call.causal else "no_mask",
            "window_size": _both_sides(call),
        }


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@functools.lru_cache(maxsize=256)
def _cumulative(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Cumulative lengths of a batch's sequences: their first tokens, and the end of the last one."""
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=16)
def _unused_seed(device: torch.device) -> Tensor:
    """A placeholder for dropout's random state, which is not used."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _refused(setting: Setting, capability: tuple[int, int], widest: int) -> str | None:
    """Returns why a half-precision kernel cannot run in a setting; None if it can."""
    if setting.device != "cuda":
        return "runs on CUDA only"
    if setting.dtype not in _HALF:
        return f"has no {setting.dtype}"
    if setting.capability < capability:
        return f"needs compute capability {'.'.join(map(str, capability))}, this device has {setting.capability}"
    if setting.head_dim > widest or setting.head_dim % 8:
        return f"head dimension {setting.head_dim} is not a multiple of 8 up to {widest}"
    return None


def _missing(module: str, title: str) -> str | None:
    return None if importlib.util.find_spec(module) is not None else f"{title} is not installed"


def _both_sides(call: Scores) -> tuple[int, int]:
    """Number of keys before and after its own that a query sees; -1 for all."""
    return -1 if call.window is None else call.window, 0 if call.causal else -1


def _flash_window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window, "window_size_right": 0}


def _swap(tensor: Tensor) -> Tensor:
    """``[s, b, h, d]`` to ``[b, s, h, d]`` and back."""
    return tensor.transpose(0, 1)


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values repeated for every query head."""
    times = heads // tensor.shape[2]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=2)


def _fold(gradient: Tensor, groups: int) -> Tensor:
    """Gradient of ``_repeat``: sums over the query heads of a group."""
    if gradient.shape[2] == groups:
        return gradient
    return gradient.unflatten(2, (groups, gradient.shape[2] // groups)).sum(dim=3)


KERNELS: tuple[Kernel, ...] = (
    CpuFlash(),
    TransformerEngineFused(),
    CudaFlash3(),
    CudnnFlash(),
    CudaFlash(),
    CudaEfficient(),
)
"""All kernels, in the order of preference on compute capability 9.0 and later."""
