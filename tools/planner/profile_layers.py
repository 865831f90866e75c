"""Measure real megatron-core layers: time, parameters and memory of one operating point.

The layers are the ones training uses: a ``GPTModel`` of one transformer layer is built from the
local or the Transformer Engine spec, its parts are wrapped in Megatron's own
DistributedDataParallel (so that the accumulation into the gradient buffer is part of the
backward pass), and the update is Megatron's own optimizer.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_het.platform import activate
from megatron_het.platform.memory import memory_meter

from .profile_schema import LayerTiming
from .profile_settings import Point, ProfileSettings, largest

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def on_gpu() -> bool:
    """Whether a real CUDA device is measured."""
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether training would use Transformer Engine here."""
    if not on_gpu():
        return False
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return False
    return True


def transformer_config(settings: ProfileSettings, tp: int, recompute: str, layers: int = 1) -> TransformerConfig:
    """The config Megatron's argument parser would make for this model on this platform."""
    model, gpu = settings.model, on_gpu()
    swiglu = settings.activation == "swiglu"
    extra: dict[str, Any] = {}
    if recompute == "full":
        extra = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        extra = {"recompute_granularity": "selective"}
    return TransformerConfig(
        num_layers=layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        normalization=settings.normalization,
        gated_linear_unit=swiglu,
        activation_func=torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        add_bias_linear=not swiglu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        params_dtype=_DTYPES[model.precision],
        pipeline_dtype=_DTYPES[model.precision],
        bf16=model.precision == "bf16",
        fp16=model.precision == "fp16",
        use_cpu_initialization=not gpu,
        bias_activation_fusion=gpu,
        bias_dropout_fusion=gpu,
        masked_softmax_fusion=gpu,
        persist_layer_norm=gpu,
        **extra,
    )


class _Embedding(torch.nn.Module):
    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.embedding = model.embedding

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        return self.embedding(input_ids=data["tokens"], position_ids=data["positions"])


class _Layer(torch.nn.Module):
    def __init__(self, model: GPTModel, recompute: str) -> None:
        super().__init__()
        self.layer, self.recompute = model.decoder.layers[0], recompute
        self.rotary = model.rotary_pos_emb

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        hidden = data["hidden"]
        rotary = self.rotary(hidden.shape[0])

        def run(value: Tensor) -> Tensor:
            result: Tensor = self.layer(hidden_states=value, attention_mask=data.get("mask"), rotary_pos_emb=rotary)[0]
            return result

        if self.recompute == "full":
            return tensor_parallel.checkpoint(run, False, hidden)
        return run(hidden)


class _Head(torch.nn.Module):
    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.norm, self.output_layer = model.decoder.final_layernorm, model.output_layer
        # A plain function, so that the model's other parameters are not taken in.
        self.loss: Callable[[Tensor, Tensor], Tensor]
        object.__setattr__(self, "loss", model.compute_language_model_loss)

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        logits, _ = self.output_layer(self.norm(data["hidden"]))
        return self.loss(data["tokens"], logits).sum()


class Part:
    """One layer kind at one operating point, with gradient buffer and optimizer.

    Args:
        settings: The profiling run.
        point: What to build.
    """

    def __init__(self, settings: ProfileSettings, point: Point) -> None:
        self.settings, self.point = settings, point
        config = transformer_config(settings, point.tp, point.recompute)
        spec = (
            get_gpt_layer_with_transformer_engine_spec()
            if has_transformer_engine()
            else get_gpt_layer_local_spec(normalization=settings.normalization)
        )
        vocab = -(-settings.model.vocab_size // point.tp) * point.tp
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=vocab,
            max_sequence_length=settings.model.seq_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
        if on_gpu():
            model.cuda(torch.cuda.current_device())
        if config.bf16 or config.fp16:
            model = model.to(config.params_dtype)
        kinds: dict[str, Callable[[], torch.nn.Module]] = {
            "embedding": lambda: _Embedding(model),
            "layer": lambda: _Layer(model, point.recompute),
            "head": lambda: _Head(model),
        }
        self.module = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=config.bf16 or config.fp16), kinds[point.layer]()
        )
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=config.bf16,
            fp16=config.fp16,
            params_dtype=config.params_dtype,
            clip_grad=1.0,
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.module], use_gloo_process_groups=False)
        self.data = self._inputs(device, config)
        self.gradient: Tensor | None = None

    def _inputs(self, device: torch.device, config: TransformerConfig) -> dict[str, Tensor]:
        """Tokens ``[b, s]``, hidden states ``[s, b, h]`` and the causal mask ``[1, 1, s, s]``."""
        s, b = self.point.slice_tokens, self.point.micro_batch_size
        generator = torch.Generator().manual_seed(1234)
        data = {
            "tokens": torch.randint(0, self.settings.model.vocab_size, (b, s), generator=generator).to(device),
            "positions": torch.arange(s).repeat(b, 1).to(device),
            "hidden": torch.randn(s, b, config.hidden_size, generator=generator)
            .to(device=device, dtype=config.params_dtype)
            .requires_grad_(),
        }
        if not has_transformer_engine():
            data["mask"] = torch.triu(torch.ones(1, 1, s, s), diagonal=1).bool().to(device)
        return data

    def forward(self) -> Tensor:
        """One forward pass."""
        result: Tensor = self.module(self.data)
        return result

    def backward(self, output: Tensor) -> None:
        """The backward pass belonging to ``output``."""
        if output.dim() == 0:
            output.backward()
        else:
            if self.gradient is None:
                self.gradient = torch.randn_like(output)
            output.backward(self.gradient)
        self.data["hidden"].grad = None

    def update(self) -> None:
        """What follows the gradient reduction in one iteration: norm, clipping, Adam, zeroing."""
        self.optimizer.step()
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()

    @property
    def parameters(self) -> int:
        """Number of parameters on this rank."""
        return sum(p.numel() for p in self.module.parameters())


