"""Every pair of features trains as one process does, or is refused: ``python -m benchmarks.combinations --json OUT``.

Pairs are those of ``combination_cases.PARAMETERS``.  A pair is refused if the checks at the start refuse the
smallest plan that contains it.  All other pairs are trained, many in one plan, against stock Megatron in one process
(``parity.py``); the plans also contain triples.  ``--check`` stops before the training, ``--markdown FILE`` writes the
page.  ``--part`` and ``--only`` train some of the plans; ``--add`` merges the results of such runs.  Results
from before the table got its newest parameters count as well; then plans are drawn for the pairs that they lack.

Keys: ``pairs``; ``refused_pairs``, with the reason of each; ``of_two_schedules``, pairs of which one is a part of
another schedule; ``plans`` that were trained, ``triples`` in them; ``failed``, names of plans that ended with an error
or are further from one process than ``testing.compare.BOUNDS`` (fp32 on a CPU: 1e-5).
"""

import fnmatch
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import add_part_argument, command_line, scratch, write_report
from benchmarks.parity import measure
from megatron_het.plan import PlanError, save_plan
from testing.cases import Case, Row, common_flags
from testing.combination_cases import (
    PARAMETERS,
    Feature,
    Pair,
    are_of_two_schedules,
    case_of,
    covering_rows,
    features,
    pair_row,
    pairs,
    schedules_of,
    title,
)
from testing.compare import failures
from testing.runner import Job, Runner, add_device_argument

_CHECK = "benchmarks.combinations:check_starts"


def refusals(wanted: Sequence[Pair], seed: int, folder: Path) -> dict[Pair, str]:
    """Returns the pairs that the checks of plan and flags refuse, each with the first reason."""
    found: dict[Pair, str] = {}
    cases: dict[Pair, Case] = {}
    for pair in wanted:
        try:
            cases[pair] = case_of(pair_row(pair), "pair", seed)
        except (PlanError, ValueError) as error:
            found[pair] = str(error)
    problems = argument_problems(list(cases.values()), folder)
    found |= {pair: texts[0] for pair, texts in zip(cases, problems, strict=True) if texts}
    return found


def argument_problems(cases: Sequence[Case], folder: Path) -> list[list[str]]:
    """Returns the problems for which the start of each case would be refused."""
    starts = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(cases):
        file = folder / f"plan-{number}.json"
        save_plan(case.plan, file)
        size = ("--micro-batch-size", str(case.plan.training.micro_batch_size))
        # Updates that cannot be undone need this flag; other updates are not affected.
        flags = (*common_flags(*case.reference), *size, "--rerun-mode", "disabled", "--mock-data")
        starts.append((case.plan.world_size, [*flags, "--het-plan", str(file), *case.plan_flags()]))
    return start_problems(starts, folder)


