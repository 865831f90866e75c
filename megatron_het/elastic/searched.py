"""Plans from the planner for the present nodes; the planner runs as a process of its own, within a time limit.

Plans for the pool without one of its nodes are made while the training goes on, so that they are usually ready.
"""

import contextlib
import copy
import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_het import planner, planner_package
from megatron_het.elastic.pool import (
    Learned,
    NoPlanError,
    Planner,
    Process,
    assign,
    read_better,
    read_learned,
    write_run,
)
from megatron_het.plan import Plan, load_plan
from megatron_het.safe_io import read_yaml, write_text


@dataclass(frozen=True)
class Search:
    """Inputs of the planner."""

    cluster: Path  # cluster file; its kinds of GPU are the agents' ``--device``
    model: Path  # model file
    profile: Path | None  # measured profile, if there is one
    folder: Path  # folder for temporary files
    limit_s: float  # bound on a search, in seconds

    def check(self) -> None:
        """Check that the planner is installed and can use the files.

        Raises:
            ValueError: A file cannot be read or is invalid.
            ImportError: The planner is not installed.
        """
        planner("inputs.cluster").load_cluster(self.cluster)
        planner("inputs.model").load_model(self.model)
        if self.profile is not None:
            planner("inputs.profile_schema").load_profile(self.profile)

    def run(self, document: str) -> Plan:
        """Search a plan for a cluster.

        Args:
            document: The cluster file's text.

        Raises:
            NoPlanError: There is no plan, or the planner did not end in time.
        """
        key = hashlib.sha256(document.encode()).hexdigest()[:16]
        cluster, out = self.folder / f"cluster-{key}.yaml", self.folder / f"plan-{key}.json"
        write_text(cluster, document)
        self._planner("plan", "--cluster", str(cluster), "--out", str(out))
        return load_plan(out)

    def better(self, document: str, plan: Plan, measured: dict[str, Any], change_s: float) -> Learned | None:
        """A better plan by the measurements of a run; None if there is none.

        Args:
            document: Text of the cluster file that the run's plan fits.
            measured: Summary of the run's watch.
            change_s: Seconds that a change takes.

        Raises:
            NoPlanError: The planner failed or did not end in time.
        """
        key = hashlib.sha256(json.dumps(measured).encode()).hexdigest()[:16]
        folder = self.folder / f"measured-{key}"
        files = write_run(folder, plan, document, measured)
        done = self._planner("replan", str(folder), *files, "--restart-s", f"{change_s:g}", "--json", answers=(0, 1))
        return None if done.returncode else read_better(folder, done.stdout)

    def with_profile(self, profile: Path | None) -> "Search":
        """Returns a copy with another profile."""
        return replace(self, profile=profile)

    def _planner(self, *words: str, answers: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
        """Run a command of the planner, in bounded time; exit codes other than ``answers`` raise NoPlanError."""
        command = [sys.executable, "-m", planner_package(), *words, "--model", str(self.model)]
        command += ["--limit-s", f"{self.limit_s:g}"]
        command += [] if self.profile is None else ["--profile", str(self.profile)]
        if nice := shutil.which("nice"):  # the controller's machine usually trains as well
            command = [nice, "-n", "10", *command]
        bound_s = 4 * self.limit_s + 60
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=bound_s, check=False)
        except subprocess.TimeoutExpired:
            raise NoPlanError(f"the planner did not end within {bound_s:g} s") from None
        if done.returncode not in answers:
            raise NoPlanError(done.stderr.strip() or f"the planner ended with exit code {done.returncode}")
        return done


