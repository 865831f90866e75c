"""Options, checks and costs of the attention context exchange (SlimPipe, section 4.2)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_het.features.base import Feature, Figures, Option, ViewFlag, not_sliced, option
from megatron_het.features.context_exchange.kinds import exchanged_layers
from megatron_het.features.registry import slice_tokens
from megatron_het.plan import Plan, PlanError
from megatron_het.schedule.cost import Costs, PerChunk
from megatron_het.schedule.cutting import Bounds, Parts
from megatron_het.schedule.ir import SLICED_SCHEDULES, Program

# Tokens of the units of the context exchange on a rank, for slices of equal and unequal length.


@dataclass(eq=False)
class Units:
    """Tokens of exchange units: every slice has equally many units, and those of a longer slice have more tokens.

    Lengths of slices are multiples that the ranks can divide into units of whole tokens
    (``features/slices/spec.py: _token_unit``), so nothing is rounded here.
    """

    units: int
    parts: Mapping[int, int]  # tokens of a slice of nominal length on each world rank
    nominal: int  # nominal length of a slice
    bounds: Callable[[int], Bounds]  # returns the first tokens of a microbatch's slices, and its end

    def slice(self, microbatch: int, index: int) -> tuple[int, int]:
        """Tokens ``[first, end)`` of a slice in the sequence."""
        first, end = self.bounds(microbatch)[index : index + 2]
        return first, end

    def slice_tokens(self, microbatch: int, index: int) -> int:
        """Number of tokens of a slice on all ranks that share it."""
        first, end = self.slice(microbatch, index)
        return end - first

    def first(self, rank: int, microbatch: int, unit: int) -> int:
        """The first token of a unit, and so the end of the unit before, as a world rank numbers its own tokens.

        Args:
            rank: World rank that has the keys and values.
            unit: Number of the unit from the start of the sequence.
        """
        index, within = divmod(unit, self.units)
        bounds, part = self.bounds(microbatch), self.parts[rank]
        first = bounds[index] * part // self.nominal
        if not within:
            return first
        return first + (bounds[index + 1] - bounds[index]) * part // self.nominal * within // self.units

    def tokens(self, rank: int, microbatch: int, start: int, stop: int) -> int:
        """Number of tokens in units ``[start, stop)`` on a rank."""
        return self.first(rank, microbatch, stop) - self.first(rank, microbatch, start)


_SWITCH = "--het-context-exchange"
DEFAULT_UNITS = 2
_TRUE_OR_FALSE = "must be true or false"

ATTENTION, REST = "exchange_attention", "exchange_rest"
"""Parameters of the plan's schedule with times of passes, for an exchange between unequal devices."""
_MOST_TIME = 1_000_000_000


def _replicas(plan: Plan) -> int:
    return sum(len(stage.replicas) for stage in plan.stages)


def _chunks(plan: Plan) -> int:
    return sum(len(stage.replicas) * len(stage.layers) for stage in plan.stages)


def _are_times(value: list[Any], count: int) -> bool:
    is_whole = all(isinstance(time, int) and not isinstance(time, bool) for time in value)
    return len(value) == count and is_whole and all(1 <= time <= _MOST_TIME for time in value)


def _times_problem(count: int, each: str, what: str) -> str:
    return (
        f"must be a list of {count} whole numbers, one per {each}, each of 1 to {_MOST_TIME}: what {what} takes there, "
        "in any unit of time"
    )


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """Options of the attention context exchange."""

    units: int = option(
        "exchange_units",
        DEFAULT_UNITS,
        flag="--het-exchange-units",
        metavar="Q",
        help=f"the context exchange moves attention in units of 1/Q of a slice (default: {DEFAULT_UNITS})",
        accepts=lambda value, plan: value >= 1 and slice_tokens(plan) % value == 0,
        problem=lambda plan: f"must be a whole number that divides the {slice_tokens(plan)} tokens of a slice",
        where="--het-exchange-units",
    )
    keep: bool = option(
        "exchange_keep",
        False,
        flag="--het-exchange-keep",
        help="keys and values stay at the helper until the end of their microbatch, and their gradients "
        "return once: less traffic, more memory",
        problem=_TRUE_OR_FALSE,
    )
    idle: bool = option(
        "exchange_idle",
        False,
        flag="--het-exchange-idle",
        help="stages that idle at the start and the end of an iteration also compute attention for others",
        problem=_TRUE_OR_FALSE,
    )
    # time of one layer's attention of a slice to the keys and values of one slice on each replica, stage by
    # stage, in any unit of time; empty if all are equal
    attention: tuple[int, ...] = option(
        ATTENTION,
        (),
        accepts=lambda value, plan: _are_times(value, _replicas(plan)),
        problem=lambda plan: _times_problem(_replicas(plan), "replica, stage by stage", "attention to one slice"),
    )
    # time of the rest of a slice's pass, for every chunk of every replica; of as many layers each
    rest: tuple[int, ...] = option(
        REST,
        (),
        accepts=lambda value, plan: _are_times(value, _chunks(plan)),
        problem=lambda plan: _times_problem(_chunks(plan), "chunk of every replica", "a pass without attention"),
    )


