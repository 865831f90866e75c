"""Packed documents: attention that ends where a document begins, and what it cannot be combined with."""

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_het.features.base import ATTENTION_REFUSED, Feature, NoOptions, check_reach, flag_of
from megatron_het.plan import Plan, PlanError

_DATASET = "megatron.core.datasets.gpt_dataset"
CONVERSATIONS, BY_DATASET, BY_TOKEN = "sft", "dataloader_inter_document_masking", "reset_attention_mask"
"""Megatron's arguments: packed conversations, documents as the dataset knows them, or up to their last token."""
PACKING = (CONVERSATIONS, BY_DATASET)  # those with which Megatron packs sequences, and positions begin anew with each


class Documents(Feature):
    """Several documents in a sequence that do not see each other.

    The first stage reads where they begin and tells all ranks before an iteration.  Every chunk then attends with the
    kernels of slices, without slices too: no stage needs a mask.
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
        """Refuse what cannot be done where documents do not see each other."""
        flag = asked_by(args)
        if not flag:
            return
        for refusal in ATTENTION_REFUSED:
            refusal.check(args, flag_of(flag))
        check_reach(args)
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
        """Returns the argument that asks for documents; "" if none does."""
        return asked_by(args)

    def runs_with(self, args: Any) -> bool:
        """Whether attention ends where documents do; see :class:`Feature`."""
        return bool(asked_by(args))

    def apply(self, plan: Plan, options: NoOptions, args: Any) -> None:
        """No masks: they grow as the square of the length."""
        if asked_by(args):
            args.create_attention_mask_in_dataloader = False


def asked_by(args: Any) -> str:
    """The argument that asks for documents that do not see each other; "" if none does."""
    return next((name for name in (*PACKING, BY_TOKEN) if getattr(args, name, False)), "")
