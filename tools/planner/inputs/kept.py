"""The planner's inputs in a run's folder, for ``replan`` to start from."""

from __future__ import annotations

import json
from pathlib import Path

from .cluster import Cluster
from .files import write_text
from .model import Model
from .profile_schema import Profile, save_profile

CLUSTER, MODEL, PROFILE = "planned-cluster.yaml", "planned-model.yaml", "planned-profile.json"


def keep_inputs(folder: Path, cluster: Cluster, model: Model, profile: Profile | None) -> dict[str, Path]:
    """Write what a plan was made from beside it; the files, by name."""
    write_text(folder / CLUSTER, cluster_text(cluster))
    write_text(folder / MODEL, model_text(model))
    written = {CLUSTER: folder / CLUSTER, MODEL: folder / MODEL}
    (folder / PROFILE).unlink(missing_ok=True)  # of an earlier plan
    if profile is not None:
        save_profile(profile, folder / PROFILE)
        written[PROFILE] = folder / PROFILE
    return written


def cluster_text(cluster: Cluster) -> str:
    """A cluster file; JSON, which is YAML too."""
    return json.dumps(cluster.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"


def model_text(model: Model) -> str:
    """A model file; JSON, which is YAML too."""
    return json.dumps(model.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"
