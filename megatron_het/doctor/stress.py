"""Repeats the plan's real transfers in their real order, without computation.

Programs, executor and channels are those of the training.  Only the computation of passes is left out:
a pass checks its input and sends a tensor of the right shape, whose value identifies the
pass.  A transport that hangs, reorders or corrupts data under load fails here within seconds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.device import Platform
from megatron_het.distributed import PairGroups
from megatron_het.doctor.check import Answers, Check, Finding, Names, Seat, amount, dtype_of, rate
from megatron_het.doctor.links import chosen_transport
from megatron_het.doctor.participant import hear
from megatron_het.lowering.programs import build, posted_for
from megatron_het.lowering.ranks import RankOp, boundary_map, edges, lower
from megatron_het.plan import Placement, Plan
from megatron_het.report import Timeline
from megatron_het.runtime.channels import Channels
from megatron_het.runtime.executor import Executor
from megatron_het.runtime.feature import Call, Iteration
from megatron_het.schedule.ir import Kind
from megatron_het.schedule.kinds import executed_by
from megatron_het.store.torch_store import TorchStore

_TIMEOUT_S = 15.0
_WIDTHS = (16, 1)  # the hidden size is divided by these: first a short round, then the real one
_LONG_S = 2.0
_VALUES = 97  # whole numbers that every precision holds exactly
_EXECUTED = executed_by("compute") | executed_by("transfer")


@dataclass
class Stress(Check):
    """Iterations of the transfers of the training's program."""

    seconds: float = 5.0
    name: str = field(default="stress", init=False)
    limit_s: float = field(default=45.0, init=False)
    needs_all: bool = field(default=True, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Iterations, bytes that this rank sent, and seconds."""
        platform = seat.platform()
        transport = chosen_transport(seat, platform).transport
        with _world(seat, platform):
            traffic = Traffic(seat.plan, seat.rank, transport, platform)
            try:
                return self._repeat(seat, traffic) | {"transport": transport}
            finally:
                traffic.close()

    def _repeat(self, seat: Seat, traffic: "Traffic") -> dict[str, Any]:
        """Repeat iterations until rank 0 ends them; all ranks run the same number."""
        width = max(_WIDTHS)
        sent, count, start_s = 0, 0, time.perf_counter()
        while True:
            began_s = time.perf_counter()
            sent += traffic.iterate(width)
            count += 1
            if seat.rank == 0:
                took_s, total_s = time.perf_counter() - began_s, time.perf_counter() - start_s
                wider = min(_WIDTHS) if took_s * width < _LONG_S else width
                seat.store.put(f"next/{count}", 0 if total_s > self.seconds else wider)
            width = int(hear(seat.store, f"next/{count}", 2 * _TIMEOUT_S))
            if not width:
                return {"iterations": count, "bytes": sent, "seconds": time.perf_counter() - start_s}

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """Returns one finding; ranks report failures themselves."""
        total = sum(answer["bytes"] for answer in answers.values())
        first = next(iter(answers.values()))
        if not total:
            return [self.ok("all ranks", "one stage: nothing travels between stages")]
        seconds = max(answer["seconds"] for answer in answers.values())
        text = (
            f"{first['iterations']} iterations of the plan's transfers over {first['transport']} in {seconds:.1f} s, "
            f"{amount(total)} in all, {rate(total / seconds)}"
        )
        return [self.ok(names.of(answers), text)]


@contextmanager
def _world(seat: Seat, platform: Platform) -> Iterator[None]:
    """``torch.distributed`` over all ranks, for the duration of a block."""
    store = TorchStore(seat.store, _TIMEOUT_S, name="world")
    backend, size, bound = platform.default_backend, len(seat.hosts), timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=size, timeout=bound)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Copying(Executor):
    """The executor with passes that compute nothing."""

    sent_bytes = 0

    def _forward(self, op: RankOp, call: Call, state: Iteration) -> None:
        self._pass(op, Kind.RECV_FORWARD, Kind.SEND_FORWARD, call, state)

    def _backward(self, op: RankOp, call: Call, state: Iteration) -> None:
        self._pass(op, Kind.RECV_BACKWARD, Kind.SEND_BACKWARD, call, state)

    def _pass(self, op: RankOp, arrives: Kind, sends: Kind, call: Call, state: Iteration) -> None:
        """Check the received values, and send values that identify microbatch and slice."""
        mark, found = mark_of(op, sends), self._arrived(arrives, op.key, state)
        if found is not None and not bool((found == mark).all()):
            received = (o for o in self.programs[False].ops if (o.kind, o.key) == (arrives, op.key))
            senders = ", ".join(str(rank) for rank in sorted({o.peer for o in received}))
            raise RuntimeError(f"{op.label}: rank {senders} sent other values than have arrived")
        result = torch.full(call.shape(op), mark, dtype=call.dtype, device=call.device)
        self._keep_for_send(sends, op.key, result, call, state)

    def _send(self, op: RankOp, call: Call, state: Iteration) -> None:
        self.sent_bytes += state.to_send[op.kind, op.key][call.rows(op)].nbytes
        super()._send(op, call, state)


class Traffic:
    """This rank's transfers of an iteration, as in the training."""

    def __init__(self, plan: Plan, rank: int, transport: str, platform: Platform) -> None:
        self._plan, self._device = plan, platform.device
        programs = build(plan, rank)
        program, placement = programs[False], Placement(plan)
        boundaries = boundary_map(placement)
        where = placement.locate(rank)
        device = program.shape.device(where.stage, where.replica)
        self._rows = boundaries.local_length(device, rank)
        lowered = lower(posted_for(transport, program), boundaries, device, rank)
        self._lowered = replace(lowered, ops=tuple(op for op in lowered.ops if op.kind in _EXECUTED), losses_known=None)
        self._pairs = PairGroups(rank, _TIMEOUT_S)
        self._channels = Channels.open(
            self._pairs,
            "transfers",
            edges(list(programs.values()), boundaries),
            transport,
            _TIMEOUT_S,
            rank,
            pending_per_edge=4 if program.shape.slices > 1 else None,
            one_order=not any(p.attention_units for p in programs.values()),
        )

    def iterate(self, divisor: int) -> int:
        """Run one iteration with a divided hidden size; returns the bytes that were sent.

        Raises:
            TransferError: A transfer failed or timed out.
            RuntimeError: A received value is not the one that was sent.
        """
        executor = _Copying(
            {False: self._lowered},
            self._channels,
            loss_chunk=None,
            num_chunks=0,
            tells_chunk=False,
            timeline=Timeline(),
        )
        executor.run(
            Call(
                forward_step_func=lambda: None,  # nothing calls it
                data_iterators=[],
                models=[],
                config=SimpleNamespace(param_sync_func=None),
                num_microbatches=self._lowered.num_microbatches,
                length=self._rows,
                hidden_size=max(1, self._plan.model.hidden_size // divisor),
                sequences=self._plan.training.sequences,
                args=None,
                dtype=dtype_of(self._plan),
                device=self._device,
                forward_only=False,
                collect_non_loss_data=False,
            )
        )
        return executor.sent_bytes

    def close(self) -> None:
        """Destroy the channels and their groups."""
        self._channels.close()
        self._pairs.close()


def mark_of(op: RankOp, direction: Kind) -> float:
    """The value of a boundary tensor, from microbatch, slice and direction, which both ends of a transfer have."""
    return float((7 * op.microbatch + 3 * op.slice + (direction is Kind.SEND_BACKWARD)) % _VALUES)
