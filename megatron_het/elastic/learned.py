"""What a running job measured, turned into a better plan by ``het-plan replan``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.plan import Plan, PlanError, load_plan, save_plan
from megatron_het.safe_io import read_json, read_yaml, write_text


@dataclass(frozen=True)
class Learned:
    """A plan that is better for what was measured.

    Attributes:
        plan: The better plan.
        kinds: Kind of device of every rank of the plan that ran: a slow one has become a kind of its own.
        cluster: The cluster file's document with these kinds and the measured links.
        profile: The profile with them; None where there is none.
        gain: Share of the iteration time that the better plan saves, as predicted.
        pays_after: Iterations after which the time that the change takes is won back.
    """

    plan: Plan
    kinds: tuple[str, ...]
    cluster: dict[str, Any]
    profile: Path | None
    gain: float
    pays_after: int

    def to_json(self) -> dict[str, Any]:
        """Returns what a controller that is started again needs to know, as JSON values."""
        return {"cluster": self.cluster, "profile": None if self.profile is None else str(self.profile)}


def write_run(folder: Path, plan: Plan, cluster: str, measured: Mapping[str, Any]) -> list[str]:
    """Write what ``replan`` reads; the options that name the files.

    Args:
        folder: For the files.
        plan: What runs.
        cluster: Text of the cluster file that the plan was made from.
        measured: What the watch of the run has summed up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(plan, folder / "plan.json")
    write_text(folder / "cluster.yaml", cluster)
    write_text(folder / "watch.json", json.dumps(measured))
    files = (("plan", "plan.json"), ("cluster", "cluster.yaml"), ("watch", "watch.json"), ("out", "better.json"))
    return [word for name, file in files for word in (f"--{name}", str(folder / file))]


def read_better(folder: Path, said: str) -> Learned:
    """Returns what ``replan`` wrote and said.

    Args:
        folder: Of :func:`write_run`.
        said: The command's output, JSON.

    Raises:
        ValueError: A part is missing or is not what it should be.
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
    """Returns what :meth:`Learned.to_json` gave: the cluster file's document, and the profile.

    Raises:
        FileError: The profile cannot be read any more.
    """
    profile = None if document["profile"] is None else Path(document["profile"])
    if profile is not None:
        read_json(profile)
    return dict(document["cluster"]), profile
