"""Interface of a feature: options, checks, refusals, passes and the upstream code that it depends on.

A feature is a capability that a plan can ask for beyond its schedule.  This half of a feature needs no torch: the
planner, the command line and the start of a run read it.  The half that runs on a rank is in the module that
``Feature.runtime`` names.

A field of a feature's options declares its name in the plan, its flag, its help text and its valid values.  Flags,
``--help``, checks and the list of known parameters are made from the fields.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_het.plan import ModelShape, Plan, PlanError, ScheduleSpec
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.cutting import Cutting, Parts
from megatron_het.schedule.ir import SLICED_SCHEDULES, Program
from megatron_het.schedule.joint import unequal_orders

# Overlapped reductions of gradients: all replicas of a stage must begin them in one order.


def check_reductions_meet(program: Callable[[], Program], args: Any, cause: str) -> None:
    """Refuse ``--overlap-grad-reduce`` where replicas of a stage would start their reductions in different orders.

    Args:
        program: Makes the training program.
        cause: The option that may change the order in which gradients are completed, for the message.

    Raises:
        PlanError: The replicas of a stage complete their gradients in different orders.
    """
    stage = unequal_orders(program()) if args.overlap_grad_reduce else None
    if stage is not None:
        raise PlanError(
            "--overlap-grad-reduce",
            True,
            f"with {cause} the replicas of stage {stage} complete "
            "their gradients in different orders, so that their reductions would not meet",
            "Give all replicas of a stage as many microbatches, or leave the flag out",
        )


Text = str | Callable[[Plan], str]  # a text, or how to make it for a plan


@dataclass(frozen=True, slots=True)
class Option:
    """One parameter of a plan's schedule, and the flag that sets it."""

    parameter: str  # name among the schedule's parameters
    kind: type = bool  # bool, int, float or str; for a field of options, its type
    flag: str = ""  # the flag that sets it, "" for none
    help: str = ""  # help text of the flag
    metavar: str = ""  # name of the flag's value in the help text
    choices: tuple[str, ...] = ()  # the valid values, where there are few
    accepts: Callable[[Any, Plan], bool] | None = None  # whether a value of the right type is valid for a plan
    problem: Text = ""  # error text for a value that ``accepts`` refuses
    where: str = ""  # name of the option in errors; the parameter's place in the plan, if empty
    field: str = ""  # name of the options' field, "" for a switch
    on_host: Any = None  # the value that offloads most to main memory; None if the option offloads nothing

    def check(self, value: Any, plan: Plan) -> None:
        """Refuse a value of the wrong type or out of range; raises PlanError."""
        problem = self.problem(plan) if callable(self.problem) else self.problem
        if not self._has_type(value):
            raise self._error(value, problem or f"must be of type {self.kind.__name__}")
        if self.choices and value not in self.choices:
            raise self._error(value, problem or f"must be one of {self.choices}")
        if self.accepts is not None and not self.accepts(value, plan):
            raise self._error(value, problem)

    def _has_type(self, value: Any) -> bool:
        """Whether the value has the option's type: a boolean is no number, and an integer may stand for a float."""
        if self.kind is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        return type(value) is self.kind

    def _error(self, value: Any, problem: str) -> PlanError:
        return PlanError(self.where or f"schedule.parameters.{self.parameter}", value, problem)


def not_sliced(plan: Plan, given: Option) -> PlanError:
    """The error for a parameter of slices with a schedule of whole sequences."""
    problem = f"schedule {plan.schedule.name} does not cut sequences"
    hint = f"Schedules that do: {', '.join(SLICED_SCHEDULES)}"
    return PlanError(f"schedule.parameters.{given.parameter}", plan.schedule.parameters[given.parameter], problem, hint)


def option(parameter: str, default: Any, **described: Any) -> Any:
    """A field of a feature's options.

    Args:
        parameter: Name among the schedule's parameters.
        default: The field's value if the plan does not set it.
        **described: Further attributes of :class:`Option`, without ``kind`` and ``field``.
    """
    return field(default=default, metadata={"option": Option(parameter, **described)})


