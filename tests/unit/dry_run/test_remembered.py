"""What is remembered of operators makes no difference but in time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_het.dry_run import kernels as remembered
from megatron_het.dry_run.tracker import Tracker


def described(tensor: Any) -> Any:
    """What of a tensor later operators depend on."""
    if isinstance(tensor, list | tuple):
        return [described(one) for one in tensor]
    if not isinstance(tensor, torch.Tensor):
        return tensor
    storage = tensor.untyped_storage().nbytes()
    return type(tensor).__name__, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, storage


def with_and_without(work: Callable[[], Any]) -> tuple[Any, Any]:
    """What some work gives the second time, and its account of memory, with and without remembering."""
    found = []
    for remembers in (True, False):
        tracker = Tracker(is_fake=True, remembers=remembers)
        with FakeTensorMode(allow_non_fake_inputs=True), tracker.running():
            for iteration in range(3):
                tracker.start_iteration()
                tracker.operation("forward", f"F{iteration}")
                result = described(work())
            tracker.phase("end")
            found.append((result, tracker.ledger.peak(2), dict(tracker.flops), tracker.live_bytes))
    return found[0], found[1]


def trained() -> list[torch.Tensor | None]:
    """A network with views, updates in place, several results, and a loss."""
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.SiLU(), torch.nn.Linear(32, 8))
    source = torch.ones(4, 6, 8, requires_grad=True)
    first, second = network(source.transpose(0, 1)).chunk(2, dim=-1)
    values, places = (first * second).flatten(0, 1)[2:].max(dim=1)
    values.float().square().mean().backward()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.5).add_(parameter.grad, alpha=-0.1)
    return [values, places, source.grad, *network.parameters()]


def freed() -> list[torch.Tensor]:
    """Views of a storage that is freed and allocated again."""
    whole = torch.empty(64)
    before = whole.detach()
    whole.untyped_storage().resize_(0)
    after = whole.detach().data
    whole.untyped_storage().resize_(256)
    return [before, after, whole[8:16].view(2, 4)]


def outs() -> list[torch.Tensor]:
    """The result is an argument, not always the same one."""
    one, two = torch.ones(5), torch.ones(5)
    return [torch.add(one, two, out=one), torch.add(one, two, out=torch.empty(5)), one.add_(two), two.add_(two)]


def reshaped() -> list[torch.Tensor]:
    """Metadata changes in place."""
    matrix = torch.ones(3, 4)
    matrix.t_()
    row = torch.ones(1, 6)
    row.squeeze_(0).unsqueeze_(1)
    other = torch.ones(2)
    other.resize_(10)
    return [matrix, row, other, matrix + 1, torch.cat([row, row]), torch.full((2, 3), 4.0)]


def numbers() -> list[Any]:
    """Values that are known stay known."""
    scale = torch.tensor(3.0)
    return [float(scale * 2), int(torch.tensor([4, 5]).sum()), torch.arange(0, 10, 2), torch.arange(0, 10, 3)]


@pytest.mark.parametrize("work", [trained, freed, outs, reshaped, numbers])
def test_figures_are_those_without_remembering(work: Callable[[], Any]) -> None:
    quick, slow = with_and_without(work)
    assert quick == slow


@pytest.mark.parametrize("remembers", [True, False])
def test_views_do_not_bring_a_freed_storage_back(remembers: bool) -> None:
    tracker = Tracker(is_fake=True, remembers=remembers)
    with FakeTensorMode(allow_non_fake_inputs=True), tracker.running():
        for _ in range(3):
            whole = torch.empty(64)
            assert whole.detach().untyped_storage().nbytes() == 256
            whole.untyped_storage().resize_(0)
            assert whole.detach().untyped_storage().nbytes() == 0
    assert tracker.live_bytes == 0


def test_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Any] = []
    original = remembered.Remembered.again

    def counted(self: Any, result: Any, tensors: Any) -> Any:
        again.append(result)
        return original(self, result, tensors)

    monkeypatch.setattr(remembered.Remembered, "again", counted)
    with_and_without(trained)
    assert len(again) > 60
