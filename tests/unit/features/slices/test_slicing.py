"""Cutting batches, and counting the key-value chunks that a program holds."""

from types import SimpleNamespace

import pytest
import torch

from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import Setting
from megatron_het.features.documents.runtime import DocumentsFeature, DocumentStarts, of_microbatches, starts_of
from megatron_het.features.slices.runtime import SlicedSequences, cut_batch, most_held, passes_of
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.runtime.feature import Call, ForwardPass, Iteration, RuntimeFeature
from megatron_het.schedule import Kind, Shape, generate
from megatron_het.schedule.cutting import Cutting

CPU = torch.device("cpu")


def rank_program(stage: int, slices: int, chunks: int, forward_only: bool = False) -> RankProgram:
    shape = Shape.uniform(4, 3, slices=slices, chunks=chunks)
    program = generate("slimpipe", shape, forward_only=forward_only)
    ops = tuple(RankOp(op.kind, op.microbatch, op.slice, op.chunk, "") for op in program.ops[stage])
    counts = [sum(op.kind == Kind.BACKWARD and op.chunk == c for op in ops) for c in range(chunks)]
    return RankProgram(ops, 3, tuple(counts), frozenset())


@pytest.mark.parametrize("stage", range(4))
def test_live_slices_plain(stage: int) -> None:
    """SlimPipe holds n + 2(p - 1 - r) slices."""
    assert most_held(passes_of(rank_program(stage, 8, 1), 0)) == 8 + 2 * (3 - stage)


def test_live_slices_of_evaluation() -> None:
    assert most_held(passes_of(rank_program(0, 8, 1, forward_only=True), 0)) == 8


def test_live_slices_interleaved() -> None:
    held = [most_held(passes_of(rank_program(0, 8, 2), chunk)) for chunk in range(2)]
    assert 16 + 6 <= sum(held) <= 16 + 6 + 8 and min(held) >= 8


def test_cut_batch() -> None:
    tokens = torch.arange(24).view(2, 12)
    batch = {"tokens": tokens, "labels": tokens + 1, "attention_mask": torch.ones(2, 1, 12, 12), "max_seqlen": None}
    cut = cut_batch(batch, [(4, 8)])
    assert torch.equal(cut["tokens"], tokens[:, 4:8]) and cut["tokens"].is_contiguous()
    assert torch.equal(cut["labels"], tokens[:, 4:8] + 1)
    assert "attention_mask" not in cut and "max_seqlen" not in cut


def test_batch_is_read_once() -> None:
    args = SimpleNamespace(seq_length=12)
    program = RankProgram((), 2, (0,), frozenset())
    slicing = SlicedSequences(args, Cutting(12, 3), {False: program, True: program}, CPU)
    source = iter([{"tokens": torch.arange(12).view(1, 12) + 100 * m} for m in range(2)])
    seen = []
    for m in range(2):
        for j in range(3):
            op = RankOp(Kind.FORWARD, m, j, 0, "")
            with slicing.forward(op, forward_only=False):
                assert args.seq_length == 4
                seen.append(next(slicing.iterator(op, source))["tokens"])
            assert args.seq_length == 12
    assert torch.equal(torch.cat(seen, dim=1), torch.cat([torch.arange(12), torch.arange(12) + 100]).view(1, 24))
    with pytest.raises(StopIteration):
        next(source)


class Layer(torch.nn.Module):
    """A layer as one of Transformer Engine's: norm and projection in one module, its own core attention."""

    def __init__(self) -> None:
        super().__init__()
        attention = self.self_attention = torch.nn.Module()
        attention.config = SimpleNamespace(softmax_scale=0.5)
        attention.hidden_size_per_attention_head = 8
        attention.linear_qkv = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 24))
        attention.core_attention = torch.nn.Identity()


def chunk(layers: int) -> torch.nn.Module:
    model = torch.nn.Module()
    model.config = SimpleNamespace(apply_rope_fusion=True)
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
    return model