def is_given(value: Any) -> bool:
    """Whether an argument without a default has a value."""
    return value is not None


def more_than_one(value: Any) -> bool:
    """Whether a size is given and above 1."""
    return value is not None and value != 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """A value of Megatron's arguments that cannot be combined with a plan or a feature."""

    attribute: str
    reason: str  # why it cannot be combined
    when: Callable[[Any], bool] = bool  # whether a value is refused; by default every true value

    def check(self, args: Any, what: str) -> None:
        """Raise a PlanError if the argument is refused together with ``what``."""
        value = getattr(args, self.attribute, None)
        if self.when(value):
            raise PlanError(flag_of(self.attribute), value, f"cannot be used with {what}: {self.reason}")


@dataclass(frozen=True, slots=True)
class ViewFlag:
    """A flag of ``python -m megatron_het.schedule``, which also shows programs that no plan asks for."""

    flag: str  # with leading hyphens
    help: str  # help text
    default: bool | int | str = False  # value without the flag: False makes a switch of it, a number a count
    most: int = 0  # the largest count
    choices: tuple[str, ...] = ()  # the values of a flag with few


def flag_of(attribute: str) -> str:
    """The flag behind an attribute of parsed arguments."""
    return "--" + attribute.replace("_vp_", "_virtual_pipeline_").replace("_", "-")


