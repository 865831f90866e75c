"""Schedules as the planner knows them: one class each, this one with what most of them have in common."""

from collections.abc import Iterator, Sequence
from ctypes import c_double
from functools import lru_cache
from math import ceil, log2
from typing import ClassVar

import numpy as np

from megatron_het.plan import Plan
from megatron_het.plan.placement import DOCUMENTS, WHOLE
from megatron_het.schedule.cutting import Parts

from ...inputs.model import Model
from ..candidate import Candidate, Estimate, Group, GroupMemory, Line, Pipeline, StageTimes
from ..layer import attention_matrix_bytes
from ..operating import OperatingPoints
from ..plain import MOST_STAGES, figures_of, loops, row_of
from ..unit import Unit


def while_updating(
    estimator: OperatingPoints, candidate: Candidate, group: Group, summed: float, updated: float
) -> float:
    """Bytes while the optimizer runs: fp32 of ``summed`` gradients, roots of ``updated``, and attention's buffer."""
    numbers = estimator.runtime.update_copies * updated + (estimator.gradient_per_parameter < 4) * summed
    is_whole = not estimator.runtime.fused and candidate.slices * candidate.cp_of(group) == 1
    matrix = attention_matrix_bytes(estimator.model, candidate.micro_batch_size, group.tp) if is_whole else 0.0
    return 4.0 * numbers + matrix


MISMATCH = (0.02, 0.01, 0.015, 0.08)
State = tuple[float, float, float, float]
"""Bytes of a rank: parameters, gradients and optimizer state on the device, and what is in main memory."""


class Place:
    """Holds what is known of a replica before layers are: what it computes, and what comes after its stage.

    Attributes:
        share: Its part of the microbatches.
        later: Replicas of later stages.
        after: Later stages.
    """

    __slots__ = ("after", "later", "microbatches", "share", "stages")

    def __init__(self, share: float, total: int) -> None:
        self.share, self.microbatches = share, max(1.0, share * total)
        self.later = self.after = 0
        self.stages = 1


