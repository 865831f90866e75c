"""Figures of replicas at their operating points: times and activations of a microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Unit:
    """Per-rank figures of one replica kind at one operating point (seconds per microbatch, bytes).

    Figures of a layer are means where layers differ.  For one stage of a hybrid model, ``kinds`` has the figures of
    each kind of layer, and its layers in every chunk.
    """

    layer_f: float
    layer_b: float
    embedding_f: float
    embedding_b: float
    head_f: float
    head_b: float
    layer_parameters: float
    embedding_parameters: int
    head_parameters: int
    layer_bytes: float
    embedding_bytes: float
    head_bytes: float
    workspace_bytes: float
    head_workspace_bytes: float
    capacity_bytes: float
    reserved_bytes: float
    sliced_share: float = 1.0
    attention_f: float = 0.0
    attention_b: float = 0.0
    pass_f: float = 0.0
    pass_b: float = 0.0
    kinds: "tuple[tuple[Unit, tuple[int, ...]], ...]" = ()
    embedding_workspace_bytes: float = 0.0
    first_layers: tuple[int, float] = (0, 0.0)  # as ``Model.first_layers``
    tied_parameters: int = 0  # of the tied table that exists once, where one chunk has both ends of the model

    def of_chunks(self, name: str, layers: Sequence[int]) -> list[float]:
        """A figure of a layer, summed over the layers of every chunk of a stage."""
        if not self.kinds:
            return [n * getattr(self, name) for n in layers]
        rows = [[n * getattr(unit, name) for n in counts] for unit, counts in self.kinds]
        return [sum(column) for column in zip(*rows, strict=True)]

    def forward_s(self, layers: float, first: float, last: float, chunks: int = 1) -> float:
        """Forward of one microbatch through a stage (or its layers, on average).

        Args:
            first, last: The parts of the embedding and of the head that the stage has, 0 to 1.
            chunks: Number of passes in which the microbatch goes through the layers.
        """
        return layers * self.layer_f + chunks * self.pass_f + first * self.embedding_f + last * self.head_f

    def backward_s(self, layers: float, first: float, last: float, chunks: int = 1) -> float:
        """Returns the seconds of the backward of ``layers`` layers; arguments as in :meth:`forward_s`."""
        return layers * self.layer_b + chunks * self.pass_b + first * self.embedding_b + last * self.head_b

    def ends_s(self, first: float, last: float) -> float:
        """Seconds of these parts of embedding and head, forward and backward."""
        return first * (self.embedding_f + self.embedding_b) + last * (self.head_f + self.head_b)

    def both_s(self, layers: float, first: float, last: float) -> float:
        """Forward and backward of one microbatch through a stage."""
        return layers * (self.layer_f + self.layer_b) + self.pass_f + self.pass_b + self.ends_s(first, last)

    def chunks_s(
        self, layers: Sequence[int], first: float, last: float, back: bool, fixed_s: float = 0.0
    ) -> list[float]:
        """Seconds of one pass of one microbatch through each chunk of a stage.

        Args:
            fixed_s: Host time of every operation.
        """
        each = self.pass_b if back else self.pass_f
        out = [s + each + fixed_s for s in self.of_chunks("layer_b" if back else "layer_f", layers)]
        if first:
            out[0] += first * (self.embedding_b if back else self.embedding_f)
        if last:
            out[-1] += last * (self.head_b if back else self.head_f)
        return out


_OF_LAYERS = ("layer_f", "layer_b", "attention_f", "attention_b", "pass_f", "pass_b")


def _means(units: Sequence[tuple[Unit, float]], total: float) -> dict[str, Any]:
    """Mean figures of a layer, each unit weighted by its part of the total."""
    found = {name: sum(n * getattr(u, name) for u, n in units) / total for name in (*_OF_LAYERS, "layer_bytes")}
    sliced = sum(n * u.layer_bytes * u.sliced_share for u, n in units) / total
    return found | {"sliced_share": sliced / found["layer_bytes"] if found["layer_bytes"] else 1.0}


def unit_of_kinds(unit: Unit, kinds: tuple[tuple[Unit, tuple[int, ...]], ...]) -> Unit:
    """The unit of a stage with layers of these kinds, each given with its numbers of layers per chunk."""
    counted = [(of, sum(chunks)) for of, chunks in kinds]
    total = sum(count for _, count in counted)
    if not total:
        return unit
    return replace(
        unit,
        **_means(counted, total),
        layer_parameters=sum(count * of.layer_parameters for of, count in counted) / total,
        workspace_bytes=max(of.workspace_bytes for of, count in counted if count),
        kinds=kinds,
    )


def mixed(again: Unit, kept: Unit, share: float, of_chunk: int = 0) -> Unit:
    """The unit of a stage that keeps the activations of a share of its layers, and recomputes the others.

    Args:
        of_chunk: Least number of kept layers of each chunk, whose activations are freed before others are recomputed.
    """
    beside = max(kept.workspace_bytes, again.workspace_bytes - of_chunk * kept.layer_bytes)
    found = _means([(again, 1 - share), (kept, share)], 1.0) | ({} if share == 1 else {"workspace_bytes": beside})
    kinds = tuple((mixed(a, k, share), chunks) for (a, chunks), (k, _) in zip(again.kinds, kept.kinds))
    return replace(kept if share == 1 else again, **found, kinds=kinds)


def unit_of_parts(units: Sequence[Unit]) -> Unit:
    """The unit of context-parallel ranks of several kinds, which go through every layer together.

    Its times are those of the slowest rank.  Its memory is that of the rank whose activations fill its GPU most.
    """
    slowest = max(units, key=lambda u: u.layer_f + u.layer_b)
    fullest = max(units, key=lambda u: u.layer_bytes / u.capacity_bytes)
    ends = ("embedding_f", "embedding_b", "head_f", "head_b")
    return replace(
        fullest,
        **{name: getattr(slowest, name) for name in _OF_LAYERS},
        **{name: max(getattr(u, name) for u in units) for name in ends},
        kinds=tuple(
            (unit_of_parts([u.kinds[i][0] for u in units]), chunks) for i, (_, chunks) in enumerate(fullest.kinds)
        ),
    )
