"""Creating a process group among its members only.

``torch.distributed.new_group`` names a group after the number of groups that a process has created, so every rank of
the world has to call it for every group, members or not.  Its ``use_local_synchronization`` leaves that to the
members, but names the group after the number of groups that this rank is in, which differs between members.  Here a
group is named by what it is for and who is in it.  All members know that, and nobody else has to.

Members may come in any order.  Who waits for whom is decided by the order in which a rank creates its groups: when
all ranks follow one order of all groups, the first group of that order which is not there yet can always be made.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_het.megatron_patches import torch_names

_NAMING = threading.Lock()
_CREATED: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""By world: how often this process has created a group of a name; equal on all members of the group."""


_UNKNOWN_TORCH = (
    "torch {version} does not name process groups as expected: {why}. Members of a group might wait for each other for "
    "ever. Use a release that `python -m megatron_het.megatron_patches` finds as expected"
)


class GroupError(RuntimeError):
    """A group could not be created.  The message names the group, its ranks and the bound on the wait."""


def group_name(role: str, ranks: Sequence[int]) -> str:
    """The name of a group, the same on all its members: short, whatever the number of ranks."""
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:12]
    return f"het/{role}/{ranks[0]}-{ranks[-1]}/{digest}"


def create_group(role: str, ranks: Sequence[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Create a group.  Collective over its members, who all create their groups in one order.

    Args:
        role: What the group is for; a rank is in at most one group of a role and backend with the same ranks.
        ranks: World ranks of the members, ascending, this rank among them.
        backend: Of the group.
        timeout_s: Bound on the creation and on every operation of the group, in seconds.

    Raises:
        GroupError: The members did not all come in time, or one of them has stopped.
    """
    world = dist.group.WORLD
    wrong = torch_names.differences(torch_names.TORCH_NAMES[:1])
    if wrong:
        raise GroupError(_UNKNOWN_TORCH.format(version=torch.__version__, why=wrong[0]))
    if world is None:
        raise RuntimeError("torch.distributed has not been started: a group needs a world")
    name = group_name(f"{role}.{backend}", ranks)
    turn = _CREATED.setdefault(world, Counter())[name]
    _CREATED[world][name] += 1
    try:
        with _named(f"{name}/{turn}"), _not_split_from(world):
            group = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend, use_local_synchronization=True
            )
    except RuntimeError as error:
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        raise GroupError(
            f"the {backend} group '{role}' of ranks {shown} was not created on rank {dist.get_rank()} "
            f"(timeout {timeout_s:g} s): {error}. One of these ranks has probably stopped; look at its log first"
        ) from error
    assert isinstance(group, dist.ProcessGroup), "only members create a group"
    if group.group_name != f"{name}/{turn}":
        why = f"the group '{name}/{turn}' was named '{group.group_name}'"
        raise GroupError(_UNKNOWN_TORCH.format(version=torch.__version__, why=why))
    return group


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Groups that are created inside have this name."""
    with _NAMING:
        original = distributed_c10d._process_group_name
        distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
        try:
            yield
        finally:
            distributed_c10d._process_group_name = original


@contextlib.contextmanager
def _not_split_from(world: dist.ProcessGroup) -> Iterator[None]:
    """No split of the world's communicator, which all ranks of the world would have to take part in."""
    device = world.bound_device_id
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device
