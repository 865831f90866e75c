"""Attention kernels with an explicit backward: output and log-sum-exp out, gradients back.

All tensors are ``[s, b, heads, d]`` views, as Megatron's attention passes them; log-sum-exp is
``[b, heads, s]`` with natural logarithms in at least fp32.  A causal call is always square (the
slice's own keys), so kernels that align the mask top-left and bottom-right agree.

The backward of a kernel takes the output and the log-sum-exp of the *whole* softmax: with those of
the merged result it gives this part's exact contribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

aten = torch.ops.aten
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides whether a kernel can be used.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtype: Of queries, keys and values.
        head_dim: Channels per head.
        capability: CUDA compute capability, (0, 0) on the CPU.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, query: torch.Tensor) -> Setting:
        """The setting of a query ``[s, b, heads, d]``."""
        return cls.on(query.device, query.dtype, query.shape[-1])

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> Setting:
        """The setting on a device, for queries of ``head_dim`` channels per head."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        return cls(device.type, dtype, head_dim, capability)


class Kernel(Protocol):
    """One attention kernel.

    Attributes:
        name: For messages and benchmarks.
        summary: What it supports, for the table in the documentation.
    """

    name: str
    summary: str

    def refuses(self, setting: Setting) -> str | None:
        """Why it cannot run in a setting, None if it can."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[s, b, heads, d]`` and log-sum-exp ``[b, heads, s]``."""

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Gradients of q, k, v from the merged output and log-sum-exp."""


def _swap(tensor: torch.Tensor) -> torch.Tensor:
    """``[s, b, h, d]`` to ``[b, s, h, d]`` and back."""
    return tensor.transpose(0, 1)


class CpuFlash:
    """Flash attention of PyTorch on the CPU."""

    name = "cpu-flash"
    summary = "CPU; fp64, fp32, bf16, fp16; grouped queries native"

    def refuses(self, setting: Setting) -> str | None:
        """See :class:`Kernel`."""
        return None if setting.device == "cpu" else "runs on the CPU only"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), 0.0, causal, scale=scale
        )
        return out.permute(2, 0, 1, 3), lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *(t.permute(1, 2, 0, 3) for t in (grad, q, k, v, out)), lse, 0.0, causal, scale=scale
        )
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


class CudaFlash:
    """FlashAttention 2 of PyTorch."""

    name = "cuda-flash"
    summary = "CUDA sm80+; bf16, fp16; head dim <= 256, a multiple of 8; grouped queries native"

    def refuses(self, setting: Setting) -> str | None:
        """See :class:`Kernel`."""
        if setting.device != "cuda":
            return "runs on CUDA only"
        if setting.dtype not in (torch.bfloat16, torch.float16):
            return f"has no {setting.dtype}"
        if setting.capability < (8, 0):
            return f"needs compute capability 8.0, this device has {setting.capability}"
        if setting.head_dim > 256 or setting.head_dim % 8:
            return f"head dimension {setting.head_dim} is not a multiple of 8 up to 256"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        out, lse, *_ = aten._flash_attention_forward.default(
            _swap(q), _swap(k), _swap(v), None, None, q.shape[0], k.shape[0], 0.0, causal, False, scale=scale
        )
        return _swap(out), lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's; unused
        offset = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = aten._flash_attention_backward.default(
            _swap(grad).contiguous(),
            _swap(q),
            _swap(k),
            _swap(v),
            _swap(out).contiguous(),
            lse,
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            causal,
            seed,
            offset,
            scale=scale,
        )
        return _swap(dq), _swap(dk), _swap(dv)


class CudaEfficient:
    """Memory-efficient attention of PyTorch: for fp32 and for devices before sm80."""

    name = "cuda-efficient"
    summary = "CUDA; fp32, fp16, bf16 (sm80+); grouped queries by repeating keys and values"

    def refuses(self, setting: Setting) -> str | None:
        """See :class:`Kernel`."""
        if setting.device != "cuda":
            return "runs on CUDA only"
        if setting.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"has no {setting.dtype}"
        if setting.dtype == torch.bfloat16 and setting.capability < (8, 0):
            return f"needs compute capability 8.0 for bf16, this device has {setting.capability}"
        if setting.head_dim % 8:
            return f"head dimension {setting.head_dim} is not a multiple of 8"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        k, v = (_repeat(t, q.shape[2]) for t in (k, v))
        out, lse, *_ = aten._efficient_attention_forward.default(
            _swap(q), _swap(k), _swap(v), None, None, None, None, None, 0.0, int(causal), True, scale=scale
        )
        return _swap(out), lse[..., : q.shape[0]]  # the kernel pads to a multiple of 32

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        groups = k.shape[2]
        padded = torch.nn.functional.pad(lse, (0, -q.shape[0] % 32), value=math.inf).contiguous()
        unused = torch.zeros((), dtype=torch.long)
        dq, dk, dv, _ = aten._efficient_attention_backward.default(
            _swap(grad).contiguous(),
            _swap(q),
            _swap(_repeat(k, q.shape[2])),
            _swap(_repeat(v, q.shape[2])),
            None,
            _swap(out).contiguous(),
            None,
            None,
            q.shape[0],
            k.shape[0],
            padded,
            0.0,
            unused,
            unused,
            int(causal),
            False,
            scale=scale,
        )
        return _swap(dq), _fold(_swap(dk), groups), _fold(_swap(dv), groups)


class CudnnFlash:
    """cuDNN's fused attention by way of PyTorch."""

    name = "cudnn"
    summary = "CUDA sm80+ with cuDNN; bf16, fp16; head dim <= 128, a multiple of 8; with --attention-backend fused"

    def refuses(self, setting: Setting) -> str | None:
        """See :class:`Kernel`."""
        if setting.device != "cuda" or not torch.backends.cudnn.is_available():
            return "needs CUDA with cuDNN"
        if setting.dtype not in (torch.bfloat16, torch.float16):
            return f"has no {setting.dtype}"
        if setting.capability < (8, 0):
            return f"needs compute capability 8.0, this device has {setting.capability}"
        if setting.head_dim > 128 or setting.head_dim % 8:
            return f"head dimension {setting.head_dim} is not a multiple of 8 up to 128"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        q, k, v = q.permute(1, 2, 0, 3), *(_repeat(t, q.shape[2]).permute(1, 2, 0, 3) for t in (k, v))
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out.permute(2, 0, 1, 3), lse.reshape(q.shape[:3])

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        groups, queries, keys = k.shape[2], q.shape[0], k.shape[0]
        grad, q, k, v, out = (
            t.permute(1, 2, 0, 3) for t in (grad, q, _repeat(k, q.shape[2]), _repeat(v, q.shape[2]), out)
        )
        seed, offset = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
            grad,
            q,
            k,
            v,
            out,
            lse.unsqueeze(-1),
            seed,
            offset,
            None,
            None,
            None,
            queries,
            keys,
            0.0,
            causal,
            scale=scale,
        )
        dq, dk, dv = (t.permute(2, 0, 1, 3) for t in (dq, dk, dv))
        return dq, _fold(dk, groups), _fold(dv, groups)


