"""Shortens data sets, inside a rank process, so that a cyclic loader begins anew inside an iteration."""

from typing import Any

from testing import probe

SAMPLES = 10  # per epoch; iterations of the cases have 6


def observe(**options: Any) -> None:
    from megatron.training import training
    from megatron.training.datasets import data_samplers

    original = data_samplers.build_pretraining_data_loader

    def build(dataset: Any, consumed: int) -> Any:
        return original(_shortened(dataset), consumed)

    data_samplers.build_pretraining_data_loader = training.build_pretraining_data_loader = build
    probe.observe(**options)


def _shortened(dataset: Any) -> Any:
    from torch.utils.data import Subset

    if not hasattr(dataset, "index_split"):  # no data set, or a plan's iterator
        return dataset
    found = Subset(dataset, range(SAMPLES))
    found.split = dataset.index_split  # type: ignore[attr-defined]
    return found
