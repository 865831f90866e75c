"""Documents, sliding windows and softmax offsets: slices against attention written out with a mask."""

from __future__ import annotations

import pytest
import torch
from attention_helpers import CPU, SCALE, masked_attention, relative, seen

from megatron_het.attention.calls import Form, Reach, blocks_of
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.places import SliceContext
from megatron_het.attention.slice_attention import slice_attention
from megatron_het.schedule.cutting import Starts

_TOKENS = 24
_DOCUMENTS: dict[str, tuple[Starts, ...] | None] = {
    "one document": None,
    "alike": ((0, 5, 6, 17), (0, 5, 6, 17)),
    "of its own": ((0, 1, 11, 12, 20), (0, 23)),
    "ends with a slice": ((0, 6, 12), (0, 18)),
}


@pytest.mark.parametrize("tokens", [24, 12, 6, 4, 1])
@pytest.mark.parametrize("window", [None, 0, 1, 2, 5, 7, 11, 12, 23, 100])
@pytest.mark.parametrize("starts", [(0,), (0, 5, 6, 17), (0, 12), (0, 1, 2, 3, 23), (0, 4, 8, 20)])
def test_blocks_are_what_is_seen(tokens: int, window: int | None, starts: Starts) -> None:
    """Every pair that is seen is in one block, no other pair is in any, and squares keep to one slice."""
    count = torch.zeros(_TOKENS, _TOKENS, dtype=torch.int)
    for first in range(0, _TOKENS, tokens):
        opened: set[int] = set()
        keys = tuple((k, k + tokens) for k in range(0, _TOKENS, tokens))
        for block in blocks_of((first, first + tokens), keys, starts, window):
            (a, b), (c, d) = block.rows, block.keys
            part = torch.ones(b - a, d - c, dtype=torch.int)
            if block.form is not Form.FULL:
                assert b - a == d - c and c // tokens == (d - 1) // tokens
                part = part.tril() if block.form is Form.CAUSAL else part.triu()
            count[a:b, c:d] += part
            if block.form is Form.CAUSAL:
                opened |= set(range(a, b))
            assert set(range(a, b)) <= opened and first <= a < b <= first + tokens and c < d
    assert torch.equal(count, seen(starts, window, _TOKENS).int())


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("documents", list(_DOCUMENTS))
@pytest.mark.parametrize("slices", [1, 4, 12])
def test_equals_attention_with_a_mask(slices: int, documents: str, window: int | None, sink: bool) -> None:
    """Outputs and all gradients, two microbatches at a time, grouped queries."""
    torch.manual_seed(slices)
    reach = Reach(_DOCUMENTS[documents], window)
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_() if sink else None
    cache, runs = KVCache(2 * slices), []
    for microbatch in range(2):
        whole = [torch.randn(_TOKENS, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4)]
        leaves = [[p.clone().requires_grad_() for p in t.chunk(slices)] for t in whole[:3]]
        outs = [
            slice_attention(
                *(leaf[i] for leaf in leaves),
                SliceContext(cache=cache, kernel=CPU, microbatch=microbatch, index=i, scale=SCALE, reach=reach),
                sinks,
            )
            for i in range(slices)
        ]
        runs.append((whole, leaves, outs))
    found, wanted = [], []
    for whole, leaves, outs in runs:
        for out, grad in reversed(list(zip(outs, whole[3].chunk(slices), strict=True))):
            out.backward(grad)
        found += [torch.cat(outs).detach(), *(torch.cat([p.grad for p in leaf]) for leaf in leaves)]
    if sinks is not None:
        found.append(sinks.grad.clone())
        sinks.grad = None
    for whole, _, _ in runs:
        inputs = [t.clone().requires_grad_() for t in whole[:3]]
        out = masked_attention(*inputs, reach, sinks)
        out.backward(whole[3])
        wanted += [out.detach(), *(t.grad for t in inputs)]
    if sinks is not None:
        wanted.append(sinks.grad)
    assert [relative(f, w) for f, w in zip(found, wanted, strict=True)] == pytest.approx([0] * len(found), abs=1e-13)
    cache.check_empty()


def test_no_gradients_are_kept_for_what_no_later_slice_reaches() -> None:
    """Documents that end with their slice leave nothing in the cache but keys and values."""
    tensors = [torch.randn(6, 1, 2, 16) for _ in range(4)]

    def held(reach: Reach) -> int:
        cache = KVCache(4)
        slabs = 2
        outs = [
            slice_attention(
                *(t.clone().requires_grad_() for t in tensors[:3]),
                SliceContext(cache=cache, kernel=CPU, microbatch=0, index=i, scale=SCALE, reach=reach),
            )
            for i in range(4)
        ]
        outs[3].backward(tensors[3])
        return len(cache.tensors()) - slabs

    assert held(Reach()) == 2 * 3
    assert held(Reach(((0, 6, 12, 18),))) == 0
    assert held(Reach(((0, 9, 12),))) == 2  # the third slice, of which the document of the fourth is
    assert held(Reach(None, 6)) == 2


def test_a_window_that_covers_everything_is_none() -> None:
    assert blocks_of((6, 12), ((0, 6), (6, 12)), (0,), 100) == blocks_of((6, 12), ((0, 6), (6, 12)), (0,))
