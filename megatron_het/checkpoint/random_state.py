"""Random-number states, one per world rank, saved beside the model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

RANDOM_STATE_KEY = "het_random_state"


def random_state_object(load: bool = False) -> Any:
    """This rank's states as a ShardedObject keyed by world rank.

    Args:
        load: Build the template for loading, without data.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject(
        RANDOM_STATE_KEY, None if load else collect(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0
    )


def collect() -> dict[str, Any]:
    """The states of every generator that training draws from."""
    from megatron.core import tensor_parallel

    return {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(checkpoint_path: str) -> None:
    """Load and set this rank's states; the checkpoint must come from the same topology."""
    from megatron.core import dist_checkpointing

    template = {RANDOM_STATE_KEY: random_state_object(load=True)}
    restore(dist_checkpointing.load(template, checkpoint_path)[RANDOM_STATE_KEY])


def restore(state: dict[str, Any]) -> None:
    """Set what :func:`collect` returned."""
    from megatron.core import tensor_parallel

    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