def start_problems(starts: Sequence[tuple[int, Sequence[str]]], folder: Path) -> list[list[str]]:
    """Returns the problems of each start (number of ranks and flags), found in one process with Megatron."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, answer = folder / "starts.json", folder / "problems.json"
    asked.write_text(json.dumps(starts), encoding="utf-8")
    with Runner() as runner:
        runner.run(Job("checks", 1, (str(asked), str(answer)), folder / "checks", _CHECK, timeout_s=900.0))
    found: list[list[str]] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def check_starts() -> None:
    """Write the problems of every start in a file into another file; runs in a process of the rank server."""
    asked, answer = map(Path, sys.argv[1:])
    answer.write_text(json.dumps(problems_here(json.loads(asked.read_text(encoding="utf-8")))), encoding="utf-8")


def problems_here(starts: Sequence[tuple[int, Sequence[str]]]) -> list[list[str]]:
    """Returns the problems of each start (number of ranks and flags), found in this process."""
    from megatron_het import device as platform
    from megatron_het import megatron_patches as upstream
    from megatron_het.doctor.flags import problems_of

    device = platform.activate()
    upstream.install("stock")
    found = []
    for world_size, words in starts:
        os.environ["WORLD_SIZE"] = str(world_size)
        missing, problems = problems_of(tuple(words), device)
        found.append([*missing.values(), *problems])
    return found


def trained_cases(
    wanted: Sequence[Pair], refused: set[Pair], seed: int, folder: Path, known: Sequence[Case] = ()
) -> list[Case]:
    """Plans that contain every possible pair; combinations that only three features together make invalid are left out.

    Args:
        wanted: All pairs.
        refused: Those of them that are refused.
        seed: Of the draw.
        folder: For checks of the flags.
        known: Plans that were trained before the table had all of its parameters; others are drawn for what they lack.
    """
    cases = list(known)
    have = _groups(cases, 2)
    left = [pair for pair in wanted if pair not in refused and frozenset(pair) not in have]
    kinds = ("more", "more-pair") if known else ("plan", "pair")
    for attempt in range(2):
        rows = covering_rows(left, refused, seed + attempt) if not attempt else [pair_row(pair) for pair in left]
        taken = sum(case.name.startswith(kinds[attempt]) for case in known)  # of earlier runs that did the same
        names = [f"{kinds[attempt]}-{taken + i:03}" for i in range(len(rows))]
        drawn = [case_of(row, name, seed) for row, name in zip(rows, names, strict=True)]
        problems = argument_problems(drawn, folder / f"attempt-{attempt}")
        cases += [case for case, texts in zip(drawn, problems, strict=True) if not texts]
        have = _groups(cases, 2)
        left = [pair for pair in left if frozenset(pair) not in have]
        if not left:
            return cases
    raise AssertionError(f"no plan has {[' and '.join(map(title, pair)) for pair in left]}, and no check refuses them")


def chosen_features(row: Row) -> list[Feature]:
    """Returns the features of a row."""
    return [feature for feature in features() if row[feature[0]] == feature[1]]


def _groups(cases: Sequence[Case], size: int) -> set[frozenset[Feature]]:
    """Returns the groups of so many features that are in one plan."""
    found = (itertools.combinations(chosen_features(case.chosen["row"]), size) for case in cases)
    return set(map(frozenset, itertools.chain.from_iterable(found)))


def added(files: Sequence[Path], seed: int, cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Read the results of earlier runs by plan; if several files have a plan, the last one counts.

    Raises:
        SystemExit: A run with another seed, or of other plans.
    """
    entries = read_entries(files, seed)
    check_entries(entries, cases)
    return entries


