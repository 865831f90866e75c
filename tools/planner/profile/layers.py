"""Measure real megatron-core layers: time, parameters and memory of one operating point.

The layers are the ones training uses: a ``GPTModel`` of one transformer layer is built from the
local or the Transformer Engine spec, its parts are wrapped in Megatron's own
DistributedDataParallel (so that the accumulation into the gradient buffer is part of the
backward pass), and the update is Megatron's own optimizer.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_het.device import activate
from megatron_het.device.memory import memory_meter

from ..inputs.profile_schema import LayerTiming
from .settings import ENDS, Point, ProfileSettings, largest

# Real megatron-core layers as training builds them: one layer kind with its gradient buffer and optimizer.


_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def on_gpu() -> bool:
    """Whether a real CUDA device is measured."""
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether training would use Transformer Engine here."""
    return on_gpu() and HAVE_TE


def transformer_config(settings: ProfileSettings, point: Point, layers: int) -> TransformerConfig:
    """The config Megatron's argument parser would make for some layers of this model on this platform."""
    model, gpu, tp, recompute = settings.model, on_gpu(), point.tp, point.recompute
    swiglu = settings.activation == "swiglu"
    kind, extra = _special(settings, point)
    if recompute == "full":
        extra |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        extra |= {"recompute_granularity": "selective"}
    return kind(
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
        sequence_parallel=model.sequence_parallel and tp > 1,
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


def _special(settings: ProfileSettings, point: Point) -> tuple[type[TransformerConfig], dict[str, Any]]:
    """Returns the additional config fields of a layer with experts, latent attention or a sliding window."""
    model, extra = settings.model, dict[str, Any]()
    kind: type[TransformerConfig] = TransformerConfig
    if model.head_size:
        extra["kv_channels"] = model.head_size
    if point.windowed:
        extra["window_size"] = (model.window - 1, 0)
    if model.latent is not None:
        latent, kind = model.latent, MLATransformerConfig
        extra |= {"multi_latent_attention": True, "rope_type": "rope", "apply_rope_fusion": False}
        extra |= {"q_lora_rank": latent.query_rank or None, "kv_lora_rank": latent.key_value_rank}
        extra |= {"qk_head_dim": latent.nope_size, "qk_pos_emb_head_dim": latent.rope_size}
        extra["v_head_dim"] = latent.value_size
    if has_experts(settings, point):
        assert model.experts is not None
        x = model.experts
        extra |= {"num_moe_experts": x.count, "moe_router_topk": x.top_k, "moe_ffn_hidden_size": x.ffn_hidden_size}
        extra |= {"moe_token_dispatcher_type": "alltoall", "moe_router_pre_softmax": x.top_k == 1}
        extra |= {"moe_grouped_gemm": has_transformer_engine(), "expert_model_parallel_size": point.ep}
        extra["expert_tensor_parallel_size"] = point.tp // point.ep
        if x.shared_ffn_hidden_size:
            extra["moe_shared_expert_intermediate_size"] = x.shared_ffn_hidden_size
    return kind, extra


def has_experts(settings: ProfileSettings, point: Point) -> bool:
    """Whether the transformer layer of a point has experts."""
    return settings.model.experts is not None and point.layer in (*ENDS, "layer", "experts")


def _layer_spec(settings: ProfileSettings, config: TransformerConfig, point: Point) -> Any:
    """Returns the spec of the layer as in training; of a hybrid model that of one kind of layer."""
    spec = _whole_layer_spec(settings, config)
    if point.layer == "attention":
        names: tuple[str, ...] = ("pre_mlp_layernorm", "mlp", "mlp_bda")
    elif point.layer in ("mlp", "experts"):
        names = ("input_layernorm", "self_attention", "self_attn_bda")
    else:
        return spec
    without = {item.name: item.default for item in dataclasses.fields(spec.submodules) if item.name in names}
    return ModuleSpec(module=spec.module, submodules=dataclasses.replace(spec.submodules, **without))


def _whole_layer_spec(settings: ProfileSettings, config: TransformerConfig) -> Any:
    parts: dict[str, Any] = {"multi_latent_attention": config.multi_latent_attention}
    if config.num_moe_experts is not None:
        parts |= {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(**parts)
    spec = get_gpt_layer_local_spec(normalization=settings.normalization, **parts)
    if config.multi_latent_attention:
        from megatron_het.latent_attention import without_transformer_engine

        spec = without_transformer_engine(spec)
    return spec


class _Embedding(torch.nn.Module):
    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.embedding = model.embedding

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        return self.embedding(input_ids=data["tokens"], position_ids=data["positions"])


class _Layer(torch.nn.Module):
    def __init__(self, model: GPTModel, recompute: str) -> None:
        super().__init__()
        self.layers, self.recompute = model.decoder.layers, recompute
        self.rotary = getattr(model, "rotary_pos_emb", None)  # latent attention has its own

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        hidden = data["hidden"]
        rotary = None if self.rotary is None else self.rotary(data["tokens"].shape[1])

        for layer in self.layers:
            run = functools.partial(_run, layer, data.get("mask"), rotary)
            hidden = tensor_parallel.checkpoint(run, False, hidden) if self.recompute == "full" else run(hidden)
        return hidden


def _run(layer: torch.nn.Module, mask: Tensor | None, rotary: Tensor | None, hidden: Tensor) -> Tensor:
    result: Tensor = layer(hidden_states=hidden, attention_mask=mask, rotary_pos_emb=rotary)[0]
    return result


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
        layers: Number of equal transformer layers in sequence.
    """

    def __init__(self, settings: ProfileSettings, point: Point, layers: int = 1) -> None:
        self.settings, self.point = settings, point
        config = transformer_config(settings, point, layers)
        self.divided = point.tp if config.sequence_parallel else 1  # ranks over which a sequence is divided
        vocab = -(-settings.model.vocab_size // point.tp) * point.tp
        model = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(settings, config, point),
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
        ends: dict[str, Callable[[GPTModel], torch.nn.Module]] = {"embedding": _Embedding, "head": _Head}
        module = ends[point.layer](model) if point.layer in ends else _Layer(model, point.recompute)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=config.bf16 or config.fp16)
        self.module = DistributedDataParallel(config, ddp_config, module)
        self.parameters = sum(p.numel() for p in module.parameters())  # on this rank
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
        """Tokens ``[b, s]``, hidden states of this rank ``[s, b, h]`` and the causal mask ``[1, 1, s, s]``."""
        s, b = self.point.slice_tokens, self.point.micro_batch_size
        mine = s // self.divided
        generator = torch.Generator().manual_seed(1234)
        data = {
            "tokens": torch.randint(0, self.settings.model.vocab_size, (b, s), generator=generator).to(device),
            "positions": torch.arange(s).repeat(b, 1).to(device),
            "hidden": torch.randn(mine, b, config.hidden_size, generator=generator)
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
        """Run the steps after the gradient reduction of an iteration: norm, clipping, Adam, zeroing."""
        self.optimizer.step()
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()


class Stopwatch:
    """Seconds between marks: CUDA events on a GPU, the monotonic clock elsewhere."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []

    def mark(self, label: str) -> None:
        """End of a span called ``label`` (the first mark only starts the watch)."""
        at: Any = torch.cuda.Event(enable_timing=True) if on_gpu() else time.perf_counter()
        if on_gpu():
            at.record()
        self._marks.append((label, at))

    def mean_s(self, label: str) -> float:
        """Mean length of the spans that end with ``label``."""
        if on_gpu():
            torch.cuda.synchronize()
        spans = [(start, end) for (_, start), (name, end) in pairwise(self._marks) if name == label]
        return statistics.fmean(start.elapsed_time(end) / 1e3 if on_gpu() else end - start for start, end in spans)


def measure(settings: ProfileSettings, point: Point, barrier: Callable[[], None]) -> LayerTiming:
    """Measure one point on this rank; every rank calls it at the same time.

    Args:
        barrier: Waits for all ranks; called before each window.
    """
    part = Part(settings, point)
    saved_bytes, workspace_bytes, output_bytes = _memory(part)
    _warm_up(part)
    double = _double(settings, point)
    group = parallel_state.get_tensor_model_parallel_group() if point.tp > 1 else None
    forward, backward, update = [], [], []
    fixed: list[tuple[float, float]] = []
    alone: list[float] = []
    for _ in range(settings.windows):
        barrier()
        once = _pass_s(part, settings.window_s, group)
        forward.append(once[0])
        backward.append(once[1])
        if double is not None:  # right after the single layer, so that a change of speed affects both
            twice = _pass_s(double, settings.window_s, group)
            fixed.append((2 * once[0] - twice[0], 2 * once[1] - twice[1]))
        barrier()
        watch = Stopwatch()
        _repeat(settings.window_s / 2, functools.partial(_step, part, watch), group)
        update.append(watch.mean_s("update"))
        if point.tp == 1 and point.layer not in ENDS and not on_gpu():
            alone.append(_alone_s(part, settings.window_s / 2, barrier))
    forward_s, backward_s = statistics.median(forward), statistics.median(backward)
    return LayerTiming(
        **point._asdict(),
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=statistics.median(update),
        parameters=part.parameters,
        activation_bytes=saved_bytes,
        workspace_bytes=workspace_bytes,
        output_bytes=output_bytes,
        fixed_forward_s=_fixed_s([f for f, _ in fixed], forward_s),
        fixed_backward_s=_fixed_s([b for _, b in fixed], backward_s),
        alone_s=statistics.median(alone) if alone else 0.0,
    )


def _alone_s(part: Part, window_s: float, barrier: Callable[[], None]) -> float:
    """Mean seconds of a forward and a backward while the other ranks wait; they take turns.

    Processes on cores of one machine share memory, caches, and perhaps a core: each is faster while others wait.
    """
    found = 0.0
    for rank in range(torch.distributed.get_world_size()):
        barrier()
        if rank == torch.distributed.get_rank():
            found = sum(_pass_s(part, window_s, None))
    barrier()
    return found


def _warm_up(part: Part) -> None:
    for _ in range(2):
        part.backward(part.forward())
        part.update()


def _double(settings: ProfileSettings, point: Point) -> Part | None:
    """Returns two such layers in sequence; None for embedding and head, and if they do not fit the device."""
    if point.layer in ENDS:
        return None
    try:
        part = Part(settings, point, layers=2)
        _warm_up(part)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    return part


def _pass_s(part: Part, window_s: float, group: Any) -> tuple[float, float]:
    """Mean seconds of a forward and of a backward."""
    _make_room()
    watch = Stopwatch()
    _repeat(window_s, functools.partial(_pass, part, watch), group)
    return watch.mean_s("forward"), watch.mean_s("backward")


def _make_room() -> None:
    """Touch free memory of this process, so that page faults of a growing heap do not count as time of a layer.

    glibc before 2.38 seldom finds a free aligned block again, so that a loop over one layer makes the heap grow with
    every pass.  Training, where the blocks of many layers are freed together, does not.
    """
    if not on_gpu():
        # Blocks below the size from which on glibc returns them to the kernel (``device/cpu.py``), all held at once.
        _ = [torch.zeros(16 << 20, dtype=torch.uint8) for _ in range(16)]


def _fixed_s(differences: list[float], whole_s: float) -> float:
    """Returns the fixed cost: two passes of one layer less a pass of two layers, at most half of a pass."""
    return min(max(0.0, statistics.median(differences)), whole_s / 2) if differences else 0.0


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
    work()  # at least once, even where another process has the core all the while
    if group is None and not on_gpu():
        while time.perf_counter() - start < window_s:
            work()
        return
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
        output_bytes = part.divided * output.numel() * output.element_size() if output.dim() else 0
        part.backward(output)
        del output
    saved = sum(kept.values())
    # The layer's input was allocated before; it counts as kept, not as growth.
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


@contextmanager
def tensor_parallel_state(tp: int, ep: int = 1) -> Iterator[None]:
    """Megatron's parallel state for one TP size and one EP size inside it, for the duration of a block."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp // ep
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
