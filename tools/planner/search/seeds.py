"""Starting points: pools, number of stages, TP size, batch and share of the GPUs."""

from collections.abc import Iterable, Iterator
from functools import cache
from heapq import nsmallest
from itertools import chain, combinations, product
from math import gcd, inf
from typing import NamedTuple

from ..costs.candidate import Candidate, Group, plain_group
from ..costs.estimate import Estimator
from ..costs.schedules import PLAIN
from .candidate_cache import CandidateCache, Groups
from .outcome import Goal
from .pools import MOST_POOLS, Limits

TP_SIZES = (1, 2, 4, 8)
STAGE_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
USAGE = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625, 0.0)
SLACK = 1.02
DEPTHS = (1, 2, 3, 4, 6, 8, 12)  # layers of a stage for which TP sizes are chosen
PIECES = 4
"""Assumed pieces per microbatch under schedules with chunks or slices, for a guess at their bubble."""
LONG_HEAD, LONG_SHARE = 1.5, 0.1
"""The vocabulary is split from the start if the output layer takes longer than this many layers, or, on stages with
equally many layers, than this share of a stage: otherwise layers may be balanced around it."""
MOST_WIDTHS = 24
MOST_COMBINED = 3  # up to this many pools, every choice of TP sizes is tried
IN_FLIGHT = 4  # microbatches in flight, and replicas that share the optimizer's state, for a guess at what fits
MOST_OVER_REPLICAS = 64  # most replicas that share experts
SEED_MARGIN = 1.3  # seeds that look worse than the best so far by this factor are not evaluated


def operating_points(
    estimator: Estimator, goal: Goal, limits: Limits, *, over_replicas: bool = False
) -> list[Candidate]:
    """Candidates without stages (batch, recompute, ZeRO stage), the most promising first.

    Args:
        over_replicas: Include experts over replicas.
    """
    model = estimator.model
    zeros = (0, 1) if model.distributed_optimizer else (0,)
    ways = [(most_expert_parallel(estimator), False)]
    ways += [(ep, True) for ep in sizes_over_replicas(estimator)] if over_replicas else []
    points = [
        Candidate((), b, r, zero_stage=z, ep=ep, across_replicas=across)
        for (ep, across), b, r, z in product(ways, model.batch_sizes, model.recompute, zeros)
    ]

    def bound(point: Candidate) -> float:
        return 1.0 / (1e-30 + sum(best_rate(estimator, p, point) * n for p, n in enumerate(limits) if n))

    return sorted(points, key=lambda p: (bound(p), p.recompute != "none", -p.zero_stage, p.micro_batch_size))


def most_expert_parallel(estimator: Estimator) -> int:
    """The largest EP size inside a TP group: whole experts make larger products than cut ones."""
    x = estimator.model.experts
    return 1 if x is None else gcd(x.count, TP_SIZES[-1])


def sizes_over_replicas(estimator: Estimator) -> list[int]:
    """EP sizes for experts over replicas: a node, and as many as there are experts."""
    x = estimator.model.experts
    sizes = [] if x is None else [gcd(x.count, TP_SIZES[-1]), gcd(x.count, MOST_OVER_REPLICAS)]
    return sorted({size for size in sizes if size > 1})


def best_rate(estimator: Estimator, pool: int, point: Candidate) -> float:
    """Layers times sequences per second of one GPU at its best TP size."""
    return max((unit_rate(estimator, pool, tp, point) for tp in TP_SIZES), default=0.0)


def unit_rate(estimator: Estimator, pool: int, tp: int, point: Candidate) -> float:
    """Layers times sequences per second of one GPU at this TP size, 0 without figures."""
    unit = estimator.unit_of(point, Group(pool, tp, 1, max(point.ep, tp) if point.across_replicas else 0))
    return point.micro_batch_size / (unit.layer_f + unit.layer_b) / tp if unit else 0.0


