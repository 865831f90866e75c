"""The functions of ``megatron.training`` that a plan replaces or wraps.

Their builders belong to one run, so they are handed to ``install`` by ``megatron_het.arguments.hooks``.
"""

from __future__ import annotations

from megatron_het.megatron_patches.registry import Patch

_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"

PATCHES = (
    Patch(
        name="plan_arguments",
        group="plan",
        target=f"{_ARGUMENTS}.validate_args",
        reason=(
            "TP size, layers and batch of this rank come from the plan and must be set between "
            "parsing and validation; there is no hook in between"
        ),
        sources={f"{_ARGUMENTS}.validate_args": "f379171b89b5c726fb2afdec62cca132197c27a092366893f17e8df430c29f36"},
    ),
    Patch(
        name="plan_pretrain",
        group="plan",
        target="megatron.training.pretrain",
        reason=(
            "opens the plan's session around the training of a script that knows nothing of "
            "plans, and passes the arguments that pretrain() offers for it"
        ),
        sources={"megatron.training.pretrain": "0d90d0271b9f49fd578e63eeb82483e6af0bcd4dc7a60ff7fb03a2a1fa522296"},
    ),
    Patch(
        name="plan_schedule",
        group="plan",
        target=f"{_TRAINING}.get_forward_backward_func",
        reason="the schedule is looked up by this name for every run and cannot be passed in",
        sources={
            f"{_TRAINING}.get_forward_backward_func": (
                "5a5b8975bc77a8fdffcb2aeba12256e75399825d49e6443cf82a27f15c723e56"
            ),
            # What the executor calls, and what the builder of several chunks does as upstream.
            "megatron.core.pipeline_parallel.schedules.forward_step": (
                "679f915a477e3c0c923bc6e2ea1b44a7a93314603b3a822234170d739a692caf"
            ),
            "megatron.core.pipeline_parallel.schedules.backward_step": (
                "4f9c30f42c32355334f232b4495db299162c279beca89559117c9b9d863b9638"
            ),
            "megatron.core.pipeline_parallel.schedules.deallocate_output_tensor": (
                "fb1e6eaa2fd3a42fb842c38cdf45109e41c8af32fe08aeab2076bc4c1384d7f0"
            ),
            "megatron.training.models.gpt.GPTModelBuilder.build_distributed_models": (
                "85df9d383a74ef40bad43e8a1fc80f7414409071428782dc001c10eac9c4da52"
            ),
            "megatron.training.models.dist_utils.prepare_existing_model_chunks_for_distributed_training": (
                "c64b5a70420eeefdbc0cf61fe66c6bd5b2c7f3f36bb1942cbd2c3f0945567a94"
            ),
            "megatron.training.models.base.compose_hooks": (
                "fa982ba1a07d7efb3c75ecac06828eadfa96f30a0017b634894d8966c791b115"
            ),
        },
    ),
    Patch(
        name="plan_log",
        group="plan",
        target=f"{_TRAINING}.training_log",
        reason=(
            "sums of losses are not reset after the first iteration, so that the second loss in the log of every "
            "session would be a mean of two; they are known to this function only"
        ),
        sources={f"{_TRAINING}.training_log": "8fb3e6b1ee07cfe5336ab3aa552d934b743556170b344f85014b85760936c1fe"},
    ),
    Patch(
        name="plan_save",
        group="plan",
        target="megatron.training.checkpointing.generate_state_dict",
        reason=(
            "what is saved depends on the layout in three places (stacked layers, one random "
            "state per grid cell, every class of replicas writes); there is no hook before the save"
        ),
        sources={
            "megatron.training.checkpointing.generate_state_dict": (
                "b3931725128ba13bdf12c6701f3f79919a241fd9f0c085a948e89c8d719fe1f5"
            )
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
        sources={f"{_TRAINING}.load_checkpoint": "98cef76fe442dcd6e344befdf3e19eb3e3b8e3a27e2c907ba75b976210a4e6d7"},
    ),
)
