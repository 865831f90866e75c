"""Compares the catalog's predictions with published runs without a profile, also with whole families left out.

    python -m benchmarks.planner_accuracy --json OUT [--mpt FILE] [--bridge FILE] [--dgxc FILE]

``--mpt``, ``--bridge`` and ``--dgxc`` take other tables with the same columns, which the shipped constants predict.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.machine import command_line
from benchmarks.published.calibrate import (
    DENSE_CONSTANTS,
    FAMILIES,
    MOE_CONSTANTS,
    TABLES,
    PublishedRun,
    constants_of,
    fit_all,
    left_out,
    read_runs,
    relative_errors,
    runtime_of,
)
from tools.planner.costs.layer import DENSE, EXPERTS
from tools.planner.inputs.files import write_json


def shipped(runs: Sequence[PublishedRun]) -> dict[str, Any]:
    """Returns the mean absolute errors of the shipped constants by kind of model, and every run."""
    errors = relative_errors(runs, runtime_of(runs[0].source))
    kinds = sorted({r.kind for r in runs})
    return {
        "error": mean(abs(e) for e in errors),
        "by_kind": {k: mean(abs(e) for r, e in zip(runs, errors) if r.kind == k) for k in kinds},
        "runs": [
            {**r.row, "measured_s": r.measured_s, "predicted_s": r.measured_s * (1 + e), "error": e}
            for r, e in zip(runs, errors)
        ],
    }


def held_out(runs: Sequence[PublishedRun], families: Sequence[str]) -> dict[str, Any]:
    """Returns errors by source and kind with each family left out, and the share of runs in the printed uncertainty."""
    out: dict[str, Any] = {}
    for by in families:
        rows: dict[str, list[float]] = {}
        for run, error in left_out(runs, by):
            rows.setdefault(f"{run.source}_{run.kind}", []).append(abs(error))
        out[by] = {name: {"error": mean(errors), "covered": _covered(name, errors)} for name, errors in rows.items()}
    return out


def _covered(name: str, errors: Sequence[float]) -> float | None:
    """Returns the share of runs within the printed uncertainty; None for a runtime that plans do not use."""
    if name.startswith("mpt"):
        return None
    seen = EXPERTS if name.endswith("moe") else DENSE
    return mean(e <= seen.error for e in errors)


def catalog() -> dict[str, Any]:
    """Returns the errors of all tables."""
    tables = {name: read_runs(name) for name in TABLES}
    body: dict[str, Any] = {name: shipped(runs) for name, runs in tables.items()}
    megatron = [*tables["bridge"], *tables["dgxc"]]
    body["held_out"] = {"megatron": held_out(megatron, FAMILIES), "mpt": held_out(tables["mpt"], ("model", "gpu"))}
    worst: dict[str, float] = {}
    for found in body["held_out"].values():
        for rows in found.values():
            for name, row in rows.items():
                worst[name] = max(worst.get(name, 0.0), row["error"])
    body["catalog_error"] = worst
    body["covered"] = {
        name: min(rows[name]["covered"] for rows in body["held_out"]["megatron"].values())
        for name in worst
        if not name.startswith("mpt")
    }
    body["fitted_again"] = constants_of(fit_all(megatron), [*DENSE_CONSTANTS, *MOE_CONSTANTS])
    return body


def families() -> dict[str, Any]:
    """Returns errors on Sailor's profiled runs, with each family (model and cluster) left out of the calibration."""
    from benchmarks.published.accuracy import MEMORY_GRID, TIME_GRID, family_errors

    times, memory = family_errors(TIME_GRID, False), family_errors(MEMORY_GRID, True)
    return {
        "family_left_out_time_error": mean(times.values()),
        "family_left_out_memory_error": mean(memory.values()),
        "time_by_family": times,
        "memory_by_family": memory,
    }


SECTIONS = {"catalog": catalog, "families": families}


def main() -> None:
    """Predict the shipped tables, or the given ones."""
    parser = command_line("benchmarks.planner_accuracy", __doc__)
    for name in TABLES:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    options = parser.parse_args()
    given = {name: path for name in TABLES if (path := getattr(options, name)) is not None}
    body = {n: shipped(read_runs(n, p)) for n, p in given.items()} if given else catalog()
    write_json(options.json, body)
    short = {k: {a: b for a, b in v.items() if a != "runs"} if isinstance(v, dict) else v for k, v in body.items()}
    print(json.dumps(short, indent=2))


if __name__ == "__main__":
    main()
