"""The distributed optimizer over unequal parts, on stand-ins for buffers and the inner optimizer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het import device as platform
from megatron_het.features.window.shards import divided, set_shares
from megatron_het.plan.placement import ALIGNMENT
from testing.groups import Group

platform.activate()


def buffer_of(rank: int, shares: tuple[float, ...] | None) -> Any:
    """Two buckets of 512 and 256 elements; the second one begins with padding."""
    first, second, third = (torch.nn.Parameter(torch.zeros(n)) for n in (300, 212, 192))
    buffer = SimpleNamespace(
        data_parallel_group=Group(3 if shares is None else len(shares), rank),
        num_optimizer_shards=None,
        param_index_map={first: (0, 300, 0), second: (300, 512, 0), third: (576, 768, 1)},
        buckets=[
            SimpleNamespace(grad_data=torch.zeros(size), offset=offset) for size, offset in ((512, 0), (256, 512))
        ],
    )
    set_shares([SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])], shares, None)
    return buffer


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.75, 0.25), (0.25, 0.0, 0.75)])
def test_ranges_of_all_ranks_cover_every_parameter_once(shares: tuple[float, ...]) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer = divided(DistributedOptimizer)
    covered: dict[int, list[tuple[int, int]]] = {300: [], 212: [], 192: []}
    for rank, share in enumerate(shares):
        for index, size in enumerate((512, 256)):
            buffer = buffer_of(rank, shares)
            ranges = optimizer._build_model_gbuf_range(buffer, index)["param_map"]
            for parameter, spans in ranges.items():
                part, local, world = spans["param"], spans["gbuf_local"], spans["gbuf_world"]
                covered[parameter.numel()].append((part.start, part.end))
                assert 0 <= local.start < local.end <= share * size + ALIGNMENT
                assert world.start - part.start == buffer.param_index_map[parameter][0]
                assert spans["gbuf_world_in_bucket"].start == world.start - buffer.buckets[index].offset
            assert not (share == 0 and ranges)
    for numel, found in covered.items():
        assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == numel


def test_buffers_without_shares_are_left_to_upstream() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    class Watched(DistributedOptimizer):
        asked: list[int] = []

        @classmethod
        def _build_model_gbuf_range(cls, buffer: Any, bucket_index: int) -> dict[str, Any]:
            cls.asked.append(bucket_index)
            return {"param_map": {}}

    optimizer = divided(Watched)
    optimizer._build_model_gbuf_range(buffer_of(0, None), 1)
    assert Watched.asked == [1]
    optimizer._build_model_gbuf_range(buffer_of(0, (0.25, 0.75)), 0)
    assert Watched.asked == [1]


class _Base:
    """Upstream's state dict, for torch's Adam and for one that counts steps per group."""

    optimizer: Any

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.optimizer, torch.optim.Adam):
            (step,) = {state["step"].item() for state in self.optimizer.state.values()}
            return {"optimizer": {"param_groups": [{"step": step} for _ in self.optimizer.param_groups]}}
        return {"optimizer": {"param_groups": [{} for _ in self.optimizer.param_groups]}}


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_without_parameters_reports_the_step_of_the_others(fused: bool) -> None:
    instance = divided(_Base)()
    parameter = torch.nn.Parameter(torch.zeros(1))
    if fused:
        instance.optimizer = SimpleNamespace(param_groups=[{"params": []}, {"params": []}], state={})
    else:
        instance.optimizer = torch.optim.AdamW([parameter])
        instance.optimizer.param_groups[0]["params"] = []
    instance.buffers = [buffer_of(1, (0.25, 0.0, 0.75))]
    instance._steps = 7.0
    groups = instance.state_dict()["optimizer"]["param_groups"]
    assert [group["step"] for group in groups] == [7] * len(instance.optimizer.param_groups)
    assert not instance.optimizer.state  # nothing stays behind
