"""Gradients of cached keys and values: however they come, each chunk gets its sum."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron_het.attention.kv_pool import GradientTotals, Part

ROWS, BATCH = (2, 3, 4), 2
Runs = list[tuple[tuple[Part, ...], slice | None]]
WHOLE: tuple[Part, ...] = tuple((piece, 0, rows) for piece, rows in enumerate(ROWS))


@pytest.mark.parametrize(
    "runs",
    [
        [(WHOLE, None), (WHOLE[:2], None), (WHOLE[:1], None)],
        [(WHOLE[::-1], None), (WHOLE[1::-1], None), (WHOLE[:1], None)],  # grown from the other end
        [(WHOLE, None), (WHOLE[1:2], None), (WHOLE[1:], None)],
        [(((0, 1, 2), *WHOLE[1:]), None), (WHOLE, None), (WHOLE[:2], None)],  # a part was given away first
        [(WHOLE, slice(1, 2)), (WHOLE, None), (WHOLE[:1], slice(0, 1))],
    ],
    ids=["up", "down", "middle", "given", "sequences"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(runs: Runs, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    totals = GradientTotals(BATCH, ROWS.__getitem__)
    wanted = [[torch.zeros(rows, BATCH, 4) for _ in range(2)] for rows in ROWS]
    for parts, sequences in runs:
        batch = sequences or slice(0, BATCH)
        count = sum(hi - lo for _, lo, hi in parts)
        pair = [torch.randn(count, batch.stop - batch.start, 4).to(dtype) for _ in range(2)]
        for which, whole in enumerate(pair):
            for (piece, lo, hi), part in zip(parts, whole.split([hi - lo for _, lo, hi in parts]), strict=True):
                wanted[piece][which][lo:hi, batch] += part
        totals.add(parts, *(part.clone() for part in pair), sequences)
    for piece in reversed(range(len(ROWS))):
        found = totals.take(piece)
        assert found is not None and found[0].dtype == torch.float32
        for a, b in zip(found, wanted[piece], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert totals.take(0) is None and not totals.tensors()


def test_a_run_is_added_to_with_one_call_for_keys() -> None:
    totals = GradientTotals(BATCH, ROWS.__getitem__)
    for parts in (WHOLE, WHOLE[:2]):
        totals.add(parts, *(torch.ones(sum(ROWS[: len(parts)]), BATCH, 4) for _ in range(2)), None)
    found = [totals.take(piece) for piece in range(3)]
    assert len({pair[0].untyped_storage().data_ptr() for pair in found if pair is not None}) == 1


@pytest.mark.parametrize(("dtype", "more"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_fused_addition(dtype: torch.dtype, more: torch.dtype) -> None:
    """Triton's interpreter runs the kernel on the CPU; a process of its own, because it is chosen at the import."""
    lines = f"""
import torch
from megatron_het.attention.fused_addition import add_pair
torch.manual_seed(0)
for sizes in ((1500, 700), (1, 5000), (1024, 0)):
    pair = [torch.randn(size).to({dtype}) for size in sizes]
    added = [torch.randn(size).to({more}) for size in sizes]
    wanted = [(a.double() + b.double()) for a, b in zip(pair, added)]
    add_pair(*pair, *added)
    for a, b in zip(pair, wanted):
        torch.testing.assert_close(a.double(), b, rtol={2**-7 if dtype is torch.bfloat16 else 1e-6}, atol=1e-6)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", lines], check=True, env=environment, timeout=300)
