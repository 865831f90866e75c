"""Programs, plans, launch files and refusals are the recorded ones (``python -m tests.golden --update``)."""

import pytest

from tests.golden import corpus

PARTS = 5  # of the plans, which take longest; each has plans of every schedule


@pytest.mark.parametrize("kind", [kind for kind in corpus.KINDS_OF_OUTPUT if kind != "plans"])
def test_outputs_are_the_recorded_ones(kind: str) -> None:
    found = corpus.differences(kind, corpus.KINDS_OF_OUTPUT[kind]())
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, PARTS))])
def test_plans_are_the_recorded_ones(part: int) -> None:
    names = list(corpus.PLANS)[part::PARTS]
    found = corpus.differences("plans", {name: corpus.plan_entry(name) for name in names}, of=names)
    assert not found, "\n".join(found)


def test_records_are_of_everything() -> None:
    assert len(corpus.read("plans")) == len(corpus.PLANS) >= 40
    assert corpus.read("programs").keys() == corpus.program_rows().keys()
    assert {name.partition("/")[0] for name in corpus.read("emitted")} == set(corpus.EMITTED)


def test_a_change_is_told_by_name() -> None:
    """A plan whose file has other bytes, and a refusal in other words."""
    plans = corpus.read("plans")
    name = next(name for name, body in plans.items() if " s; " in body)
    head, _, rest = plans[name].partition("; ")
    (said,) = corpus.differences("plans", {**plans, name: f"{head}x; {rest}"})
    assert said.startswith(f"plans: {name}\n") and f"+{head}x" in said
    text = corpus.programs_of(corpus.program_rows()["gpipe"], "gpipe")
    assert corpus.read("programs")["gpipe"].endswith(corpus.digest(text))
    assert corpus.digest(text) != corpus.digest(text.replace("0", "1", 1))
