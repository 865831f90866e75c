"""Causal attention of one slice over itself and the cached slices before it (SlimPipe, section 4.1).

Forward: one call over all keys where the kernel aligns a causal mask bottom-right and they are one view; otherwise a
causal call on the slice's own keys and a full call per run of earlier chunks, merged by online softmax.  Backward: the
kernel's backward of the same calls, from the merged output and log-sum-exp, is exact.  The gradients of earlier chunks
are added up in the cache; those of this slice are complete when its backward runs, because later slices went before.

With the context exchange (section 4.2) a part of the earlier chunks is attended to by other devices,
and merged like the local parts; see ``layer_exchange.py``.  With context parallelism (section 5) a slice
is shared by several ranks, whose queries all come here; see ``places.Sharing``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from megatron_het.attention.calls import Attended, Sum, Sums, differentiate
from megatron_het.attention.layer_exchange import NO_EXCHANGE, LayerExchange
from megatron_het.attention.limited import LimitedPlace
from megatron_het.attention.merge import in_type
from megatron_het.attention.places import Keys, Own, Place, Sharing, SliceContext, WholePlace
from megatron_het.attention.sink import add_sink, sink_gradient


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sink: torch.Tensor | None,
        context: SliceContext,
    ) -> torch.Tensor:
        cache, rotation = context.cache, context.rotation
        if rotation is not None:
            query, key = rotation.turn(query), rotation.turn(key)
        place = _place_of(context, query.shape[0])
        # A recomputed forward attends to everything itself: the slot of its helpers is over.
        is_new = cache.append(context.microbatch, context.index, key, value, place.unread)
        rows = Attended(query)
        _attend(rows, cache.shown(key, value), place, context, context.exchange if is_new else NO_EXCHANGE)
        out, lse = rows.out, rows.lse
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        # Contiguous, so that the output projection keeps this very storage and not a copy.
        out = in_type(out, query.dtype).contiguous()
        unread = [_alone(t[: place.unread]) for t in (key, value)] if place.unread else []
        ctx.save_for_backward(_alone(query), out, lse, *unread, *(() if sink is None else (sink,)))
        ctx.context, ctx.place, ctx.has_sink = context, place, sink is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, out, lse, *unread = ctx.saved_tensors
        sink = unread.pop() if ctx.has_sink else None
        context, place = ctx.context, ctx.place
        cache, microbatch, index, rotation = context.cache, context.microbatch, context.index, context.rotation
        cache.check_last(microbatch, index)
        appended = cache.joined(microbatch, index, unread)
        own = cache.shown(*appended)
        sums = Sum(query), Sum(own[0]), Sum(own[1])
        _differentiate(sums, (grad, query, out, lse), own, place, context)
        dk, dv = cache.of_appended(appended[0], sums[1].total, sums[2].total)
        dk, dv = cache.settle(microbatch, index, dk, dv)
        ds = sink_gradient(grad, out, lse, sink) if sink is not None and ctx.needs_input_grad[3] else None
        dq, dk, dv = (in_type(part, query.dtype) for part in (sums[0].total, dk, dv))
        if rotation is not None:
            dq, dk = rotation.turn_back(dq), rotation.turn_back(dk)
        return dq, dk, dv, ds, None


def slice_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: SliceContext, sink: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of one slice of a microbatch.

    Args:
        query: ``[s, b, heads, d]`` of this slice.
        key: ``[s, b, groups, d]`` of this slice; ``groups`` divides ``heads``.  What a :class:`LatentCache` holds has
            another shape.
        value: The same of the values.
        context: Everything else.
        sink: Score of a further key of value zero, for each of ``heads``; None without.

    Returns:
        ``[s, b, heads, d]``, contiguous.

    Raises:
        CacheError: Slices come out of order.
    """
    out: torch.Tensor = _SliceAttention.apply(query, key, value, sink, context)
    return out


def _place_of(context: SliceContext, tokens: int) -> Place:
    return LimitedPlace.of(context, tokens) if context.reach.is_limited else WholePlace(context, tokens)


