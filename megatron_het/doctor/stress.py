"""The plan's real transfers in their real order, again and again, without computing.

The programs come from the one assembly, the channels are the training's own.  Only what passes compute is left out:
a pass takes its input as it came and hands on a tensor of the right shape, whose value says which pass made it.  A
transport that hangs, reorders or corrupts under load does so here, where it costs seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from megatron_het.doctor.check import Answers, Check, Finding, Names, Seat, amount, rate
from megatron_het.doctor.links import chosen_transport
from megatron_het.doctor.participant import hear
from megatron_het.lowering.programs import build
from megatron_het.lowering.ranks import RankOp, RankProgram, boundary_map, edges, lower
from megatron_het.lowering.transports import posted_for
from megatron_het.plan import Placement, Plan
from megatron_het.schedule.ir import Kind

_TIMEOUT_S = 15.0
_WIDTHS = (16, 1)  # the hidden size is divided by these: first a short round, then the real one
_LONG_S = 2.0
_VALUES = 97  # whole numbers that every precision holds exactly
_PASSES = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD, Kind.BACKWARD_INPUT: Kind.SEND_BACKWARD}


@dataclass
class Stress(Check):
    """Iterations of the transfers of the training's program.

    Attributes:
        seconds: How long.
    """

    seconds: float = 5.0
    name: str = field(default="stress", init=False)
    limit_s: float = field(default=45.0, init=False)
    needs_all: bool = field(default=True, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Iterations, bytes that this rank sent, and seconds."""
        from megatron_het.device import activate

        platform = activate()
        transport = chosen_transport(seat, platform).transport
        with _world(seat, platform):
            traffic = Traffic(seat.plan, seat.rank, transport, platform)
            try:
                return self._repeat(seat, traffic) | {"transport": transport}
            finally:
                traffic.close()

    def _repeat(self, seat: Seat, traffic: Any) -> dict[str, Any]:
        """Iterations until rank 0 says that it is enough; all ranks make equally many."""
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
        """One row: failures have been named by the ranks themselves."""
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
def _world(seat: Seat, platform: Any) -> Iterator[None]:
    """``torch.distributed`` over all ranks, for the duration of a block."""
    import torch
    import torch.distributed as dist

    import megatron_het.runtime.channels  # noqa: F401  # takes seconds: before anybody waits for this rank
    from megatron_het.store.torch_store import TorchStore

    if platform.is_cuda:
        torch.cuda.set_device(seat.local_rank % torch.cuda.device_count())
    store = TorchStore(seat.store, _TIMEOUT_S, name="world")
    dist.init_process_group(
        platform.default_backend,
        store=store,
        rank=seat.rank,
        world_size=len(seat.hosts),
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


class Traffic:
    """This rank's transfers of one iteration, as the executor makes them."""

    def __init__(self, plan: Plan, rank: int, transport: str, platform: Any) -> None:
        import torch

        from megatron_het.distributed import PairGroups
        from megatron_het.runtime.channels import Channels

        self._plan, self._rank, self._platform = plan, rank, platform
        self._programs = build(plan, rank)
        program, placement = self._programs[False], Placement(plan)
        boundaries = boundary_map(placement)
        where = placement.locate(rank)
        device = program.shape.device(where.stage, where.replica)
        self._stage = where.stage
        self._rows = boundaries.local_length(device, rank)
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.training.precision, torch.float32)
        self.program: RankProgram = lower(posted_for(transport, program), boundaries, device, rank)
        self._pairs = PairGroups(rank, _TIMEOUT_S)
        self.channels = Channels.open(
            self._pairs,
            "transfers",
            edges(list(self._programs.values()), boundaries),
            transport,
            _TIMEOUT_S,
            rank,
            pending_per_edge=4 if program.shape.slices > 1 else None,
            one_order=not any(p.attention_units for p in self._programs.values()),
        )

    def iterate(self, divisor: int) -> int:
        """One iteration with the hidden size divided; the bytes that were sent.

        Raises:
            TransferError: A transfer failed or timed out.
            RuntimeError: What arrived is not what was sent.
        """
        run = _Iteration(self, max(1, self._plan.model.hidden_size // divisor))
        for op in self.program.ops:
            run.execute(op)
        self.channels.wait_sends()
        return run.sent

    def close(self) -> None:
        """Destroy the channels and their groups."""
        self.channels.close()
        self._pairs.close()

    def empty(self, microbatch: int, hidden: int) -> Any:
        """A boundary tensor ``[s, b, h]`` of this rank."""
        import torch

        shape = (self._rows, self._plan.training.sequences(microbatch), hidden)
        return torch.empty(shape, dtype=self._dtype, device=self._platform.device)


class _Iteration:
    """Holds what lives for one iteration."""

    def __init__(self, traffic: Traffic, hidden: int) -> None:
        self._traffic, self._hidden = traffic, hidden
        self._results: dict[tuple[Kind, Any], Any] = {}
        self._arriving: dict[tuple[Kind, Any], tuple[Any, list[Any]]] = {}
        self.sent = 0

    def execute(self, op: RankOp) -> None:
        """A transfer, or the place of a pass."""
        if op.kind in _PASSES:
            self._pass(op)
        elif op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            piece = self._results[op.kind, op.key][op.lo : op.hi]
            self._traffic.channels.send(piece, op.peer, op.label)
            self.sent += piece.numel() * piece.element_size()
            if op.is_final_piece:
                del self._results[op.kind, op.key]
        elif op.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            slot = (op.kind, op.key)
            if slot not in self._arriving:
                self._arriving[slot] = (self._traffic.empty(op.microbatch, self._hidden), [])
            buffer, pending = self._arriving[slot]
            pending.append((op, self._traffic.channels.receive(buffer[op.lo : op.hi], op.peer, op.label)))

    def _pass(self, op: RankOp) -> None:
        """What came is checked; what goes says which microbatch and slice it is of."""
        sends = _PASSES[op.kind]
        arrives = Kind.RECV_FORWARD if sends is Kind.SEND_FORWARD else Kind.RECV_BACKWARD
        buffer, pending = self._arriving.pop((arrives, op.key), (None, []))
        for _, receive in pending:
            self._traffic.channels.wait_receive(receive)
        if buffer is not None and not bool((buffer == mark_of(op, sends)).all()):
            raise RuntimeError(f"{op.label}: rank {pending[0][0].peer} sent other values than have arrived")
        if (sends, op.key) in self._traffic.program.sends:
            result = self._traffic.empty(op.microbatch, self._hidden)
            self._results[sends, op.key] = result.fill_(mark_of(op, sends))


def mark_of(op: RankOp, direction: Kind) -> float:
    """The value of a boundary tensor: both ends know microbatch, slice and direction, not each other's chunks."""
    return float((7 * op.microbatch + 3 * op.slice + (direction is Kind.SEND_BACKWARD)) % _VALUES)
