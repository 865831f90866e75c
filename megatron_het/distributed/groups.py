"""The process groups of a plan: their roles and ranks (pure data), and their creation."""

import contextlib
import functools
import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import batched
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_het.megatron_patches import releases
from megatron_het.plan import Placement

# Creating a process group among its members only.
#
# ``torch.distributed.new_group`` names a group after the number of groups that a process has created, so every rank of
# the world has to call it for every group, members or not.  With ``use_local_synchronization`` only members call it,
# but the group is named after the number of groups that this rank is in, which differs between members.  Here a
# group is named after its role and its members, so all members use the same name without other ranks.
#
# Members may arrive in any order.  Deadlocks are excluded by the order in which ranks create their groups: if all
# ranks follow one order of all groups, all members of the first missing group can always create it.

_NAMING = threading.Lock()
_CREATED: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""Per world: how often this process has created a group of each name; equal on all members of the group."""


_UNKNOWN_TORCH = (
    "torch {version} does not name process groups as expected: {why}. Members of a group might wait for each other for "
    "ever. Use a release that `python -m megatron_het.megatron_patches` finds as expected"
)


class GroupError(RuntimeError):
    """A group could not be created.  The message names the group, its ranks and the bound on the wait."""


def group_name(role: str, ranks: Sequence[int]) -> str:
    """The name of a group, equal on all its members, and short for any number of ranks."""
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:12]
    return f"het/{role}/{ranks[0]}-{ranks[-1]}/{digest}"


def create_group(role: str, ranks: Sequence[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Create a group.  Collective over its members, who all create their groups in one order.

    Args:
        role: Purpose of the group; a rank is in at most one group of a role and backend with the same ranks.
        ranks: World ranks of the members, ascending, this rank among them.
        timeout_s: Bound on the creation and on every operation of the group, in seconds.

    Raises:
        GroupError: Not all members created the group in time, or one of them has stopped.
    """
    world = dist.group.WORLD
    wrong = releases.differences(releases.TORCH_NAMES[:1])
    if wrong:
        raise GroupError(_UNKNOWN_TORCH.format(version=torch.__version__, why=wrong[0]))
    if world is None:
        raise RuntimeError("torch.distributed has not been started: a group needs a world")
    name = group_name(f"{role}.{backend}", ranks)
    turn = _CREATED.setdefault(world, Counter())[name]
    _CREATED[world][name] += 1
    try:
        # Without a bound device no split of the world's communicator, which all its ranks would have to join.
        with _named(f"{name}/{turn}"), replaced(world, bound_device_id=None):
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
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of an object or module for the duration of a block."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Context in which ``torch.distributed`` gives new groups this name."""
    with _NAMING, replaced(distributed_c10d, _process_group_name=lambda *_, **__: name):
        yield


# Groups of two ranks for transfers, and the order in which they are created.

Edge = tuple[int, int]  # (source, destination), world ranks


