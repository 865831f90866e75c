"""What a rank sends and receives: every operation of ``torch.distributed``, by peer or by collective."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

_POINT_TO_POINT = {"send": "sent", "recv_": "received"}
# The larger side of a collective, by the position of its argument; it is what all members hold in the end or bring.
_PAYLOAD = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "broadcast_": 0,
    "reduce_": 0,
    "allgather_": 0,
    "_allgather_base_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "gather_": 0,
    "scatter_": 1,
    "alltoall_": 1,
    "alltoall_base_": 1,
}
_NAMES = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
}


@dataclass(slots=True)
class Count:
    """Operations of one sort.

    Attributes:
        calls: How many.
        payload_bytes: Of a transfer, the tensor; of a collective, the larger of what goes in and what comes out.
    """

    calls: int = 0
    payload_bytes: int = 0


class Traffic:
    """Counts since the last :meth:`restart`."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, ...]], Count] = defaultdict(Count)

    def restart(self) -> None:
        """Count from zero."""
        self._counts.clear()

    def see(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count one operation.

        Args:
            func: An overload of ``torch.ops.c10d``.
            args: Its arguments.
        """
        name = func._schema.name.removeprefix("c10d::")
        if name in _POINT_TO_POINT:
            group = _group(func, args)
            members = dist.get_process_group_ranks(group)
            peer = members[int(args[2])]
            self._add(_POINT_TO_POINT[name], (peer,), _size_bytes(args[0]))
        elif name in _PAYLOAD:
            members = dist.get_process_group_ranks(_group(func, args))
            if len(members) > 1:
                self._add(_NAMES[name], tuple(members), _size_bytes(args[_PAYLOAD[name]]))

    def _add(self, what: str, ranks: tuple[int, ...], size_bytes: int) -> None:
        count = self._counts[what, ranks]
        count.calls += 1
        count.payload_bytes += size_bytes

    def as_json(self) -> list[dict[str, Any]]:
        """One entry per sort and group, in a fixed order."""
        return [{"what": what, "ranks": list(ranks), **asdict(c)} for (what, ranks), c in sorted(self._counts.items())]


def answer(func: Any, args: tuple[Any, ...]) -> Any:
    """What an operation of ``torch.ops.c10d`` returns when nobody is there: its tensors as they are, and work done."""
    from torch._C._distributed_c10d import FakeWork

    work = FakeWork().boxed()
    returns = len(func._schema.returns)
    return (args[0], work) if returns == 2 else work


def _group(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
    position = next(i for i, a in enumerate(func._schema.arguments) if a.name == "process_group")
    return dist.ProcessGroup.unbox(args[position])


def _size_bytes(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))
