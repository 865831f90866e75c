"""The collective groups of a plan: which there are (pure data), and their creation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_het.distributed.creation import create_group
from megatron_het.distributed.pairs import PairGroups
from megatron_het.plan import Placement, Stage


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group: its role and its world ranks, ascending.

    Roles: ``self`` (one rank), ``tp`` (a replica, or the part of it with one part of the sequence),
    ``cp`` (the ranks of a replica that share sequences), ``ep`` (ranks of a ``tp`` group that together have
    all experts), ``expert-tp`` (ranks of a ``tp`` group that have parts of the same experts, where these are
    neither one rank nor the whole group), ``class`` (equal TP rank over the replicas of
    one class of a stage: Megatron's data-parallel group), ``stage`` (all ranks of a stage),
    ``leaders`` (first member of each class group of a stage), ``ends`` (leaders of the stages of the
    model's first and last chunk, for tied embeddings), ``loss`` (the rank that knows the whole loss and
    those that Megatron logs it on, where these are elsewhere).
    """

    role: str
    ranks: tuple[int, ...]


def group_specs(placement: Placement, tied_embeddings: bool = False) -> list[GroupSpec]:
    """All groups of a plan in the one order in which every rank creates those that it is in.

    Groups of one role are disjoint, so a rank waits for no more groups than there are roles.
    """
    specs = [GroupSpec("self", (rank,)) for rank in range(placement.world_size)]
    for s, stage in enumerate(placement.plan.stages):
        specs.append(GroupSpec("stage", tuple(placement.stage_ranks(s))))
        specs.extend(GroupSpec("tp", r.tp_group(c)) for r in stage.replicas for c in range(r.cp))
        specs.extend(GroupSpec("cp", r.cp_group(t)) for r in stage.replicas if r.cp > 1 for t in range(r.tp))
        specs.extend(_expert_groups(stage))
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


def _expert_groups(stage: Stage) -> Iterator[GroupSpec]:
    """Groups of replicas whose TP ranks divide the experts."""
    for replica in stage.replicas:
        cut = replica.cut
        if cut.ep == 1:
            continue
        for c in range(replica.cp):
            yield from (GroupSpec("ep", replica.ep_group(t, c)) for t in range(cut.expert_tp))
            if cut.expert_tp > 1:
                yield from (GroupSpec("expert-tp", replica.expert_tp_group(e, c)) for e in range(cut.ep))


def loss_source(placement: Placement) -> int:
    """The rank that tells the loss to the stage on which Megatron logs it."""
    return placement.stage_ranks(placement.last[0])[0]


def leaders_of_stage(placement: Placement, stage: int) -> list[int]:
    """First rank of every class group of a stage, ascending."""
    return sorted(placement.class_ranks(stage, cut, t)[0] for cut in placement.classes(stage) for t in range(cut.tp))


@dataclass
class PlanGroups:
    """The groups that this rank belongs to.  ``close`` destroys them.

    ``pairs`` are the groups of transfers, which ``runtime/channels.py`` asks for.
    """

    placement: Placement
    rank: int
    backend: str
    world: dist.ProcessGroup
    pairs: PairGroups
    by_role: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    class_gloo: dist.ProcessGroup | None = None
    _owned: list[dist.ProcessGroup] = field(default_factory=list)

    def __getitem__(self, role: str) -> dist.ProcessGroup:
        return self.by_role[role]

    def get(self, role: str) -> dist.ProcessGroup | None:
        """The group of a role, or None when this rank has none."""
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
    """Create this rank's groups of a plan.  ``torch.distributed`` must be up on all ranks.

    Every group is created by its members only; nobody waits for ranks that it shares no group with.

    Args:
        placement: The plan's lookup tables.
        tied_embeddings: Whether input and output embeddings share their weights.
        timeout_s: Bound on the creation of a group and on every operation on it, in seconds.
        use_gloo_groups: Also create a gloo twin of the data-parallel group when the default
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
        if spec.role == "class":
            twin = use_gloo_groups and backend != "gloo"
            groups.class_gloo = create(spec, "gloo") if twin else group
    return groups
