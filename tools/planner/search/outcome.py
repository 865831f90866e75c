"""Effort, goal, progress and time limit of a search, how they come from a command line, and its outcome."""

import argparse
import gc
import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from ..costs.candidate import Candidate
from ..costs.estimate import Estimate, Estimator, estimator_of
from ..costs.schedules import SCHEDULES, Schedule, schedule_of
from ..errors import PlannerError, command
from ..inputs.cluster import Cluster, load_cluster
from ..inputs.files import write_text
from ..inputs.model import Model, model_of
from ..inputs.profile_schema import Profile, load_profile, save_profile

if TYPE_CHECKING:
    from megatron_het.plan import Plan


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to search."""

    sketches: int = 1000  # starting points to look at
    seeds: int = 120  # starting points to evaluate, of those that look best
    alike: int = 12  # most of these with the same kinds of GPUs in every stage
    beam: int = 4  # starting points to improve by local search
    counts: int = 6  # numbers of stages whose best candidate is improved too
    near: float = 0.12  # neighbours that look worse than a candidate by this share are not evaluated
    neighbours: int = 48  # neighbours of a candidate that are evaluated at most
    hasty: bool = False  # a neighbour that looks much better is evaluated before all neighbours have been looked at
    # Neighbours include candidates with a pool redistributed over its stages.  On few GPUs smaller steps reach the
    # same plans, and such a large step leads away from better plans nearby.
    spread: bool = False
    steps: int = 250  # evaluations of the local search per starting point
    parts: int = 12  # parts of the cluster to search in the same way, of those that can hold a better plan
    # part_sketches, part_seeds, part_steps: starting points to look at and to evaluate on a part, and evaluations of
    # the local search from its best
    part_sketches: int = 300
    part_seeds: int = 20
    part_steps: int = 80
    near_gpus: int = 200  # clusters up to this size are searched thoroughly without one node, too
    exact_gpus: int = 8  # clusters up to this size are searched to the proven optimum
    exact_nodes: int = 30_000  # nodes of the search tree, and plans that are priced there, before the proof is given up
    simulated_operations: int = 15_000  # compute operations to simulate at the end, over all finalists
    promising: float = 0.03  # finalists that can be expected within this share of the best are simulated
    first: int = 2  # finalists of each schedule that are simulated, whatever the closed form says about others
    # factor on ``simulated_operations`` for small changes of the best plan if it is plain 1F1B, which compiled loops
    # simulate
    refined: int = 16
    regroups: bool = True  # replicas of the best plan move between stages in the end, where that makes it faster
    small_gpus: int = 24  # up to this size plans are cheap to simulate, and the closed form is off by more
    # exact_promising, exact_operations: as ``promising`` and ``simulated_operations``, for such clusters and for those
    # that are searched to the optimum
    exact_promising: float = 0.15
    exact_operations: int = 80_000


NORMAL = Effort()
MEDIUM = Effort(seeds=60, alike=6, counts=4, near=0.03, neighbours=24, steps=160, hasty=True, spread=True)
"""For clusters of more than 64 GPUs, whose sketches are more exact: there are more microbatches for each stage."""
LARGE = replace(MEDIUM, sketches=800, seeds=80, steps=200, parts=2, simulated_operations=30_000)
"""For clusters of more than 160 GPUs, where a better plan is worth a few seconds."""
VAST = replace(LARGE, steps=60)
"""For clusters of more than 200 GPUs, where local search gains little with single replicas."""


def effort_for(gpus: int) -> Effort:
    """Returns the effort that suits a cluster of this size."""
    return VAST if gpus > 200 else LARGE if gpus > 160 else MEDIUM if gpus > 64 else NORMAL


# Objective and constraints of a search.


@dataclass(frozen=True, slots=True)
class Goal:
    """Objective and constraints."""

    objective: str = "throughput"  # ``throughput`` (shortest iteration) or ``cost`` (cheapest iteration)
    # max_usd_per_iteration, min_iterations_per_s, max_gpus: constraints, None = none
    max_usd_per_iteration: float | None = None
    min_iterations_per_s: float | None = None
    max_gpus: int | None = None
    schedules: tuple[str, ...] = tuple(SCHEDULES)  # schedules that may be used
    # refuse stages that span regions (Sailor's H5); ``auto`` leaves it off and lets the cost decide
    keep_data_parallel_in_region: bool = False
    mixes_vendors: bool = False  # GPUs of several vendors may be in one plan, which is priced but cannot run

    @property
    def allowed(self) -> list[Schedule]:
        """The schedules, in the order in which they are tried."""
        return [schedule for name, schedule in SCHEDULES.items() if name in self.schedules]

    def violation(self, candidate: Candidate, estimate: Estimate) -> float:
        """The relative violation of the constraints; 0 when all hold."""
        miss = 0.0
        if self.max_usd_per_iteration is not None and estimate.usd_per_iteration > self.max_usd_per_iteration:
            miss += estimate.usd_per_iteration / max(self.max_usd_per_iteration, 1e-12) - 1
        if self.min_iterations_per_s is not None:
            miss += max(0.0, self.min_iterations_per_s * estimate.iteration_s - 1)
        if self.max_gpus is not None:
            miss += max(0.0, candidate.world_size / self.max_gpus - 1)
        return miss

    def value(self, estimate: Estimate) -> float:
        """Returns the objective's value, which is minimised."""
        return estimate.usd_per_iteration if self.objective == "cost" else estimate.iteration_s

    def seconds(self, estimator: Estimator, candidate: Candidate, value: float) -> float:
        """Seconds beyond which a candidate's value exceeds ``value``, even without egress costs."""
        if self.objective != "cost":
            return value
        usd_per_s = sum(estimator.price[p] * n for p, n in candidate.gpus().items())
        return value / usd_per_s * (1 + 1e-9) if usd_per_s else inf

    def score(self, estimator: Estimator, candidate: Candidate, estimate: Estimate | None) -> float:
        """Value with penalties for missing memory and violated constraints; infinite when it cannot run."""
        if estimate is None:
            return inf
        value = self.value(estimate)
        miss = self.violation(candidate, estimate)
        over = estimate.fullest / estimator.memory_margin - 1
        if over > 0:
            miss += over
        return value * (1 + PENALTY * miss) + (PENALTY * value if miss > 0 else 0.0)

    def usable(
        self, estimator: Estimator, candidate: Candidate, *, most_s: float = inf, fits: bool = True
    ) -> Estimate | None:
        """Returns the closed form of a candidate that holds all constraints, None for others.

        Args:
            most_s: None may be returned for a candidate that takes longer.
            fits: Whether memory is a constraint.
        """
        estimate = estimator.estimate(candidate, most_s)
        if estimate is None or (fits and not estimator.fits(estimate)) or self.violation(candidate, estimate) > 0:
            return None
        return estimate