class SearchedPlans(Planner):
    """Searches plans: on a thread for pools that may come, and at once for a pool without a prepared plan.

    Args:
        cluster: Cluster file, reduced to the present nodes for each search.  It is read now and on :meth:`renew`.
        search: Searches a plan for a cluster file's text; raises :class:`NoPlanError`.

    Raises:
        ValueError: The cluster file, or another input of the planner, is invalid.
        ImportError: The planner is not installed.
    """

    def __init__(self, cluster: Path, search: Search, say: Callable[[str], None]) -> None:
        self._cluster, self._search, self._say = cluster, search, say
        search.check()
        self._whole: dict[str, Any] = _single_kinds(cluster)
        self._known: dict[str, Plan | NoPlanError] = {}
        self._rejected: list[tuple[Plan, str]] = []
        self._queue: deque[str] = deque()
        self._running: str | None = None
        self._renewed = 0
        self._taught: frozenset[str] = frozenset()
        """Kinds of devices that are not in the cluster file: slow ones, found by measurements."""
        self._learns = False
        self._learned: Learned | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def plan(self, pool: Sequence[Process]) -> tuple[Plan, tuple[int, ...]]:
        document = self._document(pool)
        with self._changed:
            # The running search may be for this pool; it ends in bounded time.
            self._changed.wait_for(lambda: self._running != document)
            known = self._known.get(document)
            if document in self._queue:
                self._queue.remove(document)  # it is searched in this thread
        if known is None:
            known = self._answer(document)
        if isinstance(known, NoPlanError):
            raise known
        ranks = assign(known, pool)
        if ranks is None:
            raise NoPlanError("the planner's plan does not fit the nodes: start each agent with its --device")
        return known, ranks

    def is_better(self, plan: Plan, present: Plan) -> bool:
        """See :class:`Planner`; decided by the planner's predictions."""
        if plan.predicted is None or present.predicted is None:
            return plan.world_size > present.world_size
        return plan.predicted.iteration_s < present.predicted.iteration_s

    def prepare(self, pools: Sequence[Sequence[Process]]) -> None:
        """See :class:`Planner`; pools of earlier calls are dropped."""
        documents = []
        for pool in pools:
            with contextlib.suppress(NoPlanError):
                documents.append(self._document(pool))
        with self._changed:
            wanted = [d for d in dict.fromkeys(documents) if d not in self._known and d != self._running]
            self._queue = deque(wanted)
            self._changed.notify_all()
            if wanted and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="planner", daemon=True)
                self._thread.start()

    def is_ready(self, pool: Sequence[Process]) -> bool:
        try:
            document = self._document(pool)
        except NoPlanError:
            return True  # plan() then raises that error at once
        with self._changed:
            return document in self._known

    def renew(self) -> None:
        """See :class:`Planner`; raises ValueError, and changes nothing, if the cluster file is missing or invalid."""
        self._search.check()
        whole = _single_kinds(self._cluster)
        kinds = {group["gpu"] for group in whole["nodes"]}
        own = [group for group in self._whole["nodes"] if group["gpu"] in self._taught - kinds]
        gpus = {name: gpu for name, gpu in self._whole.get("gpus", {}).items() if name in self._taught}
        if own:
            whole = {**whole, "nodes": [*whole["nodes"], *own], "gpus": {**gpus, **whole.get("gpus", {})}}
        with self._changed:
            self._whole = whole
            self._known.clear()
            self._renewed += 1

    def reject(self, plan: Plan, why: str) -> None:
        with self._changed:
            self._rejected.append((plan, why))
            self._known = {document: self._unless_rejected(answer) for document, answer in self._known.items()}

    def _unless_rejected(self, answer: Plan | NoPlanError) -> Plan | NoPlanError:
        for plan, why in self._rejected:
            if plan == answer:
                return NoPlanError(f"the plan that the planner found was refused: {why}")
        return answer

    def learn(self, pool: Sequence[Process], plan: Plan, measured: dict[str, Any], change_s: float) -> bool:
        """See :class:`Planner`; during a search further calls do nothing."""
        try:
            document = self._document(pool)
        except NoPlanError:
            return False
        with self._changed:
            if self._learns:
                return False
            self._learns, self._learned = True, None
        threading.Thread(
            target=self._learn, args=(document, plan, measured, change_s), name="better plan", daemon=True
        ).start()
        return True

    def _learn(self, document: str, plan: Plan, measured: dict[str, Any], change_s: float) -> None:
        found = None
        try:
            found = self._search.better(document, plan, measured, change_s)
        except (NoPlanError, OSError, ValueError) as error:
            self._say(f"no better plan from what was measured: {error}")
        finally:
            with self._changed:
                self._learns, self._learned = False, found

    def learned(self) -> Learned | None:
        with self._changed:
            found, self._learned = self._learned, None
        return found

    def accept(self, learned: Learned, pool: Sequence[Process]) -> None:
        self._change(learned.cluster, learned.profile)
        document = self._document(pool)
        with self._changed:
            self._known[document] = learned.plan

    def recall(self, document: dict[str, Any]) -> None:
        self._change(*read_learned(document))

    def _change(self, cluster: dict[str, Any], profile: Path | None) -> None:
        """Use another cluster and profile for searches from now on.  Kinds that may come back keep their nodes."""
        kinds = {group["gpu"] for group in cluster["nodes"]}
        others = [group for group in self._whole["nodes"] if group["gpu"] not in kinds]
        with self._changed:
            self._taught |= kinds - {group["gpu"] for group in self._whole["nodes"]}
            self._whole = {**cluster, "nodes": [*cluster["nodes"], *others]}
            self._search = self._search.with_profile(profile)
            self._known.clear()
            self._renewed += 1

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                document = self._running = self._queue.popleft()
            try:
                self._answer(document)
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()

    def _answer(self, document: str) -> Plan | NoPlanError:
        """Search, and store the result unless the cluster has changed meanwhile."""
        renewed = self._renewed
        answer: Plan | NoPlanError
        try:
            answer = self._search.run(document)
        except NoPlanError as error:
            answer = error
        except (OSError, ValueError) as error:
            answer = NoPlanError(f"the planner could not be run: {error}")
        with self._changed:
            answer = self._unless_rejected(answer)
            if renewed == self._renewed:
                self._known[document] = answer
        return answer

    def _document(self, pool: Sequence[Process]) -> str:
        return json.dumps(limited(self._whole, pool))


