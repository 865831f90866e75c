"""What happens to the losses of an iteration: summed over a stage, and told to the ranks that log them."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from megatron_het.plan import Placement
from megatron_het.topology import PlanGroups, loss_source

Reports = list[dict[str, torch.Tensor]]
"""The script's loss entries: (sum, tokens) by name, or a mean per microbatch."""


def of_whole_stage(reports: Reports, placement: Placement, groups: PlanGroups) -> Reports:
    """One entry for the whole stage when its replicas have unequal work or TP, or share sequences.

    Megatron sums entries over the data-parallel group, which here is one TP class only.
    """
    where = placement.locate(groups.rank)
    if len(placement.plan.stages[where.stage].replicas) == 1 and placement.num_cp_ranks == 1:
        return reports
    summed = {}
    for name in reports[0]:
        total = torch.stack([entry[name].view(-1) for entry in reports]).sum(dim=0)
        if total.numel() == 1:  # a mean per microbatch instead of (sum, tokens)
            total /= placement.plan.num_microbatches
        if where.tp_rank > 0:
            total.zero_()
        dist.all_reduce(total, group=groups["stage"])
        summed[name] = total
    return [summed]


def passed_on(reports: Reports, placement: Placement, groups: PlanGroups, device: torch.device) -> Reports:
    """The entries on the ranks that Megatron logs them on, where the model ends on another stage (a V).

    Args:
        reports: Of the whole stage; empty where this rank has no loss.
        placement: The plan's lookup tables.
        groups: This rank's groups.
        device: Of messages and entries.
    """
    group, source = groups.get("loss"), loss_source(placement)
    if group is None:
        return reports
    told = groups.rank == source
    text = json.dumps([{name: value.tolist() for name, value in entry.items()} for entry in reports] if told else [])
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, src=source, group=group)
    letters = torch.tensor(list(text.encode()) if told else [0] * int(size), dtype=torch.uint8, device=device)
    dist.broadcast(letters, src=source, group=group)
    if told:
        return reports
    entries = json.loads(bytes(letters.tolist()))
    return [{name: torch.tensor(value, device=device) for name, value in entry.items()} for entry in entries]
