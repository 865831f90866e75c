"""Context-parallel parts by measured speed: ``--het-measured-cp-shares``.

A rank of context parallelism does work in proportion to its part of a sequence: its tokens in linear layers, and the
queries of all ranks against its keys.  So ranks end together if parts are in proportion to their speeds, which is
HexiSeq's idea.  Every rank times one layer on an average slice, forward and backward, without the others; all measure
at the same time, because devices of one node may share what makes them fast.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import Kernel, Scores, Setting, forward_backward
from megatron_het.auto_batch.exchange import Exchange, ExchangeError, end_all
from megatron_het.device import Platform
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import Placement, Plan, Replica
from megatron_het.plan.run_config import HetConfig

WHOLE = 100
"""Shares of a replica add up to about this: measured speeds are not better than a part in a hundred."""
_EQUAL = 0.05  # of the mean; ranks closer than this are alike
_TIMEOUT_S = 300.0  # for another rank
_REPETITIONS, _SECONDS = 5, 1.0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measured_on(plan: Plan, platform: Platform, rank: int) -> Plan:
    """:func:`with_measured_shares` together with the other processes that have been started.

    Raises:
        SystemExit: A rank failed or did not come; every rank says why.
    """
    exchange: Exchange | None = None
    try:
        exchange = Exchange(rank, plan.world_size, _TIMEOUT_S)
        return with_measured_shares(plan, platform, rank, exchange)
    except (ExchangeError, RuntimeError) as error:  # of the store, or of torch: out of memory, no kernel
        end_all(exchange, "--het-measured-cp-shares", rank, error)


def with_measured_shares(plan: Plan, platform: Platform, rank: int, exchange: Exchange) -> Plan:
    """The plan with parts by measured speed; the same on all ranks.

    Args:
        plan: At least one replica has context parallelism.
        platform: Of this machine.
        rank: Of this process.
        exchange: With the others.

    Returns:
        The plan with new ``cp_shares`` in all replicas of context parallelism.

    Raises:
        ExchangeError: A rank has failed, or does not answer.
    """
    placement = Placement(plan)
    where = placement.locate(rank)
    replica = plan.stages[where.stage].replicas[where.replica]
    exchange.gather("cp-shares/ready", True)
    seconds = _seconds(plan, replica, platform, exchange) if replica.cp > 1 else 0.0
    everyone = exchange.gather("cp-shares/seconds", seconds)
    stages = tuple(
        replace(stage, replicas=tuple(_shared(replica, everyone) for replica in stage.replicas))
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def shares_of(seconds: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to speeds; none where all are about as fast.

    Args:
        seconds: For the same work, by rank of context parallelism.
    """
    mean = statistics.fmean(seconds)
    if max(seconds) - min(seconds) <= _EQUAL * mean:
        return ()
    total = sum(1 / s for s in seconds)
    return tuple(max(1, round(WHOLE / (s * total))) for s in seconds)


def described(plan: Plan) -> str:
    """The shares in one line."""
    rows = [
        f"stage {s}, ranks {replica.ranks[0]} to {replica.ranks[-1]}: "
        + (" ".join(map(str, replica.cp_shares)) if replica.cp_shares else "equal")
        for s, stage in enumerate(plan.stages)
        for replica in stage.replicas
        if replica.cp > 1
    ]
    more = f"; and {len(rows) - 8} replicas more" if len(rows) > 8 else ""
    return "context-parallel parts by measured speed: " + "; ".join(rows[:8]) + more


def _shared(replica: Replica, seconds: Sequence[float]) -> Replica:
    """A replica with parts by the speed of each tensor-parallel group, which is that of its slowest rank."""
    if replica.cp == 1:
        return replica
    groups = [replica.tp_group(part) for part in range(replica.cp)]
    return replace(replica, cp_shares=shares_of([max(seconds[rank] for rank in group) for group in groups]))


def _seconds(plan: Plan, replica: Replica, platform: Platform, exchange: Exchange) -> float:
    """Mean time of a layer's work on this rank's equal part of a slice.

    The mean, because a device that pauses now and then is a slow one.
    """
    work = _work(plan, replica, platform.device)
    work()  # kernels are chosen and compiled
    platform.synchronize()
    count, start_s = 0, time.perf_counter()
    while True:
        work()
        platform.synchronize()
        exchange.check()
        count += 1
        elapsed_s = time.perf_counter() - start_s
        if count >= _REPETITIONS and elapsed_s >= _SECONDS:
            return elapsed_s / count


def _work(plan: Plan, replica: Replica, device: torch.device) -> Callable[[], None]:
    """Forward and backward of one dense layer with the shapes of the plan's model, as a function.

    The queries of half a slice against all keys of the rank are as many pairs as a causal slice has in the mean.
    Layers with experts or latent attention are measured as dense ones: what counts is how devices compare.
    """
    model, dtype = plan.model, _DTYPES[plan.training.precision]
    slices = max(1, int(plan.schedule.parameters.get("slices", 1)))
    batch, tp = plan.training.micro_batch_size, replica.tp
    heads, groups = max(1, model.num_attention_heads // tp), max(1, model.num_query_groups // tp)
    width = model.hidden_size // model.num_attention_heads
    ffn = max(1, (model.ffn_hidden_size or 4 * model.hidden_size) // tp)
    tokens = max(1, model.seq_length // (slices * replica.cp))
    queries, keys = max(1, model.seq_length // (2 * slices)), max(1, model.seq_length // replica.cp)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    hidden = make(tokens * batch, model.hidden_size).requires_grad_()
    sizes = ((heads + 2 * groups) * width, 2 * ffn), (heads * width, ffn)
    ins = [make(model.hidden_size, size).requires_grad_() for size in sizes[0]]
    outs = [make(size, model.hidden_size).requires_grad_() for size in sizes[1]]
    q, grad = make(queries, batch, heads, width), make(queries, batch, heads, width)
    k, v = make(keys, batch, groups, width), make(keys, batch, groups, width)
    kernel, scale = _kernel(q), width**-0.5

    def work() -> None:
        for into, out in zip(ins, outs, strict=True):
            (hidden @ into)[:, : out.shape[0]].matmul(out).sum().backward()
        if kernel is not None:
            forward_backward(kernel, (q, k, v), grad, Scores(causal=False, scale=scale))

    return work


def _kernel(query: torch.Tensor) -> Kernel | None:
    """The kernel of slices on this device; None where there is none, and only linear layers are timed."""
    try:
        return choose_kernel(Setting.of(query))
    except ValueError:
        return None


def measured_config(config: HetConfig, device: Platform) -> HetConfig:
    """Returns the configuration with parts that this run's devices were measured for, on all ranks at once.

    Raises:
        PlanError: The plan cannot have these parts.
    """
    assert config.plan is not None
    rank = int(os.environ.get("RANK", "0"))
    plan = measured_on(config.plan, device, rank)
    check_plan_alone(plan)
    if rank == 0:
        sys.stderr.write(f"megatron_het: {described(plan)}\n")
        sys.stderr.flush()
    return replace(config, plan=plan)
