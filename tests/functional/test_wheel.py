"""The wheel alone, installed into an empty environment: it plans and trains from any folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_het.megatron_patches.releases import find
from megatron_het.plan import ModelShape
from testing.cases import machine_flags, plain_flags
from testing.runner import REPOSITORY, words
from tests.functional.launch import launch

_SOURCES = ("megatron_het", "tools", "patches", "docs", "setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE")

_CLUSTER = """\
name: two
nodes:
  - {gpu: CPU, count: 2, gpus_per_node: 1, zone: here, network_bytes_per_s: 1.0e9}
"""

_MODEL = """\
num_layers: 2
hidden_size: 32
ffn_hidden_size: 64
num_attention_heads: 4
vocab_size: 128
seq_length: 16
global_batch_size: 4
micro_batch_sizes: [1]
precision: fp32
tied_embeddings: false
"""

_SHAPE = ModelShape(2, 32, 4, 4, 16, ffn_hidden_size=64)
_FLAGS = (
    *plain_flags(_SHAPE, vocabulary=127, microbatches=4, iterations=2),
    *words("--lr 1e-3 --split 90,10,0 --distributed-timeout-minutes 2", machine_flags()),
)


@dataclass(frozen=True)
class Installed:
    """The wheel, and the environment that has nothing else of this project."""

    wheel: Path
    folder: Path
    environment: dict[str, str]

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *command: str, cwd: Path) -> str:
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def _clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from a copy (a build leaves folders in its source), installed without the network."""
    root = tmp_path_factory.mktemp("wheel")
    for name in _SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, root / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (root / "source").mkdir(exist_ok=True)
            shutil.copy2(source, root / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    offline = ["--no-index", "--no-deps", "--quiet"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(root), str(root / "source")]
    subprocess.run(build, check=True, timeout=200, env=_clean())
    shutil.rmtree(root / "source")
    (wheel,) = root.glob("*.whl")
    folder = root / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    python = str(folder / "bin" / "python")
    # Before the shared packages are visible, so that pip sees no other installation of this project.
    subprocess.run([*pip, "--python", python, "install", *offline, str(wheel)], check=True, timeout=200, env=_clean())
    (site,) = (folder / "lib").glob("python*/site-packages")
    # A path in a .pth file is searched, but the .pth files in it are not read: an editable installation of this
    # project in the shared environment stays invisible.
    (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (site / "megatron").symlink_to(find().folder / "megatron")  # a checkout is not among the packages
    return Installed(wheel, folder, _clean())


@pytest.fixture(scope="module")
def plan(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "cluster.yaml").write_text(_CLUSTER)
    (folder / "model.yaml").write_text(_MODEL)
    command = [str(installed.folder / "bin" / "het-plan"), "plan", "--cluster", "cluster.yaml", "--model", "model.yaml"]
    said = installed.run(*command, "--schedules", "1f1b", cwd=folder)
    assert "het-plan profile" in said, "the hint names the command that was started"
    return folder / "plan.json"


def test_the_wheel_claims_two_names_and_carries_everything(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"megatron_het", "het_planner"}
    expected = {f"het_planner/{p.relative_to(REPOSITORY / 'tools/planner')}" for p in _files("tools/planner")}
    expected |= {f"megatron_het/patches/{p.name}" for p in _files("patches")}
    expected |= {str(p.relative_to(REPOSITORY)) for p in _files("megatron_het")}
    assert expected <= set(names), sorted(expected - set(names))
    assert {"LICENSE", "NOTICE"} <= {Path(n).name for n in names if ".dist-info/licenses/" in n}


def _files(folder: str) -> list[Path]:
    return [p for p in (REPOSITORY / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def test_nothing_of_the_checkout_is_visible(installed: Installed, tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, megatron_het, het_planner\n"
        "print(megatron_het.__file__, het_planner.__file__, u.find_spec('tools'), u.find_spec('benchmarks'))"
    )
    first, second, *others = installed.run(installed.python, "-c", code, cwd=tmp_path).split()
    assert first.startswith(str(installed.folder)) and second.startswith(str(installed.folder))
    assert others == ["None", "None"]


def test_the_git_patches_are_found(installed: Installed, tmp_path: Path) -> None:
    said = installed.run(installed.python, "-m", "megatron_het.megatron_patches", "--patches", cwd=tmp_path)
    found = Path(said.strip())
    assert found.is_relative_to(installed.folder)
    assert {p.name for p in found.glob("*.patch")} == {p.name for p in (REPOSITORY / "patches").glob("*.patch")}


def test_two_ranks_train_the_plan_from_another_folder(installed: Installed, plan: Path, tmp_path: Path) -> None:
    body = json.loads(plan.read_text())
    ranks = [rank for stage in body["stages"] for replica in stage["replicas"] for rank in replica["ranks"]]
    assert sorted(ranks) == [0, 1]
    command = ["-m", "megatron_het.pretrain_gpt", *_FLAGS, "--het-plan", str(plan), "--het-report", "report"]
    if body["training"]["distributed_optimizer"]:
        command += ["--dist-ckpt-optim-fully-reshardable"]
    variables = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    launch(2, command, tmp_path / "log.txt", environment=variables, python=installed.python, folder=plan.parent)
    report = json.loads((plan.parent / "report" / "rank-1.json").read_text())
    assert len(report["losses"]) == 2
