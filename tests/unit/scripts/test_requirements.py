"""Everything that the environment of ``make venv`` is asked for has one pinned version; guides name the extras."""

import ast
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from scripts import requirements

ROOT = Path(__file__).resolve().parents[3]


def _name(requirement: str) -> str:
    return re.split(r"[<>=!\[ ]", requirement)[0].lower().replace("_", "-")


def _lists() -> dict[str, list[str]]:
    """The lists of requirements in ``setup.py``, by name."""
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List)
    }


@pytest.mark.parametrize(
    ("guide", "extra", "requirement"),
    [
        ("patches/README.md", "checkout", "pybind11"),  # a Megatron-LM checkout compiles its dataset helpers
        ("examples/llama/README.md", "huggingface", "transformers"),  # its tokenizer
        ("docs/plan.md", "optimizers", "emerging-optimizers==0.3.0"),  # Lion and Muon
    ],
)
def test_what_a_guide_needs_besides_is_an_extra(guide: str, extra: str, requirement: str) -> None:
    text = (ROOT / guide).read_text()
    assert f"megatron-het[{extra}]" in text and requirement in text
    assert _lists()[extra.upper()] == [requirement]


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 and pair[1] for pair in pinned)
    names = [_name(name) for name, _ in pinned]
    assert len(set(names)) == len(names)
    lists = _lists()
    asked = {key: lists[key] for key in ("RUNTIME", "PLANNER", "TEST", "LINT", "OPTIMIZERS")}
    missing = {key: [r for r in rows if _name(r) not in names] for key, rows in asked.items()}
    assert not any(missing.values()), missing


def test_every_pinned_version_has_the_digests_of_its_files() -> None:
    pinned = requirements.pinned(requirements.CONSTRAINTS)
    assert requirements.pinned(requirements.HASHES) == pinned, "make requirements"
    listed = re.findall(r"^\| ([a-z][^ ]*) \| (\S+) \|", requirements.LIST.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(listed[1:]) == pinned, "make requirements"
    blocks = re.split(r"\n(?=[^ #])", requirements.HASHES.read_text(encoding="utf-8").split("\n\n")[-1].rstrip())
    assert all("==" not in block or re.search(r"--hash=sha256:[0-9a-f]{64}$", block) for block in blocks)


def test_the_list_of_packages_is_that_of_this_environment() -> None:
    pinned = requirements.pinned(requirements.CONSTRAINTS)
    # The first one on the path is imported: setuptools adds copies of its own at the end.
    found = reversed([*metadata.distributions()])
    installed = {requirements.normalised(one.name): one.version for one in found}
    if other := [name for name in pinned if installed.get(name) != pinned[name]]:
        pytest.skip(f"this environment has not the pinned versions of {', '.join(other)}")
    subprocess.run([sys.executable, ROOT / "scripts/requirements.py", "list", "--check"], check=True)


@pytest.mark.full
def test_no_pinned_package_has_a_known_vulnerability() -> None:
    program = shutil.which("pip-audit")
    if program is None:
        pytest.skip("pip-audit is not installed")
    command = [program, "--disable-pip", "--require-hashes", "-r", requirements.HASHES, "-f", "json"]
    command += ["--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = json.loads(done.stdout)["dependencies"] if done.stdout else []
    audited = [row for row in found if "skip_reason" not in row]
    if not audited:
        pytest.skip(f"the service of vulnerabilities cannot be reached from here: {done.stderr[-200:]}")
    assert not [row for row in audited if row["vulns"]]
