"""Checks the flags of Megatron's own recipes under a plan: each is kept, replaced by the plan or refused.

    python -m benchmarks.recipes --json OUT [--markdown docs/models.md]

``benchmarks/recipe_flags.json`` has the flags of scripts in Megatron-LM's ``examples/``, with their values.  Every flag
is parsed by Megatron and checked as at the start of a run under a plan.  A refused flag is recorded with its reason,
and the other flags are checked again without it.
"""

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.machine import command_line, write_between_marks, write_report
from megatron_het.arguments.megatron_args import check_arguments
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import PlanError, ScheduleSpec, check_plan
from megatron_het.plan.run_config import check_batch_schedule, plan_from_flags

FILE = Path(__file__).with_name("recipe_flags.json")
RUNS, PLANNED, FOREIGN, OF_FSDP = "runs", "the plan says it", "no flag of a training", "of FSDP"
_WORDS = (RUNS, PLANNED, FOREIGN, OF_FSDP)
_OF_FSDP = ("data-parallel-sharding-strategy", "init-model-with-meta-device", "fsdp-double-buffer")
"""Options of FSDP whose names do not begin with it; without FSDP nothing reads them."""
_PLANNED = {
    "tensor-model-parallel-size": "`tp` of each replica",
    "pipeline-model-parallel-size": "`stages`",
    "context-parallel-size": "`cp` of each replica",
    "expert-model-parallel-size": "`ep` of each replica",
    "expert-tensor-parallel-size": "`ep` of each replica: its other TP ranks cut each expert",
    "num-layers-per-virtual-pipeline-stage": "`stages[].layers`, of every chunk",
    "num-virtual-stages-per-pipeline-rank": "`stages[].layers`, of every chunk",
    "pipeline-model-parallel-layout": "`stages[].layers`",
    "decoder-first-pipeline-num-layers": "`stages[].layers`",
    "decoder-last-pipeline-num-layers": "`stages[].layers`",
}
"""Flags that a plan replaces, by the part of the plan that replaces them."""
ADDED = ("calculate-per-token-loss", "dist-ckpt-optim-fully-reshardable", "sequence-parallel")
"""Flags that plans need, the last one with TP of experts or gated delta nets, as in Megatron."""
_BATCH = {"micro-batch-size": "1", "global-batch-size": "8"}
_TP = 2  # ranks of the plans that flags are checked with; as many stages, if the layers divide

Flags = Mapping[str, str]


def recipes() -> dict[str, dict[str, Any]]:
    """Returns every recipe's script and flags."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def fate(flags: Flags, parser: argparse.ArgumentParser) -> dict[str, str]:
    """Returns the result for each flag of a recipe: one of ``_WORDS``, or the reason of the refusal.

    Raises:
        PlanError: A refusal that names no flag of the recipe.
    """
    known = {option for action in parser._actions for option in action.option_strings}
    found = {name: FOREIGN for name in flags if f"--{name}" not in known}
    found |= {name: PLANNED for name in flags if name in _PLANNED}
    if "use-megatron-fsdp" in flags:
        found |= {name: OF_FSDP for name in flags if name in _OF_FSDP or name.startswith("megatron-fsdp-")}
    left = {name: value for name, value in flags.items() if name not in found}
    while True:
        try:
            _check(left, parser)
        except PlanError as error:
            name = _named(error, left)
            if name is None:
                raise
            problem = error.problem.removeprefix("cannot be used with --het-plan: ")
            found[name] = f"{problem}. {error.hint}".removesuffix(". ")
            del left[name]
        else:
            return found | dict.fromkeys(left, RUNS)


def _named(error: PlanError, flags: Flags) -> str | None:
    """Returns the flag that a refusal names."""
    words = error.where.replace("=", " ").split()
    return next((word.removeprefix("--") for word in words if word.removeprefix("--") in flags), None)


def _check(flags: Flags, parser: argparse.ArgumentParser) -> None:
    """Raise PlanError unless a plan accepts these flags."""
    given = {"tensor-model-parallel-size": str(_TP), **_BATCH, **dict.fromkeys(ADDED, ""), **flags}
    pattern, layers = given.get("hybrid-layer-pattern"), int(given.get("num-layers", 0))
    stages = 2 if pattern is not None or layers % 2 == 0 else 1
    given["pipeline-model-parallel-size"] = str(stages)
    given["global-batch-size"] = str(math.lcm(int(given["micro-batch-size"]), int(given["global-batch-size"])))
    several = {option for action in parser._actions if action.nargs in ("+", "*") for option in action.option_strings}
    words = []
    for name, value in given.items():
        words += [f"--{name}", *(value.split() if f"--{name}" in several else [value] if value else [])]
    ranks = _TP * stages
    plan, own = plan_from_flags(words, ranks, ScheduleSpec("1f1b"))
    check_plan(plan)
    check_plan_alone(plan)
    args = parser.parse_args(own)
    args.world_size, args.rank = ranks, 0
    if args.ffn_hidden_size is None and plan.model.ffn_hidden_size is not None:
        args.ffn_hidden_size = plan.model.ffn_hidden_size
    check_batch_schedule((plan,), args)
    find: Any = importlib.util.find_spec
    names = {"transformer_engine": "torch"}  # as if Transformer Engine were installed, which the recipes need
    with mock.patch.object(importlib.util, "find_spec", lambda name, *more: find(names.get(name, name), *more)):
        check_arguments(plan, args, ranks)


def megatron_parser() -> argparse.ArgumentParser:
    """Returns Megatron's parser, changed to raise instead of exiting the process."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    return parser


