"""The model file: the shape of a decoder-only transformer, its batch and its numerics, and what they imply."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tools.planner.catalog import Precision
from tools.planner.errors import PlannerError, from_validation_error
from tools.planner.files import read_yaml
from tools.planner.profile_schema import ProfiledModel

Recompute = Literal["none", "selective", "full"]


class Model(BaseModel):
    """A model file.

    Attributes:
        global_batch_size: Sequences per iteration; the planner never changes it.
        micro_batch_sizes: Allowed micro batch sizes; all powers of two when empty.
        gated: SwiGLU or similar (three matrices in the MLP instead of two).
        learned_positions: Rows of a learned position table, at least ``seq_length``; 0 without one (RoPE).
        distributed_optimizer: Whether optimizer state may be sharded over data parallelism.
        sequence_parallel: Whether norms and residuals are split over TP.
        recompute: Allowed activation recompute granularities.
        attention: ``flash`` where GPU and precision (fp16, bf16) have it, else unfused; ``unfused`` everywhere;
            or ``fused`` everywhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ignored_types=(cached_property,))

    name: str = "model"
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_query_groups: int | None = Field(default=None, ge=1)
    vocab_size: int = Field(ge=1)
    seq_length: int = Field(ge=1)
    global_batch_size: int = Field(ge=1)
    micro_batch_sizes: tuple[int, ...] = ()
    precision: Precision = "bf16"
    gated: bool = True
    biases: bool = False
    tied_embeddings: bool = False
    learned_positions: int = Field(default=0, ge=0)
    distributed_optimizer: bool = False
    sequence_parallel: bool = False
    recompute: tuple[Recompute, ...] = ("none", "full")
    attention: Literal["flash", "unfused", "fused"] = "flash"

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"num_attention_heads = {self.num_attention_heads} does not divide "
                             f"hidden_size = {self.hidden_size}")
        if self.num_attention_heads % self.groups:
            raise ValueError(f"num_query_groups = {self.groups} does not divide "
                             f"num_attention_heads = {self.num_attention_heads}")
        for size in self.micro_batch_sizes:
            if size < 1 or self.global_batch_size % size:
                raise ValueError(f"micro_batch_sizes: {size} does not divide "
                                 f"global_batch_size = {self.global_batch_size}")
        if 0 < self.learned_positions < self.seq_length:
            raise ValueError(f"learned_positions = {self.learned_positions} is less than "
                             f"seq_length = {self.seq_length}")
        if not self.recompute:
            raise ValueError("recompute must allow at least one of none, selective, full")
        return self

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_size(self) -> int:
        """Width of keys (and of values)."""
        return self.head_dim * self.groups

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Micro batch sizes to consider, ascending."""
        if self.micro_batch_sizes:
            return tuple(sorted(set(self.micro_batch_sizes)))
        return tuple(b for b in (1, 2, 4, 8, 16, 32, 64, 128) if self.global_batch_size % b == 0)

    def layer_parameters(self, tp: int = 1) -> int:
        """Parameters of one transformer layer on one rank."""
        h, f = self.hidden_size, self.ffn_hidden_size
        attention = h * (h + 2 * self.kv_size) + h * h
        mlp = h * f * (3 if self.gated else 2)
        total = (attention + mlp) // tp + 2 * h * (2 if self.biases else 1)
        if self.biases:
            total += (h + 2 * self.kv_size + f) // tp + 2 * h
        return total

    def embedding_parameters(self, tp: int = 1) -> int:
        """Parameters of the token and position tables on one rank."""
        return self._rows(tp) * self.hidden_size + self.learned_positions * self.hidden_size

    def head_parameters(self, tp: int = 1) -> int:
        """Final norm and output projection on one rank (tied: held a second time on the last stage)."""
        return self._rows(tp) * self.hidden_size + self.hidden_size * (2 if self.biases else 1)

    def _rows(self, tp: int) -> int:
        """Rows of the vocabulary on one rank, padded as Megatron does (to a multiple of 128 * TP)."""
        return -(-self.vocab_size // (128 * tp)) * 128

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model (a tied table counts once)."""
        head = self.hidden_size if self.tied_embeddings else self.vocab_size * self.hidden_size
        return (self.num_layers * self.layer_parameters() + self.vocab_size * self.hidden_size
                + self.learned_positions * self.hidden_size + head)

    def layer_flops(self, tokens: int, context: float | None = None) -> float:
        """Forward FLOPs of one layer for ``tokens`` tokens of one sequence.

        Args:
            tokens: Tokens of the slice.
            context: Average number of keys per query; half the sequence by default (causal).
        """
        h = self.hidden_size
        matrices = h * (h + 2 * self.kv_size) + h * h + h * self.ffn_hidden_size * (3 if self.gated else 2)
        keys = self.seq_length / 2 if context is None else context
        return 2.0 * tokens * matrices + 4.0 * tokens * keys * h

    def head_flops(self, tokens: int) -> float:
        """Forward FLOPs of the output projection."""
        return 2.0 * tokens * self.hidden_size * self.vocab_size

    @property
    def iteration_flops(self) -> float:
        """Model FLOPs of one iteration: forward and backward (twice), without recomputation."""
        s = self.seq_length
        return 3.0 * self.global_batch_size * (self.num_layers * self.layer_flops(s) + self.head_flops(s))

    def check_profile(self, other: ProfiledModel, file: str) -> None:
        """Raise a PlannerError when a profile belongs to another model or precision."""
        for key, mine in (
            ("hidden_size", self.hidden_size), ("ffn_hidden_size", self.ffn_hidden_size),
            ("num_attention_heads", self.num_attention_heads), ("num_query_groups", self.groups),
            ("vocab_size", self.vocab_size), ("seq_length", self.seq_length), ("precision", self.precision),
        ):
            found = getattr(other, key)
            if found != mine:
                raise PlannerError(file, f"model.{key}", found, f"the profile is of another model (this one: {mine!r})",
                                   "Profile this model with 'het-plan profile'")


def load_model(path: str | os.PathLike[str]) -> Model:
    """Read a model file (YAML or JSON).

    Raises:
        PlannerError: naming file, key and value.
    """
    return model_from_document(read_yaml(path), str(path))


def model_from_document(document: Any, file: str) -> Model:
    """A Model from parsed YAML; see ``load_model``."""
    if not isinstance(document, dict):
        raise PlannerError(file, "(document)", type(document).__name__, "expected a mapping")
    try:
        return Model.model_validate(document)
    except ValidationError as error:
        raise from_validation_error(file, error.errors()) from None
