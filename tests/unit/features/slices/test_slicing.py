"""Cutting batches, and counting the key-value chunks that a program holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import Setting
from megatron_het.features.slices.runtime import SlicedSequences, cut_batch, most_held, passes_of
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.schedule.cutting import Cutting
from megatron_het.schedule.generators import generate
from megatron_het.schedule.ir import Kind, Shape

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
