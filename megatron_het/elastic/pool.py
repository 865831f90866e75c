"""The processes of a job, and the choice of a plan and its ranks for those that are present."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.plan import Plan, PlanError, load_plan, save_plan
from megatron_het.safe_io import read_json, read_yaml, write_text

# Measurements of a running job, from which ``het-plan replan`` makes a better plan.


@dataclass(frozen=True)
class Learned:
    """A better plan by measurements of the run, with the corrected cluster and profile."""

    plan: Plan
    kinds: tuple[str, ...]  # device kind of every rank of the plan that ran; slow devices have a kind of their own
    cluster: dict[str, Any]  # the cluster file's document with these kinds and the measured links
    profile: Path | None  # the profile with these kinds; None if there is none
    gain: float  # predicted share of the iteration time that the better plan saves
    pays_after: int  # number of iterations after which the change has paid off

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that a restarted controller needs, as JSON values."""
        return {"cluster": self.cluster, "profile": None if self.profile is None else str(self.profile)}


def write_run(folder: Path, plan: Plan, cluster: str, measured: Mapping[str, Any]) -> list[str]:
    """Write the input files of ``replan``; returns its options with their names.

    Args:
        folder: Folder for the files.
        cluster: Text of the cluster file that the plan was made from.
        measured: Summary of the run's watch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(plan, folder / "plan.json")
    write_text(folder / "cluster.yaml", cluster)
    write_text(folder / "watch.json", json.dumps(measured))
    files = (("plan", "plan.json"), ("cluster", "cluster.yaml"), ("watch", "watch.json"), ("out", "better.json"))
    return [word for name, file in files for word in (f"--{name}", str(folder / file))]


def read_better(folder: Path, said: str) -> Learned:
    """Reads the result of ``replan``.

    Args:
        folder: The folder of :func:`write_run`.
        said: The command's output, JSON.

    Raises:
        ValueError: A part is missing or invalid.
    """
    try:
        body = json.loads(said)
        profile = folder / "better.profile.json"
        ran = load_plan(folder / "plan.json")
        kinds = {int(rank): str(kind) for kind, ranks in body["kinds"].items() for rank in ranks}
        return Learned(
            load_plan(folder / "better.json"),
            tuple(kinds[rank] for rank in range(ran.world_size)),
            read_yaml(folder / "better.cluster.yaml"),
            profile if str(profile) in body["files"] else None,
            float(body["gain"]),
            int(body["pays_after_iterations"]),
        )
    except (KeyError, TypeError, AttributeError, PlanError) as error:
        raise ValueError(f"the planner's answer to what was measured cannot be read: {error}") from None


def read_learned(document: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Returns the cluster file's document and the profile from a document of :meth:`Learned.to_json`.

    Raises:
        FileError: The profile can no longer be read.
    """
    profile = None if document["profile"] is None else Path(document["profile"])
    if profile is not None:
        read_json(profile)
    return dict(document["cluster"]), profile


@dataclass(frozen=True)
class Process:
    """A worker."""

    number: int  # never reused
    node: str  # name of its node; processes of a node may fail together
    device: str = ""  # kind of its device, as in plans and cluster files; may be empty


class NoPlanError(RuntimeError):
    """There is no plan for the processes that are present."""


class Planner:
    """Makes plans.  Subclasses define ``plan`` and ``is_better``; by default the other methods do nothing."""

    def plan(self, pool: Sequence[Process]) -> tuple[Plan, tuple[int, ...]]:
        """A plan for a pool, and the process of each of its ranks; raises NoPlanError if there is none."""
        raise NotImplementedError

    def is_better(self, plan: Plan, present: Plan) -> bool:
        """Whether a change from the present plan to another one pays."""
        raise NotImplementedError

    def reject(self, plan: Plan, why: str) -> None:
        """Exclude a plan from now on."""

    def prepare(self, pools: Sequence[Sequence[Process]]) -> None:
        """Make plans ahead for pools that may come, the most likely ones first; returns at once."""

    def is_ready(self, pool: Sequence[Process]) -> bool:
        """Whether :meth:`plan` returns at once for a pool."""
        return True

    def renew(self) -> None:
        """Discard the plans that were made, because their inputs have changed."""

    def learn(self, pool: Sequence[Process], plan: Plan, measured: dict[str, Any], change_s: float) -> bool:
        """Begin to search a better plan by a run's measurements; returns at once whether the search has begun.

        Args:
            pool: The present processes.
            measured: Summary of the run's watch.
            change_s: Seconds that a change of the plan takes.
        """
        return False

    def learned(self) -> Learned | None:
        """Returns the result of the last :meth:`learn` once; None while it searches, and if nothing is better."""
        return None

    def accept(self, learned: Learned, pool: Sequence[Process]) -> None:
        """Use the corrections of ``learned`` from now on, and its plan for ``pool``, which has the corrected kinds."""

    def recall(self, document: dict[str, Any]) -> None:
        """Use earlier corrections after a restart of the controller (:meth:`Learned.to_json`)."""


