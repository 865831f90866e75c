"""Mixture of experts: what a plan can train of it, and why not the rest."""

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_het.features.base import Feature, Refusal, is_given
from megatron_het.features.registry import runs_of_a_layer
from megatron_het.plan import Plan, PlanError

_MOE = "megatron.core.transformer.moe"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
GLOBAL = "global_aux_loss"  # the loss that every pass computes with the counts of the passes before it too
SINKHORN = "sinkhorn"  # chooses experts by scores that are normalised over all tokens of a microbatch
_KNOWN = ("none", "aux_loss", "seq_aux_loss", GLOBAL, SINKHORN)
_OF_A_MICROBATCH = ("aux_loss", GLOBAL)
_BY_ELEMENT = ("adam", "sgd")  # optimizers whose update of an element depends on this element alone
_NOT_BALANCED = {
    "quantile_balancing": "it takes the mean of replicas, which may have different numbers of microbatches"
}


class Experts(Feature):
    """Layers of experts, divided over the ranks of a replica, or of several that run the same passes.

    Sequences of one microbatch are routed on one replica, so capacities and the losses that balance the experts are
    those of one process.
    """

    name = "experts"
    title = "mixture of experts"
    always = True  # models without experts give it nothing to do
    refused_by_plans = (
        Refusal("expert_tensor_parallel_num_weight_shards", "it makes groups that a plan does not have", is_given),
        Refusal("moe_single_grouped_weight", "replicas of different TP or EP exchange the experts one by one"),
        Refusal("moe_single_grouped_bias", "replicas of different TP or EP exchange the experts one by one"),
        *(
            Refusal(f"moe_{what}_glu_interleave_size", "replicas of different TP or EP exchange gated MLPs as halves")
            for what in ("mlp", "shared_expert")
        ),
        Refusal("moe_expert_rank_capacity_factor", "it drops tokens by the number of ranks that share experts"),
        Refusal("overlap_moe_expert_parallel_comm", "it orders the passes of a pipeline itself"),
        Refusal("moe_use_upcycling", "a dense checkpoint is turned into experts by one layout; convert it before"),
    )
    upstream_names: ClassVar[Mapping[str, str]] = {
        f"{_MOE}.moe_logging.MoEMetricsTracker._sync_metrics": "b85205f45dba6e80",
        f"{_MOE}.experts.SequentialMLP.sharded_state_dict": "6d9fbf299a2ed362",
        f"{_MOE}.token_dispatcher.MoEAlltoAllTokenDispatcher.preprocess": "90dcd9cf1194af02",
        f"{_MOE}.router.TopKRouter.attach_and_log_load_balancing_loss": "77cc758f506e750c",
        f"{_MOE}.router.TopKRouter.apply_z_loss": "00c83a903d28df13",
        f"{_MOE}.router.TopKRouter.sinkhorn_load_balancing": "7808150834c5e054",
        f"{_MOE}.router.TopKRouter.routing": "74bbf31940a074f4",
        f"{_MOE}.router.TopKRouter._apply_aux_loss": "b0e7cc8fa4597e1f",
        f"{_MOE}.router.TopKRouter._apply_seq_aux_loss": "ff35e8d8e2182338",
        f"{_MOE}.router.TopKRouter._apply_global_aux_loss": "41b885ec47fb4c0d",
        f"{_MOE}.moe_utils.MoEAuxLossAutoScaler": "3af61ed074ef8656",
        f"{_MOE}.moe_utils.compute_routing_scores_for_aux_loss": "087e0ffe213addb6",
        f"{_FINALIZE}._update_router_expert_bias": "fb4e285510fc83b5",
        f"{_FINALIZE}.reset_model_temporary_tensors": "2b65786f613b8d1d",
    }

    def runs_with(self, args: Any) -> bool:
        """Whether the model has experts; see :class:`Feature`."""
        return bool(getattr(args, "num_experts", None))

    def check_any_arguments(self, plan: Plan, args: Any) -> None:
        """Refuse what no plan can have, and what this plan cannot."""
        check_expert_parallel(plan, getattr(args, "num_experts", None) or 0)
        if not getattr(args, "num_experts", None):
            return
        super().check_any_arguments(plan, args)
        _check_tensor_parallel(plan, args)
        _check_balancing(plan, args)
        _check_groups(plan, args)


