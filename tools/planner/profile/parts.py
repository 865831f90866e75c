"""Real megatron-core layers as training builds them: one layer kind with its gradient buffer and optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor

from .settings import Point, ProfileSettings

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
    """Returns what a layer with experts, latent attention or a sliding window has besides."""
    model, extra = settings.model, dict[str, Any]()
    kind: type[TransformerConfig] = TransformerConfig
    if model.head_size:
        extra["kv_channels"] = model.head_size
    if point.windowed:
        extra["window_size"] = (model.window - 1, 0)
    if model.latent is not None:
        latent, kind = model.latent, MLATransformerConfig
        extra |= {
            "multi_latent_attention": True,
            "q_lora_rank": latent.query_rank or None,
            "kv_lora_rank": latent.key_value_rank,
        }
        extra |= {
            "qk_head_dim": latent.nope_size,
            "qk_pos_emb_head_dim": latent.rope_size,
            "v_head_dim": latent.value_size,
        }
        extra |= {"rope_type": "rope", "apply_rope_fusion": False}
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
    return settings.model.experts is not None and point.layer != "dense"


def _layer_spec(settings: ProfileSettings, config: TransformerConfig) -> Any:
    """The modules that training would have."""
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
        settings: The profiling run.
        point: What to build.
        layers: Of a transformer layer, how many in turn.

    Attributes:
        divided: Ranks over which a sequence is divided.
    """

    def __init__(self, settings: ProfileSettings, point: Point, layers: int = 1) -> None:
        self.settings, self.point = settings, point
        config = transformer_config(settings, point, layers)
        self.divided = point.tp if config.sequence_parallel else 1
        vocab = -(-settings.model.vocab_size // point.tp) * point.tp
        model = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(settings, config),
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
            "dense": lambda: _Layer(model, point.recompute),
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
        """What follows the gradient reduction in one iteration: norm, clipping, Adam, zeroing."""
        self.optimizer.step()
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()

    @property
    def parameters(self) -> int:
        """Number of parameters on this rank."""
        return sum(p.numel() for p in self.module.parameters())
