"""Every figure of ``benchmarks.structure`` is found in small trees made for it, and is absent without its cause."""

import json
from pathlib import Path

import pytest

from benchmarks.structure import PRESENT, TARGETS, grown, loaded_modules, main, measure, named_modules, room_of
from benchmarks.structure_features import FEATURES, Feature, files_for_a_feature, imports_of, read_tree
from testing.runner import words

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
    assert body["offenders"] == {
        "one_importer_modules": ["megatron_het/b.py has 1 lines; megatron_het.a imports it"]
    }, "also where the target is reached"


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
    ("Kind.SEND <= kind <= Kind.RECV", 1),
    ("kind == 3", 1),
    ("kind in (0, 1)", 1),
    ("op[0] != 0", 1),
    ("not kind", 1),
    ("kind in TRANSFERS", 0),
]


@pytest.mark.parametrize("text, count", KINDS)
def test_kinds_as_numbers(tmp_path: Path, text: str, count: int) -> None:
    code = f"from megatron_het.schedule.ir import Kind\nx = {text}\n"
    assert figure(tree(tmp_path, PLAIN | {"benchmarks/k.py": code}), "kinds_compared_as_numbers") == count


def test_a_feature_is_counted_where_it_is_imported_or_named(tmp_path: Path) -> None:
    feature = {
        "ropes": Feature(
            room="megatron_het.features.ropes",
            words="(het_)?rope_units|rope_pull",
            parameters="rope",
            executor="window",
            elsewhere=("megatron_het.ropes",),
        )
    }
    room = {
        "megatron_het/features/ropes/__init__.py": '"""rope_units"""\n',
        "megatron_het/features/ropes/spec.py": "",
        "megatron_het/features/ropes/pull.py": "ROPE_PULL = 1\n",
    }
    outside = {
        "megatron_het/ropes.py": "",
        "megatron_het/imports.py": "def f():\n    from .features.ropes.pull import ROPE_PULL as p\n",
        "megatron_het/flag.py": 'TEXT = "give --het-rope-units, or leave it out"\n',
        "megatron_het/kind.py": "x = Kind.ROPE_PULL\n",
        "megatron_het/field.py": "x = body['rope_units']\n",
        "megatron_het/parameter.py": "x = {'rope': True}\n",
        "megatron_het/column.py": "x = Stream.COLLECTIVE\n",
        "tools/argument.py": "f(rope_units=1)\n",
        "tools/class.py": "class RopeUnits: ...\n",
    }
    free = {
        "benchmarks/case.py": "f(rope_units=1)\n",
        "tests/test.py": "f(rope_units=1)\n",
        "megatron_het/free.py": '"""rope_units"""\ndef f(rope_units_of):\n    """rope_units"""\n    """rope_pull"""\n',
        "megatron_het/common.py": "x = Stream.COMPUTE, Work.WEIGHTS\ndef f(rope: float): ...\nrope = f(rope=1)\n",
    }
    root = tree(tmp_path, PLAIN | room | outside | free)
    everything, elsewhere = files_for_a_feature(read_tree(root), feature)
    assert elsewhere.value == {"ropes": len(outside)}, elsewhere.offenders
    assert everything.value == {"ropes": 2 + len(outside)}


def test_more_than_four_files_outside_miss_the_target(tmp_path: Path) -> None:
    files = {f"megatron_het/m{i}.py": "x = 'offload_activations'\n" for i in range(5)}
    root = tree(tmp_path, PLAIN | files)
    assert main(["--root", str(root)]) == 1
    (root / "megatron_het/m4.py").unlink()
    assert main(["--root", str(root)]) == 0


def test_values_that_only_their_order_tells_apart(tmp_path: Path) -> None:
    seven, row = ", ".join("1234567"), "class K(IntEnum):\n    A = (1, 2, 3, 4, 5, 6, 7)\n"
    text = f"def table(*rows): ...\ntable({seven})\nrecord({seven[:-3]}, x=7)\nx = (1, 2, 3, 4, 5, 6, 7)\n"
    root = tree(tmp_path, PLAIN | {"tools/a.py": text, "tests/t.py": f"record({seven})\n"})
    assert figure(root, "positional_records") == 0
    tree(root, {"tools/b.py": f"x.record({seven})\n{row}"})
    assert sorted(measure(root)["positional_records"].offenders) == [
        "tools/b.py:1 x.record with 7 positional values",
        "tools/b.py:3 a row of K with 7 positional values",
    ]


def test_sizes(tmp_path: Path) -> None:
    files = {"tools/planner/cli/x.py": "# why\nx = 1\n", "tests/t.py": "x = 1\n" * 5, "examples/e.py": "x = 1\n"}
    found = {key: finding.value for key, finding in measure(tree(tmp_path, PLAIN | files)).items()}
    assert (found["product_files"], found["product_lines"], found["all_lines"]) == (4, 4, 10)
    assert found["package_lines"] == {"examples": 1, "megatron_het": 2, "tests": 5, "tools/planner": 2}
    assert found["comment_share"] == 25.0


