"""Measures the time of a start, and the process groups of a rank: ``python -m benchmarks.scale --json OUT``.

Keys, each by world size: ``start_s``, from the start of ``torch.distributed`` to the first iteration without the
building of the model; ``groups_per_rank``, with ``peers_per_rank`` beside it; ``program_s``, CPU seconds in which a
rank builds, validates and lowers its programs; ``growth``, the fitted exponents over the world size.  Two families of
plans of eight stages with TP 1 to 8: ``blocks``, where replicas share microbatches within 16 ranks of a stage, and
``mixed``, where they share them with all others.

Up to ``--measured`` ranks the start is measured: forked processes that create groups and channels over gloo and send
one element over every edge.  They share the cores of this machine.  Beyond, ``start_s`` comes from a model whose
constants are fitted to these measurements::

    start = program + (roles + rounds) * group + memberships * store

``group`` is the time in which a rank creates a group, in a world of 16 processes on this machine; ``store`` is the
store's CPU time per member of a group, because one process serves the whole world.

Processes that share the cores of one machine start one after the other.  So the report has two figures beside the
measured ones: ``open_s_by_model``, the model's CPU time of all ranks and of the store over the cores, and
``open_s_by_cpu_time``, the measured CPU time of the run over the cores.
``start_nccl_s`` adds ``--nccl-connect-s`` for every communicator of a rank, which was not measured here.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import write_report
from benchmarks.scale_ranks import ROLES, SEQUENCE, counted, cpu_s, edges_of, plan_of, run_ranks, start_of
from megatron_het.lowering.programs import build, posted_for
from megatron_het.lowering.ranks import BoundaryMap, lower
from megatron_het.plan import Placement, Plan

WORLDS = (16, 32, 64, 128, 256, 1024)
OPERATIONS = 100_000  # of the plan of 1,024 ranks, transfers included; smaller worlds have as many per rank
LIMIT_S = 300.0
BARS = {"start_s": 60.0, "program_s": 3.0, "groups_above_peers": 10}


def sized(world_size: int, mixed: bool) -> Plan:
    """Returns the plan of a world size with about as many operations per rank as the plan of 1,024 ranks."""
    operations = sum(map(len, build(plan_of(1024, 512, mixed))[False].ops))
    microbatches = math.ceil(512 * OPERATIONS / operations)
    return plan_of(world_size, max(16, round(microbatches * world_size / 1024)), mixed)


def program_seconds(plan: Plan, repeat: int) -> float:
    """Returns the CPU seconds in which the last rank prepares its programs; the least of several tries."""
    found = []
    rank = plan.world_size - 1
    for _ in range(repeat):
        began = cpu_s()
        programs = build(plan, rank)
        placement = Placement(plan)
        where = placement.locate(rank)
        device = programs[False].shape.device(where.stage, where.replica)
        boundaries = BoundaryMap(placement, SEQUENCE, True)
        edges_of(plan, list(programs.values()))
        for program in programs.values():
            lower(posted_for("gloo", program), boundaries, device, rank)
        found.append(cpu_s() - began)
    return min(found)


def exponent(values: Mapping[int, float]) -> float:
    """Returns the fitted power of the world size: 1 is linear, 0 is constant."""
    xs = [math.log(world) for world in values]
    ys = [math.log(max(value, 1e-9)) for value in values.values()]
    mx, my = statistics.fmean(xs), statistics.fmean(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def measured(plan: Plan) -> dict[str, float]:
    """Start all ranks of a plan as forked processes; returns the times."""
    answers, store_s = run_ranks(plan.world_size, start_of(plan, LIMIT_S), LIMIT_S)
    edges = sum(answer["moved"] for answer in answers)
    if edges == 0:
        raise RuntimeError("no edge was used")
    return {
        "open_s": max(answer["all_open_s"] for answer in answers),
        "program_s": statistics.median(answer["program_s"] for answer in answers),
        "groups_cpu_s": statistics.median(answer["groups_cpu_s"] for answer in answers),
        "groups_per_rank": max(answer["groups"] for answer in answers),
        "groups_above_peers": max(answer["groups"] - answer["peers"] for answer in answers),
        "peers_per_rank": max(answer["peers"] for answer in answers),
        "store_s": store_s,
        "elements_moved": edges,
    }


def family(mixed: bool, most: int, nccl_connect_s: float, repeat: int) -> dict[str, Any]:
    """Returns all figures of one family of plans."""
    rows: dict[int, dict[str, Any]] = {}
    for world in WORLDS:
        plan = sized(world, mixed)
        count = counted(plan)
        rows[world] = {
            "program_s": program_seconds(plan, repeat),
            "operations": sum(map(len, build(plan)[False].ops)),
            "groups_per_rank": count.groups,
            "peers_per_rank": count.peers,
            "rounds": count.rounds,
            "rounds_by_rank_order": count.chain_by_rank,
            "memberships": count.memberships,
        }
        if world <= most:
            rows[world]["measured"] = measured(plan)
        print(world, json.dumps(rows[world]), flush=True)
    ran = {world: row["measured"] for world, row in rows.items() if "measured" in row}
    constants = _constants(rows, ran)
    for row in rows.values():
        chain = (ROLES + row["rounds"]) * constants["group_s"]
        row["start_s"] = row["program_s"] + chain + row["memberships"] * constants["store_s_per_membership"]
        row["start_nccl_s"] = row["start_s"] + row["groups_per_rank"] * nccl_connect_s
    cores = len(os.sched_getaffinity(0))
    for world, found in ran.items():
        row = rows[world]
        work = world * row["groups_per_rank"] * constants["rank_cpu_s_per_group"]
        found["open_s_by_model"] = (work + row["memberships"] * constants["store_s_per_membership"]) / cores
        found["open_s_by_cpu_time"] = (world * found["groups_cpu_s"] + found["store_s"]) / cores
    return {
        **{key: {world: row[key] for world, row in rows.items()} for key in _KEYS},
        "groups_above_peers": max(row["groups_per_rank"] - row["peers_per_rank"] for row in rows.values()),
        "growth": {key: exponent({w: row[key] for w, row in rows.items()}) for key in _KEYS},
        "constants": constants,
        "measured": ran,
        "rows": rows,
    }


_KEYS = ("start_s", "start_nccl_s", "groups_per_rank", "peers_per_rank", "program_s")


def _constants(rows: Mapping[int, Mapping[str, Any]], ran: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Returns the model's constants, fitted to the measurements."""
    alone = _group_seconds()
    store = sum(found["store_s"] for found in ran.values()) / sum(rows[world]["memberships"] for world in ran)
    per_group = statistics.median(
        found["groups_cpu_s"] / rows[world]["groups_per_rank"] for world, found in ran.items()
    )
    return {"group_s": max(alone, per_group), "store_s_per_membership": store, "rank_cpu_s_per_group": per_group}


