"""Sessions one after the other in one process: enter Megatron's training under a plan, leave it, enter it again."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_het.checkpoint import asynchronous
from megatron_het.elastic.boundary import ElasticBoundary, Leave
from megatron_het.elastic.generation import Generation
from megatron_het.elastic.state import Snapshot
from megatron_het.megatron_patches import torch_checkpoints
from megatron_het.runtime.training import flush_logs
from megatron_het.safe_io import write_json

_CACHING = "megatron.core.models.common.embeddings."
"""Modules of Megatron whose classes have methods with caches, which hold the object whose method it is."""


@dataclass(frozen=True)
class Outcome:
    """How a session ended.

    Attributes:
        how: ``finished`` (the training is over), ``left`` (at a boundary, as agreed) or ``failed`` (something that it
            needed broke).
        snapshot: This rank's state where it left.
        error: What failed.
        unsaved: Iteration whose checkpoint this rank could not write, where that is what failed.
        is_refused: Whether the training's flags do not go with the plan.
    """

    how: str
    snapshot: Snapshot | None = None
    error: str = ""
    unsaved: int | None = None
    is_refused: bool = False


def run_session(
    boundary: ElasticBoundary, flags: Sequence[str], folder: Path, entry: Callable[[ElasticBoundary], None]
) -> Outcome:
    """Train under the plan of a generation until it ends, leaves or fails.

    Args:
        boundary: Of the generation.
        flags: Command line of the training, without a plan.
        folder: Where this process may write the plan.
        entry: Runs the training, with the flags in ``sys.argv``.

    Returns:
        How it ended; nothing of the session is left in the process then.

    Raises:
        SystemExit: The flags are wrong, and there is no earlier plan with which they were right.
    """
    generation = boundary.generation
    plan = _written(generation, folder)
    rank = generation.ranks.index(boundary.process)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(generation.ranks)))
    sys.argv = [
        "megatron_het.elastic",
        *with_own_folders(flags, f"generation-{generation.number}"),
        "--het-plan",
        str(plan),
    ]
    try:
        entry(boundary)
    except Leave as leave:
        traceback.clear_frames(leave.__traceback__)
        return Outcome("left", leave.snapshot)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            if not generation.loads or boundary.began is not None:
                raise
            # The plan before this one went well: its state stays here, and the others can go back to it.
            return Outcome("failed", error="the plan is refused; the worker's log says why", is_refused=True)
    except RuntimeError as error:  # what torch.distributed raises when a peer has gone
        return Outcome("failed", error=_told(error))
    except (OSError, CheckpointException) as error:
        if boundary.saving is None:  # this node's own trouble: the others go on without it
            raise
        # A full disk: training goes on without this checkpoint.
        return Outcome("failed", error=_told(error), unsaved=boundary.saving)
    finally:
        boundary.closed()
        end_session()
    return Outcome("finished")


def _written(generation: Generation, folder: Path) -> Path:
    """File with the plan, in another folder where the disk is full; those of earlier generations go."""
    failures = []
    for place in (folder, Path(tempfile.gettempdir()), Path("/dev/shm")):
        name = f"plan-{generation.number}.json" if place == folder else f"het-{os.getpid()}.json"
        try:
            # For this generation only, which checks it: a change waits neither for the disk nor for another check.
            write_json(place / name, generation.plan.to_json(), durable=False)
            for older in folder.glob("plan-[0-9]*.json"):
                if older != place / name:
                    older.unlink(missing_ok=True)
            return place / name
        except (OSError, ValueError) as error:
            failures.append(str(error))
    raise OSError("; ".join(failures))


def _told(error: BaseException) -> str:
    """An error in words; what it refers to is let go."""
    causes = [failure[0] for failure in getattr(error, "failures", {}).values()]
    text = "".join(traceback.format_exception_only(causes[0] if causes else error)).strip()
    for one in (error, *causes):
        traceback.clear_frames(one.__traceback__)
    return torch_checkpoints.failed_write() or text


def with_own_folders(flags: Sequence[str], name: str) -> list[str]:
    """The flags with reports and traces of every plan in a folder of its own: ranks change their meaning.

    Args:
        flags: Command line of the training.
        name: Of the folder.
    """
    found = list(flags)
    for i, word in enumerate(found):
        flag, equals, value = word.partition("=")
        if flag not in ("--het-report", "--het-trace"):
            continue
        if equals:
            found[i] = f"{flag}={Path(value) / name}"
        elif i + 1 < len(found):
            found[i + 1] = str(Path(found[i + 1]) / name)
    return found


def end_session() -> None:
    """Take out of the process what a closed session leaves in it; all connections are closed, so that others notice."""
    from megatron_het import megatron_patches as upstream

    with contextlib.suppress(OSError):
        flush_logs()  # the next session has a writer of its own
    asynchronous.abandon()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        if dist.is_initialized():  # a communicator that has failed is in the way
            with contextlib.suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()
    # Groups are numbered, and members of one must have the same number.  A world that could not be made, because a
    # member died meanwhile, has used one up; processes that came later have not.
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0
    if "megatron.training.training" in sys.modules:
        sys.modules["megatron.training.training"].destroy_global_state()
    upstream.uninstall()
    _clear_method_caches()
    gc.collect()


def _clear_method_caches() -> None:
    """Let go of modules, and the groups and threads that they hold: Megatron caches what rotary embeddings return."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(_CACHING):
            continue
        for kind in vars(module).values():
            for method in vars(kind).values() if isinstance(kind, type) else ():
                if hasattr(method, "cache_clear"):
                    method.cache_clear()
