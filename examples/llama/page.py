"""The demo's report page: the planner's page, with what was measured beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.llama.devices import CpuDevice
from examples.llama.report import Trial
from megatron_het.plan import Placement
from megatron_het.schedule import Kind
from tools.planner.page.data import ClusterMap, Figure, Lane, NodeOnMap, PageData, PoolOnMap, Row, StageRow, ZoneOnMap
from tools.planner.page.markup import size
from tools.planner.page.timeline import Event, pack


def demo_page(result: dict[str, Any], trial: Trial, order: Sequence[CpuDevice], traces: Path) -> PageData:
    """Returns what is on the page.

    Args:
        result: The contents of ``report.json``.
        trial: The plan, with its simulation.
        order: The device of every rank.
        traces: Folder with the trace of every rank.
    """
    stages = [r["stage"] for r in result["per_rank"]]
    names = [f"rank {r['rank']}: {r['device']}" for r in result["per_rank"]]
    timelines = [_predicted(trial, names, stages)]
    measured = _measured(traces, names, result)
    return PageData(
        title="Demo: a small Llama on a mixed cluster",
        subtitle=result["plan"],
        figures=_figures(result),
        cluster=_cluster(trial, order),
        stages=[_row(r) for r in result["per_rank"]],
        timelines=[*timelines, *measured],
        comparison=_comparison(result, trial),
        notes=[
            "The devices are processes of this machine; those on one core share it. The prediction is a simulation "
            "with the measured speeds of all devices.",
            f"Even split: {result['even_split']}.",
        ],
        plan=trial.plan.to_json(),
    )


def _figures(result: dict[str, Any]) -> list[Figure]:
    predicted, measured = result["predicted_iteration_s"], result["measured_iteration_s"]
    loss = result["validation_loss"]
    rows: list[tuple[str, float | str | None, str, str]] = [
        ("Iteration, predicted", predicted, "s", ""),
        ("Iteration, measured", measured, "s", f"prediction {100 * (predicted / measured - 1):+.1f} %"),
        ("Even split, measured", result["even_split_iteration_s"], "s", ""),
        ("Speedup", f"{result['speedup_over_even_split']:.2f}", "", "over the even split, measured"),
        ("Bubble, predicted", result["predicted_bubble_fraction"], "share", ""),
        ("Bubble, measured", result["measured_bubble_fraction"], "share", ""),
        ("Validation loss", None if loss is None else f"{loss:.3f}", "", "nats per byte"),
    ]
    return [Figure(name=name, value=value, unit=unit, note=note) for name, value, unit, note in rows]


def _cluster(trial: Trial, order: Sequence[CpuDevice]) -> ClusterMap:
    """Every core is a node with the processes that are pinned to it."""
    placement = Placement(trial.plan)
    held: dict[int, list[list[int]]] = {}
    for rank, device in enumerate(order):
        where = placement.locate(rank)
        held.setdefault(device.core, []).append([where.stage, where.replica, rank])
    nodes = [
        NodeOnMap(name=f"core {core}", gpus=gpus, sent_bytes=0.0, received_bytes=0.0, load=0.0)
        for core, gpus in sorted(held.items())
    ]
    pool = PoolOnMap(
        gpu="CPU core",
        gpus_per_node=1,
        count=len(nodes),
        used_gpus=len(nodes),
        quota=len(nodes),
        usd_per_gpu_hour=None,
        network_bytes_per_s=None,
        nodes=nodes,
        left_out="",
    )
    zone = ZoneOnMap(name="this machine", region="this machine", pools=[0])
    return ClusterMap(name="this machine", pools=[pool], zones=[zone], links=[])


def _row(r: dict[str, Any]) -> StageRow:
    predicted = {name.removesuffix("_bytes"): value for name, value in r["predicted_memory"].items()}
    names = {"parameter": "parameters", "gradient": "gradients", "activation": "activations"}
    return StageRow(
        stage=r["stage"],
        gpu=r["device"],
        where=f"rank {r['rank']}",
        replicas=1,
        tp=1,
        layers=r["layers"],
        microbatches=r["microbatches"],
        busy_s=r["predicted_compute_s"],
        memory_bytes={names.get(name, name): value for name, value in predicted.items()},
        total_bytes=r["predicted_memory_bytes"],
        capacity_bytes=None,
        limit_bytes=None,
        note=f"measured: {size(r['measured_memory_bytes'])}, busy {r['measured_compute_s']:.3f} s",
    )


def _predicted(trial: Trial, names: Sequence[str], stages: Sequence[int]) -> Any:
    estimate = trial.estimate
    timeline, tail = estimate.timeline, estimate.tail_s
    lanes = [
        Lane(
            name=name,
            stage=stage,
            compute_s=busy,
            idle_s={"idle": max(0.0, estimate.iteration_s - busy - tail), "tail": tail},
        )
        for name, stage, busy in zip(names, stages, timeline.span_s, strict=True)
    ]
    ops = [(lane, op) for lane, mine in enumerate(estimate.program.ops) for op in mine]
    events = [
        Event(lane, op.kind, start, end, op.microbatch, op.slice, op.chunk, -1, None)
        for (lane, op), start, end in zip(ops, timeline.start_s, timeline.end_s, strict=True)
    ]
    return pack("Predicted", estimate.iteration_s, lanes, events)


def _measured(traces: Path, names: Sequence[str], result: dict[str, Any]) -> list[Any]:
    """The traced iteration; nothing when there are no traces."""
    files = [traces / f"trace-rank-{rank}.json" for rank in range(len(names))]
    if not all(f.is_file() for f in files):
        return []
    events = []
    for lane, file in enumerate(files):
        for e in json.loads(file.read_text(encoding="utf-8"))["traceEvents"]:
            if e.get("ph") == "X" and e["tid"] == 0:
                a, start = e["args"], e["ts"] / 1e6
                end = start + e["dur"] / 1e6
                events.append(
                    Event(lane, Kind[a["kind"]], start, end, a["microbatch"], a["slice"], a["chunk"], -1, None)
                )
    lanes = [
        Lane(name=name, stage=r["stage"], compute_s=r["measured_compute_s"], idle_s={})
        for name, r in zip(names, result["per_rank"], strict=True)
    ]
    title = "Measured, passes of one iteration"
    return [pack(title, max(e.end_s for e in events), lanes, events)]


def _comparison(result: dict[str, Any], trial: Trial) -> list[Row]:
    tokens = trial.plan.training.global_batch_size * trial.plan.model.seq_length
    rows = (
        ("planned, measured", "plan", "measured_iteration_s"),
        ("planned, predicted", "plan", "predicted_iteration_s"),
        ("even split, measured", "even_split", "even_split_iteration_s"),
        ("even split, predicted", "even_split", "even_split_predicted_iteration_s"),
    )
    return [
        Row(
            what=what,
            plan=result[plan],
            iteration_s=result[key],
            tokens_per_s=tokens / result[key],
            usd_per_iteration=None,
            gpus=trial.plan.world_size,
        )
        for what, plan, key in rows
    ]
