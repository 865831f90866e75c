"""What to say where the number of passes that an iteration may have leaves out deep pipelines."""

from __future__ import annotations

from math import ceil

from megatron_het.plan.validate import most_chunks
from megatron_het.safe_io import MAX_PASSES

from ..inputs.cluster import Cluster
from ..inputs.model import Model


def larger_micro_batches(cluster: Cluster, model: Model, overfull: float) -> str:
    """The advice to allow larger micro batches; empty where pipelines of all depths were looked at.

    Every microbatch passes through every stage forwards and backwards, so the largest micro batch allows the most
    stages.  Layers and GPUs limit them too.

    Args:
        overfull: Memory that the fullest GPU would need at best, over what it has; so many times the stages are wanted.
    """
    largest, useful = max(model.batch_sizes), min(model.num_layers, cluster.total_gpus)
    stages = most_chunks(model.global_batch_size // largest, 1)
    if stages >= useful:
        return ""
    wanted = min(useful, max(stages + 1, ceil(stages * overfull)))
    enough = -(-model.global_batch_size // (MAX_PASSES // (2 * wanted)))
    room = "one stage" if stages == 1 else f"{stages} stages"
    return (
        f"allow micro_batch_sizes of {enough} or more, with which there may be {wanted} stages (those of {largest} "
        f"leave room for {room}, as a plan has at most {MAX_PASSES} passes per iteration)"
    )
