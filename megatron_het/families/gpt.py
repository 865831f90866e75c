"""Megatron's ``GPTModel``: every layer is attention and an MLP or experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_het.families.base import ModelFamily, RestPerAttention
from megatron_het.plan import Placement, Plan

LATENT_SPEC = ("megatron_het.latent_attention", "layer_spec")
"""``--spec`` of a model with multi-latent attention without Transformer Engine, or without compressed queries."""


class GPTFamily(ModelFamily):
    """Layers are numbered alike everywhere, and Megatron's layout says which chunk has which."""

    model = "GPTModel"
    builder = "megatron_het.runtime.building.ChunkedGPTModelBuilder"
    window_builder = "megatron_het.features.window.shards.WindowGPTModelBuilder"

    def complete(self, plan: Plan, args: Any) -> None:
        """Everything is there."""

    def pattern(self, args: Any) -> str:
        """Layers are attention and what follows it."""
        return ""

    def attention_numbers(self, args: Any) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(1, args.num_layers + 1))

    def rest_per_attention(self, args: Any) -> RestPerAttention:
        """One of them in every layer; a few dense layers of a model of experts do not count."""
        has_experts = bool(getattr(args, "num_experts", None))
        return RestPerAttention(int(not has_experts), int(has_experts))

    def write_layout(self, plan: Plan, args: Any) -> None:
        """Write Megatron's layout string."""
        args.pipeline_model_parallel_layout = pipeline_layout(plan)

    def default_spec(self, args: Any) -> tuple[str, str] | None:
        """Latent attention, which Megatron has with Transformer Engine and compressed queries only."""
        is_ours = args.transformer_impl == "local" or getattr(args, "q_lora_rank", None) is None
        return LATENT_SPEC if getattr(args, "multi_latent_attention", False) and is_ours else None

    def model_config(self, args: Any) -> Any:
        """See :class:`ModelFamily`."""
        from megatron.training.argument_utils import gpt_config_from_args

        return gpt_config_from_args(args)

    def needs_builder(self, chunks: int) -> bool:
        """Megatron builds one chunk as it is."""
        return chunks > 1

    def _inner(self, later: Any) -> Sequence[Any]:
        return [later]

    def _attending(self, layers: Sequence[Any]) -> list[Any]:
        return list(layers)


GPT = GPTFamily()


def pipeline_layout(plan: Plan) -> str:
    """The plan's layers as Megatron's ``--pipeline-model-parallel-layout`` string, e.g. ``Ettt|tL``.

    Layers for multi-token prediction come last: ``tmL``.  Nothing stands where a stage has fewer chunks than others.
    """
    parts = ["t" * count for count in layers_by_number(plan)]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * plan.model.mtp_num_layers + "L"
    return "|".join(parts)


def layers_by_number(plan: Plan) -> list[int]:
    """Layers of every chunk in Megatron's order; 0 where a stage has fewer chunks than others."""
    found = [0] * (plan.most_chunks * len(plan.stages))
    for (stage, chunk), number in Placement(plan).numbers.items():
        found[number] = plan.stages[stage].layers[chunk]
    return found
