"""All candidates so far: each is first sketched, and evaluated at most once if its sketch is promising."""

from array import array
from collections import defaultdict
from collections.abc import Callable
from ctypes import addressof, c_double
from math import inf
from struct import Struct
from typing import Any, Literal, NamedTuple

from megatron_het.plan.validate import most_chunks
from megatron_het.schedule.generators.one_f_one_b import SLACK

from ..costs.candidate import Candidate, Group, Stage, allocate
from ..costs.estimate import Estimate, Estimator
from ..costs.plain import loops
from ..costs.schedules import PLAIN, is_ordered, schedule_of
from ..costs.stages import tail_s
from .balance import Rooms, balance, ends_of, hiding, layer_rooms, passes_s, relieved, stage_load
from .outcome import PENALTY, Goal, Progress
from .pools import Limits, all_gpus

Groups = tuple[tuple[Group, ...], ...]

# Sketches: quick estimates of an iteration time, which decide which candidates the closed form evaluates.
#
# Each stage is described by a few figures, which candidates share: the rate at which its replicas compute layers,
# the number of layers that fit into memory, and the time to reduce the gradients of a layer.  A sketch only
# divides the layers by these rates.


TOO_LARGE = 100.0  # factor on the value of candidates that do not fit into memory, far above all that fit
BACKWARD = 2 / 3  # share of the backward in the time of a forward and a backward
DOUBTFUL = 0.125  # stages that lack memory for no more than this share of the layers may fit after all


class _Stage(NamedTuple):
    """A stage's rates and costs for the sketch."""

    layer_s: float  # all microbatches through one layer, on the replica that takes longest
    ends: float  # time of embedding and head, in layers
    pass_s: float  # forward and backward of one microbatch through a layer, on average
    ends_size: float  # parameters of embedding and head, in layers
    rate: float  # layers per second
    width: int
    usd_per_s: float
    # figures, without_tail: the first four, packed for the compiled loops, the latter with a tail of 0 s
    figures: bytes
    without_tail: bytes


class _Known:
    """A stage at one point of the search space.

    Attributes:
        stage: Its rates and costs.
        rate: Layers per second.
        rooms: Number of layers that fit into memory.
    """

    __slots__ = ("caps", "figures", "rate", "rooms", "stage", "width")

    def __init__(self, stage: _Stage, tail_s: float, rooms: Rooms) -> None:
        self.stage, self.rooms, self.rate, self.width = stage, rooms, stage.rate, stage.width
        # figures of the stage and ``tail_s``, packed for the compiled loops
        self.figures = stage.figures + _SECONDS.pack(tail_s)
        # most layers that fit, by the replicas of later stages, or by the numbers of stages
        self.caps: dict[int | tuple[int, int], int] = {}


_FIGURES, _SECONDS, _ROW = Struct("4d"), Struct("d"), Struct("5d")
_NO_ENDS = 0.0, 0.0
_Met = dict[tuple[Group, ...], "_Known | Literal[False]"]
_Priced = defaultdict[tuple[float, float], dict[tuple[Group, ...], _Stage | None]]


class _Point:
    """The settings of a candidate other than its stages, with a cache of stages under these settings.

    Attributes:
        like: Without stages and slack.
    """

    __slots__ = ("computes", "known", "like", "mismatch", "most_stages", "schedule", "stages", "tails", "total")

    def __init__(self, like: Candidate, total: int, sketch: "Sketch") -> None:
        self.like, self.total, self.schedule = like.with_(stages=(), slack=0.0, depths=()), total, schedule_of(like)
        self.mismatch = self.schedule.mismatch(like)
        # the settings on which compute depends; compute of stages, by the parts of embedding and head and by groups
        computing = like.micro_batch_size, like.recompute, like.slices, like.experts_over, like.cp
        self.computes = *computing, like.rows
        self.stages = sketch.stages.setdefault(computing, defaultdict(dict))
        # gradient reduction and update of a layer, which depend neither on the batch nor on recomputation
        exchanging = like.schedule, like.chunks, like.zero_stage, like.cp, like.experts_over
        self.tails = sketch.tails.setdefault(exchanging, {})
        # most stages with which a plan stays below the limit on passes
        self.most_stages = most_chunks(total, like.slices) // like.chunks
        # by the parts of embedding and head that stages have, and by groups; False where they cannot run
        self.known: defaultdict[tuple[float, float], _Met] = defaultdict(dict)


