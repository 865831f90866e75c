"""The account of memory: categories by life, and peaks by iteration."""

from __future__ import annotations

from megatron_het.dry_run.tracker import ACTIVATIONS, OTHER, PARAMETERS, TEMPORARIES, Ledger, Moment


def hold(ledger: Ledger, size_bytes: int) -> int:
    """A storage that appears now."""
    life = ledger.open()
    ledger.change(life, size_bytes)
    return life


def free(ledger: Ledger, life: int, size_bytes: int) -> None:
    """It dies now."""
    ledger.change(life, -size_bytes)
    ledger.close(life)


def test_categories_are_told_by_mark_or_by_life() -> None:
    ledger = Ledger()
    weights, table = hold(ledger, 100), hold(ledger, 7)
    ledger.begin(Moment(0, "F0", True))
    kept, scratch = hold(ledger, 10), hold(ledger, 1000)
    free(ledger, scratch, 1000)
    ledger.begin(Moment(0, "B0", True))
    free(ledger, kept, 10)
    ledger.begin(Moment(0, "optimizer", False))
    step = hold(ledger, 50)
    free(ledger, step, 50)
    ledger.mark(weights, PARAMETERS)
    names = [ledger.category(life) for life in (weights, table, kept, scratch, step)]
    assert names == [PARAMETERS, OTHER, ACTIVATIONS, TEMPORARIES, TEMPORARIES]


def test_the_peak_of_an_iteration_starts_with_what_lives_before_it() -> None:
    ledger = Ledger()
    weights = hold(ledger, 100)
    ledger.mark(weights, PARAMETERS)
    big = hold(ledger, 900)
    free(ledger, big, 900)
    for iteration, size in ((0, 300), (1, 200)):
        ledger.begin(Moment(iteration, f"F{iteration}", True))
        kept = hold(ledger, size)
        ledger.begin(Moment(iteration, f"B{iteration}", True))
        scratch = hold(ledger, 5)
        free(ledger, scratch, 5)
        free(ledger, kept, size)
    assert [ledger.peak(i).total_bytes for i in (-1, 0, 1)] == [1000, 405, 305]
    last = ledger.peak(1)
    assert last.label == "B1"
    assert {k: v for k, v in last.by_category.items() if v} == {PARAMETERS: 100, ACTIVATIONS: 200, TEMPORARIES: 5}
    assert last.category_peaks[TEMPORARIES] == 5


def test_a_storage_that_comes_back_has_a_life_of_its_own() -> None:
    ledger = Ledger()
    ledger.begin(Moment(0, "F0", True))
    first = hold(ledger, 8)
    free(ledger, first, 8)
    again = hold(ledger, 8)
    ledger.begin(Moment(0, "B0", True))
    free(ledger, again, 8)
    assert [ledger.category(life) for life in (first, again)] == [TEMPORARIES, ACTIVATIONS]
