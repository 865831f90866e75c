"""Compares sliced and unsliced attention by the same kernel, on one GPU.

``python -m benchmarks.gpu.slice_attention --json OUT``: forward and backward of one causal
attention layer over 32k to 256k tokens, cut into 8 to 32 slices, every kernel that runs here.
Figures: throughput relative to the unsliced kernel (for the kernel that would be chosen, at least 0.95 from 4,096
tokens per slice on, and 0.85 from 2,048 on) and peak memory.  A kernel that fails at some length is named and does not
end the others; the file is written after every length.  Runs on the CPU too, with small sizes, to see that it works.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.machine import command_line, save
from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import KERNELS, Kernel, Scores, Setting, forward_backward
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.places import SliceContext
from megatron_het.attention.slice_attention import slice_attention

_HEADS, _GROUPS, _HEAD_DIM = 8, 1, 128
_BARS = ((4096, 0.95), (2048, 0.85))  # least relative throughput from so many tokens per slice on


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _tensors(tokens: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(tokens, 1, heads, _HEAD_DIM) for heads in (_HEADS, _GROUPS, _GROUPS, _HEADS)]
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def unsliced(kernel: Kernel, tensors: list[torch.Tensor], scale: float) -> None:
    """Run one forward and one backward of the kernel over the whole sequence."""
    forward_backward(kernel, tensors[:3], tensors[3], Scores(causal=True, scale=scale))


def sliced(kernel: Kernel, tensors: list[torch.Tensor], scale: float, slices: int, cache: KVCache) -> None:
    """Run all forwards, then all backwards, last slice first."""
    q, k, v = ([p.detach().requires_grad_() for p in t.chunk(slices)] for t in tensors[:3])
    outs = [
        slice_attention(
            *(q[i], k[i], v[i]), SliceContext(cache=cache, kernel=kernel, microbatch=0, index=i, scale=scale)
        )
        for i in range(slices)
    ]
    for out, grad in zip(reversed(outs), reversed(tensors[3].chunk(slices)), strict=True):
        out.backward(grad)


def measure(work: Callable[[], None], device: torch.device, repeats: int) -> tuple[float, int | None]:
    """Returns the median seconds, and the peak bytes above the inputs (None on the CPU)."""
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
    kernel: Kernel, tokens: int, counts: list[int], device: torch.device, dtype: torch.dtype, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yields the figures of one kernel at one length, over slice counts."""
    scale, tensors = _HEAD_DIM**-0.5, _tensors(tokens, device, dtype)
    whole_s, whole_bytes = measure(lambda: unsliced(kernel, tensors, scale), device, repeats)
    for count in counts:
        cache = KVCache(count, in_line=kernel.takes_prefix(128, 256))
        work = functools.partial(sliced, kernel, tensors, scale, count, cache)
        part_s, part_bytes = measure(work, device, repeats)
        cache.check_empty()
        yield {
            "kernel": kernel.name,
            "tokens": tokens,
            "slices": count,
            "unsliced_s": whole_s,
            "sliced_s": part_s,
            "relative_throughput": whole_s / part_s,
            "unsliced_peak_bytes": whole_bytes,
            "sliced_peak_bytes": part_bytes,
            "pool_bytes": cache.pool_bytes,
        }
        print(
            f"{kernel.name:15} {tokens:7} tokens {count:3} slices: {whole_s:.4f} s unsliced, "
            f"{part_s:.4f} s sliced, throughput {whole_s / part_s:.3f}",
            flush=True,
        )


def report_of(entries: list[dict[str, Any]], kernels: list[Kernel], on_cuda: bool) -> dict[str, Any]:
    """Returns the report of the measurements so far; the first kernel is the one that would be chosen."""
    measured = [e for e in entries if e["kernel"] == kernels[0].name and "error" not in e]
    bars = [next((bar for least, bar in _BARS if e["tokens"] >= least * e["slices"]), 0.0) for e in measured]
    found = [e["relative_throughput"] for e in measured]
    return {
        "device": torch.cuda.get_device_name() if on_cuda else "CPU",
        "min_relative_throughput": min(found, default=None),
        "least_margin": min((f - bar for f, bar in zip(found, bars, strict=True) if bar), default=None),
        "failed": [e for e in entries if "error" in e],
        "cases": [e for e in entries if "error" not in e],
    }


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.gpu.slice_attention", __doc__)
    on_cuda = torch.cuda.is_available()
    defaults = [1 << e for e in (range(15, 19) if on_cuda else range(10, 12))]
    parser.add_argument("--tokens", type=int, nargs="+", default=defaults, help="lengths (default: %(default)s)")
    parser.add_argument("--slices", type=int, nargs="+", default=[8, 16, 32], help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="the median counts (default: %(default)s)")
    options = parser.parse_args()
    device = torch.device("cuda" if on_cuda else "cpu")
    dtype = torch.bfloat16 if on_cuda else torch.float32
    setting = Setting.of(torch.empty(1, 1, 1, _HEAD_DIM, device=device, dtype=dtype))
    chosen = choose_kernel(setting)
    kernels = [chosen, *(k for k in KERNELS if k is not chosen and k.refuses(setting) is None)]
    entries: list[dict[str, Any]] = []
    for kernel in kernels:
        for tokens in options.tokens:
            try:
                entries += cases(kernel, tokens, options.slices, device, dtype, options.repeats)
            except (RuntimeError, AttributeError) as error:  # out of memory, or a kernel that this torch does not have
                entries.append({"kernel": kernel.name, "tokens": tokens, "error": str(error)})
                print(f"{kernel.name:15} {tokens:7} tokens: {error}", flush=True)
            report = report_of(entries, kernels, on_cuda)
            save(options.json, report)
    return int(any(e["kernel"] == kernels[0].name for e in report["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
