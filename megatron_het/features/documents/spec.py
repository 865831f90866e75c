"""Packed documents: attention within documents, and what it cannot be combined with."""

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_het.features.base import ATTENTION_REFUSED, Feature, NoOptions, check_reach, flag_of
from megatron_het.plan import Plan, PlanError

_DATASET = "megatron.core.datasets.gpt_dataset"
CONVERSATIONS, BY_DATASET, BY_TOKEN = "sft", "dataloader_inter_document_masking", "reset_attention_mask"
"""Megatron's arguments: packed conversations, documents of the dataset, or documents up to their last token."""
PACKING = (CONVERSATIONS, BY_DATASET)  # with these Megatron packs sequences, and positions restart at each


class Documents(Feature):
    """Several documents in a sequence that do not attend to each other.

    The first stage reads their starts and sends them to all ranks before an iteration.  Every chunk then uses the
    kernels of slice attention, even without slices, so no stage needs a mask.
    """

    name = "documents"
    title = "packed documents"
    always = True  # one document per sequence gives it nothing to do
    packing_flags = frozenset(map(flag_of, (*PACKING, BY_TOKEN)))
    upstream_names: ClassVar[Mapping[str, str]] = {
        "megatron.training.datasets.sft_dataset.SFTDataset.__getitem__": "f5314cbb2afc0201",
        f"{_DATASET}.GPTDataset.__getitem__": "6986ce5ec94ce441",
        f"{_DATASET}._get_ltor_masks_and_position_ids": "81596ac59586d6df",
    }

    def check_any_arguments(self, plan: Plan, args: Any) -> None:
        """Refuse arguments that cannot be combined with attention within documents."""
        flag = asked_by(args)
        if not flag:
            return
        for refusal in ATTENTION_REFUSED:
            refusal.check(args, flag_of(flag))
        check_reach(args)
        if flag == BY_TOKEN and getattr(args, "create_attention_mask_in_dataloader", None) is False:
            problem = f"Megatron makes no mask then and ignores {flag_of(flag)}, which a plan would obey"
            raise PlanError("--no-create-attention-mask-in-dataloader", True, problem, "Leave one of the two out")
        if flag == BY_TOKEN and getattr(args, "window_size", None):
            problem = "Megatron's own attention forgets documents in layers with a sliding window"
            hint = f"Use {flag_of(BY_DATASET)}, with which a window ends at its document"
            raise PlanError(flag_of(flag), True, problem, hint)
        if flag in PACKING and getattr(args, "iterations_to_skip", None):
            raise PlanError(
                flag_of(flag),
                True,
                "to skip iterations Megatron reads where documents begin on every stage, and only the first one knows",
                "Leave --iterations-to-skip out",
            )

    def packing_argument(self, args: Any) -> str:
        """Returns the argument that switches documents on; "" if none does."""
        return asked_by(args)

    def runs_with(self, args: Any) -> bool:
        """Whether attention is within documents; see :class:`Feature`."""
        return bool(asked_by(args))

    def apply(self, plan: Plan, options: NoOptions, args: Any) -> None:
        """Switch off Megatron's masks, whose size is quadratic in the length."""
        if asked_by(args):
            args.create_attention_mask_in_dataloader = False


def asked_by(args: Any) -> str:
    """The argument that switches on attention within documents; "" if none does."""
    return next((name for name in (*PACKING, BY_TOKEN) if getattr(args, name, False)), "")