@dataclass(frozen=True, slots=True)
class Figures:
    """Times and sizes from which features compute their costs, per device (replica of a stage)."""

    gather_s: tuple[float, ...]  # all-gather of the parameters of all chunks over the stage's replicas
    reduce_s: tuple[float, ...]  # reduce-scatter of their gradients
    host_copy_s: tuple[float, ...]  # copy of the device's parameter shards between host and device, one way
    host_bytes_per_s: tuple[float, ...]  # bandwidth between host and device
    # embedding_forward_s, embedding_backward_s: word embeddings of one microbatch, if this device computed all of them
    embedding_forward_s: tuple[float, ...]
    embedding_backward_s: tuple[float, ...]
    # head_forward_s, head_backward_s: output layer and loss of one microbatch, likewise
    head_forward_s: tuple[float, ...]
    head_backward_s: tuple[float, ...]
    head_bytes: tuple[float, ...]  # activations of output layer and loss for one microbatch, likewise
    # attention_forward_s, attention_backward_s: causal attention of one layer and microbatch
    attention_forward_s: tuple[float, ...]
    attention_backward_s: tuple[float, ...]
    kv_bytes: tuple[float, ...]  # keys and values of one layer and microbatch
    query_bytes: tuple[float, ...]  # query plus output of one layer and microbatch


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a feature without any: the plan's schedule or Megatron's own flags switch it on."""


class Feature:
    """One feature.  Subclasses override the defaults; the instances are in ``megatron_het.features.FEATURES``."""

    name: ClassVar[str]  # its name, as in the column ``executor`` of the operation kinds
    title: ClassVar[str] = ""  # heading of its flags in ``--help``
    options: ClassVar[type] = NoOptions  # frozen dataclass whose fields are made by :func:`option`
    always: ClassVar[bool] = False  # whether every plan with one of its schedules has it
    switch: ClassVar[Option | None] = None  # the parameter that switches the feature on; None if any option does
    implied: ClassVar[bool] = False  # whether flags of its options switch it on, too
    # the flags with which ``python -m megatron_het.schedule`` shows it, with any schedule
    view_flags: ClassVar[tuple[ViewFlag, ...]] = ()
    show_flags: ClassVar[tuple[ViewFlag, ...]] = ()  # flags of the command line's ``show`` alone; see :meth:`shown`
    schedules: ClassVar[tuple[str, ...] | None] = None
    # schedules whose operations it executes: without it they can only be simulated
    runs: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[tuple[Refusal, ...]] = ()  # Megatron's arguments that cannot be combined with the feature
    refused_by_plans: ClassVar[tuple[Refusal, ...]] = ()  # those that no plan accepts, with the feature or without
    sets: ClassVar[tuple[str, ...]] = ()  # Megatron's flags that are set by a plan
    # Dotted names of upstream code that it depends on, with the hashes of their sources
    # (``megatron_patches.source_hash``).  A run with the feature does not start when one differs.
    upstream_names: ClassVar[Mapping[str, str]] = {}
    # dotted names of functions that make a subclass of Megatron's distributed optimizer, each on top of the one before
    # (``megatron_patches/patches.py``)
    optimizer_layers: ClassVar[tuple[str, ...]] = ()
    # flags of Megatron that a model file may give for it: argument, and its default
    training_flags: ClassVar[Mapping[str, tuple[str, Any]]] = {}
    # whether every row of the vocabulary is on one stage, also with tied embeddings
    holds_rows_once: ClassVar[bool] = False
    packing_flags: ClassVar[frozenset[str]] = frozenset()  # flags that define the boundaries of documents
    called: ClassVar[str] = ""  # its name in refusals of Megatron's arguments, in place of its title
    no_graphs: ClassVar[str] = ""  # why CUDA graphs of layers cannot be combined with it; "" where they can
    no_local_graphs: ClassVar[str] = ""  # the same for graphs that Megatron captures itself, without Transformer Engine
    # dotted name of the module with its half on a rank, ``runtime.py`` beside ``spec.py``; "" for a feature that lies
    # in no ``spec.py``
    runtime: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """Set ``runtime`` to the module ``runtime.py`` beside the subclass's ``spec.py``."""
        room, _, page = cls.__module__.rpartition(".")
        if page == "spec":
            cls.runtime = f"{room}.runtime"

    # -- options -----------------------------------------------------------------------------------

    @functools.cached_property
    def parameters(self) -> tuple[Option, ...]:
        """All parameters of a plan's schedule that belong to the feature, the switch first."""
        kinds = typing.get_type_hints(self.options)
        described = [(f, f.metadata["option"]) for f in dataclasses.fields(self.options) if "option" in f.metadata]
        # In a plan tuples are lists.
        plain = {f.name: list if typing.get_origin(kinds[f.name]) is tuple else kinds[f.name] for f, _ in described}
        found = tuple(dataclasses.replace(o, field=f.name, kind=plain[f.name]) for f, o in described)
        return found if self.switch is None else (self.switch, *found)

    def goes_with(self, schedule: str) -> bool:
        """Whether plans with this schedule can have the feature."""
        return self.schedules is None or schedule in self.schedules

    def read(self, schedule: ScheduleSpec) -> Any | None:
        """The options from a schedule's checked parameters; None where the feature is off."""
        given = {o: schedule.parameters[o.parameter] for o in self.parameters if o.parameter in schedule.parameters}
        is_on = bool(given) if self.switch is None else given.get(self.switch, False)
        if not (is_on or self.always) or not self.goes_with(schedule.name):
            return None
        values = {o.field: value for o, value in given.items() if o.field}
        return self.options(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})

    def options_of(self, plan: Plan) -> Any | None:
        """The options of a checked plan; None where the feature is off."""
        return self.read(plan.schedule)

    def viewed(self, flags: Mapping[str, Any]) -> Any | None:
        """The options that ``view_flags`` ask for, by attribute as argparse names them; None where it is off."""
        return None

    def shown(self, program: Program, flags: Mapping[str, Any]) -> tuple[object, Sequence[str]] | None:
        """Returns the output that ``show_flags`` ask for in place of a picture, as (plain data, lines), or None."""
        return None

    # -- checks ------------------------------------------------------------------------------------

    def check(self, plan: Plan) -> None:
        """Refuse a plan that no training can run, whatever Megatron's arguments; raises PlanError.

        Args:
            plan: All its parameters are known for its schedule (``features.registry.check_plan_alone``).
        """
        given = plan.schedule.parameters
        mine = [o for o in self.parameters if o.parameter in given]
        for o in mine:
            o.check(given[o.parameter], plan)
        options = self.options_of(plan)
        if options is not None:
            self.check_plan(plan, options)
            return
        lonely = next((o for o in mine if o is not self.switch), None)
        error = None if lonely is None else self.without_switch(plan, lonely)
        if error is not None:
            raise error
        self.check_off(plan)

    def elsewhere(self, plan: Plan, given: Option) -> PlanError | None:
        """The error for a parameter with a schedule that cannot have the feature; None for the general error."""
        return None

    def without_switch(self, plan: Plan, given: Option) -> PlanError | None:
        """The error for an option of a feature that is off; None where the option is allowed nevertheless."""
        if self.switch is None:
            return None
        return PlanError(
            f"schedule.parameters.{given.parameter}",
            plan.schedule.parameters[given.parameter],
            f"is an option of the {self.title}",
            f'Add "{self.switch.parameter}": true',
        )

    def check_plan(self, plan: Plan, options: Any) -> None:
        """Refuse a plan that has the feature; the values of its options have been checked. Raises PlanError."""

    def check_copies(self, plan: Plan, options: Any) -> None:
        """Raise a PlanError where the first and the last stage's copies of tied embeddings would not stay equal."""

    def check_off(self, plan: Plan) -> None:
        """Refuse a plan that needs the feature but does not have it; raises PlanError."""

    def named(self, plan: Plan) -> str:
        """Returns the feature's name in refusals of Megatron's arguments."""
        return self.called or self.title

    def check_flags(self, plans: Sequence[Plan], flags: Any) -> None:
        """Refuse a ``--het-*`` flag of the feature that cannot be combined with the plans; raises PlanError.

        Args:
            plans: All plans of the job.
            flags: Flags of the command line, with argparse's names.
        """

    def check_any_arguments(self, plan: Plan, args: Any) -> None:
        """Refuse arguments of Megatron that no plan, or no plan without the feature, accepts; raises PlanError."""
        for refusal in self.refused_by_plans:
            refusal.check(args, "--het-plan")

    def check_arguments(self, plan: Plan, options: Any, args: Any) -> None:
        """Refuse arguments of Megatron that cannot be combined with the feature; raises PlanError."""
        for refusal in self.refused:
            refusal.check(args, self.named(plan))

    def check_program(self, program: Callable[[], Program], options: Any, args: Any) -> None:
        """Refuse arguments of Megatron that cannot be combined with the plan's training program; raises PlanError.

        Args:
            program: Makes the program of all devices.  A large one takes seconds: call it only where needed.
        """

    def apply(self, plan: Plan, options: Any, args: Any) -> None:
        """Set the arguments of Megatron that the feature needs, before they are validated."""

    def runs_with(self, args: Any) -> bool:
        """Whether the runtime half has work to do under Megatron's ``args``; otherwise it is not imported."""
        return True

    def beyond_stock(self, plan: Plan, options: Any) -> str:
        """Why stock Megatron cannot run a plan with the feature, if that does not follow from a schedule parameter."""
        return ""

    # -- the model ---------------------------------------------------------------------------------

    def extra_layers(self, model: Any) -> int:
        """Number of layers beyond ``num_layers``; ``model`` is Megatron's arguments or a plan's model (same names)."""
        return 0

    def layer_flags(self, model: Any) -> dict[str, int]:
        """Megatron's flags, without leading hyphens, that set the number of these layers."""
        return {}

    def model_problem(self, model: Any) -> str:
        """Why the planner's model cannot have the feature as its file describes it; "" where it can."""
        return ""

    def shrink(self, model: ModelShape, like: ModelShape) -> ModelShape:
        """A tiny model with the smallest form of the feature that the larger model ``like`` has."""
        return model

    def reads_tokens(self, args: Any, vp_stage: int | None) -> bool:
        """Whether this rank's chunk reads tokens although it does not have the embedding."""
        return False

    # -- programs ----------------------------------------------------------------------------------

    def shape(self, options: Any) -> dict[str, Any]:
        """Returns the fields of ``schedule.ir.Shape`` that the feature sets."""
        return {}

    def limited(self, parts: Parts) -> "Feature":
        """The feature where documents or sliding windows limit what slices see, as ``parts`` say; itself by default."""
        return self

    def cutting(self, plan: Plan, args: Any) -> Cutting | None:
        """The feature's cutting of sequences; None where it cuts none.  ``args`` are Megatron's, or None."""
        return None

    def packing_argument(self, args: Any) -> str:
        """Megatron's argument that asks for several documents in a sequence; "" if none does."""
        return ""

    def runs_of_a_layer(self, args: Any) -> int:
        """Returns the largest number of times that one layer runs in a pass, from Megatron's arguments."""
        return 1

    def attention_units(self, options: Any) -> int:
        """Exchange units per slice, in which the feature moves attention between devices; 0 if it moves none."""
        return 0

    def before_transfers(self, program: Program, options: Any, speeds: Sequence[float] | None) -> Program:
        """The feature's pass over compute operations, before transfers are added.

        Args:
            program: The program with the operations of earlier features.

        Raises:
            ValueError: The program cannot have the feature.
        """
        return program

    def after_transfers(self, program: Program, options: Any) -> Program:
        """The feature's pass over the program with transfers."""
        return program

    def in_order(self, program: Program, options: Any, speeds: Sequence[float] | None) -> Program:
        """The feature's last pass, over the complete program with transfers in one global order."""
        return program

    def price(self, costs: Costs, options: Any, program: Program, figures: Figures) -> Costs:
        """The costs of a program with the feature's operations.

        Args:
            costs: Without them: the whole vocabulary on the first and the last chunk, all activations on the device.
            program: The program with the feature's operations.
            figures: Times and sizes of each device, from which the operations are priced.
        """
        return costs


