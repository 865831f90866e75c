"""How well the code is kept apart: circles, long files, and in how many places each feature is known.

``python -m benchmarks.structure --json OUT`` reads the sources of a tree with the standard library alone; nothing
is imported or run.  Every offender is printed as ``file:line``.  The exit code is 1 where a target is missed.

====================================  ======================================================================  ======
key                                   what is counted                                                         target
====================================  ======================================================================  ======
``import_circles``                    groups of modules that import each other, wherever the import stands         0
``package_circles``                   packages of the product that import each other in circles               <= 25
``long_functions``                    functions and methods of more than 80 lines, decorators left out             0
``long_files``                        files of more than 600 lines                                                 0
``one_importer_modules``              modules of under 80 lines that one module of the product imports        <= 48
``docstring_openings``                docstrings that begin with a word that says nothing (``Of``, ``What``)  <= 463
``type_checking_blocks``              ``if TYPE_CHECKING:``                                                    <= 20
``modules_per_feature``               places that know a feature, see below                               <= 8 each
``kinds_compared_as_numbers``         kinds of operations used as integers                                         0
====================================  ======================================================================  ======

*Circles.*  An import inside a function or under ``TYPE_CHECKING`` counts like one at the top.  That a submodule
makes Python run its package's ``__init__`` first does not count; an import of a name *from* the package does.

*Features.*  A feature has a home (its specification and its folder).  The home counts as one place.  Every other
module of the product (``megatron_het``, ``tools``, ``examples``; what tests and measures a feature is left out)
that imports a module of the home is one place more.  So is a module that names one of the feature's own identifiers
in code or in a string that is not a docstring.  The own identifiers are its plan parameters, its flags and its kinds
of operations (``benchmarks/structure_features.py``).  A word that the feature shares with others (``slice`` as a
coordinate of every operation, ``vocab_size`` of every model) is not among them.  Plan parameters that are common
nouns (``window``, ``vocabulary``) count in strings only, where parameters are written: as names of variables they mean
the window of a model's attention or the number of words.

*Kinds.*  Counted are: an order (``kind < 4``), a comparison with an integer or with a range, and the truth of a
kind (``if kind``).  A kind is a name ``kind``, an attribute ``.kind``, ``op[0]`` or a member of ``Kind``.  Tests are
left out: they show that such comparisons fail.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.structure_features import MAX_PLACES, modules_per_feature
from benchmarks.structure_sources import PRODUCT, Finding, Module, dotted, imports_of, read_tree

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 600
SHORT_MODULE_LINES = 80
OPENING = re.compile(r"(Of|What|Those|Likewise|The same|As)\b")
"""How a docstring does not begin: its first line says with a verb or a noun what there is."""
TARGETS = {
    "import_circles": 0,
    # These three may not grow.
    "package_circles": 17,
    "one_importer_modules": 47,
    "docstring_openings": 219,
    "long_functions": 0,
    "long_files": 0,
    "type_checking_blocks": 20,
    "modules_per_feature": MAX_PLACES,
    "kinds_compared_as_numbers": 0,
}


def import_circles(modules: Sequence[Module]) -> Finding:
    """Groups of modules in which each can be reached from each other one by imports."""
    by_name = {m.name: m for m in modules}
    edges = {m.name: imports_of(m, by_name) for m in modules}
    circles = _circles(edges)
    offenders = []
    for circle in circles:
        offenders.append(f"circle of {len(circle)} modules: {', '.join(circle)}")
        offenders += [
            f"  {by_name[a].at(edges[a][b])} imports {b}" for a in circle for b in edges[a] if b in set(circle)
        ]
    return Finding(len(circles), offenders)


def package_circles(modules: Sequence[Module]) -> Finding:
    """Rooms of the product that reach themselves by imports over other rooms."""
    by_name = {m.name: m for m in modules}
    rooms = {m.name: _room(m) for m in modules if m.name.split(".")[0] in PRODUCT}
    edges: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, room in rooms.items():
        edges[room] |= {rooms[other] for other in imports_of(by_name[name], by_name) if other in rooms} - {room}
    circles = _circles(edges)
    return Finding(
        sum(map(len, circles)), [f"circle of {len(circle)} packages: {', '.join(circle)}" for circle in circles]
    )


def _room(module: Module) -> str:
    """The folder below the product's top that a module lies in; what is started is a room of its own."""
    top = ("tools", "planner") if module.name.startswith("tools.") else ("megatron_het",)
    folders = Path(module.path).parent.parts[len(top) :]
    stem = Path(module.path).stem
    if stem == "__main__" or (not folders and stem in ("pretrain_gpt", "run")):
        return module.path
    if folders[:1] == ("features",):
        # Specs and passes know nothing of ranks; what runs on a rank knows the session, which knows the specs.
        is_spec = len(folders) == 1 or stem == "spec" or stem.endswith("passes") or stem == "__init__"
        return "features (specs)" if is_spec else "features (on a rank)"
    if folders[:2] == ("schedule", "view"):
        return "schedule/view"
    return "/".join((*top, *folders[:1]))


