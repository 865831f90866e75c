"""Options of the watch, which compares a run with its plan's prediction."""

from dataclasses import dataclass

from megatron_het.features.base import Feature, option
from megatron_het.plan import Plan, PlanError

ON, OFF = "on", "off"
MOST_WINDOW = 100


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Options of the watch."""

    state: str = option(
        "watch",
        ON,
        flag="--het-watch",
        choices=(ON, OFF),
        help="compare measured with predicted times while training, and name slow devices, slow links and wrong "
        "profiles (default: on where the plan carries the costs of its prediction)",
        problem=f"must be {ON} or {OFF}",
    )
    threshold: float = option(
        "watch_threshold",
        0.15,
        flag="--het-watch-threshold",
        metavar="SHARE",
        help="smallest drift that is reported: 0.15 (the default) is 15 %% longer than predicted",
        accepts=lambda value, plan: 0.01 <= value <= 100,
        problem="must be at least 0.01 and at most 100",
    )
    smoothing: int = option(
        "watch_window",
        5,
        flag="--het-watch-window",
        metavar="N",
        help="iterations over which medians are taken (default 5); a drift is reported after about that many",
        accepts=lambda value, plan: 1 <= value <= MOST_WINDOW,
        problem=f"must be at least 1 and at most {MOST_WINDOW}",
    )


class Watch(Feature):
    """The watch: on if the plan has the costs of its prediction, unless ``--het-watch off`` is given."""

    name = "watch"
    title = "watch"
    options = WatchOptions

    def options_of(self, plan: Plan) -> WatchOptions | None:
        """The options; None if the watch is off, or the plan has no predicted costs."""
        given = plan.schedule.parameters
        found = WatchOptions(**{o.field: given[o.parameter] for o in self.parameters if o.parameter in given})
        has_costs = plan.predicted is not None and plan.predicted.costs is not None
        return found if has_costs and found.state == ON else None

    def check_off(self, plan: Plan) -> None:
        """Refuse ``--het-watch on`` for a plan without predicted costs."""
        if plan.schedule.parameters.get("watch") == ON:
            raise PlanError(
                "schedule.parameters.watch",
                ON,
                "the plan does not carry the costs of its prediction (predicted.costs), so there is nothing to "
                "compare with",
                "Make the plan again with this release's planner, or leave --het-watch out",
            )
