"""Routing of samples to replicas."""

from __future__ import annotations

import torch

from megatron_het.runtime.data import RoutedBatchSampler, routed_loader


def batches(count: int) -> list[list[int]]:
    return [[2 * k, 2 * k + 1] for k in range(count)]


def test_replicas_together_read_every_microbatch_once_and_in_order() -> None:
    routes = ([0, 1, 3], [2])
    per_replica = [list(RoutedBatchSampler(batches(8), ids, 4)) for ids in routes]
    assert per_replica[1] == [[4, 5], [12, 13]]
    merged = sorted(b for part in per_replica for b in part)
    assert merged == batches(8)


def test_routed_loader_keeps_the_loaders_settings() -> None:
    data = torch.arange(16)
    stock = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data), batch_sampler=batches(8), pin_memory=False
    )
    routed = routed_loader(stock, [1], 2)
    assert [b[0].tolist() for b in routed] == batches(8)[1::2]
    assert routed.collate_fn is stock.collate_fn
