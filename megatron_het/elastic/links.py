"""A group of processes that outlives sessions: gloo without ``torch.distributed``'s one world.

State moves between the ranks of two plans, so the ranks of neither can name the members.  This group is made over any
processes that meet at a store; it is no part of the world that a session builds and destroys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class Links:
    """Messages between some processes.

    Args:
        store: Where they meet; nobody else uses its keys.
        rank: This process's number among them.
        size: How many there are.
        timeout_s: Bound on every wait, in seconds.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._store = store  # the group holds its part in C++ only
        self._group: Any = None
        if size > 1:
            self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))

    def gather(self, document: Any) -> list[Any]:
        """A JSON document of every member, by rank.  Collective.

        Raises:
            RuntimeError: A member has gone, or the connections are closed.
        """
        if self.size == 1:
            return [document]
        group = self._opened()
        text = np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        group.allgather([lengths], [torch.tensor([len(text)])]).wait()
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = torch.from_numpy(text.copy())
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        group.allgather([texts], [padded]).wait()
        return [
            json.loads(found[: int(length)].numpy().tobytes()) for found, length in zip(texts, lengths, strict=True)
        ]

    def swap(self, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send and receive flat host tensors; the messages between two members are in one order on both.

        Args:
            outgoing: Receiver and tensor.
            incoming: Sender and tensor to fill.

        Raises:
            RuntimeError: A member has gone, or the connections are closed.
        """
        if not incoming and not outgoing:
            return
        group = self._opened()
        pending = [group.recv([tensor], peer, 0) for peer, tensor in incoming]
        pending += [group.send([tensor], peer, 0) for peer, tensor in outgoing]
        for work in pending:
            work.wait()

    def close(self) -> None:
        """Close the connections, once no operation uses them any more; further calls do nothing.  Any thread may call.

        What waits here goes on waiting: gloo wakes nobody.  Members that wait for this one get an error.
        """
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def _opened(self) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError("the connections are closed")
        return group
