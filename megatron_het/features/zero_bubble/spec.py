"""Zero-bubble schedules: checks of plans whose backward passes are split into two operations."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from megatron_het.features.base import Feature, NoOptions, Refusal, check_reductions_meet
from megatron_het.features.zero_bubble.passes import v_half, zb_h1, zb_v
from megatron_het.plan import Plan, PlanError
from megatron_het.schedule.generators import GENERATORS
from megatron_het.schedule.ir import Program, placement_of

_LAYERS, _DDP = "megatron.core.tensor_parallel.layers", "megatron.core.distributed"
_TRANSFORMER = "megatron.core.transformer"
_LAYOUT = f"{_TRANSFORMER}.pipeline_parallel_layer_layout.PipelineParallelLayerLayout"
_BUCKET_SIZE, _LARGE_VOCABULARY = 40_000_000, 300_000
SCHEDULES = ("v-half", "zb-h1", "zb-v")  # schedules that split backward passes and that plans can have


GENERATORS.update({"v-half": v_half, "zb-h1": zb_h1, "zb-v": zb_v})


class ZeroBubble(Feature):
    """Gradients of inputs are sent on at once; weight gradients of linear layers fill idle time."""

    name = "zero_bubble"
    title = "zero-bubble schedule"
    always = True
    schedules = SCHEDULES
    runs = SCHEDULES
    upstream_names: ClassVar[Mapping[str, str]] = {
        f"{_LAYERS}.ColumnParallelLinear.forward": "b3d148e587f2cecb",
        f"{_LAYERS}.RowParallelLinear.forward": "235bf36cfa11fcf9",
        f"{_LAYERS}.LinearWithGradAccumulationAndAsyncCommunication": "8ef62e685ce853b7",
        f"{_DDP}.distributed_data_parallel.DistributedDataParallel._make_backward_post_hook": "1f17c20f0657a447",
        f"{_DDP}.param_and_grad_buffer._ParamAndGradBucketGroup.register_grad_ready": "5507854f241082b5",
        # For chunks in a V: upstream code that decides which layers a chunk has.
        f"{_LAYOUT}.get_layer_offset": "ef11549fe60b1799",
        f"{_LAYOUT}.get_num_layers_to_build": "f9ddc61995469597",
        f"{_LAYOUT}.get_layer_id_list": "76494df17d000fe5",
        f"{_TRANSFORMER}.transformer_layer.get_transformer_layer_offset": "277ddbc91265cca3",
    }
    refused = (
        Refusal("overlap_moe_expert_parallel_comm", "it orders the halves of backward passes itself"),
        Refusal("tp_comm_overlap", "Transformer Engine computes both gradients at once where it overlaps them"),
        Refusal("use_transformer_engine_op_fuser", "its experts put off gradients of weights, which nobody computes"),
    )

    def check_program(self, program: Callable[[], Program], options: NoOptions, args: Any) -> None:
        """Refuse overlapped reductions whose order differs between replicas, which are idle at different times.

        If a chunk's gradients are one bucket, its reduction begins with the last of them, in one order on all
        replicas.  Further buckets may hold only norms and embeddings, whose gradients are complete earlier.
        """
        if not getattr(args, "untie_embeddings_and_output_weights", True) or _parameters(args) > _bucket_size(args):
            check_reductions_meet(program, args, "this schedule")

    def check_plan(self, plan: Plan, options: NoOptions) -> None:
        """Refuse stages without exactly two chunks for a V schedule, or one chunk otherwise."""
        chunks = sorted({len(stage.layers) for stage in plan.stages})
        wanted = 2 if placement_of(plan.schedule.name) == "v" else 1
        if chunks != [wanted]:
            raise PlanError(
                "stages[*].layers",
                chunks,
                f"these are numbers of chunks per stage; schedule {plan.schedule.name} has {wanted} in every stage",
                f"Give {wanted} number(s) of layers for each (flags: --num-virtual-stages-per-pipeline-rank {wanted})",
            )


def _parameters(args: Any) -> int:
    """Returns an upper bound on a chunk's parameters: all layers, and the vocabulary twice."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    attention = 4 * hidden * max(hidden, heads * (getattr(args, "kv_channels", None) or 0))
    experts = getattr(args, "num_experts", None) or 1
    width = max(getattr(args, name, None) or 0 for name in ("ffn_hidden_size", "moe_ffn_hidden_size")) or 4 * hidden
    shared = getattr(args, "moe_shared_expert_intermediate_size", None) or 0
    layers = args.num_layers * (attention + 3 * hidden * (experts * width + shared) + 16 * hidden)
    rows = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    return layers + 2 * hidden * (rows or _LARGE_VOCABULARY)


def _bucket_size(args: Any) -> int:
    """Megatron's size of a bucket in elements, at which it begins another one."""
    if getattr(args, "ddp_num_buckets", None):
        return 0
    return getattr(args, "ddp_bucket_size", None) or _BUCKET_SIZE
