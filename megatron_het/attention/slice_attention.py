"""Causal attention of one slice over itself and the cached slices before it (SlimPipe, section 4.1).

Forward: one call over all keys where the kernel aligns a causal mask bottom-right and they are one view; otherwise a
causal call on the slice's own keys and a full call per run of earlier chunks, merged by online softmax.  Backward: the
kernel's backward of the same calls, from the merged output and log-sum-exp, is exact.  The gradients of earlier chunks
are summed in the cache; those of this slice are complete when its backward runs, because later slices ran first.

With the context exchange (section 4.2) other devices attend to a part of the earlier chunks;
their results are merged like the local ones; see ``places.LayerExchange``.  With context parallelism (section 5)
several ranks share a slice, and each attends to its own keys for the queries of all; see ``places.Sharing``.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_het.attention.calls import Attended, Call, Form, Reach, Sum, Sums, differentiate, in_type
from megatron_het.attention.kv_cache import Run
from megatron_het.attention.places import (
    NO_EXCHANGE,
    NOTHING,
    Given,
    Keys,
    LayerExchange,
    Own,
    Sharing,
    SliceContext,
    Travels,
    WholePlace,
    held_before,
    row_count,
)
from megatron_het.plan.placement import Blocks, Placed
from megatron_het.schedule.cutting import Span, rows_that_see

# A slice whose queries reach back to the start of their document only, or no further than a sliding window.
#
# There is one call per block (``calls.py``) and run of cached chunks.  A kernel that aligns a causal mask bottom-right
# needs one call per document, over the slice's own keys and all earlier ones that are reached, in one tensor.
#
# The cache holds the keys and values that later slices read.  The slice's others are saved like an activation:
# recomputation drops them, and activation offload moves them.
#
# With context parallelism a rank attends to its own keys for the queries of all ranks that share the slice
# (``features/context_parallel/runtime.py``), as far as they reach them.  With the context exchange other devices
# attend to some of the earlier keys (``context_exchange/exchange.py``); the same limits apply there.

_Spans = tuple[tuple[tuple[Span, ...], tuple[Span, ...]], tuple[tuple[Span, int], ...], int, Blocks, Span]


@dataclass(frozen=True, slots=True)
class LimitedPlace:
    """A slice, the keys available to it, and the limits of its queries."""

    context: SliceContext
    # queries as tokens of the sequence: this rank's, and the other ranks' in the order of their rows
    spans: tuple[tuple[Span, ...], tuple[Span, ...]]
    held: tuple[tuple[Span, int], ...]  # tokens whose keys this rank has, each span with its first token in the cache
    first: int  # first own token of the slice, as the cache numbers tokens
    unread: int  # number of own tokens at the start that no later slice reads
    travels: Travels | None = None  # the queries that see keys of other ranks; None if no other rank shares the slice
    received: tuple[Span, ...] = ()  # tokens of the queries from other ranks, in the order of their rows

    @classmethod
    def of(cls, context: SliceContext, tokens: int) -> "LimitedPlace":
        """The place of a slice with ``tokens`` own tokens, which is cached or is the next one to be cached."""
        cache, microbatch, index = context.cache, context.microbatch, context.index
        begins = (*cache.begins(microbatch)[:index], cache.begin_of(microbatch, index))
        spans, held, first, blocks, whole = _spans(begins, tokens, context.parallel, context.reach.placed)
        travels: Travels | None = None
        received: tuple[Span, ...] = ()
        if context.parallel is not None:
            travels, received = _travels(context.reach, tuple(begins), tokens, context.parallel)
        return cls(
            context=context,
            spans=spans,
            held=held,
            first=first,
            unread=held_before(blocks, context.reach.unread(*whole)),
            travels=travels,
            received=received,
        )

    def travelling(self) -> "LimitedPlace":
        return replace(self, spans=(self.spans[0], self.received))

    def without(self, given: Given) -> "LimitedPlace":
        if given[0] == given[1]:
            return self
        left: list[tuple[Span, int]] = []
        for (first, end), at in self.held:
            lo, hi = (min(max(token - at, 0), end - first) for token in given)
            if lo > 0:
                left.append(((first, first + lo), at))
            if first + hi < end:
                left.append(((first + hi, end), at + hi))
        return replace(self, held=tuple(left))

    def calls(self, keys: Keys, own: Own, batch: int, others: bool = False) -> Iterator[Call]:
        if keys is Keys.ALL and (joined := self._per_document(own, batch)) is not None:
            yield from joined
            return
        for each in (Keys.OWN, Keys.EARLIER) if keys is Keys.ALL else (keys,):
            yield from self._per_block(own, batch, others, earlier=each is Keys.EARLIER)

    def _per_block(self, own: Own, batch: int, others: bool, earlier: bool) -> Iterator[Call]:
        """Yields one call per block and run of cached chunks, for either the slice's own or the earlier keys."""
        row, context = 0, self.context
        spans = tuple(span for span, _ in self.held)
        for first, end in self.spans[others]:
            for sequences, blocks in context.reach.blocks((first, end), spans, batch):
                for (lo, hi), form, start, stop in self._joined(blocks):
                    rows = slice(row + lo - first, row + hi - first)
                    if earlier and start < self.first:
                        for run in context.cache.runs(context.microbatch, start, min(stop, self.first)):
                            yield Call(form, run.keys[:, sequences], run.values[:, sequences], rows, sequences, run)
                    if not earlier and stop > self.first:
                        held = slice(max(start, self.first) - self.first, stop - self.first)
                        k, v = (t[held, sequences] for t in own)
                        opens = form is Form.CAUSAL and not others
                        yield Call(form, k, v, rows, sequences, own=held, opens=opens)
            row += end - first

    def _per_document(self, own: Own, batch: int) -> list[Call] | None:
        """One call per document; None if the kernel cannot, ranks share the slice, or the cache holds latents."""
        context, found = self.context, []
        cache, kernel, window = context.cache, context.kernel, context.reach.window_tokens
        if (
            context.parallel is not None
            or context.reach.placed is not None
            or cache.expands
            or (window is not None and not kernel.takes_window)
        ):
            return None
        tokens = own[0].shape[0]
        for sequences, documents in context.reach.documents((self.first, self.first + tokens), batch):
            for (lo, hi), start in documents:
                if hi - lo < hi - start and not kernel.takes_prefix(hi - lo, hi - start):
                    return None
                held = slice(max(start, self.first) - self.first, hi - self.first)
                k, v = (t[held, sequences] for t in own)
                run = None
                if start < self.first and not self.unread:  # the cache holds all own tokens: mostly a view
                    whole, size = cache.in_order(context.microbatch, start, hi), hi - self.first
                    earlier = tuple(part for part in whole.parts if part[0] != context.index)
                    run = Run(whole.keys[:-size], whole.values[:-size], earlier)
                    k, v = whole.keys[:, sequences], whole.values[:, sequences]
                elif start < self.first:
                    run = cache.in_order(context.microbatch, start, self.first)
                    k, v = torch.cat((run.keys[:, sequences], k)), torch.cat((run.values[:, sequences], v))
                rows = slice(lo - self.first, hi - self.first)
                found.append(
                    Call(
                        Form.CAUSAL, k, v, rows=rows, sequences=sequences, run=run, own=held, window=window, opens=True
                    )
                )
        return found

    def _joined(self, blocks: Sequence[Any]) -> list[tuple[Span, Form, int, int]]:
        """(queries, form, first and end key as the cache numbers tokens), with neighbouring full blocks joined."""
        found: list[tuple[Span, Form, int, int]] = []
        for block in blocks:
            first, last = block.keys
            at, (held, _) = next((at, span) for span, at in self.held if span[0] <= first < span[1])
            start, stop = at + first - held, at + last - held
            if block.form is Form.FULL and found and found[-1][:2] == (block.rows, Form.FULL) and found[-1][3] == start:
                found[-1] = (block.rows, Form.FULL, found[-1][2], stop)
            else:
                found.append((block.rows, block.form, start, stop))
        return found


