"""Parts of the model file beyond a plain decoder layer: experts and latent attention."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_STRICT = ConfigDict(extra="forbid", frozen=True)


class Experts(BaseModel):
    """Mixture-of-experts layers.

    Attributes:
        count: Experts of a layer.
        top_k: Experts per token.
        ffn_hidden_size: Width of one expert.
        shared_ffn_hidden_size: Width of the expert that every token passes, 0 without one.
        dense_layers: Layers with an ordinary MLP (of the model's ``ffn_hidden_size``) instead.
        dense_first: Whether these are the first layers of the model.
        dropless: All tokens reach their experts; else each expert has a fixed capacity.
    """

    model_config = _STRICT

    count: int = Field(ge=2)
    top_k: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    shared_ffn_hidden_size: int = Field(default=0, ge=0)
    dense_layers: int = Field(default=0, ge=0)
    dense_first: bool = True
    dropless: bool = True

    @property
    def runs(self) -> bool:
        """Whether plans train it: what a rank drops depends on its TP size, and other patterns are not told apart."""
        return self.dropless and (self.dense_first or not self.dense_layers)

    def check_layers(self, num_layers: int) -> None:
        """Raise a ValueError when a model has fewer layers than dense ones."""
        if self.dense_layers > num_layers:
            raise ValueError(f"experts.dense_layers = {self.dense_layers} is more than num_layers = {num_layers}")

    @model_validator(mode="after")
    def _consistent(self) -> Experts:
        if self.top_k > self.count:
            raise ValueError(f"top_k = {self.top_k} is more than count = {self.count}")
        return self


class Latent(BaseModel):
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    Attributes:
        query_rank, key_value_rank: Widths of the compressed queries, and of the compressed keys and values.
        nope_size, rope_size, value_size: Per head, width of queries and keys without and with rotary positions,
            and of values.
    """

    model_config = _STRICT

    query_rank: int = Field(ge=1)
    key_value_rank: int = Field(ge=1)
    nope_size: int = Field(ge=1)
    rope_size: int = Field(ge=1)
    value_size: int = Field(ge=1)

    @property
    def compressed(self) -> int:
        """What a token's keys and values of all heads are made from, the keys' rotary part with it."""
        return self.key_value_rank + self.rope_size

    def kept(self, heads: int, sliced: bool) -> int:
        """Numbers per token that the attention of all heads keeps: its inputs and output."""
        query = heads * (self.nope_size + self.rope_size)
        return query + heads * self.value_size + (0 if sliced else query + heads * self.value_size)


def check_sizes(model: Any) -> None:
    """Raise a ValueError where the sizes of a model (``model.Model``) contradict each other."""
    if model.head_size is None and model.hidden_size % model.num_attention_heads:
        raise ValueError(
            f"num_attention_heads = {model.num_attention_heads} does not divide hidden_size = {model.hidden_size}"
        )
    if model.num_attention_heads % model.groups:
        raise ValueError(
            f"num_query_groups = {model.groups} does not divide num_attention_heads = {model.num_attention_heads}"
        )
    for size in model.micro_batch_sizes:
        if size < 1 or model.global_batch_size % size:
            raise ValueError(f"micro_batch_sizes: {size} does not divide global_batch_size = {model.global_batch_size}")
    if 0 < model.learned_positions < model.seq_length:
        raise ValueError(f"learned_positions = {model.learned_positions} is less than seq_length = {model.seq_length}")
    if not model.recompute:
        raise ValueError("recompute must allow at least one of none, selective, full")
    if model.fp8 and model.fp4:
        raise ValueError("fp8 = true and fp4 = true exclude each other")
    if (model.fp8 or model.fp4) and model.precision not in ("bf16", "fp16"):
        name = model.linear_precision
        raise ValueError(f"{name} = true needs precision bf16 or fp16 for the rest, not {model.precision}")
    if model.experts is not None:
        model.experts.check_layers(model.num_layers)
    if model.mtp_num_layers > model.num_layers:
        raise ValueError(f"mtp_num_layers = {model.mtp_num_layers} is more than num_layers = {model.num_layers}")
    if model.mtp_num_layers and model.learned_positions:
        raise ValueError("mtp_num_layers needs learned_positions = 0: Megatron's layers know rotary positions only")
