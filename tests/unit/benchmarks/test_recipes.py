"""Every flag of Megatron's recipes runs under a plan, or is refused with a reason; the page says the same."""

import shutil
from pathlib import Path

import pytest

from benchmarks import recipes
from benchmarks.machine import write_between_marks
from megatron_het.plan import PlanError


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    return recipes.fates()


def test_every_flag_has_a_fate(found: dict[str, dict[str, str]]) -> None:
    for name, recipe in recipes.recipes().items():
        assert set(found[name]) == set(recipe["flags"]), name
    own = (recipes.RUNS, recipes.PLANNED, recipes.FOREIGN, recipes.OF_FSDP)
    refused = {flag for by_flag in found.values() for flag, word in by_flag.items() if word not in own}
    assert refused == {"ckpt-format", "hybrid-override-pattern", "step-batch-size-schedule", "use-megatron-fsdp"}
    assert "--het-zero 3" in found["Llama 3 8B, FSDP"]["use-megatron-fsdp"]


def test_a_refusal_of_something_else_is_not_hidden() -> None:
    flags = {"num-layers": "4", "hidden-size": "64", "num-attention-heads": "3", "seq-length": "64"}
    with pytest.raises(PlanError):
        recipes.fate(flags, recipes.megatron_parser())


def test_the_page_is_as_the_code_says(found: dict[str, dict[str, str]], tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "models.md"
    made = Path(shutil.copy(page, tmp_path))
    write_between_marks(made, "benchmarks.recipes", recipes.tables(found))
    again = "run python -m benchmarks.recipes --json OUT --markdown docs/models.md"
    assert made.read_text() == page.read_text(), again