def _repeat(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values once per query head."""
    times = heads // tensor.shape[2]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=2)


def _fold(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """The transpose of ``_repeat``."""
    if gradient.shape[2] == groups:
        return gradient
    return gradient.unflatten(2, (groups, gradient.shape[2] // groups)).sum(dim=3)


_OF_BACKEND = {"flash": "cuda-flash", "fused": "cudnn"}


def kernel_of_backend(backend: str, device: str) -> str | None:
    """The kernel that Megatron's ``--attention-backend`` names, None to leave the choice.

    Args:
        backend: ``flash``, ``fused`` (cuDNN's), ``unfused``, ``local`` or ``auto``.
        device: ``cpu`` or ``cuda``; the CPU has one kernel for all of them.
    """
    return _OF_BACKEND.get(backend) if device == "cuda" else None


KERNELS: tuple[Kernel, ...] = (CpuFlash(), CudaFlash(), CudaEfficient(), CudnnFlash())
"""All kernels; the first three are the order of preference of ``choose_kernel``."""
_AUTOMATIC = KERNELS[:3]


def choose_kernel(setting: Setting, name: str | None = None) -> Kernel:
    """The kernel for a setting.

    Args:
        setting: Device, type and head dimension.
        name: A kernel's name, or None for the first that can run.

    Raises:
        ValueError: The named kernel, or every kernel, cannot run here; the message says why.
    """
    candidates = _AUTOMATIC if name is None else [k for k in KERNELS if k.name == name]
    if not candidates:
        raise ValueError(f"attention kernel {name!r}: unknown ({', '.join(k.name for k in KERNELS)})")
    reasons = []
    for kernel in candidates:
        reason = kernel.refuses(setting)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name} {reason}")
    raise ValueError(f"no attention kernel for {setting}: {'; '.join(reasons)}")
