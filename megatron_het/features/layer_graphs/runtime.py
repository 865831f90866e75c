"""CUDA graphs of layers as a feature of a rank."""

import contextlib
import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.utils import get_attr_wrapped_model

from megatron_het.features.layer_graphs.spec import BY_TE, LOCAL, NONE
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.runtime.feature import BackwardPass, Call, ForwardPass, Iteration, Key, OpenContext, RuntimeFeature
from megatron_het.schedule.kinds import INPUT_GRADIENTS, Kind

_WARMUP_RUNS = 10
"""Runs of a layer before its capture, as in Megatron, because libraries select and load kernels in the first ones."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward passes of this rank in an iteration of training, in the order of the program."""

    forwards: tuple[RankOp, ...]  # their operations
    numbers: Mapping[Key, int]  # number of a pass among those of its chunk
    order: tuple[int, ...]  # numbers of ``forwards`` from 1; negative for the backward of the pass

    @classmethod
    def of(cls, program: RankProgram) -> "Passes":
        """Reads the passes from the program of training."""
        forwards = tuple(op for op in program.ops if op.kind == Kind.FORWARD)
        numbers: dict[Key, int] = {}
        for chunk in {op.chunk for op in forwards}:
            mine = [op.key for op in forwards if op.chunk == chunk]
            numbers |= {key: number for number, key in enumerate(mine)}
        places = {op.key: place for place, op in enumerate(forwards, 1)}
        order = [
            places[op.key] if op.kind == Kind.FORWARD else -places[op.key]
            for op in program.ops
            if op.kind == Kind.FORWARD or op.kind in INPUT_GRADIENTS
        ]
        return cls(forwards, numbers, tuple(order))


class LayerGraphs(RuntimeFeature):
    """Captures layers after the first iterations of training; Megatron's layers then replay the graphs themselves.

    Outputs of a chunk are copied out of the graphs' memory: a transfer may still read them when another graph
    writes there, because only the order of graphs protects that memory.

    Args:
        kind: ``--cuda-graph-impl``.
        passes: Passes that Transformer Engine captures, and their order.
    """

    def __init__(self, kind: str, passes: Passes, args: Any) -> None:
        self._kind, self._passes, self._args = kind, passes, args
        self._iterations = 0
        self._layers: list[Any] = []
        self.is_captured = False

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Hide graphs from Megatron's training loop, which would capture in the order of its own schedules."""
        if self._kind == BY_TE:
            self._args.cuda_graph_impl = NONE

    def prepare(self, call: Call) -> None:
        """Capture the layers after enough iterations without graphs."""
        if call.forward_only or self.is_captured:
            return
        # Megatron's own graphs are recorded in the first iteration.
        due = 1 if self._kind == LOCAL else max(1, call.config.cuda_graph_warmup_steps)
        if self._iterations == due:
            with _without_gathers(call.models) as gathers:
                self._capture(call)
            if gathers:
                for model, layers in zip(call.models, _layers_by_chunk(call), strict=True):
                    for layer in layers if self._kind == BY_TE else ():
                        layer.setup_manual_hooks(model._make_forward_pre_hook)
            self.is_captured = True
        self._iterations += 1

    def _capture(self, call: Call) -> None:
        if self._kind == LOCAL:
            cuda_graphs.create_cudagraphs()
            return
        by_chunk = _layers_by_chunk(call)
        self._layers = [layer for layers in by_chunk for layer in layers]
        if self._layers:
            _capture_by_te(call, self._passes, by_chunk)

    @contextlib.contextmanager
    def around_forward(self, forward: ForwardPass, call: Call) -> Iterator[None]:
        """Select the graphs of the pass, and copy the output out of the graphs' memory, in evaluations, too."""
        if not call.forward_only:
            forward.number = self._passes.numbers[forward.op.key]
        yield
        is_theirs = self.is_captured or self._kind == LOCAL  # Megatron's own return views before they are recorded, too
        if is_theirs and not forward.ends_in_loss and forward.output is not None:
            forward.output = forward.output.clone()

    @contextlib.contextmanager
    def around_backward(self, backward: BackwardPass, call: Call, state: Iteration) -> Iterator[None]:
        """Select the graphs of the pass, and copy the gradient of the input out of the graphs' memory."""
        yield
        if self.is_captured and backward.result is not None:
            backward.result = backward.result.clone()

    def close(self) -> None:
        """Free the graphs."""
        self._args.cuda_graph_impl = self._kind
        if self._kind == LOCAL and self.is_captured:
            cuda_graphs.delete_cuda_graphs()
        for layer in self._layers:
            for graph in layer.cuda_graphs:
                graph.reset()
            layer.cuda_graphs, layer.cuda_graph_manual_hooks = [], []
        self._layers.clear()


