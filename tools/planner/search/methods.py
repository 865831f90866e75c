"""Searches by name; regular plans, and changes of finalists that suit long sequences, vocabularies and experts."""

import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import combinations, product
from math import gcd, inf

from ..costs.candidate import MEETING, Candidate, Group, SequencePart, Stage
from ..costs.estimate import Estimate, Estimator
from ..costs.schedules import PLAIN, schedule_of
from ..costs.simulation import operations_of
from ..costs.stages import rows_of
from .balance import balance
from .bounds import Bounds
from .finish import confirm, pools_of, simulated, sketch_of
from .moves import over_replicas
from .outcome import Found, Goal, Progress, SearchResult, collector_paused
from .overlap import prefer_plain, prefer_steady
from .pools import Merged, all_gpus, expand, merge, search_apart
from .seeds import sizes_over_replicas

# Choices: settings of a plan besides stages, layers and batches, tried on the plans that a search has found.
#
# Expert parallelism, context parallelism, the number of slices and chunks, a split vocabulary, the context exchange,
# recomputation and activations in main memory: each is a change of a finalist, which is kept if it shortens the
# simulated iteration.  Changes build on each other.  Where nothing fits, changes that save memory come first.


# Starting points for long sequences: regular pipelines of slices, as SlimPipe's authors train (section 6.5).

LONG_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of activations in main memory, in the order of the trials
LONG_SIZES = (1, 2, 4, 8, 16)
MOST_SHARING = 64  # most GPUs of a replica
FINENESS = (4, 60)  # units of parts by speed; parts of few units fit where memory is short, and have equal slices
_SLICES_PER_STAGE = 4
_LEAST_TOKENS = 1024
_BATCHES = 3  # sizes of microbatches that are tried with experts over replicas

Regular = list[tuple[Candidate, Estimate]]
Way = Callable[[Estimator, Goal], Iterator[Candidate]]


def best_regular(estimator: Estimator, goal: Goal, way: Way, most: float = inf) -> Regular:
    """The best candidates by the closed form that fit: one per size of a stage, and the best on each choice of kinds.

    Stages of slices may have replicas in several zones of a region, or in several groups of equal nodes.

    Args:
        most: Candidates with a larger value are skipped.
    """
    sketch, sequences = sketch_of(estimator, goal), estimator.model.global_batch_size
    # A replica of several kinds names no zones or groups, and ranks that share experts are in one of them.
    merged = Merged(estimator, ()) if way in (with_experts, of_kinds_together) else merge(estimator)
    candidates = (expand(merged, estimator.cluster, c) for c in way(merged.estimator, goal))
    hopes: list[tuple[float, int, Candidate]] = []
    zero = int(estimator.model.distributed_optimizer)
    for i, c in enumerate(c.with_(zero_stage=zero) for c in candidates if c.stages):
        computing = sketch.least(tuple(stage.groups for stage in c.stages), c)
        pieces = sequences / c.micro_batch_size / sum(g.count for g in c.stages[0].groups) * c.chunks * c.slices
        hopes.append((computing * (1 + (len(c.stages) - 1) / pieces), i, c))
    best: dict[tuple[frozenset[str], int], tuple[float, Candidate, Estimate]] = {}
    for hope, _, c in sorted(hopes, key=lambda entry: entry[:2]):
        # Regular stages are of equal size.
        kind = frozenset(estimator.cluster.nodes[p].gpu for p in c.gpus()), c.world_size // len(c.stages)
        to_beat = best[kind][0] if kind in best else most
        found = _least_in_host_memory(estimator, goal, c) if hope < to_beat else None
        if found is not None and goal.value(found[1]) < to_beat:
            best[kind] = goal.value(found[1]), *found
    order = sorted(best, key=lambda kind: best[kind][0])
    first = {kinds: (kinds, size) for kinds, size in reversed(order)}
    return [best[kind][1:] for i, kind in enumerate(order) if i < MOST_REGULAR or first[kind[0]] == kind]


