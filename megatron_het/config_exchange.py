"""What the context exchange cannot be combined with, each with its reason."""

from __future__ import annotations

from megatron_het.plan import Plan, PlanError
from megatron_het.plan.slices import EXCHANGE_PARAMETERS, exchange_of, slices_of


def check_exchange(plan: Plan) -> None:
    """Refuse what the context exchange cannot do, before anything is started.

    Args:
        plan: A plan whose slices have been checked.

    Raises:
        PlanError: The first thing that does not fit.
    """
    parameters = plan.schedule.parameters
    for name in EXCHANGE_PARAMETERS:
        value = parameters.get(name)
        if name != "exchange_units" and value is not None and not isinstance(value, bool):
            raise PlanError(f"schedule.parameters.{name}", value, "must be true or false")
    options = exchange_of(plan)
    if options is None:
        given = next((name for name in EXCHANGE_PARAMETERS[1:] if name in parameters), None)
        if given is not None:
            raise PlanError(
                f"schedule.parameters.{given}", parameters[given], "there is no context exchange to set up",
                "Add --het-context-exchange, or context_exchange to the schedule's parameters",
            )
        return
    tokens = plan.model.seq_length // slices_of(plan) // plan.context_parallel
    units = options.units
    if not isinstance(units, int) or isinstance(units, bool) or units < 1 or tokens % units:
        raise PlanError(
            "--het-exchange-units", units, f"must be a whole number that divides the {tokens} tokens of a slice"
        )
    _check_stages(plan)


def _check_stages(plan: Plan) -> None:
    sizes = sorted({r.tp for stage in plan.stages for r in stage.replicas})
    where = "--het-context-exchange"
    if len(sizes) > 1:
        raise PlanError(
            where, True, f"the stages have TP sizes {sizes}: a query, of one TP rank's heads, is attended to by "
            "one rank of another stage, which must hold the same heads", "Use one TP size, or leave it out",
        )
    layers = sorted({n for stage in plan.stages for n in stage.layers})
    if len(layers) > 1:
        raise PlanError(
            where, True, f"chunks have {layers} layers: devices attend for each other layer by layer, "
            "so all chunks need as many", "Divide the layers evenly, or leave it out",
        )
