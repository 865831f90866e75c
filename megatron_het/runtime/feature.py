"""Protocol of a feature on a rank: the methods that session and executor call, and when.

The session opens the features of a plan once, in the order of their list, and closes them in the reverse order.
Session and executor call the methods of :class:`RuntimeFeature` on all of them and know none by name.  The
runtime half of a feature is the module ``runtime.py`` of its room with a function
``open_feature(context) -> RuntimeFeature``; ``Feature.runtime`` of the other half names it.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_het.device import Platform
from megatron_het.distributed import Edge, PlanGroups
from megatron_het.features import features_of
from megatron_het.features.base import Feature
from megatron_het.lowering.ranks import BoundaryMap, RankOp, RankProgram
from megatron_het.plan import Placement, Plan
from megatron_het.plan.run_config import HetConfig
from megatron_het.report import Timeline
from megatron_het.runtime.channels import Channels, PendingReceive
from megatron_het.runtime.data import Batches
from megatron_het.schedule.ir import Kind, Program

Around = contextlib.AbstractContextManager[None]  # a pass
Key = tuple[int, int, int]  # (microbatch, slice, chunk) of a compute operation on this device


@dataclass(slots=True)
class Call:
    """The arguments of one call of the forward-backward function, as Megatron passes them.

    ``length`` is the number of this rank's rows ``s`` of an activation, for a pass of nominal length.  ``batches`` has
    the actual lengths.  ``sequences(m)`` is the number of sequences of microbatch m, and ``args`` are Megatron's.
    """

    forward_step_func: Callable[..., Any]
    data_iterators: list[Any]
    models: list[torch.nn.Module]
    config: Any
    num_microbatches: int
    length: int
    hidden_size: int
    sequences: Callable[[int], int]
    args: Any
    dtype: torch.dtype
    device: torch.device
    forward_only: bool
    collect_non_loss_data: bool
    batches: Batches = field(default_factory=Batches)

    def shape(self, op: RankOp) -> tuple[int, int, int]:
        """``[s, b, h]`` of the activations of an operation's pass on this rank."""
        return self.batches.rows(self.length, op), self.sequences(op.microbatch), self.hidden_size

    def rows(self, op: RankOp) -> slice:
        """Rows ``lo:hi`` of an activation that a transfer sends or receives."""
        return slice(self.batches.rows(op.lo, op), self.batches.rows(op.hi, op))

    @contextlib.contextmanager
    def sized(self, microbatch: int) -> Iterator[None]:
        """Set Megatron's ``args.micro_batch_size`` to that of this microbatch.

        Scripts allocate the tensors that they receive from other TP ranks by it.
        """
        shown, self.args.micro_batch_size = self.args.micro_batch_size, self.sequences(microbatch)
        try:
            yield
        finally:
            self.args.micro_batch_size = shown

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer; found through its bound method ``grad_scale_func`` in the configuration."""
        return optimizer_of(self.config)


def optimizer_of(model_config: Any) -> Any:
    """Megatron's optimizer as a model's configuration knows it; None before training."""
    return getattr(getattr(model_config, "grad_scale_func", None), "__self__", None)


@dataclass(slots=True)
class Iteration:
    """Everything that lives for one iteration."""

    inputs: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    to_send: dict[tuple[Kind, Key], torch.Tensor] = field(default_factory=dict)
    receives: dict[tuple[Kind, Key], tuple[torch.Tensor, list[PendingReceive]]] = field(default_factory=dict)
    reports: list[Any] = field(default_factory=list)  # the script's loss entries, one per pass that ends in the loss
    num_tokens: torch.Tensor | None = None
    forwarded: set[int] = field(default_factory=set)
    no_sync: dict[int, contextlib.ExitStack] = field(default_factory=dict)
    reported: list[int] = field(default_factory=list)  # the microbatch of each entry of ``reports``

    def note_reports(self, microbatch: int) -> None:
        """Record that new entries of ``reports`` belong to this microbatch."""
        self.reported += [microbatch] * (len(self.reports) - len(self.reported))


Handler = Callable[[RankOp, Call, Iteration], None]  # executes one operation


@dataclass(slots=True)
class ForwardPass:
    """One FORWARD operation; a feature's ``around_forward`` may change it."""

    op: RankOp
    source: torch.Tensor | None  # its input ``[s, b, h]``; None on the first stage
    forward_step_func: Callable[..., Any]  # the training script's forward step
    data_iterator: Any  # the iterator that the script reads
    ends_in_loss: bool  # whether the loss is computed from the model's output
    output: torch.Tensor | None = None  # the model's output; None before it has run
    number: int | None = None  # number of the pass that layers are given; None for the microbatch's number


@dataclass(slots=True)
class BackwardPass:
    """One backward operation of a chunk."""

    op: RankOp
    # gradient of the chunk's output, from a feature; None for the received gradient
    gradient: torch.Tensor | None = None
    result: torch.Tensor | None = None  # gradient of its input; None before it is known, and where there is none


