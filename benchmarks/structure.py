"""Measures the separation of the code, its size, and the number of files that a reader opens for each feature.

``python -m benchmarks.structure --json OUT`` reads the sources of a tree.  Every offender is printed as
``file:line``.  The exit code is 1 where a target is missed.  ``--loaded`` also starts two processes and counts what
they load.

====================================  ======================================================================  =======
key                                   what is counted                                                          target
====================================  ======================================================================  =======
``import_circles``                    groups of modules that import each other, wherever the import stands          0
``package_circles``                   packages of the product that import each other in circles                     0
``long_functions``                    functions and methods of more than 80 lines, decorators left out              0
``long_files``                        files of more than 600 lines                                                  0
``one_importer_modules``              modules of under 80 lines that one module of the product imports          <= 25
``docstring_openings``                docstrings that begin with a word that says nothing (``Of``, ``What``)        0
``type_checking_blocks``              ``if TYPE_CHECKING:``                                                     <= 20
``files_for_a_feature``               files that a reader opens for a feature, see below                   <= 12 each
``files_outside_of_a_feature``        those of them outside of its room                                     <= 4 each
``positional_records``                calls and rows of an enum with more than six positional values                0
``kinds_compared_as_numbers``         kinds of operations used as integers                                          0
``product_files``                     files of ``megatron_het`` and ``tools/planner``                          <= 260
``product_lines``                     their lines                                                           <= 60,000
``all_lines``                         lines of all Python files                                            <= 102,000
``package_lines``                     lines of each package                                               ``BUDGET``
``comment_share``                     comment lines in 100 lines of the product                                none
``loaded_modules``                    modules of the product that a start loads                                     -
  ``1F1B``                            a start with a plan of 1F1B                                              <= 100
  ``het-plan plan``                   the planner's command                                                    <= 120
====================================  ======================================================================  =======

A figure of :data:`PRESENT` has missed its target.  It may not grow beyond the value there.

*Circles.*  An import inside a function or under ``TYPE_CHECKING`` counts like one at the top, and so does the name of
a module in a string.  That a submodule makes Python run its package's ``__init__`` first does not count; an import of
a name *from* the package does.

*Features.*  A feature has a room, a package.  The modules of the room count.  So does every other module of the
product (``megatron_het``, ``tools``, ``examples``; what tests and measures a feature is left out) that imports one of
them, or that names one of the feature's own identifiers in code or in a string that is not a docstring.  The own
identifiers are its plan parameters, its flags, its kinds of operations and the entries of the table of kinds that only
these kinds have (``benchmarks/structure_features.py``).  A word that the feature shares with others (``slice`` as a
coordinate of every operation, ``vocab_size`` of every model) is not among them.  Plan parameters that are common
nouns (``window``, ``vocabulary``) count in strings only, where parameters are written: as names of variables they mean
the window of a model's attention or the number of words.

*Kinds.*  Counted are: an order (``kind < 4``), a comparison with an integer or with a range, and the truth of a
kind (``if kind``).  A kind is a name ``kind``, an attribute ``.kind``, ``op[0]`` or a member of ``Kind``.  Tests are
left out: they show that such comparisons fail.

*Positional values.*  A call of a function of the product that takes any number of values (``*rows``) is not counted.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from benchmarks.structure_features import (
    MAX_FILES,
    MAX_OUTSIDE,
    PRODUCT,
    Finding,
    Module,
    Target,
    dotted,
    files_for_a_feature,
    imports_of,
    read_tree,
)

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 600
SHORT_MODULE_LINES = 80
OPENING = re.compile(r"(Of|What|Those|Likewise|The same|As)\b")
"""Words with which no docstring may begin: its first line begins with a verb or a noun."""
MAX_POSITIONAL = 6
BUDGET = {
    "megatron_het": 920,  # entries, families of models, report
    "megatron_het/arguments": 1_000,
    "megatron_het/launch": 100,
    "megatron_het/plan": 1_500,
    "megatron_het/schedule": 6_500,
    "megatron_het/lowering": 800,
    "megatron_het/runtime": 1_900,
    "megatron_het/features": 10_100,
    "megatron_het/attention": 2_300,
    "megatron_het/distributed": 1_500,
    "megatron_het/store": 800,
    "megatron_het/checkpoint": 800,
    "megatron_het/device": 850,
    "megatron_het/megatron_patches": 900,
    "megatron_het/safe_io": 600,
    "megatron_het/elastic": 3_500,
    "megatron_het/doctor": 1_700,
    "megatron_het/dry_run": 2_300,
    "megatron_het/auto_batch": 1_200,
    "tools/planner": 16_900,
    "testing": 6_700,
    "benchmarks": 6_500,
    "tests": 28_000,
    "examples": 1_200,
}
TARGETS: dict[str, Target] = {
    "import_circles": 0,
    "package_circles": 0,
    "one_importer_modules": 25,
    "docstring_openings": 0,
    "long_functions": 0,
    "long_files": 0,
    "type_checking_blocks": 20,
    "files_for_a_feature": MAX_FILES,
    "files_outside_of_a_feature": MAX_OUTSIDE,
    "positional_records": 0,
    "kinds_compared_as_numbers": 0,
    "product_files": 260,
    "product_lines": 60_000,
    "all_lines": 102_000,
    "package_lines": BUDGET,
    "loaded_modules": {"1F1B": 100, "het-plan plan": 120},
}
PRESENT: dict[str, Target] = {
    "product_lines": 71_730,
    "all_lines": 134_580,
    "package_lines": BUDGET
    | {
        "benchmarks": 14_345,
        "examples": 2_170,
        "megatron_het": 1_550,
        "megatron_het/arguments": 1_000,
        "megatron_het/attention": 3_560,
        "megatron_het/auto_batch": 1_260,
        "megatron_het/checkpoint": 1_360,
        "megatron_het/device": 1_125,
        "megatron_het/doctor": 2_550,
        "megatron_het/elastic": 5_320,
        "megatron_het/features": 13_280,
        "megatron_het/lowering": 820,
        "megatron_het/megatron_patches": 1_260,
        "megatron_het/plan": 2_000,
        "megatron_het/runtime": 2_500,
        "megatron_het/safe_io": 700,
        "megatron_het/store": 1_135,
        "tests": 40_010,
        "tools/planner": 22_995,
    },
}
"""The values of figures that miss their targets, which may not grow; lines are rounded up."""


def import_circles(modules: Sequence[Module]) -> Finding:
    """Returns groups of modules in which each imports each other one, directly or through others."""
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
    """Returns packages of the product that import themselves through other packages."""
    by_name = {m.name: m for m in modules}
    rooms = {m.name: room_of(m) for m in modules if m.name.split(".")[0] in PRODUCT}
    edges: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, room in rooms.items():
        reached = imports_of(by_name[name], by_name).keys() | named_modules(by_name[name], by_name)
        edges[room] |= {rooms[other] for other in reached if other in rooms} - {room}
    circles = _circles(edges)
    return Finding(
        sum(map(len, circles)), [f"circle of {len(circle)} packages: {', '.join(circle)}" for circle in circles]
    )


def named_modules(module: Module, known: Iterable[str]) -> set[str]:
    """Returns the modules whose full names are strings of a module, to be imported at run time."""
    named = {n.value for n in module.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {name for name in named & set(known) if "." in name} - {module.name}


def room_of(module: Module) -> str:
    """Returns the top-level package of a module within the product; entry points are packages of their own."""
    top = ("tools", "planner") if module.name.startswith("tools.") else ("megatron_het",)
    folders = Path(module.path).parent.parts[len(top) :]
    stem = Path(module.path).stem
    if stem == "__main__" or (top == ("megatron_het",) and not folders and not module.package):
        return module.path  # what is started, or named by --spec
    if folders[:1] == ("features",):
        # Specs, kinds and passes do not import rank code; rank code imports the session, which imports the specs.
        is_spec = len(folders) == 1 or stem in ("spec", "kinds") or stem.endswith("passes") or stem == "__init__"
        return "features (specs)" if is_spec else "features (on a rank)"
    if folders[:2] == ("schedule", "view"):
        return "schedule/view"
    return "/".join((*top, *folders[:1]))


def _circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Returns groups of names that reach each other."""
    graph = nx.DiGraph([(name, other) for name, others in edges.items() for other in others])
    return sorted(sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1)