def check_expert_parallel(plan: Plan, experts: int) -> None:
    """Refuse EP sizes that do not divide a layer's experts (0: the model has none); raises PlanError."""
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            if not replica.cut.divides_alike and not experts:
                raise PlanError(
                    f"stages[{s}].replicas[{q}].etp", replica.etp, "the model has no experts", "Leave it out, as ep"
                )
            if replica.ep > 1 and (not experts or experts % replica.ep):
                raise PlanError(
                    f"stages[{s}].replicas[{q}].ep",
                    replica.ep,
                    f"does not divide the {experts} experts of a layer" if experts else "the model has no experts",
                    "Use an EP size that divides the experts of a layer" if experts else "Leave it out",
                )


def _check_tensor_parallel(plan: Plan, args: Any) -> None:
    """Check the TP size of experts, and options that support TP only with restrictions."""
    size = getattr(args, "expert_tensor_parallel_size", None)
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            if size is not None and size != replica.cut.expert_tp:
                problem = f"replica {q} of stage {s} has {replica.cut}, so {replica.cut.expert_tp} ranks cut an expert"
                raise PlanError("--expert-tensor-parallel-size", size, problem, "Leave the flag out")
            capacity = getattr(args, "moe_expert_capacity_factor", None)
            if replica.tp > 1 and capacity is not None:
                raise PlanError(
                    "--moe-expert-capacity-factor",
                    capacity,
                    f"replica {q} of stage {s} has TP {replica.tp}: a capacity counts the tokens of one TP rank, so "
                    "other tokens would be dropped",
                    "Leave the flag out, or use a plan with TP 1",
                )
            if max(replica.tp, replica.cut.expert_tp) > 1 and getattr(args, "add_bias_linear", False):
                problem = f"replica {q} of stage {s} has {replica.cut}: Megatron adds biases of experts on each TP rank"
                hint = "Add --disable-bias-linear, or use a plan with TP 1"
                raise PlanError("--disable-bias-linear", False, problem, hint)
            if replica.tp > 1 and not plan.training.sequence_parallel:
                raise PlanError(
                    "training.sequence_parallel",
                    False,
                    f"replica {q} of stage {s} has TP {replica.tp}: Megatron trains experts with TP under sequence "
                    "parallelism only",
                    "Add --sequence-parallel",
                )


def _check_groups(plan: Plan, args: Any) -> None:
    """Refuse what does not go with expert groups that are no TP groups."""
    found = next((r.cut for stage in plan.stages for r in stage.replicas if not r.cut.divides_alike), None)
    if found is None:
        return
    groups = f"experts are divided over other ranks than a replica's TP group ({found})"
    if (getattr(args, "optimizer", None) or "adam") not in _BY_ELEMENT:
        problem = f"{groups}, and it is not known to update what only some ranks have"
        hint = "Use an EP size that divides the TP size of the replica"
        raise PlanError("--optimizer", args.optimizer, problem, hint)
    unequal = _unequal(plan) or _unequal_parts(plan)
    if unequal and getattr(args, "moe_token_dispatcher_type", None) == "allgather":
        problem = f"{groups}, it gathers equally many tokens from each, and {unequal}"
        raise PlanError("--moe-token-dispatcher-type", "allgather", problem, "Use --moe-token-dispatcher-type alltoall")


def _unequal_parts(plan: Plan) -> str:
    """Whether context-parallel ranks have parts of different sizes, in words; empty if they do not."""
    shares = next((r.cp_shares for s in plan.stages for r in s.replicas if len(set(r.cp_shares)) > 1), None)
    return f"context-parallel ranks have parts of {list(shares)}" if shares else ""


