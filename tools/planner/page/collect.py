"""What is on the page of a plan, from the cost model and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_het.plan import Plan

from ..costs.candidate import Candidate, Group
from ..costs.estimate import Estimate, Estimator
from ..costs.estimates import rank_parameters
from ..report.tables import summary
from ..simulate.simulation import Simulation, simulate_candidate
from .cluster_map import Seats, cluster_map
from .data import Figure, NodeGain, PageData, Row, StageRow
from .timeline import timeline_of

CAUSES = {
    "compute": "compute of the stage that decides",
    "fill_and_drain": "filling and draining around it",
    "gather": "gathers of parameters",
    "gradient_reduction": "gradient reduction",
    "update": "optimizer step",
}


def collect(
    estimator: Estimator,
    candidate: Candidate,
    estimate: Estimate,
    plan: Plan,
    seated: Seats,
    *,
    title: str,
    notes: Sequence[str] = (),
) -> tuple[PageData, dict[str, Any]]:
    """The page of one plan.

    Args:
        estimator: Of the plan's cluster and model.
        candidate, estimate, seated: The plan as it is priced (``commands.priced``).
        plan: Its stages, routes and schedule.
        title: Of the page.
        notes: Sentences at its end.

    Returns:
        The page, and the figures of ``simulate --json`` that are on the page.

    Raises:
        PlannerError: The schedule cannot run the plan's shape.
    """
    found = simulate_candidate(estimator, candidate, estimate, plan, [[list(r) for r in s] for s in seated])
    body = summary(estimator, candidate, estimate, found.iteration_s)
    model, cluster = estimator.model, estimator.cluster
    gpus = ", ".join(f"{count} {name}" for name, count in body["gpus"].items())
    page = PageData(
        title=title,
        subtitle=f"{model.name} on {cluster.name}: {_schedule(body)}; {gpus}",
        figures=_figures(body, found, candidate),
        cluster=cluster_map(estimator, candidate, plan, seated, found.result),
        stages=_stages(estimator, body),
        timelines=[_timeline(estimator, candidate, plan, seated, found)],
        causes={CAUSES[name]: seconds for name, seconds in body["by_cause_s"].items() if seconds > 0},
        notes=list(notes),
        plan=plan.to_json(),
    )
    return page, body


def rows_of(estimator: Estimator, rows: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows of ``compare`` and ``explain`` as the page shows them."""
    tokens = estimator.model.global_batch_size * estimator.model.seq_length
    return [
        Row(
            what=r.get("what", ""),
            plan=r["plan"],
            iteration_s=r["iteration_s"],
            tokens_per_s=tokens / r["iteration_s"] if r["iteration_s"] else None,
            usd_per_iteration=r["usd_per_iteration"],
            gpus=r["gpus"],
        )
        for r in rows
    ]


def gains_of(rows: Sequence[dict[str, Any]]) -> list[NodeGain]:
    """Rows of ``analysis.one_more_node``."""
    return [
        NodeGain(
            gpu=r["gpu"],
            zone=r["zone"],
            iteration_s=r["iteration_s"],
            usd_per_iteration=r["usd_per_iteration"],
            change=r["change"],
        )
        for r in rows
    ]


def _schedule(body: dict[str, Any]) -> str:
    text = f"{body['schedule']}, micro batch {body['micro_batch_size']}, recompute {body['recompute']}"
    for name in ("chunks", "slices"):
        text += f", {body[name]} {name}" if body[name] > 1 else ""
    text += ", offload" if body["offload"] else ""
    return text + "".join(f", {name}" for name in body["extras"])


def _figures(body: dict[str, Any], found: Simulation, candidate: Candidate) -> list[Figure]:
    unpriced = ", ".join(body["gpus_without_price"])
    price = f"without {unpriced}: no price known" if unpriced else ""
    if body["catalog_prices"]:
        price = "catalog price, not yours" + (f"; {price}" if price else "")
    bubble = found.result.bubble_fraction
    utilisation = body["model_flops_utilisation"]
    peak = "" if utilisation is None else f"{100 * utilisation:.1f} % of the GPUs' peak"
    return [
        _figure("Iteration", body["iteration_s"], "s", f"simulated; ±{100 * body['uncertainty']:.0f} % expected"),
        _figure("Throughput", body["tokens_per_s"], "tokens/s"),
        _figure("Model FLOP/s", body["model_tflops"] * 1e12, "FLOP/s", peak),
        _figure("Bubble", bubble, "share", "idle time over compute, mean of the replicas"),
        _figure("Price of an iteration", body["usd_per_iteration"], "usd", price),
        _figure("Price of 10⁹ tokens", body["usd_per_billion_tokens"], "usd", price),
        _figure("GPUs", candidate.world_size, "count", f"{len(candidate.stages)} stages"),
    ]


def _figure(name: str, value: float | str | None, unit: str, note: str = "") -> Figure:
    return Figure(name=name, value=value, unit=unit, note=note)


def _stages(estimator: Estimator, body: dict[str, Any]) -> list[StageRow]:
    out = []
    for r in body["stages"]:
        share = r["state_share"]
        out.append(
            StageRow(
                stage=r["stage"],
                gpu=r["gpu"],
                where=r["zone"],
                replicas=r["replicas"],
                tp=r["tp"],
                layers=r["layers"],
                microbatches=r["microbatches_per_replica"],
                busy_s=r["busy_s"],
                memory_bytes=r["memory_bytes"],
                total_bytes=r["total_bytes"],
                capacity_bytes=r["capacity_bytes"],
                limit_bytes=estimator.memory_margin * r["capacity_bytes"],
                note="" if share is None else f"each keeps {100 * share:.0f} % of the stage's state",
            )
        )
    return out


def _timeline(estimator: Estimator, candidate: Candidate, plan: Plan, seated: Seats, found: Simulation) -> Any:
    """The simulated iteration, devices named by stage, replica and GPU."""
    names, held = [], []
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            tp = f" TP {replica.tp}" if replica.tp > 1 else ""
            names.append(f"{s}.{q} {replica.device}{tp}")
            pool = seated[s][q][0].pool
            unit = estimator.unit_of(candidate, Group(pool, replica.tp, 1, replica.ep))
            assert unit is not None  # the plan has been priced
            held.append(rank_parameters(candidate, unit, s) * estimator.model.element_bytes)
    return timeline_of(found.result, "Predicted", names, held)
