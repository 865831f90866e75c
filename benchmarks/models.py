"""Families of models under every schedule and feature: ``python -m benchmarks.models --json OUT``.

The families are those of ``examples/models`` at their small size, the features those of ``benchmarks.combinations``.  A
feature is refused for a family if the checks at the start refuse the smallest plan with it.  All others are
trained, several in one plan, against stock Megatron in one process (``benchmarks.parity``).  ``--only`` trains some
families or none, ``--plans`` only the first plans of each, ``--add`` merges the results of such runs, and
``--markdown FILE`` writes the table between the marks in that file.  Cells that were not trained are marked.

Keys: ``cells``, by family and feature: ``trained``, ``refused``, ``not compared`` (no one process does the same) or
``failed``; ``refused``, with the reason of each; ``plans``; ``failed``, names of plans that ended with an error or are
further from one process than ``testing.compare.BOUNDS`` (fp32 on a CPU: 1e-5); ``first_try`` of a plan with experts
that was trained twice (see :func:`measured`).
"""

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.combinations import argument_problems, chosen_features
from benchmarks.machine import command_line, write_between_marks, write_report
from benchmarks.parity import measure
from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan import PlanError, check_plan
from testing.cases import Case, Row
from testing.combination_cases import PARAMETERS, Feature, case_of, features, needs, pair_row, title
from testing.compare import failures
from testing.families import MODELS, has_experts, printed, with_shape
from testing.feature_cases import is_routed
from testing.runner import Device, add_device_argument

_TRAINED, _REFUSED, _ALONE, _FAILED = "trained", "refused", "not compared", "failed"
_SIGNS = {_TRAINED: "+", _ALONE: "o", _FAILED: "failed"}
_UNKNOWN = "-"
_LATER = {"relative_loss_difference": 0.0, "relative_validation_difference": 0.0}
_MOST = 5  # features of a plan beside its schedule


def case_for(family: str, row: Row, name: str, seed: int) -> Case:
    """Returns the plan of a row for a family.

    Raises:
        PlanError: The row contradicts itself, or the plan's checks refuse it.
    """
    case = case_of(row, name, seed)
    plan = replace(case.plan, model=with_shape(family, case.plan.model))
    if has_experts(family) and any(r.tp > 1 for stage in plan.stages for r in stage.replicas):
        # Megatron requires this flag if tokens are sent to experts.
        plan = replace(plan, training=replace(plan.training, sequence_parallel=True))
    check_plan(plan)
    check_plan_alone(plan)
    build(plan)
    return replace(case, plan=plan, family=family, chosen={**case.chosen, "family": family})


def compares(family: str, feature: Feature) -> bool:
    """Whether stock Megatron in one process trains the same.

    Experts get tokens by the order of scores, which rounds differently in bf16; and their balancing depends on the
    microbatches, which are of one sequence in the reference.
    """
    return not has_experts(family) or feature not in (("precision", "bf16"), ("microbatches", "unequal"))


def refusals(family: str, seed: int, folder: Path) -> dict[Feature, str]:
    """Returns the features that a family cannot have, each with the first reason."""
    found: dict[Feature, str] = {}
    cases: dict[Feature, Case] = {}
    for feature in features():
        try:
            cases[feature] = case_for(family, pair_row([feature]), "single", seed)
        except (PlanError, ValueError) as error:
            found[feature] = str(error)
    problems = argument_problems(list(cases.values()), folder)
    return found | {feature: texts[0] for feature, texts in zip(cases, problems, strict=True) if texts}


def drawn_rows(family: str, wanted: Sequence[Feature], rng: random.Random, seed: int) -> list[Row]:
    """A plan for each schedule, with further features, until every wanted one is in some plan."""
    left, rows = list(wanted), list[Row]()
    while left:
        first = next((f for f in left if f[0] == "schedule"), left[0])
        row, more = pair_row([first]), 0
        others = [f for f in left if f != first] + rng.sample(list(wanted), len(wanted))
        for feature in others:
            name, value = feature
            is_free = name != "schedule" and row[name] == PARAMETERS[name][0]
            if more == _MOST or not is_free or needs(feature).items() - row.items():
                continue
            try:
                case_for(family, row | {name: value}, "candidate", seed)
            except (PlanError, ValueError):
                continue
            row, more = row | {name: value}, more + 1
        rows.append(row)
        have = chosen_features(row)
        left = [f for f in left if f not in have]
    return rows


def cases_for(family: str, refused: Sequence[Feature], seed: int, folder: Path) -> list[Case]:
    """Plans that cover every accepted and comparable feature; rows that are invalid only together are left out."""
    rng = random.Random(f"{seed} {family}")
    wanted = [f for f in features() if f not in refused and compares(family, f)]
    left, cases = wanted, list[Case]()
    for attempt in range(2):
        rows = [pair_row([f]) for f in left] if attempt else drawn_rows(family, left, rng, seed)
        names = [f"{family}-{'one' if attempt else 'some'}-{i:02}" for i in range(len(rows))]
        drawn = [case_for(family, row, name, seed) for row, name in zip(rows, names, strict=True)]
        problems = argument_problems(drawn, folder / f"{family}-{attempt}")
        cases += [case for case, texts in zip(drawn, problems, strict=True) if not texts]
        have = {feature for case in cases for feature in chosen_features(case.chosen["row"])}
        left = [feature for feature in left if feature not in have]
        if not left:
            break
    return cases