def _circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of names that reach each other."""
    reach = {name: _reachable(name, edges) for name in edges}
    circles: list[list[str]] = []
    seen: set[str] = set()
    for name in sorted(edges):
        if name in seen or name not in reach[name]:
            continue
        circle = sorted(other for other in reach[name] if name in reach[other])
        seen.update(circle)
        circles.append(circle)
    return circles


def _reachable(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    """Returns what can be reached from ``start`` in one step or more."""
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += edges[name]
    return found


def long_functions(modules: Sequence[Module]) -> Finding:
    """Functions of more than :data:`MAX_FUNCTION_LINES` lines from ``def`` to the last one."""
    offenders = []
    for m in modules:
        for node in m.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    offenders.append(f"{m.at(node)} {node.name} has {lines} lines")
    return Finding(len(offenders), offenders)


def long_files(modules: Sequence[Module]) -> Finding:
    """Files of more than :data:`MAX_FILE_LINES` lines."""
    offenders = [f"{m.path}:{m.lines} has {m.lines} lines" for m in modules if m.lines > MAX_FILE_LINES]
    return Finding(len(offenders), offenders)


def one_importer_modules(modules: Sequence[Module]) -> Finding:
    """Short modules of the product that are no package's face and that a single module of the product imports."""
    product = [m for m in modules if m.name.split(".")[0] in PRODUCT]
    by_name = {m.name: m for m in product}
    importers: dict[str, list[str]] = {}
    for m in product:
        for name in imports_of(m, by_name):
            importers.setdefault(name, []).append(m.name)
    offenders = [
        f"{m.path} has {m.lines} lines; {importers[m.name][0]} imports it"
        for m in product
        if m.lines < SHORT_MODULE_LINES and not m.package and len(importers.get(m.name, ())) == 1
    ]
    return Finding(len(offenders), offenders)


def docstring_openings(modules: Sequence[Module]) -> Finding:
    """Docstrings of the product that begin with a word of :data:`OPENING`."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    offenders = [
        f"{m.at(node)} {text.splitlines()[0]}"
        for m in modules
        if m.name.split(".")[0] in PRODUCT
        for node in m.nodes
        if isinstance(node, documented) and OPENING.match(text := ast.get_docstring(node) or "")
    ]
    return Finding(len(offenders), offenders)


def type_checking_blocks(modules: Sequence[Module]) -> Finding:
    """``if TYPE_CHECKING:`` and ``if typing.TYPE_CHECKING:``."""
    offenders = [
        m.at(node)
        for m in modules
        for node in m.nodes
        if isinstance(node, ast.If) and (dotted(node.test) or "").rpartition(".")[2] == "TYPE_CHECKING"
    ]
    return Finding(len(offenders), offenders)


def kinds_compared_as_numbers(modules: Sequence[Module]) -> Finding:
    """Where a kind of operation is ordered, compared with an integer or taken for true or false."""
    offenders = []
    for m in modules:
        if m.name.split(".")[0] == "tests":
            continue
        knows_kinds = any(isinstance(n, ast.alias) and n.name.rpartition(".")[2] == "Kind" for n in m.nodes)
        knows_kinds |= m.name.startswith("megatron_het.schedule")
        for node in m.nodes if knows_kinds else ():
            if isinstance(node, ast.Compare):
                if _numeric(node):
                    offenders.append(f"{m.at(node)} {ast.unparse(node)}")
            elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.BoolOp | ast.UnaryOp):
                for tested in _truths(node):
                    offenders.append(f"{m.at(tested)} truth of {ast.unparse(tested)}")
    return Finding(len(offenders), offenders)


def _is_kind(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return dotted(node.value) == "op" and isinstance(node.slice, ast.Constant) and node.slice.value == 0
    name = dotted(node) or ""
    return name.rpartition(".")[2] == "kind" or re.search(r"(^|\.)Kind\.\w+$", name) is not None


def _numeric(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
        if not (_is_kind(left) or _is_kind(right)):
            continue
        other = right if _is_kind(left) else left
        if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) or _integers(other):
            return True
    return False


def _integers(node: ast.AST) -> bool:
    """An integer, a display of integers, or a range."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(_integers(e) for e in node.elts)
    return isinstance(node, ast.Call) and dotted(node.func) == "range"


def _truths(node: ast.If | ast.IfExp | ast.While | ast.BoolOp | ast.UnaryOp) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp):
        tested = node.values
    elif isinstance(node, ast.UnaryOp):
        tested = [node.operand] if isinstance(node.op, ast.Not) else []
    else:
        tested = [node.test]
    return [t for t in tested if _is_kind(t) and isinstance(t, ast.Name | ast.Attribute | ast.Subscript)]


def measure(root: Path) -> dict[str, Finding]:
    """All figures of the tree at ``root``."""
    modules = read_tree(root)
    return {
        "import_circles": import_circles(modules),
        "package_circles": package_circles(modules),
        "one_importer_modules": one_importer_modules(modules),
        "docstring_openings": docstring_openings(modules),
        "long_functions": long_functions(modules),
        "long_files": long_files(modules),
        "type_checking_blocks": type_checking_blocks(modules),
        "modules_per_feature": modules_per_feature(modules),
        "kinds_compared_as_numbers": kinds_compared_as_numbers(modules),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print figures and offenders; returns 0 where every target is reached, 1 where not, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="top of the checkout")
    options = parser.parse_args(arguments)
    try:
        found = measure(options.root)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missed = [key for key, finding in found.items() if finding.missed(TARGETS[key])]
    for key, finding in found.items():
        print(f"{key}: {finding.value} (target {TARGETS[key]}){'  MISSED' if key in missed else ''}")
        for line in finding.offenders if key in missed else ():
            print(f"  {line}")
    body: dict[str, Any] = {key: finding.value for key, finding in found.items()}
    body |= {"targets": TARGETS, "missed": missed, "offenders": {key: found[key].offenders for key in missed}}
    if options.json:
        options.json.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