def _spans(begins: Sequence[int], tokens: int, sharing: Sharing | None, placed: Placed | None = None) -> _Spans:
    """Computes the fields of a :class:`LimitedPlace` for the last of some slices.

    Args:
        begins: First own token of every slice up to this one, as the cache numbers tokens.
        placed: Tokens of each slice on each context-parallel rank, if placed by documents.

    Returns:
        ``spans``, ``held`` and ``first``; then this rank's blocks of the slice, and the slice's span of the sequence.
    """
    held: list[tuple[Span, int]] = []
    own: Blocks = ()
    others: Sequence[Blocks] = ()
    first = end = 0
    for index, (at, until) in enumerate(zip(begins, (*begins[1:], begins[-1] + tokens), strict=True)):
        by_rank = _by_rank(sharing, placed, index, until - at)
        own, others = by_rank[0], ()
        if sharing is not None:
            own, others = by_rank[sharing.rank], [by_rank[rank] for rank in sharing.others]
        first, end = end, end + sum(b - a for blocks in (own, *others) for a, b in blocks)
        row = at
        for a, b in own:
            held.append(((first + a, first + b), row))
            row += b - a
    mine = tuple((first + a, first + b) for a, b in own)
    theirs = tuple((first + a, first + b) for blocks in others for a, b in blocks)
    return (mine, theirs), tuple(held), begins[-1], own, (first, end)


