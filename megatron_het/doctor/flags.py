"""The training's flags, checked against the plan and against every rank's machine before anything starts."""

import contextlib
import io
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_het import device as platform
from megatron_het import megatron_patches as upstream
from megatron_het.doctor.check import Answers, Check, Finding, Names, Seat, ranks_by
from megatron_het.plan import Placement, PlanError


@dataclass
class Flags(Check):
    """Reports all refusals of the training's start at once."""

    name: str = field(default="flags", init=False)
    limit_s: float = field(default=60.0, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Returns problems with the flags on this rank, and the flags that its machine needs."""
        device = platform.activate()
        needed = {flag.words[0]: str(flag) for flag in device.flags() if flag.required}
        if seat.flags is None:
            return {"needed": needed, "missing": {}, "problems": [], "given": False}
        upstream.install("stock")
        missing, problems = problems_of(seat.flags, device)
        stage = Placement(seat.plan).locate(seat.rank).stage
        problems += unseen_data(seat.flags) if stage in (0, len(seat.plan.stages) - 1) else []
        return {"needed": needed, "missing": missing, "problems": problems, "given": True}

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """Returns one finding per problem, with the ranks that have it."""
        missing = ranks_by({rank: answer["missing"].values() for rank, answer in answers.items()})
        problems = ranks_by({rank: answer["problems"] for rank, answer in answers.items()})
        found = [self.fault(names.of(ranks), f"missing: {text}", "Add it") for text, ranks in missing.items()]
        found += [self.fault(names.of(ranks), text) for text, ranks in problems.items()]
        if found:
            return found
        if next(iter(answers.values()))["given"]:
            return [self.ok("all ranks", "the training's flags fit the plan and the machines")]
        # Without flags to check: report flags that only some machines need.
        needs = ranks_by({rank: answer["needed"].values() for rank, answer in answers.items()})
        found = [
            self.warning(names.of(ranks), f"only here needed: {text}", "Give it to all ranks; or install alike")
            for text, ranks in needs.items()
            if len(ranks) < len(answers)
        ]
        return found or [self.ok("all ranks", "flags that the machines need: " + (", ".join(needs) or "none"))]


def unseen_data(flags: tuple[str, ...]) -> list[str]:
    """Data sets that are missing on this machine; the first and the last stage read them."""
    found = []
    for flag in ("--data-path", *(f"--{split}-data-path" for split in ("train", "valid", "test"))):
        after = flags[flags.index(flag) + 1 :] if flag in flags else ()
        named = [word for word in itertools.takewhile(lambda word: word[:2] != "--", after) if "://" not in word]
        gone = [w for w in named if "/" in w and not Path(w).exists() and not Path(f"{w}.idx").exists()]
        found += [f"{flag}: there is no {word}.idx" for word in gone]
    return found


def problems_of(flags: tuple[str, ...], device: Any) -> tuple[dict[str, str], list[str]]:
    """Returns missing flags that this machine needs, with reasons, and all other problems of a training's flags."""
    from megatron.training.arguments import parse_args

    from megatron_het.arguments.flags import split_arguments
    from megatron_het.arguments.hooks import argument_problems
    from megatron_het.runtime.session import HetSession

    said, before = io.StringIO(), sys.argv
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            config, rest = split_arguments(flags)
            sys.argv = ["pretrain", *rest]
            parsed = parse_args()
        missing = {flag.words[0]: str(flag) for flag in device.unmet_flags(parsed)}
        if config.plan is None:
            return missing, []
        session = HetSession(config, device)
        return missing, [str(problem) for problem in argument_problems(config, device, session, parsed)]
    except PlanError as error:
        return {}, [str(error)]
    except SystemExit:  # a parser has refused
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        return {}, [lines[-1] if lines else "the flags are refused, without a reason"]
    finally:
        sys.argv = before


def main(words: tuple[str, ...]) -> None:
    """Print the problems of a training's flags as JSON, even on a machine that lacks the nodes' devices."""
    device = platform.activate()
    upstream.install("stock")
    sys.stdout.write(json.dumps(problems_of(words, device)[1]) + "\n")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
