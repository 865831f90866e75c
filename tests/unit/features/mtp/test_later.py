"""What layers for multi-token prediction read and predict, against Megatron's own function on whole sequences."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.multi_token_prediction import roll_tensor

from megatron_het.attention.places import take_blocks
from megatron_het.features.mtp.runtime import LaterTokens

_NAMES = {"tokens": "tokens", "positions": "position_ids", "labels": "labels", "masks": "loss_mask"}


def batch_of(lengths: list[list[int]]) -> dict[str, torch.Tensor]:
    """Random tokens of sequences that have documents of these lengths."""
    shape = len(lengths), sum(lengths[0])
    return {
        "tokens": torch.randint(1, 100, shape),
        "labels": torch.randint(1, 100, shape),
        "loss_mask": torch.randint(0, 2, shape).float(),
        "position_ids": torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]),
    }


def moved(tensor: torch.Tensor, times: int, lengths: list[int] | None) -> torch.Tensor:
    """What Megatron makes of one sequence ``[1, s]``, which has these documents, if they count."""
    ends = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    params = None if ends is None else SimpleNamespace(cu_seqlens_q=ends)
    for _ in range(times):
        tensor, _ = roll_tensor(tensor, shifts=-1, dims=-1, packed_seq_params=params)
    return tensor


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), layers=st.integers(1, 3), are_packed=st.booleans())
def test_as_megatron_moves_whole_sequences(lengths: list[int], layers: int, are_packed: bool) -> None:
    rows = [lengths, lengths[::-1]]
    batch = batch_of(rows)
    found = LaterTokens.of(batch, layers, are_packed=are_packed)
    for own, name in _NAMES.items():
        for depth in range(layers):
            for row, documents in enumerate(rows):
                expected = moved(batch[name][row : row + 1], depth + 1, documents if are_packed else None)
                assert torch.equal(getattr(found, own)[depth, row : row + 1], expected), (own, depth)
    assert found.counts[0] == batch["loss_mask"].sum()
    assert torch.equal(found.counts[1:], found.masks.sum(dim=(1, 2)))


def test_a_part_ends_with_what_the_next_one_begins_with() -> None:
    whole = LaterTokens.of(batch_of([[12]]), 2, are_packed=False)
    blocks = ((0, 3), (9, 12))
    part = whole.part(lambda tensor: take_blocks(tensor, blocks, dim=-1))
    assert part.tokens[0, 0, 2] == whole.tokens[0, 0, 2] == whole.tokens[1, 0, 1] != 0
    assert part.labels.shape == part.masks.shape == (2, 1, 6)
    assert part.counts is whole.counts  # a part counts for what it is of the microbatch


def test_labels_are_needed() -> None:
    from megatron_het.features.mtp.runtime import PartialPasses

    model: Any = SimpleNamespace(post_process=False)
    with pytest.raises(RuntimeError, match="no labels, which multi-token prediction needs"):
        PartialPasses()._end_in_losses(model, (), {}, torch.zeros(1))


def test_a_repeated_layer_keeps_the_keys_of_each_run() -> None:
    """Two slices through a layer that runs twice are as through two layers."""
    from megatron_het.attention.core import SliceCoreAttention, SliceParams

    torch.manual_seed(0)
    repeated, two = SliceCoreAttention(2, runs=2), [SliceCoreAttention(2) for _ in range(2)]
    for index in range(2):
        params = SliceParams.make(0, index, ((4 * index, 4 * index + 4),), 8)
        for run, alone in enumerate(two):
            query, key, value = torch.randn(3, 4, 1, 2, 8)
            found = repeated(query, key, value, packed_seq_params=replace(params, run=run))
            assert torch.equal(found, alone(query, key, value, packed_seq_params=params)), (index, run)
    assert [sum(len(s.chunks) for s in cache._sequences.values()) for cache in repeated.caches] == [2, 2]