class ContextExchange(Feature):
    """The context exchange: devices with short prefixes attend for those with long ones."""

    name = "context_exchange"
    title = "attention context exchange"
    options = ExchangeOptions
    switch = Option(
        "context_exchange",
        flag=_SWITCH,
        help="devices with short prefixes compute attention for those with long ones, so that slices take equal "
        "time on all stages (SlimPipe, section 4.2)",
        problem=_TRUE_OR_FALSE,
    )
    schedules = SLICED_SCHEDULES
    view_flags = (
        ViewFlag("--exchange-units", "attention exchange in 1/UNITS slices", 0, most=256),
        ViewFlag("--helping", "idle devices take part in the exchange"),
        ViewFlag("--keep-kv", "keys and values stay at the helper"),
    )
    show_flags = (ViewFlag("--exchange-plan", "the exchange plan instead of a timeline"),)
    parts: Parts = ()  # attention of slices, by microbatch and slice; empty if each sees all tokens before it

    def limited(self, parts: Parts) -> "ContextExchange":
        """Returns the feature for an iteration with such attention and lengths of slices."""
        found = copy.copy(self)
        found.parts = parts
        return found

    def attention_units(self, options: ExchangeOptions) -> int:
        """Returns the exchange units of a slice; 1 for an invalid value, which is refused later."""
        return options.units if isinstance(options.units, int) and options.units > 0 else 1

    def viewed(self, flags: Mapping[str, Any]) -> ExchangeOptions | None:
        """Returns the options from flags; the number of units switches the exchange on."""
        units = flags["exchange_units"]
        return ExchangeOptions(units, keep=flags["keep_kv"], idle=flags["helping"]) if units else None

    def shown(self, program: Program, flags: Mapping[str, Any]) -> tuple[object, Sequence[str]] | None:
        """Returns which device attends for which, slot by slot, if a flag requests it."""
        if not flags["exchange_plan"]:
            return None
        from megatron_het.features.context_exchange.passes import plan_exchange

        units = flags["exchange_units"] or DEFAULT_UNITS
        plan = plan_exchange(program, units=units, helping=flags["helping"], keep=flags["keep_kv"])
        return plan.to_json(), ("  slot | loads | giver>taker:slices | loads after", *plan.lines())

    def elsewhere(self, plan: Plan, given: Option) -> PlanError:
        """The error for an exchange with a schedule of whole sequences."""
        return not_sliced(plan, given)

    def without_switch(self, plan: Plan, given: Option) -> PlanError:
        """The error for options of an exchange that is switched off."""
        return PlanError(
            f"schedule.parameters.{given.parameter}",
            plan.schedule.parameters[given.parameter],
            "there is no context exchange to set up",
            "Add --het-context-exchange, or context_exchange to the schedule's parameters",
        )

    def check_plan(self, plan: Plan, options: ExchangeOptions) -> None:
        """Refuse stages that cannot attend for each other."""
        counts = sorted({len(stage.layers) for stage in plan.stages})
        if len(counts) > 1:
            raise PlanError(
                _SWITCH,
                True,
                f"stages have {counts} chunks: devices attend for each other pass by pass, and have other numbers of "
                "passes then",
                "Give all stages the same number of chunks, or leave it out",
            )
        if bool(options.attention) != bool(options.rest):
            given, other = (ATTENTION, REST) if options.attention else (REST, ATTENTION)
            problem = f"says nothing without {other}: the exchange weighs both against each other"
            hint = f"Give {other} as well"
            raise PlanError(f"schedule.parameters.{given}", plan.schedule.parameters[given], problem, hint)
        if exchanged_layers(plan.attention_layers) == 0:
            lacks, layer = ("attention", "a layer of attention") if plan.model.pattern else ("layers", "a layer")
            raise PlanError(
                _SWITCH,
                True,
                f"a chunk has no {lacks}: devices attend for each other layer by layer, in as many layers as the "
                "smallest chunk has",
                f"Give every chunk {layer}, or leave it out",
            )

    def before_transfers(self, program: Program, options: ExchangeOptions, speeds: Sequence[float] | None) -> Program:
        """Adds the operations of the exchange."""
        from megatron_het.features.context_exchange.passes import PassCosts, add_exchange

        costs = PassCosts.of(program.shape, options.attention, options.rest) if options.attention else None
        return add_exchange(
            program, units=options.units, keep=options.keep, helping=options.idle, costs=costs, parts=self.parts
        )

    def price(self, costs: Costs, options: ExchangeOptions, program: Program, figures: Figures) -> Costs:
        """Adds the costs of attention, separate from the rest of a layer, and the sizes of its messages."""
        layers = [program.shape.attention_layers[device.stage] for device in program.devices]
        exchanged = exchanged_layers(program.shape.attention_layers)

        def per_chunk(of_layer: Sequence[float]) -> PerChunk:
            return tuple(tuple(n * value for n in row) for row, value in zip(layers, of_layer, strict=True))

        def sent(of_layer: Sequence[float]) -> PerChunk:
            return tuple((exchanged * value,) * len(row) for row, value in zip(layers, of_layer, strict=True))

        def less(table: PerChunk, part: PerChunk) -> PerChunk:
            return tuple(tuple(a - b for a, b in zip(row, taken)) for row, taken in zip(table, part, strict=True))

        messages = {"kv_message_bytes": sent(figures.kv_bytes), "query_message_bytes": sent(figures.query_bytes)}
        if costs.attention_forward_s:  # separate already
            return replace(costs, **messages)  # type: ignore[arg-type]
        forward, backward = per_chunk(figures.attention_forward_s), per_chunk(figures.attention_backward_s)
        return replace(
            costs,
            **messages,  # type: ignore[arg-type]
            forward_s=less(costs.forward_s, forward),
            backward_s=less(costs.backward_s, backward),
            attention_forward_s=forward,
            attention_backward_s=backward,
        )