# Kinds of attention that slice attention does not support, wherever it replaces a layer's own.

POSITIONS = ("rope", "yarn", "learned_absolute", "none")
ATTENTION_REFUSED = (
    Refusal("attention_dropout", "dropout inside attention would differ in a backward; use --attention-dropout 0"),
    Refusal("experimental_attention_variant", "only ordinary softmax attention is cut into slices"),
    Refusal("qk_clip", "the largest attention logit is not known to the slice kernels"),
    Refusal("log_max_attention_logit", "the largest attention logit is not known to the slice kernels"),
    Refusal("fp8_dot_product_attention", "slices are merged from results in the precision of the model"),
    Refusal("fp8_multi_head_attention", "slices are merged from results in the precision of the model"),
    Refusal("use_kitchen_attention", "its kernels do not give what slices are merged from"),
    Refusal("fused_single_qkv_rope", "it refuses the argument that tells a layer its slice"),
    Refusal("heterogeneous_layers_config_path", "layers without attention are not supported with slices"),
)
"""Megatron's arguments that slice attention does not support, wherever it replaces a layer's own."""


def check_reach(args: Any) -> None:
    """Refuse position embeddings, windows and recomputation that slice attention does not support; raises PlanError."""
    if args.position_embedding_type not in POSITIONS:
        problem = f"positions of slices are known for {', '.join(POSITIONS)} only"
        raise PlanError("--position-embedding-type", args.position_embedding_type, problem)
    if getattr(args, "multi_latent_attention", False) and "mla_up_proj" in (args.recompute_modules or ()):
        problem = "slices make keys and values anew from compressed ones already, so there is nothing to recompute"
        raise PlanError("--recompute-modules", "mla_up_proj", problem, "Leave mla_up_proj out")
    size = getattr(args, "window_size", None)
    if size and (size[0] < 0 or size[1] != 0):
        problem = "slices see a number of tokens before their own, and none after"
        hint = "Give the tokens before, and 0: --window-size 4096,0"
        raise PlanError("--window-size", ",".join(map(str, size)), problem, hint)