class GivenPlans(Planner):
    """Takes the first plan of a list in order of preference that the pool can run, else another planner's.

    Only the other planner uses measurements, because plans of the list do not consider devices that have become slow.

    Args:
        other: Planner for pools that no plan of the list fits.
    """

    def __init__(self, plans: Sequence[Plan], other: Planner | None = None) -> None:
        self._plans, self._is_alone, self._other = plans, other is None, other or Planner()
        self._rejected: dict[int, str] = {}

    def plan(self, pool: Sequence[Process]) -> tuple[Plan, tuple[int, ...]]:
        if (found := self._given(pool)) is not None:
            return found
        if not self._is_alone:
            return self._other.plan(pool)
        sizes = ", ".join(str(plan.world_size) for plan in self._plans)
        raise NoPlanError(
            f"no plan of the list fits {len(pool)} processes on {len({p.node for p in pool})} nodes (the plans have "
            f"{sizes} ranks). Give a plan for fewer ranks, or bring nodes back"
            + "".join(f". Plan {number + 1} of the list was refused: {why}" for number, why in self._rejected.items())
        )

    def _given(self, pool: Sequence[Process]) -> tuple[Plan, tuple[int, ...]] | None:
        """The first fitting plan of the list with its ranks; None if none fits."""
        for number, plan in enumerate(self._plans):
            if number not in self._rejected and (ranks := assign(plan, pool)) is not None:
                return plan, ranks
        return None

    def is_better(self, plan: Plan, present: Plan) -> bool:
        """See :class:`Planner`; a plan of the list is better than later ones, and than any searched plan."""
        if plan not in self._plans and not self._is_alone:
            return self._other.is_better(plan, present)
        # A restarted controller may have another list than the one whose plan runs.
        return present not in self._plans or self._plans.index(plan) < self._plans.index(present)

    def reject(self, plan: Plan, why: str) -> None:
        if plan in self._plans:
            self._rejected[self._plans.index(plan)] = why
        self._other.reject(plan, why)

    def prepare(self, pools: Sequence[Sequence[Process]]) -> None:
        self._other.prepare([pool for pool in pools if self._given(pool) is None])

    def is_ready(self, pool: Sequence[Process]) -> bool:
        return self._given(pool) is not None or self._other.is_ready(pool)

    def renew(self) -> None:
        """See :class:`Planner`; the list is not changed."""
        self._other.renew()

    def learn(self, pool: Sequence[Process], plan: Plan, measured: dict[str, Any], change_s: float) -> bool:
        return self._other.learn(pool, plan, measured, change_s)

    def learned(self) -> Learned | None:
        return self._other.learned()

    def accept(self, learned: Learned, pool: Sequence[Process]) -> None:
        """See :class:`Planner`; plans of the list have kinds that slow devices of the pool no longer have."""
        self._plans = ()
        self._other.accept(learned, pool)

    def recall(self, document: dict[str, Any]) -> None:
        self._plans = self._plans if self._is_alone else ()
        self._other.recall(document)


def assign(plan: Plan, pool: Sequence[Process]) -> tuple[int, ...] | None:
    """The process of each rank, with every TP group within a node; None if the pool cannot run the plan.

    Args:
        pool: Processes to choose from.  Kinds have to match if every process and every replica has one.
    """
    replicas = [replica for stage in plan.stages for replica in stage.replicas]
    by_kind = all(p.device for p in pool) and all(name for r in replicas for name in r.devices)
    free: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for process in sorted(pool, key=lambda p: p.number):
        free[process.device if by_kind else ""][process.node].append(process.number)
    found: dict[int, int] = {}
    # The largest groups first, because they do not fit into the rest of a node.
    for replica in sorted(replicas, key=lambda r: (-r.tp, r.ranks)):
        for part, device in enumerate(replica.devices):
            nodes = free[device if by_kind else ""]
            group = replica.tp_group(part)
            fitting = [name for name, numbers in nodes.items() if len(numbers) >= len(group)]
            if not fitting:
                return None
            # Best fit: the node with the fewest free processes that suffice keeps the others free for larger groups.
            chosen = min(fitting, key=lambda name: (len(nodes[name]), name))
            for rank in group:
                found[rank] = nodes[chosen].pop(0)
    return tuple(found[rank] for rank in range(plan.world_size))
