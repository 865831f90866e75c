"""``het-plan quickstart``: from this machine and a model to the command that starts a job."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from ..emit.checks import to_fill_in
from ..errors import PlannerError, command
from ..inputs import __name__ as inputs_package
from ..inputs.files import write_text

SEQ_LENGTH, GLOBAL_BATCH_SIZE = 4096, 256
"""Of a model that is given by its name, where nothing else was asked for."""
_OF_INIT = ("hosts", "gpu", "gpus_per_node")
_OF_MODEL = ("seq_length", "global_batch_size", "precision", "document_lengths")


def quickstart(options: argparse.Namespace) -> int:
    """Run ``init``, ``plan``, ``check`` and ``emit`` in turn, each shown as it could be typed.

    Args:
        options: Its own, and ``main``, which runs a command.

    Returns:
        The exit code of the first command that fails, else 0.
    """
    out: Path = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not options.force:
        raise PlannerError(
            "command line", "--out", str(out), "is there already", "Name another folder, or give --force"
        )
    body = _known(options.model)
    out.mkdir(parents=True, exist_ok=True)
    if body is not None:
        write_text(out / "config.json", json.dumps(body, indent=1) + "\n")
        options.model = str(out / "config.json")
        options.seq_length = options.seq_length or SEQ_LENGTH
        options.global_batch_size = options.global_batch_size or GLOBAL_BATCH_SIZE
    for words in _commands(options):
        sys.stdout.write(f"\n$ {command()} {shlex.join(words)}\n")
        sys.stdout.flush()
        if code := options.main(words):
            return code
    start = "When that is filled in, start" if to_fill_in(shlex.split(options.extra or "")) else "Start"
    sys.stdout.write(f"\n{start} the job with:\n{_start(out / 'job')}\n")
    return 0


def _known(model: str) -> dict[str, object] | None:
    """The Hugging Face config of a model that is given by its name; None for a file or folder.

    The file says beside each where its sizes are held in this project; nothing else is in it.

    Raises:
        PlannerError: Neither a file nor a known name.
    """
    if Path(model).exists():
        return None
    known: dict[str, dict[str, Any]] = json.loads(
        resources.files(inputs_package).joinpath("data/known_models.json").read_text("utf-8")
    )
    if model.lower() not in known:
        hint = f"Known names: {', '.join(known)}"
        raise PlannerError("command line", "--model", model, "is no file, no folder and no known name", hint)
    config: dict[str, object] = known[model.lower()]["config"]
    return config


def _commands(options: argparse.Namespace) -> Iterator[list[str]]:
    """The commands in their order."""
    out: Path = options.out
    force = ["--force"] if options.force else []
    cluster = options.cluster or str(out / "cluster.yaml")
    if not options.cluster:
        yield ["init", "--out", cluster, "--from", options.source, *_given(options, _OF_INIT), *force]
    inputs = ["--cluster", cluster, "--model", options.model, *_given(options, _OF_MODEL)]
    plan = str(out / "plan.json")
    yield ["plan", *inputs, "--out", plan, "--limit-s", f"{options.limit_s:g}", *force]
    yield ["check", plan, *inputs]
    extra = [f"--extra={options.extra}"] if options.extra else []
    yield ["emit", plan, *inputs, "--out", str(out / "job"), *extra, *force]


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Options that were given, as words."""
    values = {name: getattr(options, name) for name in names}
    return [word for name, value in values.items() if value for word in (f"--{name.replace('_', '-')}", str(value))]


def _start(job: Path) -> str:
    """The command that starts the job: Slurm's where there is Slurm, else a script for each node."""
    if shutil.which("sbatch"):
        return f"sbatch {shlex.quote(str(job / 'train.sbatch'))}"
    scripts = sorted(job.glob("torchrun-node-*.sh"), key=lambda file: int(file.stem.rpartition("-")[2]))
    where = [""] if len(scripts) == 1 else [f"   # on node {i}" for i in range(len(scripts))]
    return "\n".join(f"bash {shlex.quote(str(script))}{node}" for script, node in zip(scripts, where, strict=True))
