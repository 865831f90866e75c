"""Parts of a shape that exchange nothing: each is scheduled as if it were alone.

Replicas of neighbouring stages belong together when a microbatch goes from one to the other.  Where the
microbatches are dealt so that the replicas fall into several such parts, each part is a pipeline of its own.
Equal parts get equal orders, and a part with one replica per stage gets the order of a plain pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_het.schedule.ir import Op, Shape

Orders = tuple[tuple[Op, ...], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a shape.

    Attributes:
        devices: its devices in the whole shape, stage-major, in the order of ``shape.devices``.
        microbatches: its microbatches in the whole shape, ascending.
        shape: the part alone.
    """

    devices: tuple[int, ...]
    microbatches: tuple[int, ...]
    shape: Shape


def parts_of(shape: Shape) -> list[Part]:
    """The parts of a shape, by their first device.  Replicas without microbatches belong to none."""
    leader = list(range(len(shape.devices)))

    def find(device: int) -> int:
        while leader[device] != device:
            leader[device] = leader[leader[device]]
            device = leader[device]
        return device

    paths = list(zip(*([first + r for r in row] for first, row in zip(shape.first_device, shape.route))))
    different = set(paths)
    apart = len({device for path in different for device in path}) - 1
    for path in different:
        for device in path[1:]:
            a, b = find(path[0]), find(device)
            if a != b:
                leader[max(a, b)] = min(a, b)
                apart -= 1
        if not apart:  # all belong together already, as is soon the case where widths differ
            break
    members: dict[int, list[int]] = {}
    for m, path in enumerate(paths):
        members.setdefault(find(path[0]), []).append(m)
    devices: dict[int, list[int]] = {}
    for device in sorted({device for path in paths for device in path}):
        devices.setdefault(find(device), []).append(device)
    return [
        Part(tuple(devices[first]), tuple(members[first]), _alone(shape, devices[first], members[first]))
        for first in sorted(members)
    ]


def _alone(shape: Shape, devices: Sequence[int], microbatches: Sequence[int]) -> Shape:
    if len(devices) == len(shape.devices) and len(microbatches) == shape.microbatches:
        return shape
    by_stage: list[list[int]] = [[] for _ in range(shape.stages)]
    for d in devices:
        by_stage[shape.devices[d].stage].append(shape.devices[d].replica)
    new = [{replica: i for i, replica in enumerate(row)} for row in by_stage]
    route = tuple(tuple(names[row[m]] for m in microbatches) for names, row in zip(new, shape.route))
    sizes = tuple(shape.sizes[m] for m in microbatches) if shape.sizes else ()
    replicas = tuple(map(len, by_stage))
    return Shape(
        layers=shape.layers,
        route=route,
        replicas=replicas,
        slices=shape.slices,
        placement=shape.placement,
        sizes=sizes,
        attention=shape.attention,
    )


def by_part(shape: Shape, parts: Sequence[Part], speeds: Sequence[float], make: Callable[..., Orders]) -> Orders:
    """Orders of all devices, made part by part; equal parts are made once.

    Args:
        shape: the whole shape.
        parts: of the shape (:func:`parts_of`).
        speeds: relative speed of each device of the whole shape.
        make: ``make(shape, speeds)``, the orders of one part alone.
    """
    made: dict[tuple[Shape, tuple[float, ...]], Orders] = {}
    ops: list[tuple[Op, ...]] = [()] * len(shape.devices)
    every = tuple(range(shape.microbatches))
    for part in parts:
        key = part.shape, tuple(speeds[d] for d in part.devices)
        if key not in made:
            made[key] = make(*key)
        whole = part.microbatches == every  # then nothing is renamed
        for device, order in zip(part.devices, made[key]):
            ops[device] = (
                order if whole else tuple([op._replace(microbatch=part.microbatches[op.microbatch]) for op in order])
            )
    return tuple(ops)
