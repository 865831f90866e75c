"""Measures one device: ``python -m megatron_het.auto_batch.measure REQUEST FD`` in a process of its own.

The process runs the real training of one rank under the plan of a ZeRO stage: real layers, real optimizer state,
real shards.  The other ranks are not there; collectives with them take no time and leave finite values, so that
what is timed is compute alone (Poplar, section 3.1: the time of collectives is subtracted).  Commands and
answers are JSON, over one connection.  Running out of memory is an answer.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megatron_het.device import Platform
from megatron_het.dry_run.run import join_alone, parse_alone, train_alone
from megatron_het.plan.run_config import HetConfig
from megatron_het.runtime.feature import Call, Iteration, optimizer_of
from megatron_het.runtime.session import HetSession

# A measured pass is no training step: nothing is saved, logged, repeated or loaded.
_LAST = ("--num-workers", "0", "--eval-iters", "0", "--eval-interval", "1000000", "--rerun-mode", "disabled")
_MOST_REPETITIONS = 10_000


class _Done(BaseException):
    """Measuring is over; nothing of Megatron may take it for an error."""


class Commands:
    """Holds what the parent process asks, and the answers.

    Args:
        connection: To the parent.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def next(self) -> dict[str, Any]:
        """The next command; an end of the parent ends measuring."""
        try:
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise _Done from None

    def is_waiting(self) -> bool:
        """Whether another command has come."""
        return self._connection.poll()

    def answer(self, **values: Any) -> None:
        """Send an answer."""
        self._connection.send_bytes(json.dumps(values).encode())


class MeasuringSession(HetSession):
    """A session whose first iteration becomes the measurements.

    Args:
        config, platform, rank: As for :class:`HetSession`.
        commands: What to measure.
        memory: Open while memory is measured; closed before times are.
    """

    def __init__(
        self, config: HetConfig, platform: Platform, rank: int, commands: Commands, memory: contextlib.ExitStack
    ) -> None:
        super().__init__(config, platform, rank)
        self._links: dict[str, list[float]] = {}
        self._commands, self._memory = commands, memory
        self._rank = rank
        self._pass_s = 0.0

    def know_links(self, seconds: dict[str, list[float]]) -> None:
        """Sets what collectives take, for the first answer."""
        self._links = seconds

    def forward_backward(self, **keywords: Any) -> list[Any]:
        """Measures until there is nothing more to be measured; never returns."""
        self._commands.answer(open=True, amounts=_amounts(keywords["model"]), links=self._links)
        while True:
            command = self._commands.next()
            if command["do"] == "try":
                self._commands.answer(**self._try(command["size"], keywords))
            elif command["do"] == "time":
                self._memory.close()  # counting bytes takes time of every operator
                self._time(command, keywords)
            else:
                raise _Done

    def _try(self, size: int, keywords: dict[str, Any]) -> dict[str, Any]:
        """Whether an iteration with one pass of ``size`` sequences fits, and how long the pass took."""
        try:
            self._step(size, keywords)  # the optimizer's state comes with the first step
            self._step(size, keywords)
        except torch.OutOfMemoryError as error:
            problem = str(error)
        else:
            return {"fits": True, "seconds": self._pass_s}
        gc.collect()  # the traceback held the pass's tensors
        if self._platform.is_cuda:
            torch.cuda.empty_cache()
        return {"fits": False, "problem": problem}

    def _time(self, command: dict[str, Any], keywords: dict[str, Any]) -> None:
        """Repeat a pass, answer when it has been repeated enough, and go on until the next command comes.

        A device that rests while others are measured would make them faster than they are in training.
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
            if answered and self._commands.is_waiting():
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
        batches = _repeated(_batch(get_args(), size))
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


def _repeated(batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The batch again and again, in a dictionary of its own: Megatron changes what it gets."""
    while True:
        yield dict(batch)


def _amounts(models: Any) -> dict[str, int]:
    """Returns what the collectives of a pass move."""
    buffers = [buffer for model in (models if isinstance(models, list) else [models]) for buffer in model.buffers]
    held = [buffer for buffer in buffers if buffer.param_data is not None]  # ZeRO-0 has no buffer of parameters
    return {
        "parameter_bytes": sum(buffer.param_data.nbytes for buffer in held),
        "gradient_bytes": sum(buffer.grad_data.nbytes for buffer in buffers),
        "buckets": sum(len(buffer.buckets) for buffer in buffers),
    }


def _batch(args: Any, size: int) -> dict[str, torch.Tensor]:
    """Sequences of random tokens."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure until the parent says that it is enough."""
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
    os._exit(0)  # Megatron's threads and groups are of no use any more


def _run(request: dict[str, Any], commands: Commands, memory: contextlib.ExitStack) -> None:
    """Start the rank's training, which the session turns into measurements."""
    from megatron_het import device as platform
    from megatron_het.arguments import hooks
    from megatron_het.auto_batch.exchange import measure_links
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
        sessions[0].know_links(measure_links(request, args.distributed_backend, device.device))
    join_alone(rank, world_size, args.distributed_backend)
    memory.enter_context(limited_memory(device, request["limit_bytes"]))
    train_alone(args)


if __name__ == "__main__":
    raise SystemExit(main())
