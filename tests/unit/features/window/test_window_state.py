"""Optimizer state of a ministage: on the host between updates, and updates that are taken back."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_het.features.window.chunk import WindowUse
from megatron_het.features.window.state import Entry, OffloadedState, UndoLog, moments


def parts() -> tuple[list[Entry], torch.optim.Adam, Any]:
    """Two main parameters in one bucket, with a gradient."""
    torch.manual_seed(0)
    bucket = SimpleNamespace(shard=torch.randn(6), gradient=torch.randn(6))
    mains = [torch.nn.Parameter(bucket.shard[:4].clone()), torch.nn.Parameter(bucket.shard[4:].clone())]
    entries = [Entry(mains[0], bucket, 0, 4, 0, False), Entry(mains[1], bucket, 4, 6, 0, False)]
    return entries, torch.optim.Adam(mains, lr=0.1), bucket


def attach(entries: list[Entry]) -> None:
    for entry in entries:
        entry.main.grad = entry.of(entry.bucket.gradient).clone()


def snapshot(entries: list[Entry], inner: torch.optim.Adam) -> list[Any]:
    return [(e.main.detach().clone(), {k: v.clone() for k, v in inner.state.get(e.main, {}).items()}) for e in entries]


def same(first: list[Any], second: list[Any]) -> bool:
    return all(
        torch.equal(a, b) and s.keys() == t.keys() and all(torch.equal(s[k], t[k]) for k in s)
        for (a, s), (b, t) in zip(first, second, strict=True)
    )


def test_state_on_the_host_takes_no_device_memory_and_steps_alike() -> None:
    entries, inner, _ = parts()
    others, plain, _ = parts()
    use = WindowUse()
    state = OffloadedState(entries, inner, use)
    state.store()
    for _ in range(3):
        assert all(e.main.untyped_storage().size() == 0 for e in entries)
        assert all(t.untyped_storage().size() == 0 for e in entries for t in moments(inner, e.main))
        assert use.held_bytes["optimizer"] == 0
        state.fetch()
        state.wait()
        attach(entries)
        attach(others)
        inner.step()
        plain.step()
        state.store()
    assert use.peak_bytes["optimizer"] == 3 * 6 * 4
    state.fetch()
    assert same(snapshot(entries, inner), snapshot(others, plain))


def test_state_that_was_taken_back_takes_no_memory() -> None:
    """The first update creates the moments; taken back, it leaves none of them on device or host."""
    entries, inner, _ = parts()
    others, plain, _ = parts()
    state, undo = OffloadedState(entries, inner, WindowUse()), UndoLog(entries, inner, WindowUse())
    state.store()
    for _ in range(2):
        state.fetch()
        state.wait()
        attach(entries)
        undo.begin(inner.param_groups, None)
        inner.step()
        undo.store_gradients()
        state.store()
        created = [weakref.ref(t) for e in entries for t in moments(inner, e.main)]
        assert len(created) == 4
        undo.fetch_gradients()
        state.fetch()
        state.wait()
        undo.take_back()
        state.store()
        assert all(ref() is None for ref in created)
    state.fetch()
    for some, optimizer in ((entries, inner), (others, plain)):
        attach(some)
        optimizer.step()
    assert same(snapshot(entries, inner), snapshot(others, plain))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_update_is_taken_back_completely(steps_before: int) -> None:
    entries, inner, bucket = parts()
    undo = UndoLog(entries, inner, WindowUse())
    for _ in range(steps_before):
        attach(entries)
        inner.step()
    before = snapshot(entries, inner)
    attach(entries)
    undo.begin([{"params": []}], None)
    inner.step()
    undo.store_gradients()
    assert bucket.gradient.untyped_storage().size() == 0 and undo.is_open
    assert not same(before, snapshot(entries, inner))
    undo.take_back()
    assert not undo.is_open and same(before, snapshot(entries, inner))


def test_an_update_was_right_unless_its_gradients_were_changed_afterwards() -> None:
    entries, inner, bucket = parts()
    use = WindowUse()
    use.add("gradient_shard", bucket.gradient.nbytes)
    undo = UndoLog(entries, inner, use)
    scale = torch.tensor(0.5)
    attach(entries)
    given = [e.main.grad.clone() for e in entries]
    undo.begin([{"params": []}], scale)
    assert all(torch.equal(e.main.grad, g * scale) for e, g in zip(entries, given, strict=True))
    undo.store_gradients()
    assert use.held_bytes["gradient_shard"] == 0
    undo.fetch_gradients()
    assert use.held_bytes["gradient_shard"] == bucket.gradient.nbytes
    attach(entries)
    for entry in entries:
        entry.main.grad *= scale  # what Megatron does: unscale ...
    assert undo.was_right()
    entries[1].main.grad *= 0.99  # ... and clip
    assert not undo.was_right()
    undo.confirm()
    assert not undo.is_open
