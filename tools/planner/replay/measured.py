"""Measurements of a run: the ``watch.json`` that its last rank writes (``megatron_het/features/watch``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_het.features.watch.monitor import FORMAT, VERSION, identity
from megatron_het.plan import Plan
from megatron_het.schedule.ir import Kind

from ..errors import PlannerError, validated
from ..inputs.catalog import Strict
from ..inputs.files import read_json
from ..search.outcome import CLUSTER, MODEL, PROFILE

PLACES = ("", "ranks", "report", "reports", "checkpoints", "training/ranks", "job", "job/checkpoints")
"""Places of the file in a run's folder or in that of ``quickstart``."""

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Times(Strict):
    """Predicted and measured seconds, and those at the start of the run (the reference)."""

    predicted_s: _Seconds
    measured_s: _Seconds
    reference_s: _Seconds


class DeviceTimes(Strict):
    """One replica: seconds of an iteration by kind of operation."""

    device: int = Field(ge=0)
    stage: int = Field(ge=0)
    replica: int = Field(ge=0)
    ranks: tuple[int, ...]
    kind: str
    host: str = ""
    operations: dict[str, Times]


class LinkTimes(Strict):
    """One directed pair of replicas: seconds of a transfer, if the end of at least one is known."""

    source: int = Field(ge=0)
    target: int = Field(ge=0)
    message_bytes: _Seconds
    predicted_s: _Seconds
    measured_s: _Seconds | None = None
    reference_s: _Seconds | None = None


class Found(Strict):
    """One finding of the watch."""

    what: Literal["device", "operation", "link", "profile"]
    name: str
    factor: float = Field(gt=0, allow_inf_nan=False)
    since: int
    found: int
    kind: str = ""
    operation: str = ""
    place: str = ""
    ended: int | None = None


class Watched(Strict):
    """A ``watch.json``."""

    plan_hash: str
    iteration: int = Field(ge=0)
    predicted_iteration_s: _Seconds
    iteration_s: _Seconds
    findings: tuple[Found, ...] = ()
    devices: tuple[DeviceTimes, ...] = Field(min_length=1)
    links: tuple[LinkTimes, ...] = ()

    @property
    def active(self) -> list[Found]:
        """Returns the findings that still hold."""
        return [finding for finding in self.findings if finding.ended is None]

    def name_of(self, device: int) -> str:
        """Returns the name of a replica in findings."""
        ranks = self.devices[device].ranks
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def load_watched(path: Path, plan: Plan) -> Watched:
    """Read and check the measurements of a run under a plan.

    Raises:
        PlannerError: A missing or damaged file, one of another release, or one of another plan.
    """
    document = read_json(path, "A run with a plan of this release's planner and --het-report writes it")
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found != FORMAT or document.get("version") != VERSION:
        raise PlannerError(str(path), "format", found, f"not a watch report (expected {FORMAT!r}, version {VERSION})")
    body = {key: value for key, value in document.items() if key not in ("format", "version")}
    watched: Watched = validated(Watched, body, str(path))
    _check(watched, plan, str(path))
    return watched


def _check(watched: Watched, plan: Plan, file: str) -> None:
    if watched.plan_hash != identity(plan):
        problem = f"measured under another plan than the one given, which has the hash {identity(plan)}"
        raise PlannerError(file, "plan_hash", watched.plan_hash, problem, "Give the run's own plan with --plan")
    for index, times in enumerate(watched.devices):
        for name in times.operations:
            if name not in Kind.rows:
                key, hint = f"devices[{index}].operations", "Use the report as it was written"
                raise PlannerError(file, key, name, "unknown operation", hint)
    replicas = [r for stage in plan.stages for r in stage.replicas]
    if [d.device for d in watched.devices] != list(range(len(replicas))):
        raise PlannerError(file, "devices", [d.device for d in watched.devices], "must be all replicas of the plan")
    for i, (device, replica) in enumerate(zip(watched.devices, replicas, strict=True)):
        if device.ranks != replica.ranks:
            raise PlannerError(file, f"devices[{i}].ranks", list(device.ranks), "not the ranks of the plan's replica")
    for i, link in enumerate(watched.links):
        if not (link.source < len(replicas) and link.target < len(replicas)):
            raise PlannerError(file, f"links[{i}]", [link.source, link.target], "the plan has no such replicas")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a run that a new plan needs."""

    # plan, cluster, model: their paths
    plan: Path
    cluster: Path
    model: Path
    watched: Path  # the measurements
    profile: Path | None = None  # None if the plan was made without one


def find_files(folder: Path, given: Mapping[str, str | None]) -> RunFolder:
    """Returns the files in a run's folder, or the given ones instead; raises PlannerError.

    Args:
        given: Paths from the command line by name (plan, cluster, model, profile, watch), None where not given.
    """
    if not folder.is_dir():
        raise PlannerError("command line", "RUN", str(folder), "no such folder")

    def one(name: str, names: Sequence[str], required: bool = True) -> Path | None:
        value = given.get(name)
        if value:
            return Path(value)
        for place in PLACES:
            for base in (folder, folder.parent) if place == "" else (folder,):
                for candidate in names:
                    if (base / place / candidate).is_file():
                        return base / place / candidate
        if required:
            problem = f"there is no {' and no '.join(names)} in {str(folder)!r}"
            who = "a run writes it into --het-report or --save" if name == "watch" else "'emit' writes it into --out"
            hint = f"Give the path: {who}"
            raise PlannerError("command line", f"--{name}", None, problem, hint)
        return None

    plan, cluster, model, watched = (
        one("plan", ("plan.json",)),
        one("cluster", (CLUSTER, "cluster.yaml")),
        one("model", (MODEL, "model.yaml")),
        one("watch", ("watch.json",)),
    )
    assert plan is not None and cluster is not None and model is not None and watched is not None
    return RunFolder(plan, cluster, model, watched, one("profile", (PROFILE, "profile.json"), required=False))