def test_a_module_named_in_a_string_closes_a_circle_of_packages(tmp_path: Path) -> None:
    files = {"megatron_het/p/x.py": "import megatron_het.q.y\n", "megatron_het/q/y.py": "late = 'megatron_het.p.x'\n"}
    assert figure(tree(tmp_path, PLAIN | files), "package_circles") == 2


def test_bad_input_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path)]) == 2
    tree(tmp_path, {"tools/x.py": "x =\n"})
    assert main(["--root", str(tmp_path)]) == 2
    assert "tools/x.py:1" in capsys.readouterr().err


def test_every_room_of_a_feature_is_in_the_table() -> None:
    folders = {p.parent.name for p in (ROOT / "megatron_het/features").glob("*/spec.py")}
    rooms = {feature.room.rpartition(".")[2] for feature in FEATURES.values()}
    assert rooms == folders, "benchmarks/structure_features.py must follow when a feature moves"
    names = {m.name for m in read_tree(ROOT, ("megatron_het",))}
    lost = [name for feature in FEATURES.values() for name in feature.elsewhere if name not in names]
    assert not lost


def test_this_tree_reaches_the_targets_or_is_no_further_from_them() -> None:
    found = measure(ROOT)
    wrong = grown(found)
    assert not wrong, [(key, found[key].value, (TARGETS | PRESENT)[key], found[key].offenders) for key in wrong]


@pytest.mark.full
def test_starts_load_no_more_modules() -> None:
    assert not grown({"loaded_modules": loaded_modules(ROOT)})


FEATURES_ON_RANKS, SPECS = "features (on a rank)", "features (specs)"
ALLOWED: dict[str, set[str]] = {
    "safe_io": set(),
    "schedule": {"safe_io"},
    "plan": {"safe_io", "schedule"},
    "families": {"plan", "hybrid_layers.py", "latent_attention.py"},
    "attention": {"families", "plan", "schedule"},
    "store": {"safe_io"},
    "device": {"safe_io"},
    SPECS: {"families", "plan", "schedule"},
    "megatron_patches": {SPECS, "device", "families", "safe_io"},
    "lowering": {SPECS, "plan", "schedule"},
    "distributed": {"lowering", "megatron_patches", "plan"},
    "checkpoint": {SPECS, "distributed", "megatron_patches", "plan", "safe_io"},
    "report": {"device", "lowering", "plan", "safe_io", "schedule"},
    "schedule/view": {SPECS, "lowering", "plan", "safe_io", "schedule"},
    "runtime": {SPECS, *words("checkpoint device distributed families lowering megatron_patches plan report schedule")},
    FEATURES_ON_RANKS: {
        SPECS,
        *words("attention device distributed families lowering plan report runtime safe_io schedule store"),
    },
    "arguments": {SPECS, *words("checkpoint device families lowering megatron_patches plan runtime safe_io schedule")},
}
"""Which packages of ``megatron_het`` import which, from the bottom up.

Only the optional packages, the planner, and what is started (``launch``, the front door) may import everything; and
nothing here imports them.
"""
OPTIONAL = {"elastic", "doctor", "dry_run", "auto_batch", "launch"}


def test_packages_import_only_what_the_table_allows() -> None:
    """The modules of tests and measurements are in nobody's row, so that the product imports none of them."""
    modules = read_tree(ROOT, ("megatron_het", "tools", "testing"))
    by_name = {m.name: m for m in modules}
    rooms = {m.name: room_of(m).removeprefix("megatron_het/") for m in modules}
    rooms |= {name: file for name, room in rooms.items() if (file := room.removesuffix(".py")) in ALLOWED}
    unlisted = {room for room in rooms.values() if room not in ALLOWED and "/" not in room and "." not in room}
    assert unlisted - OPTIONAL == {"megatron_het", "nccl_order"}, "a package without a row in ALLOWED"
    found = set()
    for m in modules:
        for other in imports_of(m, by_name).keys() | named_modules(m, by_name):
            tested = other.split(".")[0] == "testing" and m.name.split(".")[0] != "testing"
            assert not tested, f"{m.path} imports {other}, which only tests and benchmarks may"
            pair = rooms[m.name], rooms[other]
            if pair[0] in ALLOWED and pair[1] not in ALLOWED[pair[0]] | {pair[0]}:
                found.add(pair)
    assert not found, f"against the table: {sorted(found)}"


def test_the_table_of_imports_has_no_circle() -> None:
    """Every package stands above all that it imports."""
    order = list(ALLOWED)
    for room, others in ALLOWED.items():
        assert all(order.index(other) < order.index(room) for other in others if not other.endswith(".py")), room
