"""Which kinds of attention the kernels of slices know, wherever they stand in for a layer's own."""

from __future__ import annotations

from typing import Any

from megatron_het.features.base import Refusal
from megatron_het.plan import PlanError

POSITIONS = ("rope", "yarn", "learned_absolute", "none")
ATTENTION_REFUSED = (
    Refusal(
        "attention_dropout",
        "dropout inside attention would have to be the same in the slice's backward, call by call; "
        "use --attention-dropout 0",
    ),
    Refusal("experimental_attention_variant", "only ordinary softmax attention is cut into slices"),
    Refusal("qk_clip", "the largest attention logit is not known to the slice kernels"),
    Refusal("log_max_attention_logit", "the largest attention logit is not known to the slice kernels"),
    Refusal("use_kitchen_attention", "its kernels do not give what slices are merged from"),
    Refusal("fused_single_qkv_rope", "it refuses the argument that tells a layer its slice"),
    Refusal("heterogeneous_layers_config_path", "layers without attention are not supported with slices"),
)
"""What the attention of slices does not know, wherever it stands in for a layer's own."""


def check_reach(args: Any) -> None:
    """Refuse positions, windows and recomputation that the attention of slices does not know.

    Raises:
        PlanError: The first thing that does not fit.
    """
    if args.position_embedding_type not in POSITIONS:
        raise PlanError(
            "--position-embedding-type",
            args.position_embedding_type,
            f"positions of slices are known for {', '.join(POSITIONS)} only",
        )
    if getattr(args, "multi_latent_attention", False) and "mla_up_proj" in (args.recompute_modules or ()):
        raise PlanError(
            "--recompute-modules",
            "mla_up_proj",
            "slices make keys and values anew from compressed ones already, so there is nothing to recompute",
            "Leave mla_up_proj out",
        )
    size = getattr(args, "window_size", None)
    if size and (size[0] < 0 or size[1] != 0):
        raise PlanError(
            "--window-size",
            ",".join(map(str, size)),
            "slices see a number of tokens before their own, and none after",
            "Give the tokens before, and 0: --window-size 4096,0",
        )
