"""Positions that attention applies itself equal Megatron's, with their gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_helpers import CPU, SCALE, inputs
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megatron_het.attention.calls import Reach
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.places import Rotations, SliceContext
from megatron_het.attention.slice_attention import slice_attention

SLICES = 3


def rotations(interleaved: bool, dtype: torch.dtype, factor: float = 1.0) -> Rotations:
    return Rotations(SimpleNamespace(params_dtype=dtype, rotary_interleaved=interleaved), factor)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [16, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_equals_megatron(interleaved: bool, channels: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    table, grad = torch.randn(12, 1, 1, channels, dtype=torch.float64), torch.randn(5, 2, 3, 16, dtype=dtype)
    fused = torch.randn(5, 2, 3, 20, dtype=dtype, requires_grad=True)
    source = fused[..., 2:18]  # a view, as those of the fused projection are
    wanted = _apply_rotary_pos_emb_bshd(source, table[4:9], rotary_interleaved=interleaved, mscale=1.5)
    wanted.backward(grad)
    rotation = rotations(interleaved, dtype, 1.5).part(table, ((4, 9),))
    assert rotation is not None and fused.grad is not None
    with torch.no_grad():
        found, back = rotation.turn(source), rotation.turn_back(grad)
    assert found.is_contiguous() and found.dtype == dtype
    torch.testing.assert_close(found, wanted.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(back, fused.grad[..., 2:18], rtol=tolerance, atol=tolerance)


def test_cosines_are_made_once_per_table() -> None:
    made, table = rotations(False, torch.float32), torch.randn(6, 1, 1, 8)
    first, again, other = (made.part(t, ((1, 3),)) for t in (table, table, table.clone()))
    assert first is not None and again is not None and other is not None
    assert first.cos.data_ptr() == again.cos.data_ptr() != other.cos.data_ptr()
    assert made.part(torch.randn(6, 2, 1, 8), ((1, 3),)) is None  # angles of each sequence


def run(tensors: list[torch.Tensor], table: torch.Tensor, inside: bool, reach: Reach) -> list[torch.Tensor]:
    """Gradients of queries, keys and values with positions applied before attention or by it."""
    made, cache, outs = rotations(False, torch.float64), KVCache(SLICES), []
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    for index in range(SLICES):
        rows = slice(8 * index, 8 * index + 8)
        query, key, value = (t[rows] for t in leaves)
        rotation = made.part(table, ((rows.start, rows.stop),))
        if not inside:
            query, key = (_apply_rotary_pos_emb_bshd(t, table[rows]) for t in (query, key))
        place: dict[str, Any] = {"cache": cache, "kernel": CPU, "microbatch": 0, "index": index, "scale": SCALE}
        outs.append(
            slice_attention(
                query, key, value, SliceContext(reach=reach, rotation=rotation if inside else None, **place)
            )
        )
    for out, grad in reversed(list(zip(outs, tensors[3].chunk(SLICES), strict=True))):
        out.backward(grad, retain_graph=True)
    cache.check_empty()
    return [torch.cat(outs).detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("reach", [Reach(), Reach(window_tokens=9, length=24)], ids=["all", "window"])
def test_attention_rotates(reach: Reach) -> None:
    tensors, table = inputs(SLICES, 4, 2, torch.float64), torch.randn(24, 1, 1, 16, dtype=torch.float64)
    for found, wanted in zip(run(tensors, table, True, reach), run(tensors, table, False, reach), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
