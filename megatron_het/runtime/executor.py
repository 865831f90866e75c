"""The executor: a loop over this rank's operations with one handler per kind.

It holds no schedule logic.  What runs, in which order, and who talks to whom is in the Program;
the executor turns each operation into calls of Megatron's own ``forward_step`` and
``backward_step`` and of the channels.  A receive is posted where the Program says and waited for
when the operation that needs it runs; sends are waited for at the end of the iteration.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch.profiler import record_function

from megatron_het.distributed import at_chunk
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.report import Timeline
from megatron_het.runtime.channels import Channels
from megatron_het.runtime.data import Batches
from megatron_het.runtime.feature import BackwardPass, Call, ForwardPass, Handler, Iteration, Key, RuntimeFeature
from megatron_het.schedule.ir import Kind
from megatron_het.schedule.joint import sync_points
from megatron_het.schedule.kinds import PARTS, executed_by

# Quantised copies of weights (fp8) that the layers of Transformer Engine keep from pass to pass.
#
# A layer quantises its weights once, for all microbatches and slices.  ``is_first_microbatch`` makes it quantise again.
# With fused accumulation the flag also makes the backward overwrite ``main_grad`` instead of adding to it.  That is
# right only where the first pass also has the first backward: not with slices or in a V.  So here the flag is never
# set.  Instead the copies are dropped before the first pass of an iteration and when weights are freed.  A layer
# without a copy makes one.

_COPIES = "_fp8_workspaces"
_FLAG = "is_first_microbatch"


def add_all_gradients(models: Iterable[torch.nn.Module]) -> None:
    """Let the backward of every pass add to the gradients, in any order of the passes.

    Args:
        models: Chunks, whose hook for first microbatches in Megatron's own schedules is disabled.
    """
    for model in models:
        for module in model.modules():
            if hasattr(module, _FLAG):
                setattr(module, _FLAG, False)


def copies_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the tensors that quantised copies consist of: values, their transposes, scales."""
    for module in model.modules():
        for copy in (getattr(module, _COPIES, None) or {}).values():
            yield from (part for part in vars(copy).values() if isinstance(part, torch.Tensor))


def drop_copies(model: torch.nn.Module) -> None:
    """Let the layers of a chunk quantise their weights in the next pass."""
    for module in model.modules():
        copies: Any = getattr(module, _COPIES, None)
        if copies:
            copies.clear()


# ``--overlap-param-gather``: when updated parameters are gathered over the replicas of a stage.
#
# Megatron begins a bucket's all-gather in the first forward that needs it, which then waits for it.  Megatron's
# replicas run the same program, so all of them join.  Under a plan that could deadlock: the first forward of one
# replica may depend on a forward of another one (in a V, or where an earlier stage holds few microbatches), which
# would wait in the all-gather for the first.  So all gathers of an iteration begin before its first operation, in one
# order on all ranks.


def begin_gathers(call: Call) -> None:
    """Begin the all-gathers of all chunks, if the iteration has any.

    It has them if Megatron's ``config.param_sync_func`` is set.  Megatron sets it with ``align_param_gather``
    (``config.apply_after_validation``), and clears it while parameters need no gather: in the first iteration
    and in evaluations.
    """
    starts = call.config.param_sync_func
    if starts is None or call.forward_only:
        return
    for start in starts if isinstance(starts, list) else [starts]:
        start()


_SHOWN_POSTS = 8


class ExecutorError(RuntimeError):
    """The program does not match the call, or left work undone."""


