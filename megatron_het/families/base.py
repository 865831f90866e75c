"""The protocol of model families."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from megatron_het.plan import Plan


class AttentionLayer(NamedTuple):
    """A layer of a chunk that has keys and values.

    Attributes:
        layer: Megatron's module; its attention is ``self_attention``.
        runs: How often it runs in a pass; above 1 only for multi-token prediction.
    """

    layer: Any
    runs: int


class RestPerAttention(NamedTuple):
    """How many dense MLPs and layers of experts there are for every layer with attention."""

    dense: float
    experts: float


class ModelFamily(abc.ABC):
    """Says what depends on the class of the model.

    Attributes:
        model: Name of Megatron's class, for messages.
        builder: Dotted name of the builder of several chunks per rank.
        window_builder: Dotted name of the builder of chunks for a parameter window.
        upstream_names: Dotted names of upstream code that the family leans on beside what features do, with the
            SHA-256 of their sources.
    """

    model: ClassVar[str]
    builder: ClassVar[str]
    window_builder: ClassVar[str]
    upstream_names: ClassVar[Mapping[str, str]] = {}

    # -- Megatron's arguments -----------------------------------------------------------------------

    @abc.abstractmethod
    def complete(self, plan: Plan, args: Any) -> None:
        """Write into arguments that are not validated yet what Megatron derives from others in its validation.

        Raises:
            PlanError: They contradict themselves, or say of chunks what the plan does not.
        """

    @abc.abstractmethod
    def pattern(self, args: Any) -> str:
        """The kinds of the layers, as a plan says them; empty where all layers are of one kind."""

    @abc.abstractmethod
    def attention_numbers(self, args: Any) -> tuple[int, ...]:
        """Megatron's numbers of the layers that have keys and values, from 1."""

    @abc.abstractmethod
    def rest_per_attention(self, args: Any) -> RestPerAttention:
        """Returns what layers with attention come with; where layers differ, that of most of them."""

    @abc.abstractmethod
    def write_layout(self, plan: Plan, args: Any) -> None:
        """Say in the arguments which chunk has which layers."""

    @abc.abstractmethod
    def default_spec(self, args: Any) -> tuple[str, str] | None:
        """``--spec`` of layers that Megatron has not, for a model without one; None where Megatron has them."""

    @abc.abstractmethod
    def model_config(self, args: Any) -> Any:
        """Megatron's configuration of the model, from validated arguments."""

    @abc.abstractmethod
    def needs_builder(self, chunks: int) -> bool:
        """Whether Megatron's own builder cannot build the chunks of a rank, where the one with most has so many."""

    # -- model chunks -------------------------------------------------------------------------------

    def blocks(self, model: Any) -> list[Any]:
        """Returns what of a chunk has layers: the decoder, and what predicts later tokens where it does."""
        later = getattr(model, "mtp", None)
        return [model.decoder] if later is None else [model.decoder, later]

    def attention_layers(self, model: Any) -> list[AttentionLayer]:
        """The layers of a chunk that have keys and values, in order, those for multi-token prediction last."""
        decoder, *others = self.blocks(model)
        runs = int(model.config.mtp_num_layers) if others and model.config.mtp_use_repeated_layer else 1
        later = [layer for block in others for each in block.layers for layer in self._inner(each.mtp_model_layer)]
        return [
            *(AttentionLayer(layer, 1) for layer in self._attending(decoder.layers)),
            *(AttentionLayer(layer, runs) for layer in self._attending(later)),
        ]

    def recurrent_layers(self, model: Any) -> list[Any]:
        """The Mamba mixers and gated delta nets of a chunk, which pass a state along the sequence, in order."""
        return []

    @abc.abstractmethod
    def _inner(self, later: Any) -> Sequence[Any]:
        """The layers that one for multi-token prediction is made of."""

    @abc.abstractmethod
    def _attending(self, layers: Sequence[Any]) -> list[Any]:
        """Returns the attention modules of layers that have keys and values."""
