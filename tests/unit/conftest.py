"""Makes the CPU support active before any test file imports Megatron, which binds what the platform replaces."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron_het.device import activate

activate()


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone, which a test may destroy."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