PENALTY = 100.0


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate that satisfies all constraints."""

    candidate: Candidate
    estimate: Estimate
    simulated_s: float | None = None  # iteration time by the schedule simulator, None where only the closed form ran
    confirmed: bool = False  # ``simulated_s`` is that of the whole plan, not of one of its equal pipelines

    @property
    def iteration_s(self) -> float:
        """The simulated iteration time, or that of the closed form."""
        return self.simulated_s if self.simulated_s is not None else self.estimate.iteration_s

    @property
    def runnable(self) -> bool:
        """Whether the runtime can run it: gradients and parameters are sharded (ZeRO-2, 3) only in ministages."""
        return self.candidate.zero_stage < 2 or schedule_of(self.candidate).shards_parameters

    @property
    def usd_per_iteration(self) -> float:
        """Price of an iteration, by :attr:`iteration_s`."""
        e = self.estimate
        extra = e.usd_per_iteration - e.gpu_usd_per_iteration
        return e.gpu_usd_per_iteration * self.iteration_s / e.iteration_s + extra

    def value(self, goal: Goal) -> float:
        """Returns the value that the goal minimises."""
        return self.usd_per_iteration if goal.objective == "cost" else self.iteration_s


@dataclass(frozen=True, slots=True)
class PassedOver:
    """The fastest plan, if a plainer one was chosen, or one that depends less on overlapped transfers."""

    iteration_s: float  # of the fastest plan
    blocking_s: float  # the same where transfers wait for compute
    chosen_blocking_s: float  # that of the chosen plan
    plan: str = ""  # description of the fastest plan, if the chosen one is plainer; otherwise empty


@dataclass(frozen=True, slots=True)
class Shift:
    """A description of one figure that is off, and the share by which an iteration then gets longer."""

    condition: str
    share: float


@dataclass(slots=True)
class SearchResult:
    """Result of a search: the best first."""

    method: str
    found: list[Found] = field(default_factory=list)
    # when nothing holds all constraints: the candidate that misses them least
    nearest: tuple[Candidate, Estimate] | None = None
    interrupted: bool = False  # the search was stopped before its end
    by_hand: bool = False  # by Ctrl-C, not by its limit
    exact: bool = False  # the optimum of the search space is proven (small clusters)
    evaluations: int = 0
    simulations: int = 0
    cpu_s: float = 0.0  # CPU time of the search, simulations included
    bound: float = 0.0  # lower bound for plans on these GPUs, in seconds or USD (``bounds.Bounds``)
    bound_in_use: float = 0.0  # the lower bound on the GPUs that the best plan uses
    passed_over: PassedOver | None = None  # the fastest plan, where it is not the first (``overlap.py``)
    shifts: tuple[Shift, ...] = ()  # changes of the first plan's iteration where figures are off (``overlap.py``)
    # time of the plan that was first before figures that are off were looked at; 0: the same one
    steadier_than_s: float = 0.0
    # best time on the GPUs of another vendor, by their names; None where there is no plan for them alone
    other_vendors: dict[str, float | None] = field(default_factory=dict)

    def add(self, theirs: "SearchResult") -> None:
        """Add the plans and the counters of the search of another part of the cluster."""
        self.found += theirs.found
        self.bound, self.exact = min(self.bound, theirs.bound), self.exact and theirs.exact
        self.cpu_s, self.interrupted = self.cpu_s + theirs.cpu_s, self.interrupted or theirs.interrupted
        self.evaluations += theirs.evaluations
        self.simulations += theirs.simulations

    def gap(self, goal: Goal) -> float | None:
        """Relative distance of the best plan from the bound; None without a plan that runs, or without a bound."""
        if self.best is None or not self.best.runnable or not 0 < self.bound < inf:
            return None
        return self.best.value(goal) / self.bound - 1

    @property
    def best(self) -> Found | None:
        """The best plan that the runtime can run, otherwise the best; None when none satisfies the constraints."""
        return next((f for f in self.found if f.runnable), self.found[0] if self.found else None)


def in_pools(estimator: Estimator, found: list[Found], pools: Sequence[int]) -> list[Found]:
    """Translate plans of a cluster of these pools into plans of the estimator's cluster, with their ranks' layers."""
    moved = [(f, c, estimator.running(c.gpus()).estimate(c)) for f in found for c in [f.candidate.in_pools(pools)]]
    return [replace(f, candidate=c, estimate=e) for f, c, e in moved if e is not None]


@dataclass(slots=True)
class Progress:
    """Progress and time limit of a search, shared with its caller."""

    limit_s: float = 1e9
    started: float = field(default_factory=time.process_time)
    text: str = "bounds"
    best: float = float("inf")
    asked: int = 0
    finishing: bool = False  # plans are being simulated, which is worth some more time
    is_over: bool = False  # the search has returned: its caller is not interrupted any more
    # plans that were simulated so far, which are kept if the search is interrupted
    kept: list[Found] = field(default_factory=list)

    @property
    def out_of_time(self) -> bool:
        """Whether the CPU time is spent; reads the clock at every 32nd call only, because that takes time."""
        self.asked += 1
        return self.asked % 32 == 0 and self.spent

    @property
    def spent(self) -> bool:
        """Whether the CPU time is spent, by the clock."""
        return time.process_time() - self.started > self.limit_s


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause cyclic garbage collection in this block.

    A search creates many small objects, keeps most of them, and has hardly any cycles.  Scanning all of them
    again and again takes a quarter of its time.  The same is true of making and writing a plan of many ranks.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # marks all objects as old, so that none is scanned now
            gc.enable()
            gc.unfreeze()


# ``--limit-s``: the time left for a search, and the interruption of a search that exceeds it.

_GRACE_S = 0.3  # time after its limit at which a search is interrupted; usually it has ended by itself
AT_LEAST_S = 1.0  # least time of a search within the limit, however long the command took to start and to read
WRITING_S = 2.4e-5
"""CPU seconds per GPU of the cluster that the last finalist and the plan take when the search is over, about."""


def left_s(options: argparse.Namespace, used_s: float = 0.0) -> float:
    """CPU seconds that are left of ``--limit-s``, which count from the start of the command.

    Args:
        options: ``limit_s``, and ``began_s``: this process's CPU time when the command began.
        used_s: Time of an earlier search; :data:`AT_LEAST_S` counts for both together.
    """
    spent_s = time.process_time() - options.began_s
    return max(options.limit_s - spent_s, min(options.limit_s, AT_LEAST_S) - used_s, 0.0)


def searching_s(options: argparse.Namespace, gpus: int) -> float:
    """Returns the seconds for ``plan``'s search: the time left minus that of building the plan, at least a third."""
    left = left_s(options)
    return max(left / 3, min(left, AT_LEAST_S), left - WRITING_S * gpus)


