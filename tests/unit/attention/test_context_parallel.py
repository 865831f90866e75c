"""Commuted context parallelism against full causal attention; the ranks are threads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_helpers import (
    CPU,
    SCALE,
    WAIT_S,
    InThread,
    Meeting,
    Sliced,
    full_attention,
    inputs,
    masked_attention,
    relative,
)

from megatron_het.attention.calls import Reach
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.places import UNLIMITED, SliceContext, TokenGradient, pack, take_blocks, unpack
from megatron_het.attention.slice_attention import slice_attention
from megatron_het.features.context_exchange.helper import AttentionShape, attend, attend_backward
from megatron_het.plan.placement import DocumentPlacing, Placed, part_tokens, token_blocks
from megatron_het.schedule.cutting import Starts, documents_in

Shares = tuple[int, ...]


def local(tensor: torch.Tensor, rank: int, shares: Shares, reach: Reach = UNLIMITED, index: int = 0) -> torch.Tensor:
    placed = token_blocks(shares, tensor.shape[0]) if reach.placed is None else reach.placed.by_slice[index]
    return take_blocks(tensor, placed[rank], dim=0)


def run_rank(
    parallel: InThread | None, tensors: list[torch.Tensor], n: int, shares: Shares, reach: Reach = UNLIMITED
) -> list[list[torch.Tensor]]:
    rank = 0 if parallel is None else parallel.rank
    cache = KVCache(n)

    def own(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [local(part, rank, shares, reach, i) for i, part in enumerate(tensor.chunk(n))]

    leaves = [[part.clone().requires_grad_() for part in own(t)] for t in tensors[:3]]
    place = {"cache": cache, "kernel": CPU, "microbatch": 0, "scale": SCALE, "parallel": parallel, "reach": reach}
    outs = [slice_attention(*(t[i] for t in leaves), SliceContext(index=i, **place)) for i in range(n)]
    for i in reversed(range(n)):
        outs[i].backward(own(tensors[3])[i])
    cache.check_empty()
    return [[out.detach() for out in outs], *([p.grad for p in leaf] for leaf in leaves)]


def ranks_of(tokens: Shares) -> list[InThread | None]:
    """The members of one group; nobody where there is one rank."""
    meeting = Meeting(len(tokens))
    return [InThread(meeting, rank, tokens) if len(tokens) > 1 else None for rank in range(len(tokens))]


def worst(tensors: list[torch.Tensor], n: int, shares: Shares, reach: Reach = UNLIMITED) -> float:
    """How far outputs and gradients of any rank are from those of one process."""
    whole = [t.to(torch.float64, copy=True).requires_grad_() for t in tensors[:3]]
    wanted = masked_attention(*whole, reach) if reach.is_limited else full_attention(*whole)
    wanted.backward(tensors[3].double())
    tokens = tuple(map(part_tokens, token_blocks(shares, tensors[0].shape[0] // n)))
    assert [t * sum(shares) for t in tokens] == [sum(tokens) * share for share in shares]
    with ThreadPoolExecutor(len(shares)) as pool:
        runs = [pool.submit(run_rank, each, tensors, n, shares, reach) for each in ranks_of(tokens)]
        found = [future.result(timeout=2 * WAIT_S) for future in runs]
    errors = []
    for which, reference in enumerate([wanted.detach(), *(w.grad for w in whole)]):
        for rank, results in enumerate(found):
            expected = torch.cat([local(p, rank, shares, reach, i) for i, p in enumerate(reference.chunk(n))])
            errors.append(relative(torch.cat(results[which]), expected))
    return max(errors)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    ("shares", "n", "groups"),
    [((1, 1), 1, 2), ((1, 1), 3, 1), ((1,) * 4, 2, 4), ((3, 1), 2, 2), ((1, 3), 1, 1), ((1, 2, 1), 2, 4)],
)
def test_exact(shares: Shares, n: int, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    assert worst(inputs(n, 4, groups, dtype), n, shares) < tolerance


@pytest.mark.parametrize("window", [None, 5, 13])
@pytest.mark.parametrize("starts", [None, ((0, 3, 17, 18, 40), (0, 21)), ((0, 16, 32), (0, 16, 32))])
@pytest.mark.parametrize(("shares", "n"), [((1, 1), 1), ((1, 1), 3), ((1, 2, 1), 2), ((1, 1, 1, 1), 2)])
def test_documents_and_windows(shares: Shares, n: int, starts: tuple[Starts, ...] | None, window: int | None) -> None:
    """A rank attends for the others to what their queries reach of its keys, and to nothing else."""
    tensors = [torch.randn(48, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    assert worst(tensors, n, shares, Reach(starts, window, 48)) < 1e-13


@pytest.mark.parametrize(
    ("starts", "share"),
    [
        (None, 1.0),
        (((0, 12, 24, 36), (0, 6, 12, 36)), 0.0),  # every document is on one rank: blocks 0 and 3, or 1 and 2
        (((0, 12, 30), (0, 12, 36)), 0.25),  # the tokens 36 to 48 see those of another rank
        (((0, 12, 30), (0, 12, 40)), 0.25),  # in both sequences
        (((0, 12, 30, 40), (0, 12, 36, 40)), 4 / 48),
    ],
)
def test_only_documents_of_several_ranks_travel(starts: tuple[Starts, ...] | None, share: float) -> None:
    """The size of context parallelism is that of each document: how many ranks have tokens of it."""
    tensors = [torch.randn(48, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    members = ranks_of((24, 24))
    with ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(run_rank, each, tensors, 1, (1, 1), Reach(starts, None, 48)) for each in members]:
            run.result(timeout=2 * WAIT_S)
    rows = 48 * 2 * 4 * (16 * 6 + 2) * 8  # queries and outputs, then both with gradients; two log-sum-exps
    assert sum(each.sent for each in members) == share * rows


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("starts", [(0, 3, 17, 18, 40), (0, 2, 4, 9, 11, 13, 30), (0,)])
@pytest.mark.parametrize(
    ("widest", "shares", "n"),
    [((1, 1), (1, 1), 1), ((1, 2, 1), (1, 2, 1), 2), ((1,) * 4, (1,) * 4, 2), ((1,) * 4, (3, 1), 2), ((2, 1), (1,), 2)],
)
def test_whole_documents(widest: Shares, shares: Shares, n: int, starts: Starts, window: int | None) -> None:
    """A rank attends right to whatever it holds, also where another replica's ranks say what that is."""
    tensors = [torch.randn(48, 1, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    placing = DocumentPlacing(widest, 1, shares, 1)
    slices = [(first, documents_in((first, first + 48 // n), starts)) for first in range(0, 48, 48 // n)]
    pieces = [[(lo - first, hi - first) for lo, hi in documents] for first, documents in slices]
    placed = Placed([placing.blocks(each, 100.0) for each in pieces])
    assert worst(tensors, n, shares, Reach((starts,), window, 48, placed)) < 1e-13


# Slice attention of which other devices compute a part, with the peer in this process.

SHAPE = AttentionShape(8, 2, 4, 2, 16, torch.float64, torch.device("cpu"))


class Peer:
    """The helper of one slice: gets messages as a real one does, keys and values in pieces."""

    is_active = True

    def __init__(self, cache: KVCache, given: list[tuple[int, int]], pieces: list[tuple[int, int]]) -> None:
        self.cache, self.given, self.pieces = cache, given, pieces
        self.answers: list[torch.Tensor] = []
        self.calls: list[str] = []

    def parts(self, start: int, stop: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for first, end in sorted(self.pieces):
            lo, hi = max(first, start), min(end, stop)
            if lo < hi:
                tensor = torch.full((2, *SHAPE.keys(hi - lo)), torch.nan, dtype=SHAPE.dtype)
                self.cache.copy_tokens(0, lo, hi, tensor)
                found.append((tensor[0], tensor[1]))
        return found

    def begin_forward(self, query: torch.Tensor) -> tuple[int, int]:
        self.calls.append("forward")
        (got,) = unpack(pack(query), SHAPE.forward_query())
        for start, stop in self.given:
            out, lse = attend(got, self.parts(start, stop), CPU, SCALE)
            self.answers.append(pack(lse, out))
        return self.given[0][0], self.given[-1][1]

    def help(self, kernel: object, scale: float) -> None:
        self.calls.append("help")

    def end_forward(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        answers, self.answers = self.answers, []
        for answer in answers:
            lse, out = unpack(answer, SHAPE.forward_result())
            yield out, lse

    def begin_backward(
        self, grad: torch.Tensor, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[int, int]:
        self.calls.append("backward")
        got_lse, *got = unpack(pack(lse, grad, query, out), SHAPE.backward_query())
        for start, stop in self.given:
            self.answers.append(pack(*attend_backward((*got, got_lse), self.parts(start, stop), CPU, SCALE)))
        return self.given[0][0], self.given[-1][1]

    def end_backward(self) -> Iterator[tuple[torch.Tensor, list[TokenGradient]]]:
        answers, self.answers = self.answers, []
        for (start, stop), answer in zip(self.given, answers, strict=True):
            dq, dk, dv = unpack(answer, SHAPE.backward_result(stop - start))
            yield dq, [(start, stop, dk, dv)]


@pytest.mark.parametrize(
    ("given", "pieces"),
    [
        ([(0, 8)], [(0, 8)]),
        ([(0, 4)], [(0, 4)]),
        ([(0, 12)], [(8, 16), (0, 8)]),
        ([(0, 20), (20, 24)], [(0, 4), (4, 24)]),
        ([(0, 2), (2, 13)], [(0, 24)]),
    ],
)
@pytest.mark.parametrize("grows_down", [False, True])
def test_exact_of_exchange(given: list[tuple[int, int]], pieces: list[tuple[int, int]], grows_down: bool) -> None:
    """Slice 3 gives tokens away, in both directions; one to several helpers, in parts of slices."""
    n = 4
    tensors = inputs(n, 4, 2, torch.float64)
    cache = KVCache(n)
    if grows_down:  # the pool's other end
        cache.append(9, 0, *(torch.zeros(SHAPE.keys(8), dtype=SHAPE.dtype) for _ in range(2)))
        cache.drop(9)
    run = Sliced(cache, tensors, n)
    for i in range(3):
        run.forward(i)
    peer = Peer(cache, given, pieces)
    run.forward(3, exchange=peer)
    for i in reversed(range(n)):
        run.backward(i)
    assert max(run.errors(tensors)) < 1e-13
    assert peer.calls == ["forward", "help", "backward", "help"]
    cache.check_empty()


def test_a_recomputed_forward_exchanges_once() -> None:
    n = 2
    tensors = inputs(n, 4, 2, torch.float64)
    cache = KVCache(n)
    run = Sliced(cache, tensors, n)
    run.forward(0)
    peer = Peer(cache, [(0, 8)], [(0, 8)])
    run.forward(1, again=True, exchange=peer)
    run.backward(1)
    run.backward(0)
    assert max(run.errors(tensors)) < 1e-13
    assert peer.calls == ["forward", "help", "backward", "help"]


def test_messages_are_views_of_bytes() -> None:
    parts = [((2, 3), torch.float32), ((5,), torch.bfloat16)]
    tensors = [torch.randn(2, 3), torch.randn(5).bfloat16()]
    message = pack(*tensors)
    assert message.dtype == torch.uint8 and message.shape == SHAPE.message(parts).shape == (34,)
    assert all(torch.equal(a, b) for a, b in zip(unpack(message, parts), tensors, strict=True))
