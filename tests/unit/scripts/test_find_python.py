"""The search for a Python, among names that exist and interpreters that do not run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "find_python.sh"
BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")


def _interpreter(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)
    return path


def _works(path: Path) -> Path:
    return _interpreter(path, f'exec {sys.executable} "$@"')


def _refuses(path: Path) -> Path:
    """As a pyenv shim does whose version is not selected."""
    return _interpreter(path, 'echo "pyenv: command not found" >&2; exit 127')


def _too_old(path: Path) -> Path:
    """Fails the check, and says its version when asked for it."""
    return _interpreter(path, '[[ "$2" == *print* ]] && echo "Python 3.10" && exit 0; exit 1')


@pytest.fixture
def machine(tmp_path):
    """An empty PATH and home; calling it runs the script there."""

    def find(**environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "bin").mkdir(exist_ok=True)
        values = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home")} | environment
        return subprocess.run([BASH, str(SCRIPT)], env=values, capture_output=True, text=True, timeout=60, check=False)

    find.root = tmp_path
    return find


def _same(found: subprocess.CompletedProcess[str]) -> bool:
    return os.path.samefile(found.stdout.strip(), sys.executable)


def test_takes_the_first_name_that_runs(machine):
    _refuses(machine.root / "bin/python3.12")
    _works(machine.root / "bin/python3")
    found = machine()
    assert found.returncode == 0 and _same(found)


def test_a_named_python_comes_first(machine):
    _refuses(machine.root / "bin/python3")
    named = _works(machine.root / "elsewhere/python")
    found = machine(PYTHON=str(named))
    assert found.returncode == 0 and _same(found)


def test_a_named_python_that_does_not_run_is_not_replaced(machine):
    _works(machine.root / "bin/python3")
    found = machine(PYTHON=str(_refuses(machine.root / "elsewhere/python")))
    assert found.returncode == 1 and "elsewhere/python (does not run)" in found.stderr


@pytest.mark.parametrize("by_root", [False, True], ids=["home", "PYENV_ROOT"])
def test_finds_what_pyenv_has_installed_behind_a_shim_that_refuses(machine, by_root):
    _refuses(machine.root / "bin/python3.12")
    root = machine.root / ("pyenv" if by_root else "home/.pyenv")
    _too_old(root / "versions/3.10.1/bin/python")
    _works(root / "versions/3.12.1/bin/python")
    found = machine(**({"PYENV_ROOT": str(root)} if by_root else {}))
    assert found.returncode == 0 and _same(found)


def test_says_what_it_looked_at_when_there_is_none(machine):
    shim = _refuses(machine.root / "bin/python3.12")
    old = _too_old(machine.root / "bin/python3")
    found = machine()
    assert (found.returncode, found.stdout) == (1, "")
    assert "No Python >= 3.12" in found.stderr
    assert f"{shim} (does not run)" in found.stderr
    assert f"{old} (Python 3.10)" in found.stderr
    assert "make PYTHON=" in found.stderr


def test_an_empty_machine_gets_the_message_too(machine):
    found = machine()
    assert found.returncode == 1
    assert "No Python >= 3.12" in found.stderr and "unbound" not in found.stderr
