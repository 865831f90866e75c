"""The command ``rent``: the order in which to rent nodes of a cluster file, and from where on more do not pay.

The ladder is greedy.  Its first rung has the nodes with the most tokens per USD alone.  Each further one adds those
with the most additional tokens per USD.  Nodes with a worse bound (``search/bounds.py``) than the result of others
are not searched.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from megatron_het.safe_io import add_options, amount, count

from ..costs.estimate import Estimator
from ..errors import PlannerError
from ..inputs.files import check_target, write_text
from ..report.tables import HARDLY, NOTATION, say, shown_progress, table
from ..search.bounds import Bounds
from ..search.outcome import Goal, Progress, check_prices, estimator_from, file_text, goal_from, left_s
from .command import PoolPlan, add_pauses, costs_from, draw_ladder, limited, nodes_in_words, plan_of_pool, with_growth
from .policies import Costs, Pool

STEPS = 4  # rungs of a kind of node at most, without those that add its whole remainder
SHARE = 8  # a search takes at most 1/SHARE of the remaining CPU time
DAY_S, HOUR_S = 86400.0, 3600.0


@dataclass(frozen=True, slots=True)
class Rung:
    """Nodes that are rented together."""

    pool: Pool  # all nodes so far, by group of the cluster file
    added: Pool  # nodes added to the previous rung; negative for nodes that the plan no longer needs
    plan: PoolPlan  # the best plan on them
    usd_per_h: float  # of all GPUs of the nodes, used or not
    goodput: float  # share of the time in completed iterations, with the expected interruptions
    tokens_per_s: float  # of completed iterations

    @property
    def usd_per_billion_tokens(self) -> float:
        """USD per billion tokens of completed iterations."""
        return self.usd_per_h / HOUR_S / self.tokens_per_s * 1e9

    def hours(self, iterations: int) -> float:
        """Duration of a job."""
        assert self.plan.iteration_s is not None  # nothing is rented without a plan
        return iterations * self.plan.iteration_s / self.goodput / HOUR_S

    def more_per_usd(self, before: "Rung | None") -> float:
        """Additional tokens per second per additional USD per hour."""
        tokens, usd = (0.0, 0.0) if before is None else (before.tokens_per_s, before.usd_per_h)
        gained, paid = self.tokens_per_s - tokens, self.usd_per_h - usd
        return gained / paid if paid > 0 else inf if gained > 0 else 0.0


class Ladder:
    """Searches the rungs.

    Args:
        estimator: Of all nodes that can be rented.
        costs: Of interruptions (``costs_from``).
        options: With ``--search`` and ``--limit-s``.

    Attributes:
        progress: Progress line with the current search.
        is_cut: Whether the CPU time or Ctrl-C ended the ladder early.
    """

    def __init__(
        self,
        estimator: Estimator,
        goal: Goal,
        costs: tuple[Costs, dict[str, str], dict[str, float]],
        options: argparse.Namespace,
    ) -> None:
        self.estimator, self._goal, self._costs, self._options = estimator, goal, costs, options
        self._bounds = Bounds(estimator.running(()), goal)  # with Transformer Engine: no node is faster without it
        self._found: dict[Pool, PoolPlan] = {}
        nodes = estimator.cluster.nodes
        # Groups of the same nodes are rented together.
        names = [node.shared_node or f"\n{i}" for i, node in enumerate(nodes)]
        self._units = [[i for i, other in enumerate(names) if other == name] for name in dict.fromkeys(names)]
        self.progress, self.is_cut = Progress(), False

    def rungs(self) -> Iterator[Rung]:
        """Yields the rungs, the first one first."""
        rung = self._best([pool for unit in self._units for pool in self._alone(unit)], None)
        everything = tuple(node.count for node in self.estimator.cluster.nodes)
        rung = rung or self._best([everything], None)
        while rung is not None:
            yield rung
            rung = self._best(list(self._next(rung.pool)), rung)

    def _alone(self, unit: list[int]) -> Iterator[Pool]:
        """Yields growing numbers of nodes of a group, up to the first number with a plan."""
        pool = tuple(0 for _ in self.estimator.cluster.nodes)
        while (larger := self._with(pool, unit)) != pool:
            pool = larger
            if self._plan(pool).iteration_s is not None:
                yield pool
                return

    def _next(self, pool: Pool) -> Iterator[Pool]:
        """Yields pools with some more nodes of one group, and with all of its remaining nodes."""
        nodes = self.estimator.cluster.nodes
        for unit in self._units:
            whole = tuple(node.count if i in unit else n for i, (n, node) in enumerate(zip(pool, nodes)))
            yield from dict.fromkeys(p for p in (self._with(pool, unit), whole) if p != pool)

    def _with(self, pool: Pool, unit: list[int]) -> Pool:
        nodes = self.estimator.cluster.nodes
        return tuple(
            min(node.count, n + -(-node.count // STEPS)) if i in unit else n
            for i, (n, node) in enumerate(zip(pool, nodes))
        )

    def _best(self, pools: list[Pool], before: Rung | None) -> Rung | None:
        """Returns the rung with the most tokens for its price; None if no pool makes the training faster."""
        best: Rung | None = None
        least = before.tokens_per_s * (1 + HARDLY) if before is not None else 0.0
        hopes = [(self._rung(pool, self._least_s(pool), before), pool) for pool in pools]
        for hope, pool in sorted(hopes, key=lambda entry: -entry[0].more_per_usd(before)):
            if hope.tokens_per_s <= least or (best and hope.more_per_usd(before) <= best.more_per_usd(before)):
                continue
            seconds = self._plan(pool).iteration_s
            rung = self._rung(self._worked(pool), inf if seconds is None else seconds, before)
            more = rung.more_per_usd(before)
            if rung.tokens_per_s > least and (best is None or more > best.more_per_usd(before)):
                best = rung
        return best

    def _least_s(self, pool: Pool) -> float:
        cluster = self.estimator.cluster
        gpus = tuple(min(n * node.gpus_per_node, node.quota) for n, node in zip(pool, cluster.nodes))
        return max(self._bounds.seconds(gpus), 1e-9)

    def _plan(self, pool: Pool) -> PoolPlan:
        if pool not in self._found:
            left = left_s(self._options)
            if left <= 0:
                self.is_cut = True
                return PoolPlan(pool, None)
            self.progress.text = nodes_in_words(pool, self.estimator.cluster)
            limit_s = max(1.0, left / SHARE)
            plan_of_pool(self._found, self.estimator, self._goal, self._options.search, pool, limit_s)
        return self._found[pool]

    def _worked(self, pool: Pool) -> Pool:
        """Returns a pool without the nodes that its plan leaves idle."""
        plan = self._found.get(pool)
        if plan is None or not plan.used:
            return pool
        most = {i: max(plan.used[j] for j in unit) for unit in self._units for i in unit}
        worked = tuple(min(n, most[i]) for i, n in enumerate(pool))
        self._found[worked] = replace(plan, pool=worked)
        return worked

    def _rung(self, pool: Pool, iteration_s: float, before: Rung | None) -> Rung:
        cluster, model = self.estimator.cluster, self.estimator.model
        plan = self._found.get(pool, PoolPlan(pool, None))
        gpus = [min(n * node.gpus_per_node, node.quota) for n, node in zip(pool, cluster.nodes)]
        usd = HOUR_S * sum(n * price for n, price in zip(gpus, self.estimator.price))
        costs, sources, each_byte_s = self._costs
        costs = with_growth(costs, sources, each_byte_s, plan)
        # An interruption costs two changes, half an iteration, and the node's part until another one is there.
        lost_s = costs.death_s + costs.join_s + iteration_s / 2 + costs.start_s / max(1, sum(pool))
        often = sum(n * node.interruptions_per_day for n, node in zip(pool, cluster.nodes)) / DAY_S
        share = 1 / (1 + often * lost_s)  # share of the time in completed iterations
        return Rung(
            pool=pool,
            added=tuple(n - (before.pool[i] if before else 0) for i, n in enumerate(pool)),
            plan=plan,
            usd_per_h=usd,
            goodput=share,
            tokens_per_s=share * model.global_batch_size * model.seq_length / iteration_s,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    rows: dict[str, tuple[Any, ...]] = {
        "--train-iters": (None, "N", "iterations of the job", {"type": count(1, 10**12)}),
        "--finish-by": (None, "HOURS", "with --train-iters: time limit of the job", {"type": amount(0.0, 1e7)}),
        "--budget-total": (None, "USD", "with --train-iters: cost no more", {"type": amount(0.0, 1e12)}),
        "--out": (None, "FILE", "write a cluster file of the chosen rung, for 'plan'"),
        "--picture": (None, "FILE", "write a picture (SVG or PNG by extension)"),
    }
    add_options(parser, rows)
    add_pauses(parser)


def rent(options: argparse.Namespace) -> int:
    """Run ``rent``: search the ladder, choose a rung, print all rungs."""
    goal, estimator = goal_from(options), estimator_from(options)
    _check(options, goal, estimator)
    ladder = Ladder(estimator, goal, costs_from(options), options)
    rungs, code = list[Rung](), 0
    with shown_progress(lambda: f"a plan for {ladder.progress.text}", options):
        try:
            for rung in ladder.rungs():
                rungs.append(rung)
        except KeyboardInterrupt:
            if not rungs:
                raise
            ladder.is_cut, code = True, 130
    if not rungs:
        raise PlannerError(options.cluster, "nodes", None, "no plan fits all nodes of the cluster file")
    chosen = choose(rungs, options)
    body = body_of(rungs, chosen, options, estimator) | {"interrupted": ladder.is_cut}
    written = []
    if options.out:
        cluster = limited(estimator.cluster, rungs[chosen].pool)
        assert cluster is not None  # a plan was found on it
        write_text(options.out, file_text(cluster))
        written.append(f"wrote {options.out}")
    if options.picture:
        draw_ladder(body["rungs"], chosen, options.picture)
        written.append(f"wrote {options.picture}")
    say(body, options, *_tables(body), *written)
    return code


def _check(options: argparse.Namespace, goal: Goal, estimator: Estimator) -> None:
    """Check prices, output paths and the combination of limits before the search."""
    if goal.objective == "cost":
        hint = "Give --budget-total or --finish-by"
        raise PlannerError("command line", "--objective", "cost", "rent weighs speed and money itself", hint)
    check_prices(estimator, replace(goal, objective="cost"), options.cluster)
    for name in ("finish_by", "budget_total"):
        if getattr(options, name) is not None and options.train_iters is None:
            flag, hint = f"--{name.replace('_', '-')}", "Give --train-iters"
            raise PlannerError("command line", flag, getattr(options, name), "the job's length is missing", hint)
    if options.out:
        check_target(options.out, "--out")
    if options.picture:
        check_target(options.picture, "--picture", (".svg", ".png"))


def choose(rungs: list[Rung], options: argparse.Namespace) -> int:
    """Returns the cheapest rung by ``--finish-by``, or the fastest by ``--budget-total``; raises PlannerError."""
    hours = [rung.hours(options.train_iters or 1) for rung in rungs]
    usd = [rung.usd_per_h * each for rung, each in zip(rungs, hours)]
    fitting = list(range(len(rungs)))
    for flag, limit, values, unit in (
        ("--finish-by", options.finish_by, hours, "hours"),
        ("--budget-total", options.budget_total, usd, "USD"),
    ):
        nearest = min(values[i] for i in fitting)
        if limit is not None and nearest > limit:
            hint = f"The nearest one takes {nearest:.4g} {unit}"
            raise PlannerError("command line", flag, limit, "no rung keeps to it", hint)
        fitting = [i for i in fitting if limit is None or values[i] <= limit]
    is_budget_alone = options.budget_total is not None and options.finish_by is None
    return min(fitting, key=lambda i: hours[i] if is_budget_alone else usd[i])


def body_of(rungs: list[Rung], chosen: int, options: argparse.Namespace, estimator: Estimator) -> dict[str, Any]:
    """Returns the output of ``--json``."""
    nodes, rows = estimator.cluster.nodes, []
    for rung, before in zip(rungs, [None, *rungs]):
        hours = rung.hours(options.train_iters) if options.train_iters else None
        added = nodes_in_words([max(0, n) for n in rung.added], estimator.cluster)
        if any(idle := [max(0, -n) for n in rung.added]):
            added += f", without {nodes_in_words(idle, estimator.cluster)}"
        rows.append(
            {
                "nodes": list(rung.pool),
                "in_words": nodes_in_words(rung.pool, estimator.cluster),
                "added": added,
                "gpus": sum(n * node.gpus_per_node for n, node in zip(rung.pool, nodes)),
                "iteration_s": rung.plan.iteration_s,
                "goodput": rung.goodput,
                "tokens_per_s": rung.tokens_per_s,
                "usd_per_hour": rung.usd_per_h,
                "usd_per_billion_tokens": rung.usd_per_billion_tokens,
                "usd_per_billion_more_tokens": 1e9 / HOUR_S / rung.more_per_usd(before),
                "hours": hours,
                "usd": None if hours is None else hours * rung.usd_per_h,
                "plan": rung.plan.plan,
            }
        )
    left = tuple(node.count - n for n, node in zip(rungs[-1].pool, nodes))
    return {"rungs": rows, "chosen": chosen, "left": nodes_in_words(left, estimator.cluster) if any(left) else ""}


def _tables(body: dict[str, Any]) -> list[Any]:
    rows, chosen = body["rungs"], body["chosen"]
    prices = ("USD per hour", "USD per 10⁹ tokens", "USD per 10⁹ more")
    ladder = table("What to rent", "rung: nodes more", "GPUs", "tokens/s", *prices)
    job = table("The job", "rung", "hours", "USD", "time that counts")
    for i, row in enumerate(rows, 1):
        usd = (row["usd_per_hour"], row["usd_per_billion_tokens"], row["usd_per_billion_more_tokens"])
        tokens = f"{row['tokens_per_s']:.4g}"
        ladder.add_row(f"{i}: {row['added']}", str(row["gpus"]), tokens, *(f"{x:.4g}" for x in usd))
        if row["hours"] is not None:
            job.add_row(str(i), f"{row['hours']:.4g}", f"{row['usd']:.4g}", f"{100 * row['goodput']:.1f} %")
    cheapest = min(range(len(rows)), key=lambda i: rows[i]["usd_per_billion_tokens"])
    lines = [
        f"chosen: rung {chosen + 1}, {rows[chosen]['in_words']}",
        f"a token is cheapest with rung {cheapest + 1}; each rung after that buys speed at the last column's price",
    ]
    if body["interrupted"]:
        lines.append("interrupted, or --limit-s is over: not all further nodes were searched")
    elif body["left"]:
        lines.append(f"more does not pay: no plan with {body['left']} more was found to be faster")
    plans = [f"{i}: {row['plan']}" for i, row in enumerate(rows, 1)]
    return [ladder, *([job] if rows[0]["hours"] is not None else []), *lines, *plans, NOTATION]
