"""Layers of experts without values: every expert gets an equal share of the routed tokens.

How many tokens an expert gets depends on the scores of the router.  A dry run has none, so it takes the balanced case.
What a rank with all experts of a layer holds is the same in any other case, but for the temporaries of one expert.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch

SELECT = torch.ops.aten.masked_select.default
"""The operator by which Megatron sorts tokens by their experts; its result has a row per token and chosen expert."""


def check_experts(args: Any) -> int:
    """Returns what of the layers of experts a dry run can tell.

    Args:
        args: Megatron's arguments, as parsed.

    Returns:
        How many experts a token is sent to; 0 without experts.

    Raises:
        SystemExit: What is lost, padded or sent depends on values.
    """
    if not args.num_experts:
        return 0
    for name in ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"):
        value = getattr(args, name, None)
        if value is not None and value is not False:
            flag = "--" + name.replace("_", "-")
            sys.stderr.write(
                f"megatron_het.dry_run: {flag} {value}: how many tokens are dropped depends on values, which a dry run "
                "does not have. Leave the flag out here: then no token is dropped, which takes the most memory\n"
            )
            raise SystemExit(2)
    if args.moe_token_dispatcher_type != "alltoall":
        sys.stderr.write(
            f"megatron_het.dry_run: --moe-token-dispatcher-type {args.moe_token_dispatcher_type}: a dry run knows the "
            "sizes of what alltoall sends only. Use --moe-token-dispatcher-type alltoall here\n"
        )
        raise SystemExit(2)
    return int(args.moe_router_topk)


def balance_experts() -> None:
    """Have Megatron's dispatcher and experts divide what they get equally; after Megatron was imported."""
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.experts import SequentialMLP

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess, sort, forward = dispatcher.preprocess, token_dispatcher.sort_chunks_by_idxs, SequentialMLP.forward

    @functools.wraps(preprocess)
    def known_splits(self: Any, routing_map: torch.Tensor) -> Any:
        counts = preprocess(self, routing_map)
        if self.output_splits_tp is not None:  # every rank of a replica has an equal part of the sequence
            sent = equal_shares(self.num_out_tokens, self.ep_size)
            self.input_splits = _Sizes(sent, self.input_splits)
            self.output_splits = _Sizes([sent[self.ep_group.rank()]] * self.ep_size, self.output_splits)
            received = sum(self.output_splits)
            self.output_splits_tp = _Sizes([received] * self.tp_size, self.output_splits_tp)
        return counts

    @functools.wraps(sort)
    def sort_equal(
        source: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor, *positional: Any, **keywords: Any
    ) -> Any:
        del sizes
        parts = order.numel()
        shares = _List(equal_shares(source.shape[0], parts))
        return sort(source, shares, _List(range(parts)), *positional, **keywords)

    @functools.wraps(forward)
    def forward_equal(self: Any, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> Any:
        del counts
        return forward(self, tokens, _List(equal_shares(tokens.shape[0], self.num_local_experts)), probs)

    dispatcher.preprocess = known_splits
    token_dispatcher.sort_chunks_by_idxs = sort_equal
    SequentialMLP.forward = forward_equal


def selected(arguments: tuple[Any, ...], top_k: int) -> torch.Tensor:
    """Returns what :data:`SELECT` gives: ``[tokens * top_k]`` of a ``[experts, tokens]`` mask.

    Args:
        arguments: Of the operator: source and mask.
        top_k: Experts per token.
    """
    source, mask = arguments
    return torch.empty(mask.shape[-1] * top_k, dtype=source.dtype, device=source.device)


def equal_shares(tokens: int, parts: int) -> list[int]:
    """How many tokens each part gets; the first parts get what is left over."""
    share, rest = divmod(tokens, parts)
    return [share + (p < rest) for p in range(parts)]


class _Sizes(list[int]):
    """Sizes beside the tensor that a real run keeps them in, for as long."""

    def __init__(self, values: Iterable[int], counted: torch.Tensor) -> None:
        super().__init__(values)
        self.counted = counted

    def tolist(self) -> list[int]:
        """See ``Tensor.tolist``."""
        return list(self)


class _List:
    """Stands for a tensor of which only the values are asked."""

    def __init__(self, values: Iterable[int]) -> None:
        self._values = list(values)

    def tolist(self) -> list[int]:
        """See ``Tensor.tolist``."""
        return list(self._values)
