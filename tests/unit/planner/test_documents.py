"""Packed documents: what their lengths leave of attention, in closed form, by slices, and with a profile."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_het.plan import Plan
from tests.unit.planner import eight_layers
from tools.planner.costs.build import as_said, build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layer import Spread
from tools.planner.costs.schedules.pipelines import SlimPipe
from tools.planner.costs.simulation import simulate_candidate
from tools.planner.errors import PlannerError
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Shared, drawn, read_lengths
from tools.planner.report.tables import summary, summary_tables

LENGTH = 131_072
LONG_TAILED = (1000, 1500, 2000, 4000, 8000, 100_000)
SLIMPIPE = SlimPipe()
STAGES = (Stage(4, (Group(0, 8, 1),)), Stage(4, (Group(0, 8, 1),)))
SLICED = Candidate(STAGES, 1, schedule="slimpipe", slices=8)


def model(**changed: object) -> Model:
    return eight_layers.model(**{"seq_length": LENGTH, "global_batch_size": 4, **changed})


def estimator(**changed: object) -> Estimator:
    return eight_layers.estimator(model(**changed))


def planned(priced: Estimator, candidate: Candidate) -> tuple[Plan, float]:
    estimate = priced.estimate(candidate)
    plan = build_plan(priced, candidate, estimate)
    return plan, simulate_candidate(priced, candidate, estimate, plan).iteration_s


def test_what_is_left_of_attention() -> None:
    """Documents of one length that divides the sequence, with and without a window; longer ones change nothing."""
    assert model().attention_share == 1
    whole = LENGTH * (LENGTH + 1) / 2
    assert model(document_lengths=(1024,)).attention_share == pytest.approx(LENGTH // 1024 * 1024 * 1025 / 2 / whole)
    assert model(document_lengths=(64 * LENGTH,)).attention_share > 0.98
    near = {"attention_window": 256, "windowed_layers": 1.0}
    kept = model(document_lengths=(256,), **near)
    assert kept.attention_share == pytest.approx(LENGTH // 256 * 256 * 257 / 2 / (256 * 257 / 2 + (LENGTH - 256) * 256))


def test_context_parallel_ranks_send_what_sees_keys_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has the first and the last quarter of a sequence, rank 1 the two between."""
    assert model().shared(2, 1).sent == 1
    assert model(document_lengths=(1024,)).shared(2, 1).sent == 0
    assert model(document_lengths=(64 * LENGTH,)).shared(2, 1).sent == pytest.approx(0.75, abs=0.02)
    # Two of four blocks begin within a document of the other rank, which ends soon.
    assert model(document_lengths=4000).shared(2, 1, cut=True).sent == pytest.approx(
        2 / 4 * 4000 / (LENGTH / 4), rel=0.4
    )
    assert model(attention_window=257, windowed_layers=1.0).shared(2, 1).sent == pytest.approx(2 * 256 / LENGTH)
    # A slice sees those before it, of which both ranks have parts.
    assert model(document_lengths=(LENGTH,)).shared(2, 4).sent == pytest.approx((0.75 + 3) / 4)
    few = estimator(document_lengths=(1024,)).unit(0, 1, 1, "none", Spread(2))
    monkeypatch.setattr(Model, "shared", lambda *_, **__: Shared(1.0))
    every = estimator(document_lengths=(1024,)).unit(0, 1, 1, "none", Spread(2))
    assert few.layer_f < every.layer_f and few.layer_b < every.layer_b


def test_whole_documents_are_planned_where_they_gain() -> None:
    """And priced as the plan says them; not where several sequences are computed together."""
    stages = (Stage(8, (Group(0, 1, 1),)),)
    priced, shared = estimator(document_lengths=1500), Candidate(stages, 1, cp=4)
    whole, cut = (priced.model.shared(4, 1, cut=is_cut) for is_cut in (False, True))
    assert whole.whole and whole.sent < 0.3 * cut.sent and 1 < whole.most < cut.most
    plan, _ = planned(priced, shared)
    assert plan.schedule.parameters["cp_documents"] == "whole"
    bare = replace(plan, schedule=replace(plan.schedule, parameters={}))
    read = [as_said(priced, candidate_of(made, priced.cluster)[0], made) for made in (plan, bare)]
    assert [each.cuts_documents for each in read] == [False, True]
    seconds = [found.iteration_s for each in read if (found := priced.estimate(each))]
    assert seconds[0] < seconds[1]
    said = " ".join(map(str, summary_tables(summary(priced, shared, priced.estimate(shared), None))))
    assert f"{100 * whole.sent:.1f} % of the queries" in said and f"cut by places {100 * cut.sent:.1f} %" in said
    for other in (shared._replace(micro_batch_size=2), shared._replace(cp=1)):
        assert "cp_documents" not in planned(priced, other)[0].schedule.parameters
    assert "cp_documents" not in planned(estimator(), shared)[0].schedule.parameters
    # A slice has little room for one on each of eight ranks, and their earlier parts lie elsewhere.
    assert not model(document_lengths=16_000).shared(8, 8).whole


