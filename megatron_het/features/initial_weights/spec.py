"""Initial weights that depend on names and the seed only, so that every plan starts from the same ones."""

from dataclasses import dataclass
from typing import Any

from megatron_het.features.base import Feature, option
from megatron_het.plan import Plan, ScheduleSpec

BY_NAME, STOCK = "by-name", "stock"


@dataclass(frozen=True, slots=True)
class InitialWeightsOptions:
    """How weights are drawn when no checkpoint is loaded."""

    # ``by-name``: every parameter from a generator of its own, seeded by its name in the whole model and ``--seed``;
    # ``stock``: as Megatron draws them, which depends on stage, chunk and TP
    method: str = option(
        "initial_weights",
        BY_NAME,
        flag="--het-init",
        choices=(BY_NAME, STOCK),
        help="random initial weights without a checkpoint: by-name, the same under every plan (the default with a "
        "plan), or stock, which depend on stages, chunks and TP",
        problem=f"must be {BY_NAME} or {STOCK}",
    )


class InitialWeights(Feature):
    """Equal initial weights under every plan; on unless the plan says ``stock``."""

    name = "initial_weights"
    title = "initial weights"
    options = InitialWeightsOptions

    def read(self, schedule: ScheduleSpec) -> InitialWeightsOptions | None:
        """The options; None for Megatron's own way."""
        method = schedule.parameters.get("initial_weights", BY_NAME)
        return None if method == STOCK else InitialWeightsOptions(method)

    def apply(self, plan: Plan, options: InitialWeightsOptions, args: Any) -> None:
        """Weights are drawn on the host anyway, part by part; Megatron's way there draws them whole first."""
        args.use_cpu_initialization = False
