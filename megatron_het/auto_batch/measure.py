"""Measures one device, for automatic batches and for context-parallel parts.

``python -m megatron_het.auto_batch.measure REQUEST FD``, in its own process, runs the real training of one rank
under the plan of a ZeRO stage: real layers, real optimizer state, real shards.  The other ranks are simulated:
collectives with them take no time and leave finite values, so that only compute is timed (Poplar, section 3.1:
the time of collectives is subtracted).  Commands and answers are JSON messages over one connection.  Running out of
memory is an answer, not an error.
"""

import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import Kernel, Scores, Setting, forward_backward
from megatron_het.auto_batch.allocation import SIZES_BYTES
from megatron_het.device import Platform
from megatron_het.dry_run.run import join_alone, parse_alone, train_alone
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import Placement, Plan, Replica
from megatron_het.plan.run_config import HetConfig
from megatron_het.runtime.feature import Call, Iteration, optimizer_of
from megatron_het.runtime.session import HetSession
from megatron_het.store.job import Exchange, ExchangeError, end_all, peer_store
from megatron_het.store.torch_store import TorchStore

# Context-parallel parts by measured speed (``--het-measured-cp-shares``), HexiSeq's idea.  A rank's work grows with its
# part of a sequence, so ranks end together if parts are in proportion to their speeds.  Every rank times one layer on
# an average slice, all at the same time, because devices of one node may share cores, power or buses.


WHOLE = 100  # shares of a replica add up to about this: measured speeds are not more precise than 1 %
_EQUAL = 0.05  # share of the mean; if all seconds are within it, the parts are equal
_TIMEOUT_S = 300.0  # bound on the wait for another rank
_REPETITIONS, _SECONDS = 5, 1.0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def with_measured_shares(plan: Plan, platform: Platform, rank: int, exchange: Exchange) -> Plan:
    """The plan with context-parallel parts by measured speed; the same on all ranks.

    Args:
        plan: A plan in which at least one replica has context parallelism.

    Returns:
        The plan with new ``cp_shares`` in all replicas of context parallelism.

    Raises:
        ExchangeError: A rank has failed, or does not answer.
    """
    where = Placement(plan).locate(rank)
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
    """Integer shares in proportion to speeds, from seconds for the same work; empty if all are nearly equal."""
    mean = statistics.fmean(seconds)
    if max(seconds) - min(seconds) <= _EQUAL * mean:
        return ()
    total = sum(1 / s for s in seconds)
    return tuple(max(1, round(WHOLE / (s * total))) for s in seconds)


def described(plan: Plan) -> str:
    """One line of text with the shares of the first eight replicas."""
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
    """A replica with parts by the speed of each tensor-parallel group, that of the group's slowest rank."""
    if replica.cp == 1:
        return replica
    groups = [replica.tp_group(part) for part in range(replica.cp)]
    return replace(replica, cp_shares=shares_of([max(seconds[rank] for rank in group) for group in groups]))


def _seconds(plan: Plan, replica: Replica, platform: Platform, exchange: Exchange) -> float:
    """Mean seconds of a layer's work on this rank's part of a slice, with equal parts.

    The mean and not the median, so that pauses of a device count.
    """
    work = _work(plan, replica, platform.device)
    work()  # warm-up: kernels are chosen and compiled
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
    """Returns a function that runs forward and backward of one dense layer with the shapes of the plan's model.

    The queries of half a slice with all keys of the rank are as many pairs as a causal slice has on average.
    Layers with experts or latent attention are measured as dense ones: only the ratio between devices is used.
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
    """The attention kernel of slices on this device; None if there is none: then only linear layers are timed."""
    try:
        return choose_kernel(Setting.of(query))
    except ValueError:
        return None


def measured_config(config: HetConfig, device: Platform) -> HetConfig:
    """Returns the configuration with context-parallel parts by the measured speed of the devices; on all ranks.

    Raises:
        PlanError: The plan does not allow these parts.
        SystemExit: A rank failed or did not arrive; every rank prints the reason.
    """
    assert config.plan is not None
    rank = int(os.environ.get("RANK", "0"))
    exchange: Exchange | None = None
    try:
        exchange = Exchange(rank, config.plan.world_size, _TIMEOUT_S)
        plan = with_measured_shares(config.plan, device, rank, exchange)
    except (ExchangeError, RuntimeError) as error:  # RuntimeError: from torch, out of memory or without a kernel
        end_all(exchange, "--het-measured-cp-shares", rank, error)
    check_plan_alone(plan)
    if rank == 0:
        sys.stderr.write(f"megatron_het: {described(plan)}\n")
    return replace(config, plan=plan)


# Flags without which Megatron would evaluate, start data workers or check results again.
_LAST = ("--num-workers", "0", "--eval-iters", "0", "--rerun-mode", "disabled")
_MOST_REPETITIONS = 10_000
_LINK_REPETITIONS = 3


class _Done(BaseException):
    """Ends measuring; a BaseException, so that no handler of Megatron catches it."""


class Commands:
    """Receives the parent process's commands over a connection, and sends answers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def next(self) -> dict[str, Any]:
        """The next command; raises _Done if the parent has closed the connection."""
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise _Done from None

    def answer(self, **values: Any) -> None:
        """Send an answer."""
        self.connection.send_bytes(json.dumps(values).encode())


