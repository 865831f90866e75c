"""CUDA graphs per slice: ``python -m benchmarks.gpu.graphs --json OUT``.

The attention of every slice of a sequence is captured as a graph of its own, because slices differ in the keys that
they attend to, and replayed on other values.  Figures: largest difference of outputs and of gradients from the same
work without graphs, and time of a replayed sequence relative to it (below 1: graphs are faster).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.machine import command_line
from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import Scores, Setting, forward_backward
from megatron_het.safe_io import check_target, write_json

_TOKENS, _SLICES, _HEADS, _GROUPS, _HEAD_DIM = 4096, 8, 8, 2, 128
_REPEATS = 9


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 3 without a CUDA device."""
    parser = command_line("benchmarks.gpu.graphs", __doc__)
    options = parser.parse_args(arguments)
    check_target(options.json)
    if not torch.cuda.is_available():
        parser.exit(3, "benchmarks.gpu.graphs needs a CUDA device, and there is none here\n")
    write_json(options.json, measure())
    return 0


def measure() -> dict[str, Any]:
    """Capture, replay and compare."""
    setting = Setting.of(torch.empty(1, 1, 1, _HEAD_DIM, device="cuda", dtype=torch.bfloat16))
    kernel = choose_kernel(setting)
    inputs = [
        torch.randn(_TOKENS, 1, heads, _HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (_HEADS, _GROUPS, _GROUPS, _HEADS)
    ]
    scale, length = _HEAD_DIM**-0.5, _TOKENS // _SLICES

    def pass_of(index: int) -> tuple[torch.Tensor, ...]:
        q, k, v, gradient = inputs
        own, before = slice(index * length, (index + 1) * length), slice(0, (index + 1) * length)
        causal = not index or kernel.takes_prefix(length, before.stop)
        out, _, *gradients = forward_backward(
            kernel, (q[own], k[before], v[before]), gradient[own], Scores(causal, scale)
        )
        return out, *gradients

    for index in range(_SLICES):
        pass_of(index)  # kernels choose and compile before they can be captured
    torch.cuda.synchronize()
    graphs, results = [], []
    for index in range(_SLICES):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(pass_of(index))
        graphs.append(graph)
    for tensor in inputs:
        tensor.normal_()

    def replay() -> None:
        for graph in graphs:
            graph.replay()

    replay_s = _seconds(replay)
    eager_s = _seconds(lambda: [pass_of(index) for index in range(_SLICES)])
    worst = [0.0, 0.0]  # of the output, and of gradients, which kernels add up in an order that changes
    for index, replayed in enumerate(results):
        for place, (a, b) in enumerate(zip(replayed, pass_of(index), strict=True)):
            found = ((a - b).float().abs().max() / b.float().abs().max().clamp_min(1e-6)).item()
            worst[place > 0] = max(worst[place > 0], found)
    return {
        "device": torch.cuda.get_device_name(),
        "kernel": kernel.name,
        "difference": worst[0],
        "gradient_difference": worst[1],
        "relative_time": replay_s / eager_s,
        "replay_s": replay_s,
        "eager_s": eager_s,
    }


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(main())