def partitions(estimator: Estimator, subset: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """Ways to let pools share stages: each alone, all together, by kind, by region."""
    nodes = estimator.cluster.nodes
    out: list[list[tuple[int, ...]]] = [[(p,) for p in subset], [subset]]
    for attribute in (lambda n: n.gpu, lambda n: n.where):
        blocks: dict[str, list[int]] = {}
        for p in subset:
            blocks.setdefault(attribute(nodes[p]), []).append(p)
        out.append([tuple(b) for b in blocks.values()])
    unique = {tuple(sorted(way)): way for way in out}
    return list(unique.values())


class _Cut:
    """Blocks of pools at one TP level and share of their GPUs, to be cut into stages.

    Numbers of stages are in proportion to speed, replicas (units) are spread evenly.  Where a stage gets many
    replicas, the remainder is left unused, because stages of equal width fit each other.
    """

    def __init__(
        self,
        estimator: Estimator,
        blocks: list[tuple[int, ...]],
        tp: dict[int, int],
        share: float,
        point: Candidate,
        limits: Limits,
    ) -> None:
        self._blocks, self._tp = [sorted(block) for block in blocks], tp
        self._units: dict[int, int] = {}
        for p in (p for block in blocks for p in block):
            node = estimator.cluster.nodes[p]
            whole, rest = divmod(limits[p], node.gpus_per_node)
            limit = whole * (node.gpus_per_node // tp[p]) + rest // tp[p]
            self._units[p] = max(1, round(limit * share)) if limit else 0
        units = self._units
        self._power = [sum(units[p] * tp[p] * unit_rate(estimator, p, tp[p], point) for p in b) for b in blocks]
        self._most = [max(units[p] for p in block) for block in blocks]
        self._made: dict[tuple[int, int], list[tuple[Group, ...]] | None] = {}
        self._counted: dict[tuple[int, ...], list[list[int]]] = {}

    def stages(self, wanted: int) -> Groups | None:
        """Cut the blocks into ``wanted`` stages; None where that is not possible."""
        if min(self._power) <= 0:
            return None
        counts = self._counts(wanted, self._most)
        if counts is None:
            return None
        out: list[tuple[Group, ...]] = []
        for i, count in enumerate(counts):
            if (i, count) not in self._made:
                self._made[i, count] = self._block_stages(i, count)
            made = self._made[i, count]
            if made is None:
                return None
            out += made
        return tuple(out)

    def _counts(self, wanted: int, most: list[int]) -> list[int] | None:
        """Stages of each block, in proportion to speed and at most so many; None where that is not possible."""
        known = self._counted.setdefault(tuple(most), [[1] * len(self._blocks)])  # each with one stage more
        while len(known) <= wanted - len(self._blocks):
            counts = known[-1]
            room = [i for i, n in enumerate(counts) if n < most[i]]
            if not room:
                return None
            next_ = max(room, key=lambda i: self._power[i] / counts[i])
            known.append([n + (i == next_) for i, n in enumerate(counts)])
        return known[max(0, wanted - len(self._blocks))]

    def fitted(self, wanted: int, layers: int) -> Groups | None:
        """Cut the blocks into ``wanted`` stages, with replicas in proportion to each stage's whole number of layers.

        Blocks get layers in proportion to their speed, stages of a block the same number of layers or one more.
        """
        if min(self._power) <= 0 or wanted > layers:
            return None
        shares = [layers * power / sum(self._power) for power in self._power]
        of_block = [max(1, int(share)) for share in shares]
        for _ in range(sum(of_block) - layers):
            of_block[max(range(len(shares)), key=lambda i: of_block[i] - shares[i])] -= 1
        for _ in range(layers - sum(of_block)):
            of_block[min(range(len(shares)), key=lambda i: of_block[i] - shares[i])] += 1
        counts = self._counts(wanted, [min(a, b) for a, b in zip(self._most, of_block)]) if min(of_block) else None
        if counts is None:
            return None
        out: list[tuple[Group, ...]] = []
        for i, (count, mine) in enumerate(zip(counts, of_block)):
            done = 0
            for k in range(count):
                until = done + mine // count + (1 if k < mine % count else 0)
                dealt = [(p, self._units[p] * until // mine - self._units[p] * done // mine) for p in self._blocks[i]]
                groups = tuple([plain_group(p, self._tp[p], n) for p, n in dealt if n])
                if not groups:
                    return None
                out.append(groups)
                done = until
        return tuple(out)

    def _block_stages(self, i: int, count: int) -> list[tuple[Group, ...]] | None:
        """The stages of one block; None where one of them would be empty.

        Stages with the same replicas are the same object: there are as many different ones as pools, and one more.
        """
        dealt = [(p, *divmod(self._units[p], count)) for p in self._blocks[i]]
        steps = sorted({rest for _, each, rest in dealt if each < 4 and rest} | {count})
        out: list[tuple[Group, ...]] = []
        for step in steps:
            k = len(out)
            stage = [(p, each + (1 if k < rest and each < 4 else 0)) for p, each, rest in dealt]
            groups = tuple([plain_group(p, self._tp[p], n) for p, n in stage if n])
            if not groups:
                return None
            out += [groups] * (step - k)
        return out


def tp_choices(estimator: Estimator, subset: tuple[int, ...], point: Candidate, mixed: bool) -> list[dict[int, int]]:
    """Returns choices of TP size per pool: one size everywhere, and the smallest that hold some numbers of layers.

    Args:
        mixed: Include the latter, in which a pool of little memory may get a larger TP size than the others.
    """
    known = {p: [t for t in TP_SIZES if unit_rate(estimator, p, t, point) > 0] for p in subset}
    held = {p: [(_layers_held(estimator, p, t, point), t) for t in tps] for p, tps in known.items()}
    found = [{p: max([t for t in tps if t <= level], default=0) for p, tps in known.items()} for level in TP_SIZES]
    if mixed and len(subset) > 1:
        found += [{p: next((t for n, t in sizes if n >= layers), 0) for p, sizes in held.items()} for layers in DEPTHS]
    return [choice for i, choice in enumerate(found) if choice and all(choice.values()) and choice not in found[:i]]


def _layers_held(estimator: Estimator, pool: int, tp: int, point: Candidate) -> float:
    """About the most layers of a rank in the middle of a pipeline, with a few microbatches in flight."""
    unit = estimator.unit_of(point, Group(pool, tp, 1, max(point.ep, tp) if point.across_replicas else 0))
    assert unit is not None  # the caller knows its rate
    each = estimator.model.element_bytes + estimator.gradient_per_parameter
    each += estimator.optimizer_per_parameter / (IN_FLIGHT if point.zero_stage else 1)
    free = unit.capacity_bytes * estimator.memory_margin - unit.reserved_bytes - unit.workspace_bytes
    return free / (unit.layer_parameters * each + IN_FLIGHT * unit.layer_bytes)


def seeds(memo: CandidateCache, limit: int, limits: Limits, hope: list[float]) -> Iterator[tuple[Groups, Candidate]]:
    """Seeds on all pools of a part of the cluster, in a promising order.

    Branches whose bound is beyond the best found so far are skipped.

    Args:
        limit: Number of seeds (or a few more) per share of the GPUs.
        hope: The best sketch of a seed so far, which the caller keeps up to date.
    """
    estimator, model = memo.estimator, memo.estimator.model
    points = operating_points(estimator, memo.goal, limits)
    subset = tuple(p for p, n in enumerate(limits) if n)
    ways = partitions(estimator, subset)

    @cache
    def sizes(at: int, mixed: bool) -> list[dict[int, int]]:
        return tp_choices(estimator, subset, points[at], mixed)

    for share in USAGE:
        given, whole = 0, share == USAGE[0]
        for like, tp in ((point, tp) for at, point in enumerate(points) for tp in sizes(at, whole)):
            if given >= limit:
                break
            used = {p: max(tp[p], limits[p] * share) for p in subset}
            if _least(memo, like, tp, used) > min(SLACK * memo.to_beat, SLACK * SEED_MARGIN * hope[0], memo.simulated):
                continue
            cuts = [(len(blocks), _Cut(estimator, blocks, tp, share, like, limits)) for blocks in ways]
            for (least, cut), stages in product(cuts, STAGE_COUNTS):
                if least <= stages <= model.num_layers:
                    fitted = cut.fitted(stages, model.num_layers) if whole else None
                    for groups in {fitted: 0, cut.stages(stages): 0}:
                        if groups is not None:
                            given += 1
                            yield groups, like


def _least(memo: CandidateCache, like: Candidate, tp: dict[int, int], used: dict[int, float]) -> float:
    """Seconds or USD of an iteration in which the GPUs of ``used`` compute all the time."""
    estimator, model = memo.estimator, memo.estimator.model
    rate = sum(unit_rate(estimator, p, tp[p], like) * n for p, n in used.items())
    seconds = model.global_batch_size * model.num_layers / rate
    usd_per_s = sum(estimator.price[p] * n for p, n in used.items()) if memo.goal.objective == "cost" else 1.0
    return seconds * usd_per_s


def even_seeds(memo: CandidateCache, limits: Limits, count: int) -> Iterator[tuple[Groups, Candidate]]:
    """Stages with the same number of replicas, of one pool each: the most promising.

    The number of replicas is a power of two, or fills nodes.  The stages are on one pool, or on several with as many
    stages on each as its GPUs give.  Then the slowest come first, which get the fewest layers where most is in flight,
    or the fastest, which have the most memory.  Stages that cannot be as fast as the best so far are skipped.
    """
    estimator, model = memo.estimator, memo.estimator.model
    found: list[tuple[float, int, Groups, Candidate]] = []
    slowest_s = 1 / (memo.goal.min_iterations_per_s or 1e-30)
    for point in operating_points(estimator, memo.goal, limits, over_replicas=True):
        total = model.global_batch_size // point.micro_batch_size
        for kinds in _even_kinds(estimator, limits, point):
            nodes = [estimator.cluster.nodes[kind.pool].gpus_per_node // kind.tp for kind in kinds]
            most = min(total, *[kind.most for kind in kinds])
            widths = {1 << i for i in range(most.bit_length())} | {
                n * i for n in nodes for i in range(1, most // n + 1)
            }
            for width in sorted(widths)[-MOST_WIDTHS:]:
                for stages in _even_counts(kinds, width, model.num_layers):
                    rate = sum([kind.rate * n for kind, n in zip(kinds, stages)]) * width
                    work_s = model.global_batch_size * model.num_layers / rate
                    guess = work_s * (1 + (sum(stages) - 1) / (PIECES * (total // width)))
                    if memo.goal.objective == "cost":
                        guess *= sum([estimator.price[k.pool] * k.tp * n for k, n in zip(kinds, stages)]) * width
                    if guess < memo.to_beat_under(PLAIN.name) and work_s <= slowest_s and guess <= memo.simulated:
                        groups = [((plain_group(kind.pool, kind.tp, width),),) * n for kind, n in zip(kinds, stages)]
                        found.append((guess, len(found), tuple(chain(*groups)), point))
    best = nsmallest(count, found)
    if memo.best == inf or PLAIN.name not in memo.goal.schedules:  # the fastest ones may need too much memory
        best += nsmallest(count, [entry for entry in found if entry[3].recompute == model.recompute[-1]])
    for _, _, chosen, point in best:
        for order in dict.fromkeys((chosen, chosen[::-1])):
            yield order, point


def with_split_vocabulary(
    estimator: Estimator, found: Iterable[tuple[Groups, Candidate]]
) -> Iterator[tuple[Groups, Candidate]]:
    """Starting points, each also with a split vocabulary where the head is long for equally many layers."""
    for groups, like in found:
        yield groups, like
        layers = estimator.model.num_layers // len(groups)
        if len(groups) > 1 and not like.rows and has_long_head(estimator, groups[-1][0], like, layers):
            yield groups, like.with_(rows=((1.0, 1.0),))


def has_long_head(estimator: Estimator, group: Group, like: Candidate, layers: int = 0) -> bool:
    """Whether the output layer takes so long that the vocabulary should be split over the stages.

    Args:
        layers: Of every stage; 0 where they may differ.
    """
    unit = estimator.unit_of(like, group)
    if unit is None or not estimator.model.can_split_vocabulary:
        return False
    long = min(LONG_HEAD, LONG_SHARE * layers) if layers else LONG_HEAD
    return unit.head_f + unit.head_b > long * (unit.layer_f + unit.layer_b)


class _Kind(NamedTuple):
    """Replicas of one pool at one TP size: their largest number, and layers times sequences per second of one."""

    pool: int
    tp: int
    most: int
    rate: float


def _even_kinds(estimator: Estimator, limits: Limits, point: Candidate) -> Iterator[list[_Kind]]:
    """Yields single kinds of replica, and combinations of one per pool (all TP choices if the pools are few)."""
    kinds: dict[int, list[_Kind]] = {}
    for pool, gpus in enumerate(limits):
        node = estimator.cluster.nodes[pool].gpus_per_node
        for tp in (t for t in TP_SIZES if t <= min(gpus, node)):
            rate, units = unit_rate(estimator, pool, tp, point), gpus // node * (node // tp) + gpus % node // tp
            if rate:
                kinds.setdefault(pool, []).append(_Kind(pool, tp, units, rate * tp))
    yield from ([kind] for mine in kinds.values() for kind in mine)
    least = 2 if len(kinds) <= MOST_POOLS else len(kinds)  # any of few pools: a slow link may be worth nothing
    for subset in chain(*[combinations(kinds, count) for count in range(least, len(kinds) + 1)]):
        together: Iterable[Iterable[_Kind]] = product(*[kinds[pool] for pool in subset])
        if len(subset) > MOST_COMBINED:
            choices = tp_choices(estimator, subset, point, True)
            together = [[kind for p in subset for kind in kinds[p] if kind.tp == tp[p]] for tp in choices]
        yield from (sorted(chosen, key=lambda kind: kind.rate) for chosen in together)


def _even_counts(kinds: list[_Kind], width: int, layers: int) -> list[list[int]]:
    """Numbers of stages of each kind of replica: for a single kind every searched number, for several the most."""
    most = [kind.most // width for kind in kinds]
    if len(kinds) > 1:
        return [most] if sum(most) <= layers else []
    return [[n] for n in STAGE_COUNTS[1:] if n <= min(most[0], layers)]