def sparing_groups_of_one() -> contextlib.AbstractContextManager[None]:
    """Context that skips sums and broadcasts in groups of one rank.

    Megatron makes seven in every pass with data and loss, each a call of the communication library on the host.
    """

    def spared(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
            group = named.get("group", more[1] if len(more) > 1 else None)
            is_async = named.get("async_op", len(more) > 2 and more[2])
            scales = type(named.get("op", more[0] if more else None)) is dist.ReduceOp  # a reduction with a factor
            is_alone = isinstance(group, dist.ProcessGroup) and group.size() == 1 and not scales
            return None if is_alone and not is_async else original(tensor, *more, **named)

        return call

    return replaced(dist, all_reduce=spared(dist.all_reduce), broadcast=spared(dist.broadcast))


class Link(NamedTuple):
    """Group and tag of an edge's transfers."""

    group: dist.ProcessGroup  # the group of the two ranks
    tag: int  # distinguishes the purposes that share the group


def in_rounds(edges: Iterable[Edge]) -> list[tuple[int, Edge]]:
    """(round, edge), ascending: no rank has two edges of one round.

    If all ranks create their edges in this order, they cannot wait for each other in a cycle.  A chain of waiting
    ranks is at most as long as the number of rounds, which is less than twice the largest number of edges of a rank,
    whatever the size of the world.  In the order of rank numbers the chain would be as long as the pipeline.

    Args:
        edges: The same edges on all ranks that they connect.
    """
    taken: dict[int, int] = {}
    found = []
    for edge in sorted(set(edges)):
        rounds = taken.get(edge[0], 0) | taken.get(edge[1], 0)
        free = ~rounds & (rounds + 1)  # the lowest bit that is not set
        for rank in edge:
            taken[rank] = taken.get(rank, 0) | free
        found.append((free.bit_length() - 1, edge))
    return sorted(found)


class PairGroups:
    """This rank's groups of two ranks.  ``close`` destroys them.

    gloo runs the transfers of a group in any order, distinguishes purposes by tags, and has one connection for both
    directions.  So two ranks need one group only.  NCCL runs the transfers of a group one after the other.  So
    every purpose has groups of its own, and both directions share one only if both ranks run the transfers of the
    pair in the same order.

    Args:
        timeout_s: Bound on the creation and on every operation, in seconds.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._groups: dict[tuple[str, Edge], dist.ProcessGroup] = {}
        self._purposes: list[str] = []

    def __len__(self) -> int:
        return len(self._groups)

    def connect(self, edges: Iterable[Edge], backend: str, purpose: str, *, one_order: bool) -> dict[Edge, Link]:
        """Returns the links of this rank's edges; missing groups are created and connected.

        Collective: all ranks that have an edge call it with the same purposes in the same order.

        Args:
            edges: The edges of all ranks that edges connect to this one; the same on all of them.
            backend: ``nccl`` or ``gloo``.
            purpose: Name of the transfers' purpose, not used in an earlier call.
            one_order: Whether both ranks of a pair run its transfers, of both directions, in the same order.

        Raises:
            GroupError: A group was not created in time.
        """
        if purpose in self._purposes:
            raise ValueError(f"transfers of {purpose!r} are connected already")
        self._purposes.append(purpose)
        shared = backend != "nccl"
        joined = shared or one_order
        wanted = list(edges)
        for _, pair in in_rounds((min(e), max(e)) if joined else e for e in wanted):
            key = ("" if shared else purpose, pair)
            if self._rank in pair and key not in self._groups:
                role = "pair" if shared else f"{purpose} from {pair[0]}"
                self._groups[key] = create_group(role, sorted(pair), backend, self._timeout_s)
                if backend == "nccl":
                    self._move_one(pair, self._groups[key])
        tag = len(self._purposes) - 1 if shared else 0
        key_of = {e: ("" if shared else purpose, (min(e), max(e)) if joined else e) for e in wanted if self._rank in e}
        return {edge: Link(self._groups[key], tag) for edge, key in key_of.items()}

    def _move_one(self, pair: Edge, group: dist.ProcessGroup) -> None:
        """Transfer one element, so that the communicator exists before the first iteration.

        NCCL connects at the first use, for which both ranks wait: in the order of their programs ranks could wait for
        each other in a cycle.
        """
        probe = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
        if self._rank == pair[0]:
            dist.send(probe, pair[1], group=group)
        else:
            dist.recv(probe, pair[0], group=group)

    def close(self) -> None:
        """Destroy the groups, in the order of creation.  Pending operations must have completed."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop(next(iter(self._groups))))


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group: its role and its world ranks, ascending.

    Roles: ``self`` (one rank), ``tp`` (a replica, or the part of it with one part of the sequence),
    ``cp`` (the ranks of a replica that share sequences), ``ep`` (ranks of an expert group that together have
    all experts), ``expert-tp`` (ranks of an expert group that have parts of the same experts, where these are
    neither one rank nor a ``tp`` group), ``experts`` (an expert group that is no ``tp`` group), ``experts-class``
    (equal positions in such groups of one class of a stage, whose experts are copies), ``class`` (equal TP rank over
    the replicas of one class of a stage: Megatron's data-parallel group), ``stage`` (all ranks of a stage), ``leaders``
    (first member of each class group of a stage), ``ends`` (leaders of the stages of the
    model's first and last chunk, for tied embeddings), ``loss`` (the rank with the complete loss and
    those on which Megatron logs it, if these are on another stage).
    """

    role: str
    ranks: tuple[int, ...]


def group_specs(placement: Placement, tied_embeddings: bool = False) -> list[GroupSpec]:
    """All groups of a plan, in the order in which every rank creates those that it belongs to.

    Groups of one role are disjoint, so a rank waits for at most as many groups as there are roles.
    """
    specs = [GroupSpec("self", (rank,)) for rank in range(placement.world_size)]
    for s, stage in enumerate(placement.plan.stages):
        specs.append(GroupSpec("stage", tuple(placement.stage_ranks(s))))
        specs.extend(GroupSpec("tp", r.tp_group(c)) for r in stage.replicas for c in range(r.cp))
        specs.extend(GroupSpec("cp", r.cp_group(t)) for r in stage.replicas if r.cp > 1 for t in range(r.tp))
        specs.extend(_expert_groups(placement, s))
        for cut in placement.classes(s):
            specs.extend(GroupSpec("class", tuple(placement.class_ranks(s, cut, t))) for t in range(cut.tp))
        if placement.is_mixed(s):
            specs.append(GroupSpec("leaders", tuple(leaders_of_stage(placement, s))))
    if tied_embeddings and placement.first != placement.last:
        ends = {rank for stage, _ in (placement.first, placement.last) for rank in leaders_of_stage(placement, stage)}
        specs.append(GroupSpec("ends", tuple(sorted(ends))))
    if placement.logging_stage != placement.last[0]:
        readers = placement.stage_ranks(placement.logging_stage)
        specs.append(GroupSpec("loss", tuple(sorted([loss_source(placement), *readers]))))
    return specs


def _expert_groups(placement: Placement, stage: int) -> Iterator[GroupSpec]:
    """Groups of the ranks that divide the experts of a layer."""
    for cut in placement.classes(stage):
        size, groups = cut.expert_tp, placement.expert_groups(stage, cut)
        if not cut.divides_alike:
            yield from (GroupSpec("experts", group) for group in groups)
            held = (placement.experts_class(stage, cut, position) for position in range(cut.expert_ranks))
            yield from (GroupSpec("experts-class", tuple(ranks)) for ranks in held)
        if cut.ep > 1:
            yield from (GroupSpec("ep", group[t::size]) for group in groups for t in range(size))
        if size > 1 and (cut.ep > 1 or not cut.divides_alike):
            yield from (GroupSpec("expert-tp", tuple(part)) for group in groups for part in batched(group, size))


def loss_source(placement: Placement) -> int:
    """The rank that sends the loss to the stage on which Megatron logs it."""
    return placement.stage_ranks(placement.last[0])[0]


def leaders_of_stage(placement: Placement, stage: int) -> list[int]:
    """First rank of every class group of a stage, ascending."""
    return sorted(placement.class_ranks(stage, cut, t)[0] for cut in placement.classes(stage) for t in range(cut.tp))


@dataclass
class PlanGroups:
    """The groups that this rank belongs to.  ``close`` destroys them.

    ``pairs`` are the groups for transfers, which ``runtime/channels.py`` requests.
    """

    placement: Placement
    rank: int
    backend: str
    world: dist.ProcessGroup
    pairs: PairGroups
    by_role: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    class_gloo: dist.ProcessGroup | None = None
    experts_class_gloo: dist.ProcessGroup | None = None
    _owned: list[dist.ProcessGroup] = field(default_factory=list)

    def __getitem__(self, role: str) -> dist.ProcessGroup:
        return self.by_role[role]

    @property
    def experts_class(self) -> dist.ProcessGroup:
        """The ranks that hold the same parts of the same experts."""
        return self.by_role.get("experts-class") or self.by_role["class"]

    def get(self, role: str) -> dist.ProcessGroup | None:
        """The group of a role, or None if this rank has none."""
        return self.by_role.get(role)

    def close(self) -> None:
        """Destroy every group, those of transfers first, in the order of creation."""
        self.pairs.close()
        while self._owned:
            dist.destroy_process_group(self._owned.pop(0))
        self.by_role.clear()


def build_groups(
    placement: Placement, *, tied_embeddings: bool, timeout_s: float, use_gloo_groups: bool = True
) -> PlanGroups:
    """Create this rank's groups of a plan.  ``torch.distributed`` must be initialized on all ranks.

    Every group is created by its members only; a rank waits only for ranks with which it shares a group.

    Args:
        timeout_s: Bound on the creation of a group and on every operation on it, in seconds.
        use_gloo_groups: Also create a gloo group of the data-parallel ranks if the default
            backend is another one (Megatron's optimizer checkpoints gather over it).

    Raises:
        GroupError: A group was not created in time.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed has not been started: the groups of a plan need all ranks")
    rank, backend = dist.get_rank(), dist.get_backend()
    groups = PlanGroups(placement, rank, backend, world, PairGroups(rank, timeout_s))

    def create(spec: GroupSpec, kind: str) -> dist.ProcessGroup:
        group = create_group(spec.role, spec.ranks, kind, timeout_s)
        groups._owned.append(group)
        return group

    for spec in group_specs(placement, tied_embeddings):
        if rank not in spec.ranks:
            continue
        group = groups.by_role[spec.role] = create(spec, backend)
        if spec.role in ("leaders", "ends") and backend == "nccl":
            # Their first use is point-to-point, by some of the members only, which cannot
            # connect a communicator.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        if spec.role in ("class", "experts-class"):
            twin = create(spec, "gloo") if use_gloo_groups and backend != "gloo" else group
            setattr(groups, "class_gloo" if spec.role == "class" else "experts_class_gloo", twin)
    return groups
