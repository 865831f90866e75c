"""Inputs of a plan's prediction: seconds per device and chunk, links.  A run compares itself with them.

The names are those of ``schedule.cost.Costs``, which ``lowering.costs`` makes of them.  A *device* is a replica of a
stage; devices are counted through the stages, as in programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from megatron_het.plan.errors import PlanError

_OMITTED = {"omit_default": True}


def _row() -> tuple[float, ...]:
    """A field with one figure per chunk, left out of files where there is none."""
    found: tuple[float, ...] = field(default=(), metadata=_OMITTED)
    return found


def _figure() -> float:
    """A field with one figure, left out of files where it is 0."""
    found: float = field(default=0.0, metadata=_OMITTED)
    return found


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Seconds (and bytes) of devices that are alike, for one whole microbatch.

    Attributes:
        devices: Their numbers.
        forward_s, backward_s: Of every chunk, and so all that follows but for the last five figures; see
            ``schedule.cost.Costs``.
    """

    devices: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    attention_forward_s: tuple[float, ...] = _row()
    attention_backward_s: tuple[float, ...] = _row()
    kv_message_bytes: tuple[float, ...] = _row()
    query_message_bytes: tuple[float, ...] = _row()
    gather_s: tuple[float, ...] = _row()
    reduce_s: tuple[float, ...] = _row()
    prefetch_s: tuple[float, ...] = _row()
    offload_s: tuple[float, ...] = _row()
    act_offload_s: tuple[float, ...] = _row()
    act_fetch_s: tuple[float, ...] = _row()
    step_s: tuple[float, ...] = _row()
    vocab_forward_s: float = _figure()
    vocab_backward_s: float = _figure()
    embed_forward_s: float = _figure()
    embed_backward_s: float = _figure()
    tail_s: float = _figure()


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Directed pairs of devices with equal links: a message of n bytes takes ``latency_s + n / bytes_per_s``."""

    pairs: tuple[tuple[int, ...], ...]
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PlannedCosts:
    """The costs of a plan's operations; attributes as those of ``schedule.cost.Costs``."""

    devices: tuple[DeviceCosts, ...]
    links: tuple[LinkCosts, ...] = ()
    message_bytes: float = 0.0
    weight_share: float = 0.5
    diagonal: float = 1.0
    operation_s: float = _figure()
    post_s: float = _figure()
    host_blocks: bool = field(default=False, metadata=_OMITTED)


PER_CHUNK = tuple(f.name for f in fields(DeviceCosts) if f.name != "devices" and f.default != 0.0)
PER_DEVICE = tuple(f.name for f in fields(DeviceCosts) if f.default == 0.0)


def check_costs(costs: PlannedCosts, chunks: Sequence[int]) -> None:
    """Refuse costs that do not fit a plan.

    Args:
        costs: Of the plan's prediction.
        chunks: Chunks of every device.

    Raises:
        PlanError: The first figure that does not fit.
    """
    where = "predicted.costs"
    seen: set[int] = set()
    for i, row in enumerate(costs.devices):
        for device in row.devices:
            if not 0 <= device < len(chunks) or device in seen:
                raise PlanError(
                    f"{where}.devices[{i}].devices", device, "no such device, or a device that was there before"
                )
            seen.add(device)
            _check_row(row, chunks[device], f"{where}.devices[{i}]")
    if len(seen) != len(chunks):
        missing = next(d for d in range(len(chunks)) if d not in seen)
        raise PlanError(f"{where}.devices", sorted(seen), f"nothing is said of device {missing}", "Plan again")
    for i, link in enumerate(costs.links):
        for pair in link.pairs:
            if len(pair) != 2 or not all(0 <= d < len(chunks) for d in pair):
                raise PlanError(f"{where}.links[{i}].pairs", list(pair), "must be two devices of the plan")
        _check_amount(link.latency_s, f"{where}.links[{i}].latency_s")
        _check_amount(link.bytes_per_s, f"{where}.links[{i}].bytes_per_s")
        if not link.bytes_per_s:
            raise PlanError(f"{where}.links[{i}].bytes_per_s", link.bytes_per_s, "must be positive")
    for name in ("message_bytes", "weight_share", "diagonal", "operation_s", "post_s"):
        _check_amount(getattr(costs, name), f"{where}.{name}")


def _check_row(row: DeviceCosts, chunks: int, where: str) -> None:
    for name in PER_CHUNK:
        values = getattr(row, name)
        if len(values) != chunks and (values or name in ("forward_s", "backward_s")):
            raise PlanError(f"{where}.{name}", list(values), f"needs one figure for each of {chunks} chunks")
        for value in values:
            _check_amount(value, f"{where}.{name}")
    for name in PER_DEVICE:
        _check_amount(getattr(row, name), f"{where}.{name}")


def _check_amount(value: float, where: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise PlanError(where, value, "must be a finite number, not negative")