def _by_rank(sharing: Sharing | None, placed: Placed | None, index: int, own: int) -> Sequence[Blocks]:
    """Returns the blocks of a slice's tokens on each rank, if this rank has ``own`` tokens."""
    if placed is not None:
        return placed.by_slice[index]
    return [((0, own),)] if sharing is None else sharing.by_rank(own)


@functools.lru_cache(maxsize=1024)
def _travels(reach: Reach, begins: tuple[int, ...], tokens: int, sharing: Sharing) -> tuple[Travels, tuple[Span, ...]]:
    """The queries that ranks send to each other, and the tokens of those that this rank receives.

    A query is sent to the ranks whose keys it sees, never for a document that one rank has completely.  Every rank
    has the starts of documents, so sender and receiver compute the same rows.

    Args:
        begins: First own token of every slice up to this one, as the cache numbers tokens.
    """
    held: list[list[Span]] = [[] for _ in range(sharing.size)]
    queries: list[list[Span]] = []
    first = 0
    for index, (at, until) in enumerate(zip(begins, (*begins[1:], begins[-1] + tokens), strict=True)):
        by_rank = _by_rank(sharing, reach.placed, index, until - at)
        queries = [[(first + a, first + b) for a, b in blocks] for blocks in by_rank]
        for rank, blocks in enumerate(queries):
            held[rank] += blocks
        first += sum(b - a for blocks in queries for a, b in blocks)
    starts = reach.starts or ((0,),)

    @functools.cache
    def seen(owner: int, holder: int) -> list[tuple[slice, Span]]:
        rows, row = [], 0
        for block in queries[owner]:
            for a, b in rows_that_see(block, held[holder], starts, reach.window_tokens):
                rows.append((slice(row + a - block[0], row + b - block[0]), (a, b)))
            row += block[1] - block[0]
        return rows

    coming = [seen(rank, sharing.rank) for rank in sharing.others]
    sent = tuple(tuple(rows for rows, _ in seen(sharing.rank, rank)) for rank in sharing.others)
    received = tuple(row_count([rows for rows, _ in each]) for each in coming)
    pairs = itertools.permutations(range(sharing.size), 2)
    travels = Travels(sent, received, any(seen(*pair) for pair in pairs))
    return travels, tuple(span for each in coming for _, span in each)


# The softmax offset of a head, also called its sink: the score of an additional key whose value is zero.


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output, in at least fp32, and log-sum-exp of attention with the sinks among the keys.

    Args:
        out: ``[s, b, heads, d]``, of attention without the sinks.
        lse: ``[b, heads, s]``, likewise.
        sink: ``heads`` scores.
    """
    score = sink.detach().to(lse.dtype).view(1, -1, 1)
    weight = torch.sigmoid(lse - score).permute(2, 0, 1).unsqueeze(-1)
    wide = torch.promote_types(out.dtype, torch.float32)
    return out.to(wide) * weight.to(wide), torch.logaddexp(lse, score.expand_as(lse))


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Gradient of the sinks, from ``out`` and ``lse`` with the sinks, and the gradient of ``out``."""
    wide = torch.promote_types(out.dtype, torch.float32)
    score = sink.detach().to(lse.dtype).view(1, -1, 1)
    share = torch.exp(score - lse).permute(2, 0, 1).to(wide)
    gradient = -(share * (grad.to(wide) * out.to(wide)).sum(dim=-1)).sum(dim=(0, 1))
    return gradient.to(sink.dtype).view_as(sink)


