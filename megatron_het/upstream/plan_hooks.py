"""The functions of ``megatron.training`` that a plan replaces or wraps.

Their builders belong to one run, so they are handed to ``install`` by ``megatron_het.hooks``.
"""

from __future__ import annotations

from megatron_het.upstream.registry import Patch

_TRAINING = "megatron.training.training"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"

PATCHES = (
    Patch(
        name="plan_arguments",
        group="plan",
        target="megatron.training.arguments.validate_args",
        reason=(
            "TP size, layers and batch of this rank come from the plan and must be set between "
            "parsing and validation; there is no hook in between"
        ),
        sources={
            "megatron.training.arguments.validate_args": "f379171b89b5c726fb2afdec62cca132197c27a092366893f17e8df430c29f36",
        },
    ),
    Patch(
        name="plan_pretrain",
        group="plan",
        target="megatron.training.pretrain",
        reason=(
            "opens the plan's session around the training of a script that knows nothing of "
            "plans, and passes the arguments that pretrain() offers for it"
        ),
        sources={
            "megatron.training.pretrain": "0d90d0271b9f49fd578e63eeb82483e6af0bcd4dc7a60ff7fb03a2a1fa522296",
        },
    ),
    Patch(
        name="plan_schedule",
        group="plan",
        target=f"{_TRAINING}.get_forward_backward_func",
        reason="the schedule is looked up by this name for every run and cannot be passed in",
        sources={
            f"{_TRAINING}.get_forward_backward_func": "5a5b8975bc77a8fdffcb2aeba12256e75399825d49e6443cf82a27f15c723e56",
            # What the parameter window relies on beside public interfaces.
            f"{_OPTIMIZER}._copy_model_grads_to_main_grads": "d7077b92f8a06cbaf52d2de9a71a200b30f237a6bbecf62d5726eb8002e6193e",
            f"{_OPTIMIZER}.step_with_ready_grads": "203a8a27eaec9bab3e6a5c4dec13c8747a0515554a5bb744418e7a8e215154ad",
            f"{_OPTIMIZER}._compute_per_buffer_param_layout": "327594ce0ba0150610271b4469bc5e577c1fe5a014c86a0a6e58f15b047d4a72",
            "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads": (
                "b8b3681b2ba049de9c477aa153bc0a30909824243ebf411c9148d22860023b23"
            ),
        },
    ),
    Patch(
        name="plan_save",
        group="plan",
        target="megatron.training.checkpointing.generate_state_dict",
        reason=(
            "what is saved depends on the layout in three places (stacked layers, one random "
            "state per grid cell, every TP class writes); there is no hook before the save"
        ),
        sources={
            "megatron.training.checkpointing.generate_state_dict": "b3931725128ba13bdf12c6701f3f79919a241fd9f0c085a948e89c8d719fe1f5",
        },
    ),
    Patch(
        name="plan_load",
        group="plan",
        target=f"{_TRAINING}.load_checkpoint",
        reason=(
            "decisions about a checkpoint compare this rank's TP size, which differs by rank "
            "under a plan, so that ranks would load different things"
        ),
        sources={
            f"{_TRAINING}.load_checkpoint": "98cef76fe442dcd6e344befdf3e19eb3e3b8e3a27e2c907ba75b976210a4e6d7",
        },
    ),
)
