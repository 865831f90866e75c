"""Plans from the planner, for the nodes that are there: it runs as a process of its own, within a time limit.

Plans for what is left when a node is lost are made while the training goes on, so that they are usually ready.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.elastic.pool import NoPlanError, Process, assign
from megatron_het.plan import Plan, load_plan
from megatron_het.untrusted import read_yaml, write_text


@dataclass(frozen=True)
class Search:
    """What the planner is given.

    Attributes:
        cluster: Cluster file; its kinds of GPU are the agents' ``--device``.
        model: Model file.
        profile: Measured profile, if there is one.
        folder: For what is written in between.
        limit_s: Bound on a search, in seconds.
    """

    cluster: Path
    model: Path
    profile: Path | None
    folder: Path
    limit_s: float

    def run(self, document: str) -> Plan:
        """Search a plan for a cluster.

        Args:
            document: The cluster file's text.

        Raises:
            NoPlanError: There is none, or the planner did not end in time.
        """
        key = hashlib.sha256(document.encode()).hexdigest()[:16]
        cluster, out = self.folder / f"cluster-{key}.yaml", self.folder / f"plan-{key}.json"
        write_text(cluster, document)
        name = "het_planner" if importlib.util.find_spec("het_planner") else "tools.planner"
        command = [sys.executable, "-m", name, "plan", "--cluster", str(cluster), "--model", str(self.model)]
        command += ["--out", str(out), "--limit-s", f"{self.limit_s:g}"]
        command += [] if self.profile is None else ["--profile", str(self.profile)]
        if nice := shutil.which("nice"):  # the controller's machine usually trains as well
            command = [nice, "-n", "10", *command]
        bound_s = 4 * self.limit_s + 60
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=bound_s, check=False)
        except subprocess.TimeoutExpired:
            raise NoPlanError(f"the planner did not end within {bound_s:g} s") from None
        if done.returncode:
            raise NoPlanError(done.stderr.strip() or f"the planner ended with exit code {done.returncode}")
        return load_plan(out)


class SearchedPlans:
    """Searches plans, on a thread for the pools that may come, and at once for one that nobody has foreseen.

    Args:
        cluster: Cluster file, from which the nodes that are there are taken.  It is read now and on :meth:`renew`.
        run: Searches a plan for a cluster file's text; raises :class:`NoPlanError`.

    Raises:
        FileError: The cluster file cannot be read.
    """

    def __init__(self, cluster: Path, run: Callable[[str], Plan]) -> None:
        self._cluster, self._run = cluster, run
        self._whole: dict[str, Any] = read_yaml(cluster)
        self._known: dict[str, Plan | NoPlanError] = {}
        self._queue: deque[str] = deque()
        self._running: str | None = None
        self._renewed = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def plan(self, pool: Sequence[Process]) -> tuple[Plan, tuple[int, ...]]:
        """See :class:`~megatron_het.elastic.pool.Planner`."""
        document = self._document(pool)
        with self._changed:
            # The search that is under way may be the one; it ends in bounded time.
            self._changed.wait_for(lambda: self._running != document)
            known = self._known.get(document)
            if document in self._queue:
                self._queue.remove(document)  # it is searched here
        if known is None:
            known = self._answer(document)
        if isinstance(known, NoPlanError):
            raise known
        ranks = assign(known, pool)
        if ranks is None:
            raise NoPlanError("the planner's plan does not fit the nodes: start each agent with its --device")
        return known, ranks

    def is_better(self, plan: Plan, present: Plan) -> bool:
        """See :class:`~megatron_het.elastic.pool.Planner`: as the planner predicts."""
        if plan.predicted is None or present.predicted is None:
            return plan.world_size > present.world_size
        return plan.predicted.iteration_s < present.predicted.iteration_s

    def prepare(self, pools: Sequence[Sequence[Process]]) -> None:
        """See :class:`~megatron_het.elastic.pool.Planner`; pools that were asked for earlier are forgotten."""
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
        """See :class:`~megatron_het.elastic.pool.Planner`."""
        try:
            document = self._document(pool)
        except NoPlanError:
            return True  # which is what the answer says
        with self._changed:
            return document in self._known

    def renew(self) -> None:
        """See :class:`~megatron_het.elastic.pool.Planner`.

        Raises:
            FileError: The cluster file cannot be read any more; all stays as it is.
        """
        self._whole = read_yaml(self._cluster)
        with self._changed:
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
        """Search, and keep what was found unless it is outdated by then."""
        renewed = self._renewed
        answer: Plan | NoPlanError
        try:
            answer = self._run(document)
        except NoPlanError as error:
            answer = error
        except (OSError, ValueError) as error:
            answer = NoPlanError(f"the planner could not be run: {error}")
        with self._changed:
            if renewed == self._renewed:
                self._known[document] = answer
        return answer

    def _document(self, pool: Sequence[Process]) -> str:
        return json.dumps(limited(self._whole, pool))


def limited(cluster: dict[str, Any], pool: Sequence[Process]) -> dict[str, Any]:
    """The cluster file's document with the nodes that are there.

    Args:
        cluster: The document.
        pool: Processes that may be used; a node's kind is its processes' device.

    Raises:
        NoPlanError: A node's kind is not in the file.
    """
    sizes = Counter((process.node, process.device) for process in pool)
    found = copy.deepcopy(cluster)
    groups = {group["gpu"]: group for group in reversed(found["nodes"])}
    if strange := sorted({device for _, device in sizes} - set(groups)):
        known = ", ".join(sorted(groups))
        raise NoPlanError(f"--device {strange[0] or '(none)'} is no kind of GPU of the cluster file, which has {known}")
    found["nodes"] = []
    for (device, workers), count in sorted(Counter((d, n) for (_, d), n in sizes.items()).items()):
        group = {key: value for key, value in groups[device].items() if key not in ("hosts", "max_gpus")}
        found["nodes"].append({**group, "count": count, "gpus_per_node": workers})
    return found
