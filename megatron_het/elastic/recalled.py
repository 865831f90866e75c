"""What a controller that starts anew reads of the job that it goes on with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.elastic.generation import Generation
from megatron_het.elastic.learned import read_learned
from megatron_het.elastic.pool import Process
from megatron_het.elastic.standing import describe, standing
from megatron_het.untrusted import FileError, read_json


@dataclass(frozen=True)
class Recalled:
    """A job as its file describes it.

    Attributes:
        newest: The largest number of a process so far.
        generation: What ran; None where nothing did yet.
        signature: What all nodes have in common.
        history: One entry per change.
        processes: The workers.
        leaving: Names of nodes that are to leave.
        corrected: What was learned from measurements, if anything.
    """

    newest: int
    generation: Generation | None = None
    signature: str | None = None
    history: tuple[dict[str, Any], ...] = ()
    processes: tuple[Process, ...] = ()
    leaving: frozenset[str] = frozenset()
    corrected: Any = None


def recalled(state: Path) -> Recalled | None:
    """Read a controller's file; None where it is of a job that is over.

    Raises:
        FileError: It cannot be read, or no controller has written it.
    """
    document = read_json(state)
    try:
        return None if document.get("over") else _of(document)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FileError(
            state,
            "",
            f"no state of a job that a controller has written ({type(error).__name__}: {error})",
            "Give another --folder, or remove the file: the job then starts from its newest checkpoint",
        ) from None


def _of(document: dict[str, Any]) -> Recalled:
    newest = int(document.get("newest", 0))
    if document["generation"] is None:
        return Recalled(newest)
    members, corrected = document["members"], document.get("corrected")
    if corrected is not None:
        cluster, _ = read_learned(corrected)
        [str(group["gpu"]) for group in cluster["nodes"]]  # what the search reads of it
    describe({**document, **standing(document["history"], 0, 0.0)})  # everything that it shows is there
    return Recalled(
        newest,
        Generation.from_json(document["generation"]),
        document["signature"],
        tuple(document["history"]),
        tuple(Process(int(m["process"]), str(m["node"]), str(m["device"])) for m in members),
        frozenset(document["leaving"]),
        corrected,
    )