@dataclass(eq=False)
class Executor:
    """Runs rank programs.

    Raises:
        ExecutorError: The programs have operations that nobody executes, or two features execute one kind.
    """

    programs: Mapping[bool, RankProgram]  # rank program by ``forward_only``
    channels: Channels  # this rank's transfers
    _: KW_ONLY
    loss_chunk: int | None  # chunk of this rank that ends in the loss; None where none does
    num_chunks: int  # model chunks on this rank
    tells_chunk: bool  # whether forwards pass the chunk's index to Megatron: where some rank has several chunks
    timeline: Timeline  # records when every operation ran
    features: Sequence[RuntimeFeature] = ()  # the open features, in the order in which they are called
    batches: Batches | None = None  # the reader of forwards

    def __post_init__(self) -> None:
        self._sync_points = {mode: sync_points(program.ops, self.num_chunks) for mode, program in self.programs.items()}
        self._features = tuple(self.features)
        self._batches = self.batches or Batches()
        self.current = ""
        """Label of the operation that runs, for messages."""
        self.since_s: float | None = None
        """When it began, by ``time.monotonic``; None between iterations."""
        self._handlers = self._all_handlers()

    def _all_handlers(self) -> dict[Kind, Handler]:
        handlers: dict[Kind, Handler] = {
            **dict.fromkeys(executed_by("compute"), self._backward),
            Kind.FORWARD: self._forward,
            Kind.SEND_FORWARD: self._send,
            Kind.SEND_BACKWARD: self._send,
            Kind.RECV_FORWARD: self._receive,
            Kind.RECV_BACKWARD: self._receive,
        }
        for feature in self._features:
            found = feature.handlers()
            if twice := handlers.keys() & found.keys():
                raise ExecutorError(f"{feature.name}: {sorted(k.name for k in twice)} have a handler already")
            handlers |= found
        kinds = {op.kind for program in self.programs.values() for op in program.ops}
        if missing := kinds - handlers.keys():
            names = ", ".join(sorted(kind.name for kind in missing))
            raise ExecutorError(f"nothing executes {names}: the feature that does is not open")
        return handlers

    def run(self, call: Call) -> Iteration:
        """Run one iteration and return its state (reports of the last stage, token count)."""
        program = self.programs[call.forward_only]
        if call.num_microbatches != program.num_microbatches:
            raise ExecutorError(
                f"the program has {program.num_microbatches} microbatches, "
                f"Megatron asks for {call.num_microbatches}; "
                "batch sizes must stay as the plan says, for evaluation too"
            )
        self.current = "the start of an iteration"
        for feature in self._features:
            feature.prepare(call)
        state = Iteration(num_tokens=torch.zeros([], dtype=torch.int, device=call.device))
        self._hold_gradient_sync(call, state)
        begin_gathers(call)
        for feature in self._features:
            feature.begin(call, state)
        points = self._sync_points[call.forward_only]
        for feature in self._features:
            chosen = feature.program(call, program)
            if chosen is not program:
                program, points = chosen, sync_points(chosen.ops, self.num_chunks)
        for index, op in enumerate(program.ops):
            self.current, self.since_s = op.label, time.monotonic()
            for feature in self._features if index == program.losses_known else ():
                feature.losses_known(call, state)
            for chunk in points.get(index, ()):
                state.no_sync.pop(chunk).close()  # from here on backwards complete the chunk's gradients
            with record_function(op.label), self.timeline.measure(op):
                for feature in self._features if op.kind in PARTS else ():
                    feature.before_part(op, state)
                self._handlers[op.kind](op, call, state)
        for feature in self._features:
            feature.finish(call, state)
        for feature in self._features:
            feature.weigh_losses(call, state)
        self.channels.wait_sends()
        left = [*state.inputs, *(k for _, k in state.to_send), *(k for _, k in state.receives)]
        if left:
            raise ExecutorError(f"the program ended with unused tensors of {sorted(set(left))}")
        self._batches.forget()
        return state

    # -- compute -----------------------------------------------------------------------------

    def _forward(self, op: RankOp, call: Call, state: Iteration) -> None:
        from megatron.core.pipeline_parallel import schedules

        key, is_last = op.key, op.chunk == self.loss_chunk
        source = self._arrived(Kind.RECV_FORWARD, key, state)
        if source is not None and not call.forward_only:
            source.requires_grad_()
        iterator = self._batches.iterator(op, call.data_iterators[op.chunk])
        forward = ForwardPass(op, source, call.forward_step_func, iterator, ends_in_loss=is_last)
        with contextlib.ExitStack() as around:
            for feature in self._features:
                around.enter_context(feature.around_forward(forward, call))
            around.enter_context(call.sized(op.microbatch))
            around.enter_context(at_chunk(op.chunk))
            forward.output = self._forward_step(forward, call, state)
        output = forward.output
        if not forward.ends_in_loss:
            # The transfer needs the values, autograd only the node: Megatron's backward expects
            # the output to be deallocated, so the values are kept by a detached alias.
            self._keep_for_send(Kind.SEND_FORWARD, key, output.detach(), call, state)
            if not call.forward_only:
                schedules.deallocate_output_tensor(output, call.config.deallocate_pipeline_outputs)
        if not call.forward_only:
            state.inputs[key], state.outputs[key] = source, output

    def _forward_step(self, forward: ForwardPass, call: Call, state: Iteration) -> torch.Tensor:
        """Megatron's own forward step; counts the tokens of the loss."""
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.utils import get_attr_wrapped_model

        chunk, model = forward.op.chunk, call.models[forward.op.chunk]
        if chunk not in state.forwarded:
            drop_copies(model)
        output, num_tokens = schedules.forward_step(
            forward.forward_step_func,
            forward.data_iterator,
            model,
            call.num_microbatches,
            forward.source,
            state.reports,
            call.config,
            1,  # context-parallel size
            call.collect_non_loss_data,
            current_microbatch=forward.op.microbatch if forward.number is None else forward.number,
            is_last_stage=forward.ends_in_loss,
            **({"vp_stage": chunk} if self.tells_chunk else {}),
        )
        # Every chunk would keep the input of its last microbatch until its next forward.
        get_attr_wrapped_model(model, "set_input_tensor")(None)
        state.forwarded.add(chunk)
        state.num_tokens += num_tokens
        state.note_reports(forward.op.microbatch)
        return output

    def _backward(self, op: RankOp, call: Call, state: Iteration) -> None:
        """Run a backward; a feature may defer its weight gradients."""
        from megatron.core.pipeline_parallel import schedules

        key, backward = op.key, BackwardPass(op)
        with contextlib.ExitStack() as around:
            for feature in self._features:
                around.enter_context(feature.around_backward(backward, call, state))
            gradient = self._arrived(Kind.RECV_BACKWARD, key, state)
            if backward.gradient is not None:
                gradient = backward.gradient
            around.enter_context(at_chunk(op.chunk))
            backward.result = schedules.backward_step(
                state.inputs.pop(key), state.outputs.pop(key), gradient, call.config
            )
        if backward.result is not None:
            self._keep_for_send(Kind.SEND_BACKWARD, key, backward.result, call, state)

    def _hold_gradient_sync(self, call: Call, state: Iteration) -> None:
        """Suppress DDP's reduction until a chunk's gradients are about to be complete."""
        for chunk in range(self.num_chunks):
            stack = contextlib.ExitStack()
            no_sync = call.config.no_sync_func
            if isinstance(no_sync, list):
                no_sync = no_sync[chunk]
            if no_sync is not None and not call.forward_only:
                stack.enter_context(no_sync())
            state.no_sync[chunk] = stack

    def _keep_for_send(self, kind: Kind, key: Key, tensor: torch.Tensor, call: Call, state: Iteration) -> None:
        """Keep a result for its sends; this rank may have no send of a replicated result."""
        program = self.programs[call.forward_only]
        if (kind, key) in program.sends:
            state.to_send[kind, key] = tensor
        consumer = program.handovers.get((kind, key))
        if consumer is not None:
            state.receives[consumer] = (tensor, [])

    # -- transfers ---------------------------------------------------------------------------

    def _send(self, op: RankOp, call: Call, state: Iteration) -> None:
        tensor = state.to_send[op.kind, op.key]
        self.channels.send(tensor[call.rows(op)], op.peer, op.label)
        if op.is_final_piece:
            del state.to_send[op.kind, op.key]

    def _receive(self, op: RankOp, call: Call, state: Iteration) -> None:
        slot = (op.kind, op.key)
        if slot not in state.receives:
            buffer = torch.empty(call.shape(op), dtype=call.dtype, device=call.device)
            state.receives[slot] = (buffer, [])
        buffer, pending = state.receives[slot]
        pending.append(self.channels.receive(buffer[call.rows(op)], op.peer, op.label))

    def _arrived(self, kind: Kind, key: Key, state: Iteration) -> torch.Tensor | None:
        """The received tensor of a compute operation, or None when it has none."""
        slot = state.receives.pop((kind, key), None)
        if slot is None:
            return None
        buffer, pending = slot
        with self.timeline.waiting():
            for receive in pending:
                self.channels.wait_receive(receive)
        return buffer


