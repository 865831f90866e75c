"""The executor: a loop over this rank's operations with one handler per kind.

It holds no schedule logic.  What runs, in which order, and who talks to whom is in the Program;
the executor turns each operation into calls of Megatron's own ``forward_step`` and
``backward_step`` and of the channels.  A receive is posted where the Program says and waited for
when the operation that needs it runs; sends are waited for at the end of the iteration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from megatron_het.runtime.channels import Channels, PendingReceive
from megatron_het.runtime.gradient_sync import sync_points
from megatron_het.runtime.lowering import RankOp, RankProgram
from megatron_het.runtime.slicing import Sequences, WholeSequences
from megatron_het.runtime.timeline import Timeline
from megatron_het.runtime.window_options import PARAMETER_KINDS
from megatron_het.schedule.ir import EXCHANGE, Kind

if TYPE_CHECKING:  # it imports Megatron
    from megatron_het.runtime.activation_offload import ActivationOffload
    from megatron_het.runtime.exchange import ContextExchange
    from megatron_het.runtime.window import ParameterWindow
    from megatron_het.vocab.team import SplitVocabulary

Key = tuple[int, int, int]
"""(microbatch, slice, chunk) of a compute operation on this device."""


class ExecutorError(RuntimeError):
    """The program and the call do not fit, or the program left work undone."""


@dataclass(slots=True)
class Call:
    """The arguments of one call of the forward-backward function, as Megatron passes them."""

    forward_step_func: Callable[..., Any]
    data_iterators: list[Any]
    models: list[torch.nn.Module]
    config: Any
    num_microbatches: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    forward_only: bool
    collect_non_loss_data: bool


@dataclass(slots=True)
class Iteration:
    """Everything that lives for one iteration."""

    inputs: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    to_send: dict[tuple[Kind, Key], torch.Tensor] = field(default_factory=dict)
    receives: dict[tuple[Kind, Key], tuple[torch.Tensor, list[PendingReceive]]] = field(
        default_factory=dict
    )
    reports: list[Any] = field(default_factory=list)
    num_tokens: torch.Tensor | None = None
    forwarded: set[int] = field(default_factory=set)
    no_sync: dict[int, contextlib.ExitStack] = field(default_factory=dict)


class Executor:
    """Runs rank programs.

    Args:
        programs: Rank program by ``forward_only``.
        channels: This rank's transfers.
        is_last: Whether this rank's stage is the last of the pipeline.
        num_chunks: Model chunks on this rank.
        timeline: Records when every operation ran.
        sequences: Runs a forward over a whole sequence (the default) or over a slice.
        window: Runs parameter operations; None when parameters are always whole.
        vocabulary: Runs the output layer; None when the last stage does so in its forward.
        offload: Moves activations to the host and back; None when they stay.
        exchange: Runs the operations of the attention context exchange.
    """

    def __init__(
        self,
        programs: Mapping[bool, RankProgram],
        channels: Channels,
        *,
        is_last: bool,
        num_chunks: int,
        timeline: Timeline,
        sequences: Sequences | None = None,
        window: ParameterWindow | None = None,
        vocabulary: SplitVocabulary | None = None,
        offload: ActivationOffload | None = None,
        exchange: ContextExchange | None = None,
    ) -> None:
        self._sequences = sequences or WholeSequences()
        self._programs = programs
        self._sync_points = {mode: sync_points(program.ops, num_chunks) for mode, program in programs.items()}
        self._channels = channels
        self._is_last = is_last
        self._num_chunks = num_chunks
        self._timeline = timeline
        self.current = ""
        """Label of the operation that runs, for messages."""
        self._window = window
        self._handlers: dict[Kind, Callable[[RankOp, Call, Iteration], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_FORWARD: self._send,
            Kind.SEND_BACKWARD: self._send,
            Kind.RECV_FORWARD: self._receive,
            Kind.RECV_BACKWARD: self._receive,
        }
        if window is not None:
            self._handlers |= dict.fromkeys(PARAMETER_KINDS, lambda op, call, state: window.handle(op))
        self._vocabulary = vocabulary
        if vocabulary is not None:
            self._handlers |= vocabulary.handlers()
        self._offload = offload
        if offload is not None:
            self._handlers |= offload.handlers()
        self._exchange = exchange
        if exchange is not None:
            self._handlers |= dict.fromkeys(EXCHANGE, lambda op, call, state: exchange.handle(op))

    def run(self, call: Call) -> Iteration:
        """Run one iteration and return what it left (reports of the last stage, token count)."""
        program = self._programs[call.forward_only]
        if call.num_microbatches != program.num_microbatches:
            raise ExecutorError(
                f"the program has {program.num_microbatches} microbatches, "
                f"Megatron asks for {call.num_microbatches}; "
                "batch sizes must stay as the plan says, for evaluation too"
            )
        state = Iteration(num_tokens=torch.zeros([], dtype=torch.int, device=call.device))
        self._hold_gradient_sync(call, state)
        if self._window is not None:
            self._window.begin()
        if self._exchange is not None:
            self._exchange.begin(call.forward_only)
        offload = None if call.forward_only else self._offload
        if offload is not None:
            offload.begin(call.models)
        for index, op in enumerate(program.ops):
            self.current = op.label
            for chunk in self._sync_points[call.forward_only].get(index, ()):
                state.no_sync.pop(chunk).close()  # the gradients that follow complete those of the chunk
            with record_function(op.label), self._timeline.measure(op):
                self._handlers[op.kind](op, call, state)
        if self._vocabulary is not None:
            self._vocabulary.finish(call, state)
        if offload is not None:
            offload.finish()
        self._channels.wait_sends()
        self._check_nothing_left(state)
        self._sequences.finish()
        return state

    # -- compute -----------------------------------------------------------------------------

    def _forward(self, op: RankOp, call: Call, state: Iteration) -> None:
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.utils import get_attr_wrapped_model

        key, model = op.key, call.models[op.chunk]
        is_last = self._is_last and op.chunk == self._num_chunks - 1
        # With a split vocabulary the model ends with hidden states, and the loss comes later.
        split = self._vocabulary if is_last else None
        forward_step_func = call.forward_step_func if split is None else split.capture(call.forward_step_func)
        if self._vocabulary is not None:
            self._vocabulary.enter(op)
        source = self._arrived(Kind.RECV_FORWARD, key, state)
        if source is not None and not call.forward_only:
            source.requires_grad_()
        whole = call.data_iterators[op.chunk]
        saving: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._offload is not None and not call.forward_only:
            saving = self._offload.saving(op, source)
        with saving, self._sequences.forward(op, whole, call.forward_only) as data_iterator:
            output, num_tokens = schedules.forward_step(
                forward_step_func,
                data_iterator,
                model,
                call.num_microbatches,
                source,
                state.reports,
                call.config,
                1,  # context-parallel size
                call.collect_non_loss_data,
                is_first_microbatch=op.chunk not in state.forwarded,
                current_microbatch=op.microbatch,
                is_last_stage=is_last and split is None,
                **({"vp_stage": op.chunk} if self._num_chunks > 1 else {}),
            )
        # Every chunk would keep the input of its last microbatch until its next forward.
        get_attr_wrapped_model(model, "set_input_tensor")(None)
        state.forwarded.add(op.chunk)
        state.num_tokens += num_tokens
        if not is_last or split is not None:
            # The transfer needs the values, autograd only the node: Megatron's backward expects
            # the output to be deallocated, so the values are kept by a detached alias.
            if split is not None:
                split.put(op, output.detach())
            else:
                self._keep_for_send(Kind.SEND_FORWARD, key, output.detach(), call, state)
            if not call.forward_only:
                schedules.deallocate_output_tensor(output, call.config.deallocate_pipeline_outputs)
        if not call.forward_only:
            state.inputs[key], state.outputs[key] = source, output

    def _backward(self, op: RankOp, call: Call, state: Iteration) -> None:
        from megatron.core.pipeline_parallel import schedules

        key = op.key
        if self._window is not None:
            self._window.before_backward(op.chunk, state.num_tokens)
        gradient = self._arrived(Kind.RECV_BACKWARD, key, state)
        if self._vocabulary is not None and self._is_last and op.chunk == self._num_chunks - 1:
            gradient = self._vocabulary.hidden_gradient(op)
        if self._offload is not None:
            self._offload.release(op)
        with self._sequences.backward(op):
            result = schedules.backward_step(
                state.inputs.pop(key), state.outputs.pop(key), gradient, call.config
            )
        if result is not None:
            self._keep_for_send(Kind.SEND_BACKWARD, key, result, call, state)

    def _hold_gradient_sync(self, call: Call, state: Iteration) -> None:
        """Suppress DDP's reduction until a chunk's gradients are about to be complete."""
        for chunk in range(self._num_chunks):
            stack = contextlib.ExitStack()
            no_sync = call.config.no_sync_func
            if isinstance(no_sync, list):
                no_sync = no_sync[chunk]
            if no_sync is not None and not call.forward_only:
                stack.enter_context(no_sync())
            state.no_sync[chunk] = stack

    def _keep_for_send(
        self, kind: Kind, key: Key, tensor: torch.Tensor, call: Call, state: Iteration
    ) -> None:
        """Keep a result for its sends; a replicated result may have none on this rank."""
        program = self._programs[call.forward_only]
        if (kind, key) in program.sends:
            state.to_send[kind, key] = tensor
        consumer = program.handovers.get((kind, key))
        if consumer is not None:
            state.receives[consumer] = (tensor, [])

    # -- transfers ---------------------------------------------------------------------------

    def _send(self, op: RankOp, call: Call, state: Iteration) -> None:
        tensor = state.to_send[op.kind, op.key]
        self._channels.send(tensor[op.lo : op.hi], op.peer, op.label)
        if op.is_final_piece:
            del state.to_send[op.kind, op.key]

    def _receive(self, op: RankOp, call: Call, state: Iteration) -> None:
        slot = (op.kind, op.key)
        if slot not in state.receives:
            buffer = torch.empty(call.shape, dtype=call.dtype, device=call.device)
            state.receives[slot] = (buffer, [])
        buffer, pending = state.receives[slot]
        pending.append(self._channels.receive(buffer[op.lo : op.hi], op.peer, op.label))

    def _arrived(self, kind: Kind, key: Key, state: Iteration) -> torch.Tensor | None:
        """The received tensor of a compute operation, or None when it has none."""
        slot = state.receives.pop((kind, key), None)
        if slot is None:
            return None
        buffer, pending = slot
        with self._timeline.waiting():
            for receive in pending:
                self._channels.wait_receive(receive)
        return buffer

    def _check_nothing_left(self, state: Iteration) -> None:
        left = [*state.inputs, *(k for _, k in state.to_send), *(k for _, k in state.receives)]
        if left:
            raise ExecutorError(f"the program ended with unused tensors of {sorted(set(left))}")


def iterators_per_chunk(data_iterator: Any, num_chunks: int) -> list[Iterator[Any] | None]:
    """Megatron passes a list of iterators with several model chunks and a bare one otherwise."""
    if isinstance(data_iterator, list):
        return data_iterator
    return [data_iterator] * num_chunks