class Schedule:
    """A schedule that the search may choose: time, memory, what it needs, and what the search may ask of it.

    Subclasses say what is different.  The instances are in ``schedules.SCHEDULES``.

    Attributes:
        mismatch: Regression coefficients of the loss where stages of different width meet (:meth:`mismatch_loss`).
    """

    name: ClassVar[str] = ""  # as in plans
    is_stock: ClassVar[bool] = False  # Megatron-LM has it
    # replicas may decide between forwards and backwards in several ways (``Candidate.order``)
    has_order: ClassVar[bool] = True
    has_slack: ClassVar[bool] = False  # more microbatches may be in flight than one per replica (``Candidate.slack``)
    has_depths: ClassVar[bool] = False  # more of them may be in flight across slow links (``Candidate.depths``)
    # under a parameter window: replicas of a stage gather and reduce inside the program
    shards_parameters: ClassVar[bool] = False
    needs_equal_widths: ClassVar[bool] = False  # all stages need the same number of replicas
    # attention runs slice by slice; what was sent is given back during the iteration
    cuts_sequences: ClassVar[bool] = False
    # what a stage holds depends on the numbers of stages, not of replicas in later ones
    fills_by_stages: ClassVar[bool] = False

    # -- what the search may ask -------------------------------------------------------------------

    def runs(self, estimator: OperatingPoints, candidate: Candidate) -> bool:
        """Whether the runtime can run the candidate's stages under this schedule."""
        return True

    def variants(self, estimator: OperatingPoints, plain: Candidate) -> Iterator[Candidate]:
        """The stages of a 1F1B candidate under this schedule."""
        yield plain

    def refined(self, candidate: Candidate) -> Iterator[Candidate]:
        """Further settings to try for a very good candidate."""
        yield from ()

    def changes(self, estimator: OperatingPoints, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate, which has this schedule, with what only this schedule has set in other ways."""
        yield from ()

    # -- time --------------------------------------------------------------------------------------

    def pipeline(self, estimator: OperatingPoints, candidate: Candidate, line: Line, total: int) -> Pipeline:
        """The end of the last operation; see ``docs/cost_model.md``.

        A stage starts after one forward of every earlier stage and ends one backward of each before the
        end.  Its first backward needs a round trip through the later stages, of which its warm-up
        forwards hide a part; the same holds at the end; and with ``k`` microbatches in flight, k of them
        take at least one round trip, halfway between mean and slowest replicas: backwards run in the
        order of the microbatches, so one on a slow replica holds up those after it.  Chunks and slices cut the
        pieces that fill the pipeline, slices what is sent as well; later chunks begin when the ones before have gone
        around.  Stages that wait for each other's messages in turn are no faster than their loop.  Before its first
        backward a stage has run all forwards that it may be ahead, which come no faster than earlier stages compute
        and send them; its gradients leave no faster than these take them.  Parts of a split
        output layer fill nothing: stages compute them at one time.  A microbatch has come around no stage before the
        longest part is done.  What a stage sends forward and back shares the network of its nodes.

        Args:
            total: Microbatches of one of the equal pipelines.
        """
        stages, transfers, cards_s = line
        cut = candidate.chunks * candidate.slices
        ways = [t / candidate.slices for t in transfers]
        rows = candidate.rows
        at_once = [stage.units[0].ends_s(*rows[s]) if rows else 0.0 for s, stage in enumerate(stages)]
        loops_s = self.loops_s(candidate, stages, ways)
        waits_s = self.waits_s(estimator, candidate, stages, ways)
        compiled = loops()
        if compiled is not None and len(stages) <= MOST_STAGES:
            out = (c_double * (len(stages) + 1))()
            rows_of_stages = figures_of(stages), *map(row_of, (at_once, transfers, cards_s, loops_s))
            setting = waits_s, candidate.slices, candidate.chunks, estimator.runtime.transfers_in_turn
            which = compiled.het_pipeline(len(stages), *rows_of_stages, *setting, out)
            *alone, worst = out
            return Pipeline(worst, stages[which].busy_s, which, 0.0, alone)
        round_trip, slowest = _round_trips(stages, ways, cut, at_once)
        arrive_s, leave_s, links_s = _paces_s(stages, transfers)
        before, worst, busy, which = 0.0, 0.0, 0.0, 0
        drain, alone, longest_s = 0.0, [], max(at_once)
        for s, stage in enumerate(stages):
            rt = round_trip[s]
            if estimator.runtime.transfers_in_turn:  # ``busy_s`` and ``before`` both count the first transfers
                stall = rt - (2 * ways[s - 1] if s else 0.0)
            else:
                sends_s = _passes(stages[0]) / sum(stage.counts) * cards_s[s]
                loop_s = max(loops_s[s], sends_s * candidate.chunks)
                link_s = max([sends_s, *links_s[max(0, s - 1) : s + 1]])
                met_s = longest_s - at_once[s]
                trips = rt + met_s, slowest[s] + met_s
                stall = _stall_s(stage, candidate, *trips, link_s, (loop_s, arrive_s[s], leave_s[s])) + waits_s
            end = before + stage.busy_s + stall
            alone.append(end - drain)
            way = ways[s] if s < len(ways) else 0.0
            drain += stage.backward_s / cut + way
            if end > worst:
                worst, busy, which = end, stage.busy_s, s
            before += (stage.forward_s + stage.backward_s - at_once[s]) / cut + 2 * way
        return Pipeline(worst, busy, which, 0.0, alone)

    def loops_s(self, candidate: Candidate, stages: Sequence[StageTimes], ways: Sequence[float]) -> list[float]:
        """Least time of all microbatches, per stage, where all have enough to do: what its loops let through.

        Args:
            ways: Seconds of a message over each boundary.
        """
        cut = candidate.chunks * candidate.slices
        if max(ways, default=0.0) <= 0 or (cut > 1 and len({k for stage in stages for k in stage.microbatches}) > 1):
            return [0.0] * len(stages)
        compiled = loops()
        if compiled is not None and len(stages) <= MOST_STAGES:
            found = (c_double * len(stages))()
            compiled.het_loops(len(stages), figures_of(stages), row_of(ways), cut, found)
            return found[:]
        # A stage goes on when the later ones of a loop have answered.
        both = [(stage.forward_s + stage.backward_s) / cut for stage in stages]
        total, widths = _passes(stages[0]), [sum(stage.counts) for stage in stages]
        ahead = [sum([n * held for n, held in zip(stage.counts, stage.in_flight)]) for stage in stages]
        if cut > 1:  # a stage that is one nearer to the end is ahead by one pass forward and one back less
            total, widths = cut * stages[0].microbatches[0], [1] * len(stages)
            ahead = list(range(2 * len(stages), 0, -2))
        out = []
        for s, own in enumerate(both):
            loop, worst = own, own / widths[s]
            for e in range(s + 1, len(both)):
                loop += 2 * ways[e - 1] + both[e]
                worst = max(worst, loop / (ahead[s] - ahead[e] + widths[e]))
            out.append(total * worst)
        return out

    def waits_s(
        self, estimator: OperatingPoints, candidate: Candidate, stages: Sequence[StageTimes], ways: Sequence[float]
    ) -> float:
        """Seconds that any stage waits beside that: until the chunks before have gone around, forward and back."""
        if candidate.chunks == 1 or len(stages) == 1:
            return 0.0
        groups = [stage.groups for stage in candidate.stages]
        back_s = estimator.around_s(groups, candidate.micro_batch_size, candidate.cp) / candidate.slices
        return 2 * (candidate.chunks - 1) * (sum(ways) + max(back_s, *ways))

    def mismatch_loss(self, candidate: Candidate) -> float:
        """Expected share of the busy time lost where stages of different width meet.

        Three or more stages with different numbers of replicas, or stages with replicas of different speeds, hand
        microbatches over at times that do not match.  What that costs depends on details that only the simulator
        sees.  The figures are rounded regression coefficients over random plans (constant, per stage, per doubling
        of the ratio of widths, for mixed stages), with and without slack in the number of microbatches in flight.
        Even divisions, where replicas form fixed pipelines, do not meet it.
        """
        counts = [sum([g.count for g in s.groups]) for s in candidate.stages]
        mixed = max([len(s.groups) for s in candidate.stages]) > 1
        return self.loss_of(self.mismatch(candidate), counts, mixed)

    def vocabulary_loss_s(self, like: Candidate, unit: Unit, stages: int, layers: float) -> float:
        """Seconds per microbatch that a stage waits where all stages compute parts of the output layer together.

        Args:
            like: With a split vocabulary.
        """
        return 0.0

    def loss_of(self, coefficients: tuple[float, float, float, float], counts: Sequence[int], mixed: bool) -> float:
        """Returns the loss of any stages.

        Args:
            coefficients: As :meth:`mismatch` gives them.
            mixed: Whether a stage has replicas of different kinds.
        """
        base, per_stage, per_doubling, of_mixed = coefficients
        loss = 0.0
        if len(counts) > 2 and not self.shards_parameters and max(counts) > min(counts):
            loss = base + per_stage * len(counts) + per_doubling * log2(max(counts) / min(counts))
        return loss + of_mixed if mixed and len(counts) > 1 else loss

    def mismatch(self, candidate: Candidate) -> tuple[float, float, float, float]:
        """The coefficients for :meth:`mismatch_loss`."""
        return MISMATCH

    def ends(self, estimator: OperatingPoints, candidate: Candidate, line: Line, found: Pipeline) -> Sequence[float]:
        """When each stage ends its last backward: later stages one backward of every earlier one before the end."""
        if self.shards_parameters:  # timed stage by stage
            return found.earliest
        ends, before, cut = [], 0.0, candidate.chunks * candidate.slices
        stages, transfers, _ = line
        for s, stage in enumerate(stages):
            ends.append(found.end_s - before)
            before += stage.backward_s / cut + (transfers[s] / candidate.slices if s < len(transfers) else 0.0)
        return ends

    def exposed(self, candidate: Candidate, sync_s: float, update_s: float) -> tuple[float, float]:
        """Returns what of a stage's gradient reduction and update comes after its last backward."""
        return sync_s, update_s

    # -- memory ------------------------------------------------------------------------------------

    def in_flight(self, candidate: Candidate, stage: StageTimes, s: int, i: int) -> float:
        """Microbatches (whole-stage equivalents) whose activations a replica of group ``i`` of stage ``s`` holds."""
        return float(stage.in_flight[i])

    def expected_in_flight(self, like: Candidate, place: Place) -> float:
        """Returns the passes in flight before layers are known."""
        return min(place.microbatches, 1 + ceil((1 + like.slack) * place.share * place.later - 1e-9))

    def in_flight_with(self, like: Candidate, place: Place, layers: int) -> float:
        """Returns the passes in flight of a stage with so many layers."""
        return self.expected_in_flight(like, place)

    def layer_share(self, unit: Unit) -> float:
        """Returns what the activations of a layer take, as a share of those of whole sequences."""
        return 1.0

    def state(self, estimator: OperatingPoints, candidate: Candidate, unit: Unit, count: float, shards: float) -> State:
        """Parameters, gradients and optimizer state of a rank with so many parameters."""
        element, copies = estimator.model.element_bytes, estimator.runtime.extra_parameter_copies
        parameters, gradients = count * element, count * estimator.gradient_per_parameter
        optimizer = count * estimator.optimizer_per_parameter / (shards if candidate.zero_stage >= 1 else 1)
        gradients += count * 4.0 * copies
        if candidate.zero_stage >= 2:  # shards, and whole gradients of the layer that is being reduced
            gradients = gradients / shards + estimator.gradient_per_parameter * unit.layer_parameters
        if candidate.zero_stage >= 3:
            parameters = parameters / shards + 2 * unit.layer_parameters * element
        return parameters, gradients, optimizer, 0.0

    def state_per_parameter(self, estimator: OperatingPoints, like: Candidate, count: int, shards: float) -> float:
        """About the same per parameter, for a group of ``count`` replicas, before layers are known."""
        mixed, copies = float(estimator.model.element_bytes), estimator.runtime.extra_parameter_copies
        return mixed + estimator.gradient_per_parameter + 4.0 * copies + estimator.optimizer_per_parameter / shards

    def whole_per_parameter(self, estimator: OperatingPoints, like: Candidate) -> float:
        """Bytes per parameter that a rank holds in full, independent of its share of the stage's state."""
        return float(estimator.model.element_bytes) + estimator.gradient_per_parameter

    def activations(self, candidate: Candidate, held: float, kept: float) -> tuple[float, float]:
        """Bytes on the device and in main memory of ``held`` microbatches that keep ``kept`` bytes each."""
        return held * kept, 0.0

    def logits(self, candidate: Candidate, held: float, head_bytes: float, is_alone: bool = False) -> float:
        """Bytes that output layer and loss keep, on a rank that has one microbatch (``is_alone``) or more."""
        return head_bytes / candidate.slices

    def head_workspace(self, candidate: Candidate, unit: Unit) -> float:
        """Returns the memory of the last stage's passes besides; logits are gone before the first layer's backward."""
        return max(unit.workspace_bytes - unit.head_bytes, unit.head_workspace_bytes)

    def divide(
        self, estimator: OperatingPoints, candidate: Candidate, found: list[GroupMemory], counts: list[float]
    ) -> list[GroupMemory]:
        """The ranks of one stage, with the state divided unequally where that is needed.

        Args:
            counts: Parameters of a rank of each group.
        """
        return found

    # -- plan --------------------------------------------------------------------------------------

    def routes(self, seconds: list[list[float]], counts: list[list[int]], total: int) -> list[list[list[int]]]:
        """Microbatches of every replica of every stage: each goes to the replica that is least far through its share.

        Args:
            seconds: Per stage and replica, of one microbatch.
            counts: Per stage and replica, how many microbatches it gets.
        """
        return [_evenly(tuple(row), total) for row in counts]

    def parameters(self, candidate: Candidate, estimate: Estimate, alike: bool) -> dict[str, object]:
        """Returns what a plan says of the schedule, whose stages may all route the microbatches alike."""
        return {"zero_stage": candidate.zero_stage} if candidate.zero_stage >= 2 else {}

    def cut(self, estimator: OperatingPoints, candidate: Candidate) -> dict[str, object]:
        """Returns what a plan says of how sequences are cut, beside the number of slices."""
        c, is_alone = candidate, candidate.micro_batch_size == 1 and not candidate.sizes
        can_place = c.cp > 1 and is_alone and not (c.exchange or c.cuts_documents)
        return {DOCUMENTS: WHOLE} if can_place and estimator.model.shared(c.cp, c.slices).whole else {}

    def slice_parts(self, model: Model, plan: Plan) -> Parts:
        """Returns the slices of every microbatch, as ranks cut them; none where they see all before them."""
        return ()


@lru_cache(maxsize=1024)
def _evenly(counts: tuple[int, ...], total: int) -> list[list[int]]:
    """Microbatches per replica, each for the replica that is least far through its share (of equal ones the first).

    Args:
        counts: Of each replica; ``total`` together.
    """
    replicas = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    done = np.arange(total) - np.repeat(ends - counts, counts)
    order = replicas[np.lexsort((replicas, (done + 0.5) / np.repeat(counts, counts)))]
    mine = np.argsort(order, kind="stable").tolist()
    return [mine[end - count : end] for end, count in zip(ends.tolist(), counts)]


def _round_trips(
    stages: Sequence[StageTimes], transfers: Sequence[float], cut: int, at_once: Sequence[float]
) -> tuple[list[float], list[float]]:
    """From each stage to the last and back: at the mean speed, and over the slowest replicas.

    Args:
        at_once: Seconds of a microbatch that each stage computes while the others do, too.
    """
    round_trip, slowest = [0.0] * len(stages), [0.0] * len(stages)
    for s in range(len(stages) - 2, -1, -1):
        nxt = stages[s + 1]
        round_trip[s] = round_trip[s + 1] + (nxt.forward_s + nxt.backward_s - at_once[s + 1]) / cut + 2 * transfers[s]
        slow = max([f + b for f, b in zip(nxt.replica_f, nxt.replica_b)]) - at_once[s + 1]
        slowest[s] = slowest[s + 1] + slow / cut + 2 * transfers[s]
    return round_trip, slowest


def _paces_s(stages: Sequence[StageTimes], transfers: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
    """Least time in which all microbatches come to a stage, all gradients leave it, and all go over each boundary."""
    total, there, back = _passes(stages[0]), [0.0], [0.0]
    widths = [sum(stage.counts) for stage in stages]
    # A replica sends one message after the other.
    links_s = [total / min(pair) * way for pair, way in zip(zip(widths, widths[1:]), transfers)]
    for stage, width, link_s in zip(stages, widths, links_s):
        there.append(max(there[-1], total * stage.forward_s / width, link_s))
        back.append(max(back[-1], total * stage.backward_s / width, link_s))
    return there, back, links_s


def _passes(stage: StageTimes) -> int:
    """Microbatches of all replicas of a stage."""
    return sum([n * k for n, k in zip(stage.counts, stage.microbatches)])


def _stall_s(
    stage: StageTimes, candidate: Candidate, rt: float, slowest: float, link_s: float, paces: tuple[float, float, float]
) -> float:
    """How long a stage waits, beyond the compute of its slowest replica.

    Args:
        paces: Seconds of all microbatches through the stage's loops, from the earlier stages, and back to them.
    """
    (loop_s, arrive_s, leave_s), cut, stall = paces, candidate.chunks * candidate.slices, 0.0
    for i, held in enumerate(stage.in_flight):
        f, b, k = stage.replica_f[i] / cut, stage.replica_b[i] / cut, stage.microbatches[i]
        ahead = (held - 1) * cut if cut > 1 else held - 1
        own = (f + b) * cut * k
        idle = max(0.0, rt - ahead * f) + max(0.0, rt - ahead * b)
        if cut == 1 and k <= held:  # all microbatches in flight at once: one round trip, not two
            idle = max(0.0, rt + max(f + k * b, k * f + b) - own)
        elif cut == 1:
            late = min(idle, rt) + (k - held) * (loop_s / k - f - b) if loop_s / k > f + b else 0.0
            idle = max(idle, late, (k - held) * (f + b + (rt + slowest) / 2) / held + f + b + rt - own)
        else:
            idle = rt + max(0.0, loop_s - own)
        if cut == 1:
            come, go, first = max(f, arrive_s / k), max(b, leave_s / k), min(held, k)
            idle = max(idle, (first - 1) * come + f + (k - first) * max(f + b, come, go) + first * go - own)
        idle = max(idle, link_s * candidate.chunks - own)
        stall = max(stall, own + idle - stage.busy_s)
    return stall
