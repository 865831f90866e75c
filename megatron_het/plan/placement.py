"""Rank -> (stage, replica, tensor-parallel rank), and the rank lists that groups are built from."""

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_het.plan.schema import Cut, Plan, PlanError, Replica, Stage
from megatron_het.schedule.ir import Place

# Parts held by the ranks of a plan: rows of a split vocabulary, and tokens of a slice.  Pure arithmetic.


# Rows of a split vocabulary on each stage (beyond SlimPipe, section 4.3, which divides them equally).
#
# A fast stage may hold more rows (``vocabulary_shares`` of the schedule), so that all stages take equally long for
# their parts of the output layer.

PARAMETER = "vocabulary_shares"  # of the plan's schedule: one whole number per stage
_MOST_PARTS = 256  # most equal parts into which rows are divided, so that checkpoints have few pieces per rank


def vocabulary_shares(plan: Plan) -> tuple[int, ...] | None:
    """Returns the relative number of rows of each stage; None if all stages hold equally many, up to one part."""
    given = plan.schedule.parameters.get(PARAMETER)
    return None if given is None else tuple(given)


def tp_unit(plan: Plan) -> int:
    """Number of which the rows of a stage are a multiple, so that every TP size of the plan divides them."""
    return math.lcm(*(r.tp for s in plan.stages for r in s.replicas))