Place = WholePlace | LimitedPlace  # a slice with the keys that it attends to


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, context: SliceContext
    ) -> Tensor:
        cache, rotation = context.cache, context.rotation
        if rotation is not None:
            query, key = rotation.turn(query), rotation.turn(key)
        kind = LimitedPlace.of if context.reach.is_limited else WholePlace
        place: Place = kind(context, query.shape[0])
        # A recomputed forward attends to all keys itself: its helpers took part in the first forward only.
        is_new = cache.append(context.microbatch, context.index, key, value, place.unread)
        rows = Attended(query)
        _attend(rows, cache.shown(key, value), place, context, context.exchange if is_new else NO_EXCHANGE)
        out, lse = rows.out, rows.lse
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        # Contiguous, so that the output projection saves this storage and not a copy.
        out = in_type(out, query.dtype).contiguous()
        unread = [_alone(t[: place.unread]) for t in (key, value)] if place.unread else []
        ctx.save_for_backward(_alone(query), out, lse, *unread, *(() if sink is None else (sink,)))
        ctx.context, ctx.place, ctx.has_sink = context, place, sink is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
        dq, dk, dv = sums[0].rounded, in_type(dk, query.dtype), in_type(dv, query.dtype)
        if rotation is not None:
            dq, dk = rotation.turn_back(dq), rotation.turn_back(dk)
        return dq, dk, dv, ds, None


def slice_attention(
    query: Tensor, key: Tensor, value: Tensor, context: SliceContext, sink: Tensor | None = None
) -> Tensor:
    """Attention of one slice of a microbatch.

    Args:
        query: ``[s, b, heads, d]`` of this slice.
        key: ``[s, b, groups, d]`` of this slice; ``groups`` divides ``heads``.  The latents of a :class:`LatentCache`
            have another shape.
        context: All other inputs.
        sink: Score of an additional key of value zero, for each of ``heads``; None without.

    Returns:
        ``[s, b, heads, d]``, contiguous.

    Raises:
        CacheError: Slices come out of order.
    """
    out: Tensor = _SliceAttention.apply(query, key, value, sink, context)
    return out


def _attend(rows: Attended, own: Own, place: Place, context: SliceContext, now: LayerExchange) -> None:
    """Compute the attention of the slice's queries into ``rows``; ``own`` are the slice's keys and values."""
    if context.parallel is not None:
        _attend_shared(rows, own, place, context, now, context.parallel)
        return
    given, batch = (context.kernel, context.scale), rows.query.shape[1]
    if not now.is_active:
        rows.attend(place.calls(Keys.ALL, own, batch), *given)
        return
    left = place.without(now.begin_forward(rows.query))
    rows.attend(place.calls(Keys.OWN, own, batch), *given)
    now.help(*given)
    rows.attend(left.calls(Keys.EARLIER, own, batch), *given)
    for part in now.end_forward():
        rows.merge(*part)


def _attend_shared(
    rows: Attended, own: Own, place: Place, context: SliceContext, now: LayerExchange, parallel: Sharing
) -> None:
    """Attend to this rank's keys for the queries of all ranks that share the slice, and collect its own results."""
    given, batch = (context.kernel, context.scale), rows.query.shape[1]
    # Helpers of the context exchange expect the queries of all ranks.
    travels = None if now.is_active else place.travels
    if travels is not None and not travels.is_any:
        rows.attend(place.calls(Keys.ALL, own, batch), *given)
        return
    there = place if travels is None else place.travelling()
    gathering = parallel.gather(rows.query, travels=travels)
    rows.attend(place.calls(Keys.OWN, own, batch), *given)
    (theirs,) = gathering()
    before, others = theirs.shape[0], Attended(theirs, has_blanks=True)
    taken = now.begin_forward(torch.cat((theirs, rows.query))) if now.is_active else NOTHING
    others.attend(there.calls(Keys.OWN, own, batch, others=True), *given)
    now.help(*given)
    others.attend(there.without(taken).calls(Keys.EARLIER, own, batch, others=True), *given)
    for out, lse in now.end_forward():
        others.merge(out[:before], lse[..., :before])
        rows.merge(out[before:], lse[..., before:])
    returning = parallel.give_back(others.out.to(theirs.dtype), others.lse, travels=travels)
    # This rank's queries attend to its earlier keys while those results are sent.
    rows.attend(place.without(taken).calls(Keys.EARLIER, own, batch), *given)
    for i, (out, lse) in enumerate(returning()):
        if travels is None:
            rows.merge(out, lse)
        else:
            rows.merge_rows(travels.sent[i], out, lse)


