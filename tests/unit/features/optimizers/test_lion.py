"""Lion beside Adam in one optimizer: every parameter is updated as its own optimizer alone would do it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("emerging_optimizers", reason="megatron-het[optimizers] is not installed")

from emerging_optimizers.scalar_optimizers import Lion

from megatron_het.features.optimizers.runtime import LionSteps
from tests.unit.features.window.test_window_optimizer import GroupCountingAdam

BETAS = (0.8, 0.9)


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Lion compiles its update."""
    with torch._dynamo.config.patch(disable=True):
        yield


def parameters(count: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(count)
    return [torch.nn.Parameter(torch.randn(6)) for _ in range(count)]


def give_gradients(*lists: list[torch.nn.Parameter]) -> None:
    for members in zip(*lists, strict=True):
        gradient = torch.randn(6)
        for parameter in members:
            parameter.grad = gradient.clone()


def torch_adam(groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01)


@pytest.mark.parametrize("kind", [torch_adam, GroupCountingAdam])
def test_each_parameter_has_its_own_optimizer(kind: Any) -> None:
    """In two groups, of which the second one is Lion's alone; learning rates change between steps."""
    mine, alone = parameters(4), parameters(4)
    adam = kind([{"params": mine[:3]}, {"params": mine[3:]}])
    steps = LionSteps(adam, {mine[1], mine[3]}, BETAS)
    decay = adam.param_groups[0].setdefault("weight_decay", 0.0)
    adam.param_groups[1].setdefault("weight_decay", 0.0)
    of_adam, of_lion = kind([{"params": alone[::2]}]), Lion(alone[1::2], lr=0.1, betas=BETAS, weight_decay=decay)
    for turn in range(1, 5):
        for group in (*adam.param_groups, *of_adam.param_groups, *of_lion.param_groups):
            group["lr"] = 0.1 / turn
        give_gradients(mine, alone)
        for optimizer in (adam, of_adam, of_lion):
            optimizer.step()
        for a, b in zip(mine, alone, strict=True):
            assert torch.equal(a, b), turn
    for parameter in mine:
        assert {"exp_avg", "exp_avg_sq"} <= adam.state[parameter].keys()
    for parameter in (mine[1], mine[3]):
        assert adam.state[parameter]["exp_avg"].any() and not adam.state[parameter]["exp_avg_sq"].any()
    counts = [group["step"] for group in adam.param_groups if "step" in group]
    counts += [state["step"].item() for state in adam.state.values() if "step" in state]
    assert set(counts) == {4}
    steps.undo()
    assert "step" not in vars(adam)


@pytest.mark.parametrize("kind", [torch_adam, GroupCountingAdam])
def test_a_part_of_the_groups_may_be_stepped(kind: Any) -> None:
    """As a window does, whose groups are those of one ministage."""
    mine, alone = parameters(4), parameters(4)
    adam, whole = kind([{"params": mine}]), kind([{"params": alone}])
    for optimizer in (adam, whole):
        optimizer.param_groups[0].setdefault("weight_decay", 0.0)
    LionSteps(adam, {mine[1], mine[2]}, BETAS)
    LionSteps(whole, {alone[1], alone[2]}, BETAS)
    for _ in range(3):
        give_gradients(mine, alone)
        whole.step()
        groups, before = adam.param_groups, adam.param_groups[0].get("step")
        for part in (mine[:2], mine[2:3], mine[3:]):
            shown = {**groups[0], "params": part}
            if before is not None:
                shown["step"] = before
            adam.param_groups = [shown]
            adam.step()
        adam.param_groups = groups
        if "step" in shown:
            groups[0]["step"] = shown["step"]
        for a, b in zip(mine, alone, strict=True):
            assert torch.equal(a, b)