def long_functions(modules: Sequence[Module]) -> Finding:
    """Returns functions of more than :data:`MAX_FUNCTION_LINES` lines from ``def`` to the last one."""
    offenders = []
    for m in modules:
        for node in m.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    offenders.append(f"{m.at(node)} {node.name} has {lines} lines")
    return Finding(len(offenders), offenders)


def long_files(modules: Sequence[Module]) -> Finding:
    """Returns files of more than :data:`MAX_FILE_LINES` lines."""
    offenders = [f"{m.path}:{m.lines} has {m.lines} lines" for m in modules if m.lines > MAX_FILE_LINES]
    return Finding(len(offenders), offenders)


def one_importer_modules(modules: Sequence[Module]) -> Finding:
    """Returns short modules of the product, without ``__init__``, that a single module of the product imports."""
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
    """Returns docstrings of the product that begin with a word of :data:`OPENING`."""
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
    """Returns the blocks ``if TYPE_CHECKING:`` and ``if typing.TYPE_CHECKING:``."""
    offenders = [
        m.at(node)
        for m in modules
        for node in m.nodes
        if isinstance(node, ast.If) and (dotted(node.test) or "").rpartition(".")[2] == "TYPE_CHECKING"
    ]
    return Finding(len(offenders), offenders)


def kinds_compared_as_numbers(modules: Sequence[Module]) -> Finding:
    """Returns the places where a kind of operation is ordered, compared with an integer or tested for truth."""
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
    """Whether the node is an integer, a display of integers, or a range."""
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


