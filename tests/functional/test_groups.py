"""Groups of a plan over light rank processes: created among members only, more than once, and in bounded time."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.scale_ranks import counted, edges_of, meet, plan_of, run_ranks, start_of, start_world
from megatron_het.distributed import GroupError, build_groups
from megatron_het.lowering.programs import build
from megatron_het.plan import Placement
from megatron_het.runtime.channels import Channels

LIMIT_S = 60.0
PLAN = plan_of(16, 8, mixed=True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # processes that are forked from one with threads may hang


def test_every_edge_carries_and_groups_are_as_counted() -> None:
    answers, _ = run_ranks(16, start_of(PLAN, LIMIT_S), LIMIT_S)
    assert sum(a["moved"] for a in answers) == len(edges_of(PLAN, list(build(PLAN).values()))) > 0
    assert max(a["groups"] - a["peers"] for a in answers) == counted(PLAN).groups - counted(PLAN).peers <= 10


def test_groups_are_created_again_after_they_were_closed() -> None:
    def body(rank: int, store: dist.Store) -> dict[str, Any]:
        start_world(rank, 16, store, LIMIT_S)
        sums = []
        for turn in range(2):
            groups = build_groups(Placement(PLAN), tied_embeddings=True, timeout_s=LIMIT_S)
            value = torch.tensor([float(rank)])
            dist.all_reduce(value, group=groups["stage"])
            links = groups.pairs.connect([(0, 15)], "gloo", "ends", one_order=True)
            ends = Channels(links, "gloo", LIMIT_S, rank)
            if rank == 0:
                ends.send(torch.tensor([7.0 + turn]), 15, "an element")
                ends.wait_sends()
            if rank == 15:
                ends.wait_receive(ends.receive(value, 0, "an element"))
            sums.append(float(value))
            meet(store, 16, f"turn {turn}", LIMIT_S)
            groups.close()
        return {"sums": sums}

    answers, _ = run_ranks(16, body, LIMIT_S)
    assert [a["sums"] for a in answers] == [[1.0 + 4 * (r // 2)] * 2 for r in range(15)] + [[7.0, 8.0]]


def test_a_member_that_does_not_come_ends_the_wait_of_its_peers_only() -> None:
    def body(rank: int, store: dist.Store) -> dict[str, Any]:
        start_world(rank, 16, store, LIMIT_S)
        began, text = time.monotonic(), ""
        if rank != 5:
            try:
                build_groups(Placement(PLAN), tied_embeddings=False, timeout_s=6.0)
            except GroupError as error:
                text = str(error)
        took = time.monotonic() - began
        meet(store, 16, "done", LIMIT_S)
        return {"text": text, "took": took}

    answers, _ = run_ranks(16, body, LIMIT_S)
    failed = [rank for rank, answer in enumerate(answers) if answer["text"]]
    assert failed == [4]  # the stages of two ranks; ranks of other stages have all their groups
    assert "group 'stage' of ranks 4, 5 was not created on rank 4 (timeout 6 s)" in answers[4]["text"]
    assert answers[4]["took"] < 30
