"""Choice of the attention kernel for a device: by a known order, a trial of correctness, and else by timing."""

import functools
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_het.attention.kernels import KERNELS, Kernel, Scores, Setting, forward_backward
from megatron_het.attention.kv_pool import fused_addition

_LOGGER = logging.getLogger(__name__)
_OF_BACKEND = {"flash": ("cuda-flash-3", "cuda-flash"), "fused": ("te-fused", "cudnn")}
_TRIAL_TOKENS, _TIMED_TOKENS, _PREFIX, _REPEATS = 128, 1024, 4, 3
_CLOSE = 3e-2
"""Largest relative error of a trial in half precision against plain operations; a wrong mask gives a larger one."""


def kernels_of_backend(backend: str, device: str) -> tuple[str, ...]:
    """The names of kernels that Megatron's ``--attention-backend`` selects; empty if any kernel may be chosen.

    Args:
        backend: ``flash``, ``fused`` (cuDNN's), ``unfused``, ``local`` or ``auto``.
        device: ``cpu`` or ``cuda``; the CPU has one kernel for all of them.
    """
    return _OF_BACKEND.get(backend, ()) if device == "cuda" else ()


def choose_kernel(setting: Setting, names: Sequence[str] = ()) -> Kernel:
    """The kernel for a setting: on CUDA the first in the device's order that gives right results in a trial.

    Compute capability 9.0 and later have cuDNN's attention first, 8.0 has FlashAttention 2; on others the fastest wins.

    Args:
        setting: Device, type and head dimension.
        names: Names of the kernels to choose from; empty for all.

    Raises:
        ValueError: The named kernels, or all kernels, cannot run here; the message says why.
    """
    known = {kernel.name: kernel for kernel in KERNELS}
    for name in names:
        if name not in known:
            raise ValueError(f"attention kernel {name!r}: unknown ({', '.join(known)})")
    return _chosen(setting, tuple(names))


@functools.lru_cache(maxsize=64)
def _chosen(setting: Setting, names: tuple[str, ...]) -> Kernel:
    """See :func:`choose_kernel`; cached, so that trials run once."""
    reasons, found = [], []
    is_real = setting.device == "cuda" and _computes()
    for kernel in ordered(setting):
        if names and kernel.name not in names:
            continue
        reason = kernel.refuses(setting)
        if reason is None and setting.device == "cuda" and not is_real and kernel.is_extension:
            reason = "is no operator of PyTorch, which a dry run needs"
        if reason is None and is_real:
            reason = _failed(kernel, setting)
            if reason is not None:  # the user may miss a faster library, or has an unknown release of one
                _LOGGER.warning("attention kernel %s is passed over: it %s", kernel.name, reason)
        if reason is None:
            found.append(kernel)
        else:
            reasons.append(f"{kernel.name} {reason}")
    if is_real:  # first launched before any transfer is under way, like the kernels in their trials
        device = torch.device("cuda", torch.cuda.current_device())
        for dtypes in ((torch.float32, setting.dtype), (setting.dtype, torch.float32)):
            fused_addition(device, *dtypes)
    if not found:
        raise ValueError(f"no attention kernel for {setting}: {'; '.join(reasons)}")
    if len(found) > 1 and is_real and not names and is_timed(setting):
        return _fastest(found, setting)
    return found[0]


def ordered(setting: Setting) -> list[Kernel]:
    """All kernels, in the order of preference on a device."""
    first = "cuda-flash" if setting.capability < (9, 0) else ""
    return sorted(KERNELS, key=lambda kernel: kernel.name != first)


def is_timed(setting: Setting) -> bool:
    """Whether the fastest kernel on a device is unknown and has to be timed."""
    return setting.device == "cuda" and setting.capability < (9, 0) and setting.capability != (8, 0)


def _computes() -> bool:
    """Whether there is a real CUDA device; False in a dry run."""
    return torch.cuda.is_available() and type(torch.empty(0, device="cuda")) is Tensor


def _failed(kernel: Kernel, setting: Setting) -> str | None:
    """Returns why a kernel cannot be used on this device, after a trial; None if it can.

    A trial also launches the kernel before any transfer is under way.
    """
    most = _TRIAL_TOKENS * (2 if kernel.takes_prefix(_TRIAL_TOKENS, 2 * _TRIAL_TOKENS) else 1)
    try:
        for causal, keys in ((True, most), (False, 2 * _TRIAL_TOKENS)):
            q, k, v, grad = _trial(setting, _TRIAL_TOKENS, keys)
            found = forward_backward(kernel, (q, k, v), grad, Scores(causal, setting.head_dim**-0.5))
            wanted = written_out(q, k, v, grad, causal, setting.head_dim**-0.5)
            for part, reference in zip(found, wanted, strict=True):
                error = (part.float() - reference).norm() / reference.norm()
                if not error < _CLOSE:
                    return f"is {error:.2g} off in a trial"
    except Exception as error:  # libraries raise many types for what they do not support
        return f"failed in a trial: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    return None


def _trial(setting: Setting, queries: int, keys: int) -> list[Tensor]:
    """Queries, keys and values of half as many heads, and a gradient, from a random generator of their own."""
    generator = torch.Generator(device=setting.device).manual_seed(0)
    shapes = [
        (tokens, 1, heads, setting.head_dim) for tokens, heads in ((queries, 4), (keys, 2), (keys, 2), (queries, 4))
    ]
    return [torch.randn(s, generator=generator, device=setting.device, dtype=setting.dtype) for s in shapes]


def written_out(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients of q, k, v, by plain operations in fp32, as a reference for kernels."""
    with torch.enable_grad():
        leaves = [t.detach().float().requires_grad_() for t in (q, k, v)]
        wide = [t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in leaves[1:]]
        scores = torch.einsum("qbhd,kbhd->bhqk", leaves[0], wide[0]) * scale
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(k.shape[0] - q.shape[0] + 1), -math.inf)
        out = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), wide[1])
        found = torch.autograd.grad(out, leaves, grad.float())
    return out.detach(), scores.detach().logsumexp(-1), *found


def _fastest(kernels: Sequence[Kernel], setting: Setting) -> Kernel:
    """The first kernel whose forward and backward of a slice take at most 5 % longer than the fastest one's."""
    took_ms = {kernel: _took_ms(kernel, setting) for kernel in kernels}
    best = next(kernel for kernel in kernels if took_ms[kernel] <= 1.05 * min(took_ms.values()))
    _LOGGER.warning(
        "attention kernel of slices: %s (%d queries over %d keys: %s); --attention-backend chooses another",
        *(best.name, _TIMED_TOKENS, _PREFIX * _TIMED_TOKENS),
        ", ".join(f"{kernel.name} {ms:.2f} ms" for kernel, ms in took_ms.items()),
    )
    return best


def _took_ms(kernel: Kernel, setting: Setting) -> float:
    """Time of a forward and a backward: the minimum of a few runs."""
    q, k, v, grad = _trial(setting, _TIMED_TOKENS, _PREFIX * _TIMED_TOKENS)
    times_ms = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        forward_backward(kernel, (q, k, v), grad, Scores(causal=False, scale=setting.head_dim**-0.5))
        end.record()
        end.synchronize()
        times_ms.append(float(start.elapsed_time(end)))
    return min(times_ms)