def _attend(rows: Attended, own: Own, place: Place, context: SliceContext, now: LayerExchange) -> None:
    """The slice's queries attend to everything that they see."""
    if context.parallel is not None:
        _attend_shared(rows, own, place, context, now, context.parallel)
        return
    given, batch = (context.kernel, context.scale), rows.query.shape[1]
    if not now.is_active:
        rows.attend(place.calls(Keys.ALL, own, batch), *given)
        return
    left = place.without(now.begin_forward(rows.query))
    rows.attend(place.calls(Keys.OWN, own, batch), *given)
    now.help_forward(*given)
    rows.attend(left.calls(Keys.EARLIER, own, batch), *given)
    for part in now.end_forward():
        rows.merge(*part)


def _attend_shared(
    rows: Attended, own: Own, place: Place, context: SliceContext, now: LayerExchange, parallel: Sharing
) -> None:
    """The queries of all ranks that share the slice attend to this rank's keys, and its own to everything."""
    given, batch = (context.kernel, context.scale), rows.query.shape[1]
    gathering = parallel.gather(rows.query)
    rows.attend(place.calls(Keys.OWN, own, batch), *given)
    (theirs,) = gathering()
    before, others = theirs.shape[0], Attended(theirs, has_blanks=True)
    left = place.without(now.begin_forward(torch.cat((theirs, rows.query))))
    others.attend(place.calls(Keys.OWN, own, batch, others=True), *given)
    now.help_forward(*given)
    others.attend(left.calls(Keys.EARLIER, own, batch, others=True), *given)
    for out, lse in now.end_forward():
        others.merge(out[:before], lse[..., :before])
        rows.merge(out[before:], lse[..., before:])
    returning = parallel.give_back(others.out.to(theirs.dtype), others.lse)
    # The rest of its own while those travel back.
    rows.attend(left.calls(Keys.EARLIER, own, batch), *given)
    for out, lse in returning():
        rows.merge(out, lse)


def _differentiate(sums: Sums, mine: Sequence[torch.Tensor], own: Own, place: Place, context: SliceContext) -> None:
    """Add up the gradients of a slice; in the order of the forward."""
    cache, exchange, batch = context.cache, context.exchange, mine[1].shape[1]
    given = context.kernel, context.scale, functools.partial(cache.add_gradient, context.microbatch)
    if context.parallel is not None:
        _differentiate_shared(sums, mine, own, place, context, context.parallel)
    elif not exchange.is_active:
        differentiate(place.calls(Keys.ALL, own, batch), mine, sums, *given)
    else:
        left = place.without(exchange.begin_backward(*mine))
        differentiate(place.calls(Keys.OWN, own, batch), mine, sums, *given)
        exchange.help_backward(context.kernel, context.scale)
        differentiate(left.calls(Keys.EARLIER, own, batch), mine, sums, *given)
        for part, returned in exchange.end_backward():
            sums[0].add(part)
            for gradient in returned:
                cache.add_token_gradient(context.microbatch, *gradient)


def _differentiate_shared(
    sums: Sums, mine: Sequence[torch.Tensor], own: Own, place: Place, context: SliceContext, parallel: Sharing
) -> None:
    """Add up the gradients of a slice that other ranks share."""
    cache, exchange, batch = context.cache, context.exchange, mine[1].shape[1]
    given = context.kernel, context.scale, functools.partial(cache.add_gradient, context.microbatch)
    gathering = parallel.gather(*mine)
    differentiate(place.calls(Keys.OWN, own, batch), mine, sums, *given)
    theirs = gathering()
    before = theirs[1].shape[0]
    others = Sum(theirs[1]), *sums[1:]
    left = place.without(exchange.begin_backward(*_joined_rows(theirs, mine)))
    differentiate(place.calls(Keys.OWN, own, batch, others=True), theirs, others, *given)
    exchange.help_backward(context.kernel, context.scale)
    differentiate(left.calls(Keys.EARLIER, own, batch, others=True), theirs, others, *given)
    for part, returned in exchange.end_backward():
        others[0].add(part[:before])
        sums[0].add(part[before:])
        for gradient in returned:
            cache.add_token_gradient(context.microbatch, *gradient)
    returning = parallel.give_back(in_type(others[0].total, torch.promote_types(theirs[1].dtype, torch.float32)))
    differentiate(left.calls(Keys.EARLIER, own, batch), mine, sums, *given)
    for (part,) in returning():
        sums[0].add(part)


def _joined_rows(others: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Rows of all ranks; log-sum-exps have theirs last."""
    return tuple(torch.cat(pair, dim=2 if pair[0].dim() == 3 else 0) for pair in zip(others, own, strict=True))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without others in its memory: a view would keep the fused projection of queries, keys and values."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