def _check_balancing(plan: Plan, args: Any) -> None:
    """Balancing over more than the tokens of one replica's pass would not be that of one process."""
    kinds = balancing_of(args)
    for kind in kinds:
        if kind not in _KNOWN:
            raise PlanError(
                "--moe-router-load-balancing-type",
                kind,
                _NOT_BALANCED.get(kind, "is not known to give what one process gives"),
                "Use aux_loss, seq_aux_loss, or none with --moe-router-enable-expert-bias",
            )
    if GLOBAL in kinds:
        _check_global_balancing(plan)
    coefficients = getattr(args, "moe_aux_loss_coeff", 0.0)
    if isinstance(coefficients, list | tuple) and len(coefficients) != len(kinds):
        problem = f"there are {len(coefficients)} coefficients for {len(kinds)} losses"
        hint = "Give one for each value of --moe-router-load-balancing-type"
        raise PlanError("--moe-aux-loss-coeff", " ".join(map(str, coefficients)), problem, hint)
    unequal = _unequal(plan)
    losses = [kind for kind in kinds if kind in _OF_A_MICROBATCH and _coefficient(args, kinds, kind)]
    if unequal and losses:
        problem = f"the loss is a product of two sums over a whole microbatch, and {unequal}"
        hint = "Use --moe-router-load-balancing-type seq_aux_loss, or none with --moe-router-enable-expert-bias"
        raise PlanError("--moe-router-load-balancing-type", " ".join(losses), problem, hint)
    _check_repeated(plan, args, kinds)
    counted = {
        "--moe-expert-capacity-factor": getattr(args, "moe_expert_capacity_factor", None),
        "--moe-router-load-balancing-type": SINKHORN if SINKHORN in kinds else None,
    }
    for parts, whole in ((_parts_of_a_sequence(plan), "sequence"), (unequal, "microbatch")):
        for flag, value in counted.items() if parts else ():
            if value is not None:
                problem = f"it counts the tokens of a whole {whole}, and {parts}"
                raise PlanError(flag, value, problem, "Leave the flag out: experts get tokens by their scores then")


def _check_repeated(plan: Plan, args: Any, kinds: list[str]) -> None:
    """A layer that runs several times in a pass, where the losses of passes are put together."""
    parts = _parts_of_a_sequence(plan) or ("the loss counts all passes before it" if GLOBAL in kinds else "")
    if SINKHORN not in kinds and not any(_coefficient(args, kinds, kind) for kind in kinds if kind != "none"):
        return
    hint = "Leave it out, or use --moe-router-load-balancing-type none with --moe-router-enable-expert-bias"
    runs = runs_of_a_layer(args)
    if runs > 1 and parts:
        problem = f"its layer of experts runs {runs} times in a pass and would be balanced by the first only: {parts}"
        raise PlanError("--mtp-use-repeated-layer", True, problem, hint)
    chunks = getattr(args, "mlp_chunks_for_training", None) or 1
    if not parts and any(replica.tp > 1 for stage in plan.stages for replica in stage.replicas):
        parts = "a TP rank has a part of it"
    if chunks > 1 and parts:
        problem = f"each part of a sequence would be balanced by itself, and would be another one: {parts}"
        raise PlanError("--mlp-chunks-for-training", chunks, problem, hint)


def _check_global_balancing(plan: Plan) -> None:
    """Every forward pass is balanced by all before it, so there must be one order of passes: that of one process."""
    for s, stage in enumerate(plan.stages):
        if len(stage.replicas) > 1:
            raise PlanError(
                "--moe-router-load-balancing-type",
                GLOBAL,
                "it sums over replicas in every forward pass, and these may have different numbers of passes: stage "
                f"{s} has {len(stage.replicas)}",
                "Use aux_loss or seq_aux_loss, or a plan with one replica per stage",
            )


def balancing_of(args: Any) -> list[str]:
    """The kinds of balancing losses among Megatron's arguments."""
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _unequal(plan: Plan) -> str:
    """Returns how microbatches differ, in words; empty if they do not."""
    sizes = sorted(set(plan.training.micro_batch_sizes))
    return f"microbatches have {sizes} sequences" if len(sizes) > 1 else ""


def _coefficient(args: Any, kinds: list[str], kind: str) -> float:
    given = getattr(args, "moe_aux_loss_coeff", 0.0)
    return given[kinds.index(kind)] if isinstance(given, list | tuple) else given


def _parts_of_a_sequence(plan: Plan) -> str:
    """Returns what cuts sequences; empty if nothing does."""
    slices = plan.schedule.parameters.get("slices", 1)
    if slices and slices != 1:
        return "a pass has one slice of it"
    if any(replica.cp > 1 for stage in plan.stages for replica in stage.replicas):
        return "a rank has a part of it (context parallelism)"
    return ""