def positional_records(modules: Sequence[Module]) -> Finding:
    """Returns calls and rows of an enum with more than :data:`MAX_POSITIONAL` positional values."""
    product = [m for m in modules if m.name.split(".")[0] in PRODUCT]
    takes_any = {
        node.name
        for m in product
        for node in m.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.vararg
    }
    offenders = []
    for m in product:
        for node in m.nodes:
            if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
                called = dotted(node.func) or "a call"
                if called.rpartition(".")[2] not in takes_any:
                    offenders.append(f"{m.at(node)} {called} with {len(node.args)} positional values")
            elif isinstance(node, ast.ClassDef) and any((dotted(b) or "").endswith("Enum") for b in node.bases):
                offenders += [
                    f"{m.at(row)} a row of {node.name} with {len(row.value.elts)} positional values"
                    for row in node.body
                    if isinstance(row, ast.Assign)
                    and isinstance(row.value, ast.Tuple)
                    and len(row.value.elts) > MAX_POSITIONAL
                ]
    return Finding(len(offenders), offenders)


def sizes(modules: Sequence[Module]) -> dict[str, Finding]:
    """Returns files, lines, lines by package, and the share of comments."""
    product = [m for m in modules if m.name.startswith(("megatron_het", "tools.planner"))]
    lines = sum(m.lines for m in product)
    packages: Counter[str] = Counter()
    for m in modules:
        folders = Path(m.path).parent.parts
        depth = 2 if folders[:1] in (("megatron_het",), ("tools",)) else 1
        packages["/".join(folders[:depth])] += m.lines
    over = [f"{name} has {n} lines of {BUDGET[name]}" for name, n in packages.items() if n > BUDGET.get(name, n)]
    comments = sum(m.comments for m in product)
    return {
        "product_files": Finding(len(product), []),
        "product_lines": Finding(lines, []),
        "all_lines": Finding(sum(m.lines for m in modules), []),
        "package_lines": Finding(dict(sorted(packages.items())), over),
        "comment_share": Finding(round(100 * comments / max(1, lines), 1), []),
    }