def each_s(options: argparse.Namespace, searches: int) -> float:
    """The CPU time of each of several searches, which share the rest of ``--limit-s`` equally."""
    return max(left_s(options) / searches, min(options.limit_s, AT_LEAST_S))


def nothing_found(limit_s: float) -> PlannerError:
    """The error for a search that found no plan in its time."""
    hint = "Allow more CPU seconds (they count from the start of the command), or describe equal nodes by one entry "
    hint += "with a count"
    return PlannerError("command line", "--limit-s", limit_s, "no plan was found in this time", hint)


@contextmanager
def cpu_limit(progress: Progress, given_s: float | None = None) -> Iterator[None]:
    """Interrupt the search of this block, as Ctrl-C does, when its CPU time is over.

    A search that is already putting its results together gets a quarter as long again.

    Args:
        given_s: ``--limit-s``, for the error; ``progress`` has the part of it that was left.

    Raises:
        PlannerError: Nothing was found in that time.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    fired = 0

    def interrupt(*_: object) -> None:
        nonlocal fired
        if progress.is_over:
            return
        fired += 1
        if not progress.finishing or fired > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGPROF, interrupt)
    again_s = 1.0 + progress.limit_s / 4
    signal.setitimer(signal.ITIMER_PROF, progress.limit_s + _GRACE_S, again_s)
    try:
        yield
    except KeyboardInterrupt:
        if not fired:
            raise
        raise nothing_found(progress.limit_s if given_s is None else given_s) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


# The planner's inputs in a run's folder, for ``replan`` to start from.


CLUSTER, MODEL, PROFILE = "planned-cluster.yaml", "planned-model.yaml", "planned-profile.json"


def keep_inputs(folder: Path, cluster: Cluster, model: Model, profile: Profile | None) -> dict[str, Path]:
    """Write the inputs of a plan beside it; returns the paths by file name."""
    write_text(folder / CLUSTER, file_text(cluster))
    write_text(folder / MODEL, file_text(model))
    written = {CLUSTER: folder / CLUSTER, MODEL: folder / MODEL}
    (folder / PROFILE).unlink(missing_ok=True)  # of an earlier plan
    if profile is not None:
        save_profile(profile, folder / PROFILE)
        written[PROFILE] = folder / PROFILE
    return written


def file_text(value: Cluster | Model) -> str:
    """The text of a cluster file or a model file, as JSON, which is also YAML."""
    return json.dumps(value.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"


# From command-line options to an Estimator and a Goal, with all checks of input.


def check_memory_margin(options: argparse.Namespace) -> None:
    """Refuse a ``--memory-margin`` that is no share; raises PlannerError."""
    if not 0 < options.memory_margin <= 1:
        raise PlannerError("command line", "--memory-margin", options.memory_margin, "must be above 0 and at most 1")


def estimator_from(options: argparse.Namespace) -> Estimator:
    """Read cluster, model and profile.

    Raises:
        PlannerError: see the readers; a precision that no GPU of the cluster supports; a bad margin.
    """
    cluster, model = load_cluster(options.cluster), model_of(options)
    check_memory_margin(options)
    profile = load_profile(options.profile) if options.profile else None
    if profile is not None and not profile.complete:
        hint = f"Run '{command()} profile' again; it goes on where it stopped"
        raise PlannerError(options.profile, "complete", False, "profiling was interrupted", hint)
    estimator = estimator_of(cluster, model, profile, None, options.memory_margin, options.profile)
    if profile is None:
        check_precision(cluster, model, options.cluster, options.model)
    else:
        for node in cluster.nodes:
            estimator.costs.tp_sizes(node.gpu)
    return estimator


def check_precision(cluster: Cluster, model: Model, cluster_file: str, model_file: str) -> None:
    """Refuse a precision that some GPU of the cluster lacks (V100, T4 and RTX-20 have no bf16)."""
    without = sorted({n.gpu for n in cluster.nodes if not cluster.gpu(n.gpu).supports(model.precision)})
    if not without:
        low = model.linear_precision
        slow = sorted({n.gpu for n in cluster.nodes if not cluster.gpu(n.gpu).supports(low)})
        if slow:
            problem = f"{', '.join(slow)} in {cluster_file} cannot compute in {low}"
            raise PlannerError(model_file, low, True, problem, f"Set {low}: false, or remove {', '.join(slow)}")
        return
    common = set.intersection(*(set(cluster.gpu(n.gpu).flops) for n in cluster.nodes))
    hint = f"All GPUs of the cluster support {', '.join(sorted(common)) or 'nothing in common'}: "
    hint += f"give --precision, or remove {', '.join(without)}"
    problem = f"{', '.join(without)} in {cluster_file} cannot compute in it"
    raise PlannerError(model_file, "precision", model.precision, problem, hint)


def check_planned_precision(made: "Plan", model: Model, file: str) -> None:
    """Check that a plan has the precision of the model.

    Raises:
        PlannerError: The model file, or ``--precision``, has another.
    """
    planned, mine = made.training.precision, "fp32" if model.precision == "tf32" else model.precision
    if planned != mine:
        problem, hint = f"the model's is {mine}", f"Give --precision {planned}, or plan again"
        raise PlannerError(file, "training.precision", planned, problem, hint)


def check_prices(estimator: Estimator, goal: Goal, file: str) -> None:
    """Check that every kind of GPU has a price, if the goal has a cost objective or a cost limit.

    Raises:
        PlannerError: naming the node group without a price.
    """
    if goal.objective != "cost" and goal.max_usd_per_iteration is None:
        return
    for i, node in enumerate(estimator.cluster.nodes):
        if node.usd_per_gpu_hour is None and estimator.cluster.gpu(node.gpu).usd_per_hour is None:
            key, hint = f"nodes[{i}].usd_per_gpu_hour", "Give your price per GPU hour (0 for GPUs that cost nothing)"
            raise PlannerError(file, key, None, f"{node.gpu} has no known price", hint)


def goal_from(options: argparse.Namespace) -> Goal:
    """Objective and constraints; raises PlannerError for a constraint that is not positive, an unknown schedule."""
    for name in ("max_usd_per_iteration", "min_iterations_per_s", "max_gpus", "limit_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < inf:
            raise PlannerError("command line", "--" + name.replace("_", "-"), value, "must be positive")
    if getattr(options, "robust", None) is not None and options.search != "auto":
        problem = f"{options.search} finds one plan, and there is none to take in its place"
        raise PlannerError("command line", "--robust", options.robust, problem, "Leave it out, or use --search auto")
    schedules = tuple(s.strip() for s in options.schedules.split(",") if s.strip())
    for schedule in schedules:
        if schedule not in SCHEDULES:
            hint = f"Known: {', '.join(SCHEDULES)}"
            raise PlannerError("command line", "--schedules", schedule, "unknown schedule", hint)
    if not schedules:
        raise PlannerError("command line", "--schedules", options.schedules, "at least one schedule is needed")
    limits = options.max_usd_per_iteration, options.min_iterations_per_s, options.max_gpus
    return Goal(options.objective, *limits, schedules, mixes_vendors=options.mix_vendors)