class MeasuringSession(HetSession):
    """A session that measures in its first iteration.

    Args:
        config, platform, rank: As for :class:`HetSession`.
        memory: Holds the memory limit while sizes are tried; closed before passes are timed.
    """

    def __init__(
        self, config: HetConfig, platform: Platform, rank: int, commands: Commands, memory: contextlib.ExitStack
    ) -> None:
        super().__init__(config, platform, rank)
        self.links_s: dict[str, list[float]] = {}
        self._commands, self._memory = commands, memory
        self._rank = rank
        self._pass_s = 0.0

    def forward_backward(self, **keywords: Any) -> list[Any]:
        """Run the parent's commands; does not return, but raises _Done at the end."""
        self._commands.answer(open=True, amounts=_amounts(keywords["model"]), links=self.links_s)
        while True:
            command = self._commands.next()
            if command["do"] == "try":
                self._commands.answer(**self._try(command["size"], keywords))
            elif command["do"] == "time":
                self._memory.close()  # counting bytes slows every operator
                self._time(command, keywords)
            else:
                raise _Done

    def _try(self, size: int, keywords: dict[str, Any]) -> dict[str, Any]:
        """Returns whether an iteration with one pass of ``size`` sequences fits, and the pass's seconds."""
        try:
            self._step(size, keywords)  # the first step allocates the optimizer's state
            self._step(size, keywords)
        except torch.OutOfMemoryError as error:
            problem = str(error)
        else:
            return {"fits": True, "seconds": self._pass_s}
        gc.collect()  # frees the pass's tensors, which the traceback held
        if self._platform.is_cuda:
            torch.cuda.empty_cache()
        return {"fits": False, "problem": problem}

    def _time(self, command: dict[str, Any], keywords: dict[str, Any]) -> None:
        """Repeat a pass, answer after enough repetitions, and continue until the next command.

        If this device were idle while others are still measured, these would be faster than in training.
        """
        found: list[float] = []
        start_s, answered = time.perf_counter(), False
        for repetition in range(_MOST_REPETITIONS):
            self._step(command["size"], keywords)
            if repetition:  # the first one warms up
                found.append(self._pass_s)
            enough = len(found) >= command["repetitions"] and time.perf_counter() - start_s >= command["seconds"]
            if enough and not answered:
                self._commands.answer(seconds=sorted(found))
                answered = True
            if answered and self._commands.connection.poll():
                return

    def _step(self, size: int, keywords: dict[str, Any]) -> None:
        """One iteration with one pass of ``size`` sequences on this rank."""
        from megatron.core.utils import get_model_config
        from megatron.training import get_args

        training = self.plan.training
        self.plan = replace(self.plan, training=replace(training, micro_batch_sizes=(size,) * self.plan.world_size))
        models = keywords["model"] if isinstance(keywords["model"], list) else [keywords["model"]]
        for model in models:
            model.zero_grad_buffer()
        optimizer = optimizer_of(get_model_config(models[0]))
        optimizer.zero_grad()
        batch = _batch(get_args(), size)
        batches = (dict(batch) for _ in itertools.count())  # copies, because Megatron changes a batch
        iterators: Any = [batches] * len(models) if isinstance(keywords["data_iterator"], list) else batches
        count = self.plan.world_size
        self._platform.synchronize()
        self._started_s = time.perf_counter()
        super().forward_backward(**{**keywords, "data_iterator": iterators, "num_microbatches": count})
        optimizer.step()
        self._platform.synchronize()

    def _finalize(self, call: Call, state: Iteration, force_all_reduce: bool) -> None:
        self._platform.synchronize()
        self._pass_s = time.perf_counter() - self._started_s
        super()._finalize(call, state, force_all_reduce)


