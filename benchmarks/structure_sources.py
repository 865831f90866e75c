"""The sources that ``benchmarks.structure`` reads: modules, their imports and names."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PRODUCT = ("megatron_het", "tools", "examples")
FOLDERS = (*PRODUCT, "benchmarks", "tests")


@dataclass(slots=True)
class Module:
    """One source file: its dotted name, lines and syntax tree."""

    name: str
    path: str
    lines: int
    tree: ast.Module
    package: bool
    nodes: list[ast.AST] = field(default_factory=list)

    def at(self, node: ast.AST) -> str:
        """``file:line`` of a node."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@dataclass(slots=True)
class Finding:
    """The figure of one key and the places that make it."""

    value: int | dict[str, int]
    offenders: list[str]

    def missed(self, target: int) -> bool:
        """Whether the figure, or one of them, is above the target."""
        values = self.value.values() if isinstance(self.value, dict) else (self.value,)
        return any(v > target for v in values)


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
        modules.append(Module(name, str(relative), len(text.splitlines()), tree, package, list(ast.walk(tree))))
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
