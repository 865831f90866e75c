"""The costs that a plan file carries, to and from those that the simulator reads."""

from __future__ import annotations

import math
from typing import Any

from megatron_het.plan import DeviceCosts, LinkCosts, Plan, PlannedCosts
from megatron_het.plan.costs import PER_CHUNK, PER_DEVICE
from megatron_het.schedule.cost import Costs, Link, free_link
from megatron_het.schedule.ir import SENDS, Program

_SHARED = ("message_bytes", "weight_share", "diagonal", "operation_s", "post_s", "host_blocks")
_DIGITS = 6


def costs_of(plan: Plan) -> Costs | None:
    """Returns what the plan's prediction was made from; None where the plan does not say it."""
    planned = plan.predicted.costs if plan.predicted is not None else None
    if planned is None:
        return None
    rows = {device: row for row in planned.devices for device in row.devices}
    ordered = [rows[device] for device in sorted(rows)]
    tables: dict[str, Any] = {}
    for name in PER_CHUNK:
        if any(getattr(row, name) for row in ordered):
            tables[name] = tuple(getattr(row, name) or (0.0,) * len(row.forward_s) for row in ordered)
    for name in PER_DEVICE:
        tables[name] = tuple(getattr(row, name) for row in ordered)
    links = {(a, b): Link(link.latency_s, link.bytes_per_s) for link in planned.links for a, b in link.pairs}
    shared = {name: getattr(planned, name) for name in _SHARED}
    return Costs(**tables, **shared, link=lambda source, target: links.get((source, target)) or free_link(0, 0))


def planned_costs(costs: Costs, program: Program) -> PlannedCosts:
    """Costs as a plan file carries them.

    Args:
        costs: Of all devices of the program.
        program: Its transfers say which links matter.
    """
    rows: dict[tuple[Any, ...], list[int]] = {}
    for device in range(len(program.ops)):
        chunks = tuple(_rounded(table[device]) if (table := getattr(costs, name)) else () for name in PER_CHUNK)
        figures = tuple(_short(row[device]) if (row := getattr(costs, name)) else 0.0 for name in PER_DEVICE)
        rows.setdefault((*chunks, *figures), []).append(device)
    names = (*PER_CHUNK, *PER_DEVICE)
    devices = tuple(DeviceCosts(tuple(found), **dict(zip(names, row, strict=True))) for row, found in rows.items())
    return PlannedCosts(devices, _links(costs, program), **{name: getattr(costs, name) for name in _SHARED})


def _links(costs: Costs, program: Program) -> tuple[LinkCosts, ...]:
    edges = sorted({(device, op.peer) for device, ops in enumerate(program.ops) for op in ops if op.kind in SENDS})
    found: dict[tuple[float, float], list[tuple[int, int]]] = {}
    for edge in edges:
        link = costs.link(*edge)
        if math.isfinite(link.bytes_per_s):  # others are free
            found.setdefault((_short(link.latency_s), _short(link.bytes_per_s)), []).append(edge)
    return tuple(LinkCosts(tuple(pairs), *figures) for figures, pairs in found.items())


def _rounded(row: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(_short, row))


def _short(value: float) -> float:
    """As many digits as a prediction is worth, so that devices that are alike share a row."""
    return float(f"{value:.{_DIGITS}g}")
