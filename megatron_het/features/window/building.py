"""Building the chunks of a parameter window: never is a whole stage in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_het.distributed import Axis
from megatron_het.features.window.layout import wrap_layered
from megatron_het.runtime.building import ChunkedGPTModelBuilder

WINDOW_BUILDER = f"{__name__}.WindowGPTModelBuilder"
"""The value of a model configuration's ``builder`` that selects the builder of chunks for a window."""


class WindowGPTModelBuilder(ChunkedGPTModelBuilder):
    """Builds any number of chunks on layered buffers: one bucket per layer."""

    wraps_with_upstream = False

    def _builds(self, pipeline: Axis, chunks: int) -> bool:
        return True

    def _finish_all(
        self, chunks: Iterator[GPTModel], finish: Callable[[list[GPTModel]], list[GPTModel]]
    ) -> list[GPTModel]:
        """Each chunk is finished, which closes its window, before the next one is built.

        Hooks see one chunk at a time.
        """
        return [model for chunk in chunks for model in finish([chunk])]

    def _wrap(
        self, models: list[GPTModel], ddp_config: DistributedDataParallelConfig, pg_collection: ProcessGroupCollection
    ) -> list[GPTModel]:
        return wrap_layered(models, ddp_config, pg_collection)