def read_entries(files: Sequence[Path], seed: int) -> dict[str, dict[str, Any]]:
    """The entries of earlier runs by name; SystemExit for a run with another seed."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        report = json.loads(file.read_text(encoding="utf-8"))
        if report["seed"] != seed:
            raise SystemExit(f"--add {file}: of seed {report['seed']}, and this run has {seed}")
        found |= {entry["name"]: entry for entry in report["cases"]}
    return found


def check_entries(entries: dict[str, dict[str, Any]], cases: Sequence[Case]) -> None:
    """Raise SystemExit if entries of earlier runs belong to other plans than this draw has."""
    chosen = {case.name: json.loads(json.dumps(case.chosen)) for case in cases}
    other = [name for name, entry in entries.items() if chosen.get(name) != _whole(entry["chosen"])]
    if other:
        raise SystemExit(f"--add: {', '.join(other)} are other plans now; train them again")


def from_before(entries: dict[str, dict[str, Any]], seed: int) -> list[Case]:
    """Returns the plans of entries from before the table had all of its parameters."""
    return [
        case_of(_whole(entry["chosen"])["row"], name, seed)
        for name, entry in entries.items()
        if PARAMETERS.keys() - entry["chosen"]["row"].keys()
    ]


def _whole(chosen: dict[str, Any]) -> dict[str, Any]:
    """Returns the chosen features, with defaults for parameters that the table got later."""
    if "row" not in chosen:
        return chosen
    return {**chosen, "row": {key: chosen["row"].get(key, values[0]) for key, values in PARAMETERS.items()}}


def markdown(refused: dict[Pair, str]) -> str:
    """Returns the page: refused pairs with the reason, and the schedules that have each feature."""
    schedules = PARAMETERS["schedule"]
    lines = [
        "# What goes with what",
        "",
        "For whoever wants several features in one plan, and asks whether they go together.",
        "",
        f"{sum(not are_of_two_schedules(pair) for pair in pairs())} pairs of {len(features())} features can be in one "
        f"plan; of these {len(refused)} are refused.",
        "`benchmarks/results/combinations.json` has the plans in which 535 of them were trained, and how far each was",
        "from stock Megatron in one process.",
        "",
        "## Refused",
        "",
        "These pairs end in one error at the start, before any process group exists.",
        "",
        "| feature | with | because |",
        "|---|---|---|",
    ]
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (one, other), text in refused.items():
        by_reason.setdefault((title(other), _reason(text)), []).append(title(one))
    lines += [f"| {second} | {', '.join(firsts)} | {reason} |" for (second, reason), firsts in by_reason.items()]
    lines += [
        "",
        "## Features of some schedules only",
        "",
        "A feature that is not in this list goes with every schedule: " + ", ".join(schedules) + ".",
        "",
        "| feature | schedules |",
        "|---|---|",
    ]
    for feature in features():
        if feature[0] != "schedule" and set(found := schedules_of(feature)) != set(schedules):
            lines.append(f"| {title(feature)} | {', '.join(found)} |")
    lines += [
        "",
        "## Features that were combined",
        "",
        "| setting | values |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {', '.join(map(_value, values))} |" for name, values in PARAMETERS.items()),
        "",
        "## How this page is made",
        "",
        "`python -m benchmarks.combinations --json OUT --markdown docs/combinations.md` makes this page.",
        "With `--check` it looks for refused pairs only. Without, it also trains every other pair in some plan.",
    ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _reason(text: str) -> str:
    """Returns the reason in a refusal, without its place and its remedy."""
    return text.split(": ", 1)[1].split(". ")[0].rstrip(".") + "."


def main() -> int:
    """Command line; exit code 1 where a plan failed."""
    parser = command_line("benchmarks.combinations", __doc__)
    parser.add_argument("--seed", type=int, default=0, help="of layers, routing and of which features a plan has")
    parser.add_argument("--check", action="store_true", help="look for refused pairs, and train nothing")
    add_part_argument(parser)
    parser.add_argument("--only", metavar="NAME", default="*", help="plans by name; * stands for anything")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="JSON", help="results of earlier runs with this seed"
    )
    parser.add_argument("--at-once", type=int, default=2, help="jobs at the same time (default: 2)")
    add_device_argument(parser)
    parser.add_argument("--markdown", type=Path, help="where to write the page")
    options = parser.parse_args()
    wanted = [pair for pair in pairs() if not are_of_two_schedules(pair)]
    with scratch("combinations-") as folder:
        refused = refusals(wanted, options.seed, folder / "pairs")
        earlier = read_entries(options.add, options.seed)
        before = from_before(earlier, options.seed)
        cases = trained_cases(wanted, set(refused), options.seed, folder, before)
        check_entries(earlier, cases)
        index, parts = options.part
        new = [case for case in cases if case not in before]
        chosen = [case for case in new[index - 1 :: parts] if fnmatch.fnmatchcase(case.name, options.only)]
        chosen = [] if options.check else chosen
        entries = measure(chosen, folder / "runs", options.at_once, options.device) if chosen else []
    entries = sorted((earlier | {entry["name"]: entry for entry in entries}).values(), key=lambda e: str(e["name"]))
    report = {
        "pairs": len(wanted),
        "of_two_schedules": len(pairs()) - len(wanted),
        "refused": len(refused),
        "refused_pairs": {" and ".join(map(title, pair)): text for pair, text in refused.items()},
        "plans": len(cases),
        "trained": len(entries),
        "triples": len(_groups(cases, 3)),
        "failed": failures(entries, options.device),
        "device": options.device,
        "seed": options.seed,
        "cases": entries,
    }
    write_report(options.json, report)
    if options.markdown is not None:
        options.markdown.write_text(markdown(refused), encoding="utf-8")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