class _Guesses(NamedTuple):
    """Sketches of one choice of stages."""

    values: dict[_Point, float]  # sketched value by point
    leasts: dict[object, float]  # least compute, by the settings on which compute depends


class Sketch:
    """Cached sketches of one search, in the goal's unit (seconds or USD)."""

    def __init__(self, estimator: Estimator, goal: Goal) -> None:
        self.estimator, self.goal = estimator, goal
        self.costs_money = goal.objective == "cost"
        self.points: dict[object, _Point | None] = {}
        self._met: dict[int, tuple[Candidate, _Point | None]] = {}
        self.stages: dict[object, _Priced] = {}
        self.tails: dict[object, dict[tuple[Group, ...], float]] = {}
        self._guesses: dict[Groups, _Guesses] = {}
        self._asked: tuple[Groups, _Guesses] = (), _Guesses({}, {})
        self._compiled = loops()
        self._out = (c_double * 3)()
        self._out_at = addressof(self._out)

    def value(self, groups: Groups, like: Candidate, most: float = inf, simulated: float = inf) -> float:
        """Sketch of the value of these stages with their best layers.

        Args:
            simulated: Value of a simulated plan: stages that compute longer are skipped.

        Returns:
            Infinite if they cannot run, or their sketch is certainly above ``most``.
        """
        wanted, last, point = self.estimator.model.num_layers, len(groups) - 1, self._point(like)
        if last >= wanted or point is None or last >= point.most_stages:
            return inf
        values = self._guesses_of(groups).values
        if point in values:
            return values[point]
        found, rate = self._stages(point, groups, like, min(most, simulated))
        if not rate:
            return inf
        usd = sum([k.stage.usd_per_s for k in found]) if self.costs_money else 1.0
        if usd * wanted > min(most, simulated) * rate:
            return inf
        caps = _caps(found, point.schedule.fills_by_stages)
        lacking = wanted - sum(caps)
        if lacking > 0:
            factor = 1.05 if lacking <= DOUBTFUL * wanted else TOO_LARGE * (1 + lacking)
            usd, caps = usd * factor, [wanted] * (last + 1)
        limits = (most / usd, simulated / usd) if usd else (inf, inf)
        value = usd * self._seconds(groups, point, found, caps, *limits)
        if value < inf:
            values[point] = value
        return value

    def _guesses_of(self, groups: Groups) -> _Guesses:
        """Returns the sketches of these stages; the last ones are kept, because many schedules follow each other."""
        if groups is not self._asked[0]:
            found = self._guesses.get(groups) or self._guesses.setdefault(groups, _Guesses({}, {}))
            self._asked = groups, found
        return self._asked[1]

    def _point(self, like: Candidate) -> _Point | None:
        """The candidate's point; None where the batch does not divide."""
        met = self._met.get(id(like))
        if met is not None:  # it is kept alive, so that no other object gets its id
            return met[1]
        c = like
        key = (
            *(c.micro_batch_size, c.recompute, c.schedule, c.chunks, c.slices, c.zero_stage, c.offload, c.slack),
            *(c.cp, c.experts_over, c.rows),
        )
        if key not in self.points:
            total, rest = divmod(self.estimator.model.global_batch_size, c.micro_batch_size)
            self.points[key] = None if rest else _Point(c, total, self)
        self._met[id(like)] = like, self.points[key]
        return self.points[key]

    def _stages(self, point: _Point, groups: Groups, like: Candidate, limit: float) -> tuple[list[_Known], float]:
        """Returns the figures of the stages, and the layers per second of all together.

        The rate is 0 where a stage cannot run, or where all take longer than ``limit`` even if all layers fit.
        """
        count, ends = len(groups), ends_of(like.rows, len(groups))
        # Most stages have the same part of embedding and head: their whole row is looked up, then the others.
        most, others = _NO_ENDS, range(0, count, max(1, count - 1))
        if like.rows:
            most, others = ends[0], range(count if len(like.rows) == count else 0)
        found: list[Any] = [*map(point.known[most].get, groups)]
        for s in others:
            found[s] = point.known[ends[s]].get(groups[s])
        if not all(found):
            if False in found or self._least(point, groups) > limit:
                return found, 0.0
            for s in range(count):
                if found[s] is None:
                    found[s] = self._meet(point, groups[s], ends[s]) or False
                    point.known[ends[s]][groups[s]] = found[s]
                if not found[s]:
                    return found, 0.0
        return found, sum([entry.rate for entry in found])

    def least(self, groups: Groups, like: Candidate) -> float:
        """Least seconds or USD of the compute of these stages, without memory; infinite when they cannot run.

        It is quick, because memory takes long to find, and it is the same for all schedules.
        """
        point = self._point(like)
        return inf if point is None else self._least(point, groups)

    def _least(self, point: _Point, groups: Groups) -> float:
        leasts = self._guesses_of(groups).leasts
        found = leasts.get(point.computes)
        if found is None:
            found = leasts[point.computes] = self._find_least(point, groups)
        return found

    def _find_least(self, point: _Point, groups: Groups) -> float:
        count, wanted, stages = len(groups), self.estimator.model.num_layers, []
        for mine, ends in zip(groups, ends_of(point.like.rows, count)):
            stage = self._stage(point, mine, ends)
            if stage is None:
                return inf
            stages.append(stage)
        usd = sum([stage.usd_per_s for stage in stages]) if self.costs_money else 1.0
        figures = b"".join([stage.without_tail for stage in stages])
        slowest_s = self._stages_s(figures, [wanted] * count, 0.0)[0]
        return usd * max(slowest_s, wanted / sum([stage.rate for stage in stages]))

    def _seconds(
        self, groups: Groups, point: _Point, found: list[_Known], caps: list[int], most_s: float, simulated_s: float
    ) -> float:
        """Sketched seconds; infinite if the slowest stage takes longer than ``most_s``, or computes ``simulated_s``."""
        like, schedule = point.like, point.schedule
        cut = like.chunks * like.slices
        busy_s, passes, tail = self._stages_s(b"".join([k.figures for k in found]), caps, BACKWARD / cut)
        if busy_s + tail > most_s or busy_s > simulated_s:
            return inf
        if len(groups) == 1:
            return busy_s + passes / cut + tail
        ways = self.estimator.ways_s(groups, like.micro_batch_size, like.cp)
        widths = [k.width for k in found]
        each = point.total * like.chunks
        link_s = max([way * each / (a if a < b else b) for way, a, b in zip(ways, widths, widths[1:])])
        loss = schedule.loss_of(point.mismatch, widths, max(map(len, groups)) > 1)
        if like.rows and not (schedule.has_depths and min(widths) == max(widths)):  # equal widths use depths
            unit, layers = self.estimator.unit_of(like, groups[0][0]), self.estimator.model.num_layers / len(groups)
            assert unit is not None  # its stage has a load
            loss_s = schedule.vocabulary_loss_s(like, unit, len(groups), layers)
            loss += loss_s / unit.both_s(layers, 1 / len(groups), 1 / len(groups))
        fill_s = passes / cut + 2 * sum(ways) * like.chunks / like.slices
        return max(busy_s * (1 + loss), link_s) + fill_s + tail

    def _stages_s(self, figures: bytes, caps: list[int], drain: float) -> tuple[float, float, float]:
        """Returns :func:`stages_s`, computed by the compiled loops if they are available."""
        count, wanted = len(caps), self.estimator.model.num_layers
        if self._compiled is not None:
            out = self._out
            if self._compiled.het_stages(count, figures, array("i", caps).tobytes(), wanted, drain, self._out_at):
                return out[0], out[1], out[2]
        return stages_s(figures, caps, wanted, drain)

    def _meet(self, point: _Point, groups: tuple[Group, ...], ends: tuple[float, float]) -> _Known | None:
        """Compute and cache a stage that is new at this point."""
        like, stage = point.like, self._stage(point, groups, ends)
        if stage is None:
            return None
        rooms = layer_rooms(self.estimator, groups, like, point.total, *ends, slack=0.0)
        return None if rooms is None else _Known(stage, self._tail(point, groups), rooms)

    def _stage(self, point: _Point, groups: tuple[Group, ...], ends: tuple[float, float]) -> _Stage | None:
        """Returns a stage's rates and costs, which do not depend on the schedule; None where it cannot run."""
        known = point.stages[ends]
        if groups not in known:
            known[groups] = self._cost(groups, point.like, point.total, *ends)
        return known[groups]

    def _cost(self, groups: tuple[Group, ...], like: Candidate, total: int, first: float, last: float) -> _Stage | None:
        load = stage_load(self.estimator, groups, like, first, last)
        width = sum([g.count for g in groups])
        if load is None or width > total:
            return None
        found = allocate([t for _, t, _ in load.rates], [g.count for g in groups], total)
        if found is None:
            return None
        usd = sum([self.estimator.price[g.pool] * g.tp * g.count for g in groups])
        unit = load.units[0]
        size = first * unit.embedding_parameters + last * unit.head_parameters
        ends = load.time(1) / load.layer_s - 1.0
        figures = found[0], ends, width * load.layer_s, size / unit.layer_parameters
        return _Stage(*figures, 1.0 / found[0], width, usd, _FIGURES.pack(*figures), _ROW.pack(*figures, 0.0))

    def _tail(self, point: _Point, groups: tuple[Group, ...]) -> float:
        if groups not in point.tails:
            load = stage_load(self.estimator, groups, point.like, *_NO_ENDS)
            assert load is not None  # the caller knows its load
            like = point.like.with_(stages=(Stage(1, groups),) * 3, rows=())
            point.tails[groups] = sum(tail_s(self.estimator, like, load.units, 1))
        return point.tails[groups]


