"""Building the chunks of a parameter window: never is a whole stage in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.models.gpt import GPTModelBuilder

from megatron_het.distributed import Axis
from megatron_het.features.window.layout import wrap_layered
from megatron_het.runtime.building import ChunkedBuilder, PlacedHybridModelBuilder


class WindowBuilder(ChunkedBuilder):
    """Builds any number of chunks on layered buffers: one bucket per layer."""

    wraps_with_upstream = False

    def _builds(self, pipeline: Axis, chunks: int) -> bool:
        return True

    def _finish_all(self, chunks: Iterator[Any], finish: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Each chunk is finished, which closes its window, before the next one is built.

        Hooks see one chunk at a time.
        """
        return [model for chunk in chunks for model in finish([chunk])]

    def _wrap(
        self, models: list[Any], ddp_config: DistributedDataParallelConfig, pg_collection: ProcessGroupCollection
    ) -> list[Any]:
        return wrap_layered(models, ddp_config, pg_collection)


class WindowGPTModelBuilder(WindowBuilder, GPTModelBuilder):
    """The same of a GPTModel."""


class WindowHybridModelBuilder(WindowBuilder, PlacedHybridModelBuilder):
    """The same of a HybridModel."""
