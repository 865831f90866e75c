"""Loss entries of the ranks of a stage become one: sums and tokens, or means of what scripts report."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_het.distributed import PairGroups, PlanGroups
from megatron_het.plan import ModelShape, Placement, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.runtime.data import Reports, of_whole_stage

TWO_REPLICAS = (Replica((0,), (0, 1, 2)), Replica((1,), (3,)))
SHARED = (Replica((0, 1), (0, 1, 2, 3), cp=2),)


def entries(values: list[float], tokens: int) -> Reports:
    """One report per value; ``accuracy`` is a mean, as older scripts report their losses too."""
    return [{"lm loss": torch.tensor([v * tokens, tokens]), "accuracy": torch.tensor(v)} for v in values]


@pytest.mark.parametrize(
    ("replicas", "here", "there"),
    [
        pytest.param(TWO_REPLICAS, [1.0, 2.0, 3.0], [6.0], id="whole microbatches"),
        pytest.param(TWO_REPLICAS, [0.5, 1.5, 1.5, 2.5, 3.0, 3.0], [5.0, 7.0], id="two slices of each"),
        pytest.param(SHARED, [0.5, 1.5, 2.5, 5.5], [1.5, 2.5, 3.5, 6.5], id="two ranks share each"),
    ],
)
def test_means_do_not_grow_with_slices_or_ranks(
    replicas: tuple[Replica, ...], here: list[float], there: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The microbatches have means 1, 2, 3 and 6."""
    parameters = {"slices": 2} if len(here) == 6 else {}
    schedule = ScheduleSpec("slimpipe" if parameters else "1f1b", parameters)
    plan = Plan(ModelShape(2, 64, 4, 2, 32), TrainingShape(1, 4), (Stage((2,), replicas),), schedule)
    placement, parts = Placement(plan), (entries(here, 8), entries(there, 8))
    others = iter(torch.stack([e[name] for e in parts[1]]) for name in ("lm loss", "accuracy"))

    def add_the_other_ranks(value: torch.Tensor, group: object) -> None:
        mine = next(others)
        value += mine.sum(dim=0) if mine.dim() == 2 else torch.tensor([mine.sum(), len(mine)])[: len(value)]

    monkeypatch.setattr(dist, "all_reduce", add_the_other_ranks)
    world = object()
    groups = PlanGroups(placement, 0, "gloo", world, PairGroups(0, 60.0), {"stage": world})  # type: ignore[arg-type]
    [entry] = of_whole_stage(parts[0], placement, groups)
    assert entry["accuracy"].tolist() == [3.0]
    loss = entry["lm loss"]
    assert (loss[0] / loss[1]).item() == 3.0