class StallWatch:
    """Reports the running operation of this rank when it does not end.

    A host that waits for the device never reaches a wait with a timeout.  NCCL's watchdog, which then ends the process,
    knows the collective but not the operation.  So a thread checks periodically, without a call to the device, and
    writes a report to the standard error before the watchdog ends the process.

    Args:
        executor: The executor whose operation is watched.
        channels: Transfers of all purposes.
        limit_s: An operation that takes longer has stalled.
    """

    def __init__(self, executor: Executor, channels: Sequence[Channels], limit_s: float, rank: int) -> None:
        self._executor, self._channels, self._limit_s, self._rank = executor, channels, limit_s, rank
        self._host = threading.get_ident()
        self._is_over = threading.Event()
        self._told: float | None = None
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(min(1.0, self._limit_s / 4)):
            since_s = self._executor.since_s
            if since_s is not None and since_s != self._told and time.monotonic() - since_s > self._limit_s:
                self._told = since_s
                sys.stderr.write(self.report())

    def report(self) -> str:
        """The operation, the last transfers, the likely cause, and the stack of the thread that runs the program."""
        now = time.monotonic()
        posts = sorted(post for channels in self._channels for post in list(channels.posted))[-_SHOWN_POSTS:]
        lines = [
            f"het: rank {self._rank}: {self._executor.current} has not ended for {self._limit_s:g} s.",
            "Transfers posted last: " + ("; ".join(f"{now - at:.1f} s ago {what}" for at, what in posts) or "none"),
            "If the stack ends in a launch, an allocation, a copy or a read of a value, the host waits for the device, "
            "and a transfer is under way there whose other end does not come: CUDA waits for the device at the first "
            "launch of a kernel, when memory is pinned and when the allocator frees memory. The other end is at fault, "
            "or waits for this rank in the same way: compare with its log. Stack:",
        ]
        frame = sys._current_frames().get(self._host)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  not known\n"
        return "\n".join(lines) + "\n" + stack

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join(timeout=2.0)


def iterators_per_chunk(data_iterator: Any, num_chunks: int) -> list[Iterator[Any] | None]:
    """Megatron passes a list of iterators with several model chunks and a bare one otherwise."""
    if isinstance(data_iterator, list):
        return data_iterator
    return [data_iterator] * num_chunks
