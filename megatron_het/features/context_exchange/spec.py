"""The attention context exchange, and what it cannot be combined with (SlimPipe, section 4.2)."""

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

# Which tokens of a rank the units of the context exchange are, whether slices are of equal length or not.


@dataclass(eq=False)
class Units:
    """Every slice has as many exchange units; those of a longer one have more tokens.

    Slices have multiples of what the ranks that share them divide into units of whole tokens
    (``features/slices/spec.py: _token_unit``), so that nothing here is rounded.
    """

    units: int
    parts: Mapping[int, int]  # what each world rank holds of a slice of nominal length, in tokens
    nominal: int  # that length
    bounds: Callable[[int], Bounds]  # where the slices of a microbatch begin, and its end

    def slice(self, microbatch: int, index: int) -> tuple[int, int]:
        """Tokens ``[first, end)`` of the sequence that a slice has."""
        first, end = self.bounds(microbatch)[index : index + 2]
        return first, end

    def slice_tokens(self, microbatch: int, index: int) -> int:
        """Tokens of a slice on all ranks that share it."""
        first, end = self.slice(microbatch, index)
        return end - first

    def first(self, rank: int, microbatch: int, unit: int) -> int:
        """The first token of a unit, as a world rank counts the tokens that it holds; the end of the unit before.

        Args:
            rank: Who has the keys and values.
            unit: From the start of the sequence.
        """
        index, within = divmod(unit, self.units)
        bounds, part = self.bounds(microbatch), self.parts[rank]
        first = bounds[index] * part // self.nominal
        if not within:
            return first
        return first + (bounds[index + 1] - bounds[index]) * part // self.nominal * within // self.units

    def tokens(self, rank: int, microbatch: int, start: int, stop: int) -> int:
        """How many tokens units ``[start, stop)`` of a rank have."""
        return self.first(rank, microbatch, stop) - self.first(rank, microbatch, start)


_SWITCH = "--het-context-exchange"
DEFAULT_UNITS = 2
_TRUE_OR_FALSE = "must be true or false"

ATTENTION, REST = "exchange_attention", "exchange_rest"
"""Of the plan's schedule: what passes take, for an exchange between unequal devices."""
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
    """The attention context exchange of a plan."""

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
        help="keys and values stay where they were sent until their microbatch is done, and their gradients "
        "return once: less traffic, more memory",
        problem=_TRUE_OR_FALSE,
    )
    idle: bool = option(
        "exchange_idle",
        False,
        flag="--het-exchange-idle",
        help="stages that wait for work at the start and the end of an iteration attend for others too",
        problem=_TRUE_OR_FALSE,
    )
    # what the attention of one layer and slice to the keys and values of one slice takes on each replica, stage by
    # stage, in any unit of time; none where all take as long
    attention: tuple[int, ...] = option(
        ATTENTION,
        (),
        accepts=lambda value, plan: _are_times(value, _replicas(plan)),
        problem=lambda plan: _times_problem(_replicas(plan), "replica, stage by stage", "attention to one slice"),
    )
    # what everything else of a slice's pass takes, of every chunk of every replica; of as many layers each
    rest: tuple[int, ...] = option(
        REST,
        (),
        accepts=lambda value, plan: _are_times(value, _chunks(plan)),
        problem=lambda plan: _times_problem(_chunks(plan), "chunk of every replica", "a pass without attention"),
    )


class ContextExchange(Feature):
    """Devices with short prefixes attend for those with long ones."""

    name = "context_exchange"
    title = "attention context exchange"
    options = ExchangeOptions
    switch = Option(
        "context_exchange",
        flag=_SWITCH,
        help="devices with short prefixes attend for those with long ones, so that slices take equal "
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
    parts: Parts = ()  # what slices see, by microbatch and slice; empty where each sees all before it

    def limited(self, parts: Parts) -> "ContextExchange":
        """Who attends for whom, by what slices see and how long they are."""
        found = copy.copy(self)
        found.parts = parts
        return found

    def attention_units(self, options: ExchangeOptions) -> int:
        """Returns the exchange units of a slice; 1 also for what is no number of them, which is refused later."""
        return options.units if isinstance(options.units, int) and options.units > 0 else 1

    def viewed(self, flags: Mapping[str, Any]) -> ExchangeOptions | None:
        """Units switch it on."""
        units = flags["exchange_units"]
        return ExchangeOptions(units, keep=flags["keep_kv"], idle=flags["helping"]) if units else None

    def shown(self, program: Program, flags: Mapping[str, Any]) -> tuple[object, Sequence[str]] | None:
        """Who attends for whom, slot by slot."""
        if not flags["exchange_plan"]:
            return None
        from megatron_het.features.context_exchange.passes import plan_exchange

        units = flags["exchange_units"] or DEFAULT_UNITS
        plan = plan_exchange(program, units=units, helping=flags["helping"], keep=flags["keep_kv"])
        return plan.to_json(), ("  slot | loads | giver>taker:slices | loads after", *plan.lines())

    def elsewhere(self, plan: Plan, given: Option) -> PlanError:
        """An exchange between passes over whole sequences."""
        return not_sliced(plan, given)

    def without_switch(self, plan: Plan, given: Option) -> PlanError:
        """Options of an exchange that is not asked for."""
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
        """The program in which devices attend for each other."""
        from megatron_het.features.context_exchange.passes import PassCosts, add_exchange

        costs = PassCosts.of(program.shape, options.attention, options.rest) if options.attention else None
        return add_exchange(
            program, units=options.units, keep=options.keep, helping=options.idle, costs=costs, parts=self.parts
        )

    def price(self, costs: Costs, options: ExchangeOptions, program: Program, figures: Figures) -> Costs:
        """Attention apart from the rest of a layer, and what travels for it."""
        layers = [program.shape.attention_layers[device.stage] for device in program.devices]
        exchanged = exchanged_layers(program.shape.attention_layers)

        def per_chunk(of_layer: Sequence[float]) -> PerChunk:
            return tuple(tuple(n * value for n in row) for row, value in zip(layers, of_layer, strict=True))

        def sent(of_layer: Sequence[float]) -> PerChunk:
            return tuple((exchanged * value,) * len(row) for row, value in zip(layers, of_layer, strict=True))

        def less(table: PerChunk, part: PerChunk) -> PerChunk:
            return tuple(tuple(a - b for a, b in zip(row, taken)) for row, taken in zip(table, part, strict=True))

        messages = {"kv_message_bytes": sent(figures.kv_bytes), "query_message_bytes": sent(figures.query_bytes)}
        if costs.attention_forward_s:  # told apart already
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
