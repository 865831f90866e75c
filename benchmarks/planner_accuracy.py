"""The catalog's predictions against published runs that have no profile, also with whole families left out.

    python -m benchmarks.planner_accuracy --json OUT [--mpt FILE] [--bridge FILE]

``--mpt`` and ``--bridge`` take other tables with the same columns: the shipped constants predict them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tools.planner.calibrate import RUNTIMES, constants_of, fit_source, left_out, relative_errors
from tools.planner.files import write_json
from tools.planner.published import PublishedRun, read_runs


def shipped(runs: Sequence[PublishedRun]) -> dict[str, Any]:
    """Mean absolute errors of the shipped constants by kind of model, and every run."""
    errors = relative_errors(runs, RUNTIMES[runs[0].source])
    kinds = sorted({r.kind for r in runs})
    return {
        "error": mean(abs(e) for e in errors),
        "by_kind": {k: mean(abs(e) for r, e in zip(runs, errors) if r.kind == k) for k in kinds},
        "runs": [
            {**r.row, "measured_s": r.measured_s, "predicted_s": r.measured_s * (1 + e), "error": e}
            for r, e in zip(runs, errors)
        ],
    }


def source(name: str) -> dict[str, Any]:
    """One table: shipped constants, constants fitted again, and with each model and each GPU left out."""
    runs = read_runs(name)
    out = shipped(runs)
    found = fit_source(runs)
    names = ["kernels.gemm", "kernels.attention", "kernels.elementwise"]
    names += ["iteration_s"] if name == "mpt" else ["kernels.dispatch", "kernels.expert_gemm"]
    out["fitted_again"] = constants_of(found, names)
    out["fitted_again_error"] = mean(abs(e) for e in relative_errors(runs, found))
    for kind in sorted({r.kind for r in runs}):
        mine = [r for r in runs if r.kind == kind]
        out[f"{kind}_left_out"] = {by: left_out(mine, by) for by in ("model", "gpu")}
    return out


def catalog() -> dict[str, Any]:
    """Both tables."""
    body: dict[str, Any] = {name: source(name) for name in ("mpt", "bridge")}
    bridge = body["bridge"]["by_kind"]
    body["catalog_error"] = {"mpt_fsdp": body["mpt"]["error"], **{f"megatron_bridge_{k}": e for k, e in bridge.items()}}
    return body


def families() -> dict[str, Any]:
    """Profiled runs of the Sailor project, with each family (model and cluster) left out of the calibration."""
    from tools.planner.accuracy import MEMORY_GRID, TIME_GRID, family_errors

    times, memory = family_errors(TIME_GRID, False), family_errors(MEMORY_GRID, True)
    return {
        "family_left_out_time_error": mean(times.values()),
        "family_left_out_memory_error": mean(memory.values()),
        "time_by_family": times,
        "memory_by_family": memory,
    }


SECTIONS = {"catalog": catalog, "families": families}


def main() -> None:
    """Predict the shipped tables, or those given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, metavar="OUT")
    parser.add_argument("--mpt", type=Path, metavar="FILE")
    parser.add_argument("--bridge", type=Path, metavar="FILE")
    options = parser.parse_args()
    given = {n: p for n, p in (("mpt", options.mpt), ("bridge", options.bridge)) if p is not None}
    body = {n: shipped(read_runs(n, p)) for n, p in given.items()} if given else catalog()
    write_json(options.json, body)
    short = {k: {a: b for a, b in v.items() if a != "runs"} if isinstance(v, dict) else v for k, v in body.items()}
    print(json.dumps(short, indent=2))


if __name__ == "__main__":
    main()