def with_experts(estimator: Estimator, goal: Goal) -> Iterator[Candidate]:
    """Regular plans with experts over replicas, with whole and with split vocabularies.

    Memory is short in most of them, because an expert's state is divided over few ranks.  So split vocabularies are
    tried, and as few activations in main memory as fits.
    """
    model, ways = estimator.model, [(s.name, 2 if s.name == "interleaved" else 1) for s in goal.allowed]
    ways = [way for way in ways if way[0] in ("1f1b", "interleaved")]
    settings = list(product(ways, model.batch_sizes[:_BATCHES], model.recompute, sizes_over_replicas(estimator)))
    for is_split in (False, True) if settings else ():
        for stages, _ in _shapes(estimator, (1,), has_ends=not is_split):
            rows = rows_of((1,) * len(stages), model.tied_embeddings) if is_split else ()
            for (name, chunks), batch, recompute, ep in settings:
                yield Candidate(stages, batch, recompute, name, chunks, rows=rows).over_replicas(ep)


def in_slices(estimator: Estimator, goal: Goal, mixed: bool = False) -> Iterator[Candidate]:
    """Regular pipelines under each schedule that cuts sequences and with each recomputation.

    Args:
        mixed: One kind of GPU has twice the TP size of the others.
    """
    if any(schedule.cuts_sequences for schedule in goal.allowed):
        for stages, cp in _shapes(estimator, mixed=mixed):
            yield from _in_slices(estimator, goal, stages, cp, _SLICES_PER_STAGE)


def _in_slices(estimator: Estimator, goal: Goal, stages: tuple[Stage, ...], cp: int, each: int) -> Iterator[Candidate]:
    """Pipelines with ``each`` slices per stage, or a few more."""
    model, sliced = estimator.model, [schedule.name for schedule in goal.allowed if schedule.cuts_sequences]
    wanted = each * len(stages)
    slices = next((n for n in range(wanted, 4 * wanted) if model.seq_length % n == 0), 0)
    if slices and model.seq_length // slices >= _LEAST_TOKENS * cp:
        for name, recompute in product(sliced, model.recompute):
            yield Candidate(stages, 1, recompute, name, slices=slices, cp=cp)


def of_kinds_together(estimator: Estimator, goal: Goal) -> Iterator[Candidate]:
    """Regular plans whose replicas have context-parallel ranks on several kinds of GPU, with parts by speed.

    They use all GPUs of two kinds, or of all kinds, and have one stage, or several stages with slices.
    """
    model = estimator.model
    for group, replicas in _of_several_kinds(estimator):
        cp, unit = len(group.parts), estimator.unit_of(Candidate((), 1, cp=len(group.parts)), group)
        assert unit is not None  # its parts have been priced
        for width in (w for w in LONG_SIZES if replicas % w == 0 and w <= model.global_batch_size):
            count = replicas // width
            if count > model.num_layers:
                continue
            ends = [0.0] * (count - 1) + [unit.head_f + unit.head_b]
            layers = balanced(model.num_layers, [1 / (unit.layer_f + unit.layer_b)] * count, ends)
            stages = tuple(Stage(n, (group._replace(count=width),)) for n in layers)
            if count > 1:
                for each in (_SLICES_PER_STAGE, 2 * _SLICES_PER_STAGE):  # more need less memory
                    yield from _in_slices(estimator, goal, stages, cp, each)
            elif PLAIN in goal.allowed:
                yield from (Candidate(stages, 1, recompute, cp=cp) for recompute in model.recompute)