def stages_s(figures: bytes, caps: list[int], wanted: int, drain: float) -> tuple[float, float, float]:
    """Returns the times of stages with the layers that suit them best.

    Args:
        figures: For each stage, the first four fields of ``_Stage`` and the seconds to reduce a layer's gradients.
        drain: Share of a forward and a backward that earlier stages still compute when a stage ends.

    Returns:
        Seconds of the slowest stage, of one microbatch through all the others, and of what follows the last backward.
    """
    found = list(_ROW.iter_unpack(figures))
    layers = divide([row[0] for row in found], [row[1] for row in found], caps, wanted)
    busy_s = passes = worst_pass_s = tail = 0.0
    for n, (layer_s, ends, each_s, ends_size, layer_tail_s) in zip(layers, found):
        all_s, pass_s = (n + ends) * layer_s, (n + ends) * each_s
        tail_s = (n + ends_size) * layer_tail_s - passes * drain
        passes += pass_s
        if all_s > busy_s:
            busy_s, worst_pass_s = all_s, pass_s
        if tail_s > tail:
            tail = tail_s
    return busy_s, passes - worst_pass_s, tail


def _caps(found: list[_Known], by_stages: bool) -> list[int]:
    """Most layers of each stage; ``by_stages``: they depend on the numbers of stages, not of replicas."""
    later, out, count = 0, [], len(found)
    for after, entry in enumerate(reversed(found)):
        known = (after, count) if by_stages else later
        cap = entry.caps.get(known)
        if cap is None:
            cap = entry.caps[known] = entry.rooms.cap(later, after, count)
        out.append(cap)
        later += entry.width
    out.reverse()
    return out


