"""A stand-in for Kubernetes and SkyPilot: one process per pod, with the environment of the rendered file alone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
"""The program, where there is one; ``make venv`` brings it."""


@dataclass(frozen=True)
class Pod:
    """What one pod runs."""

    name: str  # as its host is called, without the subdomain
    group: str  # of equal pods
    command: list[str]  # what its container runs
    environment: dict[str, str]  # all that it finds

    def start(self, log: Path, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """The pod's process; all hosts are this machine.

        Args:
            log: Where it writes to.
            more: What its image brings.
        """
        hosts = ("MASTER_ADDR", "CONTROLLER_HOST")
        seen = {name: "127.0.0.1" if name in hosts else value for name, value in self.environment.items()}
        with log.open("wb") as out:
            return subprocess.Popen(
                self.command,
                env={"PATH": os.environ["PATH"], "HOME": str(log.parent), **more, **seen},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def pods_of(file: Path) -> list[Pod]:
    documents = list(yaml.safe_load_all(file.read_text()))
    return _of_jobset(documents[0]) if file.name == "jobset.yaml" else _of_tasks(*documents)


def _of_jobset(jobset: dict[str, Any]) -> list[Pod]:
    found = []
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        for index in range(spec["completions"]):
            environment = {entry["name"]: entry.get("value", f"uid-of-{job['name']}") for entry in container["env"]}
            environment["JOB_COMPLETION_INDEX"] = str(index)
            name = f"{jobset['metadata']['name']}-{job['name']}-0-{index}"
            found.append(Pod(name, job["name"], container["command"], environment))
    return found


def _of_tasks(header: dict[str, Any], *tasks: dict[str, Any]) -> list[Pod]:
    return [
        Pod(
            f"{task['name']}-{index}",
            task["name"],
            ["bash", "-c", task["run"]],
            {**task["envs"], "SKYPILOT_NODE_RANK": str(index), "SKYPILOT_JOBGROUP_NAME": header["name"]},
        )
        for task in tasks
        for index in range(task["num_nodes"])
    ]
