"""A small planned run without processes: what its ranks would tell the watch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_het.features.watch.monitor import Monitor, Settings
from megatron_het.features.watch.samples import Hello, Sample
from megatron_het.lowering.programs import costs_of, program_of
from megatron_het.plan import Plan
from megatron_het.report import TIMED
from megatron_het.schedule.cost import durations
from megatron_het.schedule.graph import Graph
from testing.planner_cases import estimator_of, model_of, processors
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layer import CPU_GLOO
from tools.planner.costs.simulation import simulate_candidate
from tools.planner.inputs.profile_schema import DeviceProfile, LayerTiming, LinkProfile, Profile, ProfiledModel
from tools.planner.replay.measured import Watched, load_watched
from tools.planner.report.analysis import complete
from tools.planner.search.outcome import Found

_SHAPE: dict[str, Any] = {"layers": 8, "hidden": 64, "ffn": 128, "heads": 4, "groups": 4, "words": 256, "tokens": 64}
_TRAINING: dict[str, Any] = {"batch": 16, "micro_batch_sizes": (1,), "precision": "fp32", "recompute": ("none",)}
MODEL = model_of(name="tiny", attention="unfused", **_SHAPE, **_TRAINING)
FORWARD_S, BACKWARD_S = 0.010, 0.020


def profile(latency_s: float = 1e-4) -> Profile:
    model = ProfiledModel(64, 128, 4, 4, 256, 64, "fp32", "tiny")

    def timing(layer: str, share: float) -> LayerTiming:
        return LayerTiming(layer, 1, 1, 64, FORWARD_S * share, BACKWARD_S * share, 1e-5, 50_000, 100_000, 16_384)  # type: ignore[arg-type]

    timings = [timing("embedding", 0.01), timing("layer", 1.0), timing("head", 0.05)]
    links = [LinkProfile("network", "core", "core", "p2p", 2, latency_s, 1e9)]
    return Profile(model, [DeviceProfile("core", 4 << 30, 1, timings)], links)


def estimator(nodes: int = 2) -> Estimator:
    return estimator_of(processors(nodes), MODEL, profile(), CPU_GLOO)


def pipeline(*layers: int) -> Plan:
    found = estimator(len(layers))
    candidate = Candidate(tuple(Stage(n, (Group(0, 1, 1),)) for n in layers), 1)
    estimate = found.estimate(candidate)
    plain = complete(found, Found(candidate, estimate))
    seconds = simulate_candidate(found, candidate, estimate, plain).iteration_s
    return complete(found, Found(candidate, estimate, seconds))


def hellos(plan: Plan) -> list[Hello]:
    program, costs = program_of(plan), costs_of(plan)
    assert costs is not None
    graph = Graph(program)
    seconds: list[dict[str, float]] = [{} for _ in program.ops]
    for node, duration in enumerate(durations(graph, costs)):
        kind = graph.ops[node].kind
        if kind in TIMED:
            row = seconds[graph.device[node]]
            row[kind.name] = row.get(kind.name, 0.0) + duration
    return [Hello(rank, rank, "here", "here", row) for rank, row in enumerate(seconds)]


def follow(
    plan: Plan,
    factor: Callable[[int, int], float],
    link_s: Callable[[int, int, int], float] = lambda iteration, source, target: 1.2e-4,
) -> Monitor:
    """Let ranks of a pipeline tell of 30 iterations of a second each.

    Args:
        factor: (iteration, rank) -> measured over predicted compute.
        link_s: (iteration, source, target) -> seconds of a transfer.
    """
    said = hellos(plan)
    monitor = Monitor(plan, said, Settings())
    world = plan.world_size
    for iteration in range(1, 31):
        samples = {}
        for hello in said:
            rank = hello.rank
            peers = [p for p in (rank - 1, rank + 1) if 0 <= p < world]
            start = 10.0 * iteration
            sent = {p: [start + 0.1 * m for m in range(8)] for p in peers}
            received = {
                p: [(t - 0.05, t - 0.04, t + link_s(iteration, p, rank)) for t in (start + 0.1 * m for m in range(8))]
                for p in peers
            }
            measured = {op: seconds * factor(iteration, rank) for op, seconds in hello.predicted_s.items()}
            told = Sample(iteration, 1.0, measured, sent, received, dict.fromkeys(peers, 8))
            samples[rank] = Sample.decode(told.encode())
        monitor.add(samples)
    return monitor


def watched(plan: Plan, monitor: Monitor, folder: Path) -> Watched:
    file = folder / "watch.json"
    file.write_text(json.dumps(monitor.summary()), encoding="utf-8")
    return load_watched(file, plan)
