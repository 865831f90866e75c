"""Figures of replicas at their operating points: what a microbatch takes and keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Unit:
    """Per-rank figures of one replica kind at one operating point (seconds per microbatch, bytes).

    Figures of a layer are means where layers differ.  ``kinds`` says more of the layers of one stage of a hybrid model:
    the figures of each kind, and its layers in every chunk.
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
            chunks: Passes in which it goes through them.
        """
        seconds = layers * self.layer_f + chunks * self.pass_f
        if first:
            seconds += first * self.embedding_f
        return seconds + last * self.head_f if last else seconds

    def backward_s(self, layers: float, first: float, last: float, chunks: int = 1) -> float:
        """Returns the seconds of the backward of so many layers."""
        seconds = layers * self.layer_b + chunks * self.pass_b
        if first:
            seconds += first * self.embedding_b
        return seconds + last * self.head_b if last else seconds

    def ends_s(self, first: float, last: float) -> float:
        """These parts of embedding and head, forward and backward."""
        return first * (self.embedding_f + self.embedding_b) + last * (self.head_f + self.head_b)

    def both_s(self, layers: float, first: float, last: float) -> float:
        """Forward and backward of one microbatch through a stage."""
        return layers * (self.layer_f + self.layer_b) + self.pass_f + self.pass_b + self.ends_s(first, last)

    def chunks_s(
        self, layers: Sequence[int], first: float, last: float, back: bool, fixed_s: float = 0.0
    ) -> list[float]:
        """One pass of one microbatch through each chunk of a stage.

        Args:
            first, last: The parts of the embedding and of the head that the stage has, 0 to 1.
            back: The backward.
            fixed_s: Host time of every operation.
        """
        each = self.pass_b if back else self.pass_f
        out = [s + each + fixed_s for s in self.of_chunks("layer_b" if back else "layer_f", layers)]
        if first:
            out[0] += first * (self.embedding_b if back else self.embedding_f)
        if last:
            out[-1] += last * (self.head_b if back else self.head_f)
        return out


def unit_of_kinds(unit: Unit, kinds: tuple[tuple[Unit, tuple[int, ...]], ...]) -> Unit:
    """The unit of a stage whose layers are of these kinds, each with its layers in every chunk."""
    counted = [(of, sum(chunks)) for of, chunks in kinds]
    total = sum(count for _, count in counted)
    if not total:
        return unit

    def mean(name: str) -> float:
        return sum(count * getattr(of, name) for of, count in counted) / total

    kept = mean("layer_bytes")
    sliced = sum(count * of.layer_bytes * of.sliced_share for of, count in counted) / total
    return replace(
        unit,
        layer_f=mean("layer_f"),
        layer_b=mean("layer_b"),
        layer_bytes=kept,
        layer_parameters=mean("layer_parameters"),
        attention_f=mean("attention_f"),
        attention_b=mean("attention_b"),
        pass_f=mean("pass_f"),
        pass_b=mean("pass_b"),
        workspace_bytes=max(of.workspace_bytes for of, count in counted if count),
        sliced_share=sliced / kept if kept else 1.0,
        kinds=kinds,
    )


def mixed(again: Unit, kept: Unit, share: float) -> Unit:
    """The unit of a stage that keeps the activations of a share of its layers, and runs the others again."""
    names = ("layer_f", "layer_b", "layer_bytes", "attention_f", "attention_b", "pass_f", "pass_b")
    found = {name: (1 - share) * getattr(again, name) + share * getattr(kept, name) for name in names}
    sliced = (1 - share) * again.layer_bytes * again.sliced_share + share * kept.layer_bytes * kept.sliced_share
    kinds = tuple((mixed(a, k, share), chunks) for (a, chunks), (k, _) in zip(again.kinds, kept.kinds))
    return replace(
        kept if share == 1 else again, **found, sliced_share=sliced / (found["layer_bytes"] or 1.0), kinds=kinds
    )


def unit_of_parts(units: Sequence[Unit]) -> Unit:
    """Context-parallel ranks that go through every layer together.

    They take what the slowest takes.  Their memory is that of the rank whose activations fill its GPU most.
    """
    slowest = max(units, key=lambda u: u.layer_f + u.layer_b)
    fullest = max(units, key=lambda u: u.layer_bytes / u.capacity_bytes)
    layers = ("layer_f", "layer_b", "attention_f", "attention_b", "pass_f", "pass_b")
    ends = ("embedding_f", "embedding_b", "head_f", "head_b")
    return replace(
        fullest,
        **{name: getattr(slowest, name) for name in layers},
        **{name: max(getattr(u, name) for u in units) for name in ends},
        kinds=tuple(
            (unit_of_parts([u.kinds[i][0] for u in units]), chunks) for i, (_, chunks) in enumerate(fullest.kinds)
        ),
    )