class Stopwatch:
    """Seconds between marks: CUDA events on a GPU, the monotonic clock elsewhere."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []

    def mark(self, label: str) -> None:
        """End of a span called ``label`` (the first mark only starts the watch)."""
        if on_gpu():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((label, event))
        else:
            self._marks.append((label, time.perf_counter()))

    def mean_s(self, label: str) -> float:
        """Mean length of the spans that end with ``label``."""
        if on_gpu():
            torch.cuda.synchronize()
        spans = []
        for (_, start), (name, end) in zip(self._marks, self._marks[1:], strict=False):
            if name == label:
                spans.append(start.elapsed_time(end) / 1e3 if on_gpu() else end - start)
        return statistics.fmean(spans)


def measure(settings: ProfileSettings, point: Point, barrier: Callable[[], None]) -> LayerTiming:
    """Measure one point on this rank; every rank calls it at the same time.

    Args:
        settings: Windows and model.
        point: What to measure.
        barrier: Waits for all ranks; called before each window.
    """
    part = Part(settings, point)
    saved_bytes, workspace_bytes, output_bytes = _memory(part)
    for _ in range(2):
        part.backward(part.forward())
        part.update()
    group = parallel_state.get_tensor_model_parallel_group() if point.tp > 1 else None
    forward, backward, update = [], [], []
    for _ in range(settings.windows):
        barrier()
        watch = Stopwatch()
        watch.mark("start")
        _repeat(settings.window_s, functools.partial(_pass, part, watch), group)
        forward.append(watch.mean_s("forward"))
        backward.append(watch.mean_s("backward"))
        barrier()
        watch = Stopwatch()
        watch.mark("start")
        _repeat(settings.window_s / 2, functools.partial(_step, part, watch), group)
        update.append(watch.mean_s("update"))
    return LayerTiming(
        layer=point.layer,
        micro_batch_size=point.micro_batch_size,
        tp=point.tp,
        slice_tokens=point.slice_tokens,
        recompute=point.recompute,
        forward_s=statistics.median(forward),
        backward_s=statistics.median(backward),
        update_s=statistics.median(update),
        parameters=part.parameters,
        activation_bytes=saved_bytes,
        workspace_bytes=workspace_bytes,
        output_bytes=output_bytes,
    )


def _pass(part: Part, watch: Stopwatch) -> None:
    watch.mark("gap")
    output = part.forward()
    watch.mark("forward")
    part.backward(output)
    watch.mark("backward")


def _step(part: Part, watch: Stopwatch) -> None:
    watch.mark("gap")
    part.update()
    watch.mark("update")


def _repeat(window_s: float, work: Callable[[], None], group: Any) -> None:
    """Repeat ``work`` for about ``window_s``; ranks of one TP group repeat equally often."""
    start = time.perf_counter()
    if group is None and not on_gpu():
        while time.perf_counter() - start < window_s:
            work()
        return
    work()
    if on_gpu():
        torch.cuda.synchronize()
    once = torch.tensor([time.perf_counter() - start], device="cuda" if on_gpu() else "cpu")
    if group is not None:
        torch.distributed.all_reduce(once, torch.distributed.ReduceOp.MAX, group=group)
    for _ in range(max(1, min(1000, round(window_s / max(once.item(), 1e-6)) - 1))):
        work()


def _memory(part: Part) -> tuple[int, int, int]:
    """(bytes kept from forward to backward, largest temporary beyond, output bytes) of one pass."""
    known = {p.untyped_storage().data_ptr() for p in part.module.parameters()}
    # Constant inputs exist once, not once per microbatch.
    known |= {part.data[n].untyped_storage().data_ptr() for n in ("mask", "positions", "tokens") if n in part.data}
    hidden = part.data["hidden"].untyped_storage().data_ptr()
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    part.backward(part.forward())
    with memory_meter(activate()) as meter, meter.region("pass") as visit:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = part.forward()
        output_bytes = output.numel() * output.element_size() if output.dim() else 0
        part.backward(output)
        del output
    saved = sum(kept.values())
    # The layer's input was there before; it counts as kept, and not as growth.
    workspace = visit.growth_bytes - (saved - kept.get(hidden, 0))
    return saved, max(0, workspace), output_bytes


def largest_micro_batch(settings: ProfileSettings, tp: int, recompute: str, memory_bytes: int) -> int:
    """The largest micro batch that trains ``largest_batch_layers`` layers on this device.

    On a GPU every size is run and an out-of-memory error counts as "does not fit".  On a CPU the
    kernel would end the process instead, so a size counts as fitting when the bytes measured for
    one sequence, which grow linearly, stay below the device's memory.
    """
    layers = settings.largest_batch_layers
    tokens = settings.model.seq_length

    def parts(batch: int) -> list[Part]:
        kind = Point("layer", batch, tp, tokens, recompute)  # type: ignore[arg-type]
        return [Part(settings, kind) for _ in range(layers)]

    if not on_gpu():
        one = parts(1)[0]
        saved, workspace, _ = _memory(one)
        # Weights, gradients and two Adam moments, four bytes each.
        fixed = layers * one.parameters * 16
        return largest(lambda batch: fixed + batch * (layers * saved + workspace) <= memory_bytes)

    def fits(batch: int) -> bool:
        try:
            held = parts(batch)
            outputs = [p.forward() for p in held]
            for part, output in zip(reversed(held), reversed(outputs), strict=True):
                part.backward(output)
                part.update()
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            held, outputs = [], []
            torch.cuda.empty_cache()
        return True

    return largest(fits)