def divide(seconds: list[float], ends: list[float], caps: list[int], wanted: int) -> list[int]:
    """Layers of each stage so that the slowest ends as early as possible (integer optimum, by rising levels).

    Args:
        ends: Time of embedding and head of each stage, in layers.
        wanted: Layers in all, at most the sum of ``caps``.
    """
    all_ends = rate = 0.0
    for t, e in zip(seconds, ends):  # one after the other, as the compiled loop does
        all_ends += e
        rate += 1.0 / t
    level = (wanted + all_ends) / rate
    layers = []
    for t, e, cap in zip(seconds, ends, caps):
        n = int(level / t - e)
        n = 1 if n < 1 else n
        layers.append(cap if n > cap else n)
    missing = wanted - sum(layers)
    if missing < 0:  # stages that must have a layer although they are slow
        now = [(n + e) * t if n > 1 else 0.0 for n, e, t in zip(layers, ends, seconds)]
        for _ in range(-missing):
            at = now.index(max(now))
            layers[at] -= 1
            now[at] = now[at] - seconds[at] if layers[at] > 1 else 0.0
    elif missing:
        more = [(n + 1 + e) * t if n < cap else inf for n, e, t, cap in zip(layers, ends, seconds, caps)]
        for _ in range(missing):
            least = min(more)
            if least == inf:
                break
            at = more.index(least)
            layers[at] += 1
            more[at] = more[at] + seconds[at] if layers[at] < caps[at] else inf
    return layers


