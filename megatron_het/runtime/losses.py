"""What happens to the losses of an iteration: summed over a stage, and told to the ranks that log them."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from megatron_het.distributed import PlanGroups, loss_source
from megatron_het.plan import Placement

Reports = list[dict[str, torch.Tensor]]
"""The script's loss entries: (sum, tokens) by name, or a mean per microbatch."""
MESSAGE_BYTES = 4096
"""Of the text that tells the losses to the ranks that log them: tens of names with two numbers each."""


def of_whole_stage(reports: Reports, placement: Placement, groups: PlanGroups) -> Reports:
    """One entry for the whole stage when its replicas have unequal work or TP, or share sequences.

    Megatron sums entries over the data-parallel group, which here is one class of replicas only.
    """
    where = placement.locate(groups.rank)
    replicas = placement.plan.stages[where.stage].replicas
    if len(replicas) == 1 and replicas[0].cp == 1:
        return reports
    totals = _totals(reports)
    for value in totals.values():
        if where.tp_rank > 0:
            value.zero_()
        dist.all_reduce(value, group=groups["stage"])
    return [_entry(totals, reports[0])]


def _totals(reports: Reports) -> dict[str, torch.Tensor]:
    """By name, what adds up over ranks: (sum, tokens), or (sum, number) of the script's means.

    A microbatch has as many reports as its replica has slices of it and ranks that share it, so that means are
    divided by the number of reports.
    """
    found = {}
    for name in reports[0]:
        values = torch.stack([entry[name].view(-1) for entry in reports])
        total = values.sum(dim=0)
        found[name] = torch.cat([total, total.new_tensor([len(values)])]) if total.numel() == 1 else total
    return found


def _entry(totals: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entry that Megatron logs, with sums or means as the script reports them."""
    return {name: total[:1] / total[1] if like[name].numel() == 1 else total for name, total in totals.items()}


def passed_on(reports: Reports, placement: Placement, groups: PlanGroups, device: torch.device) -> Reports:
    """The entries on the ranks that Megatron logs them on, where the model ends on another stage (a V).

    Args:
        reports: Of the whole stage; empty where this rank has no loss.
        placement: The plan's lookup tables.
        groups: This rank's groups.
        device: Of the message.

    Raises:
        RuntimeError: The script reports more losses than the message holds.
    """
    group, source = groups.get("loss"), loss_source(placement)
    if group is None:
        return reports
    told, text = groups.rank == source, ""
    if told:
        entry = _entry(_totals(reports), reports[0])
        text = json.dumps({name: value.tolist() for name, value in entry.items()})
        if len(text) > MESSAGE_BYTES:
            raise RuntimeError(f"{len(reports[0])} losses do not fit into a message of {MESSAGE_BYTES} bytes")
    letters = torch.tensor(list(text.ljust(MESSAGE_BYTES).encode()), dtype=torch.uint8, device=device)
    dist.broadcast(letters, src=source, group=group)
    if told:
        return reports
    return [{name: torch.tensor(value, device=device) for name, value in json.loads(bytes(letters.tolist())).items()}]