def _of_several_kinds(estimator: Estimator) -> Iterator[tuple[Group, int]]:
    """A replica with TP groups of several kinds of GPU, and how many such replicas use all GPUs of these."""
    nodes, region = estimator.cluster.nodes, estimator.network.region
    kinds = tuple(dict.fromkeys(node.gpu for node in nodes))
    for chosen, tp in product(dict.fromkeys((*combinations(kinds, 2), kinds)), LONG_SIZES):
        pools = [p for p, node in enumerate(nodes) if node.gpu in chosen and node.quota]
        counts = [min(nodes[p].count * (nodes[p].gpus_per_node // tp), nodes[p].quota // tp) for p in pools]
        most = gcd(*counts)
        # a plan names the kinds of the parts of a replica, and no node groups: of two with one kind it takes any
        is_told = 1 < len({nodes[p].gpu for p in pools}) == len(pools)
        if not all(counts) or not is_told or len({region[p] for p in pools}) > 1:
            continue
        for replicas in (n for n in range(1, most + 1) if most % n == 0 and sum(counts) // n * tp <= MOST_SHARING):
            mine = [pool for pool, n in zip(pools, counts) for _ in range(n // replicas)]
            group = Group(mine[0], tp, 1, 0, tuple(SequencePart(pool, 1) for pool in mine))
            for shared in _by_speed(estimator, Candidate((), 1, cp=len(mine)), group):
                yield shared, replicas


def _by_speed(estimator: Estimator, like: Candidate, group: Group) -> Iterator[Group]:
    """The group with parts that take equally long, in units of each of ``FINENESS``; none without figures."""
    shares = [float(part.share) for part in group.parts]
    for units in (*[1000] * 4, *FINENESS):  # iterates, because transfer times do not depend on the parts
        parts = [part._replace(share=max(1, round(units * s / max(shares)))) for part, s in zip(group.parts, shares)]
        divisor = gcd(*[part.share for part in parts])
        shared = group._replace(parts=tuple(part._replace(share=part.share // divisor) for part in parts))
        found = estimator.units_of_parts(like, shared)
        if found is None:
            return
        if units in FINENESS:
            yield shared
            continue
        seconds = dict(zip(dict.fromkeys(shared.parts), [unit.layer_f + unit.layer_b for unit in found], strict=True))
        shares = [part.share / seconds[part] for part in shared.parts]


def _least_in_host_memory(estimator: Estimator, goal: Goal, like: Candidate) -> tuple[Candidate, Estimate] | None:
    """The candidate with as few activations in main memory as fits."""
    fitting = None
    for share in (0.0, *reversed(LONG_SHARES[1:])):  # gives up at once if it does not fit with all of them there
        candidate = like.with_(host_activations=share)
        estimate = _usable(estimator, goal, candidate, fits=False)
        fits = estimate is not None and estimator.fits(estimate)
        if estimate is not None and fits:
            fitting = candidate, estimate
        if estimate is None or fits != bool(share):
            break
    return fitting


def _shapes(
    estimator: Estimator, cp_sizes: Sequence[int] = LONG_SIZES, *, has_ends: bool = True, mixed: bool = False
) -> Iterator[tuple[tuple[Stage, ...], int]]:
    """Stages of equally many replicas of one TP and CP size, with layers by speed; and the CP size.

    The stages use all GPUs, of all kinds together and of each kind alone.  Of all kinds together any number of stages
    is tried, too, the fastest first; of one kind any number that divides the layers.

    Args:
        cp_sizes: CP sizes to try.
        has_ends: Whether the last stage has the whole output layer.
        mixed: All kinds together, one of them with twice the TP size of the others.
    """
    model, nodes = estimator.model, estimator.cluster.nodes
    kinds = sorted({n.gpu for n in nodes})
    wider = (kinds if len(kinds) > 1 else []) if mixed else [""]
    for tp, cp, width, wide in product(LONG_SIZES, cp_sizes, LONG_SIZES, wider):
        sizes = [tp * 2 if n.gpu == wide else tp for n in nodes]
        if width > model.global_batch_size or max(sizes) * cp > MOST_SHARING:
            continue
        counts = {p: n.count * (n.gpus_per_node // sizes[p]) // (cp * width) for p, n in enumerate(nodes)}
        counts = {p: n for p, n in counts.items() if n and nodes[p].quota >= n * sizes[p] * cp * width}
        like = Candidate((), 1, cp=cp)
        units = {p: u for p in counts if (u := estimator.unit_of(like, Group(p, sizes[p], 1))) is not None}
        rate = {p: 1 / (u.layer_f + u.layer_b) for p, u in units.items()}
        whole = [p for p in sorted(units, key=lambda p: -rate[p]) for _ in range(counts[p])]
        chosen = [whole[:n] for n in range(len(whole), 1, -1)] if len(units) == len(counts) else []
        for kind in dict.fromkeys(nodes[p].gpu for p in whole) if not wide else ():
            mine = [p for p in whole if nodes[p].gpu == kind]
            chosen += [mine[:n] for n in range(1, len(mine) + 1) if n == len(mine) or model.num_layers % n == 0]
        for order in dict.fromkeys(tuple(order) for order in chosen if 1 < len(order) <= model.num_layers):
            if mixed and len({sizes[p] for p in order}) == 1:
                continue
            head = units[order[-1]]
            ends = [0.0] * (len(order) - 1) + [(head.head_f + head.head_b) * has_ends]
            layers = balanced(model.num_layers, [rate[p] for p in order], ends)
            yield tuple(Stage(n, (Group(p, sizes[p], width),)) for n, p in zip(layers, order)), cp


def balanced(total: int, rates: list[float], ends: list[float], least: int = 1) -> list[int]:
    """Layers of each stage such that all stages take equally long.

    Args:
        rates: Layers per second of each stage.
        ends: Seconds of each stage's other work on a microbatch.
        least: Least layers of a stage.
    """
    layers = [least] * len(rates)
    for _ in range(total - sum(layers)):
        s = min(range(len(rates)), key=lambda s: (layers[s] + 1) / rates[s] + ends[s])
        layers[s] += 1
    return layers


LEAST_GAIN = 0.01  # a change must shorten the iteration by this share: of nearly equal plans the plainer one is taken
LONG = 32768  # tokens of a sequence from which on context parallelism, the exchange and offload are tried
TRIED, NEAR = 2, 1.03  # plans of a schedule that are changed; all but the best are within this factor of it
MOST_REGULAR = 3  # regular plans that are changed, besides the best on each choice of kinds of GPUs
FAR = 1.3  # regular plans whose closed form is worse than the best so far by this factor are not changed
MOST_STEPS = 12  # most successive changes of one plan
MOST_OPERATIONS = 4_000
"""Budget of compute operations for simulating a plan's changes; larger for long sequences, where plans differ more."""
MOST_OPERATIONS_LONG = 80_000
MOST_OF_ONE = 20_000  # budget beyond the rest for the change with the best closed form, if it beats all plans so far
SHARES = (0.25, 0.5, 0.75, 1.0)  # shares of activations in main memory
DEGREES = (2, 4, 8, 16)
CLEAR_GAIN = 0.03  # a change that is better by this share is taken without trying the others
HOPELESS = 1.1  # a change whose closed form is worse by this factor is not simulated
EXCHANGING = 4  # factor by which the context exchange makes a simulation take longer


@collector_paused()
def choose(estimator: Estimator, goal: Goal, progress: Progress, outcome: SearchResult, known: float = inf) -> None:
    """Add the changed plans to the outcome, the best first; plans far worse than a known value are not changed."""
    if outcome.interrupted or progress.spent:
        return
    is_long = estimator.model.seq_length >= LONG
    starts = [found for found in _starts(outcome, goal) if found.value(goal) <= FAR * known]
    if not starts and known == inf and outcome.nearest is not None and outcome.nearest[0].schedule in goal.schedules:
        first = _fitting(estimator, goal, outcome.nearest[0])
        starts = [] if first is None else [first]
        outcome.found += starts
    better: list[Found] = []
    progress.text = "choices"
    known = min(known, outcome.best.value(goal) if outcome.best is not None else inf)
    ways: dict[Way, float] = {with_experts: FAR}
    if is_long:
        ways |= {in_slices: FAR, partial(in_slices, mixed=True): 1.0, of_kinds_together: HOPELESS}
    regular = [pair for way, far in ways.items() for pair in best_regular(estimator, goal, way, far * known)]
    for found in (simulated(estimator, *pair) for pair in regular):
        starts += [] if found is None else [found]
    for start in sorted(starts, key=lambda f: f.value(goal)):
        left = MOST_OPERATIONS_LONG if is_long else MOST_OPERATIONS
        changed = _climb(estimator, goal, progress, start, left, known)
        known = min(known, changed.value(goal))
        if changed not in outcome.found:
            better.append(changed)
    if better or (starts and outcome.best is None):
        outcome.found = confirm(estimator, goal, [*better, *outcome.found])
        outcome.nearest = None if outcome.found else outcome.nearest


def _starts(outcome: SearchResult, goal: Goal) -> list[Found]:
    """The best plan of every schedule, and the next one with other stages that is nearly as good."""
    best: dict[str, dict[object, Found]] = {}
    for found in sorted((f for f in outcome.found if f.runnable), key=lambda f: f.value(goal)):
        mine = best.setdefault(found.candidate.schedule, {})
        first = next(iter(mine.values()), found)
        if len(mine) < TRIED and found.value(goal) <= NEAR * first.value(goal):
            mine.setdefault(pools_of(found.candidate), found)
    return [found for mine in best.values() for found in mine.values()]


def _climb(estimator: Estimator, goal: Goal, progress: Progress, start: Found, left: int, known: float) -> Found:
    """The plan with all changes that pay, found with at most ``left`` simulated operations.

    If these are too few, the change with the best closed form is simulated nevertheless if that is below ``known``.
    """
    current, tried = start, {start.candidate}
    for _ in range(MOST_STEPS):
        best = current
        for i, (candidate, estimate) in enumerate(_promising(estimator, goal, current, tried)):
            hope = goal.value(estimate) / goal.value(current.estimate) * current.value(goal)
            if candidate.host_activations and hope >= known and estimator.model.seq_length < LONG:
                continue  # copies take long to simulate
            # an exchange counts as what it takes
            operations = max(1, operations_of(estimator, candidate)) * (EXCHANGING if candidate.exchange else 1)
            left -= operations
            is_hopeful = i == 0 and operations <= MOST_OF_ONE and hope < known * (1 - LEAST_GAIN)
            if progress.spent or (left < 0 and not is_hopeful):
                return best
            tried.add(candidate)
            found = simulated(estimator, candidate, estimate)
            if found is not None and found.value(goal) < best.value(goal):
                best = found
            if best.value(goal) < current.value(goal) * (1 - CLEAR_GAIN):
                break
        if best.value(goal) > current.value(goal) * (1 - LEAST_GAIN):
            break
        current = best
    return current


def _promising(
    estimator: Estimator, goal: Goal, current: Found, tried: set[Candidate]
) -> list[tuple[Candidate, Estimate]]:
    """Changes that fit into memory and whose closed form is not much worse, in the order of their closed forms."""
    out: list[tuple[float, int, Candidate, Estimate]] = []
    most = HOPELESS * goal.value(current.estimate)
    for candidate in changes(estimator, goal, current.candidate):
        if candidate in tried:
            continue
        estimate = _usable(estimator, goal, candidate)
        if estimate is not None and goal.value(estimate) < most:
            out.append((goal.value(estimate), len(out), candidate, estimate))
    return [(candidate, estimate) for _, _, candidate, estimate in sorted(out, key=lambda item: item[:2])]


def _usable(estimator: Estimator, goal: Goal, candidate: Candidate, fits: bool = True) -> Estimate | None:
    return goal.usable(estimator, candidate, fits=fits) if schedule_of(candidate).runs(estimator, candidate) else None


def _fitting(estimator: Estimator, goal: Goal, candidate: Candidate) -> Found | None:
    """A plan that fits, reached by the changes that save most memory; None where no change helps."""
    estimate = _usable(estimator, goal, candidate, fits=False)
    for _ in range(MOST_STEPS):
        if estimate is None:
            return None
        if estimator.fits(estimate):
            found = simulated(estimator, candidate, estimate)
            if found is not None:
                return found
        best = None
        for changed in changes(estimator, goal, candidate):
            other = _usable(estimator, goal, changed, fits=False)
            if other is not None and other.fullest < (best or (None, estimate))[1].fullest * (1 - 1e-9):
                best = changed, other
        if best is None:
            return None
        candidate, estimate = best
    return None


def changes(estimator: Estimator, goal: Goal, c: Candidate) -> Iterator[Candidate]:
    """Candidates with one setting changed."""
    yield from _expert_parallel(estimator, c)
    if len(c.stages) > 1 and not c.sizes:
        yield from _vocabulary(estimator, c)
        yield from _layers(c)
    if estimator.model.seq_length >= LONG and not c.sizes:
        yield from _context_parallel(c)
        # The parts of regular plans by the speed that their ranks have in these passes.
        for shared in _by_speed(estimator, c, c.stages[0].groups[0]) if c.stages[0].groups[0].parts else ():
            yield c.with_(stages=tuple(Stage(s.layers, (shared,)) for s in c.stages))
        yield from _sliced(estimator, goal, c)
        for recompute in estimator.model.recompute:
            if recompute != c.recompute:
                yield c.with_(recompute=recompute)
                if schedule_of(c).cuts_sequences:
                    yield from (c.with_(recompute=recompute, host_activations=share) for share in SHARES)
        if not schedule_of(c).shards_parameters:
            yield from (c.with_(host_activations=share) for share in (0.0, *SHARES) if share != c.host_activations)
    elif "none" in estimator.model.recompute and not (
        c.recompute == "none" or c.sizes or schedule_of(c).shards_parameters
    ):
        kept = c.with_(recompute="none", depths=())
        free = balance(estimator, tuple(s.groups for s in kept.stages), kept, fits=False)
        yield from (free.with_(host_activations=share) for share in SHARES if free is not None)


def _expert_parallel(estimator: Estimator, c: Candidate) -> Iterator[Candidate]:
    """Candidates with whole experts on the ranks of a replica (EP) in place of cut ones."""
    x, most = estimator.model.experts, max(g.tp for s in c.stages for g in s.groups)
    if x is None or any(g.ep for s in c.stages for g in s.groups):
        return
    for ep in (1, *DEGREES):
        if (ep, False) != c.experts_over and ep <= most and x.count % ep == 0:
            yield c.with_(ep=ep, across_replicas=False)
    yield from over_replicas(estimator, c)


def _context_parallel(c: Candidate) -> Iterator[Candidate]:
    """Candidates with context parallelism in place of TP or of replicas."""
    groups = [g for s in c.stages for g in s.groups]
    for k in DEGREES if not any(g.parts for g in groups) else ():
        if all(g.tp % k == 0 for g in groups):
            yield _divided(c, c.cp * k, tp=k)
        if all(g.count % k == 0 for g in groups):
            yield _divided(c, c.cp * k, count=k)
        if c.cp % k == 0:
            yield _divided(c, c.cp // k, count=Fraction(1, k))
            if all(g.tp * k <= 8 for g in groups):
                yield _divided(c, c.cp // k, tp=Fraction(1, k))


def _divided(c: Candidate, cp: int, tp: Fraction | int = 1, count: Fraction | int = 1) -> Candidate:
    """The candidate with another CP size, and with TP sizes and numbers of replicas divided by ``tp`` and ``count``."""
    stages = tuple(
        Stage(s.layers, tuple(sorted(g._replace(tp=int(g.tp / tp), count=int(g.count / count)) for g in s.groups)))
        for s in c.stages
    )
    return c.with_(cp=cp, stages=stages, depths=())


def _sliced(estimator: Estimator, goal: Goal, c: Candidate) -> Iterator[Candidate]:
    """Candidates with other slices and chunks, with the context exchange, and with slices where there were none."""
    for schedule in goal.allowed:
        if len(c.stages) < 2 or not schedule.cuts_sequences:
            continue
        if schedule_of(c) is schedule:
            yield from schedule.changes(estimator, c)
        else:
            plain = c.with_(schedule=PLAIN.name, chunks=1, slices=1, offload=False, depths=(), shares=None)
            yield from schedule.variants(estimator, plain)


def _vocabulary(estimator: Estimator, c: Candidate) -> Iterator[Candidate]:
    """Candidates with the vocabulary split over the stages, evenly and by speed, and layers balanced anew."""
    if not estimator.model.can_split_vocabulary:
        return
    if c.rows:
        yield c.with_(rows=())
        return
    rates, heads = [], []
    for stage in c.stages:
        units = [(g.count, estimator.unit_of(c, g)) for g in stage.groups]
        rates.append(sum(n / (u.layer_f + u.layer_b) for n, u in units if u is not None))
        heads.append(sum(n / (u.head_f + u.head_b) for n, u in units if u is not None))
    if not all(rates) or not all(heads):
        return
    even = (1,) * len(heads)
    by_speed = tuple(round(100 * h / min(heads)) for h in heads)
    deep = schedule_of(c).has_depths
    meeting = tuple(max(n, MEETING) for n in c.depths or (1,) * (len(heads) - 1)) if deep else ()
    for shares, depths in product(dict.fromkeys((even, by_speed)), {c.depths: 0, meeting: 0}):
        rows = rows_of(shares, estimator.model.tied_embeddings)
        yield c.with_(rows=rows, depths=depths)
        ends = [part / head for (part, _), head in zip(rows, heads)]
        layers = balanced(sum(s.layers for s in c.stages), rates, ends, c.chunks)
        stages = tuple(s.of(n) for s, n in zip(c.stages, layers))
        if stages != c.stages:
            yield c.with_(rows=rows, stages=stages, shares=None, depths=depths)


def _layers(c: Candidate) -> Iterator[Candidate]:
    """Candidates with one layer moved to a neighbouring stage, for plans with another change."""
    if not (c.rows or c.exchange or c.cp > 1):
        return
    for i in range(len(c.stages) - 1):
        for a, b in ((i, i + 1), (i + 1, i)):
            if c.stages[a].layers > c.chunks:
                yield c.shifted(a, b).with_(shares=None)


METHODS = ("auto", "zorse", "sailor", "poplar")
FEW = 0.6  # share of the FLOP/s below which GPUs with faster layers are searched after all together


def search(
    method: str, estimator: Estimator, goal: Goal, progress: Progress | None = None, robust: bool = True
) -> SearchResult:
    """Run one of ``METHODS``, and compute the lower bound for any plan.

    Args:
        robust: Of nearly equally fast plans, take the one that loses least where figures are off.
    """
    progress, cluster = progress or Progress(), estimator.cluster
    pools = [p for p, quota in enumerate(all_gpus(estimator)) if quota]
    vendors = cluster.of_vendors(pools)
    newer = [p for p in pools if cluster.gpu(cluster.nodes[p].gpu).has_transformer_engine]

    def find(part: Estimator, known: float) -> SearchResult:
        return _search_together(method, part, goal, progress, robust, known)

    if len(vendors) > 1 and not goal.mixes_vendors:
        return search_apart(
            estimator, goal, progress, vendors, lambda part, _: search(method, part, goal, progress, robust)
        )
    if newer and estimator.running(newer) is not estimator:  # alone they run faster layers
        # Where the newer ones are few, the time of a plan on all is often below the bound of every plan on them.
        flops = [cluster.gpu(n.gpu).peak(estimator.model.precision) * n.quota for n in cluster.nodes]
        are_few = sum(flops[p] for p in newer) < FEW * sum(flops)
        return search_apart(estimator, goal, progress, [pools, newer] if are_few else [newer, pools], find)
    return find(estimator, inf)


def _search_together(
    method: str, estimator: Estimator, goal: Goal, progress: Progress, robust: bool, known: float
) -> SearchResult:
    """Search all GPUs as one cluster; plans that are worse than a known one may be skipped."""
    started = time.process_time()
    outcome, bounds, bound = SearchResult(method), None, 0.0
    try:
        bounds = Bounds(estimator, goal)
        bound = bounds.value(all_gpus(estimator))  # before the search, so that its CPU time counts
        if bound <= known:
            outcome = _search(method, estimator, goal, progress, known)
        if method == "auto":
            choose(estimator, goal, progress, outcome, known)
            prefer_plain(estimator, goal, outcome)
            if robust:
                prefer_steady(estimator, goal, outcome)
        # Plans on other GPUs alone run faster layers, with which they have been searched.
        own = [f for f in outcome.found if estimator.running(f.candidate.gpus()) is estimator]
        outcome.found = _distinct(own or outcome.found)
        progress.is_over = True
    except KeyboardInterrupt:
        progress.is_over = outcome.interrupted = True
    if outcome.interrupted and not outcome.found:
        outcome.found = sorted(progress.kept, key=lambda found: found.value(goal))
    if method == "auto":
        outcome.cpu_s = time.process_time() - started
    outcome.bound = bound
    if bounds is not None and outcome.best is not None:
        used = outcome.best.candidate.gpus()
        outcome.bound_in_use = bounds.value(tuple(used.get(pool, 0) for pool in range(len(estimator.cluster.nodes))))
    return outcome


def search_on(method: str, estimator: Estimator, goal: Goal, progress: Progress, robust: bool = True) -> SearchResult:
    """Search as :func:`search` does; raises KeyboardInterrupt at Ctrl-C, which ends a command with several of them."""
    outcome = search(method, estimator, goal, progress, robust)
    if outcome.interrupted and not progress.spent:
        raise KeyboardInterrupt
    return outcome


def _distinct(found: list[Found]) -> list[Found]:
    """The plans without those that differ from an earlier one only in microbatches in flight and order."""
    kept: dict[Candidate, Found] = {}
    for entry in found:
        kept.setdefault(entry.candidate.with_(slack=0.0, depths=(), order="", shares=None), entry)
    return list(kept.values())


def _search(method: str, estimator: Estimator, goal: Goal, progress: Progress, known: float) -> SearchResult:
    """Run one method; its module is imported when needed."""
    if method in ("zorse", "sailor"):
        from .papers import search_sailor, search_zorse

        return (search_zorse if method == "zorse" else search_sailor)(estimator, goal, progress)
    if method == "poplar":
        from .poplar import search_poplar

        return search_poplar(estimator, goal, progress)
    from .auto import search_auto

    return search_auto(estimator, goal, progress, known=known)