def _layers_by_chunk(call: Call) -> list[list[Any]]:
    """The layers to capture of every chunk of this rank."""
    return [
        [
            layer
            for layer in get_attr_wrapped_model(model, "decoder").layers
            if cuda_graphs._layer_is_graphable(layer, call.config)
        ]
        for model in call.models
    ]


@contextlib.contextmanager
def _without_gathers(models: Iterable[Any]) -> Iterator[bool]:
    """Context without the hooks that wait for parameter gathers; yields whether there were any."""
    hooked = [model for model in models if getattr(model, "remove_forward_pre_hook_handles", None)]
    for model in hooked:
        model.disable_forward_pre_hook(param_sync=False)
    try:
        yield bool(hooked)
    finally:
        for model in hooked:
            model.enable_forward_pre_hook()


def _capture_by_te(call: Call, passes: Passes, by_chunk: Sequence[Sequence[Any]]) -> None:
    """Let Transformer Engine capture all passes of all layers.

    It supports microbatches of chunks whose backwards run in the order of the forwards.  Here every pass is given as a
    chunk with one microbatch, so that backwards may run in any order.
    """
    layers = [layer for op in passes.forwards for layer in by_chunk[op.chunk]]
    arguments = [_arguments(call, op, layer) for op in passes.forwards for layer in by_chunk[op.chunk]]
    runs = call.config.cuda_graph_warmup_steps * len(passes.forwards)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    cuda_graphs._set_capture_start()
    try:
        with get_cuda_rng_tracker().fork() if call.config.sequence_parallel else contextlib.nullcontext():
            graphs = cuda_graphs.make_graphed_callables(
                tuple(layers),
                tuple((hidden,) for hidden, _ in arguments),
                sample_kwargs=tuple(named for _, named in arguments),
                num_warmup_iters=max(1, math.ceil((_WARMUP_RUNS - runs) / len(passes.forwards))),
                allow_unused_input=True,
                retain_graph_in_backward=call.config.cuda_graph_retain_backward_graph,
                _order=list(passes.order),
                _num_layers_per_chunk=[len(by_chunk[op.chunk]) for op in passes.forwards],
                _reuse_graph_input_output_buffers=True,
                fp8_enabled=False,  # fp8 with graphs is refused
            )
    finally:
        cuda_graphs._set_capture_end()
    for layer in {id(layer): layer for layer in layers}.values():
        layer.cuda_graphs = []
    for layer, graph in zip(layers, graphs, strict=True):
        layer.cuda_graphs.append(graph)
    torch.cuda.synchronize()
    # The runs before a capture have added to gradients, counts and losses.
    models: Sequence[Any] = call.models
    for model in models:
        model.zero_grad_buffer()
    get_moe_metrics_tracker().clear()
    reset_model_temporary_tensors(call.config, call.models)
    gc.collect()
    torch.cuda.empty_cache()


def _arguments(call: Call, op: RankOp, layer: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A layer's input in a pass, and further tensors that its graph reads."""
    hidden = torch.zeros(call.shape(op), dtype=call.dtype, device=call.device, requires_grad=True)
    named: dict[str, torch.Tensor] = {}
    config, parts = call.config, call.config.cuda_graph_modules
    if (parts and CudaGraphModule.attn not in parts) or config.multi_latent_attention:
        return hidden, named
    model: Any = get_attr_wrapped_model(call.models[op.chunk], "decoder", return_model_obj=True)
    if model.position_embedding_type == "rope":
        rotary = model.rotary_pos_emb
        named["rotary_pos_emb"] = rotary(rotary.get_rotary_seq_len(None, model.decoder, hidden, config, None))
    return hidden, named


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature."""
    return LayerGraphs(context.args.cuda_graph_impl, Passes.of(context.lowered[False]), context.args)
