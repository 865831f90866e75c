"""Tensors of collectives that are done die where the rank drops them."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_het.dry_run.tracker import let_go

ROUNDS = 500
LIMIT = timedelta(seconds=60)


def test_no_tensor_of_work_that_is_done_stays_alive() -> None:
    store = dist.HashStore()
    errors: list[BaseException] = []

    def peer() -> None:
        try:
            group = dist.ProcessGroupGloo(store, 1, 2, LIMIT)
            for _ in range(ROUNDS):
                group.allreduce([torch.zeros(30)]).wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    group = dist.ProcessGroupGloo(store, 0, 2, LIMIT)
    late = 0
    for _ in range(ROUNDS):
        tensor = torch.zeros(30)
        alive = weakref.finalize(tensor.untyped_storage(), int)
        group.allreduce([tensor]).wait()
        del tensor
        let_go()  # without it some 50 are alive
        late += alive.alive
    thread.join(60)
    assert not errors and not thread.is_alive()
    assert late == 0
