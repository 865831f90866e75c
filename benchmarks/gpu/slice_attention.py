"""Slice attention against unsliced attention by the same kernel, on one GPU.

``python -m benchmarks.gpu.slice_attention --json OUT``: forward and backward of one causal
attention layer over 32k to 256k tokens, cut into 8 to 32 slices, every kernel that runs here.
Figures: throughput relative to the unsliced kernel (at least 0.9 wanted) and peak memory.
Runs on the CPU too, with small sizes, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_het.attention.kernels import KERNELS, Kernel, Setting
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.slice_attention import slice_attention

_HEADS, _GROUPS, _HEAD_DIM = 8, 1, 128


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _tensors(tokens: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(tokens, 1, heads, _HEAD_DIM) for heads in (_HEADS, _GROUPS, _GROUPS, _HEADS)]
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def unsliced(kernel: Kernel, tensors: list[torch.Tensor], scale: float) -> None:
    """One forward and one backward of the kernel over the whole sequence."""
    q, k, v, grad = tensors
    out, lse = kernel.forward(q, k, v, True, scale)
    kernel.backward(grad, q, k, v, out, lse, True, scale)


def sliced(kernel: Kernel, tensors: list[torch.Tensor], scale: float, slices: int, cache: KVCache) -> None:
    """All forwards, then all backwards, last slice first."""
    q, k, v = ([p.detach().requires_grad_() for p in t.chunk(slices)] for t in tensors[:3])
    outs = [
        slice_attention(q[i], k[i], v[i], cache=cache, kernel=kernel, microbatch=0, index=i, scale=scale)
        for i in range(slices)
    ]
    for out, grad in zip(reversed(outs), reversed(tensors[3].chunk(slices)), strict=True):
        out.backward(grad)


def measure(work: Callable[[], None], device: torch.device, repeats: int) -> tuple[float, int | None]:
    """Median seconds, and peak bytes above the inputs (None on the CPU)."""
    work()
    _synchronize(device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start_s)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else None
    return sorted(times)[len(times) // 2], peak


def cases(
    kernel: Kernel, lengths: list[int], counts: list[int], device: torch.device, dtype: torch.dtype,
    repeats: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Figures of one kernel over lengths and slice counts."""
    scale, found = _HEAD_DIM**-0.5, []
    for tokens in lengths:
        tensors = _tensors(tokens, device, dtype)
        whole_s, whole_bytes = measure(lambda t=tensors: unsliced(kernel, t, scale), device, repeats)
        for count in counts:
            cache = KVCache(count)
            part_s, part_bytes = measure(
                lambda t=tensors, n=count, c=cache: sliced(kernel, t, scale, n, c), device, repeats
            )
            cache.check_empty()
            found.append(
                {
                    "kernel": kernel.name, "tokens": tokens, "slices": count,
                    "unsliced_s": whole_s, "sliced_s": part_s,
                    "relative_throughput": whole_s / part_s,
                    "unsliced_peak_bytes": whole_bytes, "sliced_peak_bytes": part_bytes,
                    "pool_bytes": cache.pool_bytes,
                }
            )  # fmt: skip
            print(
                f"{kernel.name:15} {tokens:7} tokens {count:3} slices: {whole_s:.4f} s unsliced, "
                f"{part_s:.4f} s sliced, throughput {whole_s / part_s:.3f}",
                flush=True,
            )
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.slice_attention", description=__doc__)
    on_cuda = torch.cuda.is_available()
    defaults = [1 << e for e in (range(15, 19) if on_cuda else range(10, 12))]
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=defaults)
    parser.add_argument("--slices", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if on_cuda else "cpu")
    dtype = torch.bfloat16 if on_cuda else torch.float32
    setting = Setting.of(torch.empty(1, 1, 1, _HEAD_DIM, device=device, dtype=dtype))
    entries: list[dict[str, Any]] = []
    for kernel in KERNELS:
        if kernel.refuses(setting) is None:
            entries += cases(kernel, options.tokens, options.slices, device, dtype, options.repeats)
    first = [e for e in entries if e["kernel"] == entries[0]["kernel"]]
    report = {
        "device": torch.cuda.get_device_name() if on_cuda else "CPU",
        "min_relative_throughput": min(e["relative_throughput"] for e in first),
        "bar": 0.9,
        "cases": entries,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
