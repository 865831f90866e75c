"""Operating points, resuming, the search for the largest batch, and link fits."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.planner.errors import PlannerError
from tools.planner.inputs.profile_schema import (
    DeviceProfile,
    LayerTiming,
    Profile,
    ProfiledExperts,
    ProfiledLatent,
    ProfiledModel,
)
from tools.planner.profile.settings import (
    Point,
    ProfileSettings,
    check_same_model,
    check_settings,
    fit_line,
    largest,
    missing_points,
    parse_numbers,
)

MODEL = ProfiledModel(64, 128, 4, 2, 96, 32, "fp32")


def settings(**changes: object) -> ProfileSettings:
    return dataclasses.replace(ProfileSettings(MODEL, "profile.json", ("cpu",)), **changes)  # type: ignore[arg-type]


def test_repeated_points_are_measured_once() -> None:
    points = settings(micro_batch_sizes=(1, 2), recompute=("none", "full")).points()
    assert len(points) == len(set(points)) == 2 * (2 + 2)  # embedding, head, and the layer twice
    assert Point("layer", 2, 1, 32, "full") in points
    assert Point("head", 2, 1, 32, "full") not in points


EXPERTS = dataclasses.replace(MODEL, experts=ProfiledExperts(4, 2, 64, dense=True))


def test_settings_survive_the_way_to_the_workers() -> None:
    one = settings(micro_batch_sizes=(1, 4), tp=(1, 2), kinds=("a", "b"))
    assert ProfileSettings.from_json(one.to_json()) == one
    latent = dataclasses.replace(EXPERTS, latent=ProfiledLatent(16, 16, 16, 8, 16))
    assert ProfileSettings.from_json(settings(model=latent).to_json()).model == latent


def test_experts_are_measured_divided_and_beside_layers_without() -> None:
    found = {(p.layer, p.tp, p.ep) for p in settings(model=EXPERTS, tp=(1, 2), ep=(1, 2)).points()}
    assert {t for t in found if t[0] == "layer"} == {("layer", 1, 1), ("layer", 2, 1), ("layer", 2, 2)}
    assert {t for t in found if t[0] == "dense"} == {("dense", 1, 1), ("dense", 2, 1)}
    assert ("layer", 2, 2) not in {(p.layer, p.tp, p.ep) for p in settings(tp=(1, 2), ep=(1, 2)).points()}


def test_windows_are_measured_where_layers_have_them() -> None:
    some, all_of_them = (dataclasses.replace(MODEL, window=8, windowed=every) for every in (False, True))
    assert {p.windowed for p in settings(model=some).points() if p.layer == "layer"} == {False, True}
    assert {p.windowed for p in settings(model=all_of_them).points() if p.layer == "layer"} == {True}
    assert not any(p.windowed for p in settings(model=some).points() if p.layer != "layer")


def test_resuming_measures_only_what_a_kind_lacks() -> None:
    one = settings(micro_batch_sizes=(1, 2))
    done = one.points()[:4]
    timings = [LayerTiming(p.layer, p.micro_batch_size, p.tp, p.slice_tokens, 1.0, 2.0, 0.1, 10, 10, 10) for p in done]
    profile = Profile(MODEL, [DeviceProfile("a", 1, 1, timings), DeviceProfile("b", 1, 1, timings[:2])])
    assert missing_points(one, profile, ["a"]) == one.points()[4:]
    assert missing_points(one, profile, ["a", "b"]) == one.points()[2:]
    assert missing_points(one, None, ["a"]) == one.points()


@pytest.mark.parametrize(
    ("changes", "world", "words"),
    [
        ({"tp": (3,)}, 6, "num_attention_heads"),
        ({"tp": (4,)}, 2, "does not divide the 2 devices"),
        ({"slice_tokens": (5,)}, 1, "none of them divides the sequence length"),
        ({"kinds": ("a", "b")}, 3, "one per rank"),
        ({"recompute": ("some",)}, 1, "must be one of"),
        ({"micro_batch_sizes": (0,)}, 1, "at least 1"),
        ({"window_s": 0.0}, 1, "must be positive"),
        ({"ep": (2,), "tp": (1, 2)}, 2, "has no experts"),
        ({"model": EXPERTS, "ep": (3,), "tp": (1, 2)}, 2, "does not divide the 4 experts"),
        ({"model": EXPERTS, "ep": (4,), "tp": (1, 2)}, 4, "divides none of the TP sizes"),
        ({"devices_per_node": 2}, 3, "does not divide the 3 ranks"),
    ],
)
def test_settings_that_cannot_be_measured(changes: dict[str, object], world: int, words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        check_settings(settings(**changes), world)


def test_slices_that_do_not_divide_are_left_out() -> None:
    length = MODEL.seq_length
    some = settings(slice_tokens=(length, length // 2, 5))
    check_settings(some, 1)
    assert {point.slice_tokens for point in some.points()} == {length, length // 2}
    assert f"--slice-tokens 5: left out, because slices of equal length must divide the sequence length {length}" in (
        some.left_out()
    )
    assert str(length // 4) in some.left_out().rpartition(":")[2]
    assert settings(slice_tokens=(length,)).left_out() == ""


def test_profiles_of_other_models_are_refused() -> None:
    other = dataclasses.replace(MODEL, precision="bf16", name="other")
    with pytest.raises(PlannerError, match=r"model\.precision = 'bf16'"):
        check_same_model(Profile(other), settings())
    check_same_model(Profile(dataclasses.replace(MODEL, name="other name")), settings())


def test_numbers() -> None:
    assert parse_numbers("1, 2,4", "--tp") == (1, 2, 4)
    with pytest.raises(PlannerError, match="--tp"):
        parse_numbers("1,x", "--tp")


@given(st.integers(min_value=0, max_value=5000))
def test_largest_finds_the_border_in_few_runs(border: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= border

    assert largest(fits) == border
    assert len(tried) <= 2 * (border.bit_length() + 1)


def test_largest_stops_at_its_limit() -> None:
    assert largest(lambda size: True, limit=64) == 64


@given(st.floats(min_value=1e-6, max_value=1e-2), st.floats(min_value=1e6, max_value=1e12))
def test_an_exact_line_is_found(latency_s: float, bytes_per_s: float) -> None:
    samples = [(n, latency_s + n / bytes_per_s) for n in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    found_latency_s, found_bytes_per_s = fit_line(samples)
    for n, seconds in samples:
        assert found_latency_s + n / found_bytes_per_s == pytest.approx(seconds, rel=1e-3)


def test_a_fit_never_has_a_negative_latency() -> None:
    latency_s, bytes_per_s = fit_line([(1000, 1e-4), (2000, 4e-4), (4000, 9e-4)])
    assert latency_s == 0.0 and bytes_per_s > 0
    assert fit_line([(1000, 2e-3), (4000, 1e-3)])[1] > 0
    with pytest.raises(ValueError, match="two message sizes"):
        fit_line([(1000, 1e-3), (1000, 2e-3)])