_PLAN = """
import contextlib, io, sys
from tools.planner.__main__ import main
folder = sys.argv[1]
with contextlib.redirect_stdout(io.StringIO()):
    main(["plan", "--cluster", "examples/two_kinds/cluster.yaml", "--model", "examples/two_kinds/model.yaml",
          "--schedules", "1f1b", "--no-verify", "--out", folder + "/plan.json"])
"""
_START = """
import importlib, sys
from types import SimpleNamespace
folder = sys.argv[1]
import megatron_het.pretrain_gpt, megatron_het.runtime.training, megatron_het.megatron_patches.patches
from megatron_het.features import features_of
from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan import load_plan
plan = load_plan(folder + "/plan.json")
check_plan_alone(plan)
build(plan)
for feature, _ in features_of(plan):
    if feature.runtime and feature.runs_with(SimpleNamespace()):
        importlib.import_module(feature.runtime)
"""
"""Modules that a rank of a plan loads before its first iteration: the imports of entry, launch and session."""
_COUNT = "print(sum(name.split('.')[0] in ('megatron_het', 'tools') for name in sys.modules))"


def loaded_modules(root: Path) -> Finding:
    """Returns the modules of the product that two starts load: the planner's command, and a rank of its 1F1B plan."""
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, program in (("het-plan plan", _PLAN), ("1F1B", _START)):
            command = [sys.executable, "-c", program + _COUNT, folder]
            ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
            if ended.returncode:
                raise ValueError(f"{name} does not start: {ended.stderr.strip().splitlines()[-1:]}")
            counts[name] = int(ended.stdout.split()[-1])
    return Finding(counts, [])


def measure(root: Path) -> dict[str, Finding]:
    """Returns all figures of the sources under ``root``."""
    modules = read_tree(root)
    everywhere, outside = files_for_a_feature(modules)
    return {
        "import_circles": import_circles(modules),
        "package_circles": package_circles(modules),
        "one_importer_modules": one_importer_modules(modules),
        "docstring_openings": docstring_openings(modules),
        "long_functions": long_functions(modules),
        "long_files": long_files(modules),
        "type_checking_blocks": type_checking_blocks(modules),
        "files_for_a_feature": everywhere,
        "files_outside_of_a_feature": outside,
        "positional_records": positional_records(modules),
        "kinds_compared_as_numbers": kinds_compared_as_numbers(modules),
        **sizes(modules),
    }


def grown(found: Mapping[str, Finding]) -> list[str]:
    """Returns the figures above their targets, or above their values in :data:`PRESENT`."""
    limits = TARGETS | PRESENT
    return [key for key, finding in found.items() if key in limits and finding.missed(limits[key])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print figures and offenders; returns 0 where every target is reached, 1 where not, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="top of the checkout")
    parser.add_argument("--loaded", action="store_true", help="also count the modules that two starts load")
    options = parser.parse_args(arguments)
    try:
        found = measure(options.root)
        if options.loaded:
            found["loaded_modules"] = loaded_modules(options.root)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missed = [key for key, finding in found.items() if key in TARGETS and finding.missed(TARGETS[key])]
    for key, finding in found.items():
        target = f" (target {TARGETS[key]})" if key in TARGETS else ""
        now = f", may not grow beyond {PRESENT[key]}" if key in PRESENT and key in missed else ""
        print(f"{key}: {finding.value}{target}{f'  MISSED{now}' if key in missed else ''}")
        for line in finding.offenders if key in missed else ():
            print(f"  {line}")
    body: dict[str, Any] = {key: finding.value for key, finding in found.items()}
    body |= {"targets": TARGETS, "present": PRESENT, "missed": missed, "grown": grown(found)}
    body["offenders"] = {key: finding.offenders for key, finding in found.items() if finding.offenders}
    if options.json:
        options.json.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
