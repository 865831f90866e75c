"""Checks of what all nodes of a job must have in common, and whether their common flags go with a plan."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import megatron_het
from megatron_het.plan import Plan
from megatron_het.safe_io import shown, write_json

CHECK_S = 60.0
"""Bound on checking the flags against a plan."""


def signature_of(flags: Sequence[str]) -> str:
    """Returns what a node says of itself.

    Args:
        flags: Of the training.
    """
    release = str(getattr(megatron_het, "__version__", ""))
    return json.dumps({"megatron_het": release, "megatron-core": version("megatron-core"), "flags": list(flags)})


def refusal(own: str, first: str) -> str:
    """Why a node cannot take part, and what to do; empty where it can.

    Args:
        own: What :func:`signature_of` gave on the node.
        first: The same of the job's first node.
    """
    if own == first:
        return ""
    what = _difference(own, first)
    return f"{what}; start all nodes of a job with the same command and the same release"


def problems_under(plan: Plan, flags: Sequence[str], folder: Path) -> Callable[[], list[str]]:
    """Begin to check what the start of the training would refuse under a plan, in a process forked from this one.

    Args:
        plan: The plan.
        flags: Of the training, without a plan.
        folder: For the plan's file.

    Returns:
        Waits for the answer, in bounded time: the problems, none where nobody could say.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            os.write(writes, json.dumps(_problems(plan, flags, folder)).encode()[:65536])
        finally:
            os._exit(0)
    os.close(writes)

    def answer() -> list[str]:
        text, deadline_s = b"", time.monotonic() + CHECK_S
        try:
            while select.select([reads], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                part = os.read(reads, 65536)
                if not part:
                    return [str(problem) for problem in json.loads(text)]
                text += part
        except ValueError:
            pass
        finally:
            os.close(reads)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return []

    return answer


def _problems(plan: Plan, flags: Sequence[str], folder: Path) -> list[str]:
    """Returns what the start would refuse; for a process of its own."""
    from megatron_het import device as platform
    from megatron_het import megatron_patches as upstream
    from megatron_het.doctor.flags import problems_of

    device = platform.activate()
    upstream.install("stock")
    file = folder / "plan-to-check.json"
    write_json(file, plan.to_json(), durable=False)
    os.environ.update(RANK="0", WORLD_SIZE=str(plan.world_size))
    missing, problems = problems_of((*flags, "--het-plan", str(file)), device)
    return [f"missing: {text}" for text in missing.values()] + problems


def _difference(own: str, first: str) -> str:
    """In words."""
    try:
        mine, theirs = json.loads(own), json.loads(first)
        for name in ("megatron_het", "megatron-core"):
            if mine[name] != theirs[name]:
                return f"{name} is {shown(mine[name])} here and {shown(theirs[name])} on the first node"
        name = "the flags"
        for here, there in itertools.zip_longest(mine["flags"], theirs["flags"]):
            if here != there:
                return f"{name} differ: {_word(here)} here and {_word(there)} on the first node"
            name = f"the values of {shown(here)}" if here.startswith("--") else name
    except (KeyError, TypeError, ValueError):
        pass
    return "it was started by another release than the first node"


def _word(word: str | None) -> str:
    return "none" if word is None else shown(word)
