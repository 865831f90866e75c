"""Rows of a key-value pool: taken from both sides, given back, and what happens where free rows are scattered."""

import os
import random
import subprocess
import sys

import pytest
import torch

from megatron_het.attention.kv_cache import CacheError, KVCache
from megatron_het.attention.kv_pool import GradientTotals, KVPool, Part


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 1, 2, 4), torch.randn(count, 1, 2, 4)


def test_chunks_of_one_side_lie_next_to_each_other() -> None:
    pool = KVPool(1)
    pool.reserve(20)
    up = [pool.take(*rows(n), from_bottom=True) for n in (3, 4)]
    down = [pool.take(*rows(n), from_bottom=False) for n in (5, 2)]
    assert [place.at for place in (*up, *down)] == [0, 3, 15, 13]
    pool.give(up.pop())
    assert pool.take(*rows(6), from_bottom=True).at == 3
    with pytest.raises(CacheError, match="all 20 rows of the key-value pool"):
        pool.take(*rows(5), from_bottom=True)


def test_scattered_rows_are_enough() -> None:
    """A chunk that fits nowhere in the slab, though together there is room, has memory of its own."""
    pool = KVPool(1)
    pool.reserve(10)
    places = [pool.take(*rows(2), from_bottom=True) for _ in range(5)]
    pool.give(places[1])
    pool.give(places[3])
    key, value = rows(4)
    apart = pool.take(key, value, from_bottom=True)
    assert apart.at < 0 and torch.equal(apart.keys, key) and torch.equal(apart.values, value)
    held = pool.nbytes
    pool.give(apart)
    assert pool.nbytes < held


def test_a_larger_iteration_makes_the_pool_larger() -> None:
    pool = KVPool(2)
    place = pool.take(*rows(3), from_bottom=True)
    small = pool.nbytes
    with pytest.raises(CacheError, match="in use"):
        pool.reserve(12)
    pool.give(place)
    pool.reserve(12)
    pool.take(*rows(3), from_bottom=True)
    assert pool.nbytes == 2 * small


@pytest.mark.parametrize("in_line", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_prefixes_of_slices_of_any_length(seed: int, in_line: bool) -> None:
    """Two microbatches in turns, as in 1F1B: every prefix is all earlier tokens, whatever the pool looks like."""
    rng = random.Random(seed)
    lengths = [[rng.randint(1, 9) for _ in range(5)] for _ in range(4)]
    cache, kept = KVCache(1, in_line=in_line), {}
    cache.reserve(sum(max(sum(a) + sum(b) for b in lengths) for a in lengths))
    for microbatch, own in enumerate(lengths):
        kept[microbatch] = [rows(n) for n in own]
        for index, (key, value) in enumerate(kept[microbatch]):
            cache.append(microbatch, index, key, value)
            runs = cache.prefix(microbatch, index + 1)
            order = [part for run in runs for part in run.parts]
            assert sorted(order) == [(i, 0, n) for i, n in enumerate(own[: index + 1])]
            for run in runs:
                wanted = [kept[microbatch][piece][0][lo:hi] for piece, lo, hi in run.parts]
                assert torch.equal(run.keys, torch.cat(wanted))
            check_line(cache, kept[microbatch], microbatch, index)
            earlier = index // 2
            begin, end = sum(own[:earlier]), sum(own[: index + 1])
            wanted = [value for _, value in kept[microbatch][earlier : index + 1]]
            assert torch.equal(cache.in_order(microbatch, begin, end).values, torch.cat(wanted))
            if microbatch and index < len(lengths[microbatch - 1]):
                last = len(lengths[microbatch - 1]) - 1 - index
                check_line(cache, kept[microbatch - 1], microbatch - 1, last)
                cache.release(microbatch - 1, last)
    cache.drop(len(lengths) - 1)
    cache.check_empty()


def check_line(cache: KVCache, kept: list[tuple[torch.Tensor, torch.Tensor]], microbatch: int, index: int) -> bool:
    """Whether a slice and those before it are one view; it is looked into."""
    line = cache.line(microbatch, index)
    if line is None:
        return False
    whole, before = line
    assert whole.parts[-1][0] == index and sorted(piece for piece, _, _ in whole.parts) == list(range(index + 1))
    for run in (whole, before) if before is not None else (whole,):
        for which, tensor in enumerate((run.keys, run.values)):
            assert torch.equal(tensor, torch.cat([kept[piece][which] for piece, _, _ in run.parts]))
    assert (before is None) == (index == 0) or before.parts == whole.parts[:-1]
    return True


def test_equal_slices_are_in_line_on_both_sides() -> None:
    """As 1F1B over slices runs them, without a row more than without lines; only then are they not."""
    n, ahead = 4, 2
    cache, kept = KVCache(n + ahead, in_line=True), {}
    forwards = [(m, i) for m in range(4) for i in range(n)]
    backwards = [(m, i) for m in range(4) for i in reversed(range(n))]
    found = 0
    for step, (microbatch, index) in enumerate(forwards):
        kept.setdefault(microbatch, []).append(rows(3))
        cache.append(microbatch, index, *kept[microbatch][index])
        found += check_line(cache, kept[microbatch], microbatch, index)
        if step >= n + ahead - 1:
            done, last = backwards[step - (n + ahead - 1)]
            found += check_line(cache, kept[done], done, last)
            cache.release(done, last)
    for done, last in backwards[len(forwards) - (n + ahead - 1) :]:
        found += check_line(cache, kept[done], done, last)
        cache.release(done, last)
    cache.check_empty()
    assert found == 2 * len(forwards)
    assert cache.pool_bytes == (n + ahead) * sum(t.nbytes for t in kept[0][0])


def test_what_no_later_slice_reads_is_not_held() -> None:
    cache = KVCache(1)
    cache.reserve(8)
    cache.append(0, 0, *rows(6), unread=4)
    cache.append(0, 1, *rows(6), unread=0)
    assert [run.keys.shape[0] for run in cache.runs(0, 4, 12)] == [8]
    with pytest.raises(CacheError, match="tokens 3 to 3 are not held"):
        cache.runs(0, 3, 12)


# Gradients of cached keys and values: however they come, each chunk gets its sum.


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


def test_the_fused_addition() -> None:
    """Triton's interpreter runs the kernel on the CPU; a process of its own, because it is chosen at the import."""
    lines = """
import torch
from megatron_het.attention.fused_addition import add_pair
torch.manual_seed(0)
for dtype, more, error in ((torch.float32, torch.bfloat16, 1e-6), (torch.bfloat16, torch.float32, 2**-7)):
    for sizes in ((1500, 700), (1, 5000), (1024, 0)):
        pair = [torch.randn(size).to(dtype) for size in sizes]
        added = [torch.randn(size).to(more) for size in sizes]
        wanted = [(a.double() + b.double()) for a, b in zip(pair, added)]
        add_pair(*pair, *added)
        for a, b in zip(pair, wanted):
            torch.testing.assert_close(a.double(), b, rtol=error, atol=1e-6)
from megatron_het.attention import fused_addition, kv_pool
seen = []  # the trial compiles the kernel of training, whose sizes and addresses are multiples of 16
fused_addition.add_pair = lambda *given: (seen.extend(given), add_pair(*given))
for dtypes in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
    assert kv_pool.fused_addition(torch.device("cpu"), *dtypes) is not None
assert all(tensor.numel() % 16 == tensor.data_ptr() % 16 == 0 for tensor in seen)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", lines], check=True, env=environment, timeout=300)
