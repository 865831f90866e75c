"""Which Megatron runs: that of the script, said and checked before anything is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_het.megatron_patches.found import Megatron, PatchError, find
from megatron_het.megatron_patches.registry import UPSTREAM_VERSION
from megatron_het.megatron_patches.releases import RELEASES, check

ROOT = Path(__file__).resolve().parents[3]


def _checkout(folder: Path, version: str) -> Path:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    (core / "package_info.py").write_text("".join(f"{name} = {number}\n" for name, number in numbers))
    (core / "__init__.py").write_text("")
    script = folder / "pretrain_gpt.py"
    script.write_text("print('trained')\n")
    return script


def _run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_het.run", *words]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_scripts_own_megatron_is_taken_and_an_unknown_release_refused(tmp_path: Path) -> None:
    """Started elsewhere: the installed megatron-core must not take the checkout's place."""
    script = _checkout(tmp_path / "checkout", "0.99.1")
    done = _run(str(script), cwd=tmp_path)
    assert done.returncode == 2 and "trained" not in done.stdout
    assert f"megatron-core 0.99.1 in {tmp_path / 'checkout'} (the script's own)" in done.stderr
    assert "megatron_het: megatron-core 0.99.1" in done.stderr and "Traceback" not in done.stderr


def test_the_installed_release_is_known() -> None:
    megatron = find()
    assert megatron.version in {release.version for release in RELEASES}
    assert RELEASES[0].version == UPSTREAM_VERSION
    check(megatron)
    for version in ("0.19.0", "0.20.0"):
        check(Megatron(Path("/x"), version))
    for version in ("0.21.0", "0.18.3", "1.19.2"):
        with pytest.raises(PatchError, match=f"{version} in /x"):
            check(Megatron(Path("/x"), version))


@pytest.mark.parametrize("words", [["--yaml-cfg", "c.yaml"], ["--yaml-cfg=c.yaml"], ["--yaml", "c.yaml"]])
def test_yaml_configurations_are_refused_before_megatron_reads_them(words: list[str], tmp_path: Path) -> None:
    script = _checkout(tmp_path / "checkout", UPSTREAM_VERSION)
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1"
    given = [*flags.split(), "--global-batch-size", "2", "--max-position-embeddings", "16", "--het-schedule", "1f1b"]
    done = _run(str(script), *given, *words, cwd=tmp_path)
    assert done.returncode == 2 and "--yaml-cfg = 'c.yaml': cannot be used with a plan" in done.stderr
    assert "Traceback" not in done.stderr