def _single_kinds(cluster: Path) -> dict[str, Any]:
    """The cluster file's document, in which nodes of several kinds have a separate node group for each kind."""
    document: dict[str, Any] = read_yaml(cluster)
    if any("gpus" in group for group in document["nodes"]):
        document = {**document, "nodes": planner("inputs.cluster").single_kinds(document["nodes"], str(cluster))[0]}
    return document


def limited(cluster: dict[str, Any], pool: Sequence[Process]) -> dict[str, Any]:
    """The cluster file's document reduced to the present nodes.

    Args:
        pool: Processes that may be used; a node's kind is the device of its processes.

    Raises:
        NoPlanError: A node's kind is not in the file.
    """
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for process in pool:
        sizes[process.node][process.device] += 1
    found = copy.deepcopy(cluster)
    groups = {group["gpu"]: group for group in reversed(found["nodes"])}
    if strange := sorted({process.device for process in pool} - set(groups)):
        known = ", ".join(sorted(groups))
        raise NoPlanError(f"--device {strange[0] or '(none)'} is no kind of GPU of the cluster file, which has {known}")
    found["nodes"] = []
    alike = Counter(tuple(sorted(kinds.items())) for kinds in sizes.values())
    left_out = ("hosts", "max_gpus", "shared_node", "devices")
    for i, (kinds, count) in enumerate(sorted(alike.items())):
        first = 0
        for device, workers in kinds:
            group = {key: value for key, value in groups[device].items() if key not in left_out}
            group |= {"count": count, "gpus_per_node": workers}
            if len(kinds) > 1:
                group |= {"shared_node": f"nodes {i}", "devices": list(range(first, first + workers))}
            first += workers
            found["nodes"].append(group)
    return found
