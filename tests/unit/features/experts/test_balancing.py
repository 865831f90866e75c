"""Balancing losses of a microbatch that runs in slices equal Megatron's own of the whole one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megatron_het.features.experts.runtime import Passes, balance_whole_microbatches
from megatron_het.features.slices.runtime import SlicedSequences
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan.placement import token_blocks
from megatron_het.schedule.cutting import Cutting
from megatron_het.schedule.kinds import Kind

TOKENS, SEQUENCES, HIDDEN, SLICES = 16, 2, 8, 4
NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def router(kind: str, per_token: bool = True, later: int | None = None) -> TopKRouter:
    config = TransformerConfig(
        num_layers=1,
        mtp_num_layers=later,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=0.1,
        calculate_per_token_loss=per_token,
        add_bias_linear=False,
    )
    alone = dist.group.WORLD
    groups: Any = SimpleNamespace(tp=alone, cp=alone, tp_cp=alone, tp_dp_cp=alone)
    torch.manual_seed(3)
    made = TopKRouter(config, pg_collection=groups, is_mtp_layer=later is not None)
    made.set_layer_number(1)
    return made


def loss_of(made: TopKRouter, tokens: torch.Tensor) -> torch.Tensor:
    probs, _ = made(tokens)
    return (probs * torch.arange(4.0)).sum()


def recorded(name: str) -> float:
    values = get_moe_metrics_tracker().metrics[name].values
    found = float(values.sum())
    values.zero_()
    return found


@pytest.fixture(autouse=True)
def empty_log(alone: None) -> None:
    """Megatron's router sums over a group."""
    get_moe_metrics_tracker().metrics.clear()


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", list(NAMES))
@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (7, 1, 5, 3)])
def test_slices_have_the_gradient_and_the_loss_of_the_whole(
    lengths: tuple[int, ...], kind: str, recompute: bool, per_token: bool
) -> None:
    batches = [torch.randn(TOKENS, SEQUENCES, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    stock = router(kind, per_token)
    for batch in batches:
        loss_of(stock, batch).backward()
    expected = recorded(NAMES[kind])

    mine, passes = router(kind, per_token), Passes(SLICES)
    assert balance_whole_microbatches([mine], passes) == [mine]
    for m, batch in enumerate(batches):
        outputs = []
        for j, part in enumerate(batch.split(lengths)):
            passes.current, passes.part = (m, j), (lengths[j], TOKENS)
            if recompute:
                source = part.clone().requires_grad_()
                outputs.append(checkpoint(loss_of, mine, source, use_reentrant=True))
            else:
                outputs.append(loss_of(mine, part))
        for j, output in reversed(list(enumerate(outputs))):
            passes.current, passes.part = (m, j), (lengths[j], TOKENS)
            output.backward()
    torch.testing.assert_close(mine.weight.grad, stock.weight.grad, rtol=1e-5, atol=1e-6)
    assert recorded(NAMES[kind]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["load_balancing_loss", "z_loss"])
def test_a_layer_for_later_tokens_is_logged_where_megatron_logs_it(name: str) -> None:
    """Ranks without experts have a log of Megatron's length, and the sum over all ranks needs equal lengths."""
    batch, lengths, logs = torch.randn(TOKENS, SEQUENCES, HIDDEN), (7, 1, 5, 3), []
    stock, mine, passes = router("aux_loss", later=1), router("aux_loss", later=1), Passes(SLICES)
    for made in (stock, mine):
        made.config.moe_z_loss_coeff = 1e-2
    balance_whole_microbatches([mine], passes)
    for made, parts in ((stock, [TOKENS]), (mine, lengths)):
        for j, part in enumerate(batch.split(parts)):
            passes.current, passes.part = (0, j), (parts[j], TOKENS)
            loss_of(made, part)
        logs.append(get_moe_metrics_tracker().metrics.pop(name).values)
    assert logs[0].tolist() == [0, pytest.approx(float(logs[0].sum()))] and logs[0][1] > 0
    torch.testing.assert_close(logs[1] / (passes.parts if name == "z_loss" else 1), logs[0], rtol=1e-5, atol=0)


def unequal_parts(rank: int) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Of each slice, the tokens that a rank of two with shares 3 and 1 has, and what its routers are told of them."""
    blocks = token_blocks((3, 1), TOKENS // 2)[rank]
    tokens = torch.cat([torch.arange(*block) for block in blocks])
    plan: Any = SimpleNamespace(seq_length=TOKENS)
    sequences = SlicedSequences(plan, Cutting(TOKENS, 2), {}, torch.device("cpu"), part=rank, shares=(3, 1))
    parts = [sequences.part(RankOp(Kind.FORWARD, 0, j, 0, "")) for j in range(2)]
    return [tokens, tokens + TOKENS // 2], parts


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_ranks_with_unequal_parts_have_the_gradient_and_the_loss_of_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.randn(TOKENS, SEQUENCES, HIDDEN)
    stock = router(kind)
    loss_of(stock, batch).backward()
    expected = recorded(NAMES[kind])
    made, counts = [router(kind), router(kind)], [torch.zeros(()), torch.zeros(())]
    meet = threading.Barrier(2, timeout=30)
    mine = threading.local()

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        counts[mine.rank] = tensor.clone()
        meet.wait()
        tensor.copy_(counts[0] + counts[1])
        meet.wait()

    def run(rank: int) -> None:
        mine.rank = rank
        passes = Passes(2, [SimpleNamespace(size=lambda: 2)])  # type: ignore[list-item]
        balance_whole_microbatches([made[rank]], passes)
        outputs = []
        for j, (tokens, part) in enumerate(zip(*unequal_parts(rank), strict=True)):
            passes.current, passes.part = (0, j), part
            outputs.append(loss_of(made[rank], batch[tokens]))
        for output in reversed(outputs):
            output.backward()

    monkeypatch.setattr("megatron_het.features.experts.runtime.dist.all_reduce", all_reduce)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    torch.testing.assert_close(made[0].weight.grad + made[1].weight.grad, stock.weight.grad, rtol=1e-5, atol=1e-6)
    assert recorded(NAMES[kind]) == pytest.approx(expected, rel=1e-6)


def test_the_log_has_the_z_loss_of_ranks_with_unequal_parts() -> None:
    batch = torch.randn(TOKENS, SEQUENCES, HIDDEN)
    stock = router("none")
    stock.config.moe_z_loss_coeff = 1e-2
    loss_of(stock, batch)
    expected, found = recorded("z_loss"), 0.0
    for rank in range(2):
        mine, passes = router("none"), Passes(2, [SimpleNamespace(size=lambda: 2)])  # type: ignore[list-item]
        mine.config.moe_z_loss_coeff = 1e-2
        balance_whole_microbatches([mine], passes)
        for j, (tokens, part) in enumerate(zip(*unequal_parts(rank), strict=True)):
            passes.current, passes.part = (0, j), part
            loss_of(mine, batch[tokens])
        found += recorded("z_loss") / passes.parts
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_backward_before_the_last_slice_is_an_error() -> None:
    mine, passes = router("aux_loss"), Passes(SLICES)
    balance_whole_microbatches([mine], passes)
    passes.current = 0, 0
    output = loss_of(mine, torch.randn(TOKENS // SLICES, SEQUENCES, HIDDEN))
    with pytest.raises(RuntimeError, match=r"slices \[0\] of a microbatch.*needs all"):
        output.backward()


def test_outside_of_the_schedule_is_an_error() -> None:
    mine = router("aux_loss")
    balance_whole_microbatches([mine], Passes(SLICES))
    with pytest.raises(RuntimeError, match="outside of the schedule"):
        mine(torch.randn(TOKENS, SEQUENCES, HIDDEN))
    mine.eval()
    mine(torch.randn(TOKENS, SEQUENCES, HIDDEN))
