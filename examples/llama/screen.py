"""Output of the demo while it runs: rich tables and progress bars, plain lines where rich is missing."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

try:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:  # the planner extra is not installed
    Console = None  # type: ignore[assignment, misc]


_WIDTH = 76
"""Of a command's line."""


class Screen:
    """Output of a command line."""

    def __init__(self) -> None:
        self._console = Console(highlight=False) if Console is not None else None

    def title(self, text: str) -> None:
        """Start of a step."""
        if self._console is not None:
            self._console.print(f"\n[bold cyan]{text}[/]")
        else:
            self._plain(f"\n== {text}")

    def line(self, text: str) -> None:
        """One line, without markup."""
        if self._console is not None:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            self._plain(text)

    def command(self, words: Sequence[str]) -> None:
        """Print what was given to Python whole, to be copied, with paths from here."""
        lines = ["$ python"]
        for word in words:
            text = shlex.quote(word.replace(f"{Path.cwd()}/", ""))
            if len(lines[-1]) + len(text) > _WIDTH:
                lines.append("   ")
            lines[-1] += f" {text}"
        self.line(" \\\n".join(lines))

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; the first column is left-aligned, the others to the right."""
        if self._console is not None:
            table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
            for i, name in enumerate(head):
                table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            return
        self._plain(title)
        widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
        for row in [head, *rows]:
            self._plain("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)))

    @contextlib.contextmanager
    def training(self, name: str, iterations: int) -> Iterator[Callable[[int, int, float], None]]:
        """Progress of a training; yields the function to call with (iteration, of, loss)."""
        if self._console is None or not self._console.is_terminal:
            yield self._print_some(name, iterations)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(name, total=iterations, loss="starting")
            yield lambda i, n, loss: progress.update(task, completed=i, total=n, loss=f"loss {loss:.3f}")

    def _print_some(self, name: str, iterations: int) -> Callable[[int, int, float], None]:
        step = max(1, iterations // 10)

        def show(iteration: int, total: int, loss: float) -> None:
            if iteration % step == 0 or iteration in (1, total):
                self.line(f"{name}: iteration {iteration}/{total}, loss {loss:.3f}")

        return show

    def _plain(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
