"""Breaks what is known of documents on purpose, inside a rank process."""

from typing import Any

from testing.probe import observe


def one_document(**options: Any) -> None:
    """Chunks that read no batch take a sequence for one document."""
    from megatron_het.features.documents.runtime import DocumentStarts

    original = DocumentStarts.exchange

    def exchange(self: Any, microbatches: int, sequences: Any, *more: Any) -> None:
        known = dict(self._starts)
        original(self, microbatches, sequences, *more)
        self._starts = {m: known.get(m, ((0,),) * sequences(m)) for m in range(microbatches)}

    DocumentStarts.exchange = exchange
    observe(**options)


def wide_window(**options: Any) -> None:
    """A query sees one token more than its window has."""
    from megatron_het.attention import core

    original = core._window_of

    def window_of(attention: Any) -> int | None:
        window = original(attention)
        return None if window is None else window + 1

    core._window_of = window_of
    observe(**options)


def other_ranks(**options: Any) -> None:
    """Attention takes the tokens of a rank for those of its places."""
    from megatron_het.attention import slice_attention

    original = slice_attention._by_rank

    def by_rank(sharing: Any, placed: Any, *more: Any) -> Any:
        return original(sharing, None, *more)

    slice_attention._by_rank = by_rank
    observe(**options)
