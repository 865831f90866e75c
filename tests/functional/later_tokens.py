"""What the later tokens of packed documents are to stock Megatron, and mistakes about them, inside a rank process."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from testing.probe import observe


def within_documents(**options: Any) -> None:
    """Stock Megatron without Transformer Engine predicts as it does for packed sequences.

    A dense mask says which tokens see each other.  Megatron's own function moves tokens within documents, which it is
    told of here.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import multi_token_prediction

    forward, move = GPTModel.forward, multi_token_prediction.roll_tensor
    documents = SimpleNamespace(cu_seqlens_q=[0])

    def noting(self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        assert len(position_ids) == 1
        first = (position_ids[0] == 0).nonzero().flatten().tolist()
        documents.cu_seqlens_q = sorted({0, *first, position_ids.shape[1]})
        return forward(self, input_ids, position_ids, *more, **named)

    def moving(*given: Any, **named: Any) -> Any:
        return move(*given, **{**named, "packed_seq_params": documents})

    GPTModel.forward, multi_token_prediction.roll_tensor = noting, moving
    observe(**options)


def _with_parts(change: Callable[[Any], Any], options: dict[str, Any]) -> None:
    from megatron_het.features.mtp.runtime import LaterTokens

    original = LaterTokens.part
    LaterTokens.part = lambda self, take: change(original(self, take))  # type: ignore[method-assign]
    observe(**options)


def of_the_part(**options: Any) -> None:
    """The last token of a part has nothing after it, as if the sequence ended there."""

    def change(found: Any) -> Any:
        tokens, labels = found.tokens.clone(), found.labels.clone()
        tokens[..., -1] = labels[..., -1] = 0
        return replace(found, tokens=tokens, labels=labels)

    _with_parts(change, options)


def by_part(**options: Any) -> None:
    """A part's losses are divided by the tokens that count in it, as Megatron does."""

    def change(found: Any) -> Any:
        return replace(found, counts=torch.cat((found.counts[:1], found.masks.sum(dim=(1, 2)))))

    _with_parts(change, options)


def beyond_documents(**options: Any) -> None:
    """Predictions go on into the next document."""
    from megatron_het.features.mtp.runtime import LaterTokens

    original = LaterTokens.of.__func__

    def of(cls: Any, batch: Any, layers: int, *, are_packed: bool) -> LaterTokens:
        return original(cls, batch, layers, are_packed=False)

    LaterTokens.of = classmethod(of)
    observe(**options)
