"""Thrifty layers on a rank: norms that keep only their input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_het.features.thrifty_layers.thrifty import make_norms_thrifty
from megatron_het.runtime.feature import OpenContext, RuntimeFeature


class ThriftyLayersFeature(RuntimeFeature):
    """Changes the norms of the model; the activation function follows from Megatron's arguments."""

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`."""
        make_norms_thrifty(models)


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature."""
    return ThriftyLayersFeature()