def _amounts(models: Any) -> dict[str, int]:
    """Returns the bytes that the collectives of a pass move, and their number (``buckets``)."""
    buffers = [buffer for model in (models if isinstance(models, list) else [models]) for buffer in model.buffers]
    held = [buffer for buffer in buffers if buffer.param_data is not None]  # ZeRO-0 has no buffer of parameters
    return {
        "parameter_bytes": sum(buffer.param_data.nbytes for buffer in held),
        "gradient_bytes": sum(buffer.grad_data.nbytes for buffer in buffers),
        "buckets": sum(len(buffer.buckets) for buffer in buffers),
    }


def _batch(args: Any, size: int) -> dict[str, torch.Tensor]:
    length = args.seq_length
    generator = torch.Generator().manual_seed(size)
    tokens = torch.randint(0, min(args.padded_vocab_size, 1000), (size, length + 1), generator=generator)
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(size, length),
        "position_ids": torch.arange(length).expand(size, length).contiguous(),
    }
    if args.create_attention_mask_in_dataloader:
        batch["attention_mask"] = torch.ones(length, length).tril().lt(0.5).expand(size, 1, length, length)
    return batch


def measure_links(request: Mapping[str, Any], backend: str, device: Any) -> dict[str, list[float]]:
    """Seconds of an all-gather and a reduce-scatter over all ranks.  Collective over the measuring processes.

    Args:
        request: ``rank``, ``world_size`` and ``store`` (prefix, timeout_s).
        backend: Backend of ``torch.distributed``.
        device: Device of the tensors.

    Returns:
        ``gather`` and ``reduce``: medians for whole tensors of ``SIZES_BYTES``, in that order.
    """
    place, world_size = request["store"], request["world_size"]
    timeout = timedelta(seconds=place["timeout_s"])
    store = TorchStore(peer_store(place["timeout_s"]), place["timeout_s"], name=place["prefix"])
    dist.init_process_group(backend, store=store, rank=request["rank"], world_size=world_size, timeout=timeout)
    found: dict[str, list[float]] = {"gather": [], "reduce": []}
    for size in SIZES_BYTES:
        part = torch.zeros(size // 4 // world_size, device=device)
        whole = torch.zeros(part.numel() * world_size, device=device)
        found["gather"].append(_median(partial(dist.all_gather_into_tensor, whole, part), device))
        found["reduce"].append(_median(partial(dist.reduce_scatter_tensor, part, whole), device))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _median(call: Callable[[], Any], device: Any) -> float:
    times = []
    for _ in range(_LINK_REPETITIONS + 1):
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure until the parent ends measuring."""
    request_file, descriptor = sys.argv[1:] if argv is None else argv
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    commands = Commands(Connection(int(descriptor)))
    with contextlib.ExitStack() as memory:
        try:
            _run(request, commands, memory)
        except torch.OutOfMemoryError as error:  # before the first pass
            commands.answer(open=False, problem=str(error))
        except _Done:
            pass
    os._exit(0)  # without shutting down Megatron's threads and groups


def _run(request: dict[str, Any], commands: Commands, memory: contextlib.ExitStack) -> None:
    """Start the training of this rank with a :class:`MeasuringSession`."""
    from megatron_het import device as platform
    from megatron_het.arguments import hooks
    from megatron_het.device.memory import limited_memory

    rank, world_size = request["rank"], request["world_size"]
    device = platform.activate()
    sys.argv = ["auto_batch", *request["words"], *_LAST, "--het-plan", request["plan"]]
    sessions: list[MeasuringSession] = []

    def make_session(config: HetConfig, kind: Platform, own: int) -> MeasuringSession:
        sessions.append(MeasuringSession(config, kind, own, commands, memory))
        return sessions[-1]

    hooks.install(make_session=make_session)
    args = parse_alone()
    if device.is_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if request["store"]:
        sessions[0].links_s = measure_links(request, args.distributed_backend, device.device)
    join_alone(rank, world_size, args.distributed_backend)
    memory.enter_context(limited_memory(device, request["limit_bytes"]))
    train_alone(args)


if __name__ == "__main__":
    raise SystemExit(main())
