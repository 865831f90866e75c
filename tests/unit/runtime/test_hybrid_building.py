"""Chunks of hybrid models: found in the pattern, and apart from what they get."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

from megatron_het import device as platform

platform.activate()

from megatron.core.models.hybrid import hybrid_layer_allocation  # noqa: E402
from megatron.training.models.hybrid import HybridModelBuilder  # noqa: E402

from megatron_het.distributed import Axis  # noqa: E402
from megatron_het.runtime.building import PlacedHybridModelBuilder  # noqa: E402


@pytest.fixture
def world():
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=3)
    yield
    dist.destroy_process_group()


def test_a_chunks_layers_are_those_of_its_position(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_layer_allocation, "log_on_each_pipeline_stage", lambda *_, **__: None)
    for chunk, position, expected in ((0, 0, (["*"], 0)), (0, 1, (["-", "*"], 1)), (1, 0, ([], 3)), (1, 1, (["-"], 3))):
        axis = Axis(position, 2, (position,))
        with axis.known_to_torch():
            assert hybrid_layer_allocation.select_pipeline_segment("*|-*||-", axis, chunk) == expected
        with pytest.raises(ValueError, match="not registered"):
            dist.get_rank(axis)  # type: ignore[arg-type]


@pytest.mark.parametrize(("layers", "is_end", "is_same"), [(0, False, False), (0, True, True), (1, False, True)])
def test_a_chunk_without_layers_gives_a_tensor_of_its_own(
    world: None, monkeypatch: pytest.MonkeyPatch, layers: int, is_end: bool, is_same: bool
) -> None:
    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(layers))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    def build(self: Any, groups: Any) -> Any:
        return SimpleNamespace(decoder=Stack(), pre_process=is_end, post_process=False)

    monkeypatch.setattr(HybridModelBuilder, "build_model", build)
    builder = PlacedHybridModelBuilder.__new__(PlacedHybridModelBuilder)
    model = builder.build_model(SimpleNamespace(pp=Axis(0, 2)))  # type: ignore[arg-type]
    hidden = torch.ones(2)
    given = model.decoder(hidden)
    assert torch.equal(given, hidden) and (given is hidden) == is_same
