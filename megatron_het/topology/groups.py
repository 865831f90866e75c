"""The collective groups of a plan: which there are (pure data), and their creation."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_het.plan import Placement


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group: its role and its world ranks, ascending.

    Roles: ``self`` (one rank), ``tp`` (a replica, or the part of it with one part of the sequence),
    ``cp`` (the ranks of a replica that share sequences), ``class`` (equal TP rank over the replicas of
    one TP class of a stage: Megatron's data-parallel group), ``stage`` (all ranks of a stage),
    ``leaders`` (first member of each class group of a stage), ``ends`` (leaders of the first and
    the last stage, for tied embeddings).
    """

    role: str
    ranks: tuple[int, ...]


def group_specs(placement: Placement, tied_embeddings: bool = False) -> list[GroupSpec]:
    """All groups of a plan in the one order in which every rank creates them."""
    specs = [GroupSpec("self", (rank,)) for rank in range(placement.world_size)]
    for s, stage in enumerate(placement.plan.stages):
        specs.append(GroupSpec("stage", tuple(placement.stage_ranks(s))))
        specs.extend(GroupSpec("tp", r.tp_group(c)) for r in stage.replicas for c in range(r.cp))
        specs.extend(
            GroupSpec("cp", r.cp_group(t)) for r in stage.replicas if r.cp > 1 for t in range(r.tp)
        )
        for tp in placement.class_sizes(s):
            specs.extend(
                GroupSpec("class", tuple(placement.class_ranks(s, tp, t))) for t in range(tp)
            )
        if placement.is_mixed(s):
            specs.append(GroupSpec("leaders", tuple(leaders_of_stage(placement, s))))
    if tied_embeddings and placement.num_stages > 1:
        ends = leaders_of_stage(placement, 0) + leaders_of_stage(placement, placement.num_stages - 1)
        specs.append(GroupSpec("ends", tuple(sorted(ends))))
    return specs


def leaders_of_stage(placement: Placement, stage: int) -> list[int]:
    """First rank of every class group of a stage, ascending."""
    return sorted(
        placement.class_ranks(stage, tp, t)[0]
        for tp in placement.class_sizes(stage)
        for t in range(tp)
    )


@dataclass
class PlanGroups:
    """The groups that this rank belongs to.  ``close`` destroys them."""

    placement: Placement
    rank: int
    backend: str
    world: dist.ProcessGroup
    by_role: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    class_gloo: dist.ProcessGroup | None = None
    _owned: list[dist.ProcessGroup] = field(default_factory=list)

    def __getitem__(self, role: str) -> dist.ProcessGroup:
        return self.by_role[role]

    def get(self, role: str) -> dist.ProcessGroup | None:
        """The group of a role, or None when this rank has none."""
        return self.by_role.get(role)

    def close(self) -> None:
        """Destroy every group, in the order of creation on every rank."""
        while self._owned:
            dist.destroy_process_group(self._owned.pop(0))
        self.by_role.clear()


def build_groups(
    placement: Placement,
    *,
    tied_embeddings: bool,
    timeout_s: float,
    use_gloo_groups: bool = True,
) -> PlanGroups:
    """Create all groups of a plan.  Collective over the world; ``torch.distributed`` must be up.

    Every rank walks the same list, so that no two ranks wait for each other crosswise.  For a group
    that a rank is not in, it only counts up the group's name.

    Args:
        placement: The plan's lookup tables.
        tied_embeddings: Whether input and output embeddings share their weights.
        timeout_s: Timeout of every operation on these groups, in seconds.
        use_gloo_groups: Also create a gloo twin of the data-parallel group when the default
            backend is another one (Megatron's optimizer checkpoints gather over it).
    """
    rank, backend = dist.get_rank(), dist.get_backend()
    groups = PlanGroups(placement, rank, backend, dist.group.WORLD)
    for spec in group_specs(placement, tied_embeddings):
        group = _new_group(groups, spec.ranks, backend, timeout_s)
        twin = group
        if spec.role == "class" and use_gloo_groups and backend != "gloo":
            twin = _new_group(groups, spec.ranks, "gloo", timeout_s)
        if rank in spec.ranks:
            groups.by_role[spec.role] = group
            if spec.role in ("leaders", "ends") and backend == "nccl":
                # Their first use is point-to-point, by some of the members only, which cannot
                # connect a communicator.
                dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            if spec.role == "class":
                groups.class_gloo = twin
    return groups


def _new_group(
    groups: PlanGroups, ranks: tuple[int, ...], backend: str, timeout_s: float
) -> dist.ProcessGroup:
    group = dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=timeout_s),
        backend=backend,
    )
    if groups.rank in ranks:
        groups._owned.append(group)
    return group