WAITING = 0.5  # share of an iteration: plans that wait longer get more microbatches in flight
LESS = (0.5, 0.0)  # slack to try, in this order, where the full slack does not fit
RELIEVED, NEARBY = 1.25, 1.03
"""Factors of the best value: up to the first, recomputation of a plan is reduced; up to the second, that is useful."""
NEARLY = 1.6 * PENALTY
"""Scores above this multiple of the best are hopeless: too slow, or more than about half too large for memory."""


def there(estimator: Estimator, limits: Limits, groups: Groups) -> bool:
    """Whether the cluster has these GPUs, within limits and whole TP groups per node."""
    used: dict[int, int] = {}
    for stage in groups:
        for g in stage:
            if g.tp > estimator.cluster.nodes[g.pool].gpus_per_node:
                return False
            used[g.pool] = used.get(g.pool, 0) + g.tp * g.count
    return all(n <= limits[p] for p, n in used.items())


def in_regions(estimator: Estimator, goal: Goal, groups: Groups) -> bool:
    """Whether the replicas of every stage are in one region, where the goal wants that."""
    region = estimator.network.region
    return not goal.keep_data_parallel_in_region or all(len({region[g.pool] for g in stage}) == 1 for stage in groups)


class CandidateCache:
    """Cache of scores, which also keeps the best candidates that satisfy all constraints.

    The candidates tried under a schedule depend only on 1F1B and on that schedule: more schedules to choose from do
    not change the plans found under one of them.

    ``by_stages`` and ``alike`` hold the best of each number of stages under any schedule, the latter with equal numbers
    of replicas (interleaved schedules need them).  ``steps`` has the next step of local search from a candidate (by all
    neighbours, or in haste), None where it ends; ``even`` has the starting points with equal numbers of replicas.

    Args:
        known: Another cache of the same estimator and goal, whose sketches and layers are shared.
        bound: Value of a known plan: candidates whose sketch is much worse are skipped.
        simulated: Value of a simulated plan: candidates that compute longer are skipped.
    """

    KEEP = 1000

    def __init__(
        self,
        estimator: Estimator,
        goal: Goal,
        progress: Progress,
        limits: Limits | None = None,
        known: "CandidateCache | None" = None,
        bound: float = inf,
        simulated: float = inf,
    ) -> None:
        self.estimator, self.goal, self.progress = estimator, goal, progress
        self.limits = limits or all_gpus(estimator)
        self.sketch: Sketch = known.sketch if known else Sketch(estimator, goal)
        self.balanced: dict[object, Candidate | None] = known.balanced if known else {}
        self.scores: dict[object, tuple[float, Candidate | None]] = {}
        self.good: dict[Candidate, tuple[float, Estimate]] = {}
        self.best, self.bound, self.simulated = inf, bound, simulated
        self.best_of: dict[str, float] = {}
        self.by_stages: dict[int, tuple[float, Candidate]] = {}
        self.alike: dict[int, tuple[float, Candidate]] = {}
        self.nearest: tuple[float, Candidate, Estimate] | None = None
        self.even: dict[tuple[Groups, int, str, int], Candidate] = {}
        self.steps: dict[tuple[Candidate, bool], tuple[float, Candidate] | None] = {}

    @property
    def to_beat(self) -> float:
        """The best value so far, here or known before."""
        return min(self.best, self.bound)

    def to_beat_under(self, schedule: str) -> float:
        """Best value so far of one schedule and of 1F1B, here or known before."""
        return min([self.bound, *[self.best_of.get(name, inf) for name in (PLAIN.name, schedule)]])

    def try_groups(self, groups: Groups, like: Candidate) -> tuple[float, Candidate | None]:
        """Balance the layers of these stages and evaluate."""
        c = like
        point = c.micro_batch_size, c.recompute, c.schedule, c.chunks, c.slices, c.zero_stage, c.offload
        key = groups, *point, c.experts_over, bool(c.rows)
        found = self.scores.get(key)
        if found is None:
            if not there(self.estimator, self.limits, groups):
                self.scores[key] = (inf, None)
                return inf, None
            candidate = self._balance(key, groups, like, like.slack or SLACK)
            found = inf, None
            if candidate is not None:
                found = self.try_slack(candidate, lambda slack: self._balance(key, groups, like, slack))
            found = self.try_deeper(*found)
            if found[0] <= RELIEVED * self.to_beat:
                found = self.try_relieved(*found)
            candidate = found[1]
            is_even = len({sum(g.count for g in stage) for stage in groups}) == 1
            for best in (self.by_stages, self.alike) if is_even else (self.by_stages,):
                if candidate is not None and found[0] < best.get(len(groups), (inf, None))[0]:
                    best[len(groups)] = found[0], candidate
            self.scores[key] = found
        return found

    def try_deeper(self, score: float, candidate: Candidate | None) -> tuple[float, Candidate | None]:
        """The candidate with as many microbatches in flight as hide its transfers, if it is usable and that helps."""
        if candidate not in self.good or not schedule_of(candidate).has_depths or len(candidate.stages) == 1:
            return score, candidate
        if self.good[candidate][1].fill_s >= WAITING * self.good[candidate][1].iteration_s:
            depths = hiding(passes_s(self.estimator, candidate), self.estimator.transfers_of(candidate)[0])
            deep = relieved(self.estimator, candidate.with_(depths=depths))
            return min((score, candidate), (self.try_candidate(deep), deep), key=lambda f: f[0])
        return score, candidate

    def try_relieved(self, score: float, candidate: Candidate | None) -> tuple[float, Candidate | None]:
        """The candidate with less recomputation and its layers balanced anew, if it is usable and that helps."""
        if candidate not in self.good or candidate.recompute != "full":
            return score, candidate
        best, current = (score, candidate), candidate
        most_s = self.goal.seconds(self.estimator, candidate, NEARBY * self.to_beat)
        for _ in range(2):
            current = relieved(self.estimator, current, most_s)
            found = self.try_candidate(current)
            if current.recompute != "full" or found >= best[0]:
                break
            best = found, current
            again = balance(self.estimator, tuple([s.groups for s in current.stages]), current)
            if again is None or again.stages == current.stages:
                break
            current = again
        return best

    def _balance(self, key: object, groups: Groups, like: Candidate, slack: float) -> Candidate | None:
        """The candidate with the layers that balance it."""
        if (key, slack) not in self.balanced:
            self.balanced[key, slack] = balance(self.estimator, groups, like.with_(slack=slack, depths=()))
        return self.balanced[key, slack]

    def try_slack(
        self, candidate: Candidate, with_slack: Callable[[float], Candidate | None] | None = None
    ) -> tuple[float, Candidate]:
        """Evaluate the candidate with the largest slack that fits (full, half or none).

        Args:
            with_slack: Makes the candidate with another slack; by default only the slack changes.
        """
        found = (self.try_candidate(candidate), candidate)
        for slack in LESS if self._needs_less(candidate, found[0]) else ():
            tight = with_slack(slack) if with_slack else candidate.with_(slack=slack)
            if tight is None:
                continue
            found = min(found, (self.try_candidate(tight), tight), key=lambda f: f[0])
            if tight in self.good:
                break
        return found

    def _needs_less(self, candidate: Candidate, score: float) -> bool:
        """Whether a promising 1F1B pipeline is unusable as it is, so that fewer microbatches in flight may help."""
        if not schedule_of(candidate).has_slack or not candidate.slack:
            return False
        if candidate in self.good or score > NEARLY * self.best_of.get(PLAIN.name, inf):
            return False
        alike = {(1, candidate.stages[0].groups[0].count)}
        return bool(candidate.depths) or {(len(s.groups), s.groups[0].count) for s in candidate.stages} != alike

    def try_candidate(self, candidate: Candidate) -> float:
        """Evaluate a complete candidate."""
        known = self.scores.get(candidate)
        if known is not None:
            return known[0]
        estimate = self.estimator.estimate(candidate) if self._runs(candidate) else None
        score = self.goal.score(self.estimator, candidate, estimate)
        self.scores[candidate] = (score, candidate)
        if estimate is None or score == inf:
            return score
        groups, is_tried = tuple(s.groups for s in candidate.stages), candidate.schedule in self.goal.schedules
        allowed = is_tried and in_regions(self.estimator, self.goal, groups)
        if allowed and self.estimator.fits(estimate) and self.goal.violation(candidate, estimate) == 0:
            self.good[candidate] = (score, estimate)
            self.best_of[candidate.schedule] = min(score, self.best_of.get(candidate.schedule, inf))
            if score < self.best:
                self.best = score
                self.progress.best = min(score, self.progress.best)
            if len(self.good) > 5 * self.KEEP:
                kept = {one for one, _ in (*self.top(self.KEEP), *self.finalists(self.KEEP // 8))}
                self.good = {one: entry for one, entry in self.good.items() if one in kept}
        elif not candidate.depths and (self.nearest is None or score < self.nearest[0]):
            self.nearest = (score, candidate, estimate)
        return score

    def _runs(self, candidate: Candidate) -> bool:
        """Whether the runtime can run this schedule on these stages; the closed form prices it all the same."""
        if any(s.layers < candidate.chunks for s in candidate.stages):
            return False  # it could, with chunks of no layers, which gain nothing
        return schedule_of(candidate).runs(self.estimator, candidate)

    def finalists(self, count: int) -> list[tuple[Candidate, Estimate]]:
        """The best candidates, up to ``count`` of every schedule with or without orders and split vocabularies."""
        taken: dict[tuple[str, bool, bool], int] = {}
        out = []
        for candidate, estimate in self.top(len(self.good)):
            kind = candidate.schedule, is_ordered(candidate), bool(candidate.rows)
            taken[kind] = taken.get(kind, 0) + 1
            if taken[kind] <= count:
                out.append((candidate, estimate))
        return out

    def top(self, count: int, schedule: str = "", is_split: bool | None = None) -> list[tuple[Candidate, Estimate]]:
        """The best candidates that satisfy all constraints; of equal values the one with fewer GPUs comes first.

        Args:
            schedule: Only candidates with this schedule; empty for all.
            is_split: Only candidates with a split vocabulary, or only with a whole one; None for all.
        """
        items = [item for item in self.good.items() if schedule in ("", item[0].schedule)]
        items = [item for item in items if is_split in (None, bool(item[0].rows))]
        order = sorted(items, key=lambda item: (item[1][0], item[0].world_size))
        return [(candidate, estimate) for candidate, (_, estimate) in order[:count]]
