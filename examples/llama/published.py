"""Write what a run of the demo found into README.md: the sentence with its figures, and the picture."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from examples.llama.screen import Screen

REPOSITORY = Path(__file__).resolve().parents[2]
README, PICTURE = REPOSITORY / "README.md", REPOSITORY / "docs" / "images" / "demo-timeline.png"
_BLOCK = re.compile(r"(<!-- demo: [^>]*-->\n).*?(\n<!-- end of demo -->)", re.DOTALL)


class BusyError(RuntimeError):
    """The figures of a run are not to be published."""


def sentence(result: dict[str, Any]) -> str:
    """What README.md says of a run.

    Args:
        result: The contents of ``report.json``.
    """
    stages = len({r["stage"] for r in result["per_rank"]})
    shape = "in one stage" if stages == 1 else f"in {stages} stages"
    picture = "![One iteration, as the planner predicted it and as it ran](docs/images/demo-timeline.png)"
    return (
        f"{picture}\n\n"
        f"`make demo` draws this picture on {result['cores']} processor cores; the slow ones run half of the time.\n"
        f"{len(result['per_rank'])} processes train {result['num_layers']} layers {shape}. The planner predicted "
        f"{result['predicted_iteration_s']:.2f} s per iteration, and the run\n"
        f"took {result['measured_iteration_s']:.2f} s. The even split of the same job took "
        f"{result['even_split_iteration_s']:.2f} s, {result['speedup_over_even_split']:.2f} times as long.\n"
        f"Measured on {result['date']}, {result['processor']}."
    )


def renew(result: dict[str, Any], out: Path, screen: Screen) -> None:
    """Put a run's figures and its picture where README.md shows them.

    Raises:
        BusyError: The machine was busy, or there is no picture.
    """
    if result["doubts"]:
        raise BusyError(f"README.md stays as it is: {'; '.join(result['doubts'])}")
    if not (out / "timeline.png").is_file():
        raise BusyError("README.md stays as it is: the run left no timeline.png (is matplotlib installed?)")
    text, found = _BLOCK.subn(lambda m: m[1] + sentence(result) + m[2], README.read_text(encoding="utf-8"))
    if found != 1:
        raise BusyError("README.md stays as it is: it has no place for the demo's figures")
    README.write_text(text, encoding="utf-8")
    shutil.copyfile(out / "timeline.png", PICTURE)
    screen.line(f"renewed: {README.name}, {PICTURE.relative_to(REPOSITORY)}")
