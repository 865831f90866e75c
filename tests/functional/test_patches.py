"""The git patch for a Megatron-LM checkout: it applies, and the patched script trains."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_het.plan import ModelShape, Plan, Replica, Stage, TrainingShape, save_plan
from testing.cases import plain_flags
from testing.runner import REPOSITORY
from tests.functional.launch import launch

_CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
_SCRIPTS = ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py")
_PATCH = REPOSITORY / "patches" / "megatron-lm-core_v0.19.0.patch"

pytestmark = pytest.mark.skipif(
    not _CHECKOUT, reason="MEGATRON_LM_PATH does not name a Megatron-LM checkout (tag core_v0.19.0)"
)

_SHAPE = ModelShape(2, 32, 4, 4, 16)
_FLAGS = (*plain_flags(_SHAPE, vocabulary=127, microbatches=2, iterations=2), "--lr", "1e-3")


def _plan(path: Path) -> Path:
    stages = tuple(Stage((1,), (Replica((rank,), (0, 1)),)) for rank in range(2))
    save_plan(Plan(_SHAPE, TrainingShape(1, 2), stages), path)
    return path


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "run"])
def test_the_checkouts_script_trains_under_a_plan(tmp_path: Path, patched: bool) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in _SCRIPTS:
        shutil.copy(Path(_CHECKOUT) / name, scripts)
    command = ["-m", "megatron_het.run", str(scripts / _SCRIPTS[0])]
    if patched:
        subprocess.run(["git", "init", "-q"], cwd=scripts, check=True)
        subprocess.run(["git", "apply", str(_PATCH)], cwd=scripts, check=True)
        command = command[2:]
    from megatron_het.device import activate

    plan = _plan(tmp_path / "plan.json")
    arguments = [*_FLAGS, *activate().default_flags(), "--het-plan", str(plan)]
    said = launch(2, [*command, *arguments], tmp_path / "log.txt", timeout_s=180)
    assert "iteration        2/       2" in said
    assert "het: plan" in said