class RuntimeFeature:
    """Base class of the runtime halves of features; its methods do nothing."""

    name = ""  # as in the list of features
    roles: tuple[str, ...] = ()  # groups over which its operations run collectives, for messages

    def handlers(self) -> Mapping[Kind, Handler]:
        """Handlers of the kinds of operations that this feature executes."""
        return {}

    def prepare_config(self, model_config: Any) -> None:
        """Install hooks in Megatron's model configuration, before ``pretrain``."""

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Change the model chunks (GPTModel), before DDP wraps them: all at once or one after the other."""

    def prepare(self, call: Call) -> None:
        """Called before an iteration: no transfer has been posted, and DDP's reduction is not suppressed yet."""

    def begin(self, call: Call, state: Iteration) -> None:
        """Called at the start of an iteration of training or evaluation."""

    def program(self, call: Call, program: RankProgram) -> RankProgram:
        """Returns the program that this rank runs in an iteration, after ``begin`` of all features.

        The default is the plan's program.  Another one has the same passes and transfers in the same order, and
        differs only in the feature's own operations.  All ranks make the same choice.
        """
        return program

    def losses_known(self, call: Call, state: Iteration) -> None:
        """Called in training when the tokens of this rank's losses are counted, if updates run inside the iteration.

        It is at the same point of the global order of transfers and collectives on all ranks, before the first update.
        """

    def around_forward(self, forward: ForwardPass, call: Call) -> Around:
        """Context around a FORWARD: entering may change ``forward``; ``forward.output`` is set at the exit."""
        return contextlib.nullcontext()

    def around_backward(self, backward: BackwardPass, call: Call, state: Iteration) -> Around:
        """Context around a BACKWARD or BACKWARD_INPUT, which includes the wait for its gradient."""
        return contextlib.nullcontext()

    def before_part(self, op: RankOp, state: Iteration) -> None:
        """Called before a part of a layer that stages share (``kinds.PARTS``), which needs its chunk's parameters."""

    def finish(self, call: Call, state: Iteration) -> None:
        """Called when all operations of the iteration have been issued."""

    def weigh_losses(self, call: Call, state: Iteration) -> None:
        """Change the weights of losses; called after ``finish`` of all features, when ``state.reports`` is complete."""

    def before_loading(self, models: Sequence[torch.nn.Module], optimizer: Any) -> None:
        """Called before a checkpoint is loaded into Megatron's model chunks and optimizer (None without one)."""

    def materialise(self) -> None:
        """Apply pending updates and gather all parameters, until the next iteration starts."""

    def settle(self) -> None:
        """Apply pending updates before a checkpoint is saved; parameters need not be gathered."""

    def copies(self, parameters: Iterable[torch.Tensor]) -> Mapping[torch.Tensor, torch.Tensor]:
        """Copies in host memory of parameters that are not gathered when a checkpoint is saved or loaded.  Collective.

        Args:
            parameters: Parameters that this rank may save, or loads; the same for all ranks that hold them.
        """
        return {}

    def end_when_waited_for(self) -> None:
        """Treat asynchronous work as unfinished until something waits for it, so that memory is reproducible."""

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        """Figures by title for the report, after an iteration of training."""
        return {}

    def kept(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """The feature's tensors that outlive operations, by purpose.

        Keys are ``parameters``, ``gradients``, ``optimizer`` and ``cache``.
        """
        return {}

    def close(self) -> None:
        """Undo everything; nothing of the feature may be left in the process."""


@dataclass
class OpenContext:
    """Objects of the session that a feature may use when it is opened."""

    config: HetConfig  # the ``--het-*`` configuration
    placement: Placement
    rank: int
    args: Any
    groups: PlanGroups  # this rank's process groups
    transport: str  # of the transfers between stages
    timeout_s: float  # bound on every wait, in seconds
    channels: Channels  # the pipeline's transfers
    programs: Mapping[bool, Program]  # the plan's programs, by whether they only run forwards
    lowered: Mapping[bool, RankProgram]  # this rank's part of them
    boundaries: BoundaryMap  # the pieces of activations that ranks of neighbouring stages exchange
    platform: Platform
    timeline: Timeline  # records waiting times
    batches: Batches = field(default_factory=Batches)  # the reader of forwards; a feature may replace it
    options: Any = None  # of the feature that is being opened
    opened: list[Channels] = field(default_factory=list)  # the channels that features have opened

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.placement.plan

    @property
    def has_loss(self) -> bool:
        """Whether the model's last chunk, with the output layer and the loss, is on this rank."""
        return self.placement.locate(self.rank).stage == self.placement.last[0]

    def new_channels(self, purpose: str, edges: Iterable[Edge], pending_per_edge: int | None) -> Channels:
        """Open channels for a feature.  Collective: all ranks open the same purposes in the same order.

        Args:
            purpose: What is transferred, for messages.
            edges: Directed pairs of world ranks; the same for all ranks that they connect.
            pending_per_edge: See :class:`Channels`.
        """
        channels = Channels.open(
            self.groups.pairs,
            purpose,
            edges,
            self.transport,
            self.timeout_s,
            self.rank,
            pending_per_edge=pending_per_edge,
        )
        self.opened.append(channels)
        return channels


def open_features(context: OpenContext) -> tuple[RuntimeFeature, ...]:
    """Open the runtime halves of the plan's features, in the order of ``FEATURES``.  Collective."""
    found: list[RuntimeFeature] = []
    for spec, options in features_of(context.plan):
        if spec.runtime and spec.runs_with(context.args):
            context.options = options
            found.append(open_half(spec, context))
    return tuple(found)


def open_half(spec: Feature, context: OpenContext) -> RuntimeFeature:
    """Open the runtime half of one feature, whether the plan has the feature or not.  Collective."""
    half: RuntimeFeature = importlib.import_module(spec.runtime).open_feature(context)
    half.name = spec.name
    return half
