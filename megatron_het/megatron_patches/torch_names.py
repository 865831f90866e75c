"""Private names of torch that a run leans on.

Their source changes from release to release of torch, so a hash would refuse releases that work.  What is leaned on
is that the name is there and takes these parameters; ``distributed/groups.py`` looks at the result as well.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

TORCH_VERSIONS = ("2.11", "2.13")
"""The oldest and the newest release whose names were read."""


@dataclass(frozen=True)
class TorchName:
    """One name.

    Attributes:
        name: Dotted.
        parameters: Names of its parameters, in order; None where torch does not tell.
        reason: What it is for, and why nothing public does that.
    """

    name: str
    parameters: tuple[str, ...] | None
    reason: str


TORCH_NAMES = (
    TorchName(
        "torch.distributed.distributed_c10d._process_group_name",
        ("ranks", "use_hashed_name"),
        "new_group asks it for the name of a group; wrapped while a group is created, because the public ways to "
        "name a group need every rank of the world in every creation",
    ),
    TorchName(
        "torch.distributed.distributed_c10d._get_default_store",
        (),
        "the store on which ranks tell who has stopped; torch.distributed shows it nowhere else",
    ),
    TorchName(
        "torch.distributed.distributed_c10d._world",
        None,
        "its pg_group_ranks is where get_rank looks up a group; the pipeline of a plan, which hybrid models ask for "
        "while they are built, is no group that torch has created",
    ),
    TorchName(
        "torch.distributed.checkpoint.filesystem._StorageWriterTransforms",
        ("extensions",),
        "gives the stream for each object of a checkpoint; wrapped, because a write that fails makes the process crash "
        "later on, and the public extensions are noted in the checkpoint",
    ),
    TorchName(
        "torch._foreach_add_",
        None,
        "adds to many tensors in one kernel; torch's optimizers use it, and its public form does not exist",
    ),
)


def differences(names: Sequence[TorchName] = TORCH_NAMES) -> list[str]:
    """Returns what this torch lacks, one text per name; empty where everything is as expected."""
    found = []
    for one in names:
        module, _, attribute = one.name.rpartition(".")
        target = getattr(importlib.import_module(module), attribute, None)
        if target is None:
            found.append(f"{one.name} is not there; {one.reason}")
        elif one.parameters is not None:
            parameters = tuple(inspect.signature(target).parameters)
            if parameters != one.parameters:
                found.append(f"{one.name} takes {', '.join(parameters)}, not {', '.join(one.parameters)}; {one.reason}")
    return found