def cells_of(
    family: str, refused: Iterable[Feature], entries: Sequence[dict[str, Any]], device: Device = "cpu"
) -> dict[str, str]:
    """Returns the state of each feature: trained, refused, not compared or failed."""
    bad = set(failures(entries, device))
    rows = [(entry["chosen"]["row"], entry["name"]) for entry in entries if entry["chosen"]["family"] == family]
    found = {}
    for feature in features():
        names = [name for row, name in rows if row[feature[0]] == feature[1]]
        if feature in refused:
            state = _REFUSED
        elif not compares(family, feature):
            state = _ALONE
        elif not names:
            continue
        else:
            state = _FAILED if bad & set(names) else _TRAINED
        found[title(feature)] = state
    return found


def table(report: dict[str, Any]) -> str:
    """Returns the table of a report, in Markdown."""
    families = list(MODELS)
    reasons = sorted({_reason(text) for texts in report["refused"].values() for text in texts.values()})
    lines = ["| | " + " | ".join(families) + " |", "|---|" + "---|" * len(families)]
    for feature in map(title, features()):
        cells = []
        for family in families:
            state = report["cells"].get(family, {}).get(feature, "")
            text = report["refused"].get(family, {}).get(feature, "")
            cells.append(str(reasons.index(_reason(text)) + 1) if state == _REFUSED else _SIGNS.get(state, _UNKNOWN))
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    if reasons:
        lines += ["", "Reasons:", "", *(f"{i + 1}. {reason}" for i, reason in enumerate(reasons))]
    return "\n".join(lines)


def _reason(text: str) -> str:
    """Returns a refusal without its remedy."""
    return text.split(". ")[0].rstrip(".") + "."


def measured(cases: Sequence[Case], folder: Path, at_once: int, device: Device = "cpu") -> list[dict[str, Any]]:
    """Train all cases; returns their results.

    Experts get tokens by the order of scores.  Two scores that are equal up to rounding may be ordered differently by
    chance, which shows in the losses from that step on.  So a plan with experts whose first step is right and whose
    later ones are not is trained once more, at another learning rate; a defect would recur.
    """
    entries = measure(list(cases), folder / "first", at_once, device)
    bad = set(failures(entries, device))
    again = []
    for case, entry in ((c, e) for c in cases for e in entries if e["name"] == c.name and c.name in bad):
        if is_routed(case) and "error" not in entry and not failures([entry | _LATER], device):
            again.append(replace(case, extra=(*case.extra, "--lr", "9e-4")))
    found = {entry["name"]: entry for entry in entries}
    for entry in measure(again, folder / "again", at_once, device) if again else []:
        entry["chosen"]["first_try"] = found[entry["name"]]["relative_loss_difference"]
        found[entry["name"]] = entry
    return [found[name] for name in sorted(found)]


def run(
    families: Sequence[str], seed: int, folder: Path, at_once: int, plans: int | None = None, device: Device = "cpu"
) -> dict[str, Any]:
    """Returns the report of some families."""
    refused, cases = {}, list[Case]()
    for family in families:
        refused[family] = refusals(family, seed, folder / f"{family}-single")
        cases += cases_for(family, list(refused[family]), seed, folder)[:plans]
    entries = measured(cases, folder, at_once, device) if cases else []
    return {
        "cells": {family: cells_of(family, refused[family], entries, device) for family in families},
        "refused": {family: {title(f): text for f, text in found.items()} for family, found in refused.items()},
        "flags": {family: " ".join(printed(family, "small")) for family in families},
        "plans": len(entries),
        "failed": failures(entries, device),
        "device": device,
        "seed": seed,
        "cases": entries,
    }


def added(report: dict[str, Any], file: Path) -> None:
    """Add the other families of an earlier report.

    Raises:
        SystemExit: A family's small flags have changed since.
    """
    other = json.loads(file.read_text(encoding="utf-8"))
    for family in set(other["cells"]) - set(report["cells"]):
        if family not in MODELS or other["flags"][family] != " ".join(printed(family, "small")):
            raise SystemExit(f"--add {file}: {family} has other flags now; train it again")
        for key in ("cells", "refused", "flags"):
            report[key][family] = other[key][family]
        mine = [entry for entry in other["cases"] if entry["chosen"]["family"] == family]
        report["cases"] += mine
        report["failed"] += failures(mine, other.get("device", "cpu"))
    report["plans"] = len(report["cases"])


def main() -> int:
    """Command line; exit code 1 where a plan failed."""
    parser = command_line("benchmarks.models", __doc__)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS), metavar="FAMILY", help="these")
    parser.add_argument("--plans", type=int, metavar="N", help="the first N plans of each family (default: all)")
    parser.add_argument("--seed", type=int, default=7, help="of which features a plan has (default %(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="jobs at the same time (default %(default)s)")
    add_device_argument(parser)
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="results of other families")
    parser.add_argument("--markdown", type=Path, help="file with the marks between which the table goes")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="models-"))
    report = run(options.only, options.seed, folder, options.at_once, options.plans, options.device)
    for file in options.add:
        added(report, file)
    write_report(options.json, report, unprinted=report)
    if options.markdown is not None:
        write_between_marks(options.markdown, "benchmarks.models", f"{table(report)}\n")
    sys.stdout.write(table(report) + "\n" + json.dumps(report["failed"]) + "\n")
    if not report["failed"]:
        shutil.rmtree(folder)
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
