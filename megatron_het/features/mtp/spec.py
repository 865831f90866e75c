"""Multi-token prediction: layers beside the output layer that predict the tokens after the next one (DeepSeek-V3)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron_het.features.base import Feature
from megatron_het.features.registry import features_of
from megatron_het.plan import ModelShape, Plan, PlanError

_MTP = "megatron.core.transformer.multi_token_prediction"
_POSITIONS = ("rope", "none")
_LANGUAGE = "megatron.core.models.common.language_module.language_module.LanguageModule"


@dataclass(frozen=True, slots=True)
class MtpOptions:
    """Number of layers for multi-token prediction."""

    layers: int  # number of tokens after the next one that are predicted, above 0


class MultiTokenPrediction(Feature):
    """Additional layers of the last chunk, with a copy of the embedding for their input tokens.

    The copy is kept equal to that of the first chunk, as for tied embeddings.
    """

    name = "mtp"
    title = "multi-token prediction"
    options = MtpOptions
    training_flags: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "mtp-loss-scaling-factor": ("mtp_loss_scaling_factor", 0.1)
    }
    no_local_graphs = "multi-token prediction under a plan runs its layers at other times than local graphs expect"
    upstream_names: ClassVar[Mapping[str, str]] = {
        f"{_MTP}.process_mtp_loss": "4b175647aeca8a06",
        f"{_MTP}.MTPLossLoggingHelper": "56157a499dfc2feb",
        f"{_MTP}.tie_word_embeddings_state_dict": "d35f36469882acdd",
        f"{_MTP}._compute_mtp_acceptance_counts": "c8d1b6a114dab063",
        f"{_MTP}.MTPLossAutoScaler": "63768749f96064ba",
        # Upstream code that is replaced if passes run parts of sequences, or have several documents.
        f"{_MTP}.roll_tensor": "4928a464e8d8fc8c",
        f"{_MTP}._roll_tensor_packed_seq": "87a453e4ae2f0f48",
        f"{_MTP}.MultiTokenPredictionLayer._get_embeddings": "dac02320471040fd",
        f"{_MTP}.MultiTokenPredictionBlock.forward": "525e6e461d71a046",
        "megatron.core.models.gpt.gpt_model.GPTModel._postprocess": "bc1e30d1679f6b95",
        f"{_LANGUAGE}.setup_embeddings_and_output_layer": "70bad0b8b0aaa3f5",
        f"{_LANGUAGE}.shared_embedding_or_output_weight": "5750b3f411aafaa8",
    }

    def options_of(self, plan: Plan) -> MtpOptions | None:
        """Returns the options from the plan's model; None without such layers."""
        return MtpOptions(plan.model.mtp_num_layers) if plan.model.mtp_num_layers else None

    def check_plan(self, plan: Plan, options: MtpOptions) -> None:
        """Refuse a split vocabulary, and unequal microbatches."""
        for other, _ in features_of(plan):
            if other.holds_rows_once:
                problem = "its layers read the embedding of later tokens, whose rows are spread over the stages"
                raise PlanError("model.mtp_num_layers", options.layers, problem, f"Leave out {other.named(plan)}")
        if len(set(plan.training.micro_batch_sizes)) > 1:
            raise PlanError(
                "model.mtp_num_layers",
                options.layers,
                "Megatron divides the loss of its layers by the tokens that count in a microbatch, so microbatches of "
                "different sizes would weigh tokens differently",
                "Use microbatches of one size",
            )

    def extra_layers(self, model: Any) -> int:
        """Returns the layers for later tokens; see :class:`Feature`."""
        return int(getattr(model, "mtp_num_layers", None) or 0)

    def layer_flags(self, model: Any) -> dict[str, int]:
        """Returns the flag with its value; a hybrid model's pattern replaces it."""
        layers = self.extra_layers(model)
        return {"mtp-num-layers": layers} if layers and not model.pattern else {}

    def model_problem(self, model: Any) -> str:
        """Returns the problem with the number of layers or with positions; see :class:`Feature`."""
        layers = self.extra_layers(model)
        if layers > model.num_layers:
            return f"mtp_num_layers = {layers} is more than num_layers = {model.num_layers}"
        if layers and model.learned_positions:
            return "mtp_num_layers needs learned_positions = 0: Megatron's layers know rotary positions only"
        return ""

    def shrink(self, model: ModelShape, like: ModelShape) -> ModelShape:
        """Keep at most one layer."""
        return replace(model, mtp_num_layers=min(like.mtp_num_layers, 1))

    def reads_tokens(self, args: Any, vp_stage: int | None) -> bool:
        """Whether the chunk has layers for later tokens, which embed these tokens."""
        if not args.mtp_num_layers:
            return False
        from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
        from megatron.training.arguments import core_transformer_config_from_args

        config = core_transformer_config_from_args(args)
        return bool(
            mtp_on_this_rank(
                layout=config.pipeline_model_parallel_layout,
                mtp_num_layers=config.mtp_num_layers,
                ignore_virtual=False,
                vp_stage=vp_stage,
            )
        )

    def runs_of_a_layer(self, args: Any) -> int:
        """Returns 1, or the number of later tokens if one layer predicts all of them."""
        return (getattr(args, "mtp_num_layers", None) or 0) if getattr(args, "mtp_use_repeated_layer", False) else 1

    def check_arguments(self, plan: Plan, options: MtpOptions, args: Any) -> None:
        """Refuse arguments that Megatron's layers support only in some settings."""
        flag = "--mtp-num-layers"
        has_copy = not plan.model.tied_embeddings and plan.path[0] != plan.path[-1]
        if has_copy and getattr(args, "mtp_detach_heads", False) and args.overlap_grad_reduce:
            problem = "the last chunk's copy of the embedding gets no gradient then, and early reductions wait for one"
            raise PlanError("--mtp-detach-heads", True, problem, "Leave it out, or --overlap-grad-reduce")
        if args.position_embedding_type not in _POSITIONS:
            problem = f"Megatron's layers of {flag} know {' and '.join(_POSITIONS)} only, in one process too"
            hint = f"Use one of them, or leave out {flag}"
            raise PlanError("--position-embedding-type", args.position_embedding_type, problem, hint)
        if args.multi_latent_attention and args.transformer_impl == "local" and not plan.model.pattern:
            problem = "Megatron makes its layers with its own latent attention, which needs Transformer Engine"
            hint = "Use Transformer Engine, or leave out --multi-latent-attention"
            raise PlanError(flag, options.layers, problem, hint)