def stage_rows(plan: Plan, total: int) -> tuple[int, ...]:
    """Rows of the vocabulary on each stage.

    Args:
        plan: Gives the stages, and their shares if it has any.
        total: Rows of the whole vocabulary, padded.

    Returns:
        One number per stage, together ``total``: as near the shares as equal parts of the rows allow, each at least
        one part and a multiple of all TP sizes. Without shares equal ones, where the rows divide.

    Raises:
        ValueError: There are fewer such parts than stages.
    """
    stages, tp, shares = len(plan.stages), tp_unit(plan), vocabulary_shares(plan)
    if shares is None and total % (stages * tp) == 0:
        return (total // stages,) * stages
    units = total // tp
    parts = 0 if total % tp else next(n for n in range(min(units, _MOST_PARTS), 0, -1) if units % n == 0)
    if parts < stages:
        raise ValueError(
            f"a vocabulary of {total} rows has {parts} equal parts that {tp} TP ranks divide, for {stages} stages"
        )
    return tuple(count * (total // parts) for count in _rounded(parts, shares or (1,) * stages))


def _rounded(parts: int, shares: Sequence[int]) -> list[int]:
    """Parts in proportion to shares, at least one each; the remainder goes to the largest rounding losses."""
    spare, total = parts - len(shares), sum(shares)
    counts = [1 + spare * share // total for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda s: (-(spare * shares[s] % total), s))
    for s in by_rest[: parts - sum(counts)]:
        counts[s] += 1
    return counts


# Tokens of a slice on the context-parallel ranks of a replica.

Blocks = Sequence[tuple[int, int]]  # blocks ``[first, end)`` of tokens


def block_step(grain: int) -> int:
    """Number of which the tokens of a block are a multiple, so that a rank's two blocks are a multiple of ``grain``."""
    return grain // math.gcd(grain, 2)


def least_tokens(parts: int, grain: int) -> int:
    """The fewest tokens of a slice of which each of ``parts`` ranks gets two blocks."""
    return 2 * block_step(grain) * parts if parts > 1 else grain


def token_blocks(shares: Sequence[int], tokens: int, grain: int = 1) -> list[tuple[tuple[int, int], ...]]:
    """The blocks of ``tokens`` tokens that each context-parallel rank holds, in order.

    The first half of the tokens is cut by the shares, and the second half is its mirror image: rank k has the k-th
    block from the start and the k-th from the end.  A token attends to the tokens before it, so the tokens of a rank
    attend to ``tokens`` / 2 others on average, whatever the rank.  So attention is in proportion to the shares,
    like all other work.

    Args:
        shares: Relative number of tokens of each rank; positive.
        tokens: Tokens of a slice, or of a sequence that is not cut into slices.  A multiple of 2 and of ``grain``, and
            at least ``least_tokens``, where there are several ranks.
        grain: Number of which the tokens of every rank are a multiple.
    """
    if len(shares) == 1:
        return [((0, tokens),)]
    half, total, step = tokens // 2, sum(shares), block_step(grain)
    edges, given = [0], 0
    for k, share in enumerate(shares[:-1]):
        given += share
        wanted = (2 * half * given + total * step) // (2 * total * step) * step
        most = (half // step - (len(shares) - 1 - k)) * step
        edges.append(max(edges[-1] + step, min(wanted, most)))
    edges.append(half)
    return [((a, b), (tokens - b, tokens - a)) for a, b in zip(edges, edges[1:], strict=False)]


def part_tokens(blocks: Blocks) -> int:
    """Tokens of some blocks."""
    return sum(end - first for first, end in blocks)


# Placement of packed documents: most are whole on one rank, and only long ones are spread over several, so that few
# queries are sent.  Every rank has as many tokens of a slice as without this placement, so that no shape changes.

DOCUMENTS = "cp_documents"  # of the plan's schedule
CUT, WHOLE = "cut", "whole"
"""Placement of packed documents: cut at fixed positions of a slice, or whole on one rank if it has room."""
Piece = tuple[int, int]  # tokens ``[first, end)`` of a slice that belong to one document
_LATER = 0.1  # share by which a rank may take longer than the others before one of its whole documents is spread


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """The placement of a microbatch's documents; one object per microbatch, compared by identity."""

    # of every slice, the tokens that each context-parallel rank holds, counted from the slice's start
    by_slice: Sequence[Sequence[Blocks]]


@dataclass(frozen=True, slots=True)
class DocumentPlacing:
    """Places documents on the ranks of a replica.

    Messages between replicas are cut at the positions of ``token_blocks``, into which the tokens of documents are put.
    So all replicas have the same order of tokens: that of the replica with the most ranks.
    """

    shares: Sequence[int]  # parts of a slice on the ranks of the replica with the most ranks
    grain: int  # number of which the tokens of each part are a multiple
    own_shares: Sequence[int]  # ``shares`` of this replica
    own_grain: int  # ``grain`` of this replica

    def blocks(self, pieces: Sequence[Piece], keys_per_token: float) -> list[Blocks]:
        """Returns the tokens of a slice on each rank of this replica; see :func:`placed_documents`."""
        tokens = part_tokens(pieces)
        places = token_blocks(self.shares, tokens, self.grain)
        placed = placed_documents(pieces, [part_tokens(blocks) for blocks in places], keys_per_token)
        own = token_blocks(self.own_shares, tokens, self.own_grain)
        return placed if own == places else [_moved(placed, places, blocks) for blocks in own]


def placed_documents(pieces: Sequence[Piece], room: Sequence[int], keys_per_token: float) -> list[Blocks]:
    """Returns the tokens of a slice on each of several ranks, ascending.

    The longest documents are placed first.  A document goes to the rank with the least attention of those with room for
    it.  It is spread where none has room, or where its attention alone would take one rank too long.

    Args:
        pieces: The documents of the slice, which they cover.
        room: Tokens of each rank; they add up to the slice.
        keys_per_token: Number of keys to which a query attends in the time of the rest of its layers.
    """
    left, load, found = list(room), [0.0] * len(room), [list[Piece]() for _ in room]
    even = sum(_pairs(end - first) for first, end in pieces) / sum(room)
    most = even + _LATER * (even + keys_per_token)  # attention of a rank for every token that it has room for
    for first, end in sorted(pieces, key=lambda piece: (piece[0] - piece[1], piece[0])):
        tokens, at = end - first, first
        is_long = tokens > max(room) or _pairs(tokens) > most * max(room)
        able = [r for r, free in enumerate(left) if free >= tokens and _pairs(tokens) <= most * room[r]]
        if able:
            ranks = [min(able, key=lambda rank: (load[rank] / room[rank], -left[rank]))]
        else:
            in_order, ranks = iter(sorted(range(len(room)), key=lambda r: (-left[r], load[r] / room[r]))), []
            while sum(left[r] for r in ranks) < tokens or most * sum(room[r] for r in ranks) < _pairs(tokens):
                ranks.append(next(in_order))
        # A long document is cut as a sequence is; one that only lacked room is cut into as few parts as possible.
        parts = _shared(tokens, ranks, left, room) if is_long else _filled(tokens, ranks, left)
        cuts = [(rank, parts[rank] - (parts[rank] // 2 if is_long else 0)) for rank in ranks]
        for rank, size in (*cuts, *((rank, parts[rank] - size) for rank, size in reversed(cuts))):
            found[rank].append((at, at + size))
            at += size
            left[rank] -= size
            load[rank] += _pairs(tokens) * size / tokens
    return [joined(sorted(blocks)) for blocks in found]


def _pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _shared(tokens: int, ranks: Sequence[int], left: Sequence[int], room: Sequence[int]) -> dict[int, int]:
    """Returns the tokens of a document on each of some ranks: in proportion to ``room``, at most what is left."""
    found, free, shares = {}, sum(left[rank] for rank in ranks), sum(room[rank] for rank in ranks)
    for rank in sorted(ranks, key=lambda rank: left[rank] / room[rank]):
        free -= left[rank]
        found[rank] = min(max(tokens * room[rank] // shares, tokens - free), left[rank])
        tokens, shares = tokens - found[rank], shares - room[rank]
    return found


def _filled(tokens: int, ranks: Sequence[int], left: Sequence[int]) -> dict[int, int]:
    """Returns the tokens of a document on each of some ranks, filled one after the other."""
    found = {}
    for rank in ranks:
        found[rank] = min(tokens, left[rank])
        tokens -= found[rank]
    return found


def joined(blocks: Iterable[Piece]) -> tuple[Piece, ...]:
    """Returns blocks with adjacent ones merged and empty ones removed."""
    found: list[Piece] = []
    for first, end in blocks:
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        elif first < end:
            found.append((first, end))
    return tuple(found)


def _moved(placed: Sequence[Blocks], places: Sequence[Blocks], own: Blocks) -> Blocks:
    """Returns the tokens at some positions, in the order of these.

    Args:
        placed: Tokens of each rank.
        places: Positions of each rank, equally many.
    """
    steps: list[tuple[int, int, int]] = []  # place, token and how many
    for tokens, where in zip(placed, places, strict=True):
        for (row, token, count), (other, place, size) in itertools.product(_rows(tokens), _rows(where)):
            lo, hi = max(row, other), min(row + count, other + size)
            if lo < hi:
                steps.append((place + lo - other, token + lo - row, hi - lo))
    steps.sort()
    cuts = [(max(lo, at), min(hi, at + size), token - at) for lo, hi in own for at, token, size in steps]
    return joined((lo + by, hi + by) for lo, hi, by in cuts if lo < hi)


def _rows(blocks: Blocks) -> Iterator[tuple[int, int, int]]:
    """Yields (row, first token, tokens) of every block."""
    row = 0
    for first, end in blocks:
        yield row, first, end - first
        row += end - first


# Routing of microbatches to the replicas of each stage: Zorse's rule (section 4.2).
#
# It is computed when a plan is made, from measured or modelled times.  A replica's *share* is its number
# of microbatches.  The rule chooses them: the i-th microbatch that a stage completes goes to
# the replica of the next stage with the i-th most remaining work.


def shares(seconds: Sequence[float], total: int) -> list[int]:
    """Microbatches per replica so that the busiest one is done as early as possible, at least one each.

    Args:
        seconds: Time of one microbatch on each replica, forward and backward.

    Raises:
        PlanError: A time that is not positive, or fewer microbatches than replicas.
    """
    if any(not second > 0 for second in seconds):
        raise PlanError("seconds", list(seconds), "times of microbatches must be positive")
    if total < len(seconds):
        raise PlanError("microbatches", total, f"are fewer than the {len(seconds)} replicas of a stage")
    counts = [1] * len(seconds)
    ends = [(2 * second, q) for q, second in enumerate(seconds)]  # time with one more microbatch
    heapq.heapify(ends)
    for _ in range(total - len(seconds)):
        end, q = heapq.heappop(ends)
        counts[q] += 1
        heapq.heappush(ends, (end + seconds[q], q))
    return counts


def route(
    seconds: Sequence[Sequence[float]], total: int, counts: Sequence[Sequence[int]] | None = None
) -> list[list[tuple[int, ...]]]:
    """Microbatch ids ``[s][q]`` of every replica of every stage, ascending.

    Args:
        seconds: ``seconds[s][q]``: time of one microbatch on replica q of stage s.
        counts: Shares per stage and replica; by default those of :func:`shares`.
    """
    completed = [(0.0, m) for m in range(total)]  # all are ready for the first stage
    ids: list[list[tuple[int, ...]]] = []
    for s, row in enumerate(seconds):
        wanted = shares(row, total) if counts is None else counts[s]
        if sum(wanted) != total:
            raise PlanError(f"counts[{s}]", list(wanted), f"do not add up to {total} microbatches")
        # One place per microbatch: a replica with n of them has work for n, n - 1, ..., 1 left.
        places = sorted(
            (-left * second, q)
            for q, (count, second) in enumerate(zip(wanted, row, strict=True))
            for left in range(count, 0, -1)
        )
        mine: list[list[int]] = [[] for _ in row]
        free_s = [0.0] * len(row)
        ends: list[tuple[float, int]] = []
        for (ready_s, m), (_, q) in zip(sorted(completed), places, strict=True):
            free_s[q] = max(free_s[q], ready_s) + row[q]
            ends.append((free_s[q], m))
            mine[q].append(m)
        ids.append([tuple(sorted(own)) for own in mine])
        completed = ends
    return ids


@dataclass(frozen=True, slots=True)
class Location:
    """Stage, replica and position of a world rank in the plan."""

    stage: int
    replica: int
    tp_rank: int
    cp_rank: int = 0


class Placement:
    """Lookup tables of a plan.  Everything here is a pure function of the plan.

    A *class* is the set of replicas of one stage that cut weights alike (the same TP and EP size):
    Megatron's own data parallelism and distributed optimizer run inside a class.

    Attributes:
        first: (stage, chunk) of the embedding.
        last: (stage, chunk) of the output layer and the loss.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._where: dict[int, Location] = {}
        for s, stage in enumerate(plan.stages):
            for q, replica in enumerate(stage.replicas):
                for i, rank in enumerate(replica.ranks):
                    self._where[rank] = Location(s, q, i % replica.tp, i // replica.tp)
        self.path = plan.path  # (stage, chunk) in the order in which a microbatch visits them
        self.first, self.last = self.path[0], self.path[-1]
        # ``route[stage][microbatch]``, the replica of the stage that runs the microbatch
        self.route: tuple[tuple[int, ...], ...] = tuple(
            _route_of_stage(stage.replicas, plan.num_microbatches) for stage in plan.stages
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._where)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.plan.stages)

    @property
    def logging_stage(self) -> int:
        """The stage of the last rank, on which Megatron logs the loss; all ranks of the stage take part."""
        return self.num_stages - 1

    @functools.cached_property
    def numbers(self) -> dict[Place, int]:
        """Megatron's number of every chunk, ascending along the path.

        Megatron counts sweep by sweep: virtual stage ``v`` of pipeline rank ``r`` is number ``v * stages + r`` of the
        model, with the embedding in the first and the loss in the last.  The chunks of a sweep that not all stages take
        part in have the first numbers of the sweep, and the last numbers in the last sweep.
        """
        found: dict[Place, int] = {}
        for v in range(self.plan.most_chunks):
            sweep = [place for place in self.path if place[1] == v]
            unused = self.num_stages - len(sweep) if v == self.last[1] else 0
            found |= {place: v * self.num_stages + unused + i for i, place in enumerate(sweep)}
        return found

    def positions(self, stage: int) -> tuple[int, ...]:
        """Megatron's pipeline rank for each chunk of a stage; it differs between chunks where sweeps differ.

        In a V a stage has one rank in the first sweep and another in the second.  Where a stage has no chunk in a
        sweep, the ranks of the others shift.
        """
        return tuple(self.numbers[stage, c] % self.num_stages for c in range(len(self.plan.stages[stage].layers)))

    def locate(self, rank: int) -> Location:
        """The location of ``rank``; KeyError for a rank outside of the plan."""
        return self._where[rank]

    def replica(self, stage: int, replica: int) -> Replica:
        """The replica's part of the plan."""
        return self.plan.stages[stage].replicas[replica]

    def stage_ranks(self, stage: int) -> list[int]:
        """All ranks of a stage, ascending."""
        return sorted(k for r in self.plan.stages[stage].replicas for k in r.ranks)

    def classes(self, stage: int) -> list[Cut]:
        """The cut of each class of a stage, that of the first replica first.

        The first class is the *primary* one: it counts in norms and writes checkpoints.
        """
        replicas = self.plan.stages[stage].replicas
        first = replicas[0].cut
        return [first, *sorted({r.cut for r in replicas} - {first})]

    def is_mixed(self, stage: int) -> bool:
        """Whether replicas of the stage cut weights in different ways."""
        return len(self.classes(stage)) > 1

    def class_ranks(self, stage: int, cut: Cut, tp_rank: int) -> list[int]:
        """Ranks at position ``tp_rank`` of all replicas of one class, ascending.

        All context-parallel ranks are among them: for gradients, other tokens of a sequence are
        like other sequences.
        """
        replicas = (r for r in self.plan.stages[stage].replicas if r.cut == cut)
        return sorted(rank for r in replicas for rank in r.cp_group(tp_rank))

    def tp_groups(self, stage: int, cut: Cut) -> list[tuple[int, ...]]:
        """The tensor-parallel groups of one class of a stage, in the order of their first ranks."""
        replicas = (r for r in self.plan.stages[stage].replicas if r.cut == cut)
        return sorted(r.tp_group(part) for r in replicas for part in range(r.cp))

    def expert_groups(self, stage: int, cut: Cut) -> list[tuple[int, ...]]:
        """World ranks of the expert groups of one class of a stage; each has all experts once.

        They follow one another over the class's tensor-parallel groups, as in Megatron.
        """
        ranks = [rank for group in self.tp_groups(stage, cut) for rank in group]
        return list(itertools.batched(ranks, cut.expert_ranks))

    def expert_rank(self, rank: int) -> int:
        """The position of a rank in its expert group, which determines its part of the experts."""
        where = self.locate(rank)
        cut = self.replica(where.stage, where.replica).cut
        if cut.divides_alike:
            return where.tp_rank
        return next(g.index(rank) for g in self.expert_groups(where.stage, cut) if rank in g)

    def experts_class(self, stage: int, cut: Cut, expert_rank: int) -> list[int]:
        """Ranks of one class that hold the same parts of the same experts, ascending."""
        if cut.divides_alike:
            return self.class_ranks(stage, cut, expert_rank)
        return [group[expert_rank] for group in self.expert_groups(stage, cut)]

    def companions(self, stage: int) -> list[tuple[int, ...]]:
        """Replicas of a stage that share expert groups, so that they run the same passes at the same time."""
        cuts = [cut for cut in self.classes(stage) if not cut.divides_alike]
        if not cuts:
            return []
        owner = {rank: q for q, r in enumerate(self.plan.stages[stage].replicas) for rank in r.ranks}
        sets: list[set[int]] = []
        for cut in cuts:
            for group in self.expert_groups(stage, cut):
                joined = {owner[rank] for rank in group}
                for other in [found for found in sets if found & joined]:
                    joined |= other
                    sets.remove(other)
                sets.append(joined)
        return sorted(tuple(sorted(found)) for found in sets if len(found) > 1)

    def max_tp(self) -> int:
        """The largest TP size of the plan."""
        return max(r.tp for s in self.plan.stages for r in s.replicas)


def _route_of_stage(replicas: tuple[Replica, ...], num_microbatches: int) -> tuple[int, ...]:
    """route[microbatch] -> replica."""
    route = [-1] * num_microbatches
    for q, replica in enumerate(replicas):
        for m in replica.microbatches:
            route[m] = q
    return tuple(route)


# Division of a stage's state: shares of replicas, and the cuts of a buffer (Zorse, section 4.1).
#
# Megatron cuts parameters, gradients and optimizer state into equal parts.  A plan may set other shares
# (``state_share`` of a replica), so that GPUs with more memory keep more.

ALIGNMENT = 128  # cuts are multiples of this many elements, so that every part is aligned, whatever its type


def state_shares(stage: Stage) -> tuple[float, ...] | None:
    """The part of a stage's state that each replica keeps; they add up to 1.  None if they are equal."""
    given = [replica.state_share for replica in stage.replicas]
    if len(set(given)) == 1:
        return None
    total = sum(given)
    return tuple(share / total for share in given)


def state_parts(stage: Stage) -> tuple[float, ...]:
    """Returns each replica's part of the state that the replicas of its class divide; they add up to 1 per class.

    Every class has a copy of the state of its own.
    """
    totals: dict[Cut, float] = {}
    for replica in stage.replicas:
        totals[replica.cut] = totals.get(replica.cut, 0.0) + replica.state_share
    return tuple(r.state_share / totals[r.cut] if totals[r.cut] else 0.0 for r in stage.replicas)


def rank_shares(placement: Placement, rank: int, *, of_experts: bool = False) -> tuple[float, ...] | None:
    """Shares of the ranks in this rank's data-parallel group, or in that of its experts, in the group's order.

    Context-parallel ranks divide the share of their replica evenly.

    Returns:
        One share per rank, together 1; None if they are equal, or no replica of the group has one.
    """
    where = placement.locate(rank)
    stage = placement.plan.stages[where.stage]
    cut = stage.replicas[where.replica].cut
    ranks = placement.class_ranks(where.stage, cut, where.tp_rank)
    if of_experts:
        ranks = placement.experts_class(where.stage, cut, placement.expert_rank(rank))
    owners = [stage.replicas[placement.locate(r).replica] for r in ranks]
    parts = [owner.state_share / owner.cp for owner in owners]
    alike = len({owner.state_share for owner in owners}) == 1
    return None if alike or not any(parts) else tuple(part / sum(parts) for part in parts)


def cuts(numel: int, shares: Sequence[float]) -> tuple[int, ...]:
    """The cuts of a buffer: part ``i`` is ``[cuts[i], cuts[i + 1])``.

    Args:
        numel: Elements of the buffer.
        shares: One per part, together 1; 0 gives an empty part.

    Returns:
        One position more than there are shares, from 0 to ``numel``; multiples of ``ALIGNMENT`` between.
    """
    last = max(i for i, share in enumerate(shares) if share > 0)
    edges, held = [0], 0.0
    for i, share in enumerate(shares):
        held += share
        edge = numel if i >= last else min(numel, round(held * numel / ALIGNMENT) * ALIGNMENT)
        edges.append(max(edge, edges[-1]))
    return tuple(edges)