def _differentiate(sums: Sums, mine: Sequence[Tensor], own: Own, place: Place, context: SliceContext) -> None:
    """Add up the gradients of a slice, in the order of the forward's calls."""
    cache, exchange, batch = context.cache, context.exchange, mine[1].shape[1]
    given = context.kernel, context.scale, functools.partial(cache.add_gradient, context.microbatch)
    if context.parallel is not None:
        _differentiate_shared(sums, mine, own, place, context, context.parallel)
    elif not exchange.is_active:
        is_split = context.kernel.splits_backward and isinstance(place, WholePlace)
        for keys in (Keys.OWN, Keys.EARLIER) if is_split else (Keys.ALL,):
            differentiate(place.calls(keys, own, batch), mine, sums, *given)
    else:
        left = place.without(exchange.begin_backward(*mine))
        differentiate(place.calls(Keys.OWN, own, batch), mine, sums, *given)
        exchange.help(context.kernel, context.scale)
        differentiate(left.calls(Keys.EARLIER, own, batch), mine, sums, *given)
        for part, returned in exchange.end_backward():
            sums[0].add(part)
            for gradient in returned:
                cache.add_token_gradient(context.microbatch, *gradient)


def _differentiate_shared(
    sums: Sums, mine: Sequence[Tensor], own: Own, place: Place, context: SliceContext, parallel: Sharing
) -> None:
    """Add up the gradients of a slice that other ranks share."""
    cache, exchange, batch = context.cache, context.exchange, mine[1].shape[1]
    given = context.kernel, context.scale, functools.partial(cache.add_gradient, context.microbatch)
    travels = None if exchange.is_active else place.travels
    if travels is not None and not travels.is_any:
        differentiate(place.calls(Keys.ALL, own, batch), mine, sums, *given)
        return
    there = place if travels is None else place.travelling()
    gathering = parallel.gather(*mine, travels=travels)
    differentiate(place.calls(Keys.OWN, own, batch), mine, sums, *given)
    theirs = gathering()
    before = theirs[1].shape[0]
    others = Sum(theirs[1]), *sums[1:]
    taken = NOTHING
    if exchange.is_active:  # rows of all ranks; log-sum-exps have theirs last
        pairs = zip(theirs, mine, strict=True)
        taken = exchange.begin_backward(*(torch.cat(pair, dim=2 if pair[0].dim() == 3 else 0) for pair in pairs))
    differentiate(there.calls(Keys.OWN, own, batch, others=True), theirs, others, *given)
    exchange.help(context.kernel, context.scale)
    differentiate(there.without(taken).calls(Keys.EARLIER, own, batch, others=True), theirs, others, *given)
    for part, returned in exchange.end_backward():
        others[0].add(part[:before])
        sums[0].add(part[before:])
        for gradient in returned:
            cache.add_token_gradient(context.microbatch, *gradient)
    wide = in_type(others[0].total, torch.promote_types(theirs[1].dtype, torch.float32))
    returning = parallel.give_back(wide, travels=travels)
    differentiate(place.without(taken).calls(Keys.EARLIER, own, batch), mine, sums, *given)
    for i, (part,) in enumerate(returning()):
        if travels is None:
            sums[0].add(part)
        else:
            sums[0].add_rows(travels.sent[i], part)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor, cloned if it is a view: a view keeps the fused projection of queries, keys and values in memory."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