@pytest.mark.parametrize("at_once", [True, False])
def test_chunks_get_the_cache_of_their_place(at_once: bool) -> None:
    """Whether they are built together or one after the other."""
    args = SimpleNamespace(seq_length=32, attention_backend=SimpleNamespace(name="auto"))
    program = rank_program(0, 8, 2)
    slicing = SlicedSequences(args, Cutting(32, 8), {False: program}, CPU)
    models = [chunk(2), chunk(1)]
    keys = [list(model.state_dict()) for model in models]
    for part in [models] if at_once else [[model] for model in models]:
        slicing.attach(part)
    for place, model in enumerate(models):
        for layer in model.decoder.layers:
            assert layer.self_attention.core_attention.cache.slots == most_held(passes_of(program, place))
    assert [list(model.state_dict()) for model in models] == keys
    evaluated = slicing.forward(RankOp(Kind.FORWARD, 0, 7, 1, ""), forward_only=True)
    with evaluated:  # what the chunk's own layers hold is dropped
        cache = models[1].decoder.layers[0].self_attention.core_attention.cache
        for index in range(8):
            cache.append(0, index, torch.zeros(4, 1, 1, 8), torch.zeros(4, 1, 1, 8))
    slicing.check_empty()


def test_caches_have_room_for_slices_of_unequal_length() -> None:
    """From the beginning of an iteration, or once its documents are known."""
    args = SimpleNamespace(seq_length=30, attention_backend=SimpleNamespace(name="auto"))
    for documents in (None, SimpleNamespace(of=lambda microbatch: ((0,),), ends_states=False)):
        slicing, model = SlicedSequences(args, Cutting(30, 8), {False: rank_program(0, 8, 1)}, CPU), chunk(1)
        slicing.attach([model])
        slicing.documents = documents
        pool = model.decoder.layers[0].self_attention.core_attention.cache._pool
        slicing.begin(SimpleNamespace(), None)
        assert (pool._reserved > 30) == (documents is None)
        slicing.documents_known()
        assert pool._reserved > 30


def test_a_chunk_without_layers() -> None:
    args = SimpleNamespace(seq_length=32, attention_backend=SimpleNamespace(name="auto"))
    SlicedSequences(args, Cutting(32, 8), {False: rank_program(0, 8, 2)}, CPU).attach([chunk(0)])


def test_a_rank_without_data_reads_nothing() -> None:
    args = SimpleNamespace(seq_length=12)
    program = RankProgram((), 1, (0,), frozenset())
    slicing = SlicedSequences(args, Cutting(12, 3), {False: program, True: program}, CPU)
    op = RankOp(Kind.FORWARD, 0, 0, 0, "")
    with slicing.forward(op, forward_only=False):
        slicing.iterator(op, None)


@pytest.mark.parametrize(
    ("backend", "device", "kernel"),
    [
        ("flash", "cuda", "cuda-flash"),
        ("fused", "cuda", "cudnn"),
        ("auto", "cuda", "cudnn"),
        ("flash", "cpu", "cpu-flash"),
    ],
)
def test_kernel_of_the_device_that_weights_will_be_on(
    backend: str, device: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Transformer Engine the norms are still on the CPU when attention is replaced."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    args = SimpleNamespace(seq_length=32, attention_backend=SimpleNamespace(name=backend))
    model = chunk(2).bfloat16()
    slicing = SlicedSequences(args, Cutting(32, 8), {False: rank_program(1, 8, 1)}, torch.device(device))
    slicing.attach([model])
    for layer in model.decoder.layers:
        placed = layer.self_attention.core_attention
        assert (
            choose_kernel(
                Setting(device, torch.bfloat16, 8, (9, 0) if device == "cuda" else (0, 0)), placed._kernels
            ).name
            == kernel
        )
        assert placed.cache._in_line == (kernel == "cuda-flash")


def test_a_kernel_that_cannot_run_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    args = SimpleNamespace(seq_length=32, attention_backend=SimpleNamespace(name="flash"))
    slicing = SlicedSequences(args, Cutting(32, 8), {False: rank_program(1, 8, 1)}, torch.device("cuda"))
    with pytest.raises(ValueError, match="cuda-flash has no torch.float32"):
        slicing.attach([chunk(1)])


# Where documents begin: seen in positions, told to all ranks, and kept from the training script if it did not ask.

POSITIONS = torch.tensor([[3, 4, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5]])


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
