"""The families of ``examples/models`` at their small size equal stock Megatron in one process under a plan each.

``benchmarks/models.py`` has all of them under every schedule and feature.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.combinations import start_problems
from benchmarks.models import case_for
from testing.cases import TRAINING_FLAGS, machine_flags
from testing.combination_cases import pair_row
from testing.compare import Differences
from testing.families import FOLDER, MODELS, printed
from testing.feature_cases import is_routed
from testing.runner import words
from tests.functional.selected import tiers

BAR = 1e-5
# Different parts of the product; the families under all of them are in the table.
ROWS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"schedule": "slimpipe", "context_exchange": True, "tp": "by stage"},
    "deepseek_v3": {"schedule": "interleaved", "tp": "within a stage"},
    "gpt2": {"schedule": "zb-v", "tied": True, "vocabulary": True},
    "gpt3": {"schedule": "gpipe", "routing": "uneven", "overlap": "gradients"},
    "gpt_oss": {"schedule": "slimpipe", "vocabulary": True},
    "llama3": {"schedule": "slimpipe", "context_exchange": True, "cp": 2},
    "mistral": {"schedule": "1f1b", "tp": "within a stage", "recompute": "selective"},
    "mixtral": {"schedule": "slimpipe", "context_exchange": True},
    "qwen2_5": {"schedule": "1f1b", "microbatches": "unequal", "tied": True},
    "qwen3": {"schedule": "v-half", "tp": "by stage", "layers": "uneven"},
    "qwen3_moe": {"schedule": "ministage", "window": "exact", "distributed_optimizer": True},
}
BY_NAME = {name: case_for(name, pair_row(row.items()), name, 0) for name, row in ROWS.items()}
FULL = {"deepseek_v3", "gpt2", "gpt3", "llama3", "mistral", "qwen3_moe"}


def test_every_family_is_trained() -> None:
    assert sorted(ROWS) == list(MODELS)


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences) -> None:
    assert max(found.gradient, found.norm) <= BAR, found
    # Two scores of experts that are equal up to rounding may be ordered otherwise in a later step.
    assert found.loss <= (1e-3 if is_routed(BY_NAME[name]) else BAR), found


def test_full_sizes_start_under_a_plan(tmp_path: Path) -> None:
    others = (
        *TRAINING_FLAGS,
        *machine_flags(),
        *words("--tokenizer-type NullTokenizer --train-iters 1 --eval-interval 1 --mock-data"),
    )
    starts = []
    for name in MODELS:
        flags = printed(name, "full")
        stages = 2 - int(flags[flags.index("--num-layers") + 1]) % 2  # equal stages
        own = words(f"--het-schedule 1f1b --pipeline-model-parallel-size {stages}")
        starts.append((2, (*flags, *others, *own)))
    found = dict(zip(MODELS, start_problems(starts, tmp_path), strict=True))
    assert found == {name: [] for name in MODELS}


@pytest.mark.parametrize("given", [[], ["huge"], ["small; touch pwned"]])
def test_a_script_takes_two_sizes_only(given: list[str], tmp_path: Path) -> None:
    for file in sorted(FOLDER.glob("*.sh")):
        done = subprocess.run(["bash", str(file), *given], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr == f"usage: {file.name} full|small\n" and not done.stdout
    assert not list(tmp_path.iterdir())
