"""Where documents begin: seen in positions, told to all ranks, and kept from the training script if it did not ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_het.features.documents.runtime import DocumentsFeature, DocumentStarts, of_microbatches, starts_of
from megatron_het.features.slices.runtime import SlicedSequences
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.runtime.feature import Call, ForwardPass, Iteration, RuntimeFeature
from megatron_het.schedule.cutting import Cutting
from megatron_het.schedule.kinds import Kind

CPU = torch.device("cpu")
POSITIONS = torch.tensor([[3, 4, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5]])


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A world of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_document_begins_where_a_position_is_0() -> None:
    assert starts_of(POSITIONS) == ((0, 2, 4, 5), (0,))


@pytest.mark.parametrize("keeps_positions", [True, False])
def test_the_script_sees_the_positions_that_it_asked_for(keeps_positions: bool) -> None:
    starts = DocumentStarts(keeps_positions)
    seen = starts.note(1, {"tokens": POSITIONS, "position_ids": POSITIONS})
    wanted = POSITIONS if keeps_positions else torch.arange(6).expand(2, 6)
    assert torch.equal(seen["position_ids"], wanted) and torch.equal(seen["tokens"], POSITIONS)
    assert starts.of(1) == ((0, 2, 4, 5), (0,))


def test_a_batch_without_positions_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no position_ids \[b, s\].*it has labels, tokens"):
        DocumentStarts(True).note(0, {"tokens": POSITIONS, "labels": POSITIONS})


def test_all_ranks_know_all_microbatches(alone: None) -> None:
    """Also of microbatches of different sizes."""
    starts = DocumentStarts(True)
    starts.note(0, {"position_ids": POSITIONS})
    starts.note(1, {"position_ids": POSITIONS[:1]})
    starts.exchange(2, lambda m: 2 - m, 6, CPU)
    assert [starts.of(0), starts.of(1)] == [((0, 2, 4, 5), (0,)), ((0, 2, 4, 5),)]


def test_a_feature_reads_ahead_and_restores_the_flags(alone: None) -> None:
    args = SimpleNamespace(seq_length=6, reset_position_ids=False, dataloader_inter_document_masking=True)
    ops = [RankOp(Kind.FORWARD, m, j, c, "") for m in range(2) for c in range(2) for j in range(3)]
    program = RankProgram(tuple(ops), 2, (0, 0), frozenset())
    sequences = SlicedSequences(args, Cutting(6, 3), {False: program, True: program}, CPU)
    feature = DocumentsFeature(args, sequences, None, 0, {False: program, True: program})
    assert args.reset_position_ids
    source = iter([{"position_ids": POSITIONS + 0, "cu_seqlens": torch.zeros(2, 7)}] * 2)
    call = Call(None, [source, None], [], None, 2, 2, 8, lambda m: 2, args, torch.float32, CPU, False, False)  # type: ignore[arg-type]
    feature.begin(call, Iteration())
    assert next(source, None) is None  # both microbatches, once
    forward = ForwardPass(ops[1], None, lambda: None, None, ends_in_loss=False)
    with feature.around_forward(forward, call), sequences.forward(ops[1], forward_only=False):
        assert not args.dataloader_inter_document_masking
        params = sequences._current.params
        assert params is not None and params.starts == ((0, 2, 4, 5), (0,))
        (batch,) = sequences.iterator(ops[1], None)
        assert torch.equal(batch["position_ids"], POSITIONS[:, 2:4]) and "cu_seqlens" not in batch
    assert args.dataloader_inter_document_masking
    feature.close()
    assert not args.reset_position_ids
    assert isinstance(feature._whole, RuntimeFeature)


def test_the_loss_of_conversations_is_a_mean_over_microbatches() -> None:
    """However many tokens count in each, as Megatron evaluates them."""
    pairs = [torch.tensor([6.0, 2.0]), torch.tensor([4.0, 4.0]), torch.tensor([0.0, 0.0])]
    found = of_microbatches([{"loss": pair} for pair in pairs], [0, 1, 2])
    assert torch.stack([entry["loss"] for entry in found]).sum(dim=0).tolist() == [3 + 1 + 0, 3]


def test_the_loss_of_a_microbatch_in_slices_is_that_of_its_tokens() -> None:
    """Slices have different numbers of tokens that count, and the passes of microbatches may alternate."""
    entries = [
        {"loss": torch.tensor([float(a), b]), "mean": torch.tensor(a)} for a, b in ((6, 2), (1, 1), (0, 0), (5, 3))
    ]
    found = of_microbatches(entries, [0, 1, 0, 1])
    assert [entry["loss"].tolist() for entry in found] == [[6 / 2, 1], [6 / 4, 1]]
    assert [entry["mean"].tolist() for entry in found] == [[3], [3]]