def _group_seconds() -> float:
    """Returns the wall seconds per group of the slowest rank in a world of 16 processes."""
    plan = plan_of(16, 16, False)
    answers, _ = run_ranks(16, start_of(plan, LIMIT_S), LIMIT_S)
    return max(answer["groups_wall_s"] / (answer["groups"] - 1) for answer in answers)


def verdict(families: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the bounds that were missed."""
    missed = []
    for found in families:
        for key in ("start_s", "program_s"):
            if found[key][WORLDS[-1]] > BARS[key]:
                missed.append(f"{key} at {WORLDS[-1]} ranks is {found[key][WORLDS[-1]]:.1f}, above {BARS[key]:g}")
        if found["groups_above_peers"] > BARS["groups_above_peers"]:
            missed.append(f"a rank has {found['groups_above_peers']} groups more than peers")
    return missed


def main() -> int:
    """Command line; exit code 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument("--measured", type=int, default=128, help="most forked ranks (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="programs are built this often (default %(default)s)")
    parser.add_argument(
        "--nccl-connect-s", type=float, default=0.25, help="assumed per NCCL communicator (default %(default)s s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        name: family(name == "mixed", options.measured, options.nccl_connect_s, options.repeat)
        for name in ("blocks", "mixed")
    }
    missed = verdict(list(found.values()))
    report = {
        "benchmark": "scale",
        "nccl_connect_s": options.nccl_connect_s,
        **{key: {name: part[key] for name, part in found.items()} for key in (*_KEYS, "groups_above_peers", "growth")},
        "missed": missed,
        "families": found,
    }
    write_report(options.json, report, unprinted=("families",))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
