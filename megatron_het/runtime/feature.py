"""Protocol of a feature on a rank: what each does there, and when.

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

    ``length`` counts the tokens of an activation that this rank holds of a pass of nominal length, ``sequences(m)``
    the sequences of microbatch m, and ``args`` are Megatron's.  ``batches`` know how long a pass is.
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
        """Returns what a transfer takes of them."""
        return slice(self.batches.rows(op.lo, op), self.batches.rows(op.hi, op))

    @contextlib.contextmanager
    def sized(self, microbatch: int) -> Iterator[None]:
        """Megatron's arguments say how many sequences this microbatch has.

        Scripts allocate what they receive from other TP ranks by it.
        """
        shown, self.args.micro_batch_size = self.args.micro_batch_size, self.sequences(microbatch)
        try:
            yield
        finally:
            self.args.micro_batch_size = shown

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer, known here only by the method that Megatron puts into the configuration."""
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
    reported: list[int] = field(default_factory=list)  # the microbatch of each of them

    def note_reports(self, microbatch: int) -> None:
        """The entries of ``reports`` that are new are those of a pass of this microbatch."""
        self.reported += [microbatch] * (len(self.reports) - len(self.reported))


Handler = Callable[[RankOp, Call, Iteration], None]  # executes one operation


@dataclass(slots=True)
class ForwardPass:
    """One FORWARD operation; features change it when they are entered around it."""

    op: RankOp
    source: torch.Tensor | None  # its input ``[s, b, h]``; None on the first stage
    forward_step_func: Callable[..., Any]  # the training script's forward step
    data_iterator: Any  # what the script reads from
    ends_in_loss: bool  # whether the model's output is what the loss is computed from
    output: torch.Tensor | None = None  # what the model gave; None before it has run
    number: int | None = None  # of the pass, as layers are told it; None for the microbatch's


@dataclass(slots=True)
class BackwardPass:
    """One backward operation of a chunk."""

    op: RankOp
    # gradient of the chunk's output, from a feature; None to take what was received
    gradient: torch.Tensor | None = None
    result: torch.Tensor | None = None  # gradient of its input; None before it is known, and where there is none


class RuntimeFeature:
    """Defines what every feature may do on a rank.  Nothing, by default."""

    name = ""  # as in the list of features
    roles: tuple[str, ...] = ()  # groups over which its operations run collectives, for messages

    def handlers(self) -> Mapping[Kind, Handler]:
        """The operations that this feature executes."""
        return {}

    def prepare_config(self, model_config: Any) -> None:
        """Hang hooks into Megatron's model configuration, before ``pretrain``."""

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Change the model chunks (GPTModel), before DDP wraps them: all at once or one after the other."""

    def prepare(self, call: Call) -> None:
        """An iteration is about to begin, and nothing of it has been posted: gradients are not held back yet."""

    def begin(self, call: Call, state: Iteration) -> None:
        """An iteration of training or evaluation begins."""

    def program(self, call: Call, program: RankProgram) -> RankProgram:
        """Returns what this rank runs in an iteration that all features have begun; the program of the plan by default.

        Another one has the same passes and transfers between them in the same order, and differs in operations of the
        feature's own.  All ranks choose alike.
        """
        return program

    def losses_known(self, call: Call, state: Iteration) -> None:
        """In training with updates inside the iteration: this rank has counted the tokens of all its losses.

        All ranks come to it at one point of one order of all transfers and collectives, before the first update.
        """

    def around_forward(self, forward: ForwardPass, call: Call) -> Around:
        """Around a FORWARD: entering may change ``forward``; at the end its output is there."""
        return contextlib.nullcontext()

    def around_backward(self, backward: BackwardPass, call: Call, state: Iteration) -> Around:
        """Around a BACKWARD or BACKWARD_INPUT, the waiting for its gradient included."""
        return contextlib.nullcontext()

    def before_part(self, op: RankOp, state: Iteration) -> None:
        """A part of a layer that stages share (``kinds.PARTS``) is about to run, with the parameters of its chunk."""

    def finish(self, call: Call, state: Iteration) -> None:
        """All operations of the iteration have been issued."""

    def weigh_losses(self, call: Call, state: Iteration) -> None:
        """All features have finished, so ``state.reports`` are complete; change how much each of them counts."""

    def before_loading(self, models: Sequence[torch.nn.Module], optimizer: Any) -> None:
        """A checkpoint is about to be loaded into Megatron's model chunks and optimizer; None without one."""

    def materialise(self) -> None:
        """Make whatever is due and show whole parameters, until the next iteration starts."""

    def settle(self) -> None:
        """Make whatever is due before a checkpoint is taken; parameters need not be whole."""

    def copies(self, parameters: Iterable[torch.Tensor]) -> Mapping[torch.Tensor, torch.Tensor]:
        """Copies in host memory of parameters that are not whole when a checkpoint is written or read.  Collective.

        Args:
            parameters: What this rank may write, or reads; all ranks that hold the same parameters ask alike.
        """
        return {}

    def end_when_waited_for(self) -> None:
        """Take what is under way for unfinished until somebody waits for it, so that memory is the same every time."""

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        """For the report after an iteration of training: figures by title."""
        return {}

    def kept(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Tensors of its own that outlive operations, by what they are for.

        Keys are ``parameters``, ``gradients``, ``optimizer`` and ``cache``.
        """
        return {}

    def close(self) -> None:
        """Undo everything; nothing of the feature may be left in the process."""


@dataclass
class OpenContext:
    """Holds what a feature is opened with."""

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
    boundaries: BoundaryMap  # what travels between stages
    platform: Platform
    timeline: Timeline  # is told about waiting
    batches: Batches = field(default_factory=Batches)  # what forwards read; a feature may put another reader here
    options: Any = None  # of the feature that is being opened
    opened: list[Channels] = field(default_factory=list)  # the transfers of all purposes

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.placement.plan

    @property
    def has_loss(self) -> bool:
        """Whether the model's last chunk, with the output layer and the loss, is on this rank."""
        return self.placement.locate(self.rank).stage == self.placement.last[0]

    def new_channels(self, purpose: str, edges: Iterable[Edge], pending_per_edge: int | None) -> Channels:
        """Transfers of a purpose of their own.  Collective: all ranks open the same purposes in the same order.

        Args:
            purpose: What travels, for messages.
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
    """The half on a rank of one feature, whatever the plan says.  Collective."""
    half: RuntimeFeature = importlib.import_module(spec.runtime).open_feature(context)
    half.name = spec.name
    return half