def test_documents_are_drawn_alike_and_go_on_in_the_next_sequence() -> None:
    drawn.cache_clear()
    first = drawn(4000, LENGTH)
    drawn.cache_clear()
    assert first == drawn(4000, LENGTH)
    assert all(starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < LENGTH for starts in first)
    begun = sum(len(starts) - 1 for starts in first)
    assert LENGTH * len(first) / begun == pytest.approx(4000, rel=0.1)


def test_attention_is_priced_by_documents() -> None:
    """In the layer of the catalog, and in useful operations."""
    whole, packed = (estimator(document_lengths=lengths) for lengths in (None, LONG_TAILED))
    one, other = (p.costs.cost("H100-SXM", "layer", 1, 1, "none") for p in (whole, packed))
    share = packed.model.attention_share
    assert other.attention_forward_s / one.attention_forward_s == pytest.approx(share, rel=0.1)
    assert one.forward_s - other.forward_s == pytest.approx(one.attention_forward_s - other.attention_forward_s)
    assert packed.model.iteration_flops < whole.model.iteration_flops


def test_slices_have_equal_work() -> None:
    """They are chosen with documents, cut as the ranks cut them, and shorter in time than equal slices."""
    priced = estimator(document_lengths=LONG_TAILED)
    plan, seconds = planned(priced, SLICED)
    assert plan.schedule.parameters["slice_lengths"] == "work"
    parts = SLIMPIPE.slice_parts(priced.model, plan)
    assert len({part.tokens for part in parts[0]}) > 1
    assert sum(part.attention for row in parts for part in row) / len(parts) == pytest.approx(
        priced.model.attention_share, rel=0.5
    )
    given = {**plan.schedule.parameters, "slice_lengths": "equal"}
    equal = replace(plan, schedule=replace(plan.schedule, parameters=given))
    estimate = priced.estimate(SLICED)
    assert seconds < simulate_candidate(priced, SLICED, estimate, equal).iteration_s
    assert "slice_lengths" not in planned(estimator(), SLICED)[0].schedule.parameters


def test_the_exchange_is_planned_by_documents() -> None:
    """The simulated program gives away only what slices see: less than without documents."""
    (_, whole), (plan, packed) = (
        planned(estimator(document_lengths=lengths), SLICED._replace(exchange=True)) for lengths in (None, LONG_TAILED)
    )
    assert packed < whole
    parts = SLIMPIPE.slice_parts(model(document_lengths=LONG_TAILED), plan)
    assert any(not share for row in parts for part in row for share in part.units)


@pytest.mark.parametrize("lengths", [None, LONG_TAILED], ids=["whole", "packed"])
def test_an_exchange_between_slices_of_equal_work_is_priced(lengths: tuple[int, ...] | None) -> None:
    """It leaves them as they are: there is little left to even out, and nothing gets longer."""
    priced = estimator(document_lengths=lengths)
    estimate = priced.estimate(SLICED)
    assert estimate is not None
    plan, _ = planned(priced, SLICED)

    def iteration_s(**given: object) -> float:
        parameters = {**plan.schedule.parameters, "slice_lengths": "work", **given}
        made = replace(plan, schedule=replace(plan.schedule, parameters=parameters))
        candidate = SLICED._replace(exchange="context_exchange" in given)
        return simulate_candidate(priced, candidate, estimate, made).iteration_s

    without = iteration_s()
    assert 0.8 * without < iteration_s(context_exchange=True, exchange_idle=True) <= 1.05 * without


def test_lengths_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("12\n7, 100\n")
    assert read_lengths(str(file)) == (12, 7, 100)
    file.write_text("[12, 7]")
    assert read_lengths(str(file)) == (12, 7)
    assert read_lengths("1500") == 1500
    for text, problem in (("12 -3", "-3 tokens"), ("many", "many"), ("", "0 lengths")):
        file.write_text(text)
        with pytest.raises(PlannerError, match=problem):
            read_lengths(str(file))
    with pytest.raises(PlannerError, match="absent"):
        read_lengths(str(tmp_path / "absent"))
    with pytest.raises(ValidationError, match="0 tokens"):
        model(document_lengths=0)
