"""The sources that ``benchmarks.structure`` reads: modules, their imports and names."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PRODUCT = ("megatron_het", "tools", "examples")
FOLDERS = (*PRODUCT, "benchmarks", "tests", "testing")


@dataclass(slots=True)
class Module:
    """One source file: its dotted name, its lines, how many of them are comments, and its syntax tree."""

    name: str
    path: str
    lines: int
    comments: int
    tree: ast.Module
    package: bool
    nodes: list[ast.AST] = field(default_factory=list)

    def at(self, node: ast.AST) -> str:
        """``file:line`` of a node."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


Target = int | Mapping[str, int]
"""The most that a figure may be; for a figure with names, of each of them or by name."""


@dataclass(slots=True)
class Finding:
    """The figure of one key and the places that make it."""

    value: float | dict[str, int]
    offenders: list[str]

    def missed(self, target: Target) -> bool:
        """Whether the figure, or one of them, is above the target; a name without a target cannot be."""
        values = self.value if isinstance(self.value, dict) else {"": self.value}
        return any(
            value > (target.get(name, value) if isinstance(target, Mapping) else target)
            for name, value in values.items()
        )


def read_tree(root: Path, folders: Sequence[str] = FOLDERS) -> list[Module]:
    """The modules under ``root``, by path.

    Raises:
        ValueError: A file cannot be parsed, or there is none.
    """
    modules = []
    for path in sorted(p for folder in folders for p in (root / folder).rglob("*.py")):
        relative = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"{relative}:{error.lineno}: {error.msg}") from error
        parts = relative.with_suffix("").parts
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        modules.append(
            Module(
                name=name,
                path=str(relative),
                lines=len(text.splitlines()),
                comments=sum(line.lstrip().startswith("#") for line in text.splitlines()),
                tree=tree,
                package=package,
                nodes=list(ast.walk(tree)),
            )
        )
    if not modules:
        raise ValueError(f"no Python file under {', '.join(folders)} of {root}: give --root the top of a checkout")
    return modules


def imports_of(module: Module, known: Iterable[str]) -> dict[str, ast.AST]:
    """Modules among ``known`` that ``module`` imports anywhere, each with the first statement that does.

    ``from a import b`` is an import of ``a.b`` where that is a module, else of ``a``.
    """
    found: dict[str, ast.AST] = {}
    names = known if isinstance(known, (set, frozenset, dict)) else set(known)
    for node in module.nodes:
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            wanted = [f"{base}.{a.name}" if f"{base}.{a.name}" in names else base for a in node.names]
        else:
            continue
        for name in wanted:
            if name in names and name != module.name:
                found.setdefault(name, node)
    return found


def _base(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name that a ``from`` import starts at."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + (1 if module.package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` as text, None for anything that is not made of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value) or ''}.{node.attr}"
    return None