def fates() -> dict[str, dict[str, str]]:
    """Returns the result for every flag of every recipe."""
    from megatron_het.device import activate

    activate()  # Megatron binds on import what the platform replaces
    parser = megatron_parser()
    return {name: fate(recipe["flags"], parser) for name, recipe in recipes().items()}


def tables(found: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the tables in Markdown."""
    sources = recipes()
    lines = [
        "| recipe | script in `examples/` | flags | run as they are | the plan says | refused |",
        "|---|---|---|---|---|---|",
    ]
    for name, by_flag in found.items():
        words = list(by_flag.values())
        runs, planned, foreign = words.count(RUNS), words.count(PLANNED), words.count(FOREIGN)
        refused = sorted(flag for flag, word in by_flag.items() if word not in _WORDS)
        script = sources[name]["source"].removeprefix("examples/")
        lines.append(
            f"| {name} | `{script}` | {len(words) - foreign} | {runs} | {planned} | "
            f"{', '.join(f'`--{flag}`' for flag in refused) or 'none'} |"
        )
    lines += ["", "| flag | with a plan | recipes |", "|---|---|---|"]
    for flag in sorted({flag for by_flag in found.values() for flag in by_flag}):
        by_name = {name: by_flag[flag] for name, by_flag in found.items() if flag in by_flag}
        text = next((word for word in by_name.values() if word not in (RUNS, FOREIGN)), None)
        if text is not None:
            said = {
                PLANNED: f"in its place: {_PLANNED.get(flag)}",
                OF_FSDP: "says how FSDP works: leave it out with that",
            }
            names = ", ".join(name for name, word in by_name.items() if word == text)
            lines.append(f"| `--{flag}` | {said.get(text, f'refused: {text}')} | {names} |")
    all_run = sorted({f for by_flag in found.values() for f, word in by_flag.items() if word == RUNS})
    of_others = sorted({f for by_flag in found.values() for f, word in by_flag.items() if word == FOREIGN})
    lines += ["", f"{len(all_run)} flags run as they are: {', '.join(f'`--{flag}`' for flag in all_run)}."]
    lines += ["", f"Of other programs than Megatron's training: {', '.join(f'`--{flag}`' for flag in of_others)}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.recipes", __doc__)
    parser.add_argument("--markdown", type=Path, help="file with the marks between which the tables go")
    options = parser.parse_args()
    found = fates()
    if options.markdown is not None:
        write_between_marks(options.markdown, "benchmarks.recipes", tables(found))
    write_report(options.json, {"recipes": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
