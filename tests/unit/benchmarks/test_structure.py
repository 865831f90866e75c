"""Every figure of ``benchmarks.structure`` is found in small trees made for it, and is absent without its cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.structure import TARGETS, main, measure
from benchmarks.structure_features import FEATURES, Feature, modules_per_feature
from benchmarks.structure_sources import read_tree

ROOT = Path(__file__).resolve().parents[3]


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def figure(root: Path, key: str) -> int:
    value = measure(root)[key].value
    assert isinstance(value, int)
    return value


PLAIN = {"megatron_het/__init__.py": "", "megatron_het/a.py": "import json\n", "megatron_het/b.py": "X = 1\n"}


def test_a_clean_tree_reaches_every_target(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    root = tree(tmp_path / "tree", PLAIN | {"megatron_het/a.py": "from megatron_het import b\n"})
    assert main(["--root", str(root), "--json", str(out)]) == 0
    body = json.loads(out.read_text())
    assert body["missed"] == [] and set(body["targets"]) == set(TARGETS)
    assert body["import_circles"] == 0


@pytest.mark.parametrize(
    "a, b",
    [
        ("from megatron_het import b\n", "import megatron_het.a\n"),
        ("def f():\n    from . import b\n", "from .a import f\n"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron_het.b import X\n",
            "class C:\n    def f(self):\n        import megatron_het.a\n",
        ),
        ("from megatron_het.c.d import X\n", "from megatron_het import a\n"),
    ],
)
def test_circles_through_late_and_type_checking_imports(tmp_path: Path, a: str, b: str) -> None:
    files = {"megatron_het/a.py": a, "megatron_het/b.py": b}
    files |= {"megatron_het/c/__init__.py": "", "megatron_het/c/d.py": "from ..b import X\n"}
    root = tree(tmp_path, PLAIN | files)
    found = measure(root)["import_circles"]
    assert found.value == 1
    assert any("megatron_het/a.py:" in line for line in found.offenders)
    (root / "megatron_het/b.py").write_text("X = 1\n")
    assert figure(root, "import_circles") == 0


def test_a_package_that_reexports_is_no_circle_but_asking_it_is(tmp_path: Path) -> None:
    files = {"megatron_het/p/__init__.py": "from .x import X\n", "megatron_het/p/x.py": "from .y import X\n"}
    root = tree(tmp_path, PLAIN | files | {"megatron_het/p/y.py": "X = 1\n"})
    assert figure(root, "import_circles") == 0
    (root / "megatron_het/p/y.py").write_text("def f():\n    from megatron_het.p import X\n")
    assert figure(root, "import_circles") == 1


def test_two_circles_are_two(tmp_path: Path) -> None:
    pairs = {f"tools/{x}.py": f"from tools import {y}\n" for x, y in ("ab", "ba", "cd", "dc", "ea")}
    assert figure(tree(tmp_path, PLAIN | pairs), "import_circles") == 2


def test_long_functions_and_files(tmp_path: Path) -> None:
    eighty = "def f():\n" + "    x = 1\n" * 79
    nested = "class C:\n    @staticmethod\n    async def g():\n" + "        x = 1\n" * 80
    root = tree(tmp_path, PLAIN | {"benchmarks/f.py": eighty, "tests/t.py": "x = 1\n" * 600})
    assert (figure(root, "long_functions"), figure(root, "long_files")) == (0, 0)
    tree(root, {"benchmarks/f.py": eighty + nested, "tests/t.py": "x = 1\n" * 601})
    found = measure(root)
    assert found["long_functions"].offenders == ["benchmarks/f.py:83 g has 81 lines"]
    assert found["long_files"].value == 1


def test_packages_that_import_each_other(tmp_path: Path) -> None:
    files = {"megatron_het/p/x.py": "def f():\n    from megatron_het.q import y\n", "megatron_het/q/y.py": "X = 1\n"}
    root = tree(tmp_path, PLAIN | files | {"megatron_het/q/z.py": "X = 1\n"})
    assert figure(root, "package_circles") == 0
    tree(root, {"megatron_het/q/z.py": "from megatron_het.p import x\n"})
    found = measure(root)
    assert found["package_circles"].offenders == ["circle of 2 packages: megatron_het/p, megatron_het/q"]
    assert found["import_circles"].value == 0


def test_short_modules_of_one_importer(tmp_path: Path) -> None:
    """Tests do not count as importers; what nobody imports is a command."""
    files = {"tools/a.py": "from tools import b, c\n", "tools/d.py": "from tools import b\n", "tools/b.py": "X = 1\n"}
    root = tree(tmp_path, PLAIN | files | {"tests/t.py": "import tools.c\n", "tools/c.py": "X = 1\n" * 79})
    assert measure(root)["one_importer_modules"].offenders == ["tools/c.py has 79 lines; tools.a imports it"]
    tree(root, {"tools/c.py": "X = 1\n" * 80})
    assert figure(root, "one_importer_modules") == 0


def test_docstrings_begin_with_what_there_is(tmp_path: Path) -> None:
    text = '"""The samples."""\n\n\ndef f():\n    """Of all."""\n\n\nclass C:\n    """Asks."""\n\n    x = "What"\n'
    found = measure(tree(tmp_path, PLAIN | {"tools/a.py": text, "tests/t.py": '"""As before."""\n'}))
    assert found["docstring_openings"].offenders == ["tools/a.py:4 Of all."]


def test_type_checking_blocks(tmp_path: Path) -> None:
    text = "import typing\nif typing.TYPE_CHECKING:\n    import json\nif not typing.TYPE_CHECKING:\n    pass\n"
    found = measure(tree(tmp_path, PLAIN | {"megatron_het/a.py": text}))["type_checking_blocks"]
    assert found.offenders == ["megatron_het/a.py:2"]


KINDS = [
    ("kind < 4", 1),
    ("2 >= op.kind", 1),
    ("Kind.SEND <= kind <= Kind.RECV", 1),
    ("kind == 3", 1),
    ("kind in (0, 1)", 1),
    ("kind in range(3)", 1),
    ("op[0] != 0", 1),
    ("1 if kind else 2", 1),
    ("not kind", 1),
    ("kind and x", 1),
    ("kind is Kind.SEND", 0),
    ("kind in TRANSFERS", 0),
    ("op[1] < 3", 0),
    ("kind == Kind.SEND", 0),
    ("kind == other", 0),
    ("device.kind == 'old'", 0),
]


@pytest.mark.parametrize("text, count", KINDS)
def test_kinds_as_numbers(tmp_path: Path, text: str, count: int) -> None:
    code = f"from megatron_het.schedule.ir import Kind\nx = {text}\n"
    assert figure(tree(tmp_path, PLAIN | {"benchmarks/k.py": code}), "kinds_compared_as_numbers") == count


def test_a_feature_is_counted_where_it_is_imported_or_named(tmp_path: Path) -> None:
    feature = {"ropes": Feature(("megatron_het.ropes", "megatron_het.features.ropes"), "(het_)?rope_units|rope_pull")}
    files = {
        "megatron_het/ropes/__init__.py": '"""rope_units"""\n',
        "megatron_het/ropes/pull.py": "ROPE_PULL = 1\n",
        "megatron_het/features/ropes.py": "",
        "megatron_het/imports.py": "def f():\n    from .ropes.pull import ROPE_PULL as p\n",
        "megatron_het/flag.py": 'TEXT = "give --het-rope-units, or leave it out"\n',
        "megatron_het/kind.py": "x = Kind.ROPE_PULL\n",
        "megatron_het/field.py": "x = body['rope_units']\n",
        "tools/argument.py": "f(rope_units=1)\n",
        "tools/class.py": "class RopeUnits: ...\n",
        "benchmarks/case.py": "f(rope_units=1)\n",
        "tests/test.py": "f(rope_units=1)\n",
        "megatron_het/free.py": '"""rope_units"""\ndef f(rope_units_of):\n    """rope_units"""\n    """rope_pull"""\n',
    }
    found = modules_per_feature(read_tree(tree(tmp_path, PLAIN | files)), feature)
    assert found.value == {"ropes": 7}, "its home, and six modules that know it"


def test_a_parameter_that_is_a_common_noun_is_counted_in_strings_alone(tmp_path: Path) -> None:
    feature = {"ropes": Feature(("megatron_het.ropes",), "rope_units", "rope")}
    files = {
        "megatron_het/ropes.py": "",
        "megatron_het/parameter.py": "x = {'rope': True}\n",
        "megatron_het/own.py": "f(rope_units=1)\n",
        "megatron_het/other.py": "def f(rope: float, **given: float): ...\nrope = f(rope=1)\n",
    }
    found = modules_per_feature(read_tree(tree(tmp_path, PLAIN | files)), feature)
    assert found.value == {"ropes": 3}, "its home, and the two modules that write a parameter or an own name"


def test_more_than_eight_places_miss_the_target(tmp_path: Path) -> None:
    files = {f"megatron_het/m{i}.py": "x = 'offload_activations'\n" for i in range(9)}
    root = tree(tmp_path, PLAIN | files)
    assert main(["--root", str(root)]) == 1
    (root / "megatron_het/m8.py").unlink()
    assert main(["--root", str(root)]) == 0


def test_bad_input_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path)]) == 2
    tree(tmp_path, {"tools/x.py": "x =\n"})
    assert main(["--root", str(tmp_path)]) == 2
    assert "tools/x.py:1" in capsys.readouterr().err


def test_every_feature_of_the_table_has_a_home_in_this_tree() -> None:
    names = {m.name for m in read_tree(ROOT, ("megatron_het",))}
    lost = [f for f, feature in FEATURES.items() if not any(n.startswith(feature.home) for n in names)]
    assert not lost, "benchmarks/structure_features.py must follow when a feature moves"


def test_this_tree_reaches_the_targets() -> None:
    found = measure(ROOT)
    for figure in TARGETS.keys() - {"modules_per_feature", "type_checking_blocks"}:
        assert not found[figure].missed(TARGETS[figure]), "\n".join([figure, *found[figure].offenders])
