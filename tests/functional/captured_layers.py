"""CUDA graphs on a machine without CUDA: a setup with a stand-in for Transformer Engine's ``make_graphed_callables``.

Outputs of a graph lie in memory that another graph overwrites once the backward of theirs has run, and graphs must run
in the order in which they were captured.  The stand-in fills such memory with what is no number, and counts.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_het.features.zero_bubble.runtime import SplitForward, WeightGradients
from testing import probe

_MODULES = ("transformer_engine", "transformer_engine.pytorch")


@dataclass
class Capture:
    """Holds the order of a capture, and where its replays are in it."""

    order: Sequence[tuple[str, int]]
    out: Path
    replays: int = 0
    stale: list[torch.Tensor] = field(default_factory=list)
    read_next: list[torch.Tensor] = field(default_factory=list)

    def replay(self, what: str, graph: int) -> None:
        """A graph runs: memory of those that are done is written to."""
        expected = self.order[self.replays % len(self.order)]
        if expected != (what, graph):
            raise AssertionError(f"{what} of graph {graph} runs where {expected[0]} of {expected[1]} was captured")
        self.replays += 1
        self.out.write_text(str(self.replays))
        for tensor in self.stale:
            tensor.fill_(float("nan"))
        self.stale, self.read_next = self.read_next, []


@contextlib.contextmanager
def _outside_of_passes(layer: torch.nn.Module) -> Iterator[None]:
    """As at a capture: no half of a backward is put off."""
    forwards = (vars(module).get("_forward_impl") for module in layer.modules())
    gradients = next((f.gradients for f in forwards if isinstance(f, SplitForward)), WeightGradients())
    before = gradients.splits, gradients._open
    gradients.splits, gradients._open = False, None
    try:
        yield
    finally:
        gradients.splits, gradients._open = before


class _Graph(torch.autograd.Function):
    """A layer, whose outputs and gradients are in the memory of the graphs."""

    @staticmethod
    def forward(ctx: Any, capture: Capture, number: int, layer: Any, named: dict[str, Any], *given: Any) -> Any:
        capture.replay("forward", number)
        hidden, *weights = given
        inputs = hidden.detach().clone().requires_grad_()
        with torch.enable_grad(), _outside_of_passes(layer):
            outputs = layer._te_cuda_graph_capture(inputs, **named)
        ctx.capture, ctx.number, ctx.layer = capture, number, layer
        ctx.inputs, ctx.weights, ctx.outputs = inputs, weights, outputs
        ctx.shown = tuple(output.detach().clone() for output in outputs)
        return tuple(shown.detach() for shown in ctx.shown)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.capture.replay("backward", ctx.number)
        with _outside_of_passes(ctx.layer):
            found = torch.autograd.grad(ctx.outputs, [ctx.inputs, *ctx.weights], grads, allow_unused=True)
        ctx.capture.stale += ctx.shown
        ctx.capture.read_next.append(found[0])
        return None, None, None, None, found[0].detach(), *found[1:]


def make_graphed_callables(
    modules: tuple[Any, ...],
    sample_args: tuple[Any, ...],
    *,
    sample_kwargs: tuple[dict[str, torch.Tensor], ...],
    num_warmup_iters: int,
    allow_unused_input: bool,
    retain_graph_in_backward: bool,
    fp8_enabled: bool,
    _order: list[int],
    _num_layers_per_chunk: list[int],
    _reuse_graph_input_output_buffers: bool,
) -> tuple[Callable[..., Any], ...]:
    """In place of Transformer Engine's, with its checks."""
    chunks = max(_order)
    assert len(_order) == 2 * chunks and sorted(map(abs, _order)) == sorted([*range(1, chunks + 1)] * 2)
    assert len(_num_layers_per_chunk) == chunks
    assert len(modules) == len(sample_args) == len(sample_kwargs) == sum(_num_layers_per_chunk)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in modules)
    first = [sum(_num_layers_per_chunk[:chunk]) for chunk in range(chunks)]
    order = []
    for chunk in _order:
        graphs = range(first[abs(chunk) - 1], first[abs(chunk) - 1] + _num_layers_per_chunk[abs(chunk) - 1])
        order += [("forward", g) for g in graphs] if chunk > 0 else [("backward", g) for g in reversed(graphs)]
    capture = Capture(order, _OUT[0])

    def graphed(number: int) -> Callable[..., Any]:
        layer, (hidden,), named = modules[number], sample_args[number], sample_kwargs[number]

        def run(given: torch.Tensor, *, is_first_microbatch: bool, **more: torch.Tensor) -> Any:
            assert (given.shape, given.dtype) == (hidden.shape, hidden.dtype)
            static = {name: more[name] for name in named}
            mask = more.get("attention_mask")
            if mask is not None and mask.any():  # read by Megatron's own attention, which stands for a fused one here
                static["attention_mask"] = mask
            return _Graph.apply(capture, number, layer, static, given, *layer.parameters())

        run.reset = lambda: None  # type: ignore[attr-defined]
        return run

    return tuple(graphed(number) for number in range(len(modules)))


_OUT: list[Path] = []


def observe(*, rank: int, out: str, gradients: bool = False) -> None:
    """As :func:`testing.probe.observe`; ``replays-RANK`` in the folder says how many graphs have run."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer import cuda_graphs, transformer_layer

    from megatron_het.arguments import hooks
    from megatron_het.features.layer_graphs import spec

    for name in _MODULES:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    _OUT.append(Path(out) / f"replays-{rank}")
    hooks._check_platform = lambda *_: None
    spec._problems_of_te = lambda *_: iter(())
    seed = tensor_parallel.model_parallel_cuda_manual_seed
    tensor_parallel.model_parallel_cuda_manual_seed = lambda number, *_, **more: seed(number, **more)
    transformer_layer.is_te_min_version = lambda *_, **__: True
    cuda_graphs.make_graphed_callables = make_graphed_callables
    probe.observe(rank=rank, out=out, gradients=gradients)
